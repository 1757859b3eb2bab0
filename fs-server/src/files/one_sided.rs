//! One-sided changes under write grants: WRITEs, atomics and APPENDs that the NIC engine executes (docs/file-regions.md; FileMR sections 3.2 and 4).
//!
//! # How it works
//! The filekey gives the file, the right to write, and the part of the file that the key is good for. A WRITE or an atomic shares the file's order,
//! as an overwrite by RPC does: length and mapping stay meanwhile, and the range must be before the end and granted. If a page of it has no bytes yet,
//! the change has the file to itself. So has an APPEND, as an append by RPC has: appends come one after another, whoever makes them. New pages are
//! those that the grant has for the place, and for an APPEND beyond its grants those of the free page queue (`new_pages`). `Pages` changes the bytes
//! under the page protocol, so that write-back, checksums and readers miss nothing; the file's times and change counter move as with any write.
//!
//! The engine waits for nothing. If a lock is not free, a page not in a frame, or metadata not in memory, the request is a fault (`one_sided_faults`).
//!
//! # Failure
//! `RemoteAccess`, with nothing changed, for a filekey that is unknown, has no right to write or no grant of the range; for a range that is not all
//! before the end of the file or not in the key's part; for a file that is immutable, or may only be appended to (not for APPEND), or has set-id bits
//! or capabilities, which a write by RPC takes from it. `RemoteInvalid` under region policies without grants. `RemoteNoSpace`, with nothing changed, if the
//! pool is full and the filekey's grants have set nothing aside for the place. `RemoteOperation` for a failed device, and at a stop.

use super::new_pages::{NewPages, Placement};
use super::range_table::PieceState;
use super::write::{Writer, Written, changes_of, end_of};
use super::{FileRegion, Files, KeyedFile};
use crate::meta::NoteData;
use crate::pages::{WordPlace, add};
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::{FileKey, FilePage, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::rdma::{FileAtomic, FileValue, FileWrite, RegionOwner, WcStatus};
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// Who makes the attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// The NIC engine, which never waits.
    Engine,
    /// A thread that may wait for the store.
    FaultThread,
}

/// What came of a change at a place where pages may have no bytes yet.
pub(super) enum Placed {
    /// It was made. The file had these attributes behind it.
    Done(Attr),
    /// There is no frame or no space for a page. Nothing was changed.
    Lacking,
    /// Somebody has the lock of one of these pages, or one of them is not in a frame. Nothing was changed.
    Waits(Vec<PoolPage>),
}

/// The status for an RPC's.
pub(super) fn refusal(status: Status) -> WcStatus {
    match status {
        Status::Stale | Status::Denied | Status::NotPermitted | Status::TooLarge => WcStatus::RemoteAccess,
        Status::Unsupported => WcStatus::RemoteInvalid,
        Status::NoSpace => WcStatus::RemoteNoSpace,
        _ => WcStatus::RemoteOperation,
    }
}

impl Files {
    /// The file of a filekey that may change it one-sidedly.
    pub(super) fn grantable(&self, owner: RegionOwner, filekey: FileKey) -> Result<KeyedFile, Status> {
        if !self.grants_writes() {
            return Err(Status::Unsupported);
        }
        let keyed = self.keyed(owner, filekey)?;
        if !keyed.rights.write || keyed.file.is_directory() {
            return Err(Status::Denied);
        }
        keyed.file.usable()?;
        Ok(keyed)
    }

    /// Checks that a filekey may overwrite `[offset, end)`. The caller has the file's order, so that the answer stays true.
    pub(super) fn check_overwrite(
        &self,
        keyed: &KeyedFile,
        filekey: FileKey,
        offset: u64,
        end: u64,
    ) -> Result<(), Status> {
        let KeyedFile { file, .. } = keyed;
        file.check_marks(false)?;
        let may =
            keyed.holds(offset, end) && end <= file.size() && file.grants.lock().cover(filekey, offset, end);
        if may { Ok(()) } else { Err(Status::Denied) }
    }

    /// Checks that a filekey may append at `[offset, end)`, under the same lock.
    pub(super) fn check_append(
        &self,
        keyed: &KeyedFile,
        filekey: FileKey,
        offset: u64,
        end: u64,
    ) -> Result<(), Status> {
        keyed.file.check_marks(true)?;
        let may = keyed.holds(offset, end) && keyed.file.grants.lock().has(filekey);
        if may { Ok(()) } else { Err(Status::Denied) }
    }

    /// Whether a change of the file can be made now, past all that an RPC does first. `Err`: it cannot be made one-sidedly at all.
    fn is_plain(&self, file: &FileRegion, by: By) -> Result<bool, Status> {
        // While clients may restore older changes, new ones are noted by range.
        if self.newer.is_noting() {
            return Ok(false);
        }
        match by {
            By::Engine => Ok(self.meta.notes_at_once(file.ino())),
            By::FaultThread if self.meta.attr(file.ino())?.has_privileges() => Err(Status::Denied),
            By::FaultThread => Ok(true),
        }
    }

    /// Notes that a one-sided change was made. The caller has the file's order.
    pub(super) fn note_one_sided(&self, file: &Arc<FileRegion>) -> Result<(), Status> {
        let noted = file.change_bookkeeping(|state| {
            state.uncommitted = true;
            let attr = self.note_changed(file, NoteData::default())?;
            state.note_contents(attr.change);
            Ok(())
        });
        // After the change: a write-back that takes the file off the list sees the change.
        self.list_dirty(file);
        noted
    }

    /// A WRITE, without waiting for anybody.
    pub(super) fn try_write(
        &self,
        (owner, filekey): (RegionOwner, FileKey),
        offset: u64,
        bytes: &[u8],
        by: By,
    ) -> Result<FileWrite, Status> {
        let keyed = self.grantable(owner, filekey)?;
        let file = &keyed.file;
        let end = end_of(offset, bytes.len())?;
        let Some(_going) = self.one_sided_writes_ended.try_read().filter(|ended| !**ended) else {
            return Err(Status::Io);
        };
        let (Some(_restores_wait), Some(shared)) = (file.changes.try_read(), file.order.try_read()) else {
            return Ok(FileWrite::Faults);
        };
        self.check_overwrite(&keyed, filekey, offset, end)?;
        if bytes.is_empty() {
            return Ok(FileWrite::Done);
        }
        if !self.is_plain(file, by)? {
            return Ok(FileWrite::Faults);
        }
        let changes = changes_of(&file.state(), offset, bytes.len());
        if let Some(changes) = changes {
            if self.pages.change_at_once(&**file, &changes, bytes, &mut Vec::new()).is_none() {
                return Ok(FileWrite::Faults);
            }
            return self.note_one_sided(file).map(|()| FileWrite::Done);
        }
        // A page has no bytes yet: the mapping changes.
        drop(shared);
        let Some(_alone) = file.order.try_write() else { return Ok(FileWrite::Faults) };
        self.check_overwrite(&keyed, filekey, offset, end)?;
        if !self.is_plain(file, by)? {
            return Ok(FileWrite::Faults);
        }
        match self.place_at_once(file, filekey, offset, bytes, Writer::Grant)? {
            Placed::Done(_) => Ok(FileWrite::Done),
            Placed::Lacking | Placed::Waits(_) => Ok(FileWrite::Faults),
        }
    }

    /// An atomic, without waiting for anybody. The place is aligned.
    pub(super) fn try_atomic(
        &self,
        (owner, filekey): (RegionOwner, FileKey),
        offset: u64,
        operation: FileAtomic,
        by: By,
    ) -> Result<FileValue, Status> {
        let keyed = self.grantable(owner, filekey)?;
        // It tells the word that was there.
        if !keyed.rights.read {
            return Err(Status::Denied);
        }
        let file = &keyed.file;
        let end = end_of(offset, 8)?;
        let Some(_going) = self.one_sided_writes_ended.try_read().filter(|ended| !**ended) else {
            return Err(Status::Io);
        };
        let (Some(_restores_wait), Some(shared)) = (file.changes.try_read(), file.order.try_read()) else {
            return Ok(FileValue::Faults);
        };
        self.check_overwrite(&keyed, filekey, offset, end)?;
        if let Some(place) = word_at(file, offset) {
            if !self.is_plain(file, by)? {
                // A change has to wait. A compare-swap that finds another word changes nothing.
                let Some(old) = self.pages.word_at_once(place).filter(|old| operation.apply(*old) == *old)
                else {
                    return Ok(FileValue::Faults);
                };
                add(&self.pages.counters.target_atomics, 1);
                return Ok(FileValue::Done(old));
            }
            let changed = self.pages.change_word_at_once(&**file, place, |old| operation.apply(old));
            let Some(old) = changed else { return Ok(FileValue::Faults) };
            add(&self.pages.counters.target_atomics, 1);
            if operation.apply(old) != old {
                self.note_one_sided(file)?;
            }
            return Ok(FileValue::Done(old));
        }
        drop(shared);
        let Some(_alone) = file.order.try_write() else { return Ok(FileValue::Faults) };
        self.check_overwrite(&keyed, filekey, offset, end)?;
        if !self.is_plain(file, by)? || word_at(file, offset).is_some() {
            return Ok(FileValue::Faults);
        }
        // The word is a hole's.
        let new = operation.apply(0);
        if new != 0 {
            let placed = self.place_at_once(file, filekey, offset, &new.to_le_bytes(), Writer::Grant)?;
            if !matches!(placed, Placed::Done(_)) {
                return Ok(FileValue::Faults);
            }
        }
        add(&self.pages.counters.target_atomics, 1);
        Ok(FileValue::Done(0))
    }

    /// An APPEND, without waiting for anybody.
    pub(super) fn try_append(
        &self,
        (owner, filekey): (RegionOwner, FileKey),
        bytes: &[u8],
        by: By,
    ) -> Result<FileValue, Status> {
        let keyed = self.grantable(owner, filekey)?;
        let file = &keyed.file;
        let Some(_going) = self.one_sided_writes_ended.try_read().filter(|ended| !**ended) else {
            return Err(Status::Io);
        };
        let (Some(_restores_wait), Some(_alone)) = (file.changes.try_read(), file.order.try_write()) else {
            return Ok(FileValue::Faults);
        };
        let offset = file.size();
        let end = end_of(offset, bytes.len())?;
        self.check_append(&keyed, filekey, offset, end)?;
        if bytes.is_empty() {
            return Ok(FileValue::Done(offset));
        }
        if !self.is_plain(file, by)? || !file.state().tail_is_zero {
            return Ok(FileValue::Faults);
        }
        let placed = self.place_at_once(file, filekey, offset, bytes, Writer::Grant)?;
        if !matches!(placed, Placed::Done(_)) {
            return Ok(FileValue::Faults);
        }
        add(&self.pages.counters.target_appends, 1);
        Ok(FileValue::Done(offset))
    }

    /// Puts bytes at a place where pages may have none yet, or behind the end. The caller has the file to itself, and the bytes of its last page that
    /// are behind its end are zeros if it grows.
    pub(super) fn place_at_once(
        &self,
        file: &Arc<FileRegion>,
        filekey: FileKey,
        offset: u64,
        bytes: &[u8],
        writer: Writer<'_>,
    ) -> Result<Placed, Status> {
        // Looked at before the lock was had.
        file.usable()?;
        let mut pages = NewPages::of(file, filekey, &self.free_pages);
        let Some(placed) = pages.place(file, offset, bytes.len()) else { return Ok(Placed::Lacking) };
        let Some(pins) = self.pages.change_at_once(&**file, &placed.changes, bytes, pages.frames()) else {
            return Ok(Placed::Waits(placed.changes.iter().map(|change| change.pool).collect()));
        };
        add(&self.pages.counters.queue_pages, pages.used(pins));
        self.map_placed(file, (offset, bytes.len()), &placed, writer).map(Placed::Done)
    }

    /// Maps the pages of a change of so many bytes, and makes the file longer if it ends behind its end.
    pub(super) fn map_placed(
        &self,
        file: &Arc<FileRegion>,
        (offset, len): (u64, usize),
        placed: &Placement,
        writer: Writer<'_>,
    ) -> Result<Attr, Status> {
        let end = offset + len as u64;
        let noted = {
            let mut state = file.state_mut();
            if end > state.size {
                writer.lengthen(&mut state, end);
            }
            placed.new.iter().for_each(|piece| state.table.insert(*piece));
            for page in &placed.converted {
                state.table.set_state(*page, page + 1, PieceState::Fresh);
            }
            // Before anybody learns the new change counter, so that whoever reads then sees the change.
            if placed.new.is_empty() && placed.converted.is_empty() {
                state.show_size(self.file_table());
            } else {
                state.show_layout(self.file_table(), &self.generations);
            }
            state.uncommitted = true;
            let (size, allocated_pages) = (Some(state.size), Some(state.table.allocated_pages()));
            let noted = self.note_changed(file, NoteData { size, allocated_pages, ..NoteData::default() });
            noted.inspect(|attr| {
                state.note_contents(attr.change);
                writer.note_done(&mut state, &Written { offset, len: len as u32, attr: *attr });
            })
        };
        // After the change: a write-back that takes the file off the list sees the change.
        self.list_dirty(file);
        noted
    }
}

/// The place of a word of a file, if its page has bytes.
pub(super) fn word_at(file: &FileRegion, offset: u64) -> Option<WordPlace> {
    let file_page = FilePage::containing(offset);
    let (pool, piece) = file.state().table.get(file_page)?;
    let offset_in_page = (offset % PAGE_SIZE_U64) as usize;
    piece.has_bytes().then_some(WordPlace { file_page, pool, offset_in_page })
}
