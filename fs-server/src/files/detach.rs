//! Pages that leave a file, and space for new pages (invariant 3).
//!
//! A page leaves in this order: the batch that drops its extent record is in the store; the mapping loses it and clients see a new generation; its
//! entry moves to the magic frame under its block lock, which also waits for any IO that uses it; it is quarantined. It is free again after the next
//! flush of the store.

use super::write_back::release_space;
use crate::files::range_table::{Piece, PieceState};
use crate::files::{FileRegion, FileState, Files};
use crate::pool::space::Run;
use cuttlefs_common::ids::{PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::status::Status;

/// Pieces that are quarantined together. Allocations meanwhile wait for these at most.
const QUARANTINE_BATCH: usize = 1024;
/// How often an allocation is tried again, if other allocations took the space that a flush had freed, or that was in the free page queue.
const ALLOCATE_ATTEMPTS: usize = 5;

/// Moves the entries of pages with bytes to the magic frame and frees their frames. Unwritten pages never have a frame.
pub(super) async fn vacate_pieces(files: &Files, pieces: &[Piece]) {
    let with_bytes = pieces.iter().filter(|piece| piece.state.has_bytes());
    files.pages.vacate(with_bytes.flat_map(|piece| piece.pool..piece.pool + piece.len).map(PoolPage)).await;
}

/// Quarantines pages that are no longer in any mapping or record.
pub(super) async fn detach(files: &Files, pieces: &[Piece]) {
    if pieces.is_empty() {
        return;
    }
    vacate_pieces(files, pieces).await;
    for pieces in pieces.chunks(QUARANTINE_BATCH) {
        let runs: Vec<Run> =
            pieces.iter().map(|piece| Run { first: PoolPage(piece.pool), len: piece.len }).collect();
        files.space.quarantine(&runs);
        futures_lite::future::yield_now().await;
    }
}

/// Allocates all of the pages or none. If too few are free, takes what is in the free page queue, and flushes the store if that is needed to free
/// quarantined pages.
async fn allocate(files: &Files, pages: u64, near: Option<PoolPage>) -> Result<Vec<Run>, Status> {
    if !files.meta.has_room() {
        return Err(Status::NoSpace);
    }
    for _ in 0..ALLOCATE_ATTEMPTS {
        match files.space.allocate(pages, near) {
            Ok(runs) => {
                files.pages.note_allocated(&runs);
                return Ok(runs);
            }
            Err(_) if files.free_pages.give_back() => {}
            Err(short) if short.free + short.quarantined < pages => return Err(Status::NoSpace),
            Err(_) => release_space(files).await?,
        };
    }
    Err(Status::NoSpace)
}

/// Gives back pages that were allocated for a file and never mapped, in whatever state a failed write left them.
pub(super) async fn undo_allocation(files: &Files, runs: &[Run]) {
    if runs.is_empty() {
        return;
    }
    let pieces: Vec<Piece> = runs
        .iter()
        .map(|run| Piece { first: 0, pool: run.first.0, len: run.len, state: PieceState::Fresh })
        .collect();
    vacate_pieces(files, &pieces).await;
    files.space.give_back(runs);
}

/// Allocates space for the holes of the file pages `[first, last)`. Returns the pieces that fill them, in state `state` and not mapped yet, and the
/// runs in which they lie.
///
/// # Errors
/// `NoSpace`.
pub(super) async fn take_holes(
    files: &Files,
    file: &FileRegion,
    (first, last): (u64, u64),
    state: PieceState,
) -> Result<(Vec<Piece>, Vec<Run>), Status> {
    let (holes, near) = {
        let known = file.state();
        let holes = known.table.holes_in(first, last);
        let near = holes.first().and_then(|(page, _)| near(&known, *page));
        (holes, near)
    };
    let wanted = holes.iter().map(|(_, len)| len).sum();
    let runs = allocate(files, wanted, near).await?;
    Ok((fill_holes(&holes, &runs, state), runs))
}

/// The pieces that fill the holes with the runs, in order.
fn fill_holes(holes: &[(u64, u64)], runs: &[Run], state: PieceState) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut runs = runs.iter().copied();
    let mut run = Run { first: PoolPage(0), len: 0 };
    for (mut first, mut wanted) in holes.iter().copied() {
        while wanted > 0 {
            if run.len == 0 {
                run = runs.next().expect("as many pages were taken as the holes have");
            }
            let len = wanted.min(run.len);
            pieces.push(Piece { first, pool: run.first.0, len, state });
            run = Run { first: PoolPage(run.first.0 + len), len: run.len - len };
            first += len;
            wanted -= len;
        }
    }
    pieces
}

/// The best place for file page `page`: behind the pool page of the page before it.
fn near(state: &FileState, page: u64) -> Option<PoolPage> {
    let before = state.table.get(page.checked_sub(1)?.into())?.0;
    Some(PoolPage(before.0 + 1))
}

/// Whether the page that holds the end of the file, if the end is inside a page, has bytes.
pub(super) fn end_is_inside_bytes(state: &FileState, size: u64) -> bool {
    !size.is_multiple_of(PAGE_SIZE_U64)
        && state.table.get((size / PAGE_SIZE_U64).into()).is_some_and(|(_, piece)| piece.has_bytes())
}
