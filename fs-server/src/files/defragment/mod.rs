//! Defragmentation: a file's pages move to a run of the pool, under open keys (docs/file-regions.md, "Moves"; FileMR section 2.3).
//!
//! # How it works
//! One call makes one step: some pages move to free pages that lie one behind the other. The table in the document has the parts of a step, and what
//! fails in each. Alone with the file, the step first writes it back. So all pages are clean, the SSD has their bytes, and nothing of the file waits to
//! be written, listed or removed at their old places.
//!
//! # Invariants
//! * The old pages leave the file in the batch that gives it the new ones, and may be used again after a flush of that batch (invariant 3).
//! * No byte, length, time or change counter of the file changes, and no filekey or grant ends.
//!
//! # Failure
//! Before the batch is made the file stays as it is, and the new pages are free again. If the batch fails, it may be in the log all the same, so the
//! new pages are quarantined: only a later flush, which then covers what is in the log, frees them.

mod stretch;

use super::detach::undo_allocation;
use super::range_table::{MAX_FILE_PAGES, Piece};
use super::write_back::{release_space, write_back};
use super::{FileRegion, Files};
use crate::meta::{DataCommit, RangeUpdate};
use crate::pages::PageMove;
use crate::pool::disk::Disk;
use crate::pool::space::Run;
use cuttlefs_common::ids::{FilePage, PoolPage};
use cuttlefs_common::status::Status;
use std::sync::Arc;
use stretch::{Found, Stretch, find};

/// Most pages of a step: 1 MiB, like the largest request. Few in tests, so that moves have several steps.
const STEP_PAGES: u64 = if cfg!(test) { 4 } else { 256 };
/// One in so many free pages may be taken by a step, so that writers find space meanwhile.
const FREE_FRACTION: u64 = 2;

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Pages that were moved.
    pub pages: u64,
    /// Where the next step begins; `None` at the end of the file.
    pub next: Option<FilePage>,
}

impl Moved {
    fn none_before(page: u64) -> Self {
        Self { pages: 0, next: Some(FilePage(page)) }
    }
}

/// Moves some pages, the first ones at or behind `first` that have a better place.
///
/// # Errors
/// `NoSpace` if too little space is free, `Stale`, `Io`: all of the file is as it was, or moved in part.
pub async fn defragment(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    first: FilePage,
) -> Result<Moved, Status> {
    let first = first.0.min(MAX_FILE_PAGES);
    file.usable()?;
    let found = find(&file.state().table, first);
    let stretch = match found {
        Found::Stretch(stretch) => stretch,
        Found::GoOn(page) => return Ok(Moved::none_before(page)),
        Found::Nothing => return Ok(Moved { pages: 0, next: None }),
    };
    make_room(files, &stretch).await?;
    // Ahead, so that there is little left of it to be done alone with the file.
    write_back(files, disk, std::slice::from_ref(file), false).await?;
    let _alone = file.order.write().await;
    write_back(files, disk, std::slice::from_ref(file), false).await?;
    let _settled = file.settle.lock().await;
    file.usable()?;
    let (found, hint) = {
        let state = file.state();
        // Writers, who are kept out, make it otherwise, and the write-back has ended that. A page with an image is listed, so there is no image either.
        let is_settled = state.table.fresh_pages() == 0
            && !state.is_written_directly
            && state.durable_size == state.size
            && file.dirty.lock().is_empty();
        if !is_settled {
            return Err(Status::Busy);
        }
        (find(&state.table, first), state.table.allocated_pages())
    };
    let stretch = match found {
        Found::Stretch(stretch) => stretch,
        // It was changed meanwhile.
        _ => return Ok(Moved::none_before(stretch.end)),
    };
    let most = STEP_PAGES.min(files.space.figures().free / FREE_FRACTION);
    let Some((from, run)) = stretch.take_place(&files.space, hint, most) else {
        return Ok(Moved::none_before(stretch.end));
    };
    files.pages.note_allocated(&[run]);
    move_pages(files, disk, file, from, run).await?;
    Ok(Moved { pages: run.len, next: Some(FilePage(from + run.len)) })
}

/// Frees the pages of earlier steps, if there is too little space without them.
async fn make_room(files: &Files, stretch: &Stretch) -> Result<(), Status> {
    let lead = stretch.lead.unwrap_or(stretch.first);
    let wanted = (stretch.end - lead).max(STEP_PAGES * FREE_FRACTION);
    let figures = files.space.figures();
    if figures.free < wanted && figures.quarantined > 0 {
        release_space(files).await?;
    }
    let free = files.space.figures().free;
    if free < FREE_FRACTION || free < stretch.end - stretch.first || !files.meta.has_room() {
        return Err(Status::NoSpace);
    }
    Ok(())
}

/// Moves as many pages as `to` has, from file page `first` on. All are mapped. The caller has the file to itself, settled, and `to` is allocated.
async fn move_pages(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    first: u64,
    to: Run,
) -> Result<(), Status> {
    let end = first + to.len;
    let (old, durable_size): (Vec<Piece>, u64) = {
        let state = file.state();
        (state.table.pieces_in(first, end).collect(), state.durable_size)
    };
    let new = |piece: &Piece| Piece { pool: to.first.0 + (piece.first - first), ..*piece };
    let new: Vec<Piece> = old.iter().map(new).collect();
    // Reserved pages have no bytes, and are in no frame.
    let with_bytes = old.iter().zip(&new).filter(|(old, _)| old.state.has_bytes());
    let moves: Vec<PageMove> = with_bytes
        .flat_map(|(old, new)| {
            let pools = (old.pool..old.pool + old.len).zip(new.pool..);
            (old.first..).zip(pools).map(|(page, (from, to))| PageMove {
                file_page: FilePage(page),
                from: PoolPage(from),
                to: PoolPage(to),
            })
        })
        .collect();
    if let Err(status) = copy(files, disk, file, &moves).await {
        undo_allocation(files, &[to]).await;
        return Err(status);
    }
    let extents = new.iter().map(Piece::extent).collect();
    let update = RangeUpdate { first: FilePage(first), end: FilePage(end), extents };
    let commit = DataCommit::of_ranges(file.ino(), vec![update], durable_size);
    if let Err(status) = files.meta.commit_data(&[commit]) {
        files.space.quarantine(&[to]);
        return Err(status);
    }
    let relocation = files.pages.begin_relocation(&moves).await;
    file.change_layout(files.file_table(), &files.generations, |state| {
        state.table.remove(first, end);
        new.iter().for_each(|piece| state.table.insert(*piece));
        relocation.take_over();
    });
    drop(relocation);
    let runs: Vec<Run> =
        old.iter().map(|piece| Run { first: PoolPage(piece.pool), len: piece.len }).collect();
    files.space.quarantine(&runs);
    Ok(())
}

/// Gives the new pages their bytes, durably.
async fn copy(files: &Files, disk: &dyn Disk, file: &FileRegion, moves: &[PageMove]) -> Result<(), Status> {
    if moves.is_empty() {
        return Ok(());
    }
    if !files.pages.are_clean(moves) {
        return Err(Status::Busy);
    }
    files.pages.copy_on_ssd(disk, file.ino(), moves).await?;
    files.pages.data_sync.sync(disk).await.map_err(|_| Status::Io)
}
