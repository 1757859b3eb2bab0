//! Makes changes durable of which this mount can keep no copy: because the server that answered them was lost before they were noted, or because the
//! bytes were never here.

use super::unsynced::{Unsynced, in_message};
use super::{ServerOpen, Session};
use crate::transport::interrupt::Whole;
use crate::transport::{Caller, DataBuffer, FsError};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{Reply, Request, Restored, SyncScope};
use cuttlefs_common::status::Status;

impl Session {
    /// Makes a write durable that could not be noted: its server was lost before, or it was answered after an earlier server, which may have done it,
    /// was lost. `answered_by` is the session that answered, `change` the file's counter in the answer.
    ///
    /// # Errors
    /// `Io` if the write is lost; else the server's error.
    pub(crate) fn settle_write(
        &self,
        caller: &Caller,
        file: &ServerOpen,
        (offset, bytes): (u64, &[u8]),
        change: u64,
        answered_by: u64,
    ) -> Result<(), FsError> {
        self.sync_where_done(caller, file.ino(), ((), answered_by), || {
            let restore = |buffer: &DataBuffer| {
                let what = in_message(Restored::Bytes { offset, bytes }, buffer);
                Request::Restore { filekey: file.filekey(), change, what }
            };
            let (lane, is_lost) = loop {
                self.open_again(caller, file)?;
                let mut lane = self.borrow_lane()?;
                let restored = lane.call(caller, restore, |reply, _| match reply {
                    Reply::Restored { lost } => Ok(lost),
                    _ => Err(FsError::Server(Status::Malformed)),
                });
                match restored {
                    // Another recovery came between.
                    Err(FsError::Server(Status::Stale)) if file.region_key().is_some() && file.is_lost() => {}
                    restored => break (lane, restored?),
                }
            };
            if is_lost { Err(FsError::Server(Status::Io)) } else { Ok(((), lane.session_number())) }
        })
    }

    /// Has a cut or an allocation noted that was answered. If a server was lost since `epoch`, before the request, the answer may be that one's, with a
    /// counter of its life: if this server is lost, too, it would seem overwritten by changes of this life. So it is made durable now. If that fails, it
    /// stays noted as it is.
    pub(crate) fn note_answered(
        &self,
        caller: &Caller,
        ino: InodeNo,
        epoch: u64,
        note: impl FnOnce(&Unsynced),
    ) {
        note(&self.unsynced);
        if !self.recovered_since(epoch) {
            return;
        }
        let mark = self.unsynced.mark();
        if self.sync_contents(caller, ino).is_ok() {
            self.unsynced.synced(Some(ino), mark);
        }
    }

    /// Syncs a file's contents. Returns the number of the session that answered.
    fn sync_contents(&self, caller: &Caller, ino: InodeNo) -> Result<u64, FsError> {
        let sync = || Request::Sync(SyncScope::InodeContents(ino));
        let take = |reply: Reply<'_>| {
            if reply == Reply::Done { Ok(()) } else { Err(FsError::Server(Status::Malformed)) }
        };
        self.call_noting_session(caller, sync, take).map(|((), synced_by)| synced_by)
    }

    /// Makes a server's change to a file durable of which this mount keeps no copy. `done` is the answer and the number of the session that it came
    /// from. A sync counts only if the same session answers it; otherwise `again` makes the change again and returns the new answer and session, and
    /// the sync is repeated. This call cannot be interrupted.
    ///
    /// # Errors
    /// The errors of the server and of `again`.
    pub(crate) fn sync_where_done<T>(
        &self,
        caller: &Caller,
        ino: InodeNo,
        mut done: (T, u64),
        mut again: impl FnMut() -> Result<(T, u64), FsError>,
    ) -> Result<T, FsError> {
        let _whole = Whole::begin();
        loop {
            let mark = self.unsynced.mark();
            let synced_by = self.sync_contents(caller, ino)?;
            let (answer, done_by) = done;
            if synced_by == done_by {
                self.unsynced.synced(Some(ino), mark);
                return Ok(answer);
            }
            done = again()?;
        }
    }
}
