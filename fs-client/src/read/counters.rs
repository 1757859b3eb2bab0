//! Figures of a mount's reads.

use super::spread_count::SpreadCount;
use std::sync::atomic::AtomicU64;

/// See the module. Relaxed: each is about this moment.
#[derive(Debug, Default)]
pub(crate) struct ReadCounters {
    /// One-sided reads posted (target-translated) or done by loads (initiator-translated).
    pub(crate) onesided_reads: SpreadCount,
    /// Pages that came back as magic or would not validate.
    pub(crate) magic_hits: AtomicU64,
    /// One-sided reads that found the magic pattern where the page bitmap had promised bytes.
    pub(crate) read_twice: AtomicU64,
    /// Fetch RPCs.
    pub(crate) sparse_fetches: AtomicU64,
}
