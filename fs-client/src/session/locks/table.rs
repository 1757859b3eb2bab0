//! The table of a mount's locks: held locks with their open files, waiters, and lost locks.

use super::LockWaiter;
use super::held::{Before, Held, Owned};
use crate::session::ServerOpen;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::locks::{HeldLock, Lock, LockList, LockMode, LockOwner, LockRange, LockSpace, WaitId};
use cuttlefs_common::rpc::ReclaimLock;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a request waits for locks of files that are being closed.
pub(super) const RELEASE_PATIENCE: Duration = Duration::from_secs(1);
/// How long a request waits for a close that the kernel has sent and that no thread has read yet. The program went on at once after the close, and
/// its next request may be read by a thread that runs before the one with the close.
const UNREAD_PATIENCE: Duration = Duration::from_millis(30);

/// A request for a lock.
#[derive(Clone)]
pub(super) struct Wait {
    pub(super) file: Arc<ServerOpen>,
    pub(super) lock: Lock,
    pub(super) blocking: bool,
    pub(super) waiter: Arc<dyn LockWaiter>,
    /// Whether the server has said that the request waits. Until then the caller sends it again by itself.
    pub(super) queued: bool,
    /// The locks that are held until the answer, if they are more than the request asks for.
    pub(super) before: Before,
}

impl Wait {
    pub(super) fn owned(&self) -> Owned {
        Owned { ino: self.file.ino(), space: self.lock.space, owner: self.lock.owner }
    }
}

/// A request that recovery sends again.
pub(super) type AskedFor = (WaitId, Arc<ServerOpen>, Lock, bool);

/// Whether an answer counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Noted {
    /// The answer counts, and is noted.
    Done,
    /// The answer is of a session that is over: the request must be sent again.
    Outdated,
}

#[derive(Default)]
struct State {
    own: Held,
    /// The owners with a request under way.
    busy: HashSet<Owned>,
    lost: HashSet<Owned>,
    waits: BTreeMap<WaitId, Wait>,
    next_wait: u64,
    /// The number of closes under way that give locks up.
    releasing: usize,
    /// The number of such closes that have ended.
    released: u64,
    /// Whether some waiter may have been interrupted.
    interrupted: bool,
    /// Locks that were granted to a waiter that had another answer before.
    unwanted: Vec<(Owned, LockRange)>,
    ended: bool,
}

impl State {
    fn is_known(&self, owned: Owned) -> bool {
        self.own.through.contains_key(&owned) || self.lost.contains(&owned)
    }
}

/// The table; see the module.
#[derive(Default)]
pub(in crate::session) struct OwnLocks {
    state: Mutex<State>,
    /// Notified when a request begins to wait, when a close has given its locks up, when a turn ends, and at the end.
    changed: Condvar,
    /// Whether there was ever a lock: a mount without locks looks at nothing more when a file is closed. Relaxed: a process that closes a file has
    /// had the answer to its lock before.
    used: AtomicBool,
    pub(super) threads: super::waiting::Started,
}

/// While it exists, no other request about these locks is under way.
#[must_use]
pub(super) struct Turn<'l> {
    locks: &'l OwnLocks,
    owned: Owned,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.locks.state().busy.remove(&self.owned);
        self.locks.changed.notify_all();
    }
}

impl OwnLocks {
    /// Waits for the end of a request that is under way about these locks.
    pub(super) fn turn(&self, owned: Owned) -> Turn<'_> {
        let mut state = self.state();
        self.changed.wait_while(&mut state, |state| state.busy.contains(&owned));
        state.busy.insert(owned);
        Turn { locks: self, owned }
    }

    /// Whether this is the open file through which these locks were taken last.
    pub(super) fn is_through(&self, owned: Owned, file: &ServerOpen) -> bool {
        self.state().own.through.get(&owned).is_some_and(|through| through.number() == file.number())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Notes a request for a lock.
    pub(super) fn begin(&self, mut wait: Wait) -> WaitId {
        self.used.store(true, Ordering::Relaxed);
        let mut state = self.state();
        if wait.lock.space == LockSpace::Whole {
            // flock(2) gives up the lock that it converts; the server does the same.
            let held = state.own.list(wait.file.ino(), LockSpace::Whole);
            if !held.is_some_and(|list| list.holds(wait.lock.owner, LockRange::WHOLE, wait.lock.mode)) {
                state.own.clear(wait.owned(), LockRange::WHOLE);
            }
        }
        let Lock { space, owner: holder, range, mode, pid } = wait.lock;
        let list = state.own.list(wait.file.ino(), space);
        if mode == LockMode::Shared && list.is_some_and(|list| list.holds(holder, range, LockMode::Exclusive))
        {
            // The server grants this at once, and other clients may share the lock before this mount hears of it. If the server is killed, only the
            // shared lock is reclaimed.
            let owned = wait.owned();
            let before = state.own.take(owned, range);
            state.own.set(owned, HeldLock { holder, range, mode, pid });
            if let Some(through) = before.through.clone() {
                state.own.through.insert(owned, through);
            }
            wait.before = before;
        }
        state.next_wait += 1;
        let id = WaitId(state.next_wait);
        state.waits.insert(id, wait);
        id
    }

    /// The server says that the request waits.
    pub(super) fn queued(&self, id: WaitId, session: u64) -> Noted {
        let mut state = self.state();
        if state.own.session != session {
            return Noted::Outdated;
        }
        // If it is not there, its end came first.
        if let Some(wait) = state.waits.get_mut(&id) {
            wait.queued = true;
            self.changed.notify_all();
        }
        Noted::Done
    }

    /// The lock is granted. Returns the wait, whose waiter must be answered.
    pub(super) fn granted(&self, id: WaitId, session: u64) -> (Noted, Option<Wait>) {
        let mut state = self.state();
        if state.own.session != session {
            return (Noted::Outdated, None);
        }
        let Some(wait) = state.waits.remove(&id) else {
            return (Noted::Done, None);
        };
        let Lock { owner: holder, range, mode, pid, .. } = wait.lock;
        state.own.set(wait.owned(), HeldLock { holder, range, mode, pid });
        state.own.through.insert(wait.owned(), wait.file.clone());
        (Noted::Done, Some(wait))
    }

    /// The wait ended without a lock.
    pub(super) fn forget(&self, id: WaitId) -> Option<Wait> {
        let mut state = self.state();
        let mut wait = state.waits.remove(&id)?;
        state.own.put_back(wait.owned(), std::mem::take(&mut wait.before));
        Some(wait)
    }

    /// A server is asked to give locks up. It may do so, grant them to other clients, and be killed before it answers: so from here on they are not
    /// reclaimed. Returns what must be noted again if the server refuses.
    pub(super) fn give_up(&self, owned: Owned, range: LockRange) -> Before {
        self.state().own.take(owned, range)
    }

    /// The server has refused to give them up.
    pub(super) fn keep(&self, owned: Owned, before: Before) {
        self.state().own.put_back(owned, before);
    }

    /// Locks were given up.
    pub(super) fn cleared(&self, owned: Owned, range: LockRange, session: u64) -> Noted {
        let mut state = self.state();
        if state.own.session != session {
            return Noted::Outdated;
        }
        state.own.clear(owned, range);
        Noted::Done
    }

    /// Whether the table belongs to this session.
    pub(super) fn is_of(&self, session: u64) -> bool {
        self.state().own.session == session
    }

    /// The file of a wait.
    pub(super) fn file_of(&self, id: WaitId) -> Option<Arc<ServerOpen>> {
        self.state().waits.get(&id).map(|wait| wait.file.clone())
    }

    /// Whether an owner has, or had and lost, locks on a file.
    pub(super) fn is_known(&self, owned: Owned) -> bool {
        self.used.load(Ordering::Relaxed) && self.state().is_known(owned)
    }

    /// Whether an owner's locks were lost and it has not been told. If so, it counts as told from now on.
    pub(super) fn take_lost(&self, owned: Owned) -> bool {
        self.used.load(Ordering::Relaxed) && self.state().lost.remove(&owned)
    }

    /// An open file ends. Returns the owners whose locks end with it; `None` if there are none. Otherwise `end_release` must follow.
    pub(super) fn begin_release(&self, file: &ServerOpen) -> Option<Vec<Owned>> {
        if !self.used.load(Ordering::Relaxed) {
            return None;
        }
        let mut state = self.state();
        let through = state.own.through.iter().filter(|(_, through)| through.number() == file.number());
        let owned: Vec<Owned> = through.map(|(owned, _)| *owned).collect();
        if owned.is_empty() {
            return None;
        }
        state.releasing += 1;
        Some(owned)
    }

    pub(super) fn end_release(&self) {
        let mut state = self.state();
        state.releasing -= 1;
        state.released += 1;
        self.changed.notify_all();
    }

    /// The number of closes that have given their locks up, for `wait_for_release`.
    pub(super) fn released(&self) -> u64 {
        self.state().released
    }

    /// A lock on this file was refused. Waits for a close that gives its locks up, if one is under way or may be. `true` if one has ended since
    /// `released` was read.
    pub(super) fn wait_for_release(&self, refused: Owned, released: u64) -> bool {
        let mut state = self.state();
        let patience = match state.releasing {
            0 if state.own.others_go_with_a_close(refused) => UNREAD_PATIENCE,
            0 => Duration::ZERO,
            _ => RELEASE_PATIENCE,
        };
        let is_waited_for = |state: &mut State| state.released == released && !state.ended;
        self.changed.wait_while_for(&mut state, is_waited_for, patience);
        state.released != released
    }

    /// From now on the table belongs to this session. Returns the locks to reclaim there, and the requests to send again.
    pub(super) fn begin_session(&self, session: u64) -> (Vec<ReclaimLock>, Vec<AskedFor>) {
        let mut state = self.state();
        state.own.session = session;
        let reclaimed = |(&(ino, space), list): (&(InodeNo, LockSpace), &LockList<LockOwner>)| {
            let lock = |held: &HeldLock<LockOwner>| {
                let HeldLock { holder: owner, range, mode, pid } = *held;
                ReclaimLock { ino, lock: Lock { space, owner, range, mode, pid } }
            };
            list.iter().map(lock).collect::<Vec<_>>()
        };
        let held = state.own.lists.iter().flat_map(reclaimed).collect();
        let queued = state.waits.iter().filter(|(_, wait)| wait.queued);
        let waits = queued.map(|(id, wait)| (*id, wait.file.clone(), wait.lock, wait.blocking)).collect();
        (held, waits)
    }

    /// The server did not give this lock back. Returns the open file through which it was taken, which must be fenced.
    pub(super) fn lose(&self, ReclaimLock { ino, lock }: &ReclaimLock) -> Option<Arc<ServerOpen>> {
        tracing::warn!(%ino, pid = lock.pid, first = lock.range.first, last = lock.range.last,
            "a lock is lost: the server had ended this mount's session");
        let owned = Owned { ino: *ino, space: lock.space, owner: lock.owner };
        let mut state = self.state();
        // Kept until the open file ends, or until the owner is told.
        state.lost.insert(owned);
        let through = state.own.through.get(&owned).cloned();
        state.own.clear(owned, lock.range);
        if let Some(through) = &through {
            state.own.through.insert(owned, through.clone());
        }
        through
    }

    /// The waiters, in the order of their requests.
    pub(super) fn waiters(&self) -> Vec<(WaitId, Arc<dyn LockWaiter>)> {
        let state = self.state();
        let queued = state.waits.iter().filter(|(_, wait)| wait.queued);
        queued.map(|(id, wait)| (*id, wait.waiter.clone())).collect()
    }

    /// Waits up to `time` until a request waits for a lock. Returns whether one does.
    pub(super) fn wait_for_waits(&self, time: Duration) -> bool {
        let nobody = |state: &mut State| !state.ended && !state.waits.values().any(|wait| wait.queued);
        let mut state = self.state();
        !self.changed.wait_while_for(&mut state, nobody, time).timed_out()
    }

    /// Some waiter may have been interrupted.
    pub(super) fn interrupted(&self) {
        self.state().interrupted = true;
        self.changed.notify_all();
    }

    /// The waiter of this granted lock does not know of it.
    pub(super) fn unwanted(&self, owned: Owned, range: LockRange) {
        self.state().unwanted.push((owned, range));
        self.changed.notify_all();
    }

    pub(super) fn take_unwanted(&self) -> Vec<(Owned, LockRange)> {
        std::mem::take(&mut self.state().unwanted)
    }

    /// Waits up to `time` until a waiter may have been interrupted or a lock is unwanted. Returns whether one of the two is the case.
    pub(super) fn wait_for_interrupts(&self, time: Duration) -> bool {
        let nothing = |state: &mut State| !state.ended && !state.interrupted && state.unwanted.is_empty();
        let mut state = self.state();
        let is_told = !self.changed.wait_while_for(&mut state, nothing, time).timed_out();
        state.interrupted = false;
        is_told
    }

    /// The mount ends. Returns the waits.
    pub(super) fn end(&self) -> Vec<Wait> {
        let mut state = self.state();
        state.ended = true;
        self.changed.notify_all();
        std::mem::take(&mut state.waits).into_values().collect()
    }
}

#[cfg(test)]
mod tests;
