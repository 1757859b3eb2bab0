//! The options of a session before it connects, and its lanes.

use crate::transport::LANE_BYTES;
use cuttlefs_common::pool_uuid::PoolUuid;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rpc::SLOTS_PER_SESSION;
use cuttlefs_common::world::Clock;
use std::sync::Arc;

/// The number of lanes that are not lent to callers.
pub(super) const OWN_LANES: usize = 2;
/// Of them the control thread's: the one that a link expects heartbeats to go out over.
pub(super) const CONTROL_LANE: usize = 0;
/// The lane for the question how waits for locks ended.
pub(super) const LOCKS_LANE: usize = 1;
/// The most lanes for callers: one of the session's slots is for recovery.
pub const MAX_CALLER_LANES: usize = SLOTS_PER_SESSION as usize - OWN_LANES - 1;

/// Bytes of the lanes' memory, with so many lanes for callers.
pub fn lanes_bytes(callers: usize) -> u64 {
    (callers.clamp(1, MAX_CALLER_LANES) + OWN_LANES) as u64 * LANE_BYTES as u64
}

/// What a session needs to know before it connects.
pub struct SessionOptions {
    /// The server's endpoint.
    pub endpoint: Endpoint,
    /// A label for people: host and mount point.
    pub label: String,
    /// The pool whose files are meant: a server of another one is refused. `None`: that of the first server.
    pub pool: Option<PoolUuid>,
    /// The directory of the export to mount; empty: the whole export.
    pub subtree: Vec<u8>,
    /// The number of lanes for callers, bounded by the session's slots.
    pub lanes: usize,
    /// The most bytes of copies of unsynced changes. At that bound changes wait for a sync.
    pub unsynced_bytes: usize,
    /// The clock for time limits.
    pub clock: Arc<dyn Clock>,
    /// Whether this side reads the server's tables, if the server says where they are, although the target would translate.
    pub initiator_translates: bool,
    /// Whether heartbeats, bitmap pulls and closes run in threads of their own. Without them only calls run, as a simulation in one thread needs it.
    pub background: bool,
}
