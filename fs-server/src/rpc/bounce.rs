//! Bounce memory of one worker: registered once with each RNIC, lent to requests that move file bytes between a client's memory
//! and the tiers (TeRM section 4.1.2).
//!
//! Bounded: when every buffer is lent, requests wait for one; this wait slows a client that writes faster than the SSD. A peer
//! has half of the buffers at most: one that does not answer its transfers does not keep other peers from theirs.

use super::turns::{Claim, Turn, TurnFigures, Turns};
use crate::rnics::{RnicIndex, Rnics};
use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{Access, MemoryRegion, RdmaError, Sge};
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes of a buffer: the largest transfer.
const BUFFER: usize = MAX_TRANSFER_BYTES as usize;
const _: () = assert!(BUFFER.is_multiple_of(PAGE_SIZE));
/// Buffers of a worker: as many large requests as FUSE keeps in flight by default (`max_background` 12 to 64)
/// would need more than a disk can use; eight keep an SSD and a memory bus busy. Twice that, for one peer has half. Memory
/// that was never lent is not there.
pub(crate) const BUFFERS_PER_WORKER: usize = 16;
/// Buffers of a worker that one peer has at most.
pub const BUFFERS_OF_PEER: usize = BUFFERS_PER_WORKER / 2;

/// The buffers of one worker.
pub(crate) struct BouncePool {
    memory: Arc<SharedMemory>,
    /// The memory, as each RNIC knows it.
    regions: Rc<[Arc<dyn MemoryRegion>]>,
    turns: Turns,
    free: Rc<RefCell<Vec<usize>>>,
}

impl BouncePool {
    /// Allocates, and registers with each RNIC.
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

    /// Lends a buffer; waits while all are lent, or all that this peer may have.
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

/// A buffer's place in the pool; free again when dropped.
struct Place {
    index: usize,
    free: Rc<RefCell<Vec<usize>>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.free.borrow_mut().push(self.index);
    }
}

/// A lent buffer; it goes back when dropped.
pub(crate) struct Bounce {
    memory: Arc<SharedMemory>,
    regions: Rc<[Arc<dyn MemoryRegion>]>,
    place: Place,
    /// Behind the place: whoever has the turn next finds the buffer free.
    _turn: Turn,
}

impl Bounce {
    /// The memory it lies in.
    pub(crate) fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Where in that memory it starts.
    pub(crate) fn offset(&self) -> usize {
        self.place.index * BUFFER
    }

    /// Part of the buffer, for a work request to this RNIC.
    pub(crate) fn sge(&self, rnic: RnicIndex, start: usize, len: usize) -> Sge {
        assert!(start + len <= BUFFER, "transfer larger than a bounce buffer");
        self.regions[rnic.0].sge((self.offset() + start) as u64, len as u32)
    }
}
