//! The caller that a request is made for.

use cuttlefs_common::ids::TraceId;

/// Who asks, and the id that joins the logs.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// User of the calling process.
    pub uid: u32,
    /// Group of the calling process.
    pub gid: u32,
    /// Permission bits that what it makes does not get, where no default ACL says otherwise.
    pub umask: u16,
    /// A change of contents takes set-id bits and capabilities from the file: it may not keep them.
    pub drops_privileges: bool,
    /// Id of the FUSE request.
    pub trace: TraceId,
}

impl Caller {
    /// Somebody without a umask who may keep privileges of files that he writes.
    pub const fn new(uid: u32, gid: u32, trace: TraceId) -> Self {
        Self { uid, gid, umask: 0, drops_privileges: false, trace }
    }
}
