//! Bounce memory of one worker: registered once with each RNIC, and lent to requests that move file bytes between a client's memory and the tiers
//! (TeRM section 4.1.2).
//!
//! It is bounded: when every buffer is lent, requests wait for one, which slows a client that writes faster than the SSD. A peer has at most half of
//! the buffers, so that a peer that does not answer its transfers does not keep others from them.

use super::turns::{Claim, Turn, TurnFigures, Turns};
use crate::rnics::{RnicIndex, Rnics};
use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{Access, MemoryRegion, RdmaError, Sge};
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes of a buffer: as many as the largest transfer.
const BUFFER: usize = MAX_TRANSFER_BYTES as usize;
const _: () = assert!(BUFFER.is_multiple_of(PAGE_SIZE));
/// Buffers of a worker. FUSE keeps 12 to 64 large requests in flight by default (`max_background`), which is more than a disk can use; eight keep an
/// SSD and a memory bus busy. There are twice as many, because one peer has at most half. A buffer that was never lent takes no memory.
pub(crate) const BUFFERS_PER_WORKER: usize = 16;
/// Buffers of a worker that one peer has at most.
pub const BUFFERS_OF_PEER: usize = BUFFERS_PER_WORKER / 2;

/// The buffers of one worker.
pub(crate) struct BouncePool {
    memory: Arc<SharedMemory>,
    /// The memory as each RNIC has registered it.
    regions: Rc<[Arc<dyn MemoryRegion>]>,
    turns: Turns,
    free: Rc<RefCell<Vec<usize>>>,
}

impl BouncePool {
    /// Allocates the buffers, and registers them with each RNIC.
    ///
    /// # Errors
    /// `RdmaError` if there is no memory.
    pub(crate) fn new(rnics: &Rnics, figures: Arc<TurnFigures>) -> Result<Self, RdmaError> {
        let memory = SharedMemory::new("cuttlefs-bounce", BUFFER * BUFFERS_PER_WORKER).map_err(|source| {
            RdmaError::Io { action: "allocate memory for", endpoint: "bounce buffers".into(), source }
        })?;
        let memory = Arc::new(memory);
        let regions = rnics.all().iter().map(|rnic| rnic.pd.register(memory.clone(), Access::LOCAL));
        Ok(Self {
            regions: regions.collect::<Result<_, _>>()?,
            memory,
            turns: Turns::new(BUFFERS_PER_WORKER, BUFFERS_OF_PEER, figures),
            free: Rc::new(RefCell::new((0..BUFFERS_PER_WORKER).collect())),
        })
    }

    /// Lends a buffer; waits while all are lent, or the peer has its part.
    pub(crate) async fn lend(&self, claim: &Claim) -> Bounce {
        let turn = self.turns.take(claim).await;
        let index = self.free.borrow_mut().pop().expect("a turn means a buffer");
        let place = Place { index, free: self.free.clone() };
        let (memory, regions) = (self.memory.clone(), self.regions.clone());
        let bounce = Bounce { memory, regions, place, _turn: turn };
        bounce.memory().spoil(bounce.offset(), BUFFER);
        bounce
    }
}

/// A buffer's index in the pool, which is free again when this is dropped.
struct Place {
    index: usize,
    free: Rc<RefCell<Vec<usize>>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.free.borrow_mut().push(self.index);
    }
}

/// A lent buffer; given back when dropped.
pub(crate) struct Bounce {
    memory: Arc<SharedMemory>,
    regions: Rc<[Arc<dyn MemoryRegion>]>,
    place: Place,
    /// Dropped after `place`, so that the next in turn finds a free buffer.
    _turn: Turn,
}

impl Bounce {
    /// The memory of all buffers.
    pub(crate) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Where the buffer begins in that memory.
    pub(crate) fn offset(&self) -> usize {
        self.place.index * BUFFER
    }

    /// Part of the buffer, for a work request to this RNIC.
    pub(crate) fn sge(&self, rnic: RnicIndex, start: usize, len: usize) -> Sge {
        assert!(start + len <= BUFFER, "transfer larger than a bounce buffer");
        self.regions[rnic.0].sge((self.offset() + start) as u64, len as u32)
    }
}
