//! Windows on parts of registered memory for one queue pair's peer, after type 2B `ibv_mw`. Work requests give and take their keys; registering
//! memory would need a system call and pin pages.
//!
//! # Invariants
//! * A bound window's key opens its range to the peer of its queue pair, with the rights it was bound with, and nothing else; to peers of other
//!   queue pairs it opens nothing. The region needs no rights for peers.
//! * Offsets count from the region's first byte, not the window's.
//! * Each binding has a key of its own. After the completion of an invalidation nobody accesses the memory by that key. A peer that still uses the
//!   key is refused, which breaks the window's queue pair.
//! * The region stays registered while the window is bound to it.

use super::verbs::{Access, MemoryRegion, PostError, WrId};
use crate::ids::Rkey;
use std::sync::Arc;

/// The part of a region that a window opens.
#[derive(Clone)]
pub struct Binding {
    /// The region, of the queue pair's protection domain.
    pub region: Arc<dyn MemoryRegion>,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The peer's rights there: READ, WRITE, atomics. Rights to change memory need a region that is writable here.
    pub access: Access,
}

/// A window on a part of registered memory. See the module.
pub trait MemoryWindow: Send + Sync {
    /// Posts the binding of a window that is not bound; its completion is signaled, of kind `Bind`. From then on the peer can use the key. A window
    /// may be bound again once the completion of its invalidation was polled.
    ///
    /// # Errors
    /// As for other posts.
    fn bind(&self, wr_id: WrId, binding: Binding) -> Result<Rkey, PostError>;
    /// Posts the end of the window's binding; its completion is signaled, of kind `Invalidate`.
    ///
    /// # Errors
    /// As for other posts.
    fn invalidate(&self, wr_id: WrId) -> Result<(), PostError>;
}
