//! Frames and space for the new pages of one one-sided change: from the filekey's grants, and beyond these from the free page queue.
//!
//! # Failure
//! If there is none for a page, the change is a fault. What was taken and not used goes back to where it was when this is dropped.

use super::FileRegion;
use super::free_pages::FreePages;
use super::grants::Grants;
use super::range_table::{Piece, PieceState};
use crate::pages::{Base, PageChange, Pins, PrivateFrame};
use crate::sync::MutexGuard;
use cuttlefs_common::ids::{FileKey, FrameIndex, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::region::divide;

/// The origin of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Grant,
    Queue,
}

/// A page that got a frame.
struct Taken {
    page: u64,
    frame: FrameIndex,
    origin: Origin,
    /// Its place in the pool, if the file had none for it.
    space: Option<PoolPage>,
}

/// The frames and the space that a change has got.
pub(super) struct NewPages<'a> {
    grants: MutexGuard<'a, Grants>,
    filekey: FileKey,
    queue: &'a FreePages,
    taken: Vec<Taken>,
    /// As many as `taken`, in the same order.
    frames: Vec<PrivateFrame>,
}

/// The pages of a change.
pub(super) struct Placement {
    pub(super) changes: Vec<PageChange>,
    /// New pages, not mapped yet.
    pub(super) new: Vec<Piece>,
    /// Pages that had space and no bytes.
    pub(super) converted: Vec<u64>,
}

impl<'a> NewPages<'a> {
    /// None yet, for a filekey's change of the file. The caller has the file to itself.
    pub(super) fn of(file: &'a FileRegion, filekey: FileKey, queue: &'a FreePages) -> Self {
        let grants = file.grants.lock();
        Self { grants, filekey, queue, taken: Vec::new(), frames: Vec::new() }
    }

    /// The page changes of a change of `len` bytes. `None` if there is no frame or no space for a page.
    pub(super) fn place(&mut self, file: &FileRegion, offset: u64, len: usize) -> Option<Placement> {
        let state = file.state();
        let mut placement = Placement { changes: Vec::new(), new: Vec::new(), converted: Vec::new() };
        let before = (offset / PAGE_SIZE_U64).checked_sub(1);
        let mut before = before.and_then(|page| state.table.get(page.into())).map(|(pool, _)| pool);
        for part in divide(offset, len) {
            let page = part.page.0;
            let (pool, base) = match state.table.get(part.page) {
                Some((pool, piece)) if piece.has_bytes() => (pool, Base::Stored),
                Some((pool, _)) => {
                    self.take_frame(page)?;
                    placement.converted.push(page);
                    (pool, Base::Zeros)
                }
                None => {
                    let pool = self.take_page(page, before.map(|before| PoolPage(before.0 + 1)))?;
                    placement.new.push(Piece { first: page, pool: pool.0, len: 1, state: PieceState::Fresh });
                    (pool, Base::Zeros)
                }
            };
            before = Some(pool);
            placement.changes.push(PageChange::of(part, pool, base));
        }
        Some(placement)
    }

    /// Takes a frame for a page to which the file has given space.
    fn take_frame(&mut self, page: u64) -> Option<()> {
        let granted = self.grants.of_page(self.filekey, page).and_then(|grant| grant.spare.pop());
        let (frame, origin) = match granted {
            Some(frame) => (frame, Origin::Grant),
            None => (self.queue.take_frame()?, Origin::Queue),
        };
        self.note(page, frame, origin, None);
        Some(())
    }

    /// Takes a frame and space for a hole; of the queue the place `near` if it can be had.
    fn take_page(&mut self, page: u64, near: Option<PoolPage>) -> Option<PoolPage> {
        let granted = self.grants.of_page(self.filekey, page).and_then(|grant| {
            let (pool, frame) = (grant.space.pages.get(&page).copied()?, grant.spare.pop()?);
            grant.space.pages.remove(&page);
            Some((pool, frame))
        });
        let (pool, frame, origin) = match granted {
            Some((pool, frame)) => (pool, frame, Origin::Grant),
            None => {
                let (pool, frame) = self.queue.take(near)?;
                (pool, frame, Origin::Queue)
            }
        };
        self.note(page, frame, origin, Some(pool));
        Some(pool)
    }

    fn note(&mut self, page: u64, frame: PrivateFrame, origin: Origin, space: Option<PoolPage>) {
        self.taken.push(Taken { page, frame: frame.index(), origin, space });
        self.frames.push(frame);
    }

    /// The frames, in the order of the changes that need one.
    pub(super) fn frames(&mut self) -> &mut Vec<PrivateFrame> {
        &mut self.frames
    }

    /// Notes that the change was made: from here on the pages are the file's. Those that were granted stay in memory until the grant ends. Returns how
    /// many pages came from the queue.
    pub(super) fn used(mut self, mut pins: Pins) -> u64 {
        let mut queued = 0;
        for taken in std::mem::take(&mut self.taken) {
            match taken.origin {
                Origin::Queue => queued += 1,
                Origin::Grant => {
                    if let Some(grant) = self.grants.of_page(self.filekey, taken.page) {
                        grant.pins.take_over(&mut pins, taken.frame);
                    }
                }
            }
        }
        queued
    }
}

impl Drop for NewPages<'_> {
    fn drop(&mut self) {
        for (taken, frame) in self.taken.drain(..).zip(self.frames.drain(..)) {
            match (taken.origin, self.grants.of_page(self.filekey, taken.page)) {
                (Origin::Grant, Some(grant)) => {
                    grant.spare.push(frame);
                    grant.space.pages.extend(taken.space.map(|pool| (taken.page, pool)));
                }
                // The grants are locked, so that the one from which it came is still there.
                (Origin::Grant, None) | (Origin::Queue, _) => self.queue.put_back(taken.space, frame),
            }
        }
    }
}
