//! Shared receives of the simulated RNIC. A place is free again when its receive is taken, not only when the completion was polled.

use crate::rdma::verbs::count_within;
use crate::rdma::{PostError, RecvWr, SharedReceiveQueue};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

/// Receives that simulated queue pairs share. See the module.
pub(super) struct SimShared {
    depth: usize,
    max_sges: u32,
    receives: Mutex<VecDeque<RecvWr>>,
    ran_dry: AtomicU64,
}

impl SimShared {
    pub(super) fn new(depth: u32, max_sges: u32) -> Self {
        Self { depth: depth as usize, max_sges, receives: Mutex::default(), ran_dry: AtomicU64::new(0) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.receives.lock().is_empty()
    }

    /// The oldest receive.
    pub(super) fn take(&self) -> Option<RecvWr> {
        let mut receives = self.receives.lock();
        let taken = receives.pop_front();
        if taken.is_some() && receives.is_empty() {
            self.ran_dry.fetch_add(1, Ordering::Relaxed);
        }
        taken
    }
}

impl SharedReceiveQueue for SimShared {
    fn post(&self, requests: &[RecvWr]) -> Result<(), PostError> {
        let mut receives = self.receives.lock();
        let within = count_within(requests, self.max_sges);
        let posted = within.min(self.depth.saturating_sub(receives.len()));
        receives.extend(&requests[..posted]);
        match () {
            () if posted < within => Err(PostError::QueueFull { posted }),
            () if posted < requests.len() => Err(PostError::TooManySges { posted, most: self.max_sges }),
            () => Ok(()),
        }
    }

    fn ran_dry(&self) -> u64 {
        self.ran_dry.load(Ordering::Relaxed)
    }
}
