//! Relocation: pages of a file get other places in the pool, with the same bytes (docs/file-regions.md, "Moves").
//!
//! It has two parts, since a sync and a commit come between them: `copy_on_ssd` gives the new places the bytes, and a `Relocation` has them take over.
//! The caller sees to it that nobody changes the pages from before the first part until after the second, and that they are clean.
//!
//! # Failure
//! If a page cannot be read or written, the first part fails, and nobody knows the new places. The second part cannot fail.

use super::block_locks::BlockGuards;
use super::change::MAX_DIRECT_PAGES;
use super::{Pages, add};
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::{Disk, IoBuffer, IoDone, IoKind, IoRequest};
use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE, PoolPage};
use cuttlefs_common::status::Status;

/// A page of a file, and its new place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageMove {
    pub(crate) file_page: FilePage,
    pub(crate) from: PoolPage,
    pub(crate) to: PoolPage,
}

/// Pages whose new places are about to take over. Their block locks are held.
pub(crate) struct Relocation<'a> {
    pages: &'a Pages,
    moves: &'a [PageMove],
    _guards: BlockGuards<'a>,
}

impl Relocation<'_> {
    /// Has the new places take over, with the frames and the heat of the old ones. Called together with the change of the mapping, under its lock.
    pub(crate) fn take_over(&self) {
        for PageMove { from, to, .. } in self.moves {
            self.pages.residency.relocate(*from, *to);
            self.pages.heat.set(*to, self.pages.heat.of(*from));
            self.pages.heat.set(*from, 0);
        }
    }
}

impl Drop for Relocation<'_> {
    fn drop(&mut self) {
        // While the locks are held: a page that a window still shows gets no other frame before.
        self.pages.residency.settle_window();
    }
}

/// Moves whose old and new places are neighbours each: one IO.
fn groups(moves: &[PageMove]) -> Vec<&[PageMove]> {
    let goes_on =
        |one: &PageMove, next: &PageMove| one.from.0 + 1 == next.from.0 && one.to.0 + 1 == next.to.0;
    moves.chunk_by(goes_on).flat_map(|group| group.chunks(MAX_DIRECT_PAGES)).collect()
}

impl Pages {
    /// Whether the SSD has the bytes of all of these pages.
    pub(crate) fn are_clean(&self, moves: &[PageMove]) -> bool {
        moves.iter().all(|page| !self.residency.load(page.from).is_dirty())
    }

    /// Copies clean pages on SSD to new places, which nobody knows. The next data sync makes that durable.
    ///
    /// # Errors
    /// `Io`: the new places have any bytes.
    pub(crate) async fn copy_on_ssd(
        &self,
        disk: &dyn Disk,
        ino: InodeNo,
        moves: &[PageMove],
    ) -> Result<(), Status> {
        let _guards = self.locks.lock_many(moves.iter().flat_map(|page| [page.from, page.to])).await;
        let _permit = self.bounce.acquire().await;
        let groups = groups(moves);
        let read = |group: &&[PageMove]| IoRequest {
            kind: IoKind::Read,
            offset: group[0].from.byte_offset(),
            // The read fills the buffer, or its bytes are not used.
            buffer: IoBuffer::Owned(AlignedBuf::unfilled(group.len() * PAGE_SIZE)),
        };
        let read = disk.submit(groups.iter().map(read).collect()).await;
        if self.note_unread(ino, &groups, &read) {
            return Err(Status::Io);
        }
        let write = |(group, done): (&&[PageMove], IoDone)| IoRequest {
            kind: IoKind::Write,
            offset: group[0].to.byte_offset(),
            buffer: done.buffer,
        };
        moves.iter().for_each(|page| self.residency.begin_direct_write(page.to));
        let written = disk.submit(groups.iter().zip(read).map(write).collect()).await;
        moves.iter().for_each(|page| self.residency.end_direct_write(page.to));
        let mut result = Ok(());
        for (group, done) in groups.iter().zip(written) {
            match done.result {
                Ok(()) => add(&self.counters.relocated, group.len() as u64),
                Err(error) => {
                    add(&self.counters.write_errors, group.len() as u64);
                    tracing::error!(%error, pages = group.len(), "pages could not be moved; they stay where they are");
                    result = Err(Status::Io);
                }
            }
        }
        result
    }

    /// Counts and logs the pages that could not be read. Returns whether there are some.
    fn note_unread(&self, ino: InodeNo, groups: &[&[PageMove]], read: &[IoDone]) -> bool {
        let mut is_any = false;
        for (group, done) in groups.iter().zip(read) {
            let Err(error) = &done.result else { continue };
            for page in group.iter().filter(|page| error.concerns(page.from)) {
                self.note_unreadable(error, ino, page.file_page, page.from);
            }
            is_any = true;
        }
        is_any
    }

    /// Takes the locks under which new places can take over.
    pub(crate) async fn begin_relocation<'a>(&'a self, moves: &'a [PageMove]) -> Relocation<'a> {
        let _guards = self.locks.lock_many(moves.iter().flat_map(|page| [page.from, page.to])).await;
        Relocation { pages: self, moves, _guards }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moved(file_page: u64, from: u64, to: u64) -> PageMove {
        PageMove { file_page: file_page.into(), from: PoolPage(from), to: PoolPage(to) }
    }

    #[test]
    fn neighbours_on_both_sides_are_one_io() {
        let moves = [moved(0, 7, 20), moved(1, 8, 21), moved(2, 3, 22), moved(4, 4, 24), moved(5, 5, 25)];
        let lengths: Vec<usize> = groups(&moves).iter().map(|group| group.len()).collect();
        assert_eq!(lengths, [2, 1, 2]);
        let many: Vec<PageMove> = (0..150).map(|page| moved(page, page, 1000 + page)).collect();
        let lengths: Vec<usize> = groups(&many).iter().map(|group| group.len()).collect();
        assert_eq!(lengths, [64, 64, 22]);
        assert!(groups(&[]).is_empty());
    }
}
