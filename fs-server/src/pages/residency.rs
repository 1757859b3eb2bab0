//! Residency changes: the rows of the page protocol's table (docs/pages.md), one function each.
//!
//! Owns nothing; moves entries, frames and the dirty count together so that they cannot disagree. Every changing
//! function wants the page's block lock; the entry's own assertion (two writers of one page) backs that.
//!
//! # Invariants
//! * An entry that is dirty is counted in `dirty`, once.
//! * A frame goes to the free list after its entry has moved, never before (invariant 1), and after the window, where there is one, shows it
//!   no longer.

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
    /// Dirty entries. Moved under block locks, read by anyone; relaxed: it steers write-back.
    dirty: AtomicU64,
    /// What an RNIC that translates sees; `None`: RNICs see the frames as they lie.
    following: Option<Following>,
}

impl Residency {
    /// Everything is on SSD.
    pub(crate) fn new(table: ResidencyTable, frames: Arc<Frames>) -> Self {
        Self { table, frames, dirty: AtomicU64::new(0), following: None }
    }

    /// The same, with a window that follows it. Everything is on SSD still.
    pub(super) fn with_window(self, window: Box<dyn PageWindow>) -> Self {
        assert_eq!(self.frames.free(), self.frames.usable(), "a window is told of pages from the first on");
        let following = Some(Following::new(window, self.frames.clone()));
        Self { following, ..self }
    }

    /// The window shows what it has yet to show, and frames that waited for that are free.
    pub(super) fn settle_window(&self) {
        if let Some(following) = &self.following {
            following.settle();
        }
    }

    /// The table, to export and to read.
    pub(crate) fn table(&self) -> &ResidencyTable {
        &self.table
    }

    /// The frames.
    pub(crate) fn frames(&self) -> &Arc<Frames> {
        &self.frames
    }

    /// Frames that hold bytes the SSD does not.
    pub(crate) fn dirty(&self) -> u64 {
        self.dirty.load(Ordering::Relaxed)
    }

    /// The page's entry.
    pub(crate) fn load(&self, page: PoolPage) -> ResidencyEntry {
        self.table.load(page)
    }

    /// Copies a part of a page that was `before`, without a lock; `false` if it has no frame, or moved or changed meanwhile.
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

    /// A page on SSD is going to be overwritten there.
    pub(crate) fn begin_direct_write(&self, page: PoolPage) {
        let entry = self.table.begin_change(page);
        assert!(!entry.is_resident(), "pool page {page} is resident and is written in its frame");
    }

    /// The overwriting ended, well or not.
    pub(crate) fn end_direct_write(&self, page: PoolPage) {
        self.table.end_change(page, FrameIndex::MAGIC, false);
    }

    /// The SSD holds what the frame holds.
    pub(crate) fn mark_clean(&self, page: PoolPage) {
        let entry = self.table.load(page);
        assert!(!entry.is_changing() && entry.is_dirty(), "pool page {page} is not dirty");
        self.table.store(page, ResidencyEntry::new(entry.frame(), entry.seq(), false));
        self.dirty.fetch_sub(1, Ordering::Relaxed);
    }

    /// Sends a page back to SSD, where its bytes are; also what becomes of a page that leaves its file, whose bytes
    /// no longer matter. The version moves on in either case, so that no reader of the old page is believed.
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
    fn a_dirty_page_that_leaves_its_file_is_no_longer_counted() {
        let residency = residency();
        let frame = residency.frames().take().expect("free");
        residency.publish(PoolPage(1), frame, true);
        assert_eq!(residency.dirty(), 1);
        residency.vacate(PoolPage(1));
        assert_eq!((residency.dirty(), residency.frames().free()), (0, 2));
    }
}
