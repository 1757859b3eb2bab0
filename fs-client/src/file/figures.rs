//! Figures of a mount, by the names people see.

use super::idle_memory;
use crate::read::Reads;
use crate::session::Session;
use std::sync::atomic::Ordering;

/// All figures. Relaxed loads: each figure is of this moment by itself.
pub(super) fn figures(session: &Session, reads: &Reads) -> Vec<(&'static str, u64)> {
    let (wire, read) = (session.link().counters(), &reads.counters);
    vec![
        ("rpc_requests", wire.rpc_requests.load(Ordering::Relaxed)),
        ("onesided_reads", read.onesided_reads.get()),
        ("window_pages", read.window_pages.get()),
        ("magic_hits", read.magic_hits.load(Ordering::Relaxed)),
        ("read_twice", read.read_twice.load(Ordering::Relaxed)),
        ("sparse_fetches", read.sparse_fetches.load(Ordering::Relaxed)),
        ("reconnects", wire.reconnects.load(Ordering::Relaxed)),
        ("unsynced_waits", session.unsynced_waits()),
        ("unsynced_bound_bytes", session.unsynced().bound() as u64),
        ("memory_bound_bytes", idle_memory::memory_bound_bytes(session)),
    ]
}
