//! A region of memory that is larger than the DRAM it may use: which page has which frame.
//!
//! # How it works
//! Making a region touches no page. A page gets a frame when somebody uses it: zeros at the first time (a *minor* fault), its bytes from the backing
//! file later (a *major* one). When there is no free frame, the clock chooses a page that was not used since its last turn; if it was written, it goes
//! to the backing file first. `swap` has all of this.
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

mod swap;

use super::backing::Backing;
use crate::ids::PAGE_SIZE;
use crate::memory::SharedMemory;
use crate::memory::paged::PagedMemory;
use crate::region::{MagicPattern, PATTERN_LEN};
use crate::world::Random;
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use swap::FRAME_PATIENCE;

/// The smallest budget: so many threads may have a page in hand at once.
const FRAMES_MIN: u32 = 32;

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
    /// Frames whose memory is made, or about to be.
    made: u32,
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

/// What became of pages that were to leave.
#[derive(Default)]
struct Evicted {
    /// So many have left.
    pages: u32,
    /// Why the device has not taken one.
    error: Option<RegionError>,
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
        let page = offset / PAGE_SIZE as u64;
        let pinned = self.pin(page, page + 1, true)?;
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
        let end = (offset + len as u64).div_ceil(PAGE_SIZE as u64);
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let in_page = (at % PAGE_SIZE as u64) as usize;
            let part = (PAGE_SIZE - in_page).min(len - done);
            let pinned = self.pin(at / PAGE_SIZE as u64, end, write)?;
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
        let Evicted { pages, error } = self.evict(&mut state, page, 1);
        error.map_or(Ok(pages > 0), Err)
    }

    /// Swaps the pages of a range in.
    ///
    /// # Errors
    /// `RegionError`.
    pub fn bring_in(&self, offset: u64, len: u64) -> Result<(), RegionError> {
        self.check(offset, len)?;
        let pages = offset / PAGE_SIZE as u64..offset.saturating_add(len).div_ceil(PAGE_SIZE as u64);
        pages.clone().try_for_each(|page| self.pin(page, pages.end, false).map(drop))
    }
}
