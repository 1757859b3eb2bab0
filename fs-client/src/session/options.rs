//! The options of a session before it connects, and its lanes.

use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rpc::SLOTS_PER_SESSION;
use cuttlefs_common::world::Clock;
use std::sync::Arc;

/// Lanes that are lent to no caller.
pub(super) const OWN_LANES: usize = 2;
/// Of them the control thread's: the one that a link expects heartbeats to go out over.
pub(super) const CONTROL_LANE: usize = 0;
/// And the one over which it is asked how waits for locks ended.
pub(super) const LOCKS_LANE: usize = 1;
/// Lanes callers can have: one of the session's slots is recovery's.
pub const MAX_CALLER_LANES: usize = SLOTS_PER_SESSION as usize - OWN_LANES - 1;

/// What a session needs to know before it connects.
pub struct SessionOptions {
    /// Where the server is.
    pub endpoint: Endpoint,
    /// For people: host and mount point.
    pub label: String,
    /// Directory of the export to mount; empty: all of it.
    pub subtree: Vec<u8>,
    /// Lanes for callers; bounded by the session's slots.
    pub lanes: usize,
    /// What copies of unsynced changes take at most; then changes wait for a sync.
    pub unsynced_bytes: usize,
    /// By what patience is measured.
    pub clock: Arc<dyn Clock>,
    /// Reads the server's tables itself where it is told where they are, though the target would translate.
    pub initiator_translates: bool,
    /// Whether heartbeats, bitmap pulls and closes run in threads of their own. Without, nothing runs but calls:
    /// for a simulation in one thread.
    pub background: bool,
}
