//! Receives that all connections of one worker share, where the RNIC has shared receive queues.
//!
//! Over an RNIC registered memory is pinned, whether or not messages come to it. So receives are as many as a worker has use for, and
//! not two for each connection. A message is copied out and its receive posted again as soon as its completion is polled; so what keeps a
//! connection from having more than its `RECEIVES` requests here at once is no longer that receives are missing, but that the third one ends
//! it (`Connection::begin`).
//!
//! # When it runs dry
//! More messages than receives have come between two polls. Their senders' RNICs ask again, each 0.64 ms, until the worker has polled:
//! nothing is lost. How often that began is counted (`receives_ran_dry`).

use super::connection::WorkId;
use crate::rnics::RECEIVES_OF_WORKER;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{
    Access, MemoryRegion, PostError, ProtectionDomain, RdmaError, RecvWr, SharedReceiveQueue,
};
use cuttlefs_common::rpc::MAX_MESSAGE_BYTES;
use std::cell::Cell;
use std::sync::Arc;

const MESSAGE: usize = MAX_MESSAGE_BYTES as usize;

/// One worker's shared receives.
pub(crate) struct SharedReceives {
    queue: Arc<dyn SharedReceiveQueue>,
    region: Arc<dyn MemoryRegion>,
    /// How often it ran dry, as far as was told.
    told: Cell<u64>,
}

impl SharedReceives {
    /// Posts all receives.
    ///
    /// # Errors
    /// `RdmaError` if there is no memory.
    pub(crate) fn new(
        queue: Arc<dyn SharedReceiveQueue>,
        pd: &dyn ProtectionDomain,
    ) -> Result<Self, RdmaError> {
        let failed = |action, source| RdmaError::Io { action, endpoint: "shared receives".into(), source };
        let memory = SharedMemory::new("cuttlefs-receives", MESSAGE * RECEIVES_OF_WORKER)
            .map_err(|source| failed("allocate memory for", source))?;
        let region = pd.register(Arc::new(memory), Access::LOCAL)?;
        let receives = Self { queue, region, told: Cell::new(0) };
        let all: Vec<_> = (0..RECEIVES_OF_WORKER).map(|index| receives.receive(index)).collect();
        receives.queue.post(&all).map_err(|error| failed("post", std::io::Error::other(error)))?;
        Ok(receives)
    }

    fn receive(&self, index: usize) -> RecvWr {
        RecvWr {
            wr_id: WorkId::Shared(index).encode(),
            local: self.region.sge((MESSAGE * index) as u64, MAX_MESSAGE_BYTES),
        }
    }

    /// A receive has completed: its message, of which so many bytes are wanted, and the receive is posted again.
    pub(crate) fn take(&self, index: usize, len: usize) -> Vec<u8> {
        let mut message = vec![0; len];
        self.region.memory().read(MESSAGE * index, &mut message);
        match self.queue.post(&[self.receive(index)]) {
            Ok(()) => {}
            // Its completion has been polled, so its place is free.
            Err(error @ (PostError::QueueFull { .. } | PostError::SharedReceives)) => {
                unreachable!("a receive that came back is not taken: {error}")
            }
            // The RNIC is broken; connections end with it.
            Err(error) => tracing::error!(%error, "a receive is lost"),
        }
        message
    }

    /// How often it ran dry since this was last asked.
    pub(crate) fn ran_dry(&self) -> u64 {
        let count = self.queue.ran_dry();
        count - self.told.replace(count)
    }
}
