//! Write: puts bytes into a file (DESIGN section 4).
//!
//! # How it works
//! A write that only overwrites bytes the file has shares the file with others of its kind; the pages' block locks
//! order them. Any other write has the file for itself: it takes space first, then places the bytes in pages nobody can
//! see yet, then maps them and moves the length, so that a reader sees a page either without or with all of its bytes.
//! Nothing is durable when it returns.
//!
//! # Failure
//! `NoSpace` before anything is changed. After a failed direct write or read, new pages are given back, and pages that
//! were overwritten may hold new bytes.

use super::Source;
use super::detach::{end_is_inside_bytes, take_holes, undo_allocation, vacate_pieces};
use super::pages::{Base, NewBytes, PageChange, change_pages};
use super::write_back::relieve;
use crate::log::{Change, Ticket};
use crate::pool::Reserve;
use crate::pool::disk::Disk;
use crate::region::range_table::{Piece, PieceState};
use crate::region::{FileRegion, FileState, NoteData, Placed, Regions, RequestId};
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::{FilePage, MAX_FILE_SIZE, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::region::divide;
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use cuttlefs_common::status::Status;
use parking_lot::Mutex;
use std::sync::Arc;

/// Where a write goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteAt {
    /// There.
    Offset(u64),
    /// At the end of the file, wherever that is by then (`O_APPEND`).
    End,
}

/// A done write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Where the bytes went.
    pub offset: u64,
    /// How many; all of them.
    pub len: u32,
    /// The file's attributes now.
    pub attr: Attr,
}

/// A write under way.
#[derive(Clone, Copy)]
struct Writing<'w> {
    regions: &'w Regions,
    disk: &'w dyn Disk,
    file: &'w Arc<FileRegion>,
    source: Source<'w>,
    /// Its identity becomes durable with the bytes, so that they are not written twice.
    request: Option<RequestId>,
    /// Room in the log, where there is one.
    ticket: Option<&'w Ticket<'w>>,
    /// Space that was kept for it.
    reserve: Option<&'w Mutex<Reserve>>,
}

/// Writes all of `source`.
///
/// # Errors
/// `Invalid` (longer than one transfer), `TooLarge`, `NoSpace`, `Stale`, `Io`.
pub async fn write(
    regions: &Regions,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    at: WriteAt,
    source: Source<'_>,
) -> Result<Written, Status> {
    write_for(regions, disk, file, at, source, None, None).await
}

/// The same for a request, whose identity becomes durable with the bytes: it is not done twice. It may take the pages of
/// a reserve.
///
/// # Errors
/// As `write`.
pub async fn write_for(
    regions: &Regions,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    at: WriteAt,
    source: Source<'_>,
    request: Option<RequestId>,
    reserve: Option<&Mutex<Reserve>>,
) -> Result<Written, Status> {
    let len = source.len();
    if len > MAX_TRANSFER_BYTES as usize {
        return Err(Status::Invalid);
    }
    relieve(regions, disk).await;
    let ticket = regions.begin_change(len, 1).await?;
    let writing = Writing { regions, disk, file, source, request, ticket: ticket.as_ref(), reserve };
    if let WriteAt::Offset(offset) = at {
        let end = end_of(offset, len)?;
        let shared = file.order.read().await;
        let overwrites = {
            let state = file.state();
            end <= state.size && changes_of(&state, offset, len).is_some()
        };
        if overwrites && len > 0 {
            let result = writing.overwrite(offset).await;
            drop(shared);
            return result;
        }
    }
    let _alone = file.order.write().await;
    file.usable()?;
    let offset = match at {
        WriteAt::Offset(offset) => offset,
        WriteAt::End => file.size(),
    };
    if len == 0 {
        return Ok(Written { offset, len: 0, attr: regions.meta.attr(file.ino())? });
    }
    writing.extend(offset).await
}

pub(super) fn end_of(offset: u64, len: usize) -> Result<u64, Status> {
    offset.checked_add(len as u64).filter(|end| *end <= MAX_FILE_SIZE).ok_or(Status::TooLarge)
}

/// The changes of a write over pages that all have bytes; `None` if one has none.
fn changes_of(state: &FileState, offset: u64, len: usize) -> Option<Vec<PageChange>> {
    divide(offset, len)
        .map(|part| {
            let (pool, piece) = state.table.get(part.page)?;
            piece.has_bytes().then_some(PageChange {
                file_page: part.page,
                pool,
                base: Base::Stored,
                offset_in_page: part.offset_in_page,
                len: part.len,
                offset_in_source: part.offset_in_request,
            })
        })
        .collect()
}

impl Writing<'_> {
    fn log(&self, offset: u64, ends: Option<u64>) -> Result<(), Status> {
        if self.ticket.is_none() {
            return Ok(());
        }
        let change = Change::Write { offset, bytes: &self.source.bytes(), ends };
        self.regions.log(self.ticket, self.request, self.file, change)
    }

    /// It was done: the next write-back says so.
    fn done(&self, state: &mut FileState, offset: u64) {
        state.uncommitted = true;
        if let Some(request) = self.request {
            state.note_done(request, Placed { offset, len: self.source.len() as u32 });
        }
    }

    /// Overwrites bytes the file has. The caller shares the file's order, so the mapping stays.
    async fn overwrite(&self, offset: u64) -> Result<Written, Status> {
        let Self { regions, disk, file, source, .. } = *self;
        file.usable()?;
        let changes = changes_of(&file.state(), offset, source.len()).ok_or(Status::Io)?;
        let log = || self.log(offset, None);
        let changed = change_pages(regions, disk, file, &changes, NewBytes::From(source), log).await;
        match changed {
            Ok(()) => file.change_bookkeeping(|state| self.done(state, offset)),
            Err(_) => file.change_bookkeeping(|state| state.uncommitted = true),
        }
        // After the change: a write-back that takes the file off the list looks at it afterwards.
        regions.list_dirty(file);
        changed?;
        let attr = regions.note_changed(self.ticket, file, NoteData::default())?;
        Ok(Written { offset, len: source.len() as u32, attr })
    }

    /// Writes with the file to itself: over holes, unwritten pages, the end.
    async fn extend(&self, offset: u64) -> Result<Written, Status> {
        let Self { regions, disk, file, source, .. } = *self;
        let end = end_of(offset, source.len())?;
        let (first, last) = (offset / PAGE_SIZE_U64, end.div_ceil(PAGE_SIZE_U64));
        let (new, runs) = take_holes(regions, file, (first, last), PieceState::Fresh, self.reserve).await?;
        let (changes, converted) = {
            let state = file.state();
            let converted: Vec<Piece> = state
                .table
                .pieces_in(first, last)
                .filter(|piece| piece.state == PieceState::Unwritten)
                .map(|piece| Piece { state: PieceState::Fresh, ..piece })
                .collect();
            (plan(&state, offset, source.len(), &new, &converted), converted)
        };
        let mut placed = Ok(());
        if end > file.size() {
            placed = zero_tail(regions, disk, file).await;
        }
        if placed.is_ok() {
            placed = change_pages(regions, disk, file, &changes, NewBytes::From(source), || Ok(())).await;
        }
        if placed.is_ok() {
            // Before anything shows it: a write-back that sees it finds it in the log.
            placed = self.log(offset, Some(end.max(file.size())));
        }
        if let Err(status) = placed {
            {
                let mut dirty = file.dirty.lock();
                for change in changes.iter().filter(|change| change.base == Base::Zeros) {
                    dirty.remove(&change.file_page);
                }
            }
            vacate_pieces(regions, &converted).await;
            undo_allocation(regions, &runs).await;
            note_modified(regions, file);
            return Err(status);
        }
        let mut note = NoteData::default();
        let mut update = |state: &mut FileState| {
            if end > state.size {
                state.size = end;
                // The new last page was zeros, or the old last page whose tail is zeros by now.
                state.tail_is_zero = true;
                note.size = Some(end);
            }
            self.done(state, offset);
            note.allocated_pages = Some(state.table.allocated_pages());
        };
        if new.is_empty() && converted.is_empty() {
            file.change_size(regions.file_table(), &mut update);
        } else {
            file.change_layout(regions.file_table(), &regions.generations, |state| {
                new.iter().for_each(|piece| state.table.insert(*piece));
                for piece in &converted {
                    state.table.set_state(piece.first, piece.end(), PieceState::Fresh);
                }
                update(state);
            });
        }
        regions.list_dirty(file);
        let attr = regions.note_changed(self.ticket, file, note)?;
        Ok(Written { offset, len: source.len() as u32, attr })
    }
}

/// Notes that a request was done whose bytes are in the file: the next write-back says so.
pub fn note_done(regions: &Regions, file: &Arc<FileRegion>, request: RequestId, placed: Placed) {
    file.change_bookkeeping(|state| state.note_done(request, placed));
    regions.list_dirty(file);
}

/// Something was changed that the store does not know: on the list with it.
pub fn note_modified(regions: &Regions, file: &Arc<FileRegion>) {
    file.change_bookkeeping(|state| state.uncommitted = true);
    // After the change: a write-back that takes the file off the list looks at it afterwards.
    regions.list_dirty(file);
}

/// Makes the bytes of the last page past the end zeros, before the file grows over them. The caller has the file for
/// itself.
pub(super) async fn zero_tail(
    regions: &Regions,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
) -> Result<(), Status> {
    let change = {
        let state = file.state();
        let inside = (state.size % PAGE_SIZE_U64) as usize;
        let page = FilePage::containing(state.size);
        if state.tail_is_zero {
            return Ok(());
        }
        end_is_inside_bytes(&state, state.size).then(|| state.table.get(page)).flatten().map(|(pool, _)| {
            PageChange {
                file_page: page,
                pool,
                base: Base::Stored,
                offset_in_page: inside,
                len: PAGE_SIZE - inside,
                offset_in_source: 0,
            }
        })
    };
    if let Some(change) = change {
        let changed = change_pages(regions, disk, file, &[change], NewBytes::Zeros, || Ok(())).await;
        note_modified(regions, file);
        changed?;
    }
    file.change_bookkeeping(|state| state.tail_is_zero = true);
    Ok(())
}

/// The changes of a write over any pages; `new` and `converted` are those without bytes as yet.
fn plan(state: &FileState, offset: u64, len: usize, new: &[Piece], converted: &[Piece]) -> Vec<PageChange> {
    let without_bytes = |page: u64| {
        [new, converted].into_iter().find_map(|pieces| {
            let at = pieces.partition_point(|piece| piece.end() <= page);
            let piece = pieces.get(at).filter(|piece| piece.first <= page)?;
            Some(piece.pool + (page - piece.first))
        })
    };
    divide(offset, len)
        .map(|part| {
            let (pool, base) = match without_bytes(part.page.0) {
                Some(pool) => (pool.into(), Base::Zeros),
                None => {
                    let (pool, _) = state.table.get(part.page).expect("a page that is no hole is mapped");
                    (pool, Base::Stored)
                }
            };
            PageChange {
                file_page: part.page,
                pool,
                base,
                offset_in_page: part.offset_in_page,
                len: part.len,
                offset_in_source: part.offset_in_request,
            }
        })
        .collect()
}
