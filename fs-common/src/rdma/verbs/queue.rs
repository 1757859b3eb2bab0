//! Registered memory, queue pairs and completion queues, and the protection domain that makes them.

use super::connect::{ConnectOptions, Connected, Listener, RdmaError};
use super::device::LinkKind;
use super::request::{Access, Completion, FlushReach, PagedAccess, PostError, QpState, RecvWr, SendWr, Sge};
use super::target::{RegionOwner, RemoteRange, WindowId};
use crate::ids::{Lkey, QpNumber, Rkey};
use crate::memory::SharedMemory;
use crate::memory::paged::PagedMemory;
use crate::persist::Persistence;
use crate::rdma::chain::WorkQueue;
use crate::rdma::memory_window::MemoryWindow;
use crate::rdma::peer::PeerIdentity;
use crate::rdma::shared_receives::SharedReceiveQueue;
use crate::rdma::url::Endpoint;
use std::any::Any;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

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
    /// The key for peers that read the whole region, including the owner's bytes ([`super::Access::own_bytes`]). Hardware gives one right to all bytes of a
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

    /// A local range for a work request, or for one of its [`super::SgeList`].
    fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { lkey: self.lkey(), offset: self.first_address() + offset, len }
    }
}

/// A dma-buf that is registered for peers' READs, after `ibv_reg_dmabuf_mr`: addresses of the RNIC's that another driver gives, with no memory of this
/// process behind them. Deregistered when the last reference is dropped; until then the dma-buf stays, whoever closes its descriptor.
pub trait DmaBufRegion: Send + Sync {
    /// Where peers READ it.
    fn range(&self) -> RemoteRange;
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
    /// The most local ranges of a work request, of [`super::Capabilities::max_sges`]. An RNIC's work queues grow with it, and so does what it reads
    /// for each request.
    pub max_sges: u32,
}

impl QpConfig {
    /// One queue for both kinds of completions, and receives of its own. Requests have one local range.
    pub fn new(cq: &Arc<dyn CompletionQueue>, send_depth: u32, recv_depth: u32) -> Self {
        Self {
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            send_depth,
            recv_depth,
            shared_receives: None,
            max_inline: 0,
            max_sges: 1,
        }
    }

    /// The same with this [`QpConfig::max_inline`].
    pub fn inline(self, max_inline: u32) -> Self {
        Self { max_inline, ..self }
    }

    /// The same with this [`QpConfig::max_sges`].
    pub fn sges(self, max_sges: u32) -> Self {
        Self { max_sges, ..self }
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
    /// As `post_send`, and tells whether it is known already how the requests ended: all that was posted so far is executed, and of these none failed
    /// or met an absent page ([`Completion::absent`]). Those that are not signaled need no other word then. `false`: completions will tell. Only an
    /// end that executes requests itself, and looks pages up, ever knows.
    ///
    /// # Errors
    /// As `post_send`.
    fn post_send_known(&self, requests: &[SendWr]) -> Result<bool, PostError> {
        self.post_send(requests).map(|()| false)
    }
    /// Posts receive buffers, to a queue pair with receives of its own.
    ///
    /// # Errors
    /// As `post_send`.
    fn post_recv(&self, requests: &[RecvWr]) -> Result<(), PostError>;
    /// A window on memory for this queue pair's peer, not bound yet.
    ///
    /// # Errors
    /// `Unsupported` if [`super::Capabilities::memory_windows`] is not set; `RdmaError` if the device has no more windows.
    fn create_window(&self) -> Result<Arc<dyn MemoryWindow>, RdmaError> {
        Err(RdmaError::Unsupported(
            "this device has no memory windows; register what peers are to reach".to_owned(),
        ))
    }
    /// Arms the queue pair: from now on messages of the peer go to no posted receive, but start chains of this work queue, which the RNIC executes
    /// ([`crate::rdma::chain`]). A chain that faults completes on the receive queue with an error, and breaks the queue pair.
    ///
    /// # Errors
    /// `Unsupported` if [`super::Capabilities::chains`] is not set, or this end or link has no RNIC that executes them, or the queue does not lie in
    /// its memory.
    fn arm(&self, queue: WorkQueue) -> Result<(), RdmaError> {
        let _ = queue;
        Err(no_chains())
    }
    /// Starts the chains of messages that came while the armed queue's gate was closed, its doorbell behind, or its limit reached.
    fn resume(&self) {}
    /// Whether this end looks the pages of the peer's paged memory up ([`ProtectionDomain::register_paged`]), and completions say of pages that were
    /// not there ([`Completion::absent`]). Otherwise the peer's end does, and nobody is told.
    fn looks_pages_up(&self) -> bool {
        false
    }
    /// Target side: from now on the peer's file requests may name the filekeys of this session.
    fn set_region_owner(&self, owner: RegionOwner);
    /// Disconnects; outstanding requests are flushed. Idempotent.
    fn close(&self);
}

/// The error of a device or link that executes no chains.
pub(in crate::rdma) fn no_chains() -> RdmaError {
    RdmaError::Unsupported(
        "no RNIC executes chains of work requests here; use a tcp:// or unix:// endpoint, or have a thread execute them (rdma::chain::Chain)".to_owned(),
    )
}

/// Places for the completions of all queue pairs that use a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionPlaces {
    /// Those that are promised to queue pairs.
    pub promised: u32,
    /// The most there can be.
    pub most: u32,
}

/// A queue from which completions are polled, after `ibv_cq` with a completion channel. It is `Any`, so that a provider recognises its own queues
/// when a queue pair is made with them.
pub trait CompletionQueue: Any + Send + Sync {
    /// Its places, if there is a bound: an RNIC's queue holds only so many completions, and its queue pairs are promised theirs.
    fn places(&self) -> Option<CompletionPlaces> {
        None
    }
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
    /// Registers memory whose pages come and go (NP-RDMA). READs and WRITEs look each page up at that moment; atomics are refused. The key is for peers
    /// only.
    ///
    /// # Errors
    /// `Unsupported` if [`super::Capabilities::paged_memory`] is not set; `RdmaError` if the device cannot register the memory.
    fn register_paged(
        &self,
        memory: Arc<PagedMemory>,
        access: PagedAccess,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        Err(RdmaError::Unsupported(format!(
            "this device keeps the pages that are there when memory is registered, and cannot look {} pages up for {access:?}; register the memory \
             as a whole, so that it is pinned, or use shm://, unix:// or tcp://",
            memory.translated().len() / crate::ids::PAGE_SIZE_U64
        )))
    }
    /// Registers the first `len` bytes of a dma-buf for peers' READs.
    ///
    /// # Errors
    /// `Unsupported` if the device registers no dma-bufs; `RdmaError` if it refuses this one.
    fn register_dma_buf(
        &self,
        dma_buf: BorrowedFd<'_>,
        len: u64,
    ) -> Result<Arc<dyn DmaBufRegion>, RdmaError> {
        let _ = (dma_buf, len);
        Err(RdmaError::Unsupported("this device is no hardware, and registers no dma-bufs".to_owned()))
    }

    /// Receives that queue pairs of this domain can share, `depth` of them, of up to `max_sges` local ranges each.
    ///
    /// # Errors
    /// `Unsupported` if [`super::Capabilities::shared_receives`] is not set; `RdmaError` if the device has no room for it.
    fn create_shared_receives(
        &self,
        depth: u32,
        max_sges: u32,
    ) -> Result<Arc<dyn SharedReceiveQueue>, RdmaError> {
        let _ = max_sges;
        Err(RdmaError::Unsupported(format!(
            "this device has no shared receive queues (asked for one of {depth}); post receives to each queue pair"
        )))
    }
    /// Target side: peers that connect from now on to a listener of this domain map this memory as a whole, for reading, if the link maps memory.
    /// Peers that READ it instead are told its key: see [`super::RemoteRange`].
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
