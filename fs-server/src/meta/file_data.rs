//! The façade as file regions call it: data that changed in memory, data that became durable, truncation, and
//! files without a name.

use super::live::NoteData;
use super::metadata::Meta;
use super::operation::{Caller, DataCommit, DataStamp, Operation};
use super::written::Written;
use cuttlefs_common::attr::{Attr, FileKind, SetAttr, Timestamp};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::region::Extent;
use cuttlefs_common::status::Status;
use std::borrow::Cow;

impl Meta {
    /// Notes a change of an inode's data that is in memory only. Gives the attributes as they are now: if contents changed,
    /// both times are of this instant, and no other change of the inode has its counter.
    ///
    /// # Errors
    /// `Stale` if it is gone, `Invalid` if it is no regular file, `Io`.
    pub fn note_data(&self, ino: InodeNo, note: NoteData) -> Result<Attr, Status> {
        let mut shard = self.live.write(ino);
        if shard.get(ino).is_none() {
            let record = self.stored().inode(ino).map_err(|e| self.fail("note_data", e))?;
            let record = record.ok_or(Status::Stale)?;
            if record.kind != FileKind::File {
                return Err(Status::Invalid);
            }
            if note == NoteData::default() {
                return Ok(record.attr(ino));
            }
            shard.add(ino, record);
        }
        Ok(shard.note(ino, note, self.clock.now(), self.change_floor).attr(ino))
    }

    /// Gives a file times, in memory, which changes of its data leave alone until `release_times`: what recovery does to it
    /// was done before. Of one file at a time.
    ///
    /// # Errors
    /// As `note_data`.
    pub fn hold_times(&self, ino: InodeNo, mtime: Timestamp, ctime: Timestamp) -> Result<(), Status> {
        self.live.hold(ino, Some((mtime, ctime)));
        self.note_data(ino, NoteData { modified: true, ..NoteData::default() }).map(|_| ())
    }

    /// Its times move again.
    pub fn release_times(&self, ino: InodeNo) {
        self.live.hold(ino, None);
    }

    /// What of a file's contents is durable.
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

    /// Records data that is on the device: one batch for all. Files that are gone are skipped.
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

    /// Changes attributes; with a size, `data` is what the truncation does to the extents.
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
        let operation = Operation::SetAttr { ino, set: *set, commit: data };
        let outcome = self.execute(caller, &operation, &|_| true)?;
        outcome.attr.ok_or(Status::Io)
    }

    /// Inodes that lost their last name and are still kept.
    pub fn orphans(&self) -> Vec<InodeNo> {
        self.orphans.lock().iter().copied().collect()
    }

    /// Frees an orphan nobody has open; large files in several batches. Gives the extents no record names any
    /// more, whose pages may be used again after a flush. If the store fails half-way, what was freed until then
    /// is given, and the rest stays an orphan.
    ///
    /// # Errors
    /// `Invalid` if the inode still has a name, `Io`.
    pub fn reap(&self, ino: InodeNo) -> Result<Vec<Extent>, Status> {
        let mut freed = Vec::new();
        loop {
            // The mutex is free between batches, so that others get their turn during a large file.
            match self.execute(Caller::default(), &Operation::ReapOrphan { ino }, &|_| false) {
                Ok(outcome) => {
                    freed.extend(outcome.freed);
                    if !outcome.more {
                        self.orphans.lock().remove(&ino);
                        return Ok(freed);
                    }
                }
                Err(status) if freed.is_empty() => return Err(status),
                Err(_) => return Ok(freed),
            }
        }
    }
}
