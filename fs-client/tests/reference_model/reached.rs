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
    pub early: Early,
}

/// What became of small writes where some are acknowledged before they are executed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Early {
    pub writes: u64,
    pub ordinary: u64,
    pub slowed: u64,
    pub full: u64,
}

impl std::ops::AddAssign for Early {
    fn add_assign(&mut self, other: Self) {
        self.writes += other.writes;
        self.ordinary += other.ordinary;
        self.slowed += other.slowed;
        self.full += other.full;
    }
}

impl Reached {
    /// What a client counted.
    pub fn add(&mut self, counters: &ClientCounters) {
        self.magic_hits += counters.magic_hits.load(Relaxed);
        self.onesided_reads += counters.onesided_reads.get();
        self.reconnects += counters.reconnects.load(Relaxed);
        self.early.writes += counters.early_writes.load(Relaxed);
        self.early.ordinary += counters.early_ordinary.load(Relaxed);
        self.early.slowed += counters.early_slowed.load(Relaxed);
        self.early.full += counters.early_full.load(Relaxed);
    }
}
