//! Early writes: small writes that are acknowledged once their record is persistent in this client's ring at the server,
//! before the server has executed them (docs/durable-rpc.md).
//!
//! # How it works
//! A file's early writes go to one of a few rings ([`ring`]), by its number; a ring is executed in order. What was
//! acknowledged and is not known to be executed stands in [`Unexecuted`]. Before anything else is asked about a file, and
//! before requests that may speak of any file, those writes are waited for ([`After`], at the place where lanes are
//! borrowed). So this mount sees its own writes, and others see them once it has closed the file.
//!
//! # Invariants
//! * Nobody waits for a ring while holding a lane: a ring that is connected again asks over a lane.
//! * Recovery's requests and the control thread's wait for no early writes: those may be waiting for them.
//! * A request has the number after the one before it, over all connections of its ring: the server does a number once.
//!
//! # Bounds
//! `EARLY_UNANSWERED_MAX` writes a ring; then a write waits for the first of them.
//!
//! # Failure
//! Of a write that was acknowledged and could not be done, the file's next fsync or close says so, once. A ring that is
//! lost or behind, or whose place somebody else has, costs its writes the ordinary way; nobody waits for a place.

mod ring;
mod unexecuted;

use super::Session;
use crate::file::interrupt::Whole;
use crate::file::volume::FsError;
use cuttlefs_common::ids::{InodeNo, MAX_FILE_SIZE};
use cuttlefs_common::rpc::{EARLY_WRITE_MAX, RINGS_PER_CLIENT, Reply, Request, ring_of};
use cuttlefs_common::status::Status;
use ring::Ring;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use unexecuted::Unexecuted;

/// How long the end of a mount waits for early writes: the server executes them anyway, and later.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// Which early writes must be executed before a request goes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    /// None: it speaks of no file's contents or attributes, or somebody has waited already.
    Nothing,
    /// Those of one file.
    WritesOf(InodeNo),
    /// All: it may speak of any file, or names things.
    AllWrites,
}

/// How an attempt at an early write ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Early {
    /// It is safe, and will be executed.
    Acknowledged,
    /// It has not been done: it goes the ordinary way.
    Ordinary,
}

/// A mount's early writes.
pub(super) struct EarlyWrites {
    /// Wanted, offered when the mount began, and not ended. Relaxed: whoever reads an old value writes early once more, or not.
    is_on: AtomicBool,
    rings: Vec<Ring>,
    unexecuted: Unexecuted,
}

impl EarlyWrites {
    pub(super) fn new() -> Self {
        Self {
            is_on: AtomicBool::new(false),
            rings: (0..RINGS_PER_CLIENT).map(Ring::new).collect(),
            unexecuted: Unexecuted::default(),
        }
    }
}

impl Session {
    /// The mount begins, attached: whether it ever writes early. Decided once, for then the kernel is told whether closes
    /// are to be waited for.
    pub(super) fn begin_early_writes(&self) {
        let offered = self.look().is_some_and(|attachment| attachment.attached.early.is_some());
        self.early.is_on.store(self.options.early_writes && offered, Ordering::Relaxed);
    }

    /// Whether this mount writes early.
    pub(crate) fn writes_early(&self) -> bool {
        self.early.is_on.load(Ordering::Relaxed)
    }

    /// Writes to a regular file, at an offset or at its end, so that it is safe when this returns, if that can be had.
    ///
    /// # Errors
    /// `Io` if a write at the end may have been done, and nobody can tell; `ShutDown`.
    pub(crate) fn write_early(&self, ino: InodeNo, at: Option<u64>, bytes: &[u8]) -> Result<Early, FsError> {
        let has_room = at.is_none_or(|at| at <= MAX_FILE_SIZE - bytes.len().min(EARLY_WRITE_MAX) as u64);
        if !self.writes_early() || bytes.is_empty() || bytes.len() > EARLY_WRITE_MAX || !has_room {
            return Ok(Early::Ordinary);
        }
        let ring = &self.early.rings[usize::from(ring_of(ino))];
        let written = ring.write(self, ino, at, bytes)?;
        let count = match written {
            Early::Acknowledged => &self.counters.early_writes,
            Early::Ordinary => &self.counters.early_ordinary,
        };
        count.fetch_add(1, Ordering::Relaxed);
        Ok(written)
    }

    /// Waits until the early writes `after` speaks of are executed.
    ///
    /// # Errors
    /// `ShutDown` if the mount ends first.
    pub(crate) fn settle(&self, after: After) -> Result<(), FsError> {
        if after == After::Nothing || !self.early.unexecuted.any() {
            return Ok(());
        }
        match after {
            After::WritesOf(ino) if self.early.unexecuted.has(ino) => {
                self.counters.early_settles.fetch_add(1, Ordering::Relaxed);
                self.early.rings[usize::from(ring_of(ino))].settle(self, Some(ino))
            }
            After::AllWrites => {
                self.counters.early_settles.fetch_add(1, Ordering::Relaxed);
                self.early.rings.iter().try_for_each(|ring| ring.settle(self, None))
            }
            _ => Ok(()),
        }
    }

    /// The mount ends, and the server is there: no more early writes, and those there are have been executed, if that
    /// does not take long.
    pub(super) fn end_early_writes(&self) {
        self.early.is_on.store(false, Ordering::Relaxed);
        let deadline = self.now() + END_PATIENCE;
        for ring in &self.early.rings {
            ring.end(self, deadline);
        }
    }

    /// Asks the server something, so that the attachment is to the one that is there now.
    fn ask_server(&self) -> Result<(), FsError> {
        let _whole = Whole::begin();
        let caller = self.own_caller();
        self.call_after(After::Nothing, &caller, || Request::Heartbeat, |_| Ok(()))
    }

    /// Has the server execute what one of our rings holds, whose connection is gone. Gives the last number that was executed:
    /// nothing that was posted before will be any more.
    fn let_ring_go(&self, ring: u16) -> Result<u64, FsError> {
        let _whole = Whole::begin();
        let caller = self.own_caller();
        let take = |reply: Reply<'_>| match reply {
            Reply::RingGone { done } => Ok(done),
            _ => Err(FsError::Server(Status::Malformed)),
        };
        self.call_after(After::Nothing, &caller, || Request::LetRingGo { ring }, take)
    }
}
