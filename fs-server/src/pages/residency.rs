//! Changes of residency: each row of the page protocol's table (docs/pages.md) is a function here.
//!
//! Entries, frames and the count of dirty frames are changed together here, so that they agree. Every function that changes an entry needs the page's
//! block lock; an assertion on the entry (two writers of one page) checks that.
//!
//! # Invariants
//! * A dirty entry is counted in `dirty` once.
//! * A frame goes to the free list only after its entry has moved (invariant 1), and, if there is a window, after the window no longer shows it.

use super::frames::{Frames, PrivateFrame};
use super::window::{Following, PageWindow};
use cuttlefs_common::ids::{FrameIndex, PoolPage};
use cuttlefs_common::region::{ResidencyEntry, ResidencyTable};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The residency table with the frames its entries point at.
#[derive(Debug)]
pub(crate) struct Residency {
    table: ResidencyTable,
    frames: Arc<Frames>,
    /// The number of dirty entries. Changed under block locks, read by anyone. Relaxed: it only steers write-back.
    dirty: AtomicU64,
    /// The window of an RNIC that translates; `None` if RNICs have the frames themselves.
    following: Option<Following>,
}

impl Residency {
    /// All pages are on SSD.
    pub(crate) fn new(table: ResidencyTable, frames: Arc<Frames>) -> Self {
        Self { table, frames, dirty: AtomicU64::new(0), following: None }
    }

    /// The same with a window that follows the table. All pages must still be on SSD.
    pub(super) fn with_window(self, window: Box<dyn PageWindow>) -> Self {
        assert_eq!(self.frames.free(), self.frames.usable(), "a window is told of pages from the first on");
        let following = Some(Following::new(window, self.frames.clone()));
        Self { following, ..self }
    }

    /// Whether there is a window, and it is not lost.
    pub(super) fn shows_window(&self) -> bool {
        self.following.as_ref().is_some_and(|following| !following.is_lost())
    }

    /// Makes the window show all changes so far, which frees the frames that wait for that.
    pub(super) fn settle_window(&self) {
        if let Some(following) = &self.following {
            following.settle();
        }
    }

    /// The table, to be exported and read.
    pub(crate) fn table(&self) -> &ResidencyTable {
        &self.table
    }

    /// The frames.
    pub(crate) fn frames(&self) -> &Arc<Frames> {
        &self.frames
    }

    /// The number of frames with bytes that the SSD does not have.
    pub(crate) fn dirty(&self) -> u64 {
        self.dirty.load(Ordering::Relaxed)
    }

    /// The page's entry.
    pub(crate) fn load(&self, page: PoolPage) -> ResidencyEntry {
        self.table.load(page)
    }

    /// Copies a part of a page whose entry was `before`, without a lock. `false` if the page has no frame, or moved or changed meanwhile.
    pub(crate) fn copy(
        &self,
        page: PoolPage,
        before: ResidencyEntry,
        offset_in_page: usize,
        out: &mut [u8],
    ) -> bool {
        if !before.is_resident() || before.is_changing() {
            return false;
        }
        self.frames.memory().read(Frames::offset(before.frame()) + offset_in_page, out);
        before.validates(self.table.load_after_copy(page))
    }

    /// Changes bytes of a resident page in its frame; `change` gets the frame's offset in the frames' memory.
    pub(crate) fn write_in_frame(&self, page: PoolPage, change: impl FnOnce(usize)) {
        let entry = self.table.begin_change(page);
        assert!(entry.is_resident(), "pool page {page} has no frame to write to");
        change(Frames::offset(entry.frame()));
        if !entry.is_dirty() {
            self.dirty.fetch_add(1, Ordering::Relaxed);
        }
        self.table.end_change(page, entry.frame(), true);
    }

    /// Publishes a filled frame for a page that was on SSD.
    pub(crate) fn publish(&self, page: PoolPage, frame: PrivateFrame, dirty: bool) {
        if let Some(following) = &self.following {
            following.before_publish(page);
        }
        let entry = self.table.begin_change(page);
        assert!(!entry.is_resident(), "pool page {page} has a frame already");
        let frame = frame.into_published();
        self.frames.set_owner(frame, page);
        if dirty {
            self.dirty.fetch_add(1, Ordering::Relaxed);
        }
        self.table.end_change(page, frame, dirty);
        if let Some(following) = &self.following {
            following.show(page, frame);
        }
    }

    /// Begins to overwrite a page on SSD.
    pub(crate) fn begin_direct_write(&self, page: PoolPage) {
        let entry = self.table.begin_change(page);
        assert!(!entry.is_resident(), "pool page {page} is resident and is written in its frame");
    }

    /// Ends the overwriting, whether it succeeded or not.
    pub(crate) fn end_direct_write(&self, page: PoolPage) {
        self.table.end_change(page, FrameIndex::MAGIC, false);
    }

    /// Notes that the SSD has the frame's bytes.
    pub(crate) fn mark_clean(&self, page: PoolPage) {
        let entry = self.table.load(page);
        assert!(!entry.is_changing() && entry.is_dirty(), "pool page {page} is not dirty");
        self.table.store(page, ResidencyEntry::new(entry.frame(), entry.seq(), false));
        self.dirty.fetch_sub(1, Ordering::Relaxed);
    }

    /// Takes a page's frame away. The SSD has its bytes, or it leaves its file and they no longer matter. The version moves in either case, so that
    /// readers of the old frame do not accept it.
    pub(crate) fn vacate(&self, page: PoolPage) {
        let entry = self.table.begin_change(page);
        self.table.end_change(page, FrameIndex::MAGIC, false);
        if entry.is_dirty() {
            self.dirty.fetch_sub(1, Ordering::Relaxed);
        }
        if entry.is_resident() {
            match &self.following {
                Some(following) => following.hide(page, entry.frame()),
                None => self.frames.give_back(entry.frame()),
            }
        }
    }

    /// Has a page take the place of another one whose bytes the SSD has at both: the frame of the old page is the new one's. The versions of both move,
    /// so that readers of the old page do not accept its frame. If there is a window, it is settled before the pages' locks are released.
    pub(crate) fn relocate(&self, from: PoolPage, to: PoolPage) {
        let (old, new) = (self.table.begin_change(from), self.table.begin_change(to));
        assert!(!old.is_dirty(), "pool page {from} is dirty and cannot be moved");
        assert!(!new.is_resident(), "pool page {to} is no new place: it is in a frame");
        self.table.end_change(from, FrameIndex::MAGIC, false);
        if !old.is_resident() {
            return self.table.end_change(to, FrameIndex::MAGIC, false);
        }
        if let Some(following) = &self.following {
            following.before_publish(to);
        }
        self.frames.set_owner(old.frame(), to);
        self.table.end_change(to, old.frame(), false);
        if let Some(following) = &self.following {
            following.hand_over(from, to, old.frame());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::region::MagicPattern;

    fn residency() -> Residency {
        let frames = Frames::new(5, &MagicPattern::new([7; 32])).expect("frames");
        Residency::new(ResidencyTable::new(10).expect("table"), Arc::new(frames))
    }

    #[test]
    fn the_rows_of_the_page_protocol() {
        let residency = residency();
        let page = PoolPage(4);
        let frame = residency.frames().take().expect("free");
        let index = frame.index();
        residency.publish(page, frame, false);
        assert_eq!(residency.load(page), ResidencyEntry::new(index, 2, false));
        assert_eq!(residency.frames().owner(index), Some(page));
        residency.write_in_frame(page, |_| {});
        residency.write_in_frame(page, |_| {});
        assert_eq!(residency.load(page), ResidencyEntry::new(index, 6, true));
        assert_eq!(residency.dirty(), 1);
        residency.mark_clean(page);
        assert_eq!(residency.load(page), ResidencyEntry::new(index, 6, false));
        assert_eq!(residency.dirty(), 0);
        residency.vacate(page);
        assert_eq!(residency.load(page), ResidencyEntry::new(FrameIndex::MAGIC, 8, false));
        assert_eq!(residency.frames().free(), 2);
        residency.begin_direct_write(page);
        assert!(residency.load(page).is_changing());
        residency.end_direct_write(page);
        assert_eq!(residency.load(page), ResidencyEntry::new(FrameIndex::MAGIC, 10, false));
    }

    #[test]
    fn a_frame_goes_with_its_page() {
        let residency = residency();
        let (from, to) = (PoolPage(4), PoolPage(7));
        residency.relocate(from, to);
        let magic = |seq| ResidencyEntry::new(FrameIndex::MAGIC, seq, false);
        assert_eq!(
            (residency.load(from), residency.load(to)),
            (magic(2), magic(2)),
            "of pages on SSD as well"
        );
        let frame = residency.frames().take().expect("free");
        let index = frame.index();
        residency.publish(from, frame, false);
        residency.relocate(from, to);
        assert_eq!(
            (residency.load(from), residency.load(to)),
            (magic(6), ResidencyEntry::new(index, 4, false))
        );
        assert_eq!((residency.frames().owner(index), residency.frames().free()), (Some(to), 1));
        residency.relocate(to, from);
        residency.vacate(from);
        assert_eq!((residency.frames().owner(index), residency.frames().free()), (None, 2));
    }

    #[test]
    #[should_panic(expected = "dirty")]
    fn a_page_that_the_ssd_does_not_have_stays() {
        let residency = residency();
        residency.publish(PoolPage(4), residency.frames().take().expect("free"), true);
        residency.relocate(PoolPage(4), PoolPage(7));
    }

    #[test]
    fn a_dirty_page_that_leaves_its_file_is_no_longer_counted() {
        let residency = residency();
        let frame = residency.frames().take().expect("free");
        residency.publish(PoolPage(1), frame, true);
        assert_eq!(residency.dirty(), 1);
        residency.vacate(PoolPage(1));
        assert_eq!((residency.dirty(), residency.frames().free()), (0, 2));
    }
}
