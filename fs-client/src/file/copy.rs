//! Copies of bytes from one file into another: through this client if they fit one request, else by the server.

use super::handles::HandleState;
use super::remote::RemoteVolume;
use super::replies::unexpected;
use super::volume::{Caller, Copied, FsError, Handle, Volume, WriteHow};
use cuttlefs_common::attr::InodeFlags;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{MAX_TRANSFER_BYTES, Reply, Request};
use cuttlefs_common::status::Status;

impl RemoteVolume {
    /// Copies up to `len` bytes from one handle and offset to another. Returns the number of bytes copied.
    pub(super) fn copy(
        &self,
        caller: &Caller,
        (from, source, from_offset): (Handle, &HandleState, u64),
        (to, to_offset): (&HandleState, u64),
        len: u64,
    ) -> Result<Copied, FsError> {
        if !source.how.read || !to.how.write {
            return Err(FsError::Server(Status::Denied));
        }
        let ino = source.file().ino();
        // A copy to a place beyond the end of its own source makes the source longer. So bound the length first: if the request is sent again it
        // copies no more.
        let len = len.min(self.get_attr(caller, ino)?.size.saturating_sub(from_offset));
        let (from_end, to_end) = (from_offset.saturating_add(len), to_offset.saturating_add(len));
        if ino == to.file().ino() && from_offset < to_end && to_offset < from_end {
            return Err(FsError::Server(Status::Invalid));
        }
        if len <= u64::from(MAX_TRANSFER_BYTES) {
            // `copy_here` ends in a write, which a handle that was open before may do in spite of chattr marks. A copy may not.
            let marks = self.get_attr(caller, to.file().ino())?.flags;
            if marks.has(InodeFlags::IMMUTABLE) || marks.has(InodeFlags::APPEND_ONLY) {
                return Err(FsError::Server(Status::NotPermitted));
            }
            return self.copy_here(caller, from, from_offset, to, to_offset, len as u32);
        }
        let build = || Request::CopyRange {
            from: source.file().filekey(),
            from_offset,
            to: to.file().filekey(),
            to_offset,
            len,
        };
        self.copy_there(caller, to.file().ino(), build)
    }

    /// Copies bytes that fit one request through this client: the copy is then a write like any other, and a copy of its bytes is kept.
    fn copy_here(
        &self,
        caller: &Caller,
        from: Handle,
        from_offset: u64,
        to: &HandleState,
        to_offset: u64,
        len: u32,
    ) -> Result<Copied, FsError> {
        let mut bytes = Vec::with_capacity(len as usize);
        self.read(caller, from, from_offset, len, &mut |read| bytes.extend_from_slice(read))?;
        if bytes.is_empty() {
            return Ok(Copied { len: 0, change: 0 });
        }
        let how = WriteHow { append: false, sync: to.how.sync };
        let written = self.write_through(caller, to, to_offset, &bytes, how)?;
        Ok(Copied { len: written.len.into(), change: written.change })
    }

    /// Has the server copy. This mount has no copy of the bytes that it could restore after a kill of the server. So this call returns when the
    /// copied bytes are durable; if the server is lost before, the next one is told to copy again.
    fn copy_there<'r>(
        &self,
        caller: &Caller,
        target: InodeNo,
        build: impl Fn() -> Request<'r>,
    ) -> Result<Copied, FsError> {
        let take = |reply: Reply<'_>| match reply {
            Reply::Copied { len, change } => Ok(Copied { len, change }),
            other => unexpected(other),
        };
        let copy = || self.session.call_noting_session(caller, &build, take);
        let (copied, copied_by) = copy()?;
        if copied.len == 0 || self.session.unsynced().answers_are_durable() {
            return Ok(copied);
        }
        self.session.sync_where_done(caller, target, (copied, copied_by), copy)
    }
}
