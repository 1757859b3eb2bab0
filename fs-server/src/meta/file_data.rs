//! The façade for file regions: data that changed in memory, data that became durable, truncation, and files without a name.

use super::error::MetaError;
use super::key;
use super::live::NoteData;
use super::metadata::Meta;
use super::operation::{Caller, CutStep, DataCommit, DataStamp, Operation, REAP_BATCH_EXTENTS, RangeUpdate};
use super::record::{self, CounterRecord, InodeRecord};
use super::store::Direction;
use super::written::Written;
use cuttlefs_common::attr::{Attr, FileKind, SetAttr};
use cuttlefs_common::ids::{FilePage, InodeNo};
use cuttlefs_common::region::Extent;
use cuttlefs_common::status::Status;
use std::borrow::Cow;
use std::sync::Arc;

/// Behind the last page of any file.
const MAX_PAGE: FilePage = FilePage(u64::MAX);

/// A file whose attributes are in memory as long as this is.
pub(crate) struct KeptInode {
    meta: Arc<Meta>,
    ino: InodeNo,
}

impl Drop for KeptInode {
    fn drop(&mut self) {
        self.meta.live.write(self.ino).release(self.ino);
    }
}

impl Meta {
    /// Notes a change of an inode's data that is in memory only. Returns the attributes as of now. If contents changed, both times are the present
    /// time, and no other change of the inode has its change counter.
    ///
    /// # Errors
    /// `Stale` if it is gone, `Invalid` if it is not a regular file, `Io`.
    pub fn note_data(&self, ino: InodeNo, note: NoteData) -> Result<Attr, Status> {
        let mut shard = self.live.write(ino);
        if shard.get(ino).is_none() {
            let record = self.stored_file(ino)?;
            if note == NoteData::default() {
                return Ok(record.attr(ino));
            }
            shard.add(ino, record);
        }
        Ok(shard.note(ino, note, self.clock.now(), self.change_floor).attr(ino))
    }

    /// Keeps a file's attributes in memory until the result is dropped, so that a change of its contents can be noted without reading the store.
    ///
    /// # Errors
    /// As `note_data`.
    pub(crate) fn keep_in_memory(self: &Arc<Self>, ino: InodeNo) -> Result<KeptInode, Status> {
        let mut shard = self.live.write(ino);
        if shard.get(ino).is_none() {
            shard.add(ino, self.stored_file(ino)?);
        }
        shard.keep(ino);
        Ok(KeptInode { meta: self.clone(), ino })
    }

    /// The record of a regular file in the store. The caller has the shard of its inode.
    fn stored_file(&self, ino: InodeNo) -> Result<InodeRecord, Status> {
        let record = self.stored().inode(ino).map_err(|e| self.fail("note_data", e))?;
        let record = record.ok_or(Status::Stale)?;
        if record.kind == FileKind::File { Ok(record) } else { Err(Status::Invalid) }
    }

    /// Whether a change of contents can be noted now without reading the store, and takes no privileges (set-id bits, capabilities) from the file.
    pub(crate) fn notes_at_once(&self, ino: InodeNo) -> bool {
        self.live.get_at_once(ino).is_some_and(|live| !live.record.attr(ino).has_privileges())
    }

    /// The time of the server's clock, in milliseconds of Unix time.
    pub(crate) fn now_ms(&self) -> u64 {
        let now = self.clock.now();
        u64::try_from(now.secs).unwrap_or(0).saturating_mul(1000) + u64::from(now.nanos / 1_000_000)
    }

    /// The part of a file's contents that is durable.
    ///
    /// # Errors
    /// `Stale` if it is gone, `Io`.
    pub fn written(&self, ino: InodeNo) -> Result<Written, Status> {
        let shard = self.live.read(ino);
        if let Some(live) = shard.get(ino) {
            return Ok(live.record.written);
        }
        let record = self.stored().inode(ino).map_err(|e| self.fail("written", e))?;
        record.map(|record| record.written).ok_or(Status::Stale)
    }

    /// Commits data that is on the device, in one batch for all files. Files that are gone are skipped.
    ///
    /// # Errors
    /// `Invalid` if an update is not well-formed, `Io`.
    pub fn commit_data(&self, commits: &[DataCommit]) -> Result<(), Status> {
        let mut writer = self.writer.lock();
        let stamp = |commit: &DataCommit| {
            let record = self.live.get(commit.ino)?.record;
            Some(DataStamp { mtime: record.mtime, ctime: record.ctime, change: record.change })
        };
        let stamps = commits.iter().map(stamp).collect();
        let operation = Operation::CommitData { commits: Cow::Borrowed(commits), stamps };
        self.execute_locked(&mut writer, Caller::default(), &operation, &|_| true)
            .map(|_| ())
            .map_err(|e| self.fail("commit_data", e))
    }

    /// Changes attributes. With a size, `data` is the change of the extents by the truncation.
    ///
    /// # Errors
    /// As POSIX says; `Io`.
    pub fn set_attr(
        &self,
        caller: Caller,
        ino: InodeNo,
        set: &SetAttr,
        data: Option<DataCommit>,
    ) -> Result<Attr, Status> {
        let operation = Operation::SetAttr { ino, set: *set, commit: data.map(Box::new) };
        let outcome = self.execute(caller, &operation, &|_| true)?;
        outcome.attr.ok_or(Status::Io)
    }

    /// Inodes that lost their last name and still exist.
    pub fn orphans(&self) -> Vec<InodeNo> {
        self.orphans.lock().iter().copied().collect()
    }

    /// Frees an orphan that is not open, or the last part of a large one. Returns the extents that no record has any more, whose pages may be used
    /// again after a flush. If there are more, also returns the page below which the next step begins; the first step begins at `FilePage(u64::MAX)`.
    /// If the store fails half-way, the rest stays an orphan.
    ///
    /// # Errors
    /// `Invalid` if the inode still has a name, `Io`.
    pub fn reap_step(
        &self,
        ino: InodeNo,
        below: FilePage,
    ) -> Result<(Vec<Extent>, Option<FilePage>), Status> {
        let outcome = self.execute(Caller::default(), &Operation::ReapOrphan { ino, below }, &|_| false)?;
        if !outcome.more {
            self.orphans.lock().remove(&ino);
        }
        let next = outcome.freed.last().map(|extent| extent.file_page).filter(|_| outcome.more);
        Ok((outcome.freed, next))
    }

    /// Does all steps, one after another.
    ///
    /// # Errors
    /// As `reap_step`.
    pub fn reap(&self, ino: InodeNo) -> Result<Vec<Extent>, Status> {
        let (mut all, mut below) = (Vec::new(), Some(FilePage(u64::MAX)));
        while let Some(page) = below {
            let (freed, next) = self.reap_step(ino, page)?;
            all.extend(freed);
            below = next;
        }
        Ok(all)
    }

    /// Finishes the cuts that the server before this one had begun, in steps of the same size.
    pub(super) fn finish_cuts(&self) -> Result<(), MetaError> {
        for ino in self.all_inos(key::tag::CUT)? {
            let key = key::cut(ino);
            let Some(value) = self.store.get(&key)? else { continue };
            let CounterRecord(from) = record::parse(&value).map_err(MetaError::record(&key))?;
            tracing::info!(%ino, page = from, "finishing the cut of a file");
            let (mut more, mut end) = (true, MAX_PAGE);
            while more {
                let mut writer = self.writer.lock();
                let Some(inode) = self.stored().inode(ino)? else { break };
                let (mut first, mut count) = (FilePage(from), 0);
                // A step's removed records lie from `end` on, and are not read again.
                self.stored().extents(ino, FilePage(from), end, Direction::Reverse, &mut |extent| {
                    first = extent.file_page;
                    count += 1;
                    count < REAP_BATCH_EXTENTS
                })?;
                more = count == REAP_BATCH_EXTENTS;
                // The last step also cuts the extent that reaches over the page.
                let first = if more { first } else { FilePage(from) };
                let range = RangeUpdate { first, end, extents: Vec::new() };
                end = first;
                let cut = if more { CutStep::Unchanged } else { CutStep::Done };
                let commit = DataCommit { cut, ..DataCommit::of_ranges(ino, vec![range], inode.size) };
                let operation =
                    Operation::CommitData { commits: Cow::Owned(vec![commit]), stamps: vec![None] };
                self.execute_locked(&mut writer, Caller::default(), &operation, &|_| true)?;
            }
        }
        Ok(())
    }
}
