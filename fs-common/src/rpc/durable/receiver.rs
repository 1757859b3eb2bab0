//! The receiver: takes records in order, makes them persistent where that is its part, executes, answers.
//!
//! # Threads
//! * `acceptor`: link handshakes.
//! * `poller`: completions. It welcomes senders, closes those who say nothing, takes records, and does the receiver's part of
//!   RFlush before anything is executed. With no executors it also executes, which saves light requests a change of threads.
//! * `executors`: one queue each; a request goes to the queue of its lane.
//!
//! What they do is in `core`.
//!
//! # Failure
//! Whatever a sender breaks, or whatever fails for it, ends its connection only. The rings outlive it all.

use super::connection::Work;
use super::core::{Common, Core, Known, Taking};
use super::rings::RingStore;
use super::service::Service;
use crate::panic_ends;
use crate::rdma::{Device, Endpoint, HELLO_WAIT, Listener, RdmaError};
use crate::world::Clock;
use crossbeam::channel::{Receiver as Queue, unbounded};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

/// Senders at once, those that said nothing yet included.
pub const CONNECTIONS_MAX: usize = 256;
/// Of them, one peer's, unless it is root or the receiver's own user: a quarter, as of all that peers share.
pub const CONNECTIONS_OF_PEER: usize = CONNECTIONS_MAX / 4;
/// How long the poller sleeps at most: it looks whether it is to stop.
const POLL_SLEEP: Duration = Duration::from_millis(50);
/// Completions the poller takes at a time.
const COMPLETIONS_AT_ONCE: usize = 64;

/// How a receiver works.
#[derive(Clone, Copy, Debug)]
pub struct ReceiverOptions {
    /// Threads that execute; 0: the poller does.
    pub executors: usize,
    /// Requests of one sender taken and not executed, beyond which it is told to slow down.
    pub slow_beyond: usize,
    /// How long who connected may take to say hello.
    pub hello_wait: Duration,
}

impl Default for ReceiverOptions {
    fn default() -> Self {
        Self { executors: 0, slow_beyond: 32, hello_wait: HELLO_WAIT }
    }
}

/// What a receiver has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverFigures {
    /// Requests executed.
    pub executed: u64,
    /// Of them, out of rings that a crash or a broken connection left.
    pub recovered: u64,
    /// Times a ring's head was moved and made persistent.
    pub heads: u64,
    /// Times senders were told to slow down.
    pub slowed: u64,
    /// Senders that are connected.
    pub senders: usize,
    /// Peers that connected, said nothing, and were closed for that.
    pub silent: u64,
    /// Of them, told to slow down at the moment.
    pub slow_senders: usize,
    /// Requests taken and not executed.
    pub behind: usize,
}

/// A receiver that runs.
pub struct Receiver {
    core: Arc<Core>,
    listener: Arc<dyn Listener>,
    threads: Vec<JoinHandle<()>>,
}

impl Receiver {
    /// Recovers the rings and begins to listen.
    ///
    /// # Errors
    /// A ring that cannot be recovered, a device or a thread that is not to be had.
    pub fn start(
        device: &dyn Device,
        endpoint: &Endpoint,
        store: RingStore,
        service: Arc<dyn Service>,
        options: ReceiverOptions,
    ) -> Result<Self, RdmaError> {
        let recovered =
            store.recover(&*service).map_err(|error| RdmaError::Unsupported(error.to_string()))?;
        let (feeds, queues): (Vec<_>, Vec<_>) = (0..options.executors).map(|_| unbounded()).unzip();
        let core = Core::new(device, store, service, options, feeds)?;
        core.common.executed.fetch_add(recovered, Ordering::Relaxed);
        core.common.recovered.fetch_add(recovered, Ordering::Relaxed);
        let listener: Arc<dyn Listener> = Arc::from(core.pd.listen(endpoint)?);
        let mut receiver = Self { core: Arc::new(core), listener: listener.clone(), threads: Vec::new() };
        let running = receiver.core.clone();
        receiver.spawn("durable-accept", move || running.accept(&*listener))?;
        let running = receiver.core.clone();
        receiver.spawn("durable-poll", move || running.poll())?;
        for (index, queue) in queues.into_iter().enumerate() {
            let running = receiver.core.clone();
            receiver.spawn(&format!("durable-exec-{index}"), move || running.work(&queue))?;
        }
        Ok(receiver)
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), RdmaError> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run).map_err(|source| {
            RdmaError::Io { action: "start a thread of", endpoint: "a receiver".to_owned(), source }
        })?;
        self.threads.push(thread);
        Ok(())
    }

    /// Where it listens.
    pub fn endpoint(&self) -> Endpoint {
        self.listener.endpoint()
    }

    /// What it has done.
    pub fn figures(&self) -> ReceiverFigures {
        let welcomed = self.core.welcomed();
        let of_living = welcomed.iter().map(|connection| connection.slowed.load(Ordering::Relaxed));
        let Common { executed, recovered, heads, .. } = &*self.core.common;
        ReceiverFigures {
            executed: executed.load(Ordering::Relaxed),
            recovered: recovered.load(Ordering::Relaxed),
            heads: heads.load(Ordering::Relaxed),
            slowed: self.core.slowed.load(Ordering::Relaxed) + of_living.sum::<u64>(),
            senders: welcomed.len(),
            silent: self.core.silent.load(Ordering::Relaxed),
            slow_senders: welcomed.iter().filter(|connection| connection.is_slowed()).count(),
            behind: welcomed.iter().map(|connection| connection.backlog.load(Ordering::Relaxed)).sum(),
        }
    }
}

impl Drop for Receiver {
    /// Stops at once, as a crash would but for the request being executed: what the rings hold stays there.
    fn drop(&mut self) {
        self.core.stopping.store(true, Ordering::Release);
        self.listener.close();
        let known = std::mem::take(&mut *self.core.known.lock());
        known.values().for_each(Known::close);
        drop(known);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of a durable receiver panicked");
            }
        }
    }
}

/// What the threads do.
impl Core {
    fn accept(&self, listener: &dyn Listener) {
        loop {
            let accepted = listener.accept();
            panic_ends::plant("durable-accept");
            match accepted {
                Ok(incoming) => self.take_in(incoming),
                Err(RdmaError::Closed) => return,
                Err(error) => tracing::warn!(%error, "a sender could not connect"),
            }
        }
    }

    fn poll(&self) {
        let mut taking = Taking::default();
        let mut look_at = self.clock.monotonic();
        while !self.stopping.load(Ordering::Acquire) {
            panic_ends::plant("durable-poll");
            let greet = &mut |hello| self.greet(hello);
            let now = self.clock.monotonic();
            let taken = self.take_some(&mut taking, COMPLETIONS_AT_ONCE, greet);
            if taken < COMPLETIONS_AT_ONCE && now >= look_at {
                self.close_silent(now);
                look_at = now + POLL_SLEEP;
            }
            if taken == 0 {
                self.cq.wait(POLL_SLEEP);
            }
        }
    }

    fn work(&self, queue: &Queue<Work>) {
        let mut answer = Vec::new();
        while !self.stopping.load(Ordering::Acquire) {
            if let Ok(work) = queue.recv_timeout(POLL_SLEEP) {
                self.execute(work, &mut answer);
            }
        }
    }
}
