//! The NIC engine: one thread a device that reads the sockets of all accepted connections.
//!
//! It sleeps in epoll, executes one-sided requests itself and never blocks on anything else: file reads that would go
//! to fault threads (`faults`). Writing is done by whoever has something to write, under the connection's send lock.
//!
//! # Bounds
//! What connections hold because of their peers is added up (`ledger`). While anything is, the engine looks at it once a
//! second: a connection that does not get on ends, and so does the one that holds most when all hold too much.
//!
//! A connection that ended stays here until its peer has closed too, or for `LINGER`: closing a socket with unread
//! input resets it, and the peer would lose what we said last.

use super::connection::TcpQp;
use super::faults::Faults;
use super::ledger::{Ledger, STALL_PATIENCE, Stall};
use crate::panic_ends;
use crate::rdma::PeerKey;
use crate::rdma::soft::queue::LinkQp;
use crate::rdma::soft::sys;
use crate::spin::{self, SpinBudget};
use parking_lot::Mutex;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::io;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long an ended connection waits for its peer to close; also how often what is held is looked at.
const LINGER: Duration = Duration::from_secs(1);
/// Token of the doorbell; connections' tokens are queue pair numbers, which start at 1.
const BELL_TOKEN: u64 = 0;
const EVENTS_PER_WAIT: usize = 64;

struct Driven {
    qp: Arc<TcpQp>,
    /// Until when it lingers; `None`: live.
    until: Option<Instant>,
    /// Whether what it holds gets on.
    stall: Stall,
}

/// The engine's shared part.
pub(in crate::rdma::soft) struct Engine {
    epoll: OwnedFd,
    /// Rung to stop, and when another thread ended a connection: its peer may never say anything that would wake us.
    bell: OwnedFd,
    stopping: AtomicBool,
    driven: Mutex<HashMap<u64, Driven>>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
    faults: Faults,
    ledger: Arc<Ledger>,
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
            driven: Mutex::new(HashMap::new()),
            thread: Mutex::new(None),
            faults: Faults::default(),
            ledger: Arc::new(Ledger::new(held_max_bytes)),
        });
        let running = engine.clone();
        let thread =
            std::thread::Builder::new().name("cuttlefs-nic".to_owned()).spawn(move || running.run())?;
        *engine.thread.lock() = Some(thread);
        Ok(engine)
    }

    pub(super) fn add(&self, qp: &Arc<TcpQp>, flags: EventFlags) -> io::Result<()> {
        self.driven.lock().insert(token(qp), Driven { qp: qp.clone(), until: None, stall: Stall::default() });
        Ok(epoll::add(&self.epoll, qp.socket(), EventData::new_u64(token(qp)), flags)?)
    }

    /// A live or lingering connection.
    pub(super) fn queue_pair(&self, number: u64) -> Option<Arc<TcpQp>> {
        self.driven.lock().get(&number).map(|driven| driven.qp.clone())
    }

    pub(super) fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// Bytes held because of peers.
    pub(in crate::rdma::soft) fn held(&self) -> usize {
        self.ledger.held()
    }

    /// The engine is to look at what is held. From any thread.
    pub(super) fn ring(&self) {
        sys::ring_eventfd(&self.bell);
    }

    /// Ends connections that hold something and do not get on. True if any holds something.
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
            // Outside of the map's lock, for it takes the connection's.
            let progress = qp.progress();
            let is_late =
                (self.driven.lock().get_mut(&number)).is_some_and(|driven| driven.stall.look(now, progress));
            if is_late {
                qp.fail(Some(&format!(
                    "{} bytes are held for a peer that has not got on for {} s",
                    qp.held(),
                    STALL_PATIENCE.as_secs()
                )));
            }
        }
        true
    }

    /// Ends connections until no more is held than may be: the largest of the peer that has most.
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
            largest.fail(Some(&format!(
                "more than {} bytes are held for peers, of them {of_peer} for this one",
                self.ledger.most()
            )));
            largest.discard_input();
        }
    }

    pub(super) fn faults(&self) -> &Faults {
        &self.faults
    }

    pub(super) fn watch(&self, qp: &TcpQp, flags: EventFlags) {
        // Fails only if the connection was never added or is gone.
        let _ = epoll::modify(&self.epoll, qp.socket(), EventData::new_u64(token(qp)), flags);
    }

    /// A connection ended: it lingers.
    pub(super) fn end(&self, qp: &TcpQp) {
        if let Some(driven) = self.driven.lock().get_mut(&token(qp)) {
            driven.until = Some(Instant::now() + LINGER);
        }
        self.watch(qp, EventFlags::IN | EventFlags::RDHUP);
        sys::ring_eventfd(&self.bell);
    }

    fn remove(&self, number: u64) {
        if let Some(driven) = self.driven.lock().remove(&number) {
            let _ = epoll::delete(&self.epoll, driven.qp.socket());
        }
    }

    /// Looks for events until `limit` has passed since `start`; whether there are any.
    fn spin(&self, start: Instant, limit: Duration) -> bool {
        while start.elapsed() < limit {
            spin::pause();
            let now = sys::timespec(Duration::ZERO);
            let ready = rustix::event::poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], Some(&now));
            if ready != Ok(0) {
                return true;
            }
        }
        false
    }

    fn run(&self) {
        let mut space = [const { MaybeUninit::<epoll::Event>::uninit() }; EVENTS_PER_WAIT];
        let tick = sys::timespec(LINGER);
        let (mut lingering, mut holding) = (false, false);
        let mut looked = Instant::now();
        let budget = SpinBudget::new();
        while !self.stopping.load(Ordering::Acquire) {
            let idle_since = Instant::now();
            let caught = self.spin(idle_since, budget.spin());
            let timeout = (lingering || holding).then_some(&tick);
            let waited = epoll::wait(&self.epoll, &mut space[..], timeout);
            if !caught {
                budget.waited(idle_since.elapsed());
            }
            let events = match waited {
                Ok((events, _)) => &*events,
                Err(rustix::io::Errno::INTR) => continue,
                // All connections would stand still without a word.
                Err(error) => panic!("the NIC engine cannot wait for its sockets: {error}"),
            };
            panic_ends::plant("cuttlefs-nic");
            for event in events {
                let number = event.data.u64();
                if number == BELL_TOKEN {
                    let mut count = [0; 8];
                    // Empty if it was rung for an event that was handled meanwhile.
                    let _ = rustix::io::read(&self.bell, &mut count);
                    (lingering, holding) = (true, true);
                    continue;
                }
                let Some(qp) = self.queue_pair(number) else {
                    continue;
                };
                if !qp.has_ended() {
                    qp.drive(event.flags);
                }
                if qp.has_ended() {
                    lingering = true;
                    if qp.discard_input() {
                        self.remove(number);
                    }
                }
            }
            self.relieve();
            if holding && looked.elapsed() >= LINGER {
                looked = Instant::now();
                holding = self.end_stalled(looked);
            }
            if lingering {
                let now = Instant::now();
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

    /// Ends the thread and every connection it drives.
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
