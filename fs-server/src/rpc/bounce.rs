//! Bounce memory of one worker: registered once, lent to requests that move file bytes between a client's memory
//! and the tiers (TeRM section 4.1.2).
//!
//! Bounded: when every buffer is lent, requests wait for one; the wait is what slows a client that writes faster
//! than the SSD.

use async_lock::{Semaphore, SemaphoreGuardArc};
use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{Access, MemoryRegion, ProtectionDomain, RdmaError, Sge};
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes of a buffer: the largest transfer.
const BUFFER: usize = MAX_TRANSFER_BYTES as usize;
const _: () = assert!(BUFFER.is_multiple_of(PAGE_SIZE));
/// Buffers of a worker: as many large requests as FUSE keeps in flight by default (`max_background` 12 to 64)
/// would need more than a disk can use; eight keep an SSD and a memory bus busy.
pub const BUFFERS_PER_WORKER: usize = 8;

/// The buffers of one worker.
pub struct BouncePool {
    region: Arc<dyn MemoryRegion>,
    permits: Arc<Semaphore>,
    free: Rc<RefCell<Vec<usize>>>,
}

impl BouncePool {
    /// Allocates and registers.
    ///
    /// # Errors
    /// `RdmaError` if there is no memory.
    pub fn new(pd: &dyn ProtectionDomain) -> Result<Self, RdmaError> {
        let memory = SharedMemory::new("cuttlefs-bounce", BUFFER * BUFFERS_PER_WORKER).map_err(|source| {
            RdmaError::Io { action: "allocate memory for", endpoint: "bounce buffers".into(), source }
        })?;
        Ok(Self {
            region: pd.register(Arc::new(memory), Access::LOCAL)?,
            permits: Arc::new(Semaphore::new(BUFFERS_PER_WORKER)),
            free: Rc::new(RefCell::new((0..BUFFERS_PER_WORKER).collect())),
        })
    }

    /// Lends a buffer; waits while all are lent.
    pub async fn lend(&self) -> Bounce {
        let permit = self.permits.acquire_arc().await;
        let index = self.free.borrow_mut().pop().expect("a permit means a buffer");
        Bounce { region: self.region.clone(), index, free: self.free.clone(), _permit: permit }
    }
}

/// A lent buffer; it goes back when dropped.
pub struct Bounce {
    region: Arc<dyn MemoryRegion>,
    index: usize,
    free: Rc<RefCell<Vec<usize>>>,
    _permit: SemaphoreGuardArc,
}

impl Bounce {
    /// The memory it lies in.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        self.region.memory()
    }

    /// Where in that memory it starts.
    pub fn offset(&self) -> usize {
        self.index * BUFFER
    }

    /// Part of the buffer, for a work request.
    pub fn sge(&self, start: usize, len: usize) -> Sge {
        assert!(start + len <= BUFFER, "transfer larger than a bounce buffer");
        self.region.sge((self.offset() + start) as u64, len as u32)
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        self.free.borrow_mut().push(self.index);
    }
}
