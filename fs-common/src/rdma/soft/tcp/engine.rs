//! The NIC engine: one thread a device that reads the sockets of all accepted connections.
//!
//! It sleeps in epoll, executes one-sided requests itself and never blocks on anything else: file reads that would go
//! to fault threads (`faults`). Writing is done by whoever has something to write, under the connection's send lock.
//!
//! A connection that ended stays here until its peer has closed too, or for `LINGER`: closing a socket with unread
//! input resets it, and the peer would lose what we said last.

use super::connection::TcpQp;
use super::faults::Faults;
use crate::panic_ends;
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

/// How long an ended connection waits for its peer to close.
const LINGER: Duration = Duration::from_secs(1);
/// Token of the doorbell; connections' tokens are queue pair numbers, which start at 1.
const BELL_TOKEN: u64 = 0;
const EVENTS_PER_WAIT: usize = 64;

struct Driven {
    qp: Arc<TcpQp>,
    /// Until when it lingers; `None`: live.
    until: Option<Instant>,
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
}

pub(super) fn token(qp: &TcpQp) -> u64 {
    u64::from(qp.core().number.0)
}

impl Engine {
    /// Starts the thread.
    pub(in crate::rdma::soft) fn start() -> io::Result<Arc<Self>> {
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
        });
        let running = engine.clone();
        let thread =
            std::thread::Builder::new().name("cuttlefs-nic".to_owned()).spawn(move || running.run())?;
        *engine.thread.lock() = Some(thread);
        Ok(engine)
    }

    pub(super) fn add(&self, qp: &Arc<TcpQp>, flags: EventFlags) -> io::Result<()> {
        self.driven.lock().insert(token(qp), Driven { qp: qp.clone(), until: None });
        Ok(epoll::add(&self.epoll, qp.socket(), EventData::new_u64(token(qp)), flags)?)
    }

    /// A live or lingering connection.
    pub(super) fn queue_pair(&self, number: u64) -> Option<Arc<TcpQp>> {
        self.driven.lock().get(&number).map(|driven| driven.qp.clone())
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
        let mut lingering = false;
        let budget = SpinBudget::new();
        while !self.stopping.load(Ordering::Acquire) {
            let idle_since = Instant::now();
            let caught = self.spin(idle_since, budget.spin());
            let waited = epoll::wait(&self.epoll, &mut space[..], lingering.then_some(&tick));
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
                    lingering = true;
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
