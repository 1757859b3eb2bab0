//! The queues of a worker at one RNIC.

use super::shared_receives::PeersReceives;
use crate::rnics::Rnic;
use cuttlefs_common::rdma::{CompletionQueue, RdmaError};
use std::sync::Arc;

/// Completions that a worker's queue of an RNIC holds: every connection may have a few of each kind outstanding.
const CQ_DEPTH: u32 = 64 * 1024;

/// A worker's queues at one RNIC.
#[derive(Clone)]
pub(crate) struct RnicQueues {
    /// Completions of all queue pairs of the RNIC that the worker serves.
    pub(crate) cq: Arc<dyn CompletionQueue>,
    /// The receives of those queue pairs, if the RNIC has shared receives.
    pub(crate) receives: Option<Arc<PeersReceives>>,
}

impl RnicQueues {
    /// Makes a worker's queues.
    ///
    /// # Errors
    /// The device cannot.
    pub(crate) fn new(rnic: &Rnic) -> Result<Self, RdmaError> {
        let has_shared = rnic.device.capabilities().shared_receives;
        Ok(Self {
            cq: rnic.device.create_cq(CQ_DEPTH)?,
            receives: has_shared.then(|| Arc::new(PeersReceives::new())),
        })
    }
}
