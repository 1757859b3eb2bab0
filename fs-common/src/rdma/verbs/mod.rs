//! Traits and types of the verbs-shaped API.
//!
//! # How it works
//! As with libibverbs: memory is registered and named by keys; work requests are posted to queue pairs, many
//! with one ring of the doorbell; completions are polled from completion queues. Connections are made as with
//! rdma_cm: a listener, a connect, an accept. The callers of these give no private data: over an RNIC the proof of a key takes all the room that it
//! has there, and what layers above say first is a message (docs/rdma.md, "How it works").
//!
//! # Invariants
//! * Work requests of one queue pair execute in the order posted; completions of one queue pair come in that order.
//! * A buffer named by a posted work request belongs to the provider until its completion is polled.
//! * A bad key, a range past the region or a missing right completes at the initiator with `RemoteAccess`, puts
//!   the queue pair into `Error` (as an RC QP does), and changes nothing at the target.
//! * After a queue pair enters `Error`, every outstanding work request completes with `Flushed`.
//! * A request's local ranges are one string of bytes, in their order: SENDs, WRITEs and APPENDs gather it, READs and receives fill it from the front, as
//!   far as bytes came. All ranges are checked before any byte moves: with one bad key among them nothing is sent and nothing is filled, and the request
//!   completes with `LocalProtection`. (An RNIC checks a range when it comes to it, and may have placed the bytes of those before.) More bytes than a
//!   message or a transfer may have complete with `LocalLength`. More ranges than the queue pair was made for are no request: the post says so.
//! * SENDs and WRITEs of at most [`QueuePair::max_inline`] bytes are copied when they are posted: the poster may change their memory at once.
//! * Unsignaled work requests complete silently unless they fail.
//! * An APPEND's bytes lie together in the file. If its connection ends before its completion, it may have been executed, and to post it again may
//!   append twice.
//! * A FLUSH covers every earlier SEND, WRITE and atomic of its queue pair to its range. It is refused with
//!   `RemoteAccess` like any one-sided request, with `RemoteInvalid` if it asks for persistence of a region that has no
//!   persistence domain (hardware: `RemoteAccess`), and fails with `RemoteOperation` if the device behind it does. How far it goes:
//!   [`FlushReach`], of a device and of a region.
//! * A READ never tears an aligned word of eight bytes, in ranges of up to 512 bytes (PCIe reads of a cache line are coherent).
//! * A queue pair's READs may bring memory of any moments between their post and their completions, in any order.
//!   Requests execute in order (IBTA volume 1, 9.5), but READs whose answers are lost execute again, and an answer of the first execution that comes
//!   late is taken for one of the second: only its packet number tells answers apart. So a READ is surely no older than another one if it is posted
//!   when that one has completed. A fence (`IBV_SEND_FENCE`; 10.8.3.3) would spare that wait, but rdma_rxe (6.12, `rxe_wqe_is_fenced`) never sends
//!   a fenced READ again: it is counted among those that are under way, and so waits for itself.
//! * A WRITE whose end is aligned to eight bytes stores its last eight bytes after all others
//!   (`Capabilities::word_last`).
//!
//! Only `CompletionQueue::wait`, `ProtectionDomain::connect` and `Listener::accept` block.

mod connect;
mod device;
mod queue;
mod request;
mod sges;
mod target;

pub use connect::{ConnectOptions, Connected, HELLO_WAIT, Incoming, Listener, RdmaError};
pub use device::{Capabilities, Device, DeviceFigures, LinkKind};
pub(in crate::rdma) use queue::no_chains;
pub use queue::{CompletionPlaces, CompletionQueue, MemoryRegion, ProtectionDomain, QpConfig, QueuePair};
pub use request::{
    Access, Completion, CompletionKind, FlushReach, PagedAccess, Placement, PostError, QpState, RecvWr,
    Remote, SendOp, SendWr, Sge, WcStatus, WrId,
};
pub(in crate::rdma) use sges::count_within;
pub use sges::{SGES_MAX, SgeList, TooManySges};
pub use target::{
    FileAtomic, FileRead, FileTarget, FileValue, FileWrite, RegionOwner, RemoteRange, WindowId,
};
