//! The verbs-shaped API: everything that the rest of cuttlefs knows of an RNIC.
//!
//! This module owns no hardware. `verbs` is the API: traits and plain types after libibverbs and rdma_cm. Providers implement it: `soft` is the
//! software RNIC with its links `shm` and `tcp` (the same byte protocol also over Unix sockets), `verbs_provider` is libibverbs, `sim` runs both ends
//! in one thread. `open_to_listen` and `open_to_connect` choose a provider by the endpoint's scheme; a server has one device of each provider that
//! its endpoints need (`Devices`).
//!
//! Nothing above this module knows which provider it talks to; the differences are in `Capabilities`.

/// Work queues in registered memory, which messages change and start.
pub mod chain;
mod hardware;
mod look_up;
mod memory_window;
mod open;
mod peer;
mod peer_key;
mod shared_receives;
/// Both ends in one thread, for tests from a seed.
pub mod sim;
/// The software RNIC.
pub mod soft;
mod sys;
mod url;
mod verbs;
#[cfg(feature = "verbs")]
pub mod verbs_provider;

pub use hardware::{HardwareFigures, hop_advice};
pub use memory_window::{Binding, MemoryWindow};
pub use open::{Devices, VERSION, open_to_connect, open_to_listen};
pub use peer::{LocalPeer, PeerIdentity};
pub use peer_key::PeerKey;
pub use shared_receives::SharedReceiveQueue;
pub use url::{Endpoint, EndpointError, Via};
pub use verbs::{
    Access, Capabilities, Completion, CompletionKind, CompletionPlaces, CompletionQueue, ConnectOptions,
    Connected, Device, DeviceFigures, FileAtomic, FileRead, FileTarget, FileValue, FileWrite, FlushReach,
    HELLO_WAIT, Incoming, LinkKind, Listener, MemoryRegion, PagedAccess, Placement, PostError,
    ProtectionDomain, QpConfig, QpState, QueuePair, RdmaError, RecvWr, RegionOwner, Remote, RemoteRange,
    SGES_MAX, SendOp, SendWr, Sge, SgeList, TooManySges, WcStatus, WindowId, WrId,
};
