//! Write: puts bytes into a file.
//!
//! # How it works
//! A write that only overwrites existing bytes shares the file with other such writes; the pages' block locks order them. Any other write has the
//! file to itself: it allocates space first, then puts the bytes into pages that no reader can see yet, then maps these and changes the length, so
//! that a reader sees a page either without or with all of its bytes. Nothing is durable when it returns.
//!
//! The bytes, their change counter and the request's answer are added to the file under one lock, so that a sync of the file has all three or none.
//!
//! # Failure
//! `NoSpace` before anything is changed. After a failed direct write or read, new pages are given back, and overwritten pages may have new bytes.

use super::detach::{end_is_inside_bytes, take_holes, undo_allocation, vacate_pieces};
use super::write_back::relieve;
use crate::files::range_table::{Piece, PieceState};
use crate::files::{FileRegion, FileState, Files};
use crate::meta::{Answer, NoteData, RequestId};
use crate::pages::{Base, NewBytes, PageChange, Source};
use crate::pool::disk::Disk;
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::{FilePage, MAX_FILE_SIZE, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::region::divide;
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// The place of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteAt {
    /// At this offset.
    Offset(u64),
    /// At the end of the file as of then (`O_APPEND`).
    End,
}

/// The result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// The offset of the bytes.
    pub offset: u64,
    /// The number of bytes: all of them.
    pub len: u32,
    /// The file's attributes after the write.
    pub attr: Attr,
}

/// Whose write it is.
#[derive(Clone, Copy)]
pub enum Writer<'a> {
    /// A client's, by request. The answer to the request, if it is the last part of that, becomes durable with the bytes, so that the write is not done
    /// twice.
    Request(Option<Asked<'a>>),
    /// A write grant's: a one-sided change that a worker makes. No client has a copy of it.
    Grant,
}

impl Writer<'_> {
    /// Makes the file longer, for a write that ends at `end`, behind the file's end.
    pub(super) fn lengthen(self, state: &mut FileState, end: u64) {
        if matches!(self, Self::Grant) {
            let start = state.size;
            state.unsynced_appends.note(start, end);
        }
        state.size = end;
    }

    /// Notes that the write was done, and its answer if it has one.
    pub(super) fn note_done(self, state: &mut FileState, written: &Written) {
        if let Self::Request(Some((request, answer))) = self {
            state.note_done(request, answer(written), written.attr.change);
        }
    }
}

/// The request of a write, and a function that makes its answer from the result.
pub type Asked<'a> = (RequestId, &'a dyn Fn(&Written) -> Answer);

impl Written {
    /// The answer to the request of a write.
    pub fn answer(&self) -> Answer {
        let Self { offset, len, attr } = *self;
        Answer::Written { offset, len, size: attr.size, change: attr.change }
    }
}

/// The context of a write.
#[derive(Clone, Copy)]
struct Writing<'w> {
    files: &'w Files,
    disk: &'w dyn Disk,
    file: &'w Arc<FileRegion>,
    source: Source<'w>,
    writer: Writer<'w>,
}

/// Writes all of `source`. The answer to the request, if there is one, becomes durable with the bytes, so that the write is not done twice.
///
/// # Errors
/// `Invalid` (longer than one transfer), `TooLarge`, `NoSpace`, `Stale`, `Io`.
pub async fn write_for(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    at: WriteAt,
    source: Source<'_>,
    asked: Option<Asked<'_>>,
) -> Result<Written, Status> {
    write_within(files, disk, file, at, source, Writer::Request(asked), &|_, _| Ok(())).await
}

/// Like `write_for`, for a writer who may not write everywhere. `may` is asked about the bytes `[start, end)` once it is known where these are; until
/// the write is done, neither the file's length nor its mapping changes otherwise.
///
/// # Errors
/// As `write_for`, and those of `may`, with nothing changed.
pub(super) async fn write_within(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    at: WriteAt,
    source: Source<'_>,
    writer: Writer<'_>,
    may: &dyn Fn(u64, u64) -> Result<(), Status>,
) -> Result<Written, Status> {
    let len = source.len();
    if len > MAX_TRANSFER_BYTES as usize {
        return Err(Status::Invalid);
    }
    relieve(files, disk).await;
    let writing = Writing { files, disk, file, source, writer };
    if let WriteAt::Offset(offset) = at {
        let end = end_of(offset, len)?;
        let shared = file.order.read().await;
        let overwrites = {
            let state = file.state();
            end <= state.size && changes_of(&state, offset, len).is_some()
        };
        if overwrites && len > 0 {
            may(offset, end)?;
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
    may(offset, end_of(offset, len)?)?;
    if len == 0 {
        return Ok(Written { offset, len: 0, attr: files.meta.attr(file.ino())? });
    }
    writing.extend(offset).await
}

pub(super) fn end_of(offset: u64, len: usize) -> Result<u64, Status> {
    offset.checked_add(len as u64).filter(|end| *end <= MAX_FILE_SIZE).ok_or(Status::TooLarge)
}

/// The page changes of a write to pages that all have bytes; `None` if one of them has none.
pub(super) fn changes_of(state: &FileState, offset: u64, len: usize) -> Option<Vec<PageChange>> {
    divide(offset, len)
        .map(|part| {
            let (pool, piece) = state.table.get(part.page)?;
            piece.has_bytes().then(|| PageChange::of(part, pool, Base::Stored))
        })
        .collect()
}

impl Writing<'_> {
    /// Notes that the write was done, for clients and for the next write-back.
    fn done(&self, state: &mut FileState, offset: u64, note: NoteData) -> Result<Written, Status> {
        state.uncommitted = true;
        let attr = self.files.note_changed(self.file, note)?;
        let written = Written { offset, len: self.source.len() as u32, attr };
        self.writer.note_done(state, &written);
        Ok(written)
    }

    /// Overwrites existing bytes. The caller shares the file's order, so the mapping stays.
    async fn overwrite(&self, offset: u64) -> Result<Written, Status> {
        let Self { files, disk, file, source, .. } = *self;
        file.usable()?;
        let changes = changes_of(&file.state(), offset, source.len()).ok_or(Status::Io)?;
        let changed = files.pages.change(disk, &**file, &changes, NewBytes::From(source)).await;
        let written = file.change_bookkeeping(|state| match changed {
            Ok(()) => self.done(state, offset, NoteData::default()),
            Err(status) => {
                state.uncommitted = true;
                Err(status)
            }
        });
        // After the change: a write-back that takes the file off the list sees the change.
        files.list_dirty(file);
        written
    }

    /// Writes with the file to itself: over holes, over unwritten pages, past the end.
    async fn extend(&self, offset: u64) -> Result<Written, Status> {
        let Self { files, disk, file, source, .. } = *self;
        let end = end_of(offset, source.len())?;
        let (first, last) = (offset / PAGE_SIZE_U64, end.div_ceil(PAGE_SIZE_U64));
        let (new, runs) = take_holes(files, file, (first, last), PieceState::Fresh).await?;
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
            placed = zero_tail(files, disk, file).await;
        }
        if placed.is_ok() {
            placed = files.pages.change(disk, &**file, &changes, NewBytes::From(source)).await;
        }
        if let Err(status) = placed {
            {
                let mut dirty = file.dirty.lock();
                for change in changes.iter().filter(|change| change.base == Base::Zeros) {
                    dirty.remove(&change.file_page);
                }
            }
            vacate_pieces(files, &converted).await;
            undo_allocation(files, &runs).await;
            note_modified(files, file);
            return Err(status);
        }
        let written = {
            let mut state = file.state_mut();
            let mut note = NoteData::default();
            if end > state.size {
                self.writer.lengthen(&mut state, end);
                // The last page is a new one, or the old one whose tail is zeros by now.
                state.tail_is_zero = true;
                note.size = Some(end);
            }
            new.iter().for_each(|piece| state.table.insert(*piece));
            for piece in &converted {
                state.table.set_state(piece.first, piece.end(), PieceState::Fresh);
            }
            note.allocated_pages = Some(state.table.allocated_pages());
            // Before anybody learns the new change counter, so that whoever reads then sees the change.
            if new.is_empty() && converted.is_empty() {
                state.show_size(files.file_table());
            } else {
                state.show_layout(files.file_table(), &files.generations);
            }
            self.done(&mut state, offset, note)
        };
        files.list_dirty(file);
        written
    }
}

/// Notes that a request was done that changed the file, with its counter, for the next write-back.
pub(super) fn note_done(
    files: &Files,
    file: &Arc<FileRegion>,
    request: RequestId,
    answer: Answer,
    change: u64,
) {
    file.change_bookkeeping(|state| state.note_done(request, answer, change));
    files.list_dirty(file);
}

/// Notes that the file has a change that the store does not have, and lists the file for write-back.
pub(super) fn note_modified(files: &Files, file: &Arc<FileRegion>) {
    file.change_bookkeeping(|state| state.uncommitted = true);
    // After the change: a write-back that takes the file off the list sees the change.
    files.list_dirty(file);
}

/// Zeros the bytes of the last page past the end, before the file grows over them. The caller has the file to itself.
pub(super) async fn zero_tail(files: &Files, disk: &dyn Disk, file: &Arc<FileRegion>) -> Result<(), Status> {
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
        let changed = files.pages.change(disk, &**file, &[change], NewBytes::Zeros).await;
        note_modified(files, file);
        changed?;
    }
    file.change_bookkeeping(|state| state.tail_is_zero = true);
    Ok(())
}

/// The page changes of a write to any pages; `new` and `converted` are the pages that have no bytes yet.
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
            PageChange::of(part, pool, base)
        })
        .collect()
}
