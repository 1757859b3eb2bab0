//! The receiver: takes records in order, makes them persistent where that is its part, executes, answers.
//!
//! # Threads
//! * `acceptor`: link handshakes.
//! * `poller`: completions. It welcomes senders, takes records, and does the receiver's part of RFlush before anything is
//!   executed. With no executors it also executes, which saves light requests a change of threads.
//! * `executors`: one queue each; a request goes to the queue of its lane.
//!
//! # Failure
//! Whatever a sender breaks, or whatever fails for it, ends its connection only. The rings outlive it all.

use super::connection::{AnswerSlots, Connection, QUEUE_DEPTH, Work};
use super::rings::RingStore;
use super::wire::{MESSAGE_LEN, Message};
use crate::ids::{ClientId, LogSeq, QpNumber};
use crate::memory::SharedMemory;
use crate::rdma::{
    Access, Completion, CompletionKind, CompletionQueue, Device, Endpoint, Listener, MemoryRegion,
    ProtectionDomain, QpConfig, QueuePair, RdmaError, RecvWr, SendOp, SendWr, WcStatus, WrId,
};
use crate::redo::LogId;
use crate::redo::ring::Geometry;
use crossbeam::channel::{Receiver as Queue, Sender as Feed, unbounded};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Senders at once, those that said nothing yet included.
const CONNECTIONS_MAX: usize = 256;
/// How long the poller sleeps at most: it looks whether it is to stop.
const POLL_SLEEP: Duration = Duration::from_millis(50);
/// `WrId` of the receive a hello lands in.
const HELLO: u64 = u64::MAX - 1;
/// Largest slot of answers a sender may ask to be written to.
const SLOT_MAX: u32 = 1 << 20;
/// Staging for one sender's answers.
const ANSWERS_MAX_BYTES: u64 = 256 << 20;

/// What requests do.
pub trait Service: Send + Sync {
    /// Requests of one lane are executed in the order they were posted; those of different lanes may overlap.
    fn lane(&self, body: &[u8]) -> u64;

    /// Does a request, and makes it durable: it is not executed again once this returned and the head moved. It may
    /// be executed a second time after a crash. `answer` is empty and takes what is answered; the status is the
    /// service's own.
    fn execute(&self, client: ClientId, log: LogId, lsn: LogSeq, body: &[u8], answer: &mut Vec<u8>) -> u32;
}

/// How a receiver works.
#[derive(Clone, Copy, Debug)]
pub struct ReceiverOptions {
    /// Threads that execute; 0: the poller does.
    pub executors: usize,
    /// Requests of one sender taken and not executed, beyond which it is told to slow down.
    pub slow_beyond: usize,
}

impl Default for ReceiverOptions {
    fn default() -> Self {
        Self { executors: 0, slow_beyond: 32 }
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
}

/// What the poller knows of a queue pair.
enum Known {
    Greeting(Arc<dyn QueuePair>, Arc<dyn MemoryRegion>),
    Welcomed(Arc<Connection>),
}

struct Shared {
    pd: Arc<dyn ProtectionDomain>,
    cq: Arc<dyn CompletionQueue>,
    store: RingStore,
    service: Arc<dyn Service>,
    options: ReceiverOptions,
    known: Mutex<HashMap<QpNumber, Known>>,
    /// Connections that ended and may have requests with executors. Pruned when another ends.
    leaving: Mutex<Vec<Arc<Connection>>>,
    feeds: Vec<Feed<Work>>,
    stopping: AtomicBool,
    executed: AtomicU64,
    recovered: AtomicU64,
    slowed: AtomicU64,
}

/// A receiver that runs.
pub struct Receiver {
    shared: Arc<Shared>,
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
        let pd = device.alloc_pd();
        let listener: Arc<dyn Listener> = Arc::from(pd.listen(endpoint)?);
        let (feeds, queues): (Vec<_>, Vec<_>) = (0..options.executors).map(|_| unbounded()).unzip();
        let shared = Arc::new(Shared {
            pd,
            cq: device.create_cq(QUEUE_DEPTH)?,
            store,
            service,
            options,
            known: Mutex::default(),
            leaving: Mutex::default(),
            feeds,
            stopping: AtomicBool::new(false),
            executed: AtomicU64::new(recovered),
            recovered: AtomicU64::new(recovered),
            slowed: AtomicU64::new(0),
        });
        let mut receiver = Self { shared, listener, threads: Vec::new() };
        let running = receiver.shared.clone();
        let listening = receiver.listener.clone();
        receiver.spawn("durable-accept", move || running.accept(&*listening))?;
        let running = receiver.shared.clone();
        receiver.spawn("durable-poll", move || running.poll())?;
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

    /// Where it listens.
    pub fn endpoint(&self) -> Endpoint {
        self.listener.endpoint()
    }

    /// What it has done.
    pub fn figures(&self) -> ReceiverFigures {
        let known = self.shared.known.lock();
        let of_living = known.values().map(|known| match known {
            Known::Welcomed(connection) => connection.slowed.load(Ordering::Relaxed),
            Known::Greeting(..) => 0,
        });
        ReceiverFigures {
            executed: self.shared.executed.load(Ordering::Relaxed),
            recovered: self.shared.recovered.load(Ordering::Relaxed),
            slowed: self.shared.slowed.load(Ordering::Relaxed) + of_living.sum::<u64>(),
        }
    }
}

impl Drop for Receiver {
    /// Stops at once, as a crash would but for the request being executed: what the rings hold stays there.
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.listener.close();
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
        for item in work.drain(..) {
            if self.feeds.is_empty() {
                self.execute(&item, answer);
            } else {
                let lane = self.service.lane(item.body()) % self.feeds.len() as u64;
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
                if let Err(reason) = connection.arrived(completion.imm, self.options.slow_beyond, work) {
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
                        self.known.lock().insert(qp.number(), Known::Welcomed(connection.clone()));
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
        self.retire(client);
        let (ring, recovered) =
            self.store.open(client, geometry, &*self.service).map_err(|error| error.to_string())?;
        self.executed.fetch_add(recovered, Ordering::Relaxed);
        self.recovered.fetch_add(recovered, Ordering::Relaxed);
        let slots = AnswerSlots { rkey: answers, slots, slot_len };
        Connection::new(&*self.pd, qp.clone(), ring, client, kind, slots).map_err(|error| error.to_string())
    }

    /// The same sender's connection before this one: its requests are executed first, and its ring is let go.
    fn retire(&self, client: ClientId) {
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
            // Executors have its requests; nobody adds to them, for that would be this thread.
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
                self.execute(&work, &mut answer);
            }
        }
    }

    fn execute(&self, work: &Work, answer: &mut Vec<u8>) {
        let connection = &work.connection;
        answer.clear();
        let status = self.service.execute(connection.client, connection.log, work.lsn, work.body(), answer);
        self.executed.fetch_add(1, Ordering::Relaxed);
        answer.truncate(connection.answer_max());
        let reply = work.answer_slot.map(|slot| (slot, status, &answer[..]));
        if let Err(reason) = connection.executed(work.lsn, reply, self.options.slow_beyond) {
            connection.give_up(&reason);
        }
    }
}
