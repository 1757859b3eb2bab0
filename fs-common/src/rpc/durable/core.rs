//! The work of a receiver, in steps that threads run (`receiver`): it welcomes senders, takes records, does its part of RFlush before it executes
//! anything, and executes requests or passes them on.
//!
//! # Invariants
//! * A ring is opened by only one thread at a time (`opening`), after the client's earlier connection has ended and all requests taken from it were
//!   executed.
//! * A connection keeps its place only if it has said hello, or may still do so: one that says nothing for `ReceiverOptions::hello_wait` is closed.
//!   Before that, everything that arrived in that time is read, so no connection is closed whose hello was not read yet.

use super::connection::{AnswerSlots, Connection, QUEUE_DEPTH, Work};
use super::receiver::{CONNECTIONS_MAX, CONNECTIONS_OF_PEER, ReceiverOptions};
use super::rings::RingStore;
use super::service::Service;
use super::wire::{MESSAGE_LEN, Message};
use crate::breach::Breach;
use crate::ids::{ClientId, QpNumber};
use crate::memory::SharedMemory;
use crate::rdma::{
    Access, Capabilities, Completion, CompletionKind, CompletionQueue, Device, Incoming, MemoryRegion,
    PeerKey, ProtectionDomain, QpConfig, QueuePair, RdmaError, RecvWr, SendOp, SendWr, WcStatus, WrId,
};
use crate::redo::ring::Geometry;
use crate::world::{Clock, SystemClock};
use crossbeam::channel::Sender as Feed;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::time::Duration;

/// How often a thread checks whether a connection is no longer in use.
const LOOK_AGAIN: Duration = Duration::from_micros(100);
/// `WrId` of the receive for a hello.
const HELLO: u64 = u64::MAX - 1;
/// `WrId` of a refusal.
const REFUSED: u64 = u64::MAX - 2;
/// Largest answer slot that a sender may ask for.
const SLOT_MAX: u32 = 1 << 20;
/// Most staging memory for one sender's answers.
const ANSWERS_MAX_BYTES: u64 = 256 << 20;

/// A peer that has connected, but was not welcomed yet.
pub(super) struct Greeting {
    qp: Arc<dyn QueuePair>,
    region: Arc<dyn MemoryRegion>,
    /// The end of the time in which it may say hello, or take its refusal; `None`: it has said hello.
    until: Option<Duration>,
}

/// The state of a queue pair.
pub(super) enum Known {
    Greeting(Greeting),
    Welcomed(Arc<Connection>),
}

impl Known {
    fn qp(&self) -> &Arc<dyn QueuePair> {
        match self {
            Self::Greeting(greeting) => &greeting.qp,
            Self::Welcomed(connection) => &connection.qp,
        }
    }

    pub(super) fn close(&self) {
        self.qp().close();
    }
}

/// A sender that has said hello and waits for its welcome.
pub(super) struct Hello {
    qp: Arc<dyn QueuePair>,
    region: Arc<dyn MemoryRegion>,
}

/// Buffers of a thread that takes completions.
#[derive(Default)]
pub(super) struct Taking {
    completions: Vec<Completion>,
    work: Vec<Work>,
    answer: Vec<u8>,
}

/// The part of a receiver that connections need.
pub(super) struct Common {
    pub(super) capabilities: Capabilities,
    pub(super) service: Arc<dyn Service>,
    pub(super) options: ReceiverOptions,
    pub(super) executed: AtomicU64,
    pub(super) recovered: AtomicU64,
    /// Checkpoints of heads. Relaxed: a figure.
    pub(super) heads: AtomicU64,
}

/// A receiver without its threads.
pub(super) struct Core {
    pub(super) pd: Arc<dyn ProtectionDomain>,
    pub(super) cq: Arc<dyn CompletionQueue>,
    pub(super) store: RingStore,
    pub(super) common: Arc<Common>,
    pub(super) known: Mutex<HashMap<QpNumber, Known>>,
    /// Connections that have ended, but may have requests at executors. Pruned when another one ends.
    pub(super) leaving: Mutex<Vec<Arc<Connection>>>,
    /// Held while the earlier connection of a ring is ended and the ring is opened.
    opening: Mutex<()>,
    /// Queues of the executors; empty: the taking thread executes.
    pub(super) feeds: Vec<Feed<Work>>,
    pub(super) stopping: AtomicBool,
    /// Slow-downs of connections that are gone.
    pub(super) slowed: AtomicU64,
    /// Peers that were closed because they said nothing. Relaxed: a figure.
    pub(super) silent: AtomicU64,
    /// The clock for their time limit.
    pub(super) clock: SystemClock,
}

impl Core {
    pub(super) fn new(
        device: &dyn Device,
        store: RingStore,
        service: Arc<dyn Service>,
        options: ReceiverOptions,
        feeds: Vec<Feed<Work>>,
    ) -> Result<Self, RdmaError> {
        let common = Common {
            capabilities: device.capabilities(),
            service,
            options,
            executed: AtomicU64::new(0),
            recovered: AtomicU64::new(0),
            heads: AtomicU64::new(0),
        };
        Ok(Self {
            pd: device.alloc_pd()?,
            cq: device.create_cq(QUEUE_DEPTH)?,
            store,
            common: Arc::new(common),
            known: Mutex::default(),
            leaving: Mutex::default(),
            opening: Mutex::default(),
            feeds,
            stopping: AtomicBool::new(false),
            slowed: AtomicU64::new(0),
            silent: AtomicU64::new(0),
            clock: SystemClock::new(),
        })
    }

    /// The welcomed connections, in the order of their arrival.
    pub(super) fn welcomed(&self) -> Vec<Arc<Connection>> {
        let known = self.known.lock();
        let welcomed = known.values().filter_map(|known| match known {
            Known::Welcomed(connection) => Some(connection.clone()),
            Known::Greeting(_) => None,
        });
        // The order of arrival.
        let mut welcomed: Vec<_> = welcomed.collect();
        welcomed.sort_unstable_by_key(|connection| connection.qp.number().0);
        welcomed
    }

    /// Accepts a connection whose sender may then say hello, or refuses it.
    pub(super) fn take_in(&self, incoming: Box<dyn Incoming>) {
        let mut known = self.known.lock();
        if known.len() >= CONNECTIONS_MAX {
            incoming.refuse("this receiver has as many senders as it takes");
            return;
        }
        let peer = PeerKey::from(&incoming.peer());
        let of_peer = known.values().filter(|known| PeerKey::from(&known.qp().peer()) == peer).count();
        if of_peer >= CONNECTIONS_OF_PEER && !peer.is_administrator(rustix::process::geteuid().as_raw()) {
            incoming.refuse("this receiver has as many senders of yours as it takes of one peer");
            return;
        }
        let greeting = SharedMemory::new("durable-hello", 2 * MESSAGE_LEN)
            .map_err(|source| RdmaError::Io {
                action: "allocate memory for",
                endpoint: "a hello".to_owned(),
                source,
            })
            .and_then(|memory| self.pd.register(Arc::new(memory), Access::LOCAL))
            .and_then(|region| {
                let config = QpConfig::new(&self.cq, QUEUE_DEPTH, QUEUE_DEPTH);
                let hello = RecvWr { wr_id: WrId(HELLO), local: region.sge(0, MESSAGE_LEN as u32).into() };
                Ok((incoming.accept(config, vec![hello])?, region))
            });
        match greeting {
            // Under the lock, so that the thread that takes completions finds a sender that has said hello already.
            Ok((qp, region)) => {
                let until = Some(self.clock.monotonic() + self.common.options.hello_wait);
                known.insert(qp.number(), Known::Greeting(Greeting { qp, region, until }));
            }
            Err(error) => tracing::warn!(%error, "a sender could not connect"),
        }
    }

    /// Closes connections that said nothing for too long, so that others get their places. The caller has taken all completions before `now`. Returns
    /// whether it closed any.
    pub(super) fn close_silent(&self, now: Duration) -> bool {
        let mut known = self.known.lock();
        let is_late = |known: &Known| matches!(known, Known::Greeting(Greeting { until: Some(until), .. }) if *until <= now);
        let mut late: Vec<_> = known.extract_if(|_, known| is_late(known)).collect();
        drop(known);
        if late.is_empty() {
            return false;
        }
        // The order of arrival.
        late.sort_unstable_by_key(|(number, _)| number.0);
        late.iter().for_each(|(_, known)| known.close());
        self.silent.fetch_add(late.len() as u64, Ordering::Relaxed);
        tracing::warn!(peers = late.len(), "closed senders that connected and said nothing");
        true
    }

    /// Takes up to `most` completions; calls `welcome` for senders that have said hello. Returns the number of completions.
    pub(super) fn take_some(
        &self,
        taking: &mut Taking,
        most: usize,
        welcome: &mut dyn FnMut(Hello),
    ) -> usize {
        let Taking { completions, work, answer } = taking;
        let count = self.cq.poll(completions, most);
        if count == 0 {
            return 0;
        }
        for completion in completions.drain(..) {
            if let Some(hello) = self.on_completion(&completion, work) {
                // Some of these requests may belong to the sender's earlier connection.
                self.hand_over(work, answer);
                welcome(hello);
            }
        }
        self.hand_over(work, answer);
        count
    }

    /// Executes the taken requests, or passes them to the executors.
    fn hand_over(&self, work: &mut Vec<Work>, answer: &mut Vec<u8>) {
        let service = &self.common.service;
        for item in work.drain(..) {
            if self.feeds.is_empty() {
                self.execute(item, answer);
            } else {
                let lane = service.lane(item.request().body) % self.feeds.len() as u64;
                // Executors end later than the taking thread.
                let _ = self.feeds[lane as usize].send(item);
            }
        }
    }

    /// Removes a connection that is gone, so that others get its place. Its requests at executors go on.
    fn leave(&self, number: QpNumber) {
        if let Some(Known::Welcomed(connection)) = self.known.lock().remove(&number) {
            connection.broken.store(true, Ordering::Release);
            self.slowed.fetch_add(connection.slowed.load(Ordering::Relaxed), Ordering::Relaxed);
            let mut leaving = self.leaving.lock();
            leaving.retain(|left| Arc::strong_count(left) > 1);
            leaving.push(connection);
        }
    }

    fn on_completion(&self, completion: &Completion, work: &mut Vec<Work>) -> Option<Hello> {
        let mut known = self.known.lock();
        if completion.status != WcStatus::Success {
            drop(known);
            self.leave(completion.qp);
            return None;
        }
        if !matches!(completion.kind, CompletionKind::Recv | CompletionKind::RecvWithImm) {
            if completion.wr_id == WrId(REFUSED)
                && let Some(refused) = known.remove(&completion.qp)
            {
                drop(known);
                refused.close();
            }
            return None;
        }
        match known.get_mut(&completion.qp)? {
            Known::Welcomed(connection) => {
                let connection = connection.clone();
                drop(known);
                if let Err(reason) = connection.arrived(completion.imm, work) {
                    connection.give_up(&reason);
                }
                None
            }
            Known::Greeting(Greeting { qp, region, until }) => {
                *until = None;
                Some(Hello { qp: qp.clone(), region: region.clone() })
            }
        }
    }

    /// Opens the sender's ring and sends a welcome, or refuses.
    pub(super) fn greet(&self, Hello { qp, region }: Hello) {
        match self.open(&qp, &region) {
            Ok(connection) => {
                if let Err(error) = connection.welcome() {
                    connection.give_up(&error.into());
                    // No receive was posted, so no completion reports its end.
                    self.leave(qp.number());
                }
            }
            Err(reason) => {
                tracing::warn!(peer = %qp.peer(), "a sender is refused: {reason}");
                region.memory().write(MESSAGE_LEN, &Message::Refused.encode());
                let local = region.sge(MESSAGE_LEN as u64, MESSAGE_LEN as u32);
                let refused =
                    SendWr { wr_id: WrId(REFUSED), op: SendOp::Send, local: local.into(), signaled: true };
                let mut known = self.known.lock();
                // Closing the connection now would overtake the message, so it is closed when the message has arrived. If the peer is gone, it is
                // closed at once.
                if qp.post_send(&[refused]).is_ok()
                    && let Some(Known::Greeting(greeting)) = known.get_mut(&qp.number())
                {
                    greeting.until = Some(self.clock.monotonic() + self.common.options.hello_wait);
                } else {
                    known.remove(&qp.number());
                    qp.close();
                }
            }
        }
    }

    fn open(
        &self,
        qp: &Arc<dyn QueuePair>,
        region: &Arc<dyn MemoryRegion>,
    ) -> Result<Arc<Connection>, Breach> {
        let mut bytes = [0; MESSAGE_LEN];
        region.memory().read(0, &mut bytes);
        let hello = Message::parse(&bytes)?;
        let Message::Hello { client, capacity, stride, answers, slots, slot_len, kind } = hello else {
            return Err(Breach::of("the first message is no hello"));
        };
        if slot_len > SLOT_MAX || u64::from(slot_len) * u64::from(slots) > ANSWERS_MAX_BYTES {
            return Err(Breach::new(format_args!("{slots} answer slots of {slot_len} bytes are too much")));
        }
        let geometry = Geometry::new(capacity, stride)?;
        let slots_posted = if geometry.is_slots() { capacity / stride } else { 0 };
        if geometry.is_slots() != kind.sends() || slots_posted >= u64::from(QUEUE_DEPTH) {
            return Err(Breach::of("that ring is not for that kind of RPC"));
        }
        let Common { service, executed, recovered, .. } = &*self.common;
        let _alone = self.opening.lock();
        service.admit(client, &qp.peer())?;
        self.end_connections(client);
        let opened = self.store.open(client, geometry, &**service);
        let (ring, found) = opened?;
        executed.fetch_add(found, Ordering::Relaxed);
        recovered.fetch_add(found, Ordering::Relaxed);
        let slots = AnswerSlots { rkey: answers, slots, slot_len };
        let common = self.common.clone();
        let connection = Connection::new(common, &*self.pd, qp.clone(), ring, client, kind, slots)?;
        let mut known = self.known.lock();
        // If other threads run meanwhile, the queue pair may be gone already.
        match known.insert(qp.number(), Known::Welcomed(connection.clone())) {
            Some(_) => Ok(connection),
            None => {
                known.remove(&qp.number());
                Err(Breach::of("it went away"))
            }
        }
    }

    /// Ends a client's connections, after their requests were executed: then nobody uses its ring any more. Under `opening`.
    fn end_connections(&self, client: ClientId) {
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
            Known::Greeting(_) => None,
        });
        for connection in of_known.chain(left) {
            connection.qp.close();
            // Pairs with the sender's check, behind its FLUSH, whether it is closed: everything that it takes for persistent is found by readers of
            // the ring from here on.
            fence(Ordering::SeqCst);
            // Executors may have some of its requests, and the taking thread may be about to pass some on: those hold the connection.
            let in_use =
                || connection.backlog.load(Ordering::Acquire) > 0 || Arc::strong_count(&connection) > 1;
            while in_use() && !self.stopping.load(Ordering::Acquire) {
                std::thread::sleep(LOOK_AGAIN);
            }
        }
    }

    pub(super) fn execute(&self, work: Work, answer: &mut Vec<u8>) {
        answer.clear();
        let status = self.common.service.execute(&work.request(), answer);
        work.finish(status, answer);
    }
}
