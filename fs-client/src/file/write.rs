//! The way of a write, and of the sync that makes it durable.
//!
//! A copy of the written bytes is kept until a sync covers them: a writer takes room for the copy before it asks the server, and notes the
//! copy with the session that answered.

use super::handles::HandleState;
use super::remote::{RemoteVolume, unless_fenced};
use super::replies::{done, unexpected};
use super::volume::{Caller, FsError, WriteHow, Written};
use crate::session::{ServerOpen, SessionLane};
use crate::transport::DataBuffer;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{MAX_TRANSFER_BYTES, Reply, Request, SyncScope};
use cuttlefs_common::status::Status;

impl RemoteVolume {
    /// Writes all of `bytes` through an open file, in parts that fit a request.
    pub(super) fn write_through(
        &self,
        caller: &Caller,
        state: &HandleState,
        offset: u64,
        bytes: &[u8],
        how: WriteHow,
    ) -> Result<Written, FsError> {
        let (mut written, mut all_durable) = (0, true);
        let (mut first, mut change) = (offset, 0);
        for chunk in bytes.chunks(MAX_TRANSFER_BYTES as usize) {
            let once = || self.write_once(caller, state, offset + u64::from(written), how.append, chunk);
            match self.through(caller, state, once) {
                Ok((at, len, counted, durable)) => {
                    if written == 0 {
                        first = at;
                    }
                    change = counted;
                    written += len;
                    all_durable &= durable;
                }
                // The bytes written so far are written: POSIX asks for the short count, and the next write gets the error.
                Err(_) if written > 0 => break,
                Err(error) => return Err(error),
            }
        }
        if how.sync && !all_durable {
            let ino = state.file().ino();
            self.sync(caller, state, SyncScope::InodeContents(ino))?;
        }
        Ok(Written { offset: first, len: written, change })
    }

    /// Writes. Returns where the bytes were written, their number, the file's change counter, and whether they are durable.
    fn write_once(
        &self,
        caller: &Caller,
        state: &HandleState,
        offset: u64,
        append: bool,
        bytes: &[u8],
    ) -> Result<(u64, u32, u64, bool), FsError> {
        let file = state.file();
        // A copy of every answered write is kept.
        let room = self.session.room_for(bytes.len())?;
        let mut lane = self.session.borrow_lane()?;
        let epoch = self.session.recovered_epoch();
        let (at, len, change) =
            unless_fenced(file, self.send_write(&mut lane, caller, file, offset, append, bytes))?;
        let session = lane.session_number();
        drop(lane);
        let bytes = &bytes[..len as usize];
        if self.session.recovered_since(epoch)
            || !self.session.unsynced().note(room, session, file.ino(), at, bytes, change)
        {
            // The server that answered was lost before the bytes were noted. Or an earlier server was lost that may have done the write: then the
            // counter is the one that it had stored.
            self.session.settle_write(caller, file, (at, bytes), change, session)?;
            return Ok((at, len, change, true));
        }
        Ok((at, len, change, false))
    }

    /// Sends a write. Returns where the bytes were written, their number, and the file's change counter.
    fn send_write(
        &self,
        lane: &mut SessionLane<'_>,
        caller: &Caller,
        file: &ServerOpen,
        offset: u64,
        append: bool,
        bytes: &[u8],
    ) -> Result<(u64, u32, u64), FsError> {
        let take = |reply: Reply<'_>| match reply {
            Reply::Written { offset, len, change, .. } => Ok((offset, len.min(bytes.len() as u32), change)),
            other => unexpected(other),
        };
        // The payload is built for each attempt: a fetch on another connection may have used the buffer in between.
        let build = |buffer: &DataBuffer| Request::Write {
            filekey: file.filekey(),
            offset,
            append,
            payload: buffer.payload(bytes),
        };
        lane.call(caller, build, |reply, _| take(reply))
    }

    pub(super) fn sync(&self, caller: &Caller, state: &HandleState, scope: SyncScope) -> Result<(), FsError> {
        let ino = state.file().ino();
        self.sync_kept(caller, ino, scope)?;
        let lost = self.session.unsynced().losses().tell(ino, &state.losses_told);
        if lost { Err(FsError::Server(Status::Io)) } else { Ok(()) }
    }

    /// After it no change that was noted before will be restored. Losses are reported by fsync, and not here.
    pub(super) fn sync_kept(&self, caller: &Caller, ino: InodeNo, scope: SyncScope) -> Result<(), FsError> {
        let unsynced = self.session.unsynced();
        let mark = unsynced.mark();
        self.session.call(caller, || Request::Sync(scope), done)?;
        unsynced.synced(Some(ino), mark);
        Ok(())
    }
}
