//! One lane: a queue pair, a session slot and the memory its requests travel through.
//!
//! ```text
//! lane memory:  [ request 64 KiB | 2 receives of 64 KiB | data: 1 MiB + a page | proofs: a page ]
//! ```
//!
//! Large writes are pulled from the data part, and fetches and one-sided reads land in it; entries of tables that are READ land among the
//! proofs.

use super::{DataBuffer, RemoteWindows};
use cuttlefs_common::ids::{PAGE_SIZE, SlotIndex};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{
    Access, Completion, CompletionQueue, Device, MemoryRegion, ProtectionDomain, QpState, QueuePair,
    RdmaError, RecvWr, WrId,
};
use cuttlefs_common::rpc::{MAX_MESSAGE_BYTES, MAX_TRANSFER_BYTES};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(super) const MESSAGE: usize = MAX_MESSAGE_BYTES as usize;
/// The number of posted receives: one for the reply, and one more so that a late duplicate never waits for a buffer.
pub(super) const RECEIVES: usize = 2;
pub(super) const DATA_OFFSET: usize = MESSAGE * (1 + RECEIVES);
pub(crate) const DATA_LEN: usize = MAX_TRANSFER_BYTES as usize + PAGE_SIZE;
pub(super) const PROOFS_OFFSET: usize = DATA_OFFSET + DATA_LEN;
/// The length of the proofs in bytes.
pub(crate) const PROOFS_LEN: usize = PAGE_SIZE;
/// The memory of a lane in bytes.
pub(crate) const LANE_BYTES: usize = PROOFS_OFFSET + PROOFS_LEN;
/// The most one-sided reads in one doorbell: those of a request of 1 MiB whose every second page is absent.
pub(crate) const MAX_RUNS: usize = MAX_TRANSFER_BYTES as usize / PAGE_SIZE / 2 + 1;

/// A connection that stands.
pub(super) struct Connection {
    pub(super) qp: Arc<dyn QueuePair>,
    /// The session to which it is attached.
    pub(super) session: u64,
    /// The server's tables, by keys of the RNIC that it leads to.
    pub(super) windows: Option<RemoteWindows>,
}

/// A queue pair with its slot and memory.
pub(crate) struct Lane {
    pub(super) slot: SlotIndex,
    /// The number of the request in flight, or of the next one. It moves on when the reply is there, and stays over reconnects: so each request runs
    /// once.
    pub(super) seq: u64,
    pub(super) cq: Arc<dyn CompletionQueue>,
    pub(super) region: Arc<dyn MemoryRegion>,
    pub(super) connection: Option<Connection>,
    /// Whether a connection stands, for threads that look at a lane that another thread has borrowed. Relaxed: a short delay does no harm.
    pub(super) is_standing: Arc<AtomicBool>,
    /// Whether there was a connection before.
    pub(super) was_connected: bool,
    pub(super) completions: Vec<Completion>,
    /// The message of the reply that is being read.
    pub(super) message: Vec<u8>,
    /// Whether the lane was used since the last check.
    pub(super) used: bool,
    /// Whether the current request is waited for even while the mount ends, because it begins a session or ends it.
    pub(super) is_at_door: bool,
}

impl Lane {
    pub(super) fn new(
        slot: SlotIndex,
        device: &dyn Device,
        pd: &dyn ProtectionDomain,
    ) -> Result<Self, RdmaError> {
        let memory = SharedMemory::new("cuttlefs-lane", LANE_BYTES).map_err(|source| RdmaError::Io {
            action: "allocate memory for",
            endpoint: "a lane".to_owned(),
            source,
        })?;
        let access = Access { remote_atomic: false, remote_flush: false, ..Access::ALL };
        Ok(Self {
            slot,
            seq: 1,
            cq: device.create_cq((MAX_RUNS + RECEIVES + 2) as u32)?,
            region: pd.register(Arc::new(memory), access)?,
            connection: None,
            is_standing: Arc::default(),
            was_connected: false,
            completions: Vec::new(),
            message: Vec::new(),
            used: false,
            is_at_door: false,
        })
    }

    /// Whether the lane was used since the last call.
    pub(super) fn take_used(&mut self) -> bool {
        std::mem::take(&mut self.used)
    }

    /// Gives back the memory for file bytes. Only for a lane that nobody uses.
    pub(super) fn give_memory_back(&self) {
        if let Err(error) = self.region.memory().discard(DATA_OFFSET, DATA_LEN + PROOFS_LEN) {
            tracing::debug!(%error, "a lane keeps its memory");
        }
    }

    pub(super) fn receive(&self, index: usize) -> RecvWr {
        RecvWr {
            wr_id: WrId(index as u64),
            local: self.region.sge((MESSAGE * (1 + index)) as u64, MAX_MESSAGE_BYTES).into(),
        }
    }

    /// Whether a connection stands, as far as this side knows.
    pub(super) fn is_connected(&self) -> bool {
        self.connection.as_ref().is_some_and(|c| c.qp.state() == QpState::ReadyToSend)
    }

    /// A flag that tells whether a connection stands, at any time and without the lane.
    pub(super) fn standing(&self) -> Arc<AtomicBool> {
        self.is_standing.clone()
    }

    /// Whether a connection stands, by what the link has reported so far. Only for a lane that nobody uses.
    pub(super) fn still_stands(&mut self) -> bool {
        self.cq.take_event();
        self.idle(Duration::ZERO);
        self.is_connected()
    }

    pub(crate) fn disconnect(&mut self) {
        self.is_standing.store(false, Ordering::Relaxed);
        if let Some(connection) = self.connection.take() {
            connection.qp.close();
        }
        let mut rest = Vec::new();
        while self.cq.poll(&mut rest, 64) > 0 {}
    }

    /// The part of the lane's memory that carries file bytes.
    pub(crate) fn data(&self) -> DataBuffer {
        DataBuffer { region: self.region.clone() }
    }

    /// Sleeps until something arrives on the idle lane, its connection breaks, or the time is over.
    pub(crate) fn idle(&mut self, time: Duration) {
        self.cq.wait(time);
        self.cq.poll(&mut self.completions, 16);
        let number = self.connection.as_ref().map(|connection| connection.qp.number());
        for completion in std::mem::take(&mut self.completions) {
            if Some(completion.qp) == number {
                // If this fails the connection is broken, and the next request will find that.
                let _ = self.pass_over(&completion);
            }
        }
    }
}
