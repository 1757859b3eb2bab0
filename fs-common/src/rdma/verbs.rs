//! Traits and types of the verbs-shaped API.
//!
//! # How it works
//! As with libibverbs: memory is registered and named by keys; work requests are posted to queue pairs, many
//! with one ring of the doorbell; completions are polled from completion queues. Connections are made as with
//! rdma_cm: a listener, a connect, private data with both.
//!
//! # Invariants
//! * Work requests of one queue pair execute in the order posted; completions of one queue pair come in that order.
//! * A buffer named by a posted work request belongs to the provider until its completion is polled.
//! * A bad key, a range past the region or a missing right completes at the initiator with `RemoteAccess`, puts
//!   the queue pair into `Error` (as an RC QP does), and changes nothing at the target.
//! * After a queue pair enters `Error`, every outstanding work request completes with `Flushed`.
//! * SENDs and WRITEs of at most [`QueuePair::max_inline`] bytes are copied when they are posted: the poster may change their memory at once.
//! * Unsignaled work requests complete silently unless they fail.
//! * A FLUSH covers every earlier SEND, WRITE and atomic of its queue pair to its range. It is refused with
//!   `RemoteAccess` like any one-sided request, with `RemoteInvalid` if it asks for persistence of a region that has no
//!   persistence domain (hardware: `RemoteAccess`), and fails with `RemoteOperation` if the device behind it does. How far it goes:
//!   [`FlushReach`], of a device and of a region.
//! * A READ never tears an aligned word of eight bytes, in ranges of up to 512 bytes, and a queue pair's later READs see nothing older (IBTA volume
//!   1, 9.5: requests execute in order; PCIe reads of a cache line are coherent).
//! * A WRITE whose end is aligned to eight bytes stores its last eight bytes after all others
//!   (`Capabilities::word_last`).
//!
//! Only `CompletionQueue::wait`, `ProtectionDomain::connect` and `Listener::accept` block.

use super::hardware::HardwareFigures;
use super::memory_window::MemoryWindow;
use super::peer::{OVERFLOW_USER, PeerIdentity};
use super::shared_receives::SharedReceiveQueue;
use super::url::Endpoint;
use crate::ids::{FileKey, Lkey, QpNumber, Rkey};
use crate::memory::SharedMemory;
use crate::persist::Persistence;
use serde::{Deserialize, Serialize};
use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

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
    /// Number of first bytes, in whole pages, that belong to the owner: peers may READ and FLUSH them by the region's [`MemoryRegion::read_rkey`],
    /// but neither WRITE them nor do atomics there. Over shared memory, where the initiator is the RNIC, nothing enforces this: peers that map memory
    /// are trusted.
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

/// A range of locally registered memory: one scatter-gather element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// The registration.
    pub lkey: Lkey,
    /// Offset in the registered memory, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
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
    /// One-sided read into the local range.
    Read(Remote),
    /// One-sided write from the local range: to `Remote::Memory`, or to `Remote::File` at a target that supports it (`FileTarget::write_file`).
    Write(Remote),
    /// One-sided write that also consumes a receive at the peer, and delivers the immediate there.
    WriteImm(Remote, u32),
    /// 64-bit compare and swap at an 8-byte aligned place; the old value lands in the local range (8 bytes).
    CompareSwap {
        /// The aligned place.
        remote: Remote,
        /// The value to compare with: the swap happens only if it is there.
        expect: u64,
        /// The value to store.
        swap: u64,
    },
    /// 64-bit fetch and add; the old value lands in the local range (8 bytes).
    FetchAdd {
        /// The aligned place.
        remote: Remote,
        /// The value to add.
        add: u64,
    },
    /// Takes `len` bytes of remote memory, as earlier requests of this queue pair left them, as far as `placement` says, and completes then. The
    /// local range is empty. Later requests may execute before the FLUSH is done, but complete after it.
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
    /// Local bytes: source of sends and writes, target of reads and atomics.
    pub local: Sge,
    /// Whether success makes a completion, too. Failure always does.
    pub signaled: bool,
}

/// A receive work request: room for one incoming message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecvWr {
    /// The poster's name for the request, which comes back in the completion.
    pub wr_id: WrId,
    /// Room for the message.
    pub local: Sge,
}

/// The result of a work request, after `ibv_wc_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WcStatus {
    /// Done.
    Success,
    /// A message was longer than the receive buffer, or a reply than the local range.
    LocalLength,
    /// The local key or range is not registered, or not for this use.
    LocalProtection,
    /// The target refused the request: key, range or right.
    RemoteAccess,
    /// The target does not support this operation.
    RemoteInvalid,
    /// The target could not execute the request this time (`IBV_WC_REM_OP_ERR`).
    RemoteOperation,
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
    /// The queue pair takes its receives from a shared queue.
    #[error("this queue pair takes its receives from a shared queue; post them there")]
    SharedReceives,
}

/// Errors of set-up calls.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// The operating system refused.
    #[error("{action} {endpoint}: {source}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// The endpoint.
        endpoint: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The peer speaks another protocol or version, or broke the handshake.
    #[error("handshake with {endpoint} failed: {reason}")]
    Handshake {
        /// The endpoint.
        endpoint: String,
        /// What was wrong, and what to do.
        reason: String,
    },
    /// The peer refuses the connection.
    #[error("{endpoint} refused the connection: {reason}")]
    Refused {
        /// The endpoint.
        endpoint: String,
        /// The reason, in the peer's words.
        reason: String,
    },
    /// This side does not trust the user who listens there.
    #[error(
        "user {uid} listens at {endpoint}, and not root or you; if that is to be your server, say so: --server-user {uid}, or \
         for a mount -o server-user={uid} ({overflow} is anybody whom this user namespace does not know)",
        overflow = OVERFLOW_USER
    )]
    Untrusted {
        /// The endpoint.
        endpoint: String,
        /// The user.
        uid: u32,
    },
    /// The device does not support this.
    #[error("{0}")]
    Unsupported(String),
    /// The listener or device was shut down.
    #[error("shut down")]
    Closed,
}

/// Abilities of a device beyond plain verbs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The target translates `Remote::File` and `Remote::Bitmap`.
    pub file_regions: bool,
    /// `Connected::windows` holds the target's exported windows, where the link maps memory.
    pub windows: bool,
    /// Largest two-sided message in bytes.
    pub max_message_bytes: u32,
    /// Largest one-sided transfer in bytes.
    pub max_transfer_bytes: u32,
    /// Largest depth of a queue.
    pub max_queue_depth: u32,
    /// A WRITE's last aligned word is stored after its other bytes: a poller that finds it finds them, too.
    pub word_last: bool,
    /// How far a FLUSH that is posted here can reach, by the RNIC and its library. The region bounds it, too ([`MemoryRegion::flush_reach`]).
    pub flush: FlushReach,
    /// The RNIC has ATOMIC WRITE (IBTA memory placement extensions). For status only: nothing posts it.
    pub atomic_write: bool,
    /// There are shared receive queues ([`ProtectionDomain::create_shared_receives`]).
    pub shared_receives: bool,
    /// There are memory windows ([`QueuePair::create_window`]).
    pub memory_windows: bool,
    /// Memory whose pages are pointed can be registered, and is followed: a READ finds the page that is there at that moment (on-demand paging).
    pub on_demand_paging: bool,
    /// A FLUSH covers SENDs, too: the target's RNIC places messages without the target's CPU, or orders the FLUSH behind their placement.
    pub flush_after_send: bool,
}

/// The link that carries a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkKind {
    /// Software RNIC over shared memory.
    Shm,
    /// Software RNIC over TCP.
    Tcp,
    /// Software RNIC, the TCP protocol over a Unix socket.
    Unix,
    /// An RNIC.
    Rdma,
    /// Both ends in one thread, for simulation.
    Sim,
}

/// The session whose rights the one-sided file requests of a connection need; 0: no session, all are refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RegionOwner(pub u64);

/// A window that the target exports, as a whole, to initiators that translate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum WindowId {
    /// The frames (magic frame first).
    Frames = 1,
    /// The residency table.
    Residency = 2,
    /// The file table.
    FileTable = 3,
}

impl WindowId {
    /// All windows, in handshake order.
    pub const ALL: [WindowId; 3] = [WindowId::Frames, WindowId::Residency, WindowId::FileTable];
}

/// What the NIC engine achieved of a file read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileRead {
    /// The read is done: this number of bytes precedes the end of the file.
    Done(usize),
    /// A page must be brought into memory first. The queue pair stalls while `read_file_faulting` does it.
    Faults,
}

/// What the NIC engine achieved of a file write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileWrite {
    /// The file has the bytes.
    Done,
    /// The write has to wait first. The queue pair stalls while `write_file_faulting` does it.
    Faults,
}

/// The target's side of target translation: the NIC engine reads files without an RPC worker.
pub trait FileTarget: Send + Sync {
    /// Fills `out` with the file's bytes from `offset` on: holes and unwritten ranges as zeros, pages that are not resident (or change all the time)
    /// as the magic pattern. A target that faults instead leaves `out` alone. Never blocks on disk, network or a lock held across one.
    ///
    /// # Errors
    /// `WcStatus::RemoteAccess` if `filekey` is unknown, of another owner, or without the right to read; `RemoteInvalid` if this target reads no
    /// files; `RemoteOperation` if the bytes cannot be read in this way now.
    fn read_file(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<FileRead, WcStatus>;

    /// Does a read for which `read_file` returned `Faults`. May block on a disk: never called on the NIC engine's thread. Returns how many bytes
    /// precede the end of the file.
    ///
    /// # Errors
    /// As `read_file`.
    fn read_file_faulting(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, WcStatus> {
        let _ = (owner, filekey, offset, out);
        Err(WcStatus::RemoteInvalid)
    }

    /// Overwrites bytes that the file has; its length, mapping and times stay. Never blocks on disk, network or a lock held across one. For
    /// comparisons only: by default a target refuses such writes.
    ///
    /// # Errors
    /// `WcStatus::RemoteAccess` if `filekey` is unknown, of another owner, or without the right to write, or if the file has no bytes there;
    /// `RemoteInvalid` if this target takes no writes to files; `RemoteOperation` if the write cannot be done in this way now.
    fn write_file(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        bytes: &[u8],
    ) -> Result<FileWrite, WcStatus> {
        let _ = (owner, filekey, offset, bytes);
        Err(WcStatus::RemoteInvalid)
    }

    /// Does a write for which `write_file` returned `Faults`. May block: never called on the NIC engine's thread.
    ///
    /// # Errors
    /// As `write_file`.
    fn write_file_faulting(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), WcStatus> {
        let _ = (owner, filekey, offset, bytes);
        Err(WcStatus::RemoteInvalid)
    }

    /// Fills `out` with the page bitmap from `first_page` on; see [`Remote::Bitmap`]. Pages past the end are clear.
    ///
    /// # Errors
    /// As `read_file`.
    fn read_bitmap(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        first_page: u64,
        out: &mut [u8],
    ) -> Result<(), WcStatus>;
}

/// A window that is not mapped: initiators READ it. Bytes read there are untrusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteRange {
    /// Key of the region that is the whole window.
    pub rkey: Rkey,
    /// The address of the window's first byte ([`MemoryRegion::first_address`]).
    pub first_address: u64,
    /// Length of the window in bytes.
    pub len: u64,
}

impl RemoteRange {
    /// Whether `[offset, offset + len)` lies inside.
    pub fn contains(self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }

    /// The place at an offset in the window. What a broken peer says may wrap around; its RNIC then refuses the request.
    pub fn at(self, offset: u64) -> Remote {
        Remote::Memory { rkey: self.rkey, offset: self.first_address.wrapping_add(offset) }
    }
}

/// Registered memory, after `ibv_mr`. Deregistered when the last reference is dropped.
///
/// Offsets in work requests count from the memory's first byte, here and at peers, wherever it is mapped.
///
/// # Draining
/// Before the owner drops memory, it waits until all its own work requests that name the memory have completed, and peers no longer use its key.
/// Later requests are refused, and break their queue pair: a request of this side with `LocalProtection`, a peer's with `RemoteAccess`. Dropping the
/// last reference may take as long as a copy that is under way; after it nobody accesses the memory in the region's name. (A peer that maps the
/// memory, over `shm`, ends the copy that it has begun.)
pub trait MemoryRegion: Send + Sync {
    /// The key for local use.
    fn lkey(&self) -> Lkey;
    /// The key for peers.
    fn rkey(&self) -> Rkey;
    /// The key for peers that read the whole region, including the owner's bytes ([`Access::own_bytes`]). Hardware gives one right to all bytes of a
    /// key: so with owner's bytes this key allows to READ and FLUSH everything, and [`Self::rkey`] names only the bytes behind them.
    fn read_rkey(&self) -> Rkey {
        self.rkey()
    }
    /// How far peers' FLUSHes of this region reach.
    fn flush_reach(&self) -> FlushReach;
    /// The memory.
    fn memory(&self) -> &Arc<SharedMemory>;

    /// The number that work requests add to an offset, here and at peers: 0, except for memory that an RNIC follows through the process's page table.
    fn first_address(&self) -> u64 {
        0
    }

    /// A local range for a work request.
    fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { lkey: self.lkey(), offset: self.first_address() + offset, len }
    }
}

/// Sizes of a queue pair's queues, and its completion queues.
#[derive(Clone)]
pub struct QpConfig {
    /// The queue for completions of send work requests.
    pub send_cq: Arc<dyn CompletionQueue>,
    /// The queue for completions of receives.
    pub recv_cq: Arc<dyn CompletionQueue>,
    /// Most outstanding send work requests.
    pub send_depth: u32,
    /// Most outstanding receives, for a queue pair with receives of its own.
    pub recv_depth: u32,
    /// The queue from which it takes its receives instead. It must be of the same protection domain.
    pub shared_receives: Option<Arc<dyn SharedReceiveQueue>>,
    /// The longest SENDs and WRITEs, in bytes, that a post should copy, which spares the RNIC a read of memory. The provider may copy less.
    pub max_inline: u32,
}

impl QpConfig {
    /// One queue for both kinds of completions, and receives of its own.
    pub fn new(cq: &Arc<dyn CompletionQueue>, send_depth: u32, recv_depth: u32) -> Self {
        Self {
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            send_depth,
            recv_depth,
            shared_receives: None,
            max_inline: 0,
        }
    }

    /// The same with this [`QpConfig::max_inline`].
    pub fn inline(self, max_inline: u32) -> Self {
        Self { max_inline, ..self }
    }

    /// As [`QpConfig::new`], with receives from a shared queue.
    pub fn with_shared(
        cq: &Arc<dyn CompletionQueue>,
        send_depth: u32,
        receives: &Arc<dyn SharedReceiveQueue>,
    ) -> Self {
        Self { shared_receives: Some(receives.clone()), ..Self::new(cq, send_depth, 0) }
    }
}

/// A reliable connection.
pub trait QueuePair: Send + Sync {
    /// Number in the device.
    fn number(&self) -> QpNumber;
    /// The state of the queue pair.
    fn state(&self) -> QpState;
    /// The link that carries it.
    fn link(&self) -> LinkKind;
    /// The peer at the other end.
    fn peer(&self) -> PeerIdentity;
    /// The most bytes of a request that a post copies; 0: none.
    fn max_inline(&self) -> u32 {
        0
    }
    /// The most bytes of a packet between the two ends; `None` where a READ is not cut into packets. Asks the kernel.
    fn path_mtu_bytes(&self) -> Option<u32> {
        None
    }
    /// Posts requests and rings the doorbell once.
    ///
    /// # Errors
    /// `PostError` tells how many were posted.
    fn post_send(&self, requests: &[SendWr]) -> Result<(), PostError>;
    /// Posts receive buffers, to a queue pair with receives of its own.
    ///
    /// # Errors
    /// As `post_send`.
    fn post_recv(&self, requests: &[RecvWr]) -> Result<(), PostError>;
    /// A window on memory for this queue pair's peer, not bound yet.
    ///
    /// # Errors
    /// `Unsupported` if [`Capabilities::memory_windows`] is not set; `RdmaError` if the device has no more windows.
    fn create_window(&self) -> Result<Arc<dyn MemoryWindow>, RdmaError> {
        Err(RdmaError::Unsupported(
            "this device has no memory windows; register what peers are to reach".to_owned(),
        ))
    }
    /// Target side: from now on the peer's file requests may name the filekeys of this session.
    fn set_region_owner(&self, owner: RegionOwner);
    /// Disconnects; outstanding requests are flushed. Idempotent.
    fn close(&self);
}

/// A queue from which completions are polled, after `ibv_cq` with a completion channel. It is `Any`, so that a provider recognises its own queues
/// when a queue pair is made with them.
pub trait CompletionQueue: Any + Send + Sync {
    /// Appends up to `max` completions to `out` and returns how many. Never blocks. Also drives the provider
    /// where it has no thread of its own.
    fn poll(&self, out: &mut Vec<Completion>, max: usize) -> usize;
    /// Asks for an event when the next completion arrives, and returns whether the queue is still empty; if
    /// `false`, poll again instead of sleeping. A poll or a taken event disarms: arm again before sleeping.
    fn arm(&self) -> bool;
    /// Readable (POLLIN) once an armed queue has a completion. Wait for it with poll(2), io_uring or epoll.
    fn event_fd(&self) -> BorrowedFd<'_>;
    /// Takes the event, so that `event_fd` is no longer readable.
    fn take_event(&self);
    /// Blocks until a completion may be there, `timeout` is over, or a queue pair broke; spins briefly first.
    /// Spurious returns are allowed.
    fn wait(&self, timeout: Duration);
}

/// Memory regions can be used only by queue pairs of the same protection domain, after `ibv_pd`.
pub trait ProtectionDomain: Send + Sync {
    /// Registers memory.
    ///
    /// # Errors
    /// `RdmaError` if the device cannot register the memory.
    fn register(&self, memory: Arc<SharedMemory>, access: Access)
    -> Result<Arc<dyn MemoryRegion>, RdmaError>;
    /// Registers memory whose ranges peers may FLUSH to persistence, through `domain`.
    ///
    /// # Errors
    /// As `register`.
    fn register_persistent(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
        domain: Arc<dyn Persistence>,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError>;
    /// Receives that queue pairs of this domain can share, `depth` of them.
    ///
    /// # Errors
    /// `Unsupported` if [`Capabilities::shared_receives`] is not set; `RdmaError` if the device has no room for it.
    fn create_shared_receives(&self, depth: u32) -> Result<Arc<dyn SharedReceiveQueue>, RdmaError> {
        Err(RdmaError::Unsupported(format!(
            "this device has no shared receive queues (asked for one of {depth}); post receives to each queue pair"
        )))
    }
    /// Target side: peers that connect from now on to a listener of this domain map this memory as a whole, for reading, if the link maps memory.
    /// Peers that READ it instead are told its key: see [`RemoteRange`].
    fn export_window(&self, id: WindowId, memory: Arc<SharedMemory>);
    /// Connects to a listener; the queue pair is ready to send when this returns. Blocking, bounded by
    /// `options.timeout`.
    ///
    /// # Errors
    /// `RdmaError`, with advice.
    fn connect(&self, endpoint: &Endpoint, options: ConnectOptions) -> Result<Connected, RdmaError>;
    /// Listens on an endpoint.
    ///
    /// # Errors
    /// `RdmaError`, with advice.
    fn listen(&self, endpoint: &Endpoint) -> Result<Box<dyn Listener>, RdmaError>;
}

/// Parameters of a connect.
pub struct ConnectOptions {
    /// The queues.
    pub qp: QpConfig,
    /// Receives to post before the peer can send.
    pub receives: Vec<RecvWr>,
    /// The longest time to try.
    pub timeout: Duration,
}

/// A new connection, at the side that connected.
pub struct Connected {
    /// The queue pair, ready to send.
    pub qp: Arc<dyn QueuePair>,
    /// Windows that the target exports and this link maps, for reading, in `WindowId::ALL` order; empty on a link that maps nothing. Bytes read there
    /// are untrusted.
    pub windows: Vec<Arc<SharedMemory>>,
}

/// How long a client may take to say hello after it has connected: to a listener, and to a service that has hellos of its own.
pub const HELLO_WAIT: Duration = Duration::from_secs(5);

/// A connection that asks to be accepted.
pub trait Incoming: Send {
    /// The peer that asks.
    fn peer(&self) -> PeerIdentity;
    /// The link.
    fn link(&self) -> LinkKind;
    /// Accepts: the queue pair is ready to send when this returns.
    ///
    /// # Errors
    /// `RdmaError` if the peer went away or broke the handshake, which affects nobody else.
    fn accept(self: Box<Self>, qp: QpConfig, receives: Vec<RecvWr>) -> Result<Arc<dyn QueuePair>, RdmaError>;
    /// Refuses, and tells the peer the reason.
    fn refuse(self: Box<Self>, reason: &str);
}

/// A listening endpoint.
pub trait Listener: Send + Sync {
    /// The endpoint, with the port that the system chose if none was given.
    fn endpoint(&self) -> Endpoint;
    /// Waits for the next peer that has passed the link's own checks.
    ///
    /// # Errors
    /// `RdmaError::Closed` after `close`.
    fn accept(&self) -> Result<Box<dyn Incoming>, RdmaError>;
    /// Stops listening; a blocked `accept` returns.
    fn close(&self);
}

/// Figures of a device at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceFigures {
    /// Bytes held because peers do not take them, or have not sent all of a packet.
    pub held_bytes: usize,
    /// The most that may be held.
    pub held_bound: usize,
    /// Clients that have connected, but have neither proven a key nor said hello.
    pub unheard_strangers: usize,
    /// Clients whose peer is known, and that have not said hello.
    pub unheard_known: usize,
    /// The bound of each of the two, at one endpoint.
    pub unheard_bound: usize,
    /// Proofs of keys that are remembered, so that each is good once.
    pub knocks: usize,
    /// The most that are remembered.
    pub knocks_bound: usize,
    /// Connections one peer may make a second.
    pub arrivals_per_second: u32,
    /// Connections beyond that rate that one peer may make at once.
    pub arrivals_burst: u32,
    /// Connections that had to wait, since their peers connect too fast.
    pub arrivals_delayed: u64,
    /// Connections that were turned away, since too many of their peers' were waiting.
    pub arrivals_turned_away: u64,
    /// Clients that were refused: their key is none of the server's, or their handshake is none.
    pub refused: u64,
}

impl DeviceFigures {
    /// The figures of two devices together.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            held_bytes: self.held_bytes + other.held_bytes,
            held_bound: self.held_bound + other.held_bound,
            unheard_strangers: self.unheard_strangers + other.unheard_strangers,
            unheard_known: self.unheard_known + other.unheard_known,
            unheard_bound: self.unheard_bound.max(other.unheard_bound),
            knocks: self.knocks + other.knocks,
            knocks_bound: self.knocks_bound + other.knocks_bound,
            arrivals_per_second: self.arrivals_per_second + other.arrivals_per_second,
            arrivals_burst: self.arrivals_burst + other.arrivals_burst,
            arrivals_delayed: self.arrivals_delayed + other.arrivals_delayed,
            arrivals_turned_away: self.arrivals_turned_away + other.arrivals_turned_away,
            refused: self.refused + other.refused,
        }
    }
}

/// An RNIC, real or software.
pub trait Device: Send + Sync {
    /// Its name, for status.
    fn name(&self) -> &str;
    /// Its figures, for status.
    fn figures(&self) -> DeviceFigures {
        DeviceFigures::default()
    }
    /// Its figures as hardware, for status; `None` for software.
    fn hardware(&self) -> Option<HardwareFigures> {
        None
    }
    /// Its abilities.
    fn capabilities(&self) -> Capabilities;
    /// A new protection domain.
    ///
    /// # Errors
    /// `RdmaError` if the device cannot.
    fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, RdmaError>;
    /// A completion queue for `depth` completions.
    ///
    /// # Errors
    /// `RdmaError` if the device cannot.
    fn create_cq(&self, depth: u32) -> Result<Arc<dyn CompletionQueue>, RdmaError>;
    /// How connections between machines are protected, for status.
    fn network_security(&self) -> &'static str {
        "none"
    }
    /// Target side: sets the target that serves `Remote::File` and `Remote::Bitmap`.
    fn set_file_target(&self, target: Arc<dyn FileTarget>);
}
