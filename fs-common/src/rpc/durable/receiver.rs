//! The receiver: takes records in order, makes them persistent if that is its part, executes them, and answers.
//!
//! # Threads
//! * `acceptor`: link handshakes.
//! * `poller`: completions. It welcomes senders, closes those that say nothing, takes records, and does the receiver's part of RFlush before anything
//!   is executed. Without executors it also executes, which saves light requests a change of threads.
//! * `executors`: one queue each; a request goes to the queue of its lane.
//!
//! `core` has their work.
//!
//! # Failure
//! A sender's breach, or a failure that concerns one sender, ends that sender's connection only. The rings outlive all connections.

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

/// Connections of senders at the same time, including those that have not said hello.
pub const CONNECTIONS_MAX: usize = 256;
/// Connections of one peer, unless it is root or the receiver's own user: a quarter, as for everything that peers share.
pub const CONNECTIONS_OF_PEER: usize = CONNECTIONS_MAX / 4;
/// Longest sleep of the poller, since it has to notice when it should stop.
const POLL_SLEEP: Duration = Duration::from_millis(50);
/// Completions the poller takes at a time.
const COMPLETIONS_AT_ONCE: usize = 64;

/// Parameters of a receiver.
#[derive(Clone, Copy, Debug)]
pub struct ReceiverOptions {
    /// Number of executor threads; 0: the poller executes.
    pub executors: usize,
    /// Requests of one sender that are taken but not executed, beyond which the sender is told to slow down.
    pub slow_beyond: usize,
    /// How long a peer may take to say hello after it has connected.
    pub hello_wait: Duration,
}

impl Default for ReceiverOptions {
    fn default() -> Self {
        Self { executors: 0, slow_beyond: 32, hello_wait: HELLO_WAIT }
    }
}

/// Figures of a receiver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverFigures {
    /// Requests executed.
    pub executed: u64,
    /// Of them, requests from rings that a crash or a broken connection left.
    pub recovered: u64,
    /// Times a ring's head was moved and made persistent.
    pub heads: u64,
    /// Times senders were told to slow down.
    pub slowed: u64,
    /// Senders that are connected.
    pub senders: usize,
    /// Peers that connected, said nothing, and were closed for that.
    pub silent: u64,
    /// Senders that are told to slow down at the moment.
    pub slow_senders: usize,
    /// Requests taken but not executed.
    pub behind: usize,
}

/// A running receiver.
pub struct Receiver {
    core: Arc<Core>,
    listener: Arc<dyn Listener>,
    threads: Vec<JoinHandle<()>>,
}

impl Receiver {
    /// Recovers the rings and begins to listen.
    ///
    /// # Errors
    /// A ring cannot be recovered, or the device or a thread fails.
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

    /// The endpoint on which it listens.
    pub fn endpoint(&self) -> Endpoint {
        self.listener.endpoint()
    }

    /// Its figures.
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
    /// Stops at once, like a crash, except that requests being executed are finished: the other requests stay in the rings.
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

/// The work of the threads.
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
