//! Fault threads: accesses to files that must first bring pages into memory (TeRM section 2.2, the faulting flow).
//!
//! # How it works
//! When a target answers `Faults`, the queue pair stalls: its input is not read, so that replies keep their order, and the request is passed to a
//! fault thread. That thread executes it, blocking as long as the disk takes, sends the reply and lets the queue pair go on. The engine serves all
//! other queue pairs meanwhile.
//!
//! Threads are started when they are needed and stay: a device whose target never faults has none. Peers whose faults wait for a thread take turns, one
//! fault each, however many queue pairs one of them has.
//!
//! # Invariants
//! * A queue pair has at most one fault under way, so the queue, and the bytes of WRITEs in it, are bounded by the number of connections.
//! * A fault names its queue pair by number, which is never given out again: if the connection has ended meanwhile, the reply is dropped.
//!
//! # Failure
//! If no thread can be started, the request is refused. If a target does not return, its queue pair waits for ever, and so does `stop`.

use super::engine::Engine;
use crate::fair::{FairQueue, Payer};
use crate::ids::FileKey;
use crate::panic_ends;
use crate::rdma::verbs::{FileAtomic, FileTarget, RegionOwner};
use parking_lot::{Condvar, Mutex};
use std::io;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Faults resolved at once. Each is a thread that waits for a disk; commodity drives reach their full rate at 32 to
/// 128 requests. Further queue pairs wait for their turn.
const FAULT_THREADS_MAX: usize = 64;

/// A request that faulted.
pub(super) struct Fault {
    /// The stalled queue pair.
    pub(super) number: u64,
    /// Whose it is.
    pub(super) payer: Payer,
    pub(super) sequence: u64,
    pub(super) target: Arc<dyn FileTarget>,
    pub(super) owner: RegionOwner,
    pub(super) filekey: FileKey,
    pub(super) offset: u64,
    pub(super) access: FaultAccess,
}

/// The access of a fault.
pub(super) enum FaultAccess {
    /// Read this number of bytes.
    Read(usize),
    /// Write these bytes, and acknowledge if `ack`.
    Write { bytes: Vec<u8>, ack: bool },
    /// Do this to eight bytes.
    Atomic(FileAtomic),
    /// Place these bytes at the end; the fault's offset means nothing.
    Append(Vec<u8>),
}

#[derive(Default)]
struct State {
    queue: FairQueue<Fault>,
    /// Faults in the queue.
    waiting: usize,
    /// Threads that wait for work.
    idle: usize,
    threads: Vec<JoinHandle<()>>,
    stopping: bool,
}

impl State {
    /// The next fault: of the peer that has had the fewest.
    fn take(&mut self) -> Option<Fault> {
        let (payer, fault) = self.queue.pop()?;
        // Each costs the same: the thread waits, and whoever works meanwhile has accounts of its own.
        self.queue.charge(payer, Duration::ZERO);
        self.waiting -= 1;
        Some(fault)
    }
}

/// The faults of one engine.
#[derive(Default)]
pub(super) struct Faults {
    state: Mutex<State>,
    work: Condvar,
}

impl Faults {
    /// Takes a fault of one of `engine`'s queue pairs.
    pub(super) fn take(&self, engine: &Arc<Engine>, fault: Fault) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.idle <= state.waiting && state.threads.len() < FAULT_THREADS_MAX && !state.stopping {
            let engine = engine.clone();
            let name = format!("cuttlefs-fault-{}", state.threads.len());
            let started = std::thread::Builder::new().name(name).spawn(move || engine.faults().run(&engine));
            match started {
                Ok(thread) => state.threads.push(thread),
                // The existing threads will take the fault.
                Err(error) if !state.threads.is_empty() => {
                    tracing::warn!(%error, threads = state.threads.len(), "no further fault thread");
                }
                Err(error) => return Err(error),
            }
        }
        state.waiting += 1;
        state.queue.push(fault.payer, fault);
        self.work.notify_one();
        Ok(())
    }

    fn run(&self, engine: &Engine) {
        // A target may wait for microseconds; the usual timer slack of 50 us would double that. A failure only changes times.
        let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        while let Some(fault) = self.next() {
            panic_ends::plant("cuttlefs-fault");
            if let Some(qp) = engine.queue_pair(fault.number) {
                qp.finish_fault(&fault);
            }
        }
    }

    fn next(&self) -> Option<Fault> {
        let mut state = self.state.lock();
        loop {
            if state.stopping {
                return None;
            }
            if let Some(fault) = state.take() {
                return Some(fault);
            }
            state.idle += 1;
            self.work.wait(&mut state);
            state.idle -= 1;
        }
    }

    /// Ends the threads, after each has finished its fault.
    pub(super) fn stop(&self) {
        let threads = {
            let mut state = self.state.lock();
            state.stopping = true;
            while state.take().is_some() {}
            std::mem::take(&mut state.threads)
        };
        self.work.notify_all();
        for thread in threads {
            if thread.thread().id() != std::thread::current().id() && thread.join().is_err() {
                tracing::error!("a fault thread panicked");
            }
        }
    }
}
