//! Windows on parts of registered memory for one queue pair's peer, after type 2B `ibv_mw`: keys that are given and taken by work requests,
//! where registering takes a system call and pins pages.
//!
//! # Invariants
//! * A bound window's key opens its range to the peer of its queue pair, with the rights it was bound with, and nothing else; to peers of other
//!   queue pairs it opens nothing. The region needs no rights for peers.
//! * Offsets count from the region's first byte, not the window's.
//! * Each binding has a key of its own. From the completion of an invalidation on nobody touches the memory by it. A peer that still uses it is
//!   refused, which breaks its queue pair: the window's own.
//! * The region stays registered while the window is bound to it.

use super::verbs::{Access, MemoryRegion, PostError, WrId};
use crate::ids::Rkey;
use std::sync::Arc;

/// Which part of a region a window opens.
#[derive(Clone)]
pub struct Binding {
    /// The region, of the queue pair's protection domain.
    pub region: Arc<dyn MemoryRegion>,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What the peer may do there: READ, WRITE, atomics. For what changes memory, the region must be writable here.
    pub access: Access,
}

/// See the module.
pub trait MemoryWindow: Send + Sync {
    /// Posts the binding of a window that is bound to nothing; its completion is signalled, of kind `Bind`. The key is the peer's to use from
    /// then on. A window is bound again only when the completion of its invalidation was polled.
    ///
    /// # Errors
    /// As of other posts.
    fn bind(&self, wr_id: WrId, binding: Binding) -> Result<Rkey, PostError>;
    /// Posts the end of what it is bound to; its completion is signalled, of kind `Invalidate`.
    ///
    /// # Errors
    /// As of other posts.
    fn invalidate(&self, wr_id: WrId) -> Result<(), PostError>;
}
