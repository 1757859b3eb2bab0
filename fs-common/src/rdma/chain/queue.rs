//! What a queue pair is armed with: where the work queue lies, the gate at which its chains wait, and what is counted of them.

use super::entry::{ENTRY_LEN, RECEIVE_LEN};
use super::run::Fault;
use super::view::{ChainMemory, Need, NotInView, VIEWS_MAX, View};
use crate::rdma::WrId;
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most work entries of a queue.
pub const ENTRIES_MAX: u32 = 4096;
/// The most receive entries of a queue.
pub const RECEIVES_MAX: u32 = 256;

/// A work queue in registered memory.
#[derive(Clone, Debug)]
pub struct WorkQueue {
    /// The memory that its chains reach; at most `VIEWS_MAX`, with different keys.
    pub views: Vec<View>,
    /// The key of the memory with the queue.
    pub key: u32,
    /// The first receive entry, and how many there are.
    pub receives: (u64, u32),
    /// The first work entry, and how many there are.
    pub entries: (u64, u32),
    /// The doorbell record.
    pub doorbell: u64,
    /// The entries before this index may be executed from the beginning.
    pub enabled: u32,
    /// The name of the completion that a fault makes.
    pub wr_id: WrId,
    /// Where its chains wait while it is closed.
    pub gate: Arc<Gate>,
    /// What is counted.
    pub figures: Arc<ChainFigures>,
}

/// Why a work queue cannot be armed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArmError {
    /// A part of it is not in its views.
    #[error("the work queue does not lie in its views: {0}")]
    Place(#[from] NotInView),
    /// Too many or too few entries.
    #[error(
        "{receives} receive entries and {entries} work entries are not within 1 to {RECEIVES_MAX} and 1 to {ENTRIES_MAX}"
    )]
    Size {
        /// Receive entries.
        receives: u32,
        /// Work entries.
        entries: u32,
    },
    /// Too many views, or two with one key.
    #[error("{0} views are more than {VIEWS_MAX}, or two of them have one key")]
    Views(usize),
}

impl WorkQueue {
    /// Checks what must hold for an executor to start: the queue lies in its views, and its sizes are bounded.
    ///
    /// # Errors
    /// `ArmError`.
    pub fn look(&self) -> Result<(), ArmError> {
        let ((receives_at, receives), (entries_at, entries)) = (self.receives, self.entries);
        if !(1..=RECEIVES_MAX).contains(&receives) || !(1..=ENTRIES_MAX).contains(&entries) {
            return Err(ArmError::Size { receives, entries });
        }
        let is_double =
            |(index, view): (usize, &View)| self.views[..index].iter().any(|other| other.key() == view.key());
        if self.views.len() > VIEWS_MAX || self.views.iter().enumerate().any(is_double) {
            return Err(ArmError::Views(self.views.len()));
        }
        for (address, len) in [
            (receives_at, u64::from(receives) * RECEIVE_LEN as u64),
            (entries_at, u64::from(entries) * ENTRY_LEN as u64),
            (self.doorbell, 4),
        ] {
            self.views.find(self.key, address, len, Need::Read)?;
        }
        Ok(())
    }
}

/// A gate for the chains of several queues. Closed, it lets none begin, and none is under way: who sets memory right that chains share holds it.
#[derive(Debug, Default)]
pub struct Gate(RwLock<()>);

/// A chain is under way.
pub struct Started<'g>(#[allow(dead_code, reason = "held, not read")] RwLockReadGuard<'g, ()>);

impl Gate {
    /// A chain begins; `None` if the gate is closed. Never waits.
    pub fn enter(&self) -> Option<Started<'_>> {
        self.0.try_read().map(Started)
    }

    /// Closes the gate until the returned value is dropped; waits for the chains that have begun. Messages that come meanwhile wait; call
    /// [`crate::rdma::QueuePair::resume`] on each queue pair afterwards.
    pub fn close(&self) -> RwLockWriteGuard<'_, ()> {
        self.0.write()
    }
}

/// What is counted of one queue. All are written by the one thread that executes its chain just then, and read by anybody (relaxed: figures), but for
/// `limit`.
#[derive(Debug)]
pub struct ChainFigures {
    /// Messages that came and were taken.
    pub received: AtomicU64,
    /// Entries that were executed.
    pub entries: AtomicU64,
    /// Chains that came to their last entry.
    pub chains: AtomicU64,
    /// Bytes that were moved.
    pub bytes: AtomicU64,
    /// Messages that may be taken, whatever the doorbell says. The owner writes it; a message beyond it waits. Relaxed: `resume` follows a change.
    pub limit: AtomicU64,
    /// The fault that ended the queue.
    pub fault: Mutex<Option<Fault>>,
}

impl Default for ChainFigures {
    fn default() -> Self {
        Self {
            received: AtomicU64::new(0),
            entries: AtomicU64::new(0),
            chains: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            limit: AtomicU64::new(u64::MAX),
            fault: Mutex::new(None),
        }
    }
}

impl ChainFigures {
    /// Chains that came to their last entry.
    pub fn chains(&self) -> u64 {
        self.chains.load(Ordering::Relaxed)
    }
}
