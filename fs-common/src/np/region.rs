//! A region of memory that is larger than the DRAM it may use: which page has which frame.
//!
//! # How it works
//! Making a region touches no page. A page gets a frame when somebody uses it: zeros at the first time (a *minor* fault), its bytes from the backing
//! file later (a *major* one). When there is no free frame, the clock chooses a page that was not used since its last turn; if it was written, it goes
//! to the backing file first.
//!
//! Out: hide the page from RNICs (version odd), wait for their WRITEs, write it if it is dirty, say that it is out (version even), use the frame. In: fill
//! the frame, then show it. What a WRITE puts into the page while it is on its way goes to the black hole, and its initiator sees that the version has
//! moved. If the device refuses the page, it is shown again, in the frame that it never left.
//!
//! # Locks
//! One lock guards the records. It is not held while the device is used: a page on its way is *busy*, and whoever wants it waits. Nobody waits for a
//! page while it has pinned another one, or made one busy, but for the frame of a victim: victims are never waited for.
//!
//! # Invariants
//! * A frame belongs to one page, or is free, or is in the hands of one thread that has made its page busy.
//! * A pinned page keeps its frame. Pins last for one copy.
//! * No more frames than the budget hold bytes.

use super::backing::{Backing, Page};
use crate::ids::PAGE_SIZE;
use crate::memory::SharedMemory;
use crate::memory::paged::{FIRST_FRAME, PagedMemory};
use crate::region::{MagicPattern, PATTERN_LEN};
use crate::world::Random;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long WRITEs to a page are waited for, before another page is chosen. They take microseconds unless their peer has stopped.
const WRITE_PATIENCE: Duration = Duration::from_millis(5);
/// How long a fault waits for a frame.
const FRAME_PATIENCE: Duration = Duration::from_secs(20);
/// The smallest budget: so many threads may have a page in hand at once.
const FRAMES_MIN: u32 = 32;
/// Frames whose memory is made together, at the first use of one of them. The system's page fault takes longer than all else of a minor fault.
const MADE_TOGETHER: u32 = 16;

/// Why an access failed.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The range does not lie in the region, or an atomic is not aligned to eight bytes.
    #[error("bytes {offset} to {} do not lie in a region of {region_len} bytes, or are not aligned", offset.saturating_add(*len))]
    Range {
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// The region's length.
        region_len: u64,
    },
    /// The device failed.
    #[error("the device behind the region cannot {action} page {page}; look at its log: {source}")]
    Device {
        /// What was tried.
        action: &'static str,
        /// The page.
        page: u64,
        /// Why it failed.
        source: io::Error,
    },
    /// No page could leave DRAM.
    #[error("no page could leave DRAM for {} s: the device takes none, or peers hold them all; give the region more frames", FRAME_PATIENCE.as_secs())]
    NoFrame,
}

/// What happened in a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionFigures {
    /// Pages that got their first frame.
    pub minor_faults: u64,
    /// Pages that were read from the device.
    pub major_faults: u64,
    /// Pages that left.
    pub evictions: u64,
    /// Of these, those that were written to the device.
    pub written: u64,
    /// Pages that could not leave, because a peer wrote or the device failed.
    pub kept: u64,
    /// Pages that have a frame now.
    pub resident: u64,
}

#[derive(Default)]
struct Counters {
    minor: AtomicU64,
    major: AtomicU64,
    evictions: AtomicU64,
    written: AtomicU64,
    kept: AtomicU64,
}

/// A page that has a frame.
struct Resident {
    frame: u32,
    pins: u32,
    /// The owner's processor has written it.
    dirty: bool,
    /// The owner's processor has used it since the clock's hand came by.
    used: bool,
}

#[derive(Default)]
struct State {
    resident: HashMap<u64, Resident>,
    /// The page in each frame; `None`: it is free, or its page is on the way.
    page_of: Vec<Option<u64>>,
    free: Vec<u32>,
    /// Frames that a page has had.
    fresh: u32,
    /// Pages on their way in or out.
    busy: HashSet<u64>,
    /// Pages that the device has.
    backed: HashSet<u64>,
    hand: usize,
}

/// A region of memory larger than the DRAM it may use. See the module.
pub struct NpRegion {
    memory: Arc<PagedMemory>,
    backing: Arc<dyn Backing>,
    signature: MagicPattern,
    pages: u64,
    frames: u32,
    state: Mutex<State>,
    moved: Condvar,
    counters: Counters,
}

/// A page that keeps its frame until this is dropped.
struct Pinned<'r> {
    region: &'r NpRegion,
    page: u64,
    frame_at: usize,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        let mut state = self.region.state.lock();
        if let Some(resident) = state.resident.get_mut(&self.page) {
            resident.pins -= 1;
        }
        drop(state);
        self.region.moved.notify_all();
    }
}

/// A frame in the hands of who will fill it.
#[derive(Clone, Copy)]
struct Taken {
    frame: u32,
    /// No page has had it, so it is all zeros.
    is_blank: bool,
}

/// What became of a victim.
enum Evicted {
    Frame(u32),
    Kept(Option<RegionError>),
}

impl NpRegion {
    /// A region of `pages` pages that uses at most `frames` frames (at least 32) of 4 KiB; the other pages are in `backing`. All is zeros.
    ///
    /// # Errors
    /// The system has no memory for it.
    pub fn new(
        pages: u64,
        frames: u32,
        backing: Arc<dyn Backing>,
        random: &dyn Random,
    ) -> io::Result<Arc<Self>> {
        let mut pattern = [0; PATTERN_LEN];
        random.fill(&mut pattern);
        let signature = MagicPattern::new(pattern);
        let mut signature_page = [0; PAGE_SIZE];
        signature.fill(0, &mut signature_page);
        let frames = frames.max(FRAMES_MIN);
        Ok(Arc::new(Self {
            memory: Arc::new(PagedMemory::new(pages, frames, &signature_page)?),
            backing,
            signature,
            pages,
            frames,
            state: Mutex::default(),
            moved: Condvar::new(),
            counters: Counters::default(),
        }))
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.pages * PAGE_SIZE as u64
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// The memory, to register with a device.
    pub fn memory(&self) -> &Arc<PagedMemory> {
        &self.memory
    }

    /// What the signature page consists of.
    pub fn signature(&self) -> MagicPattern {
        self.signature
    }

    /// What happened so far.
    pub fn figures(&self) -> RegionFigures {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RegionFigures {
            minor_faults: load(&self.counters.minor),
            major_faults: load(&self.counters.major),
            evictions: load(&self.counters.evictions),
            written: load(&self.counters.written),
            kept: load(&self.counters.kept),
            resident: self.state.lock().resident.len() as u64,
        }
    }

    /// Checks a range.
    pub(super) fn check(&self, offset: u64, len: u64) -> Result<(), RegionError> {
        if offset.checked_add(len).is_some_and(|end| end <= self.len()) {
            return Ok(());
        }
        Err(RegionError::Range { offset, len, region_len: self.len() })
    }

    /// Copies a range out. Pages that are not there are swapped in.
    ///
    /// # Errors
    /// `RegionError`; a part of `out` may be filled.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RegionError> {
        self.each(offset, out.len(), false, |at, done, part| {
            self.memory.translated().frames().read(at, &mut out[done..done + part]);
        })
    }

    /// Copies bytes in. Pages that are not there are swapped in.
    ///
    /// # Errors
    /// `RegionError`; a part of the bytes may be written.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
        self.each(offset, bytes.len(), true, |at, done, part| {
            self.memory.translated().frames().write_word_last(at, &bytes[done..done + part]);
        })
    }

    /// As [`Self::read`], to other memory, in which there must be room.
    pub(super) fn copy_out(
        &self,
        offset: u64,
        to: &SharedMemory,
        to_offset: usize,
        len: usize,
    ) -> Result<(), RegionError> {
        self.each(offset, len, false, |at, done, part| {
            self.memory.translated().frames().copy_to(at, to, to_offset + done, part);
        })
    }

    /// As [`Self::write`], from other memory.
    pub(super) fn copy_in(
        &self,
        offset: u64,
        from: &SharedMemory,
        from_offset: usize,
        len: usize,
    ) -> Result<(), RegionError> {
        self.each(offset, len, true, |at, done, part| {
            from.copy_to_word_last(from_offset + done, self.memory.translated().frames(), at, part);
        })
    }

    /// Adds to the aligned word at `offset`, and returns what was there.
    ///
    /// # Errors
    /// `RegionError`; nothing is changed.
    pub fn fetch_add(&self, offset: u64, add: u64) -> Result<u64, RegionError> {
        self.atomic(offset, |word| word.fetch_add(add, Ordering::AcqRel))
    }

    /// Stores `swap` in the aligned word at `offset` if `expect` is there, and returns what was there.
    ///
    /// # Errors
    /// `RegionError`; nothing is changed.
    pub fn compare_swap(&self, offset: u64, expect: u64, swap: u64) -> Result<u64, RegionError> {
        self.atomic(offset, |word| {
            word.compare_exchange(expect, swap, Ordering::AcqRel, Ordering::Acquire).unwrap_or_else(|old| old)
        })
    }

    fn atomic(&self, offset: u64, change: impl FnOnce(&AtomicU64) -> u64) -> Result<u64, RegionError> {
        self.check(offset, 8)?;
        if !offset.is_multiple_of(8) {
            return Err(RegionError::Range { offset, len: 8, region_len: self.len() });
        }
        let pinned = self.pin(offset / PAGE_SIZE as u64, true)?;
        let at = pinned.frame_at + (offset % PAGE_SIZE as u64) as usize;
        Ok(change(self.memory.translated().frames().atomic_u64(at)))
    }

    /// Calls `copy` for each page's part of a range, while the page is pinned: offset in the frames, offset in the range, length.
    fn each(
        &self,
        offset: u64,
        len: usize,
        write: bool,
        mut copy: impl FnMut(usize, usize, usize),
    ) -> Result<(), RegionError> {
        self.check(offset, len as u64)?;
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let in_page = (at % PAGE_SIZE as u64) as usize;
            let part = (PAGE_SIZE - in_page).min(len - done);
            let pinned = self.pin(at / PAGE_SIZE as u64, write)?;
            copy(pinned.frame_at + in_page, done, part);
            done += part;
        }
        Ok(())
    }

    /// Whether all pages of a range can be had without the device.
    pub(super) fn is_quick(&self, offset: u64, len: u64) -> bool {
        let state = self.state.lock();
        let (first, last) =
            (offset / PAGE_SIZE as u64, offset.saturating_add(len.max(1) - 1) / PAGE_SIZE as u64);
        let mut spare = state.free.len() as u64 + u64::from(self.frames - state.fresh);
        (first..=last).all(|page| {
            if state.resident.contains_key(&page) && !state.busy.contains(&page) {
                return true;
            }
            let is_new = !state.backed.contains(&page) && !state.busy.contains(&page) && spare > 0;
            spare = spare.saturating_sub(1);
            is_new
        })
    }

    /// Gives a page a frame, and keeps it there.
    fn pin(&self, page: u64, write: bool) -> Result<Pinned<'_>, RegionError> {
        let deadline = Instant::now() + FRAME_PATIENCE;
        let mut state = self.state.lock();
        loop {
            if state.busy.contains(&page) {
                self.wait(&mut state, deadline)?;
                continue;
            }
            if let Some(resident) = state.resident.get_mut(&page) {
                resident.pins += 1;
                resident.dirty |= write;
                resident.used = true;
                let frame_at = resident.frame as usize * PAGE_SIZE;
                return Ok(Pinned { region: self, page, frame_at });
            }
            state.busy.insert(page);
            let filled = self.swap_in(&mut state, page, deadline);
            state.busy.remove(&page);
            self.moved.notify_all();
            let frame = filled?;
            state.page_of[frame as usize] = Some(page);
            state.resident.insert(page, Resident { frame, pins: 0, dirty: false, used: true });
        }
    }

    fn wait(&self, state: &mut MutexGuard<'_, State>, deadline: Instant) -> Result<(), RegionError> {
        if self.moved.wait_until(state, deadline).timed_out() { Err(RegionError::NoFrame) } else { Ok(()) }
    }

    /// Fills a frame with a page's bytes and shows it. The page is busy; the lock is given up meanwhile.
    fn swap_in(
        &self,
        state: &mut MutexGuard<'_, State>,
        page: u64,
        deadline: Instant,
    ) -> Result<u32, RegionError> {
        let Taken { frame, is_blank } = self.take_frame(state, deadline)?;
        let is_backed = state.backed.contains(&page);
        let frames = self.memory.translated().frames();
        let filled = MutexGuard::unlocked(state, || {
            let at = frame as usize * PAGE_SIZE;
            // Blank frames are taken in order.
            let number = frame - FIRST_FRAME;
            if is_blank && number.is_multiple_of(MADE_TOGETHER) {
                let together = MADE_TOGETHER.min(self.frames - number);
                frames.make_pages(at, together as usize * PAGE_SIZE);
            }
            if is_backed {
                let mut bytes: Page = [0; PAGE_SIZE];
                self.backing.read(page, &mut bytes).map_err(|source| RegionError::Device {
                    action: "read",
                    page,
                    source,
                })?;
                frames.write(at, &bytes);
                self.counters.major.fetch_add(1, Ordering::Relaxed);
            } else {
                if !is_blank {
                    frames.fill(at, PAGE_SIZE, 0);
                }
                self.counters.minor.fetch_add(1, Ordering::Relaxed);
            }
            self.memory.show(page, frame, false);
            Ok(())
        });
        if filled.is_err() {
            state.free.push(frame);
        }
        filled.map(|()| frame)
    }

    /// A frame without a page.
    fn take_frame(&self, state: &mut MutexGuard<'_, State>, deadline: Instant) -> Result<Taken, RegionError> {
        let used = |frame| Taken { frame, is_blank: false };
        let mut failed = 0;
        loop {
            if let Some(frame) = state.free.pop() {
                return Ok(used(frame));
            }
            if state.fresh < self.frames {
                state.fresh += 1;
                let frame = FIRST_FRAME + state.fresh - 1;
                state.page_of.resize(frame as usize + 1, None);
                return Ok(Taken { frame, is_blank: true });
            }
            let Some(victim) = self.choose(state) else {
                self.wait(state, deadline)?;
                continue;
            };
            match self.evict(state, victim) {
                Evicted::Frame(frame) => return Ok(used(frame)),
                // A device that refuses one page may take another. It is not asked for ever.
                Evicted::Kept(Some(error)) if failed >= self.frames.min(64) => return Err(error),
                Evicted::Kept(_) => failed += 1,
            }
            if Instant::now() > deadline {
                return Err(RegionError::NoFrame);
            }
        }
    }

    /// The next page that may leave: not pinned, not busy, and not used since the clock's hand came by.
    fn choose(&self, state: &mut State) -> Option<u64> {
        for _ in 0..2 * state.page_of.len() {
            state.hand = (state.hand + 1) % state.page_of.len();
            let Some(page) = state.page_of[state.hand] else { continue };
            if state.busy.contains(&page) {
                continue;
            }
            let Some(resident) = state.resident.get_mut(&page) else { continue };
            let was_used = std::mem::take(&mut resident.used) | self.memory.take_accessed(page);
            if !was_used && resident.pins == 0 {
                return Some(page);
            }
        }
        None
    }

    /// Takes a page's frame. The lock is given up meanwhile; the page is busy.
    fn evict(&self, state: &mut MutexGuard<'_, State>, page: u64) -> Evicted {
        let Some(resident) = state.resident.get(&page) else { return Evicted::Kept(None) };
        let (frame, own_dirty) = (resident.frame, resident.dirty);
        state.busy.insert(page);
        let mut wrote = false;
        let left = MutexGuard::unlocked(state, || {
            let dirty = self.memory.hide(page).is_dirty() || own_dirty;
            if !self.memory.wait_for_writes(page, WRITE_PATIENCE) {
                self.memory.show(page, frame, dirty);
                return Err(None);
            }
            if dirty {
                let mut bytes: Page = [0; PAGE_SIZE];
                self.memory.translated().frames().read(frame as usize * PAGE_SIZE, &mut bytes);
                if let Err(source) = self.backing.write(page, &bytes) {
                    self.memory.show(page, frame, dirty);
                    return Err(Some(RegionError::Device { action: "write", page, source }));
                }
                wrote = true;
            }
            self.memory.gone(page);
            Ok(())
        });
        state.busy.remove(&page);
        let evicted = match left {
            Ok(()) => {
                state.resident.remove(&page);
                state.page_of[frame as usize] = None;
                if wrote {
                    state.backed.insert(page);
                    self.counters.written.fetch_add(1, Ordering::Relaxed);
                }
                self.counters.evictions.fetch_add(1, Ordering::Relaxed);
                Evicted::Frame(frame)
            }
            Err(error) => {
                self.counters.kept.fetch_add(1, Ordering::Relaxed);
                Evicted::Kept(error)
            }
        };
        self.moved.notify_all();
        evicted
    }

    /// Puts a page out of DRAM now, if nobody uses it. For tests, benchmarks, and owners that know what they will not need.
    ///
    /// # Errors
    /// `Device`: the page stays.
    pub fn evict_page(&self, page: u64) -> Result<bool, RegionError> {
        let mut state = self.state.lock();
        let may_leave = state.resident.get(&page).is_some_and(|resident| resident.pins == 0);
        if !may_leave || state.busy.contains(&page) {
            return Ok(false);
        }
        match self.evict(&mut state, page) {
            Evicted::Frame(frame) => {
                state.free.push(frame);
                Ok(true)
            }
            Evicted::Kept(None) => Ok(false),
            Evicted::Kept(Some(error)) => Err(error),
        }
    }

    /// Swaps the pages of a range in.
    ///
    /// # Errors
    /// `RegionError`.
    pub fn bring_in(&self, offset: u64, len: u64) -> Result<(), RegionError> {
        self.check(offset, len)?;
        let pages = offset / PAGE_SIZE as u64..offset.saturating_add(len).div_ceil(PAGE_SIZE as u64);
        pages.into_iter().try_for_each(|page| self.pin(page, false).map(drop))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::np::MemoryBacking;
    use crate::world::SeededRandom;

    #[test]
    fn the_system_makes_frames_together_and_no_more_than_there_are() {
        let backing = Arc::new(MemoryBacking::default());
        let region = NpRegion::new(100, 40, backing, &SeededRandom::new(1)).expect("region");
        let made = || {
            let stat = rustix::fs::fstat(region.memory.translated().frames().fd()).expect("stat");
            // Blocks of 512 bytes.
            stat.st_blocks as usize * 512 / PAGE_SIZE
        };
        // The signature's page.
        assert_eq!(made(), 1);
        for (pages, frames) in [(1, 16), (16, 16), (17, 32), (32, 32), (33, 40), (100, 40)] {
            region.bring_in(0, pages * PAGE_SIZE as u64).expect("room");
            assert_eq!(made(), 1 + frames, "{pages} pages");
        }
        let mut bytes = [1; 2 * PAGE_SIZE];
        region.read(99 * PAGE_SIZE as u64 - 1, &mut bytes[..100]).expect("read");
        assert_eq!(bytes[..100], [0; 100]);
    }
}
