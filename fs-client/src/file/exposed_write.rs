//! One-sided writes, for comparison: only servers of the region policies `pin` and `odp` take them, and only benchmarks make them.
//!
//! The bytes bypass the server's CPU: the file's times and change counter do not change, this mount keeps no copy, and a server that is killed before
//! the write-back loses the bytes.

use super::handles::HandleState;
use super::remote::RemoteVolume;
use super::volume::{FsError, Handle};
use cuttlefs_common::rdma::Remote;
use cuttlefs_common::rpc::{MAX_TRANSFER_BYTES, OneSidedReads};

impl RemoteVolume {
    /// Overwrites bytes of an open file by one WRITE. `false`: the link or the server does not support that, or the file has no bytes there, or the
    /// connection broke; in the last case it is not known which bytes are there.
    ///
    /// # Errors
    /// `BadHandle`; the server is away.
    pub fn write_exposed(&self, handle: Handle, offset: u64, bytes: &[u8]) -> Result<bool, FsError> {
        self.handles.with(handle, |state| self.write_past(state, offset, bytes))
    }

    fn write_past(&self, state: &HandleState, offset: u64, bytes: &[u8]) -> Result<bool, FsError> {
        let Some(attachment) = self.session.look() else { return Ok(false) };
        let is_exposed = attachment.attached.one_sided == OneSidedReads::Whole
            && self.session.target_translates_for(&attachment);
        if !is_exposed || bytes.len() > MAX_TRANSFER_BYTES as usize {
            return Ok(false);
        }
        let place = Remote::File { filekey: state.file().filekey(), offset };
        self.session.borrow_lane()?.write_place(attachment.attached.session, place, bytes)
    }
}
