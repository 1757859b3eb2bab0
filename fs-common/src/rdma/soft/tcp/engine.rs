//! The NIC engine: one thread for each device that reads the sockets of all accepted connections.
//!
//! It sleeps in epoll, executes one-sided requests itself and never blocks on anything else: file reads that would block go to fault threads
//! (`faults`). A thread that has something to write writes it itself, under the connection's send lock.
//!
//! # Turns
//! A connection with work for the engine waits for a turn, which is a bounded number of packets; if it is not done then, it waits for its next turn.
//! A [`FairQueue`] chooses the next connection: that of the peer that has had the least of the engine's time. Sockets are watched for edges: a
//! connection that waits for a turn, or for its peer to read, is not reported again and again.
//!
//! A peer that sends its next request behind each answer has one turn for each turn of the others. So as long as several peers have work, turns are
//! short (`SHARED_TURN`), and the engine looks for further connections behind each: that peer gets its part of the *requests*, however much the others
//! send on however many connections. What cannot be divided is one packet with its bytes. A peer alone has long turns, which cost less.
//!
//! # Bounds
//! The memory that connections hold because of their peers is added up (`ledger`). While there is any, the engine checks it once a second: it ends
//! each connection that makes no progress, and, when all together hold too much, the one that holds most.
//!
//! A connection that has ended stays here until its peer has closed, too, or for `LINGER`: closing a socket with unread input resets it, and the peer
//! would lose the last messages.

use super::connection::TcpQp;
use super::faults::Faults;
use super::ledger::{Ledger, STALL_PATIENCE, Stall};
use crate::breach::Breach;
use crate::fair::{FairQueue, Payer};
use crate::panic_ends;
use crate::rdma::PeerKey;
use crate::rdma::soft::queue::LinkQp;
use crate::rdma::soft::region::KeyHasher;
use crate::rdma::soft::sys;
use crate::spin::SpinBudget;
use parking_lot::Mutex;
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, RandomState};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long an ended connection waits for its peer to close; also the interval of checks of held memory.
const LINGER: Duration = Duration::from_secs(1);
/// Token of the doorbell; connections' tokens are queue pair numbers, which start at 1.
const BELL_TOKEN: u64 = 0;
const EVENTS_PER_WAIT: usize = 64;
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// Time of consecutive turns before the engine looks for further connections.
const ROUND: Duration = Duration::from_micros(50);
/// The same, and the length of one turn, while several peers have work: two or three small requests with their answers.
const SHARED_TURN: Duration = Duration::from_micros(10);
/// How long several peers count as having work after a turn of one came behind a turn of another: a client that waits for each answer on a busy machine
/// comes back within this time.
const SHARED_FOR: Duration = Duration::from_millis(10);
/// The most that a turn costs its peer. A longer one was interrupted by the kernel, and that is nobody's debt.
const CHARGE_MAX: Duration = Duration::from_millis(1);

/// Of connections, by their numbers.
type ByNumber<V> = HashMap<u64, V, BuildHasherDefault<KeyHasher>>;

struct Driven {
    qp: Arc<TcpQp>,
    /// End of its lingering; `None`: live.
    until: Option<Instant>,
    /// Whether the bytes that it holds make progress.
    stall: Stall,
}

/// Connections that wait for a turn.
#[derive(Default)]
struct Turns {
    queue: FairQueue<u64>,
    /// The events that epoll reported of each.
    flags: ByNumber<EventFlags>,
    /// The payer of the last turn.
    last: Option<Payer>,
    /// Until when several payers count as having work.
    shared_until: Option<Instant>,
}

impl Turns {
    fn add(&mut self, payer: Payer, number: u64, flags: EventFlags) {
        match self.flags.get_mut(&number) {
            Some(known) => *known |= flags,
            None => {
                self.flags.insert(number, flags);
                self.queue.push(payer, number);
            }
        }
    }

    fn next(&mut self) -> Option<(Payer, u64, EventFlags)> {
        let (payer, number) = self.queue.pop()?;
        let flags = self.flags.remove(&number).expect("who waits for a turn has flags");
        Some((payer, number, flags))
    }

    /// Notes whose turn begins now. Returns when it has to end, if several payers have work.
    fn begin(&mut self, payer: Payer, now: Instant) -> Option<Instant> {
        if self.last.replace(payer).is_some_and(|last| last != payer) {
            self.shared_until = Some(now + SHARED_FOR);
        }
        self.is_shared(now).then(|| now + SHARED_TURN)
    }

    fn is_shared(&self, now: Instant) -> bool {
        self.shared_until.is_some_and(|until| now < until)
    }

    /// The time of consecutive turns before the engine looks for further connections.
    fn round(&self, now: Instant) -> Duration {
        if self.is_shared(now) { SHARED_TURN } else { ROUND }
    }
}

/// The data of a connection's events in epoll: its number, and the payer of its turns.
fn event_data(qp: &TcpQp) -> EventData {
    EventData::new_u64(qp.payer().0 << 32 | token(qp))
}

/// The engine's shared part.
pub(in crate::rdma::soft) struct Engine {
    epoll: OwnedFd,
    /// Rung to stop, and when another thread has ended a connection: the peer may never send anything that would wake the engine.
    bell: OwnedFd,
    stopping: AtomicBool,
    driven: Mutex<ByNumber<Driven>>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
    faults: Faults,
    ledger: Arc<Ledger>,
    payers: RandomState,
}

pub(super) fn token(qp: &TcpQp) -> u64 {
    u64::from(qp.core().number.0)
}

impl Engine {
    /// Starts the thread.
    pub(in crate::rdma::soft) fn start(held_max_bytes: usize) -> io::Result<Arc<Self>> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let bell = sys::new_eventfd()?;
        epoll::add(&epoll, &bell, EventData::new_u64(BELL_TOKEN), EventFlags::IN)?;
        let engine = Arc::new(Self {
            epoll,
            bell,
            stopping: AtomicBool::new(false),
            driven: Mutex::default(),
            thread: Mutex::new(None),
            faults: Faults::default(),
            ledger: Arc::new(Ledger::new(held_max_bytes)),
            payers: RandomState::new(),
        });
        let running = engine.clone();
        let thread =
            std::thread::Builder::new().name("cuttlefs-nic".to_owned()).spawn(move || running.run())?;
        *engine.thread.lock() = Some(thread);
        Ok(engine)
    }

    pub(super) fn add(&self, qp: &Arc<TcpQp>, flags: EventFlags) -> io::Result<()> {
        self.driven.lock().insert(token(qp), Driven { qp: qp.clone(), until: None, stall: Stall::default() });
        Ok(epoll::add(&self.epoll, qp.socket(), event_data(qp), flags | EventFlags::ET)?)
    }

    /// The payer of a peer's turns: 32 bits, so that it fits an event's data. Two peers rarely have the same, a peer cannot bring that about, and it
    /// does no harm.
    pub(super) fn payer(&self, peer: &PeerKey) -> Payer {
        Payer(self.payers.hash_one(peer) & u64::from(u32::MAX))
    }

    /// A live or lingering connection.
    pub(super) fn queue_pair(&self, number: u64) -> Option<Arc<TcpQp>> {
        self.driven.lock().get(&number).map(|driven| driven.qp.clone())
    }

    pub(super) fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Bytes that are held because of peers.
    pub(in crate::rdma::soft) fn held(&self) -> usize {
        self.ledger.held()
    }

    /// Makes the engine check the held memory. From any thread.
    pub(super) fn ring(&self) {
        sys::ring_eventfd(&self.bell);
    }

    /// Ends connections that hold something and make no progress. True if any connection holds something.
    fn end_stalled(&self, now: Instant) -> bool {
        if self.ledger.held() == 0 {
            return false;
        }
        let holding: Vec<(u64, Arc<TcpQp>)> = {
            let driven = self.driven.lock();
            let holds = |driven: &&Driven| driven.until.is_none() && driven.qp.held() > 0;
            driven.values().filter(holds).map(|driven| (token(&driven.qp), driven.qp.clone())).collect()
        };
        for (number, qp) in holding {
            // Without the lock of the map, since this takes the connection's locks.
            let progress = qp.progress();
            let is_late =
                (self.driven.lock().get_mut(&number)).is_some_and(|driven| driven.stall.look(now, progress));
            if is_late {
                qp.fail(Some(&Breach::new(format_args!(
                    "{} bytes are held for a peer that has not got on for {} s",
                    qp.held(),
                    STALL_PATIENCE.as_secs()
                ))));
            }
        }
        true
    }

    /// Ends connections until the bound is kept: each time the largest one of the peer that holds most.
    fn relieve(&self) {
        while self.ledger.is_over() {
            let live: Vec<Arc<TcpQp>> = {
                let driven = self.driven.lock();
                driven
                    .values()
                    .filter(|driven| driven.until.is_none())
                    .map(|driven| driven.qp.clone())
                    .collect()
            };
            let mut by_peer: HashMap<PeerKey, usize> = HashMap::new();
            for qp in &live {
                *by_peer.entry(PeerKey::from(&qp.core().peer)).or_default() += qp.held();
            }
            let greediest = by_peer.into_iter().max_by_key(|(_, held)| *held);
            let Some((peer, of_peer)) = greediest.filter(|(_, held)| *held > 0) else { return };
            let largest = (live.iter().filter(|qp| PeerKey::from(&qp.core().peer) == peer))
                .max_by_key(|qp| qp.held())
                .expect("the peer has a connection");
            largest.fail(Some(&Breach::new(format_args!(
                "more than {} bytes are held for peers, of them {of_peer} for this one",
                self.ledger.most()
            ))));
            largest.discard_input();
        }
    }

    pub(super) fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Watches a socket for edges. Events that are there already are reported when they are first watched for.
    pub(super) fn watch(&self, qp: &TcpQp, flags: EventFlags) {
        // Fails only if the connection was never added or is gone.
        let _ = epoll::modify(&self.epoll, qp.socket(), event_data(qp), flags | EventFlags::ET);
    }

    /// A connection has ended: it lingers.
    pub(super) fn end(&self, qp: &TcpQp) {
        if let Some(driven) = self.driven.lock().get_mut(&token(qp)) {
            driven.until = Some(Instant::now() + LINGER);
        }
        // Not for edges: nobody notes how much of its input was thrown away.
        let _ = epoll::modify(&self.epoll, qp.socket(), event_data(qp), EventFlags::IN | EventFlags::RDHUP);
        sys::ring_eventfd(&self.bell);
    }

    fn remove(&self, number: u64) {
        if let Some(driven) = self.driven.lock().remove(&number) {
            let _ = epoll::delete(&self.epoll, driven.qp.socket());
        }
    }

    /// Waits for events, first spinning, then asleep for as long as `timeout`. Returns how many.
    fn wait(
        &self,
        events: &mut [epoll::Event],
        timeout: Option<&Timespec>,
        budget: &SpinBudget,
    ) -> rustix::io::Result<usize> {
        let start = Instant::now();
        let mut now = start;
        while now - start < budget.spin(now) {
            now = budget.pause();
            match self.look(events) {
                Ok(0) => {}
                found => return found,
            }
        }
        let waited = epoll::wait(&self.epoll, events, timeout);
        budget.waited(start.elapsed());
        waited
    }

    /// Takes the events that are there. Returns how many.
    fn look(&self, events: &mut [epoll::Event]) -> rustix::io::Result<usize> {
        epoll::wait(&self.epoll, events, Some(&AT_ONCE))
    }

    /// Gives a connection its turn, which begins now; returns whether it lingers then.
    fn turn(
        &self,
        turns: &mut Turns,
        (payer, number, flags): (Payer, u64, EventFlags),
        now: Instant,
    ) -> bool {
        let Some(qp) = self.queue_pair(number) else {
            return false;
        };
        let until = turns.begin(payer, now);
        if !qp.has_ended() && qp.drive(flags, until) {
            turns.add(payer, number, (flags - EventFlags::OUT) | EventFlags::IN);
        }
        if !qp.has_ended() {
            return false;
        }
        if qp.discard_input() {
            self.remove(number);
        }
        true
    }

    fn run(&self) {
        let nothing = epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(BELL_TOKEN) };
        let mut events = [nothing; EVENTS_PER_WAIT];
        let tick = sys::timespec(LINGER);
        let (mut lingering, mut holding) = (false, false);
        let mut looked = Instant::now();
        let mut swept = looked;
        let mut turns = Turns::default();
        let budget = SpinBudget::new();
        while !self.stopping.load(Ordering::Acquire) {
            let waited = if turns.queue.is_empty() {
                self.wait(&mut events, (lingering || holding).then_some(&tick), &budget)
            } else {
                self.look(&mut events)
            };
            let events = match waited {
                Ok(count) => &events[..count],
                Err(rustix::io::Errno::INTR) => continue,
                // All connections would stall without a message.
                Err(error) => panic!("the NIC engine cannot wait for its sockets: {error}"),
            };
            panic_ends::plant("cuttlefs-nic");
            for event in events {
                let data = event.data.u64();
                if data == BELL_TOKEN {
                    let mut count = [0; 8];
                    // The bell is empty if its event was handled meanwhile.
                    let _ = rustix::io::read(&self.bell, &mut count);
                    (lingering, holding) = (true, true);
                    continue;
                }
                turns.add(Payer(data >> 32), data & u64::from(u32::MAX), event.flags);
            }
            let began = Instant::now();
            let mut since = began;
            while let Some((payer, number, flags)) = turns.next() {
                lingering |= self.turn(&mut turns, (payer, number, flags), since);
                let now = Instant::now();
                turns.queue.charge(payer, (now - since).min(CHARGE_MAX));
                since = now;
                if now - began >= turns.round(now) {
                    break;
                }
            }
            self.relieve();
            if holding && looked.elapsed() >= LINGER {
                looked = Instant::now();
                holding = self.end_stalled(looked);
            }
            if lingering && swept.elapsed() >= LINGER / 4 {
                let now = Instant::now();
                swept = now;
                let over: Vec<u64> = {
                    let driven = self.driven.lock();
                    lingering = driven.values().any(|driven| driven.until.is_some());
                    driven
                        .iter()
                        .filter(|(_, driven)| driven.until.is_some_and(|until| until <= now))
                        .map(|(number, _)| *number)
                        .collect()
                };
                over.into_iter().for_each(|number| self.remove(number));
            }
        }
        let left: Vec<_> = self.driven.lock().drain().map(|(_, driven)| driven.qp).collect();
        left.iter().for_each(|qp| qp.fail(None));
    }

    /// Ends the thread and all its connections.
    pub(in crate::rdma::soft) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        sys::ring_eventfd(&self.bell);
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the NIC engine panicked");
        }
        self.faults.stop();
    }
}
