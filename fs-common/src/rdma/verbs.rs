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
//! * SENDs and WRITEs of at most [`QueuePair::max_inline`] bytes are copied when they are posted: their memory is the poster's again at once.
//! * Unsignalled work requests complete silently unless they fail.
//! * A FLUSH covers every earlier SEND, WRITE and atomic of its queue pair to its range. It is refused with
//!   `RemoteAccess` like any one-sided request, with `RemoteInvalid` if it asks for persistence of a region that has no
//!   persistence domain (hardware: `RemoteAccess`), and fails with `RemoteOperation` if the device behind it does. How far it goes:
//!   [`FlushReach`], of a device and of a region.
//! * A READ loads an aligned word of eight bytes whole, in ranges of up to 512 bytes, and a queue pair's later READs see what is at least
//!   as new (IBTA volume 1, 9.5: requests execute in order; PCIe reads of a cache line are coherent).
//! * A WRITE whose end is aligned to eight bytes stores its last eight bytes after all others
//!   (`Capabilities::word_last`).
//!
//! No method blocks but `CompletionQueue::wait`, `Device::connect` and `Listener::accept`.

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
    /// The local RNIC may write it (receives, READ targets).
    pub local_write: bool,
    /// Peers may READ it.
    pub remote_read: bool,
    /// Peers may WRITE it.
    pub remote_write: bool,
    /// Peers may do atomics on it.
    pub remote_atomic: bool,
    /// Peers may FLUSH it (`IBV_ACCESS_FLUSH_GLOBAL`, and with a persistence domain `IBV_ACCESS_FLUSH_PERSISTENT`).
    pub remote_flush: bool,
    /// So many of its first bytes, whole pages, are the owner's: peers may READ and FLUSH them by the region's
    /// [`MemoryRegion::read_rkey`], and neither WRITE them nor do atomics there. Over shared memory, where the initiator is the RNIC,
    /// it is not kept from them: who maps memory is trusted.
    pub own_bytes: u64,
}

impl Access {
    /// Everything.
    pub const ALL: Self = Self {
        local_write: true,
        remote_read: true,
        remote_write: true,
        remote_atomic: true,
        remote_flush: true,
        own_bytes: 0,
    };
    /// Nothing but local reading.
    pub const NONE: Self = Self {
        local_write: false,
        remote_read: false,
        remote_write: false,
        remote_atomic: false,
        remote_flush: false,
        own_bytes: 0,
    };
    /// For buffers only the local side fills and peers read nothing from: receive buffers, READ targets.
    pub const LOCAL: Self = Self { local_write: true, ..Self::NONE };
}

/// A range of locally registered memory: one scatter-gather element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// Which registration.
    pub lkey: Lkey,
    /// Offset inside it, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

impl Sge {
    /// No bytes at all, for sends without a payload.
    pub const EMPTY: Self = Self { lkey: Lkey(0), offset: 0, len: 0 };
}

/// What a one-sided work request names at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remote {
    /// A range of a plain memory region; `offset` counts from the region's start.
    Memory {
        /// The region's remote key.
        rkey: Rkey,
        /// Byte offset inside it.
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

/// How far a FLUSH takes what was written (IBTA memory placement extensions, placement type).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Whoever reads the memory at the target sees it.
    Visibility,
    /// It outlives a crash of the target. Only regions with a persistence domain have this.
    Persistence,
}

/// How far a FLUSH goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FlushReach {
    /// There is none. For visibility the initiator READs the range's last byte instead: a READ comes behind earlier WRITEs, and pushes
    /// them to where the target's processors see them. For persistence it is refused with `RemoteInvalid`: the target's processor has
    /// to do that when it is told (RFlush).
    None,
    /// To visibility.
    Visibility,
    /// To persistence.
    Persistence,
}

impl FlushReach {
    /// Of a region with these rights, at a device that goes as far as the region's persistence domain lets it.
    pub fn of(access: Access, has_domain: bool) -> Self {
        match has_domain {
            _ if !access.remote_flush => Self::None,
            false => Self::Visibility,
            true => Self::Persistence,
        }
    }

    /// For status.
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
    /// One-sided write from the local range: to `Remote::Memory`, and to `Remote::File` where the target takes it (`FileTarget::write_file`).
    Write(Remote),
    /// One-sided write that also consumes a receive at the peer and hands it the immediate.
    WriteImm(Remote, u32),
    /// 64-bit compare and swap at an 8-byte aligned place; the old value lands in the local range (8 bytes).
    CompareSwap {
        /// Where.
        remote: Remote,
        /// Swap only if this is there.
        expect: u64,
        /// What to put.
        swap: u64,
    },
    /// 64-bit fetch and add; the old value lands in the local range (8 bytes).
    FetchAdd {
        /// Where.
        remote: Remote,
        /// What to add.
        add: u64,
    },
    /// Takes `len` bytes of remote memory, as earlier requests of this queue pair left them, as far as `placement`
    /// says, and completes then. The local range is empty. Later requests may execute before it is done, though
    /// their completions come behind its.
    Flush {
        /// Where; only `Remote::Memory`.
        remote: Remote,
        /// How many bytes.
        len: u32,
        /// How far.
        placement: Placement,
    },
}

impl SendOp {
    /// Of its completion.
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
    /// Comes back in the completion.
    pub wr_id: WrId,
    /// What to do.
    pub op: SendOp,
    /// Local bytes: source of sends and writes, target of reads and atomics.
    pub local: Sge,
    /// Whether success makes a completion, too.
    pub signaled: bool,
}

/// A receive work request: where the next incoming message goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecvWr {
    /// Comes back in the completion.
    pub wr_id: WrId,
    /// Room for the message.
    pub local: Sge,
}

/// How a work request ended, after `ibv_wc_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WcStatus {
    /// Done.
    Success,
    /// A message was longer than the receive buffer, or a reply than the local range.
    LocalLength,
    /// The local key or range is not registered, or not for this use.
    LocalProtection,
    /// The target refused: key, range, right.
    RemoteAccess,
    /// The target does not do this operation.
    RemoteInvalid,
    /// The target could not do it this time (`IBV_WC_REM_OP_ERR`).
    RemoteOperation,
    /// The queue pair went into `Error` before this request was done.
    Flushed,
    /// The connection is gone.
    Disconnected,
}

/// What kind of work request completed.
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
    /// Of the work request.
    pub wr_id: WrId,
    /// The queue pair it was posted to.
    pub qp: QpNumber,
    /// What it was.
    pub kind: CompletionKind,
    /// How it ended.
    pub status: WcStatus,
    /// Bytes that arrived: of a receive or a read (a file read may stop at the end of the file).
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
    /// Whether the state machine above has this edge.
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
        /// How many requests of the list were posted.
        posted: usize,
    },
    /// The queue pair cannot take this in its state.
    #[error("the queue pair is in state {state:?}; make a new connection")]
    BadState {
        /// The state it is in.
        state: QpState,
    },
    /// Receives of this queue pair come from elsewhere.
    #[error("this queue pair takes its receives from a shared queue; post them there")]
    SharedReceives,
}

/// Errors of set-up calls.
#[derive(Debug, thiserror::Error)]
pub enum RdmaError {
    /// The operating system refused.
    #[error("{action} {endpoint}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// Where.
        endpoint: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The peer speaks another protocol or version, or broke the handshake.
    #[error("handshake with {endpoint} failed: {reason}")]
    Handshake {
        /// With whom.
        endpoint: String,
        /// What was wrong and what to do.
        reason: String,
    },
    /// The peer will not have us.
    #[error("{endpoint} refused the connection: {reason}")]
    Refused {
        /// Who.
        endpoint: String,
        /// Why, in the peer's words.
        reason: String,
    },
    /// Who listens there is nobody this side tells anything.
    #[error(
        "user {uid} listens at {endpoint}, and not root or you; if that is to be your server, say so: --server-user {uid}, or \
         for a mount -o server-user={uid} ({overflow} is anybody whom this user namespace does not know)",
        overflow = OVERFLOW_USER
    )]
    Untrusted {
        /// Where.
        endpoint: String,
        /// Who.
        uid: u32,
    },
    /// This device cannot do that.
    #[error("{0}")]
    Unsupported(String),
    /// The listener or device was shut down.
    #[error("shut down")]
    Closed,
}

/// What a device can do beyond plain verbs.
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
    /// A WRITE's last aligned word is stored after its other bytes, so that a poller that finds it finds them.
    pub word_last: bool,
    /// How far a FLUSH goes that is posted here: what the RNIC and the library before it can. The region has its say, too
    /// ([`MemoryRegion::flush_reach`]).
    pub flush: FlushReach,
    /// The RNIC has ATOMIC WRITE (IBTA memory placement extensions). For status: nothing posts it.
    pub atomic_write: bool,
    /// There are shared receive queues ([`ProtectionDomain::create_shared_receives`]).
    pub shared_receives: bool,
    /// There are memory windows ([`QueuePair::create_window`]).
    pub memory_windows: bool,
    /// A FLUSH covers SENDs too: the target's RNIC places a message without the target's CPU, or orders the FLUSH
    /// behind whoever places it.
    pub flush_after_send: bool,
}

/// Which link carries a connection.
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

/// The session a connection's one-sided file requests are checked against; 0: none, everything is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RegionOwner(pub u64);

/// Names a window the target exports whole for initiator translation.
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

/// How far the NIC engine came with a file read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileRead {
    /// Done: so many bytes precede the end of the file.
    Done(usize),
    /// A page must be brought into memory first. The queue pair stalls while `read_file_faulting` does it.
    Faults,
}

/// How far it came with a file write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileWrite {
    /// The file has the bytes.
    Done,
    /// It must be waited for something first. The queue pair stalls while `write_file_faulting` does it.
    Faults,
}

/// The target's side of target translation: how the NIC engine reads files without an RPC worker.
pub trait FileTarget: Send + Sync {
    /// Fills `out` with the file's bytes from `offset` on: holes and unwritten ranges as zeros, pages that are
    /// not resident (or will not hold still) as the magic pattern, or, where the target faults instead, not at all.
    /// Never blocks on disk, network or a lock held across one.
    ///
    /// # Errors
    /// `WcStatus::RemoteAccess` if `filekey` is unknown, of another owner, or without the right to read;
    /// `RemoteInvalid` if this target reads no files; `RemoteOperation` if the bytes cannot be had this way now.
    fn read_file(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<FileRead, WcStatus>;

    /// Does what `read_file` found to fault, and may block on a disk meanwhile: never called on the NIC engine's
    /// thread. Returns how many bytes precede the end of the file.
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

    /// Overwrites bytes that the file has; its length and mapping stay, and so do its times. Never blocks on disk, network or a lock held
    /// across one. For comparison only: a target takes no such writes unless it says otherwise.
    ///
    /// # Errors
    /// `WcStatus::RemoteAccess` if `filekey` is unknown, of another owner, or without the right to write, or if the file has no
    /// bytes there; `RemoteInvalid` if this target takes no writes to files; `RemoteOperation` if it cannot be done this way now.
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

    /// Does what `write_file` found to fault, and may block meanwhile: never called on the NIC engine's thread.
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

/// A window that is not mapped: READs reach it. Everything read is untrusted bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteRange {
    /// Key of the region, whole.
    pub rkey: Rkey,
    /// Its length in bytes.
    pub len: u64,
}

impl RemoteRange {
    /// Whether `[offset, offset + len)` lies inside.
    pub fn contains(self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }
}

/// A registered range of memory, after `ibv_mr`. Deregistered when the last reference goes.
///
/// Offsets in work requests count from its first byte, here and at peers, wherever it is mapped.
///
/// # Draining
/// Who lets go of memory drains first: all work requests of this side that name it have completed, and peers have no more use for its key.
/// What comes later is refused, and breaks its queue pair: a request of this side with `LocalProtection`, a peer's with `RemoteAccess`. When
/// the last reference has gone, which can take as long as a copy that is under way, nobody touches the memory in the region's name any
/// more. (A peer that maps memory, over `shm`, ends the copy it has begun.)
pub trait MemoryRegion: Send + Sync {
    /// For local use.
    fn lkey(&self) -> Lkey;
    /// To tell peers.
    fn rkey(&self) -> Rkey;
    /// To tell peers that read all of it, also the owner's bytes ([`Access::own_bytes`]). Hardware has one right for all bytes of a key: so
    /// where there are such bytes, this key reads and flushes all and writes none, and [`Self::rkey`] names those behind them.
    fn read_rkey(&self) -> Rkey {
        self.rkey()
    }
    /// How far peers' FLUSHes take it.
    fn flush_reach(&self) -> FlushReach;
    /// The memory itself.
    fn memory(&self) -> &Arc<SharedMemory>;

    /// What work requests, here and at peers, add to an offset: 0, but for memory that an RNIC follows through the process's page table.
    fn first_address(&self) -> u64 {
        0
    }

    /// A local range for a work request.
    fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { lkey: self.lkey(), offset: self.first_address() + offset, len }
    }
}

/// Queues' sizes and where completions go.
#[derive(Clone)]
pub struct QpConfig {
    /// Completions of send work requests.
    pub send_cq: Arc<dyn CompletionQueue>,
    /// Completions of receives.
    pub recv_cq: Arc<dyn CompletionQueue>,
    /// Outstanding send work requests.
    pub send_depth: u32,
    /// Outstanding receives, where the queue pair has its own.
    pub recv_depth: u32,
    /// Where it takes its receives from instead: a queue of the same protection domain.
    pub shared_receives: Option<Arc<dyn SharedReceiveQueue>>,
    /// How long SENDs and WRITEs are, in bytes, that are best copied when they are posted, which spares the RNIC a read of memory. A wish.
    pub max_inline: u32,
}

impl QpConfig {
    /// Completions of both kinds to one queue, and receives of its own.
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

    /// With a wish for [`QpConfig::max_inline`].
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
    /// Number within the device.
    fn number(&self) -> QpNumber;
    /// Where the state machine is.
    fn state(&self) -> QpState;
    /// Which link carries it.
    fn link(&self) -> LinkKind;
    /// Who is at the other end.
    fn peer(&self) -> PeerIdentity;
    /// Up to how many bytes a post copies; 0: none.
    fn max_inline(&self) -> u32 {
        0
    }
    /// Posts requests and rings the doorbell once.
    ///
    /// # Errors
    /// `PostError` says how many were taken.
    fn post_send(&self, requests: &[SendWr]) -> Result<(), PostError>;
    /// Posts receive buffers; not where they come from a shared queue.
    ///
    /// # Errors
    /// As `post_send`.
    fn post_recv(&self, requests: &[RecvWr]) -> Result<(), PostError>;
    /// A window on memory for this queue pair's peer, bound to nothing yet.
    ///
    /// # Errors
    /// `Unsupported` where [`Capabilities::memory_windows`] is not set; `RdmaError` if the device has no more.
    fn create_window(&self) -> Result<Arc<dyn MemoryWindow>, RdmaError> {
        Err(RdmaError::Unsupported(
            "this device has no memory windows; register what peers are to reach".to_owned(),
        ))
    }
    /// Target side: whose filekeys the peer's file requests may name from now on.
    fn set_region_owner(&self, owner: RegionOwner);
    /// Disconnects; outstanding requests are flushed. Idempotent.
    fn close(&self);
}

/// Where completions are polled from, after `ibv_cq` with a completion channel. `Any`, so that a provider knows its
/// own queues again when a queue pair is made with them.
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

/// What protects memory regions from queue pairs of others, after `ibv_pd`.
pub trait ProtectionDomain: Send + Sync {
    /// Registers memory.
    ///
    /// # Errors
    /// `RdmaError` if the device cannot take it.
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
    /// `Unsupported` where [`Capabilities::shared_receives`] is not set; `RdmaError` if the device has no room for it.
    fn create_shared_receives(&self, depth: u32) -> Result<Arc<dyn SharedReceiveQueue>, RdmaError> {
        Err(RdmaError::Unsupported(format!(
            "this device has no shared receive queues (asked for one of {depth}); post receives to each queue pair"
        )))
    }
    /// Target side: memory that whoever connects to a listener of this domain from now on maps whole, for reading, where the link maps
    /// memory. Whoever is to READ it is told its key: see [`RemoteRange`].
    fn export_window(&self, id: WindowId, memory: Arc<SharedMemory>);
    /// Connects to a listener; the queue pair is ready to send when this returns. Blocking, bounded by
    /// `options.timeout`.
    ///
    /// # Errors
    /// `RdmaError`, saying what to do.
    fn connect(&self, endpoint: &Endpoint, options: ConnectOptions) -> Result<Connected, RdmaError>;
    /// Listens on an endpoint.
    ///
    /// # Errors
    /// `RdmaError`, saying what to do.
    fn listen(&self, endpoint: &Endpoint) -> Result<Box<dyn Listener>, RdmaError>;
}

/// What a connect needs.
pub struct ConnectOptions {
    /// Queues.
    pub qp: QpConfig,
    /// Receives to post before the peer can send.
    pub receives: Vec<RecvWr>,
    /// How long to try.
    pub timeout: Duration,
}

/// A new connection, at the side that connected.
pub struct Connected {
    /// Ready to send.
    pub qp: Arc<dyn QueuePair>,
    /// Windows that the target exports and this link maps, for reading, in `WindowId::ALL` order; empty where links map nothing. Everything
    /// read there is untrusted bytes.
    pub windows: Vec<Arc<SharedMemory>>,
}

/// How long whoever connected may take to say hello: to a listener, and to a service that takes hellos of its own.
pub const HELLO_WAIT: Duration = Duration::from_secs(5);

/// A connection that asks to be accepted.
pub trait Incoming: Send {
    /// Who asks.
    fn peer(&self) -> PeerIdentity;
    /// Which link.
    fn link(&self) -> LinkKind;
    /// Accepts: the queue pair is ready to send when this returns.
    ///
    /// # Errors
    /// `RdmaError` if the peer went away or broke the handshake; nobody else is harmed.
    fn accept(self: Box<Self>, qp: QpConfig, receives: Vec<RecvWr>) -> Result<Arc<dyn QueuePair>, RdmaError>;
    /// Refuses, telling the peer why.
    fn refuse(self: Box<Self>, reason: &str);
}

/// A listening endpoint.
pub trait Listener: Send + Sync {
    /// What it listens on, with the port the system chose if none was asked for.
    fn endpoint(&self) -> Endpoint;
    /// Blocks for the next peer that got through the link's own checks.
    ///
    /// # Errors
    /// `RdmaError::Closed` after `close`.
    fn accept(&self) -> Result<Box<dyn Incoming>, RdmaError>;
    /// Stops listening; a blocked `accept` returns.
    fn close(&self);
}

/// What a device has at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceFigures {
    /// Bytes held because peers do not take them, or have not sent all of them.
    pub held_bytes: usize,
    /// How many there may be.
    pub held_bound: usize,
    /// Clients that have connected, proven nothing and not said hello.
    pub unheard_strangers: usize,
    /// Clients that are known and have not said hello.
    pub unheard_known: usize,
    /// How many of either there may be at an endpoint.
    pub unheard_bound: usize,
    /// Proofs of keys that are kept, so that each is good for once.
    pub knocks: usize,
    /// How many there may be.
    pub knocks_bound: usize,
    /// Connections one peer may make a second.
    pub arrivals_per_second: u32,
    /// How many more at once.
    pub arrivals_burst: u32,
    /// Connections that were let wait because their peers make them faster.
    pub arrivals_delayed: u64,
    /// Connections that were not listened to because too many of their peers' wait.
    pub arrivals_turned_away: u64,
}

impl DeviceFigures {
    /// Of two devices together.
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
        }
    }
}

/// An RNIC, real or software.
pub trait Device: Send + Sync {
    /// For status.
    fn name(&self) -> &str;
    /// For status: figures of about this moment.
    fn figures(&self) -> DeviceFigures {
        DeviceFigures::default()
    }
    /// For status: what is told of it if it is hardware.
    fn hardware(&self) -> Option<HardwareFigures> {
        None
    }
    /// What it can do.
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
    /// What protects connections between machines, for status.
    fn network_security(&self) -> &'static str {
        "none"
    }
    /// Target side: who serves `Remote::File` and `Remote::Bitmap`.
    fn set_file_target(&self, target: Arc<dyn FileTarget>);
}
