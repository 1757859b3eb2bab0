//! Pages come into frames, and leave them.
//!
//! # Runs
//! Pages that follow each other in the region come in together, with one access of the device, if an access of the region is to all of them; and leave
//! together, if none of them was used lately, with one access for those that are written and follow each other. One page of a run has to come or leave.
//! The others do without waiting for anything: no page on its way, no other frame than a free one, no peer that writes.

use super::{Evicted, NpRegion, Pinned, RegionError, Resident, State};
use crate::ids::PAGE_SIZE;
use crate::memory::HUGE_PAGE;
use crate::memory::paged::FIRST_FRAME;
use crate::np::backing::Page;
use parking_lot::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long WRITEs to a page are waited for, before another page is chosen. They take microseconds unless their peer has stopped.
const WRITE_PATIENCE: Duration = Duration::from_millis(5);
/// How long a fault waits for a frame.
pub(super) const FRAME_PATIENCE: Duration = Duration::from_secs(20);
/// Frames whose memory is made together, at the first use of one of them. The system's page fault takes longer than all else of a minor fault.
const MADE_TOGETHER: u32 = 16;
/// As many in a huge page, which is made where a region uses more than that.
const MADE_HUGE: u32 = (HUGE_PAGE / PAGE_SIZE) as u32;
/// Pages in a run.
const RUN_MAX: u32 = 16;
/// A run has at most this share of the frames, so that others find some.
const RUN_SHARE: u32 = 8;

/// A frame in the hands of who will fill it.
#[derive(Clone, Copy)]
struct Taken {
    frame: u32,
    /// No page has had it, so it is all zeros.
    is_blank: bool,
    /// So many frames, from this one on, are to be made first.
    to_make: u32,
}

/// A page on its way out.
struct Leaving {
    page: u64,
    frame: u32,
    dirty: bool,
    stays: bool,
    error: Option<std::io::Error>,
}

impl Leaving {
    fn is_for_device(&self) -> bool {
        self.dirty && !self.stays
    }

    fn is_written_with(&self, next: &Self) -> bool {
        self.is_for_device() && next.is_for_device() && self.page + 1 == next.page
    }
}

impl NpRegion {
    /// Gives a page a frame, and keeps it there. The pages behind it up to `end` are wanted, too.
    pub(super) fn pin(&self, page: u64, end: u64, write: bool) -> Result<Pinned<'_>, RegionError> {
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
            self.swap_in(&mut state, page, end, deadline)?;
        }
    }

    fn wait(&self, state: &mut MutexGuard<'_, State>, deadline: Instant) -> Result<(), RegionError> {
        if self.moved.wait_until(state, deadline).timed_out() { Err(RegionError::NoFrame) } else { Ok(()) }
    }

    /// Shows a page that has no frame, and those behind it up to `end` that are like it, as far as it goes. The lock is given up meanwhile.
    fn swap_in(
        &self,
        state: &mut MutexGuard<'_, State>,
        first: u64,
        end: u64,
        deadline: Instant,
    ) -> Result<(), RegionError> {
        let is_backed = state.backed.contains(&first);
        let end = end.min(first + u64::from(RUN_MAX.min(self.frames / RUN_SHARE)));
        let may_come = |state: &State, page: u64| {
            !state.busy.contains(&page)
                && !state.resident.contains_key(&page)
                && state.backed.contains(&page) == is_backed
        };
        let wanted = (first..end).take_while(|page| may_come(state, *page)).count();
        state.busy.insert(first);
        let mut taken = Vec::with_capacity(wanted);
        let filled = self.take_frame(state, wanted, deadline).and_then(|frame| {
            taken.push(frame);
            for page in first + 1..end {
                if !may_come(state, page) {
                    break;
                }
                let Some(frame) = self.spare_frame(state) else { break };
                state.busy.insert(page);
                taken.push(frame);
            }
            MutexGuard::unlocked(state, || self.fill(first, &taken, is_backed))
        });
        state.busy.remove(&first);
        for (page, (at, Taken { frame, .. })) in (first..).zip(taken.into_iter().enumerate()) {
            state.busy.remove(&page);
            if filled.as_ref().is_ok_and(|filled| at < *filled) {
                state.page_of[frame as usize] = Some(page);
                state.resident.insert(page, Resident { frame, pins: 0, dirty: false, used: true });
            } else {
                state.free.push(frame);
            }
        }
        self.moved.notify_all();
        filled.map(drop)
    }

    /// Fills frames with the bytes of pages that follow each other, which are busy, and shows them. Returns how many are shown; the first is.
    fn fill(&self, first: u64, taken: &[Taken], is_backed: bool) -> Result<usize, RegionError> {
        let frames = self.memory.translated().frames();
        taken.iter().for_each(|taken| self.make(taken));
        let mut filled = taken.len();
        if is_backed {
            let mut pages = vec![Page::ZERO; taken.len()];
            if self.backing.read(first, &mut pages).is_err() {
                // Another one of them may be what the device cannot read.
                filled = 1;
                self.backing.read(first, &mut pages[..1]).map_err(|source| RegionError::Device {
                    action: "read",
                    page: first,
                    source,
                })?;
            }
            for (page, taken) in pages[..filled].iter().zip(taken) {
                frames.write(taken.frame as usize * PAGE_SIZE, &page.0);
            }
            self.counters.major.fetch_add(filled as u64, Ordering::Relaxed);
        } else {
            for taken in taken.iter().filter(|taken| !taken.is_blank) {
                frames.fill(taken.frame as usize * PAGE_SIZE, PAGE_SIZE, 0);
            }
            self.counters.minor.fetch_add(filled as u64, Ordering::Relaxed);
        }
        (first..).zip(&taken[..filled]).for_each(|(page, taken)| self.memory.show(page, taken.frame, false));
        Ok(filled)
    }

    /// Makes the memory of a frame that needs it, and of those behind it.
    fn make(&self, taken: &Taken) {
        let frames = self.memory.translated().frames();
        let at = taken.frame as usize * PAGE_SIZE;
        if taken.to_make == 0 || taken.to_make == MADE_HUGE && frames.make_huge_page(at) {
            return;
        }
        // Without a huge page it is as many small ones: nobody else makes them.
        frames.make_pages(at, taken.to_make as usize * PAGE_SIZE);
    }

    /// A frame that no page has.
    fn spare_frame(&self, state: &mut State) -> Option<Taken> {
        if let Some(frame) = state.free.pop() {
            return Some(Taken { frame, is_blank: false, to_make: 0 });
        }
        if state.fresh == self.frames {
            return None;
        }
        let frame = FIRST_FRAME + state.fresh;
        state.fresh += 1;
        state.page_of.resize(frame as usize + 1, None);
        let mut to_make = 0;
        if state.fresh > state.made {
            let left = self.frames - state.made;
            let is_huge = frame.is_multiple_of(MADE_HUGE) && left >= MADE_HUGE;
            // Small pages end where a huge one begins.
            let to_huge = MADE_HUGE - frame % MADE_HUGE;
            to_make = if is_huge { MADE_HUGE } else { MADE_TOGETHER.min(left).min(to_huge) };
            state.made += to_make;
        }
        Some(Taken { frame, is_blank: true, to_make })
    }

    /// A frame without a page. If pages have to leave, `wanted` of them do if they can together.
    fn take_frame(
        &self,
        state: &mut MutexGuard<'_, State>,
        wanted: usize,
        deadline: Instant,
    ) -> Result<Taken, RegionError> {
        let mut failed = 0;
        loop {
            if let Some(taken) = self.spare_frame(state) {
                return Ok(taken);
            }
            let Some(victim) = self.choose(state) else {
                self.wait(state, deadline)?;
                continue;
            };
            match self.evict(state, victim, wanted) {
                Evicted { pages: 1.., .. } => {}
                // A device that refuses one page may take another. It is not asked for ever.
                Evicted { error: Some(error), .. } if failed >= self.frames.min(64) => return Err(error),
                Evicted { .. } => failed += 1,
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

    /// Frees a page's frame, and those of pages around it that were not used lately, `most` in all. The page has to be resident, and not busy. The lock
    /// is given up meanwhile; the pages are busy.
    pub(super) fn evict(&self, state: &mut MutexGuard<'_, State>, victim: u64, most: usize) -> Evicted {
        let may_leave = |page: &u64| {
            let resident = state.resident.get(page).filter(|_| !state.busy.contains(page));
            resident.is_some_and(|resident| {
                resident.pins == 0 && !resident.used && !self.memory.entry(*page).is_accessed()
            })
        };
        let before = (0..victim).rev().take(most - 1).take_while(may_leave).count();
        let behind = (victim + 1..self.pages).take(most - 1 - before).take_while(may_leave).count();
        let mut leaving = Vec::with_capacity(before + 1 + behind);
        for page in victim - before as u64..=victim + behind as u64 {
            let Resident { frame, dirty, .. } = state.resident[&page];
            leaving.push(Leaving { page, frame, dirty, stays: false, error: None });
            state.busy.insert(page);
        }
        MutexGuard::unlocked(state, || self.put_out(&mut leaving, victim));
        let mut evicted = Evicted::default();
        for Leaving { page, frame, dirty, stays, error } in leaving {
            state.busy.remove(&page);
            if stays {
                self.counters.kept.fetch_add(1, Ordering::Relaxed);
                let device = |source| RegionError::Device { action: "write", page, source };
                evicted.error = evicted.error.or(error.map(device));
                continue;
            }
            state.resident.remove(&page);
            state.page_of[frame as usize] = None;
            state.free.push(frame);
            if dirty {
                state.backed.insert(page);
                self.counters.written.fetch_add(1, Ordering::Relaxed);
            }
            self.counters.evictions.fetch_add(1, Ordering::Relaxed);
            evicted.pages += 1;
        }
        self.moved.notify_all();
        evicted
    }

    /// Hides pages, writes those that are dirty, and says of each that it is out, or shows it again.
    fn put_out(&self, leaving: &mut [Leaving], victim: u64) {
        for leaving in leaving.iter_mut() {
            leaving.dirty |= self.memory.hide(leaving.page).is_dirty();
            let patience = if leaving.page == victim { WRITE_PATIENCE } else { Duration::ZERO };
            leaving.stays = !self.memory.wait_for_writes(leaving.page, patience);
        }
        for together in leaving.chunk_by_mut(Leaving::is_written_with).filter(|some| some[0].is_for_device())
        {
            self.write_out(together);
        }
        for Leaving { page, frame, dirty, stays, .. } in leaving {
            if *stays {
                self.memory.show(*page, *frame, *dirty);
            } else {
                self.memory.gone(*page);
            }
        }
    }

    /// Writes pages that follow each other, one by one if the device does not take all of them.
    fn write_out(&self, together: &mut [Leaving]) {
        let mut pages = vec![Page::ZERO; together.len()];
        for (bytes, leaving) in pages.iter_mut().zip(&*together) {
            self.memory.translated().frames().read(leaving.frame as usize * PAGE_SIZE, &mut bytes.0);
        }
        let Err(error) = self.backing.write(together[0].page, &pages) else { return };
        if let [leaving] = together {
            (leaving.stays, leaving.error) = (true, Some(error));
        } else {
            together.iter_mut().for_each(|leaving| self.write_out(std::slice::from_mut(leaving)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::np::MemoryBacking;
    use crate::world::SeededRandom;
    use std::sync::Arc;

    fn region(pages: u64, frames: u32) -> (Arc<NpRegion>, Arc<MemoryBacking>) {
        let backing = Arc::new(MemoryBacking::default());
        let region = NpRegion::new(pages, frames, backing.clone(), &SeededRandom::new(1)).expect("region");
        (region, backing)
    }

    /// Pages of frames that the system has made, with the signature's.
    fn made(region: &NpRegion) -> usize {
        let stat = rustix::fs::fstat(region.memory.translated().frames().fd()).expect("stat");
        // Blocks of 512 bytes.
        stat.st_blocks as usize * 512 / PAGE_SIZE
    }

    fn bytes_of(page: u64) -> [u8; PAGE_SIZE] {
        [(page % 251) as u8 + 1; PAGE_SIZE]
    }

    /// Writes all pages, and puts them out.
    fn put_out(region: &NpRegion, pages: u64) {
        for page in 0..pages {
            region.write(page * PAGE_SIZE as u64, &bytes_of(page)).expect("written");
        }
        for page in 0..pages {
            // Some have left already.
            region.evict_page(page).expect("out");
        }
        assert_eq!(region.figures().resident, 0);
    }

    fn read(region: &NpRegion, first: u64, count: usize) -> Result<(), RegionError> {
        let mut found = vec![0; count * PAGE_SIZE];
        region.read(first * PAGE_SIZE as u64, &mut found)?;
        let expected: Vec<u8> = (first..).take(count).flat_map(bytes_of).collect();
        assert!(found == expected, "{count} pages from {first}");
        Ok(())
    }

    #[test]
    fn the_system_makes_frames_together_and_no_more_than_there_are() {
        let (region, _) = region(100, 40);
        assert_eq!(made(&region), 1);
        for (pages, frames) in [(1, 16), (16, 16), (17, 32), (32, 32), (33, 40), (100, 40)] {
            region.bring_in(0, pages * PAGE_SIZE as u64).expect("room");
            assert_eq!(made(&region), 1 + frames, "{pages} pages");
        }
        let mut bytes = [1; 2 * PAGE_SIZE];
        region.read(99 * PAGE_SIZE as u64 - 1, &mut bytes[..100]).expect("read");
        assert_eq!(bytes[..100], [0; 100]);
    }

    #[test]
    fn huge_pages_are_made_behind_the_first_small_ones_and_within_the_budget() {
        let frames = 2 * MADE_HUGE + 100;
        let (region, _) = region(4 * u64::from(MADE_HUGE), frames);
        let ready = |pages: u32| {
            region.bring_in(0, u64::from(pages) * PAGE_SIZE as u64).expect("room");
            made(&region) as u32 - 1
        };
        // Frame 2 is the first.
        let small = MADE_HUGE - FIRST_FRAME;
        assert_eq!(ready(small), small);
        // Where the system has no huge page, small ones are made.
        let with_huge = ready(small + 1);
        assert!([MADE_HUGE, MADE_TOGETHER].contains(&(with_huge - small)), "{with_huge}");
        assert_eq!(ready(frames), frames);
        assert_eq!(ready(4 * MADE_HUGE), frames);
    }

    #[test]
    fn pages_that_follow_each_other_come_and_leave_together() {
        let (region, backing) = region(400, 256);
        put_out(&region, 400);
        let before = backing.accesses();
        read(&region, 100, 40).expect("read");
        assert_eq!(backing.accesses() - before, 3, "sixteen, sixteen, eight");
        // One of them is there, and one was never written.
        let before = backing.accesses();
        read(&region, 96, 8).expect("read");
        assert_eq!(backing.accesses() - before, 1);
        // All frames are taken, and those of forty pages are used again.
        for page in 0..256 {
            region.write(page * PAGE_SIZE as u64, &bytes_of(page)).expect("written");
        }
        let (before, figures) = (backing.accesses(), region.figures());
        read(&region, 300, 32).expect("read");
        let after = region.figures();
        assert_eq!(
            (after.evictions - figures.evictions, after.major_faults - figures.major_faults),
            (32, 32)
        );
        assert_eq!(backing.accesses() - before, 4, "two runs in, and two out");
        (0..400).for_each(|page| read(&region, page, 1).expect("read"));
    }

    #[test]
    fn what_the_device_refuses_of_a_run_harms_no_other_page() {
        let (region, backing) = region(400, 256);
        put_out(&region, 400);
        backing.fail_reads(5, true);
        assert!(matches!(read(&region, 0, 16), Err(RegionError::Device { page: 5, .. })));
        read(&region, 0, 5).expect("read");
        read(&region, 6, 10).expect("read");
        backing.fail_reads(5, false);
        read(&region, 0, 256).expect("read");
        for page in 0..256 {
            region.write(page * PAGE_SIZE as u64, &bytes_of(page)).expect("written");
        }
        (0..256).filter(|page| page % 8 == 3).for_each(|page| backing.fail_writes(page, true));
        for first in (256..400).step_by(16) {
            read(&region, first, 16).expect("read");
        }
        let state = region.state.lock();
        assert!((0..256).filter(|page| page % 8 == 3).all(|page| state.resident[&page].dirty));
        assert!(state.busy.is_empty());
        drop(state);
        (0..400).for_each(|page| read(&region, page, 1).expect("read"));
    }
}
