//! Work requests and their completions.

use super::sges::SgeList;
use crate::ids::{FileKey, Lkey, QpNumber, Rkey};

/// The poster's name for a work request; it comes back in the completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct WrId(pub u64);

/// Rights of a registration, after `ibv_access_flags`. Local reading is always allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// The local RNIC may write the memory (receives, targets of READs).
    pub local_write: bool,
    /// Peers may READ it.
    pub remote_read: bool,
    /// Peers may WRITE it.
    pub remote_write: bool,
    /// Peers may do atomics on it.
    pub remote_atomic: bool,
    /// Peers may FLUSH it (`IBV_ACCESS_FLUSH_GLOBAL`, and with a persistence domain `IBV_ACCESS_FLUSH_PERSISTENT`).
    pub remote_flush: bool,
    /// Number of first bytes, in whole pages, that belong to the owner: peers may READ and FLUSH them by the region's
    /// [`super::MemoryRegion::read_rkey`], but neither WRITE them nor do atomics there. Over shared memory, where the initiator is the RNIC, nothing
    /// enforces this: peers that map memory are trusted.
    pub own_bytes: u64,
}

impl Access {
    /// All rights.
    pub const ALL: Self = Self {
        local_write: true,
        remote_read: true,
        remote_write: true,
        remote_atomic: true,
        remote_flush: true,
        own_bytes: 0,
    };
    /// Only local reading.
    pub const NONE: Self = Self {
        local_write: false,
        remote_read: false,
        remote_write: false,
        remote_atomic: false,
        remote_flush: false,
        own_bytes: 0,
    };
    /// For buffers that only the local side fills, and peers never read: receive buffers, targets of READs.
    pub const LOCAL: Self = Self { local_write: true, ..Self::NONE };
}

/// What peers may do with memory whose pages come and go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PagedAccess {
    /// READ it.
    Read,
    /// READ and WRITE it.
    ReadWrite,
}

impl PagedAccess {
    /// The same as rights.
    pub const fn rights(self) -> Access {
        Access { remote_read: true, remote_write: matches!(self, Self::ReadWrite), ..Access::NONE }
    }
}

/// A range of locally registered memory: one scatter-gather element of a request's [`SgeList`]. Laid out as `ibv_sge`, so that a post over an RNIC copies
/// no ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Sge {
    /// Offset in the registered memory, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// The registration.
    pub lkey: Lkey,
}

impl Sge {
    /// No bytes at all, for sends without a payload.
    pub const EMPTY: Self = Self { lkey: Lkey(0), offset: 0, len: 0 };
}

/// The memory or file that a one-sided work request names at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remote {
    /// A range of a plain memory region; `offset` counts from the region's start.
    Memory {
        /// The region's remote key.
        rkey: Rkey,
        /// Byte offset in the region.
        offset: u64,
    },
    /// A range of a file (FileMR section 3): the target translates. Pages on SSD come back as the magic
    /// pattern. A READ past the end of the file completes with fewer bytes.
    File {
        /// Key of the open file.
        filekey: FileKey,
        /// File offset.
        offset: u64,
    },
    /// The page bitmap of a file: one bit a file page from `first_page` (a multiple of 8) on, set if the page
    /// needs no SSD: resident, hole or unwritten (TeRM section 4.2).
    Bitmap {
        /// Key of the open file.
        filekey: FileKey,
        /// First file page; a multiple of 8.
        first_page: u64,
    },
}

/// How far a FLUSH takes the written bytes (IBTA memory placement extensions, placement type).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Everybody who reads the memory at the target sees the bytes.
    Visibility,
    /// The bytes outlive a crash of the target. Only regions with a persistence domain support this.
    Persistence,
}

/// How far a FLUSH can reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FlushReach {
    /// There is no FLUSH. For visibility the initiator READs the range's last byte instead: a READ comes behind earlier WRITEs, and pushes them to
    /// where the target's processors see them. Persistence is refused with `RemoteInvalid`: the target's processor has to flush when it is told to
    /// (RFlush).
    None,
    /// To visibility.
    Visibility,
    /// To persistence.
    Persistence,
}

impl FlushReach {
    /// The reach of a region with these rights, at a device that can do everything that the region's persistence domain allows.
    pub fn of(access: Access, has_domain: bool) -> Self {
        match has_domain {
            _ if !access.remote_flush => Self::None,
            false => Self::Visibility,
            true => Self::Persistence,
        }
    }

    /// Its name, for status.
    pub const fn label(self) -> &'static str {
        match self {
            Self::None => "no FLUSH: visibility by READ, persistence by the receiver (RFlush)",
            Self::Visibility => "FLUSH to visibility, persistence by the receiver (RFlush)",
            Self::Persistence => "FLUSH to visibility and persistence",
        }
    }
}

/// The operation of a send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOp {
    /// Two-sided message.
    Send,
    /// Two-sided message with 32 bits of immediate data.
    SendImm(u32),
    /// One-sided read into the local ranges.
    Read(Remote),
    /// One-sided write from the local ranges: to `Remote::Memory`, or to `Remote::File` at a target that supports it (`FileTarget::write_file`).
    Write(Remote),
    /// One-sided write that also consumes a receive at the peer, and delivers the immediate there.
    WriteImm(Remote, u32),
    /// 64-bit compare and swap at an 8-byte aligned place of memory or, at a target that supports it, of a file; the old value lands in the local
    /// range (one, of 8 bytes).
    CompareSwap {
        /// The aligned place.
        remote: Remote,
        /// The value to compare with: the swap happens only if it is there.
        expect: u64,
        /// The value to store.
        swap: u64,
    },
    /// 64-bit fetch and add, at such a place; the old value lands in the local range (one, of 8 bytes).
    FetchAdd {
        /// The aligned place.
        remote: Remote,
        /// The value to add.
        add: u64,
    },
    /// One-sided append (FileMR sections 3.2 and 4): the target places the bytes of the local ranges at the present end of a file, all of them together,
    /// and no other append comes between. Only at a target that supports it (`FileTarget::append_file`).
    Append {
        /// Key of the open file.
        filekey: FileKey,
        /// 8 bytes of registered memory, in which the offset of the bytes lands (little-endian). They may lie in the local ranges: their bytes are sent
        /// before.
        placed: Sge,
    },
    /// Takes `len` bytes of remote memory, as earlier requests of this queue pair left them, as far as `placement` says, and completes then. The
    /// local ranges are empty. Later requests may execute before the FLUSH is done, but complete after it.
    Flush {
        /// The first byte; only `Remote::Memory`.
        remote: Remote,
        /// Number of bytes.
        len: u32,
        /// How far.
        placement: Placement,
    },
}

impl SendOp {
    /// The kind of its completion.
    pub fn kind(&self) -> CompletionKind {
        match self {
            Self::Send | Self::SendImm(_) => CompletionKind::Send,
            Self::Read(_) => CompletionKind::Read,
            Self::Write(_) | Self::WriteImm(..) => CompletionKind::Write,
            Self::CompareSwap { .. } => CompletionKind::CompareSwap,
            Self::FetchAdd { .. } => CompletionKind::FetchAdd,
            Self::Append { .. } => CompletionKind::Append,
            Self::Flush { .. } => CompletionKind::Flush,
        }
    }
}

/// A send work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SendWr {
    /// The poster's name for the request, which comes back in the completion.
    pub wr_id: WrId,
    /// The operation.
    pub op: SendOp,
    /// Local bytes: source of sends and writes, which gather them, target of reads and atomics. A READ fills the ranges in order.
    pub local: SgeList,
    /// Whether success makes a completion, too. Failure always does.
    pub signaled: bool,
}

/// A receive work request: room for one incoming message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecvWr {
    /// The poster's name for the request, which comes back in the completion.
    pub wr_id: WrId,
    /// Room for the message, which fills the ranges in order.
    pub local: SgeList,
}

/// The result of a work request, after `ibv_wc_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WcStatus {
    /// Done.
    Success,
    /// A message was longer than the receive buffer, or a reply than the local ranges; or the local ranges of a request are together too long.
    LocalLength,
    /// A local key or range is not registered, or not for this use. Nothing was sent, and none of the ranges was filled.
    LocalProtection,
    /// The target refused the request: key, range or right.
    RemoteAccess,
    /// The target does not support this operation.
    RemoteInvalid,
    /// The target could not execute the request this time (`IBV_WC_REM_OP_ERR`).
    RemoteOperation,
    /// The target has no space for the bytes, and has changed nothing. No RNIC has such a status: it is of changes of files, where the target translates.
    RemoteNoSpace,
    /// The queue pair went into `Error` before this request was done.
    Flushed,
    /// The connection is gone.
    Disconnected,
}

/// The kind of the work request that completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum CompletionKind {
    Send,
    Recv,
    RecvWithImm,
    Read,
    Write,
    CompareSwap,
    FetchAdd,
    Append,
    Flush,
    Bind,
    Invalidate,
}

/// One completion, after `ibv_wc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The name of the work request.
    pub wr_id: WrId,
    /// The queue pair it was posted to.
    pub qp: QpNumber,
    /// The kind of the request.
    pub kind: CompletionKind,
    /// The result.
    pub status: WcStatus,
    /// Bytes that arrived, for a receive or a read (a file read may stop at the end of the file).
    pub byte_len: u32,
    /// Immediate data, if any came.
    pub imm: Option<u32>,
    /// A READ or WRITE touched a page of paged memory that was not there. Only where this end looks pages up ([`super::QueuePair::looks_pages_up`]);
    /// such a request completes even if it was not signaled.
    pub absent: bool,
}

/// States of a queue pair, after `ibv_qp_state`. The connection manager drives Reset to ReadyToSend.
///
/// | from        | event                       | to          |
/// |-------------|-----------------------------|-------------|
/// | Init        | handshake done              | ReadyToSend |
/// | Init        | handshake failed, closed    | Error       |
/// | ReadyToSend | access error, cut, close    | Error       |
/// | Error       | anything                    | Error       |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QpState {
    /// Receives may be posted; not connected yet.
    Init,
    /// Connected.
    ReadyToSend,
    /// Broken for good; make a new one.
    Error,
}

impl QpState {
    /// Whether the table above has this transition.
    pub const fn may_become(self, next: QpState) -> bool {
        matches!(
            (self, next),
            (QpState::Init, QpState::ReadyToSend | QpState::Error)
                | (QpState::ReadyToSend | QpState::Error, QpState::Error)
        )
    }
}

/// Why a post was refused; nothing was posted from the named request on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The queue is full: poll completions first.
    #[error("the work queue is full after {posted} requests; poll completions, then post the rest")]
    QueueFull {
        /// Number of requests of the list that were posted.
        posted: usize,
    },
    /// The queue pair does not take requests in its state.
    #[error("the queue pair is in state {state:?}; make a new connection")]
    BadState {
        /// The state it is in.
        state: QpState,
    },
    /// A request names more local ranges than the queue pair, or the shared queue, was made for.
    #[error(
        "request {posted} names more than {most} local ranges; split it, or ask for more with the queue pair (QpConfig::sges)"
    )]
    TooManySges {
        /// Number of requests of the list that were posted.
        posted: usize,
        /// The most.
        most: u32,
    },
    /// The queue pair takes its receives from a shared queue.
    #[error("this queue pair takes its receives from a shared queue; post them there")]
    SharedReceives,
}
