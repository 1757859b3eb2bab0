//! Shared receives of the simulated RNIC. A place is free again when its receive is taken, not only when the completion was polled.

use crate::rdma::{PostError, RecvWr, SharedReceiveQueue};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

/// Receives that simulated queue pairs share. See the module.
pub(super) struct SimShared {
    depth: usize,
    receives: Mutex<VecDeque<RecvWr>>,
    ran_dry: AtomicU64,
}

impl SimShared {
    pub(super) fn new(depth: u32) -> Self {
        Self { depth: depth as usize, receives: Mutex::default(), ran_dry: AtomicU64::new(0) }
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
        let posted = requests.len().min(self.depth.saturating_sub(receives.len()));
        receives.extend(&requests[..posted]);
        if posted < requests.len() { Err(PostError::QueueFull { posted }) } else { Ok(()) }
    }

    fn ran_dry(&self) -> u64 {
        self.ran_dry.load(Ordering::Relaxed)
    }
}
