//! Changes of pages in frames without any wait: what the NIC engine does under a write grant.
//!
//! The rows of the page protocol are those of `change`: bytes into a frame, or a new page's frame published. What would need the disk, a frame that is
//! not there, or a lock that somebody has, is not done, and nothing is changed then.

use super::change::{Base, PageChange, PageOwner};
use super::frames::{Pins, PrivateFrame};
use super::{Pages, add};
use cuttlefs_common::ids::{PAGE_SIZE, PoolPage};

impl Pages {
    /// Makes all changes, each on another page, if their locks are free, and each page is in a frame, or is new and gets one of `frames`, in their
    /// order. The new pages stay in memory as long as the returned pins do. `None`: nothing was changed, and no frame taken.
    pub(crate) fn change_at_once(
        &self,
        owner: &impl PageOwner,
        changes: &[PageChange],
        bytes: &[u8],
        frames: &mut Vec<PrivateFrame>,
    ) -> Option<Pins> {
        let _guards = self.locks.try_lock_many(changes.iter().map(|change| change.pool))?;
        let is_in_place = |change: &PageChange| self.residency.load(change.pool).is_resident();
        let new = changes.iter().filter(|change| change.base == Base::Zeros).count();
        let is_stored = |change: &&PageChange| change.base == Base::Stored;
        if new > frames.len() || !changes.iter().filter(is_stored).all(is_in_place) {
            return None;
        }
        let mut frames = frames.drain(..new);
        let mut pins = Pins::new(self.frames().clone());
        let mut tally = self.tally(owner.ino());
        changes.iter().for_each(|change| tally.note(change.file_page.0, change.pool));
        drop(tally);
        for change in changes {
            let source = &bytes[change.offset_in_source..change.offset_in_source + change.len];
            let memory = self.frames().memory();
            // Listed first: a write-back that takes the list meanwhile waits for the page's lock next.
            owner.list_page(change.file_page, change.pool);
            match change.base {
                Base::Stored => self.residency.write_in_frame(change.pool, |at| {
                    memory.write(at + change.offset_in_page, source);
                }),
                Base::Zeros => {
                    let frame = frames.next().expect("there is one for each new page");
                    if change.len < PAGE_SIZE {
                        memory.fill(frame.offset(), PAGE_SIZE, 0);
                    }
                    memory.write(frame.offset() + change.offset_in_page, source);
                    pins.add(frame.index());
                    self.residency.publish(change.pool, frame, true);
                }
            }
        }
        add(&self.counters.target_writes, changes.len() as u64);
        Some(pins)
    }

    /// Pins these pages if all are in frames. Else none is.
    pub(crate) async fn pin(&self, pages: &[PoolPage]) -> Option<Pins> {
        let mut pins = Pins::new(self.frames().clone());
        for batch in pages.chunks(super::evict::MAX_BATCH_PAGES) {
            let _guards = self.locks.lock_many(batch.iter().copied()).await;
            for page in batch {
                let entry = self.residency.load(*page);
                if !entry.is_resident() {
                    return None;
                }
                pins.add(entry.frame());
            }
        }
        Some(pins)
    }

    /// Takes frames to keep for new pages: as many as are free, up to `wanted`.
    pub(crate) fn take_spare(&self, wanted: usize) -> Vec<PrivateFrame> {
        std::iter::from_fn(|| self.take_frame()).take(wanted).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::{PagesConfig, WordPlace};
    use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE_U64};
    use cuttlefs_common::world::SeededRandom;
    use futures_lite::future::block_on;
    use std::cell::RefCell;

    #[derive(Default)]
    struct Owner(RefCell<Vec<FilePage>>);

    impl PageOwner for Owner {
        fn ino(&self) -> InodeNo {
            InodeNo(9)
        }

        fn list_page(&self, page: FilePage, _pool: PoolPage) {
            self.0.borrow_mut().push(page);
        }

        fn note_written_directly(&self) {
            unreachable!("nothing here goes to the disk");
        }
    }

    fn change(page: u64, base: Base, offset_in_source: usize) -> PageChange {
        let (offset_in_page, len) = (8, 8);
        PageChange { file_page: page.into(), pool: page.into(), base, offset_in_page, len, offset_in_source }
    }

    fn pages() -> Pages {
        Pages::new(PagesConfig::new(16, 8 * PAGE_SIZE_U64), &SeededRandom::new(1)).expect("memory")
    }

    #[test]
    fn all_pages_of_a_change_are_changed_or_none() {
        let (pages, owner) = (pages(), Owner::default());
        let bytes = [[1; 8], [2; 8]].concat();
        let both = [change(3, Base::Zeros, 0), change(4, Base::Zeros, 8)];
        let mut spare = pages.take_spare(1);
        assert!(pages.change_at_once(&owner, &both, &bytes, &mut spare).is_none(), "one frame for two pages");
        spare.extend(pages.take_spare(2));
        let busy = block_on(pages.locks.lock_many([PoolPage(4)]));
        assert!(pages.change_at_once(&owner, &both, &bytes, &mut spare).is_none(), "a lock is not free");
        drop(busy);
        assert!(owner.0.borrow().is_empty() && pages.residency.dirty() == 0 && spare.len() == 3);
        assert!(pages.change_at_once(&owner, &both, &bytes, &mut spare).is_some());
        assert_eq!((&*owner.0.borrow(), pages.residency.dirty()), (&vec![FilePage(3), FilePage(4)], 2));
        assert_eq!(spare.len(), 1, "one was not needed");
        let stored = [change(3, Base::Stored, 0), change(5, Base::Stored, 8)];
        let changed = pages.change_at_once(&owner, &stored, &bytes, &mut Vec::new());
        assert!(changed.is_none(), "page 5 is not in a frame");
        let place = |page: u64| WordPlace { file_page: page.into(), pool: page.into(), offset_in_page: 8 };
        assert_eq!(pages.change_word_at_once(&owner, place(3), |old| old + 1), Some(0x0101_0101_0101_0101));
        assert_eq!(pages.change_word_at_once(&owner, place(3), |old| old), Some(0x0101_0101_0101_0102));
        assert_eq!(pages.change_word_at_once(&owner, place(5), |old| old), None);
        assert_eq!(owner.0.borrow().len(), 3, "a word that stays is no change");
    }

    #[test]
    fn pinned_pages_stay_until_the_pins_are_dropped() {
        let (pages, owner) = (pages(), Owner::default());
        let mut spare = pages.take_spare(100);
        assert_eq!(spare.len(), 5, "all there are");
        let new = [change(3, Base::Zeros, 0), change(4, Base::Zeros, 0)];
        let frames: Vec<_> = spare.iter().map(PrivateFrame::index).collect();
        let mut all = pages.change_at_once(&owner, &new, &[7; 8], &mut spare).expect("done");
        drop(spare);
        let mut first = Pins::new(pages.frames().clone());
        first.take_over(&mut all, frames[1]);
        first.take_over(&mut all, frames[0]);
        first.take_over(&mut all, frames[0]);
        drop(all);
        pages.residency.mark_clean(PoolPage(3));
        pages.residency.mark_clean(PoolPage(4));
        let second = block_on(pages.pin(&[PoolPage(3)])).expect("resident");
        assert!(block_on(pages.pin(&[PoolPage(3), PoolPage(5)])).is_none());
        let disk = crate::pool::simdisk::SimDisk::new(16, pages.frames().memory().clone());
        let evict = || block_on(pages.evict(&disk, 8));
        assert_eq!(evict(), 0);
        drop(first);
        assert_eq!(evict(), 1, "page 4");
        drop(second);
        assert_eq!(evict(), 1);
        assert_eq!(pages.frames().free(), 5);
    }
}
