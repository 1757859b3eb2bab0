//! The table of locks: what each operation does to it, without sessions, clocks or waiting.
//!
//! # Invariants
//! * A file has an entry while it has a lock or a wait.
//! * A session has an entry while it holds or waits for something, has ends to be told of, or listens for them.
//! * Whoever waits outside of the grace period has somebody's lock in his way.

use super::deadlock::Waiting;
use super::{Asked, Cancelled, Holder, LOCKS_MAX, LOCKS_PER_CLIENT, LockFigures, WAITS_PER_CLIENT};
use crate::shares::{Peer, Resource, Tally};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::locks::{HeldLock, Lock, LockList, LockRange, LockSpace, WaitId};
use cuttlefs_common::rpc::{BlockingLock, SETTLED_LOCKS_MAX, SettledLock, TestedLock};
use cuttlefs_common::status::Status;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::task::Waker;

/// The locks of one kind on one file.
pub(super) type FileId = (InodeNo, LockSpace);

/// Somebody who waits.
#[derive(Clone, Copy, Debug)]
struct Wait {
    holder: Holder,
    id: WaitId,
    lock: Lock,
    /// Otherwise only for the end of the grace period.
    blocking: bool,
}

#[derive(Default)]
struct File {
    held: LockList<Holder>,
    /// In the order they came.
    waits: VecDeque<Wait>,
}

#[derive(Default)]
struct OfSession {
    held: usize,
    waiting: BTreeMap<WaitId, FileId>,
    /// Ends nobody has been told of.
    settled: VecDeque<SettledLock>,
    /// Who asks for ends.
    waker: Option<Waker>,
    /// What of its peer's share all that takes.
    tally: Option<Tally>,
}

impl OfSession {
    fn is_idle(&self) -> bool {
        self.held == 0 && self.waiting.is_empty() && self.settled.is_empty() && self.waker.is_none()
    }

    /// What it takes has changed.
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

/// See the module.
pub(super) struct Table {
    files: BTreeMap<FileId, File>,
    sessions: HashMap<u64, OfSession>,
    /// Who waits for which ranges: flock has no deadlock detection, as on Linux.
    waiting: Waiting,
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
            held: 0,
            grace,
            stopped: false,
        }
    }

    /// From here on what the session has counts against its peer's share.
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
            // flock(2): a lock is not converted, but given up and asked for anew. Two who share one and both want it for
            // themselves would otherwise wait for ever, and nobody would tell them.
            self.drop_range(file, holder, LockRange::WHOLE);
            self.grant_waiting(file);
        }
        if self.is_free(file, &wait)? {
            self.put(file, holder, lock)?;
            // What was held exclusively may be shared now.
            self.grant_waiting(file);
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
            self.grant_waiting(file);
        }
        self.forget_idle(file, holder.session);
        Ok(())
    }

    pub(super) fn test(&self, holder: Holder, ino: InodeNo, lock: &Lock) -> TestedLock {
        let found = self.files.get(&(ino, lock.space));
        // The lowest, as the kernel finds it in its sorted list.
        let first = found.and_then(|file| {
            file.held.conflicts(holder, lock.range, lock.mode).min_by_key(|held| held.range.first)
        });
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
        let Some(&file) = of.waiting.get(&id) else {
            return Cancelled::Unknown;
        };
        let is_it = |wait: &Wait| wait.holder.session == session && wait.id == id;
        self.remove_waits(file, is_it);
        self.forget_idle(file, session);
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
        // Most sessions hold locks on few files; this is gone through once for one that ends.
        let mut files: BTreeSet<FileId> = of.waiting.values().copied().collect();
        if of.held > 0 {
            let holds = |file: &File| file.held.iter().any(|held| held.holder.session == session);
            files.extend(self.files.iter().filter(|(_, file)| holds(file)).map(|(id, _)| *id));
        }
        for &file in &files {
            self.remove_waits(file, |wait| wait.holder.session == session);
            if let Some(entry) = self.files.get_mut(&file) {
                self.held -= entry.held.clear_of(|holder| holder.session == session);
            }
        }
        if let Some(waker) = self.sessions.remove(&session).and_then(|of| of.waker) {
            waker.wake();
        }
        for file in files {
            self.grant_waiting(file);
            self.forget_idle(file, session);
        }
    }

    pub(super) fn end_grace(&mut self) {
        if !std::mem::replace(&mut self.grace, false) {
            return;
        }
        for file in self.files.keys().copied().collect::<Vec<_>>() {
            // Asked for once more, one after the other, as if all came now.
            let waits: Vec<Wait> =
                self.files.get(&file).map(|entry| entry.waits.iter().copied().collect()).unwrap_or_default();
            self.remove_waits(file, |_| true);
            for wait in waits {
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

    /// Whether nothing is in the way.
    ///
    /// # Errors
    /// `Deadlock` if waiting would never end.
    fn is_free(&mut self, file: FileId, wait: &Wait) -> Result<bool, Status> {
        let Wait { holder, lock, blocking, .. } = *wait;
        let in_the_way: Vec<Holder> =
            self.list(file).conflicts(holder, lock.range, lock.mode).map(|held| held.holder).collect();
        if in_the_way.is_empty() {
            return Ok(true);
        }
        let detects = blocking && file.1 == LockSpace::Ranges;
        let conflicts = |ino, other: Holder, range, mode| -> Vec<Holder> {
            let held = self.files.get(&(ino, LockSpace::Ranges)).map(|file| &file.held);
            held.map(|held| held.conflicts(other, range, mode).map(|held| held.holder).collect())
                .unwrap_or_default()
        };
        if detects && self.waiting.reaches(in_the_way, holder, conflicts) {
            return Err(Status::Deadlock);
        }
        Ok(false)
    }

    fn has_room(&self, session: u64, more: usize) -> bool {
        let of = self.sessions.get(&session);
        let (held, has_room) = of.map_or((0, true), |of| (of.held, of.has_room(more)));
        held + more <= LOCKS_PER_CLIENT && self.held + more <= LOCKS_MAX && has_room
    }

    /// Sets a lock that nothing is in the way of.
    fn put(&mut self, file: FileId, holder: Holder, lock: &Lock) -> Result<(), Status> {
        let parts = usize::from(self.list(file).would_split(holder, lock.range));
        if !self.has_room(holder.session, 1 + parts) {
            return Err(Status::NoLocks);
        }
        self.change(file, holder, |list| {
            list.set(HeldLock { holder, range: lock.range, mode: lock.mode, pid: lock.pid });
        });
        Ok(())
    }

    /// Gives a range up; whether anything was held there.
    fn drop_range(&mut self, file: FileId, holder: Holder, range: LockRange) -> bool {
        let mut any = false;
        self.change(file, holder, |list| any = list.clear(holder, range));
        any
    }

    /// Changes what a holder has, and counts it.
    fn change(&mut self, file: FileId, holder: Holder, change: impl FnOnce(&mut LockList<Holder>)) {
        let list = self.list(file);
        let before = list.len();
        change(list);
        let after = list.len();
        self.held = self.held + after - before;
        let of = self.sessions.entry(holder.session).or_default();
        of.held = of.held + after - before;
        of.recount();
    }

    fn queue(&mut self, file: FileId, wait: Wait) -> Result<Asked, Status> {
        let of = self.sessions.entry(wait.holder.session).or_default();
        if of.waiting.len() + of.settled.len() >= WAITS_PER_CLIENT || !of.has_room(1) {
            return Err(Status::NoLocks);
        }
        of.waiting.insert(wait.id, file);
        of.recount();
        self.waiting.add(file, wait.holder, &wait.lock);
        self.files.entry(file).or_default().waits.push_back(wait);
        Ok(Asked::Queued)
    }

    fn remove_waits(&mut self, file: FileId, whose: impl Fn(&Wait) -> bool) {
        let Some(entry) = self.files.get_mut(&file) else {
            return;
        };
        let mut removed = Vec::new();
        entry.waits.retain(|wait| {
            if whose(wait) {
                removed.push(*wait);
            }
            !whose(wait)
        });
        for wait in removed {
            self.waiting.remove(file, wait.holder, &wait.lock);
            if let Some(of) = self.sessions.get_mut(&wait.holder.session) {
                of.waiting.remove(&wait.id);
                of.recount();
            }
        }
    }

    /// Gives what is free to those who wait, in the order they came.
    fn grant_waiting(&mut self, file: FileId) {
        if self.grace {
            return;
        }
        // Once more after a grant: one that made an exclusive lock shared may have let in somebody who came before.
        let mut any = true;
        while std::mem::take(&mut any) {
            let mut next = 0;
            while let Some(entry) = self.files.get(&file)
                && let Some(&wait) = entry.waits.get(next)
            {
                let Lock { range, mode, .. } = wait.lock;
                if entry.held.conflicts(wait.holder, range, mode).next().is_some() {
                    next += 1;
                    continue;
                }
                self.remove_waits(file, |other| {
                    (other.holder.session, other.id) == (wait.holder.session, wait.id)
                });
                let result = self.put(file, wait.holder, &wait.lock);
                self.settle(wait.holder.session, wait.id, result);
                any = true;
            }
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
