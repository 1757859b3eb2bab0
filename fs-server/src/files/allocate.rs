//! The operations of `fallocate`: reserving space, zeroing a range, punching a hole.
//!
//! They change the durable mapping at once: reserved space is recorded as unwritten, and a punched range as a hole. Partial pages at the edges of a
//! range are zeroed like any write, and become durable like one.
//!
//! # In steps
//! A range in many pieces is changed in several batches (`steps`), in file order, so that no other request waits for one file. The file's locks are
//! held throughout. Each step is complete in itself. If a kill or a failing store interrupts the steps, the file is zeroed, punched or reserved in
//! part, as it may be before the answer, and the retransmitted request does the rest. The last batch notes the request. Space that no step used is
//! given back (`Unmapped`).

use super::detach::{detach, take_holes, vacate_pieces};
use super::steps::{STEP_PIECES, Steps};
use super::write::{note_done, note_modified, zero_tail};
use crate::files::range_table::{Piece, PieceState};
use crate::files::{FileRegion, FileState, Files};
use crate::meta::{Answer, DataCommit, NoteData, RangeUpdate, RequestId};
use crate::pages::{Base, NewBytes, PageChange};
use crate::pool::disk::Disk;
use crate::pool::space::Run;
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::{FilePage, MAX_FILE_SIZE, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::rpc::Allocate;
use cuttlefs_common::status::Status;
use std::collections::VecDeque;
use std::iter::Peekable;
use std::sync::Arc;

/// Does to `[offset, offset + len)` what `how` says. The answer to the request, if there is one, becomes durable with the change, so that the change
/// is not made twice: other clients may have written there since.
///
/// # Errors
/// `Invalid` (nothing to do), `TooLarge`, `NoSpace` with nothing changed, `Stale`, `Io`.
pub async fn allocate_for(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    (offset, len): (u64, u64),
    how: Allocate,
    request: Option<RequestId>,
) -> Result<Attr, Status> {
    let reserving = |keep_size, zero| Reserving { keep_size, zero, request };
    match how {
        Allocate::PunchHole => punch_hole(files, disk, file, (offset, len), request).await,
        Allocate::Reserve { keep_size } => {
            reserve(files, disk, file, (offset, len), reserving(keep_size, false)).await
        }
        Allocate::ZeroRange { keep_size } => {
            reserve(files, disk, file, (offset, len), reserving(keep_size, true)).await
        }
    }
}

fn checked_end(offset: u64, len: u64) -> Result<u64, Status> {
    if len == 0 {
        return Err(Status::Invalid);
    }
    offset.checked_add(len).filter(|end| *end <= MAX_FILE_SIZE).ok_or(Status::TooLarge)
}

/// The changes that zero the partial pages at the edges of `[offset, end)`, if these have bytes.
fn edges(state: &FileState, offset: u64, end: u64) -> Vec<PageChange> {
    let first = offset / PAGE_SIZE_U64;
    let last = (end - 1) / PAGE_SIZE_U64;
    let mut pages = vec![first];
    if last != first {
        pages.push(last);
    }
    pages
        .into_iter()
        .filter_map(|page| {
            let start = offset.max(page * PAGE_SIZE_U64);
            let stop = end.min((page + 1) * PAGE_SIZE_U64);
            let (pool, piece) = state.table.get(FilePage(page))?;
            (stop - start < PAGE_SIZE_U64 && piece.has_bytes()).then_some(PageChange {
                file_page: FilePage(page),
                pool,
                base: Base::Stored,
                offset_in_page: (start % PAGE_SIZE_U64) as usize,
                len: (stop - start) as usize,
                offset_in_source: 0,
            })
        })
        .collect()
}

async fn zero_edges(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    offset: u64,
    end: u64,
) -> Result<(), Status> {
    let edges = edges(&file.state(), offset, end);
    if edges.is_empty() {
        return Ok(());
    }
    let zeroed = files.pages.change(disk, &**file, &edges, NewBytes::Zeros).await;
    note_modified(files, file);
    zeroed
}

/// Frees the space of `[offset, offset + len)`, which reads as zeros then. The length stays.
async fn punch_hole(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    (offset, len): (u64, u64),
    request: Option<RequestId>,
) -> Result<Attr, Status> {
    let mut end = checked_end(offset, len)?;
    let _alone = file.order.write().await;
    let _settled = file.settle.lock().await;
    file.usable()?;
    let size = file.size();
    if end >= size {
        // A range that reaches the end of the file frees the whole last page.
        end = end.next_multiple_of(PAGE_SIZE_U64).max(end);
    }
    // Before the pages leave: their frames are pinned no more.
    file.end_grants(offset, end);
    zero_edges(files, disk, file, offset, end).await?;
    let (first, last) = (offset.div_ceil(PAGE_SIZE_U64), end / PAGE_SIZE_U64);
    let (steps, durable_size) = {
        let state = file.state();
        (Steps::of(&state.table, first, last), state.durable_size)
    };
    for step in steps.last_first() {
        let commit = DataCommit::of_ranges(file.ino(), vec![step.removal()], durable_size);
        files.meta.commit_data(&[commit])?;
        let (first, last) = (step.first, step.end);
        let removed = file.change_layout(files.file_table(), &files.generations, |state| {
            let removed = state.table.remove(first, last);
            let page = state.size / PAGE_SIZE_U64;
            state.tail_is_zero |= (first..last).contains(&page);
            removed
        });
        file.dirty.lock().retain(|page, _| !(first..last).contains(&page.0));
        let noted = note_space(files, file);
        detach(files, &removed).await;
        noted?;
        futures_lite::future::yield_now().await;
    }
    note_modified(files, file);
    let note = NoteData { allocated_pages: Some(file.allocated_pages()), ..NoteData::default() };
    let attr = files.note_changed(file, note)?;
    Ok(answered(files, file, request, attr))
}

/// Reserves the holes of `[offset, offset + len)` as unwritten space. With `zero` it turns pages with bytes into unwritten space, too. Extends the
/// file unless `keep_size`.
async fn reserve(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    (offset, len): (u64, u64),
    how: Reserving,
) -> Result<Attr, Status> {
    let Reserving { keep_size, zero, request } = how;
    let end = checked_end(offset, len)?;
    let _alone = file.order.write().await;
    let _settled = file.settle.lock().await;
    file.usable()?;
    let (first, last) = (offset / PAGE_SIZE_U64, end.div_ceil(PAGE_SIZE_U64));
    let (reserved, _) = take_holes(files, file, (first, last), PieceState::Unwritten).await?;
    let reserved = Unmapped { files, pieces: reserved.into() };
    reserve_taken(files, disk, file, (offset, end), reserved, &how).await?;
    let grows = !keep_size && end > file.size();
    if grows {
        file.change_size(files.file_table(), |state| {
            state.size = end;
            state.tail_is_zero = true;
            state.uncommitted = true;
        });
    }
    note_modified(files, file);
    let note = NoteData {
        size: grows.then_some(end),
        allocated_pages: Some(file.allocated_pages()),
        modified: false,
    };
    let changes = zero || grows;
    let attr = if changes { files.note_changed(file, note) } else { files.meta.note_data(file.ino(), note) }?;
    Ok(answered(files, file, request, attr))
}

/// Notes the file's allocated pages. This is done after each step, because no other may follow.
fn note_space(files: &Files, file: &Arc<FileRegion>) -> Result<Attr, Status> {
    let note = NoteData { allocated_pages: Some(file.allocated_pages()), ..NoteData::default() };
    files.meta.note_data(file.ino(), note)
}

/// Notes the answer when everything is done. The file is still settled, so that no commit has the last step without the answer.
fn answered(files: &Files, file: &Arc<FileRegion>, request: Option<RequestId>, attr: Attr) -> Attr {
    if let Some(request) = request {
        note_done(files, file, request, Answer::Attr(attr), attr.change);
    }
    attr
}

/// How space is reserved.
#[derive(Clone, Copy)]
struct Reserving {
    /// Whether the length stays as it is.
    keep_size: bool,
    /// Whether pages with bytes lose them.
    zero: bool,
    /// The request, if its answer is to be noted.
    request: Option<RequestId>,
}

/// Space that was taken, not mapped yet, and not touched by an IO. It is given back when dropped.
struct Unmapped<'a> {
    files: &'a Files,
    pieces: VecDeque<Piece>,
}

impl Drop for Unmapped<'_> {
    fn drop(&mut self) {
        let run = |piece: &Piece| Run { first: PoolPage(piece.pool), len: piece.len };
        let runs: Vec<Run> = self.pieces.iter().map(run).collect();
        self.files.space.give_back(&runs);
    }
}

/// Commits and maps reserved space, and turns pages with bytes into unwritten ones, step by step.
async fn reserve_taken(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    (offset, end): (u64, u64),
    mut reserved: Unmapped<'_>,
    how: &Reserving,
) -> Result<(), Status> {
    let Reserving { keep_size, zero, .. } = *how;
    if !keep_size && end > file.size() {
        zero_tail(files, disk, file).await?;
    }
    if zero {
        file.end_grants(offset, end);
        zero_edges(files, disk, file, offset, end).await?;
    }
    let (converted, durable_size): (Vec<Piece>, u64) = {
        let state = file.state();
        let (first, last) = (offset.div_ceil(PAGE_SIZE_U64), end / PAGE_SIZE_U64);
        let pieces = state.table.pieces_in(first, last.max(first));
        (pieces.filter(|piece| zero && piece.state.has_bytes()).collect(), state.durable_size)
    };
    let mut converted = converted.into_iter().peekable();
    loop {
        let step = next_step(&reserved.pieces, &mut converted);
        if step.is_empty() {
            return Ok(());
        }
        let update = |(piece, _): &(Piece, bool)| RangeUpdate {
            first: FilePage(piece.first),
            end: FilePage(piece.end()),
            extents: vec![Piece { state: PieceState::Unwritten, ..*piece }.extent()],
        };
        let ranges = step.iter().map(update).collect();
        files.meta.commit_data(&[DataCommit::of_ranges(file.ino(), ranges, durable_size)])?;
        let is_new = |step: &&(Piece, bool)| step.1;
        reserved.pieces.drain(..step.iter().filter(is_new).count());
        file.change_layout(files.file_table(), &files.generations, |state| {
            for (piece, is_new) in &step {
                if *is_new {
                    state.table.insert(*piece);
                    continue;
                }
                state.table.set_state(piece.first, piece.end(), PieceState::Unwritten);
                let page = state.size / PAGE_SIZE_U64;
                state.tail_is_zero |= (piece.first..piece.end()).contains(&page);
            }
        });
        let emptied: Vec<Piece> = step.iter().filter(|step| !is_new(step)).map(|(piece, _)| *piece).collect();
        {
            let mut dirty = file.dirty.lock();
            for piece in &emptied {
                let mut behind = dirty.split_off(&FilePage(piece.first));
                dirty.append(&mut behind.split_off(&FilePage(piece.end())));
            }
        }
        let noted = note_space(files, file);
        vacate_pieces(files, &emptied).await;
        noted?;
        futures_lite::future::yield_now().await;
    }
}

/// The pieces of the next step, in file order: those to be mapped, with `true`, and those to be emptied, with `false`.
fn next_step(
    mapped: &VecDeque<Piece>,
    emptied: &mut Peekable<impl Iterator<Item = Piece>>,
) -> Vec<(Piece, bool)> {
    let mut mapped = mapped.iter().peekable();
    let mut step = Vec::new();
    while step.len() < STEP_PIECES {
        let is_first = |piece: &Piece| mapped.peek().is_none_or(|mapped| piece.first < mapped.first);
        let next = match emptied.next_if(is_first) {
            Some(piece) => (piece, false),
            None => match mapped.next() {
                Some(piece) => (*piece, true),
                None => break,
            },
        };
        step.push(next);
    }
    step
}
