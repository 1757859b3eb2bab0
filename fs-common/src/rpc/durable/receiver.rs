//! The receiver: takes records in order, makes them persistent where that is its part, executes, answers.
//!
//! # Threads
//! * `acceptor`: link handshakes.
//! * `poller`: completions. It welcomes senders, takes records, and does the receiver's part of RFlush before anything is
//!   executed. With no executors it also executes, which saves light requests a change of threads.
//! * `executors`: one queue each; a request goes to the queue of its lane, unless the service takes it over.
//! * `settler`, where the service settles: moves the heads of all rings, once for many requests; ends connections.
//!
//! # Failure
//! Whatever a sender breaks, or whatever fails for it, ends its connection only. The rings outlive it all.

use super::connection::{AnswerSlots, Connection, QUEUE_DEPTH, Work};
use super::rings::RingStore;
use super::service::Service;
use super::settler::{Settling, WhenRetired};
use super::wire::{MESSAGE_LEN, Message};
use crate::ids::{ClientId, QpNumber};
use crate::memory::SharedMemory;
use crate::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, Device, Endpoint, Listener, MemoryRegion,
    ProtectionDomain, QpConfig, QueuePair, RdmaError, RecvWr, SendOp, SendWr, WcStatus, WrId,
};
use crate::redo::ring::Geometry;
use crossbeam::channel::{Receiver as Queue, Sender as Feed, unbounded};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Senders at once, those that said nothing yet included.
pub const CONNECTIONS_MAX: usize = 256;
/// How long the poller sleeps at most: it looks whether it is to stop.
const POLL_SLEEP: Duration = Duration::from_millis(50);
/// `WrId` of the receive a hello lands in.
const HELLO: u64 = u64::MAX - 1;
/// Largest slot of answers a sender may ask to be written to.
const SLOT_MAX: u32 = 1 << 20;
/// Staging for one sender's answers.
const ANSWERS_MAX_BYTES: u64 = 256 << 20;

/// How a receiver works.
#[derive(Clone, Copy, Debug)]
pub struct ReceiverOptions {
    /// Threads that execute; 0: the poller does.
    pub executors: usize,
    /// Requests of one sender taken and not executed, beyond which it is told to slow down.
    pub slow_beyond: usize,
    /// Heads move only behind `Service::settle`, for many requests at once.
    pub settles: bool,
}

impl Default for ReceiverOptions {
    fn default() -> Self {
        Self { executors: 0, slow_beyond: 32, settles: false }
    }
}

/// What a receiver has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverFigures {
    /// Requests executed.
    pub executed: u64,
    /// Of them, out of rings that a crash or a broken connection left.
    pub recovered: u64,
    /// Times senders were told to slow down.
    pub slowed: u64,
    /// Requests that could not be done and are kept.
    pub kept: u64,
    /// Senders that are connected.
    pub senders: usize,
    /// Of them, told to slow down at the moment.
    pub slow_senders: usize,
    /// Requests taken and not executed.
    pub behind: usize,
}

/// What the poller knows of a queue pair.
enum Known {
    Greeting(Arc<dyn QueuePair>, Arc<dyn MemoryRegion>),
    Welcomed(Arc<Connection>),
}

/// What connections need of their receiver.
pub(super) struct Common {
    pub(super) service: Arc<dyn Service>,
    pub(super) options: ReceiverOptions,
    pub(super) settling: Settling,
    pub(super) executed: AtomicU64,
    pub(super) recovered: AtomicU64,
    pub(super) kept: AtomicU64,
}

pub(super) struct Shared {
    pd: Arc<dyn ProtectionDomain>,
    cq: Arc<dyn CompletionQueue>,
    pub(super) store: RingStore,
    pub(super) common: Arc<Common>,
    known: Mutex<HashMap<QpNumber, Known>>,
    /// Connections that ended and may have requests with executors. Pruned when another ends.
    leaving: Mutex<Vec<Arc<Connection>>>,
    /// Held while a ring is let go and opened: by the poller for a hello, by the settler for `retire`.
    pub(super) opening: Mutex<()>,
    feeds: Vec<Feed<Work>>,
    stopping: AtomicBool,
    /// Of connections that are gone.
    slowed: AtomicU64,
}

/// A receiver that runs.
pub struct Receiver {
    shared: Arc<Shared>,
    listeners: Vec<Arc<dyn Listener>>,
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
        let receiver = Self::serve(device, std::slice::from_ref(endpoint), store, service, options)?;
        receiver.shared.common.executed.fetch_add(recovered, Ordering::Relaxed);
        receiver.shared.common.recovered.fetch_add(recovered, Ordering::Relaxed);
        Ok(receiver)
    }

    /// Begins to listen, on rings that hold nothing any more.
    ///
    /// # Errors
    /// A device, an endpoint or a thread that is not to be had.
    pub fn serve(
        device: &dyn Device,
        endpoints: &[Endpoint],
        store: RingStore,
        service: Arc<dyn Service>,
        options: ReceiverOptions,
    ) -> Result<Self, RdmaError> {
        let pd = device.alloc_pd();
        let listeners = endpoints.iter().map(|endpoint| pd.listen(endpoint).map(Arc::from));
        let listeners = listeners.collect::<Result<Vec<Arc<dyn Listener>>, _>>()?;
        let (feeds, queues): (Vec<_>, Vec<_>) = (0..options.executors).map(|_| unbounded()).unzip();
        let common = Common {
            service,
            options,
            settling: Settling::default(),
            executed: AtomicU64::new(0),
            recovered: AtomicU64::new(0),
            kept: AtomicU64::new(0),
        };
        let shared = Arc::new(Shared {
            pd,
            cq: device.create_cq(QUEUE_DEPTH)?,
            store,
            common: Arc::new(common),
            known: Mutex::default(),
            leaving: Mutex::default(),
            opening: Mutex::default(),
            feeds,
            stopping: AtomicBool::new(false),
            slowed: AtomicU64::new(0),
        });
        let mut receiver = Self { shared, listeners, threads: Vec::new() };
        for listening in receiver.listeners.clone() {
            let running = receiver.shared.clone();
            receiver.spawn("durable-accept", move || running.accept(&*listening))?;
        }
        let running = receiver.shared.clone();
        receiver.spawn("durable-poll", move || running.poll())?;
        if options.settles {
            let running = receiver.shared.clone();
            receiver.spawn("durable-settle", move || running.settle())?;
        }
        for (index, queue) in queues.into_iter().enumerate() {
            let running = receiver.shared.clone();
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

    /// Where it listens, first of all.
    pub fn endpoint(&self) -> Endpoint {
        self.listeners[0].endpoint()
    }

    /// Where it listens, in the order asked for.
    pub fn endpoints(&self) -> Vec<Endpoint> {
        self.listeners.iter().map(|listener| listener.endpoint()).collect()
    }

    /// Ends a client's connection, executes what its ring holds, and begins a new life of the ring; with `forget` the
    /// ring goes. `done` is called on another thread when that is so. For services that settle.
    pub fn retire(&self, client: ClientId, forget: bool, done: Box<dyn FnOnce() + Send>) {
        assert!(self.shared.common.options.settles, "only a receiver that settles has a thread for it");
        let done: WhenRetired = done;
        self.shared.common.settling.retire(client, forget, done);
    }

    /// A clean end: what every ring holds is executed and its head moved. For services that settle.
    pub fn finish(self) {
        self.listeners.iter().for_each(|listener| listener.close());
        // A hello that is being answered may add one; one that comes later is for the service to refuse.
        drop(self.shared.opening.lock());
        let clients: Vec<_> = {
            let welcomed = self.shared.welcomed().into_iter().map(|connection| connection.client);
            let left: Vec<_> = self.shared.leaving.lock().iter().map(|left| left.client).collect();
            welcomed.chain(left).collect()
        };
        let (give, take) = mpsc::channel();
        for client in &clients {
            let give = give.clone();
            let done = move || {
                // Nobody takes it only if this thread is gone.
                let _ = give.send(());
            };
            self.retire(*client, false, Box::new(done));
        }
        drop(give);
        while take.recv().is_ok() {}
    }

    /// What it has done.
    pub fn figures(&self) -> ReceiverFigures {
        let welcomed = self.shared.welcomed();
        let of_living = welcomed.iter().map(|connection| connection.slowed.load(Ordering::Relaxed));
        let Common { executed, recovered, kept, .. } = &*self.shared.common;
        ReceiverFigures {
            executed: executed.load(Ordering::Relaxed),
            recovered: recovered.load(Ordering::Relaxed),
            slowed: self.shared.slowed.load(Ordering::Relaxed) + of_living.sum::<u64>(),
            kept: kept.load(Ordering::Relaxed),
            senders: welcomed.len(),
            slow_senders: welcomed.iter().filter(|connection| connection.is_slowed()).count(),
            behind: welcomed.iter().map(|connection| connection.backlog.load(Ordering::Relaxed)).sum(),
        }
    }
}

impl Drop for Receiver {
    /// Stops at once, as a crash would but for the request being executed: what the rings hold stays there.
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.common.settling.stop();
        self.listeners.iter().for_each(|listener| listener.close());
        let known = std::mem::take(&mut *self.shared.known.lock());
        for known in known.values() {
            match known {
                Known::Greeting(qp, _) => qp.close(),
                Known::Welcomed(connection) => connection.qp.close(),
            }
        }
        drop(known);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of a durable receiver panicked");
            }
        }
    }
}

impl Shared {
    /// Those who said hello.
    pub(super) fn welcomed(&self) -> Vec<Arc<Connection>> {
        let known = self.known.lock();
        let welcomed = known.values().filter_map(|known| match known {
            Known::Welcomed(connection) => Some(connection.clone()),
            Known::Greeting(..) => None,
        });
        welcomed.collect()
    }

    fn accept(&self, listener: &dyn Listener) {
        loop {
            let incoming = match listener.accept() {
                Ok(incoming) => incoming,
                Err(RdmaError::Closed) => return,
                Err(error) => {
                    tracing::warn!(%error, "a sender could not connect");
                    continue;
                }
            };
            let mut known = self.known.lock();
            if known.len() >= CONNECTIONS_MAX {
                incoming.refuse("this receiver has as many senders as it takes");
                continue;
            }
            let greeting = SharedMemory::new("durable-hello", 2 * MESSAGE_LEN)
                .map_err(|source| RdmaError::Io {
                    action: "allocate memory for",
                    endpoint: "a hello".to_owned(),
                    source,
                })
                .and_then(|memory| self.pd.register(Arc::new(memory), Access::LOCAL))
                .and_then(|region| {
                    let config = QpConfig {
                        send_cq: self.cq.clone(),
                        recv_cq: self.cq.clone(),
                        send_depth: QUEUE_DEPTH,
                        recv_depth: QUEUE_DEPTH,
                    };
                    let hello = RecvWr { wr_id: WrId(HELLO), local: region.sge(0, MESSAGE_LEN as u32) };
                    Ok((incoming.accept(config, vec![hello])?, region))
                });
            match greeting {
                // Under the lock: the poller finds who said hello already.
                Ok((qp, region)) => drop(known.insert(qp.number(), Known::Greeting(qp, region))),
                Err(error) => tracing::warn!(%error, "a sender could not connect"),
            }
        }
    }

    fn poll(&self) {
        let mut completions = Vec::new();
        let mut work = Vec::new();
        let mut answer = Vec::new();
        while !self.stopping.load(Ordering::Acquire) {
            if self.cq.poll(&mut completions, 64) == 0 {
                self.cq.wait(POLL_SLEEP);
                continue;
            }
            for completion in completions.drain(..) {
                self.on_completion(&completion, &mut work);
            }
            self.hand_over(&mut work, &mut answer);
        }
    }

    /// Executes what was taken, or gives it to who does.
    fn hand_over(&self, work: &mut Vec<Work>, answer: &mut Vec<u8>) {
        let service = &self.common.service;
        for item in work.drain(..).filter_map(|item| service.take_over(item)) {
            if self.feeds.is_empty() {
                self.execute(item, answer);
            } else {
                let lane = service.lane(item.request().body) % self.feeds.len() as u64;
                // Executors end after the poller.
                let _ = self.feeds[lane as usize].send(item);
            }
        }
    }

    fn on_completion(&self, completion: &Completion, work: &mut Vec<Work>) {
        let mut known = self.known.lock();
        if completion.status != WcStatus::Success {
            if let Some(Known::Welcomed(connection)) = known.remove(&completion.qp) {
                connection.broken.store(true, Ordering::Release);
                self.slowed.fetch_add(connection.slowed.load(Ordering::Relaxed), Ordering::Relaxed);
                let mut leaving = self.leaving.lock();
                leaving.retain(|left| Arc::strong_count(left) > 1);
                leaving.push(connection);
            }
            return;
        }
        if !matches!(completion.kind, CompletionKind::Recv | CompletionKind::RecvWithImm) {
            return;
        }
        match known.get(&completion.qp) {
            Some(Known::Welcomed(connection)) => {
                let connection = connection.clone();
                drop(known);
                if let Err(reason) = connection.arrived(completion.imm, work) {
                    connection.give_up(&reason);
                }
            }
            Some(Known::Greeting(qp, region)) => {
                let (qp, region) = (qp.clone(), region.clone());
                drop(known);
                // The sender's connection before this one may have some of it.
                self.hand_over(work, &mut Vec::new());
                match self.greet(&qp, &region) {
                    Ok(connection) => {
                        if let Err(error) = connection.welcome() {
                            connection.give_up(&error.to_string());
                        }
                    }
                    Err(reason) => {
                        tracing::warn!(peer = ?qp.peer(), "a sender is refused: {reason}");
                        region.memory().write(MESSAGE_LEN, &Message::Refused.encode());
                        let local = region.sge(MESSAGE_LEN as u64, MESSAGE_LEN as u32);
                        let refused = SendWr { wr_id: WrId(0), op: SendOp::Send, local, signaled: false };
                        // It may be gone already; it hears nothing worse then.
                        let _ = qp.post_send(&[refused]);
                        self.known.lock().remove(&qp.number());
                        qp.close();
                    }
                }
            }
            None => {}
        }
    }

    /// A hello: opens the sender's ring.
    fn greet(
        &self,
        qp: &Arc<dyn QueuePair>,
        region: &Arc<dyn MemoryRegion>,
    ) -> Result<Arc<Connection>, String> {
        let mut bytes = [0; MESSAGE_LEN];
        region.memory().read(0, &mut bytes);
        let hello = Message::parse(&bytes).map_err(|error| error.to_string())?;
        let Message::Hello { client, capacity, stride, answers, slots, slot_len, kind } = hello else {
            return Err("the first message is no hello".to_owned());
        };
        if slot_len > SLOT_MAX || u64::from(slot_len) * u64::from(slots) > ANSWERS_MAX_BYTES {
            return Err(format!("{slots} answer slots of {slot_len} bytes are too much"));
        }
        let geometry = Geometry::new(capacity, stride).map_err(|error| error.to_string())?;
        let slots_posted = if geometry.is_slots() { capacity / stride } else { 0 };
        if geometry.is_slots() != kind.sends() || slots_posted >= u64::from(QUEUE_DEPTH) {
            return Err("that ring is not for that kind of RPC".to_owned());
        }
        let Common { service, executed, recovered, .. } = &*self.common;
        let _alone = self.opening.lock();
        service.admit(client)?;
        self.retire(client);
        let (ring, found) =
            self.store.open(client, geometry, &**service).map_err(|error| error.to_string())?;
        executed.fetch_add(found, Ordering::Relaxed);
        recovered.fetch_add(found, Ordering::Relaxed);
        let slots = AnswerSlots { rkey: answers, slots, slot_len };
        let common = self.common.clone();
        let connection = Connection::new(common, &*self.pd, qp.clone(), ring, client, kind, slots)
            .map_err(|error| error.to_string())?;
        self.known.lock().insert(qp.number(), Known::Welcomed(connection.clone()));
        Ok(connection)
    }

    /// A sender's connection: ended, and its requests executed; its ring is let go. Under `opening`.
    pub(super) fn retire(&self, client: ClientId) {
        let old: Vec<_> = {
            let mut known = self.known.lock();
            let of_client = |known: &Known| matches!(known, Known::Welcomed(old) if old.client == client);
            known.extract_if(|_, known| of_client(known)).map(|(_, known)| known).collect()
        };
        let (left, staying): (Vec<_>, Vec<_>) =
            std::mem::take(&mut *self.leaving.lock()).into_iter().partition(|left| left.client == client);
        self.leaving.lock().extend(staying);
        let of_known = old.into_iter().filter_map(|known| match known {
            Known::Welcomed(connection) => Some(connection),
            Known::Greeting(..) => None,
        });
        for connection in of_known.chain(left) {
            connection.qp.close();
            // Pairs with the sender's, which looks whether it is closed behind its FLUSH: what it takes for persistent is
            // found by whoever reads the ring from here on.
            fence(Ordering::SeqCst);
            // Executors have its requests, and the poller some that it is about to hand over: those hold the connection.
            while connection.backlog.load(Ordering::Acquire) > 0 && !self.stopping.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_micros(100));
            }
            while Arc::strong_count(&connection) > 1 && !self.stopping.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_micros(100));
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

    fn execute(&self, work: Work, answer: &mut Vec<u8>) {
        answer.clear();
        let executed = self.common.service.execute(&work.request(), answer);
        work.finish(executed, answer);
    }
}
