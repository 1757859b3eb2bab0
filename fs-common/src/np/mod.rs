//! NP-RDMA: one-sided verbs on memory that may not be there, without pinning (Shen et al., *NP-RDMA: Using Commodity RDMA without Pinning Memory*;
//! `docs/np-rdma.md`).
//!
//! A region is larger than the DRAM it may use. Peers READ and WRITE it optimistically, as if all of it were in memory; what they hit of a page that is
//! not is the signature page and the black hole. They see that in what comes back, and ask the owner's processor then: it brings the page in, and does
//! the access. It knows no file and no provider: everything goes through the verbs API.
//!
//! * `backing`: where pages are that have no frame.
//! * `region`: which page has which frame; swapping in and out; the owner's own accesses.
//! * `wire`: the messages of the two-sided way.
//! * `target`: what the owner does for its peers; `serve`: its threads.
//! * `initiator/`: what peers do.

mod backing;
mod initiator;
mod region;
mod serve;
mod target;
mod wire;

pub use backing::{Backing, FileBacking, MemoryBacking, Page};
pub use initiator::{
    NpCompletion, NpError, NpLocal, NpOp, NpOrder, NpPeer, NpSettings, NpStatus, NpWr, PeerFigures,
};
pub use region::{NpRegion, RegionError, RegionFigures};
pub use serve::NpServer;
pub use target::{NpTarget, TargetFigures};
pub use wire::{
    INLINE_MAX, Message, MessageError, NP_MESSAGE_LEN, NP_VERSION, PIECE_MAX, RPC_DEPTH, Reply, Request,
    RequestOp, Status, Welcome,
};

/// Longest access of one request: what every link takes as one transfer.
pub const ACCESS_MAX: u32 = 1 << 20;
