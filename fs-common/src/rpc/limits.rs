//! The limits of a peer's requests; the server checks them in `fs-server/src/rpc/admit.rs` before anything is done.

use crate::ids::NAME_MAX;

/// Largest message of either side, header included. It has room for an extended attribute's value, or the list of them, of the length that Linux
/// allows; for directory pages and for inline data.
pub const MAX_MESSAGE_BYTES: u32 = 66 * 1024;
/// Largest payload that a write carries in its message; larger ones are pulled by RDMA READ (TeRM section 4.1.2). Chosen so that one message holds a
/// page and its header many times over, while rings of receive buffers stay small.
pub const MAX_INLINE_BYTES: usize = 16 * 1024;
/// Longest messages that an RNIC should copy when they are posted, if it can: most requests and replies without contents, with room for the name in
/// them. (RNICs usually give their work requests room in steps of 64 bytes.)
pub const POSTED_INLINE_BYTES: u32 = 256;
/// Largest read, write or copy of one request: the most that FUSE sends.
pub const MAX_TRANSFER_BYTES: u32 = 1024 * 1024;
/// Largest extended attribute value: Linux's `XATTR_SIZE_MAX`.
pub const XATTR_VALUE_MAX: usize = 64 * 1024;
/// Longest list of the names of an inode's extended attributes, each with a NUL: Linux's `XATTR_LIST_MAX`.
pub const XATTR_LIST_MAX: usize = 64 * 1024;
/// Longest extended attribute name (Linux's `XATTR_NAME_MAX`).
pub const XATTR_NAME_MAX: usize = NAME_MAX;
/// Most files that one request reclaims: the reply, with the longest encoding of each file's attributes, fits one message.
pub const RECLAIM_FILES_MAX: usize = 256;
/// Most files whose change counters one request asks for: request and reply fit one message.
pub const CHANGES_MAX: usize = 1024;
/// Most locks that one request reclaims: they fit one message with the longest encoding of each.
pub const RECLAIM_LOCKS_MAX: usize = 1024;
/// Most ended waits for locks that one reply tells: such a reply must be short enough to be kept for a retransmission.
pub const SETTLED_LOCKS_MAX: usize = 256;
/// Longest time that a server holds the question for ended waits: well below the time after which a client takes a connection without an answer for a
/// lost one.
pub const AWAIT_LOCKS_MAX_MS: u32 = 10_000;
/// Session slots of one client: how many requests it can have in flight.
pub const SLOTS_PER_SESSION: u16 = 64;
