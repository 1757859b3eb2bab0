//! Completion queues, and how a thread sleeps on one without losing a wake-up.
//!
//! # How it works
//! Finished completions stand in a queue of this process. Where a link has no thread of its own (shared memory,
//! and sockets this side connected), `poll`, `wait` and `arm` pump the link's queue pairs: `poll` when it finds nothing,
//! and now and then when it always finds something.
//!
//! A thread sleeps in epoll on: the queue's own eventfd (completions made by other threads of this process), each
//! shared-memory connection's doorbell (rung by the peer) and each self-driven socket. `event_fd` gives the epoll
//! descriptor. Eventfds are edge-triggered in it: taking the event is one `epoll_wait`, no read.
//!
//! # Ordering: the sleep page
//! One word in shared memory says whether a thread sleeps or wants an event; peers map it read-only.
//!
//! ```text
//! sleeper:  word += sleeper; fence(SeqCst); pump and look at the queue; sleep
//! producer: publish;         fence(SeqCst); load word; not zero -> write the eventfd
//! ```
//! One of the two fences comes first, so either the sleeper sees the published completion or the producer sees the
//! sleeper (Dekker).
//!
//! # Bounds
//! The queue holds at most one completion for each outstanding work request of the queue pairs attached to it: a
//! request's place in its send or receive queue is given back only when its completion is polled. It therefore cannot
//! overrun at any depth.

use super::queue::Slots;
use super::sys;
use crate::ids::QpNumber;
use crate::memory::SharedMemory;
use crate::rdma::verbs::{Completion, CompletionKind, CompletionQueue};
use crate::spin::SpinBudget;
use parking_lot::Mutex;
use rustix::event::epoll;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

/// A poller that never sleeps looks for hang-ups once in this many pumps.
const PUMPS_PER_EVENT_CHECK: u32 = 256;
/// A poller that always finds something at one of several sockets looks at the others once in this many pumps.
const PUMPS_PER_QUESTION: u32 = 16;
/// A poller that always finds completions pumps once in this many polls: arrivals wait no longer than that, and a pump adds little to each poll.
const FULL_POLLS_PER_PUMP: u32 = 16;
/// Events taken with one `epoll_wait`; more are taken with the next.
const EVENTS_PER_WAIT: usize = 32;
/// The part of the sleep word that counts threads in `wait`; the low half is the `arm` flag.
const ONE_SLEEPER: u64 = 1 << 32;
/// Epoll token of the queue's own eventfd; queue pairs' tokens are their numbers, which start at 1.
const OWN_TOKEN: u64 = 0;
/// Bytes of the sleep page.
pub(super) const SLEEP_PAGE_LEN: usize = 4096;

/// A queue pair as its completion queue sees it.
pub(super) trait Pumped: Send + Sync {
    /// Number, which is also its token.
    fn number(&self) -> QpNumber;
    /// Moves what can be moved without a system call: rings.
    fn pump_rings(&self);
    /// Moves what can be moved by reading and writing sockets.
    fn pump_socket(&self);
    /// Whether `pump_rings` does anything.
    fn has_rings(&self) -> bool;
    /// An event of a descriptor of this queue pair.
    fn event(&self, flags: epoll::EventFlags);
}

struct Entry {
    completion: Completion,
    slots: Arc<Slots>,
}

struct Attached {
    pumped: Vec<Arc<dyn Pumped>>,
    ring_count: usize,
    socket_count: usize,
}

/// A completion queue of the software RNIC.
pub(super) struct SoftCq {
    entries: Mutex<VecDeque<Entry>>,
    /// Replaced as a whole, so that pumping holds no lock while a queue pair detaches.
    attached: Mutex<Arc<Attached>>,
    page: Arc<SharedMemory>,
    epoll: OwnedFd,
    eventfd: OwnedFd,
    /// The spin budget of threads in `wait`.
    budget: SpinBudget,
    /// Pumps by `poll`, and polls since the last that found nothing. Relaxed: a count that is lost to another poller delays a pump by one poll.
    pumps: AtomicU32,
    full_polls: AtomicU32,
    /// The queue pair over whose socket this side last asked for something. Relaxed: a guess where an answer comes next.
    asked_over: AtomicU32,
}

impl SoftCq {
    pub(super) fn new(depth: u32) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let eventfd = sys::new_eventfd()?;
        epoll::add(
            &epoll,
            &eventfd,
            epoll::EventData::new_u64(OWN_TOKEN),
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )?;
        Ok(Self {
            entries: Mutex::new(VecDeque::with_capacity(depth as usize)),
            attached: Mutex::new(Arc::new(Attached { pumped: Vec::new(), ring_count: 0, socket_count: 0 })),
            page: Arc::new(SharedMemory::new("cuttlefs-cq", SLEEP_PAGE_LEN)?),
            epoll,
            eventfd,
            budget: SpinBudget::new(),
            pumps: AtomicU32::new(0),
            full_polls: AtomicU32::new(0),
            asked_over: AtomicU32::new(0),
        })
    }

    /// The sleep page, to hand to peers.
    pub(super) fn page(&self) -> &Arc<SharedMemory> {
        &self.page
    }

    /// Whether the sleep word of a page, ours or a peer's, asks for an event. After `fence(SeqCst)`.
    pub(super) fn page_wants_event(page: &SharedMemory) -> bool {
        page.load_u64_relaxed(0) != 0
    }

    fn word(&self) -> &AtomicU64 {
        self.page.atomic_u64(0)
    }

    /// Adds completions and wakes sleepers.
    pub(super) fn push(&self, completion: Completion, slots: &Arc<Slots>) {
        self.entries.lock().push_back(Entry { completion, slots: slots.clone() });
        self.wake();
    }

    /// Wakes sleepers, so that they look at their queue pairs again.
    pub(super) fn wake(&self) {
        fence(Ordering::SeqCst);
        if Self::page_wants_event(&self.page) {
            sys::ring_eventfd(&self.eventfd);
        }
    }

    /// From now on pumps this queue pair, and watches its descriptors.
    pub(super) fn attach(
        &self,
        pumped: Arc<dyn Pumped>,
        descriptors: &[(BorrowedFd<'_>, epoll::EventFlags)],
    ) -> io::Result<()> {
        let token = u64::from(pumped.number().0);
        let mut attached = self.attached.lock();
        let mut list = attached.pumped.clone();
        list.push(pumped);
        *attached = Arc::new(Attached::of(list));
        drop(attached);
        for (fd, flags) in descriptors {
            epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), *flags)?;
        }
        // A thread that sleeps already does not know the new queue pair's rings.
        self.wake();
        Ok(())
    }

    /// Changes the watched events of a self-driven socket.
    pub(super) fn watch(&self, number: QpNumber, fd: BorrowedFd<'_>, flags: epoll::EventFlags) {
        // Fails only if the socket was detached meanwhile; then nobody waits for it any more.
        let _ = epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(u64::from(number.0)), flags);
    }

    /// Stops pumping. Idempotent.
    pub(super) fn detach(&self, number: QpNumber, descriptors: &[BorrowedFd<'_>]) {
        let mut attached = self.attached.lock();
        if attached.pumped.iter().any(|known| known.number() == number) {
            let list = attached.pumped.iter().filter(|known| known.number() != number).cloned().collect();
            *attached = Arc::new(Attached::of(list));
        }
        drop(attached);
        for fd in descriptors {
            let _ = epoll::delete(&self.epoll, fd);
        }
    }

    /// Requests went over this queue pair's socket, which is self-driven.
    pub(super) fn asked_over(&self, number: QpNumber) {
        self.asked_over.store(number.0, Ordering::Relaxed);
    }

    fn attached(&self) -> Arc<Attached> {
        self.attached.lock().clone()
    }

    fn pump_rings(&self, attached: &Attached) {
        if attached.ring_count > 0 {
            attached.pumped.iter().for_each(|pumped| pumped.pump_rings());
        }
    }

    /// Moves what can be moved without sleeping.
    fn pump(&self) {
        let attached = self.attached();
        self.pump_rings(&attached);
        if attached.socket_count > 0 {
            return self.pump_sockets(&attached);
        }
        // Rings cannot tell that a peer died; its socket does.
        let pumps = self.pumps.fetch_add(1, Ordering::Relaxed);
        if pumps % PUMPS_PER_EVENT_CHECK == PUMPS_PER_EVENT_CHECK - 1 {
            self.take_events(Duration::ZERO);
        }
    }

    /// Moves what has come over sockets, with one system call if nothing has; of several with two.
    fn pump_sockets(&self, attached: &Attached) {
        match (attached.socket_count, &attached.pumped[..]) {
            (0, _) => {}
            // Its own read tells whether something has come.
            (_, [only]) => only.pump_socket(),
            _ => {
                let pumps = self.pumps.fetch_add(1, Ordering::Relaxed);
                let is_due = pumps % PUMPS_PER_QUESTION == PUMPS_PER_QUESTION - 1;
                if is_due || !self.pump_asked(attached) {
                    // Epoll asks all of them, and what it costs does not depend on how many there are.
                    self.take_events(Duration::ZERO);
                }
            }
        }
    }

    /// Reads the socket over which this side last asked for something; true if that has completed anything. The others need no question then.
    fn pump_asked(&self, attached: &Attached) -> bool {
        let asked = self.asked_over.load(Ordering::Relaxed);
        let found = attached.pumped.iter().find(|pumped| pumped.number().0 == asked && !pumped.has_rings());
        found.is_some_and(|pumped| {
            pumped.pump_socket();
            !self.is_empty()
        })
    }

    /// Takes events from epoll, waiting as long as `timeout`, and lets the queue pairs they belong to act.
    fn take_events(&self, timeout: Duration) {
        self.take_events_then(timeout, || {});
    }

    /// As `take_events`; `awake` runs between the wait and the acting.
    fn take_events_then(&self, timeout: Duration, awake: impl FnOnce()) {
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; EVENTS_PER_WAIT];
        let waited = epoll::wait(&self.epoll, &mut events[..], Some(&sys::timespec(timeout)));
        awake();
        // EINTR: a spurious return, which callers allow for.
        let Ok((events, _)) = waited else { return };
        if events.is_empty() {
            return;
        }
        let attached = self.attached();
        for event in events {
            let token = event.data.u64();
            if token == OWN_TOKEN {
                continue;
            }
            if let Some(pumped) = attached.pumped.iter().find(|known| u64::from(known.number().0) == token) {
                pumped.event(event.flags);
            }
        }
    }

    fn take_entries(&self, out: &mut Vec<Completion>, max: usize) -> usize {
        let mut entries = self.entries.lock();
        let count = entries.len().min(max);
        // One by one: nearly always there are few, and a drain takes as long as some.
        for _ in 0..count {
            let Some(entry) = entries.pop_front() else { break };
            let slots = match entry.completion.kind {
                CompletionKind::Recv | CompletionKind::RecvWithImm => &entry.slots.receives,
                _ => &entry.slots.sends,
            };
            slots.fetch_sub(1, Ordering::AcqRel);
            out.push(entry.completion);
        }
        let left = !entries.is_empty();
        drop(entries);
        if left {
            // Another thread that sleeps on this queue can take the rest.
            self.wake();
        }
        count
    }

    fn is_empty(&self) -> bool {
        self.entries.lock().is_empty()
    }

    /// Spins until the budget or the time is used up; true if a completion came.
    fn spin(&self, attached: &Attached, start: Instant, timeout: Duration) -> bool {
        let mut now = start;
        while attached.is_spun_over() && now - start < self.budget.spin(now).min(timeout) {
            now = self.budget.pause();
            self.pump_rings(attached);
            self.pump_sockets(attached);
            if !self.is_empty() {
                return true;
            }
        }
        false
    }
}

impl Attached {
    fn of(pumped: Vec<Arc<dyn Pumped>>) -> Self {
        let ring_count = pumped.iter().filter(|pumped| pumped.has_rings()).count();
        Self { ring_count, socket_count: pumped.len() - ring_count, pumped }
    }

    /// Whether a thread that waits spins before it sleeps: over one queue pair, over any number of sockets, or over the completions that other threads
    /// make. Each turn would look at each of several rings, which are a server's, one for each client.
    fn is_spun_over(&self) -> bool {
        self.ring_count == 0 || self.pumped.len() == 1
    }
}

impl CompletionQueue for SoftCq {
    fn poll(&self, out: &mut Vec<Completion>, max: usize) -> usize {
        // A polling thread is awake: completions of its own posts must not ring the eventfd, since each would be a system call.
        if self.word().load(Ordering::Relaxed) & 1 != 0 {
            self.word().fetch_and(!1, Ordering::Relaxed);
        }
        let count = self.take_entries(out, max);
        if max == 0 {
            return 0;
        }
        if count > 0 {
            if self.full_polls.fetch_add(1, Ordering::Relaxed) % FULL_POLLS_PER_PUMP
                == FULL_POLLS_PER_PUMP - 1
            {
                self.pump();
            }
            return count;
        }
        self.full_polls.store(0, Ordering::Relaxed);
        self.pump();
        self.take_entries(out, max)
    }

    fn arm(&self) -> bool {
        self.word().fetch_or(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.pump_rings(&self.attached());
        self.is_empty()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    fn take_event(&self) {
        self.word().fetch_and(!1, Ordering::Relaxed);
        self.take_events(Duration::ZERO);
    }

    fn wait(&self, timeout: Duration) {
        if !self.is_empty() {
            return;
        }
        let attached = self.attached();
        self.pump_rings(&attached);
        let start = Instant::now();
        if !self.is_empty() || self.spin(&attached, start, timeout) {
            return;
        }
        self.word().fetch_add(ONE_SLEEPER, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // Looks at the list again, since a queue pair that was attached before the fence may have rung already.
        self.pump_rings(&self.attached());
        // This thread no longer counts as a sleeper when events are acted on: its own completions must not ring its own eventfd, which would cost a
        // system call and a superfluous event for each answer over a socket.
        let awake = || {
            self.word().fetch_sub(ONE_SLEEPER, Ordering::Relaxed);
        };
        if self.is_empty() && !timeout.is_zero() {
            self.take_events_then(timeout, awake);
            self.budget.waited(start.elapsed());
        } else {
            awake();
        }
        self.pump_rings(&self.attached());
    }
}

#[cfg(test)]
mod tests;
