//! Changes that the server has made and that this mount keeps no copy of are made durable here: the answer came when that server was lost
//! already, or there are no bytes to keep.

use super::unsynced::in_message;
use super::{ServerOpen, Session};
use crate::transport::interrupt::Whole;
use crate::transport::{Caller, DataBuffer, FsError};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{Reply, Request, Restored, SyncScope};
use cuttlefs_common::status::Status;

impl Session {
    /// Makes durable what a server has answered that was lost before this mount had noted it, or that came after the first one that
    /// was asked had been lost. `answered_by` is the session, `change` the file's counter then.
    ///
    /// # Errors
    /// `Io` if it is lost; as the server says.
    pub(crate) fn settle_write(
        &self,
        caller: &Caller,
        file: &ServerOpen,
        (offset, bytes): (u64, &[u8]),
        change: u64,
        answered_by: u64,
    ) -> Result<(), FsError> {
        self.sync_where_done(caller, file.ino(), ((), answered_by), || {
            let mut lane = self.borrow_lane()?;
            let restore = |buffer: &DataBuffer| {
                let what = in_message(Restored::Bytes { offset, bytes }, buffer);
                Request::Restore { filekey: file.filekey(), change, what }
            };
            let is_lost = lane.call(caller, restore, |reply, _| match reply {
                Reply::Restored { lost } => Ok(lost),
                _ => Err(FsError::Server(Status::Malformed)),
            })?;
            if is_lost { Err(FsError::Server(Status::Io)) } else { Ok(((), lane.session_number())) }
        })
    }

    /// Makes durable what a server has done to a file, which this mount keeps nothing of to restore: a sync counts if the same session
    /// answers it that answered what was done. If it does not, it is done `again`, and synced again. `done` and what `again` gives are
    /// an answer and the session it came from. Nothing of it is given up.
    ///
    /// # Errors
    /// As the server and `again` say.
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
            let sync = || Request::Sync(SyncScope::InodeContents(ino));
            let take = |reply: Reply<'_>| {
                if reply == Reply::Done { Ok(()) } else { Err(FsError::Server(Status::Malformed)) }
            };
            let ((), synced_by) = self.call_noting_session(caller, sync, take)?;
            let (answer, done_by) = done;
            if synced_by == done_by {
                self.unsynced.synced(Some(ino), mark);
                return Ok(answer);
            }
            done = again()?;
        }
    }
}
