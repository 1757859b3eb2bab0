//! Local memory of requests: what each of them asks of it, at hand. A registration is behind a pointer to code that is not known here, and each request would ask
//! it three times.

use crate::memory::SharedMemory;
use crate::rdma::{MemoryRegion, Sge};
use std::sync::Arc;

/// Local memory that was registered.
pub(super) struct LocalMemory {
    memory: Arc<SharedMemory>,
    /// The range of no bytes at its first one.
    first: Sge,
    /// What its owner's peers name it by.
    rkey: u32,
    /// Registered for as long as this lives.
    _region: Arc<dyn MemoryRegion>,
}

impl LocalMemory {
    pub(super) fn new(region: Arc<dyn MemoryRegion>) -> Self {
        Self {
            memory: region.memory().clone(),
            first: region.sge(0, 0),
            rkey: region.rkey().0,
            _region: region,
        }
    }

    pub(super) fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// A local range for a work request.
    #[inline]
    pub(super) fn sge(&self, at: u64, len: u32) -> Sge {
        Sge { offset: self.first.offset + at, len, ..self.first }
    }

    /// What the region's owner names a byte of it by: rkey, address.
    pub(super) fn remote(&self, at: u64) -> (u32, u64) {
        (self.rkey, self.first.offset + at)
    }
}
