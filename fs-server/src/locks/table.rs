//! The table of locks and its operations, without sessions, clocks or waiting.
//!
//! # Invariants
//! * A file has an entry while it has a lock or a wait.
//! * A session has an entry while it holds a lock, waits for one, has ends that it was not told of, or asks for these.
//! * Outside of the grace period each waiter has a conflicting lock in its way.
//!
//! # Cost
//! However much one client holds and waits for, a request of another looks only at the locks and waits that overlap its own
//! range: they are kept by their ranges (`Intervals`). A lock that ends or becomes shared is looked at only for the waiters of a
//! part of it. One mutex is over all, so a walk over the whole table would delay every client.

use super::deadlock::Waiting;
use super::{Asked, Cancelled, Holder, LOCKS_PER_CLIENT, LockFigures, WAITS_PER_CLIENT};
use crate::shares::{LOCKS_MAX, Peer, Resource, Tally};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::locks::{HeldLock, Intervals, Lock, LockList, LockRange, LockSpace, WaitId};
use cuttlefs_common::rpc::{BlockingLock, SETTLED_LOCKS_MAX, SettledLock, TestedLock};
use cuttlefs_common::status::Status;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::task::Waker;

/// The locks of one kind (ranges or flock) on one file.
pub(super) type FileId = (InodeNo, LockSpace);

/// A request that waits.
#[derive(Clone, Copy, Debug)]
struct Wait {
    holder: Holder,
    id: WaitId,
    lock: Lock,
    /// If `false`, it only waits for the end of the grace period.
    blocking: bool,
}

/// The place of a wait. Waits are numbered in the order in which they came.
#[derive(Clone, Copy, Debug)]
struct Place {
    file: FileId,
    first: u64,
    arrival: u64,
}

#[derive(Default)]
pub(super) struct File {
    pub(super) held: LockList<Holder>,
    /// The waits, each with its number, which tells them apart.
    waits: Intervals<u64, (u64, Wait)>,
}

#[derive(Default)]
struct OfSession {
    held: usize,
    /// The files on which the session has locks, and how many on each.
    held_on: BTreeMap<FileId, usize>,
    waiting: BTreeMap<WaitId, Place>,
    /// Ended waits of which the session has not been told.
    settled: VecDeque<SettledLock>,
    /// Wakes the task that asks for ended waits.
    waker: Option<Waker>,
    /// The session's part of its peer's share of locks.
    tally: Option<Tally>,
}

impl OfSession {
    fn is_idle(&self) -> bool {
        self.held == 0 && self.waiting.is_empty() && self.settled.is_empty() && self.waker.is_none()
    }

    /// Updates the tally after a change.
    fn recount(&mut self) {
        let count = self.held + self.waiting.len() + self.settled.len();
        if let Some(tally) = &mut self.tally {
            tally.set(count);
        }
    }

    fn has_room(&self, more: usize) -> bool {
        self.tally.as_ref().is_none_or(|tally| tally.peer().room(Resource::Locks) >= more)
    }
}

/// The table of locks (see the module).
pub(super) struct Table {
    files: BTreeMap<FileId, File>,
    sessions: HashMap<u64, OfSession>,
    /// The waits for ranges, for the detection of deadlocks. Like Linux, flock has none.
    waiting: Waiting,
    /// The number of waits so far.
    arrivals: u64,
    held: usize,
    grace: bool,
    stopped: bool,
}

impl Table {
    pub(super) fn new(grace: bool) -> Self {
        Self {
            files: BTreeMap::new(),
            sessions: HashMap::new(),
            waiting: Waiting::default(),
            arrivals: 0,
            held: 0,
            grace,
            stopped: false,
        }
    }

    /// Counts the session's locks and waits against its peer's share from now on.
    pub(super) fn count_for(&mut self, session: u64, peer: &Arc<Peer>) {
        self.sessions.entry(session).or_default().tally.get_or_insert_with(|| peer.tally(Resource::Locks));
    }

    pub(super) fn set(
        &mut self,
        session: u64,
        ino: InodeNo,
        lock: &Lock,
        id: WaitId,
        blocking: bool,
    ) -> Result<Asked, Status> {
        let asked = self.ask((ino, lock.space), session, lock, id, blocking);
        self.forget_idle((ino, lock.space), session);
        asked
    }

    fn ask(
        &mut self,
        file: FileId,
        session: u64,
        lock: &Lock,
        id: WaitId,
        blocking: bool,
    ) -> Result<Asked, Status> {
        let holder = Holder { session, owner: lock.owner };
        if let Some(of) = self.sessions.get(&session)
            && (of.waiting.contains_key(&id) || of.settled.iter().any(|settled| settled.wait == id))
        {
            return Ok(Asked::Queued);
        }
        let wait = Wait { holder, id, lock: *lock, blocking };
        if self.grace {
            return self.queue(file, wait);
        }
        if lock.space == LockSpace::Whole && !self.list(file).holds(holder, lock.range, lock.mode) {
            // flock(2) does not convert a lock, but gives it up and asks for the new one. Otherwise two holders of a shared lock that both want it
            // exclusively would wait for ever, and nobody would tell them.
            if self.drop_range(file, holder, LockRange::WHOLE) {
                self.grant_waiting(file, LockRange::WHOLE);
            }
        }
        if self.is_free(file, &wait)? {
            if self.put(file, holder, lock)? {
                self.grant_waiting(file, lock.range);
            }
            return Ok(Asked::Granted);
        }
        if blocking { self.queue(file, wait) } else { Err(Status::Locked) }
    }

    pub(super) fn clear(
        &mut self,
        holder: Holder,
        ino: InodeNo,
        space: LockSpace,
        range: LockRange,
    ) -> Result<(), Status> {
        let file = (ino, space);
        if self.list(file).would_split(holder, range) && !self.has_room(holder.session, 1) {
            return Err(Status::NoLocks);
        }
        if self.drop_range(file, holder, range) {
            self.grant_waiting(file, range);
        }
        self.forget_idle(file, holder.session);
        Ok(())
    }

    pub(super) fn test(&self, holder: Holder, ino: InodeNo, lock: &Lock) -> TestedLock {
        let found = self.files.get(&(ino, lock.space));
        // The lowest one, which is the first in the kernel's sorted list as well.
        let first = found.and_then(|file| file.held.conflicts(holder, lock.range, lock.mode).next());
        match first {
            Some(&HeldLock { range, mode, pid, .. }) => {
                TestedLock::Blocked(BlockingLock { range, mode, pid })
            }
            None if self.grace => TestedLock::Unknown,
            None => TestedLock::Free,
        }
    }

    pub(super) fn reclaim(&mut self, session: u64, ino: InodeNo, lock: &Lock, recovering: bool) -> bool {
        let (file, holder) = ((ino, lock.space), Holder { session, owner: lock.owner });
        let list = self.list(file);
        if list.holds(holder, lock.range, lock.mode) {
            return true;
        }
        let in_the_way = list.conflicts(holder, lock.range, lock.mode).next().is_some();
        let granted = self.grace && recovering && !in_the_way && self.put(file, holder, lock).is_ok();
        self.forget_idle(file, session);
        granted
    }

    pub(super) fn cancel(&mut self, session: u64, id: WaitId) -> Cancelled {
        let Some(of) = self.sessions.get_mut(&session) else {
            return Cancelled::Unknown;
        };
        let ended = of.settled.iter().position(|settled| settled.wait == id);
        if let Some(ended) = ended.and_then(|at| of.settled.remove(at)) {
            of.recount();
            return Cancelled::Ended(ended);
        }
        let Some(&place) = of.waiting.get(&id) else {
            return Cancelled::Unknown;
        };
        self.remove_wait(place);
        self.forget_idle(place.file, session);
        Cancelled::GivenUp
    }

    pub(super) fn take_settled(&mut self, session: u64) -> Vec<SettledLock> {
        let Some(of) = self.sessions.get_mut(&session) else {
            return Vec::new();
        };
        of.waker = None;
        let taken = of.settled.drain(..of.settled.len().min(SETTLED_LOCKS_MAX)).collect();
        of.recount();
        if of.is_idle() {
            self.sessions.remove(&session);
        }
        taken
    }

    pub(super) fn wake_with(&mut self, session: u64, waker: Waker) {
        self.sessions.entry(session).or_default().waker = Some(waker);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped
    }

    pub(super) fn end_session(&mut self, session: u64) {
        let Some(of) = self.sessions.get(&session) else {
            return;
        };
        let held_on: Vec<FileId> = of.held_on.keys().copied().collect();
        let waits: Vec<Place> = of.waiting.values().copied().collect();
        for &place in &waits {
            self.remove_wait(place);
        }
        for file in &held_on {
            let entry = self.files.get_mut(file).expect("a file with a lock has an entry");
            self.held -= entry.held.clear_of(|holder| holder.session == session);
        }
        if let Some(waker) = self.sessions.remove(&session).and_then(|of| of.waker) {
            waker.wake();
        }
        for file in held_on {
            self.grant_waiting(file, LockRange::WHOLE);
            self.forget_idle(file, session);
        }
        for place in waits {
            self.forget_idle(place.file, session);
        }
    }

    pub(super) fn end_grace(&mut self) {
        if !std::mem::replace(&mut self.grace, false) {
            return;
        }
        for file in self.files.keys().copied().collect::<Vec<_>>() {
            // All waits are asked for once more, in their order, as if they came now.
            let waits = self.waits_for(file, LockRange::WHOLE);
            waits.iter().for_each(|(place, _)| self.remove_wait(*place));
            for (_, wait) in waits {
                let Holder { session, .. } = wait.holder;
                match self.set(session, file.0, &wait.lock, wait.id, wait.blocking) {
                    Ok(Asked::Queued) => {}
                    Ok(Asked::Granted) => self.settle(session, wait.id, Ok(())),
                    Err(status) => self.settle(session, wait.id, Err(status)),
                }
            }
            self.forget_idle(file, 0);
        }
    }

    pub(super) fn stop(&mut self) {
        self.stopped = true;
        self.sessions.values_mut().filter_map(|of| of.waker.take()).for_each(Waker::wake);
    }

    pub(super) fn figures(&self) -> LockFigures {
        LockFigures { held: self.held, waiting: self.sessions.values().map(|of| of.waiting.len()).sum() }
    }

    fn list(&mut self, file: FileId) -> &mut LockList<Holder> {
        &mut self.files.entry(file).or_default().held
    }

    /// Whether no lock is in the way.
    ///
    /// # Errors
    /// `Deadlock` if the wait would never end.
    fn is_free(&mut self, file: FileId, wait: &Wait) -> Result<bool, Status> {
        let Wait { holder, lock, blocking, .. } = *wait;
        let held = &self.files.entry(file).or_default().held;
        if held.conflicts(holder, lock.range, lock.mode).next().is_none() {
            return Ok(true);
        }
        let detects = blocking && file.1 == LockSpace::Ranges;
        if detects && self.waiting.closes_circle(holder, (file.0, lock.range, lock.mode), &self.files) {
            return Err(Status::Deadlock);
        }
        Ok(false)
    }

    fn has_room(&self, session: u64, more: usize) -> bool {
        let of = self.sessions.get(&session);
        let (held, has_room) = of.map_or((0, true), |of| (of.held, of.has_room(more)));
        held + more <= LOCKS_PER_CLIENT && self.held + more <= LOCKS_MAX && has_room
    }

    /// Sets a lock that no other lock is in the way of. Returns whether other requests may now be granted.
    fn put(&mut self, file: FileId, holder: Holder, lock: &Lock) -> Result<bool, Status> {
        let parts = usize::from(self.list(file).would_split(holder, lock.range));
        if !self.has_room(holder.session, 1 + parts) {
            return Err(Status::NoLocks);
        }
        Ok(self.change(file, holder, |list| {
            list.set(HeldLock { holder, range: lock.range, mode: lock.mode, pid: lock.pid })
        }))
    }

    /// Removes a holder's locks on a range. Returns whether there were any.
    fn drop_range(&mut self, file: FileId, holder: Holder, range: LockRange) -> bool {
        self.change(file, holder, |list| list.clear(holder, range))
    }

    /// Changes a holder's locks, and updates their counts.
    fn change<T>(
        &mut self,
        file: FileId,
        holder: Holder,
        change: impl FnOnce(&mut LockList<Holder>) -> T,
    ) -> T {
        let list = self.list(file);
        let before = list.len();
        let changed = change(list);
        let after = list.len();
        self.held = self.held + after - before;
        let of = self.sessions.entry(holder.session).or_default();
        of.held = of.held + after - before;
        let on_file = of.held_on.entry(file).or_default();
        *on_file = *on_file + after - before;
        if *on_file == 0 {
            of.held_on.remove(&file);
        }
        of.recount();
        changed
    }

    fn queue(&mut self, file: FileId, wait: Wait) -> Result<Asked, Status> {
        let of = self.sessions.entry(wait.holder.session).or_default();
        if of.waiting.len() + of.settled.len() >= WAITS_PER_CLIENT || !of.has_room(1) {
            return Err(Status::NoLocks);
        }
        self.arrivals += 1;
        let place = Place { file, first: wait.lock.range.first, arrival: self.arrivals };
        of.waiting.insert(wait.id, place);
        of.recount();
        self.waiting.add(file, wait.holder, place.arrival, &wait.lock);
        let waits = &mut self.files.entry(file).or_default().waits;
        waits.insert(wait.lock.range, place.arrival, (place.arrival, wait));
        Ok(Asked::Queued)
    }

    fn remove_wait(&mut self, place: Place) {
        let entry = self.files.get_mut(&place.file).expect("a file with a wait has an entry");
        let (_, wait) = entry.waits.remove(place.first, &place.arrival).expect("a wait is where it was put");
        self.waiting.remove(wait.holder, place.arrival);
        if let Some(of) = self.sessions.get_mut(&wait.holder.session) {
            of.waiting.remove(&wait.id);
            of.recount();
        }
    }

    /// The requests that wait for a part of a range, in the order in which they came.
    fn waits_for(&self, file: FileId, range: LockRange) -> Vec<(Place, Wait)> {
        let Some(entry) = self.files.get(&file) else {
            return Vec::new();
        };
        let place =
            |&(arrival, wait): &(u64, Wait)| (Place { file, first: wait.lock.range.first, arrival }, wait);
        let mut waits: Vec<_> = entry.waits.overlapping(range).map(place).collect();
        waits.sort_unstable_by_key(|(place, _)| place.arrival);
        waits
    }

    /// Grants the waiting requests that are possible since the range has fewer locks, or a shared one in place of an exclusive one; in their order.
    fn grant_waiting(&mut self, file: FileId, range: LockRange) {
        if self.grace {
            return;
        }
        let mut looked_at = range;
        // A grant that turns an exclusive lock of its holder into a shared one may make an earlier request possible, so the waits are gone through
        // again.
        loop {
            let mut shared: Option<LockRange> = None;
            for (place, wait) in self.waits_for(file, looked_at) {
                #[cfg(test)]
                super::tests::WAITS_LOOKED_AT.with(|count| count.set(count.get() + 1));
                let Lock { range, mode, .. } = wait.lock;
                if self.list(file).conflicts(wait.holder, range, mode).next().is_some() {
                    continue;
                }
                self.remove_wait(place);
                let result = self.put(file, wait.holder, &wait.lock);
                if result == Ok(true) {
                    let wide = shared.unwrap_or(range);
                    let (first, last) = (wide.first.min(range.first), wide.last.max(range.last));
                    shared = Some(LockRange { first, last });
                }
                self.settle(wait.holder.session, wait.id, result.map(drop::<bool>));
            }
            let Some(range) = shared else { return };
            looked_at = range;
        }
    }

    fn settle(&mut self, session: u64, wait: WaitId, result: Result<(), Status>) {
        let of = self.sessions.entry(session).or_default();
        of.settled.push_back(SettledLock { wait, result });
        of.recount();
        if let Some(waker) = of.waker.take() {
            waker.wake();
        }
    }

    fn forget_idle(&mut self, file: FileId, session: u64) {
        if self.files.get(&file).is_some_and(|entry| entry.held.is_empty() && entry.waits.is_empty()) {
            self.files.remove(&file);
        }
        if self.sessions.get(&session).is_some_and(OfSession::is_idle) {
            self.sessions.remove(&session);
        }
    }
}
