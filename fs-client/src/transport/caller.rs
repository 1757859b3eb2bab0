//! The caller that a request is made for.

use cuttlefs_common::ids::TraceId;

/// The user for whom a request is made, and the trace id that joins the logs.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    /// User of the calling process.
    pub uid: u32,
    /// Group of the calling process.
    pub gid: u32,
    /// The permission bits that new inodes do not get, unless a default ACL says otherwise.
    pub umask: u16,
    /// Whether a change of contents takes set-id bits and capabilities from the file, because this caller may not keep them.
    pub drops_privileges: bool,
    /// Id of the FUSE request.
    pub trace: TraceId,
}

impl Caller {
    /// A caller without a umask that may keep the privileges of files that it writes.
    pub const fn new(uid: u32, gid: u32, trace: TraceId) -> Self {
        Self { uid, gid, umask: 0, drops_privileges: false, trace }
    }
}
