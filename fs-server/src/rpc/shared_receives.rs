//! Receives that all connections of one worker share, where the RNIC has shared receive queues.
//!
//! An RNIC's registered memory is pinned, whether or not messages come to it. So there are as many receives as a worker can use, and not two for each
//! connection. A message is copied out and its receive posted again as soon as its completion is polled. So the number of receives no longer limits
//! the requests of a connection: a third request at once ends the connection (`Connection::begin`).
//!
//! # All receives in use
//! If more messages than receives come between two polls, the senders' RNICs try again every 0.64 ms until the worker has polled, and nothing is
//! lost. The beginnings of such times are counted (`receives_ran_dry`).

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
    /// How many times it had run dry when `ran_dry` was called last.
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

    /// Takes the first `len` bytes of the message in a receive that has completed, and posts the receive again.
    pub(crate) fn take(&self, index: usize, len: usize) -> Vec<u8> {
        let mut message = vec![0; len];
        self.region.memory().read(MESSAGE * index, &mut message);
        match self.queue.post(&[self.receive(index)]) {
            Ok(()) => {}
            // The receive's completion was polled, so the queue has room for it.
            Err(error @ (PostError::QueueFull { .. } | PostError::SharedReceives)) => {
                unreachable!("a receive that came back is not taken: {error}")
            }
            // The RNIC is broken, and its connections end.
            Err(error) => tracing::error!(%error, "a receive is lost"),
        }
        message
    }

    /// How many times it has run dry since the last call.
    pub(crate) fn ran_dry(&self) -> u64 {
        let count = self.queue.ran_dry();
        count - self.told.replace(count)
    }
}
