//! The counts of a mount's reads.

use super::spread_count::SpreadCount;
use std::sync::atomic::AtomicU64;

/// The counts; see the module. Relaxed: each is of this moment by itself.
#[derive(Debug, Default)]
pub(crate) struct ReadCounters {
    /// One-sided reads posted (target-translated) or done by loads (initiator-translated).
    pub(crate) onesided_reads: SpreadCount,
    /// Pages that came through a window of pages.
    pub(crate) window_pages: SpreadCount,
    /// Pages that came back as the magic pattern, or that could not be validated.
    pub(crate) magic_hits: AtomicU64,
    /// One-sided reads that found the magic pattern where the page bitmap had promised bytes.
    pub(crate) read_twice: AtomicU64,
    /// Requests for a sparse fetch.
    pub(crate) sparse_fetches: AtomicU64,
}
