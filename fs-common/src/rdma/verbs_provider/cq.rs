//! Completion queues over libibverbs.
//!
//! # How it works
//! The RNIC's completion names a queue pair and a sequence number. The queue pair's own list says what the user posted (`queue`), because for a
//! failed request the RNIC tells only its number. Completions wait in a list of this queue between the RNIC and the poller: arming must look into the
//! RNIC once more, and completions that it finds belong to the next poll. A waiting completion keeps its place in its queue pair, so the list is no
//! longer than the depths of all queues that complete into it. What a poll itself finds at the RNIC goes to the poller at once.
//!
//! An RNIC breaks a completion queue that overflows, and with it every queue pair that uses it. So the RNIC's queue is as deep as all these queue
//! pairs together ([`VerbsCq::promise`]), and grows with them.
//!
//! Waiting spins for as long as the budget says ([`SpinBudget`]), then arms the queue and sleeps on one descriptor for both reasons to
//! wake up: a completion, and a queue pair that broke.

use super::requests::Requests;
use super::shared_receives::{VerbsSrq, queue_of};
use super::sys;
use crate::ids::QpNumber;
use crate::rdma::sys::{new_eventfd, ring_eventfd, timespec};
use crate::rdma::verbs::{Completion, CompletionPlaces, CompletionQueue, WcStatus};
use crate::spin::SpinBudget;
use parking_lot::{Mutex, MutexGuard, RwLock};
use rustix::event::epoll;
use rustix::event::{PollFd, PollFlags};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::slice;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// A completion that nobody has polled yet.
struct Waiting {
    completion: Completion,
    /// The count of waiting completions of its queue; `None`: it has no place there.
    unpolled: Option<Arc<AtomicU32>>,
}

/// The requests of the queue pair that the last completion was of. Most completions are of the same one, and are spared the look-up.
#[derive(Default)]
struct Last {
    raw_number: u32,
    requests: Option<Arc<Requests>>,
}

/// What who polls locks.
#[derive(Default)]
struct Polled {
    /// Completions taken from the RNIC and not polled yet.
    waiting: VecDeque<Waiting>,
    last: Last,
}

/// Where completions go that are taken from the RNIC.
pub(super) trait Taken {
    /// Adds a completion. If it has to wait, `unpolled` counts it until it is polled, and so keeps its place.
    fn add(&mut self, completion: &Completion, unpolled: &Arc<AtomicU32>);
}

/// To who polls.
impl Taken for Vec<Completion> {
    #[inline(always)]
    fn add(&mut self, completion: &Completion, _unpolled: &Arc<AtomicU32>) {
        self.extend_from_slice(slice::from_ref(completion));
    }
}

/// To those that wait.
impl Taken for VecDeque<Waiting> {
    fn add(&mut self, completion: &Completion, unpolled: &Arc<AtomicU32>) {
        unpolled.fetch_add(1, Ordering::Relaxed);
        self.push_back(Waiting { completion: *completion, unpolled: Some(unpolled.clone()) });
    }
}

/// Places for completions that come before somebody polls.
struct Places {
    /// The sum of all live queue pairs.
    promised: u32,
    /// The room of the RNIC's queue.
    size: u32,
    /// The RNIC's largest queue.
    most: u32,
}

impl Places {
    /// Of a queue that is asked to hold `depth`. One place more: a queue pair's look for its peer takes one, and some RNICs cannot lengthen a queue.
    fn new(depth: u32, most: u32) -> Self {
        Self { promised: 0, size: depth.saturating_add(1).clamp(1, most), most }
    }

    /// How long the queue has to be for `count` more, if it is not.
    ///
    /// # Errors
    /// How many would be promised: more than the RNIC's most.
    fn lengthened_for(&self, count: u32) -> Result<Option<u32>, u32> {
        let promised = self.promised.saturating_add(count);
        if promised > self.most {
            return Err(promised);
        }
        // Twice: a queue pair that is gone leaves what was flushed behind it, until somebody polls.
        Ok((promised > self.size).then(|| promised.saturating_mul(2).min(self.most)))
    }
}

/// See [`VerbsCq::promise`].
pub(super) struct Promise {
    queue: Arc<VerbsCq>,
    count: u32,
}

impl Promise {
    pub(super) fn is_of(&self, queue: &Arc<VerbsCq>) -> bool {
        Arc::ptr_eq(&self.queue, queue)
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.queue.places.lock().promised -= self.count;
    }
}

/// A completion queue; see the module.
pub(super) struct VerbsCq {
    pub(super) raw: Arc<sys::Cq>,
    places: Mutex<Places>,
    /// The requests of queue pairs, by the RNIC's numbers of these.
    queue_pairs: RwLock<BTreeMap<u32, Arc<Requests>>>,
    /// Shared receive queues by their numbers.
    shared: RwLock<BTreeMap<u32, Weak<VerbsSrq>>>,
    /// Locked while the RNIC is polled, so that completions stay in order.
    polled: Mutex<Polled>,
    /// Rung when a queue pair broke.
    broke: OwnedFd,
    /// Polls both descriptors.
    events: OwnedFd,
    budget: SpinBudget,
}

impl VerbsCq {
    /// `most` is the most completions of a queue of this RNIC.
    pub(super) fn new(context: sys::Context, depth: u32, most: u32) -> io::Result<Self> {
        let places = Places::new(depth, most);
        let raw = Arc::new(sys::Cq::new(context, places.size)?);
        let broke = new_eventfd()?;
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [raw.event_fd(), broke.as_fd()] {
            epoll::add(&events, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        Ok(Self {
            raw,
            places: Mutex::new(places),
            queue_pairs: RwLock::default(),
            shared: RwLock::default(),
            polled: Mutex::default(),
            broke,
            events,
            budget: SpinBudget::new(),
        })
    }

    /// Room for the completions of one queue of a queue pair, as long as the returned value lives.
    ///
    /// # Errors
    /// The RNIC has no queue of that length.
    pub(super) fn promise(self: &Arc<Self>, count: u32) -> io::Result<Promise> {
        let mut places = self.places.lock();
        let longer = places.lengthened_for(count).map_err(|promised| {
            io::Error::other(format!(
                "a completion queue of this RNIC holds {}, and {promised} could come: serve with more --workers, or mount fewer times",
                places.most
            ))
        })?;
        if let Some(size) = longer {
            self.raw.resize(size)?;
            places.size = size;
        }
        places.promised += count;
        Ok(Promise { queue: self.clone(), count })
    }

    /// Adds a queue pair whose completions come here.
    pub(super) fn add(&self, raw_number: u32, requests: &Arc<Requests>) {
        let mut known = self.queue_pairs.write();
        known.retain(|_, requests| !requests.is_gone());
        known.insert(raw_number, requests.clone());
    }

    /// Adds a shared receive queue whose receives complete here.
    pub(super) fn add_shared(&self, queue: &Arc<VerbsSrq>) {
        let mut known = self.shared.write();
        known.retain(|_, queue| queue.strong_count() > 0);
        known.insert(queue.number(), Arc::downgrade(queue));
    }

    /// Takes a completion of a queue pair that is gone. It matters only if it gives back a shared receive.
    fn give_back(&self, wr_id: u64, qp: QpNumber, taken: &mut impl Taken) {
        let queue = queue_of(wr_id).and_then(|number| self.shared.read().get(&number)?.upgrade());
        if let Some(queue) = queue {
            queue.give_back(wr_id, qp, taken);
        }
    }

    /// Wakes waiting threads: a queue pair broke.
    pub(super) fn wake(&self) {
        ring_eventfd(&self.broke);
    }

    /// Takes these completions of the RNIC, each for its queue pair. The lock of what is polled is held.
    #[inline(always)]
    fn deliver(&self, completions: &[sys::Wc], taken: &mut impl Taken, last: &mut Last) {
        for wc in completions {
            let requests = match &last.requests {
                // The RNIC gives numbers of queue pairs that are gone to others.
                Some(requests) if last.raw_number == wc.qp() && !requests.is_gone() => &**requests,
                _ => match self.look_up(wc, taken, last) {
                    Some(requests) => requests,
                    None => continue,
                },
            };
            if wc.status() == sys::status::IBV_WC_SUCCESS {
                requests.complete(wc, WcStatus::Success, taken);
            } else {
                requests.complete_failed(wc, taken);
            }
        }
    }

    /// The requests that a completion is of. If their queue pair is gone, the completion is taken here.
    #[inline(never)]
    fn look_up<'l>(&self, wc: &sys::Wc, taken: &mut impl Taken, last: &'l mut Last) -> Option<&'l Requests> {
        let found = self.queue_pairs.read().get(&wc.qp()).cloned();
        match found {
            Some(requests) if !requests.is_gone() => {
                last.raw_number = wc.qp();
                Some(last.requests.insert(requests))
            }
            gone => {
                let number = gone.map(|requests| requests.number).unwrap_or_default();
                self.give_back(wc.wr_id(), number, taken);
                None
            }
        }
    }

    /// Takes all completions that the RNIC has, for the next poll.
    fn collect(&self, Polled { waiting, last }: &mut Polled) {
        let mut room = sys::WC_ROOM;
        loop {
            let completions = self.raw.poll(&mut room);
            self.deliver(completions, waiting, last);
            // Fewer than fit: there were no more.
            if completions.len() < sys::POLLED {
                return;
            }
        }
    }

    /// Gives these completions of the RNIC to who polls. Returns how many he has got.
    #[inline(always)]
    fn take(&self, completions: &[sys::Wc], out: &mut Vec<Completion>, last: &mut Last) -> usize {
        let before = out.len();
        self.deliver(completions, out, last);
        out.len() - before
    }

    /// As `take`, of as many as there were or there was room for; and if there may be more, up to `max`.
    #[inline(never)]
    fn take_many(
        &self,
        mut polled: MutexGuard<'_, Polled>,
        completions: &[sys::Wc],
        out: &mut Vec<Completion>,
        max: usize,
    ) -> usize {
        let count = self.take(completions, out, &mut polled.last);
        // Fewer than fit: there were no more.
        if completions.len() < max.min(sys::POLLED) {
            return count;
        }
        // Who has got all that he wants still wakes others for the rest.
        count + self.give(polled, out, max - count)
    }

    /// Gives up to `max` completions to who polls: those that wait, then those that the RNIC has. Returns how many.
    #[inline(never)]
    fn give(&self, mut polled: MutexGuard<'_, Polled>, out: &mut Vec<Completion>, max: usize) -> usize {
        self.collect(&mut polled);
        let waiting = &mut polled.waiting;
        let count = max.min(waiting.len());
        for Waiting { completion, unpolled } in waiting.drain(..count) {
            if let Some(unpolled) = unpolled {
                unpolled.fetch_sub(1, Ordering::Release);
            }
            out.push(completion);
        }
        let left = !waiting.is_empty();
        drop(polled);
        if left {
            // Another thread that sleeps on this queue can take the rest.
            self.wake();
        }
        count
    }

    /// Takes all completions that the RNIC has, which frees the places of unsignaled requests.
    pub(super) fn make_room(&self) {
        self.collect(&mut self.polled.lock());
    }

    /// As `make_room`, unless another thread is doing it.
    pub(super) fn take_what_is_there(&self) {
        if let Some(mut polled) = self.polled.try_lock() {
            self.collect(&mut polled);
        }
        self.wake();
    }

    /// Takes completions that the RNIC has, unless another thread is doing it, and wakes who waits if there are some for the user.
    pub(super) fn look(&self) {
        let Some(mut polled) = self.polled.try_lock() else { return };
        let before = polled.waiting.len();
        self.collect(&mut polled);
        let has_more = polled.waiting.len() > before;
        drop(polled);
        if has_more {
            self.wake();
        }
    }

    /// Adds completions that do not come from the RNIC.
    pub(super) fn put(&self, completions: impl Iterator<Item = Completion>) {
        let waiting = completions.map(|completion| Waiting { completion, unpolled: None });
        self.polled.lock().waiting.extend(waiting);
        self.wake();
    }

    fn has_some(&self) -> bool {
        let mut polled = self.polled.lock();
        if polled.waiting.is_empty() {
            self.collect(&mut polled);
        }
        !polled.waiting.is_empty()
    }
}

impl CompletionQueue for VerbsCq {
    fn places(&self) -> Option<CompletionPlaces> {
        let places = self.places.lock();
        Some(CompletionPlaces { promised: places.promised, most: places.most })
    }

    fn poll(&self, out: &mut Vec<Completion>, max: usize) -> usize {
        let mut polled = self.polled.lock();
        // No more is taken than the user has room for: that would have to wait.
        let most = max.min(sys::POLLED);
        if !polled.waiting.is_empty() || most == 0 {
            return self.give(polled, out, max);
        }
        let mut room = sys::WC_ROOM;
        match self.raw.poll(&mut room[..most]) {
            // Most polls find nothing, and of the others most find one: these paths have no loops.
            [] => 0,
            [one] if most > 1 => self.take(slice::from_ref(one), out, &mut polled.last),
            many => self.take_many(polled, many, out, max),
        }
    }

    fn arm(&self) -> bool {
        self.raw.arm();
        !self.has_some()
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    fn take_event(&self) {
        self.raw.take_events();
        let _ = rustix::io::read(&self.broke, &mut [0u8; 8]);
    }

    fn wait(&self, timeout: Duration) {
        if self.has_some() {
            return;
        }
        let start = Instant::now();
        let mut now = start;
        while now - start < self.budget.spin(now).min(timeout) {
            now = self.budget.pause();
            if self.has_some() {
                self.budget.waited(now - start);
                return;
            }
        }
        if self.arm() {
            let left = timeout.saturating_sub(start.elapsed());
            let mut fds = [PollFd::new(&self.events, PollFlags::IN)];
            // An interrupted or failed sleep is a spurious return.
            let _ = rustix::event::poll(&mut fds, Some(&timespec(left)));
            self.take_event();
        }
        self.budget.waited(start.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_as_long_as_its_one_queue_pair_wishes_is_not_lengthened() {
        let (send_depth, recv_depth) = (12, 4);
        let mut places = Places::new(send_depth + recv_depth, 1000);
        // The look for the peer is sent by nobody who made the queue.
        for count in [send_depth + 1, recv_depth] {
            assert_eq!(places.lengthened_for(count), Ok(None));
            places.promised += count;
        }
        assert_eq!(places.lengthened_for(1), Ok(Some(36)), "for another queue pair it is");
    }

    #[test]
    fn no_more_is_promised_than_the_rnic_has() {
        let places = Places::new(u32::MAX, 1000);
        assert_eq!(places.size, 1000);
        assert_eq!((places.lengthened_for(1000), places.lengthened_for(1001)), (Ok(None), Err(1001)));
        let places = Places::new(10, 1000);
        assert_eq!(places.lengthened_for(900), Ok(Some(1000)), "twice, and not beyond the most");
    }
}
