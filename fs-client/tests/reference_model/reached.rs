//! What walks came across: whether they are about anything.

use cuttlefs_client::session::ClientCounters;
use std::sync::atomic::Ordering::Relaxed;

/// What a walk came across.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reached {
    pub refused_for_space: u64,
    pub magic_hits: u64,
    pub onesided_reads: u64,
    pub reconnects: u64,
}

impl Reached {
    /// What a client counted.
    pub fn add(&mut self, counters: &ClientCounters) {
        self.magic_hits += counters.magic_hits.load(Relaxed);
        self.onesided_reads += counters.onesided_reads.get();
        self.reconnects += counters.reconnects.load(Relaxed);
    }
}
