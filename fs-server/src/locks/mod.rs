//! Advisory locks of all clients: fcntl(2) ranges and flock(2), cluster-wide.
//!
//! # State
//! The locks of each file with their holders, and the waits for locks. None of it is durable: after a restart clients reclaim
//! the locks they held (`Locks::reclaim`), before another client can take a lock that may be in their way.
//!
//! # How it works
//! One table under one mutex (`table.rs`), for no operation waits inside. A request that must wait is answered `Queued` at once,
//! so it occupies no slot, no worker and no connection; the client has one question under way (`AwaitLocks`) that is answered
//! when any of its waits ends (`Locks::settled`). A lock that is given up goes to its waiters in the order they came, in the
//! same step: no other request can come first.
//!
//! A request that conflicts with no held lock is granted even if another request waits for a larger range, as in the kernel. To
//! queue it behind that waiter would be fairer, and would deadlock programs that are written for the kernel's locks (a reader
//! that starts a second reader and waits for it).
//!
//! # Invariants
//! * A holder is (session, owner): a session's locks end with it, and no later session of the same client has them.
//! * The end of each wait is told once: the slot keeps the reply that tells it.
//! * In the grace period only reclaimed locks are granted. All other requests wait, also those of callers that do not want to
//!   wait for locks: it is not known yet whether there is a conflict.
//!
//! # Bounds
//! `LOCKS_MAX`, `LOCKS_PER_CLIENT`, `WAITS_PER_CLIENT`, and the peer's share of locks, waits and untold ends (`shares`); beyond
//! them the answer is `NoLocks`.

mod deadlock;
mod table;
#[cfg(test)]
mod tests;

use crate::session::Session;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::locks::{Lock, LockOwner, LockRange, LockSpace, WaitId};
use cuttlefs_common::rdma::RegionOwner;
use cuttlefs_common::rpc::{SettledLock, TestedLock};
use cuttlefs_common::status::Status;
use parking_lot::Mutex;
use std::future::poll_fn;
use std::task::Poll;
use table::Table;

/// Locks of one client: ten times what a database with a lock a page of its working set has. A list of so many is gone
/// through in a tenth of a millisecond.
pub(crate) const LOCKS_PER_CLIENT: usize = 16_384;
/// Requests of one client that wait for locks, or whose end has not been told yet.
pub(crate) const WAITS_PER_CLIENT: usize = 4096;

/// How a request for a lock was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// The lock is held.
    Granted,
    /// It is waited for.
    Queued,
}

/// How giving a wait up ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// Nobody waits any more.
    GivenUp,
    /// It had ended before, so. Nobody has been told.
    Ended(SettledLock),
    /// There is no such wait: its end has been told.
    Unknown,
}

/// Counts, for status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LockFigures {
    /// Locks held.
    pub held: usize,
    /// Requests that wait.
    pub waiting: usize,
}

/// Who holds a lock: a client's session, and somebody in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Holder {
    session: u64,
    owner: LockOwner,
}

/// The locks of all clients.
pub struct Locks {
    table: Mutex<Table>,
}

impl Locks {
    /// No locks. `grace`: clients of the server before this one may come back for theirs.
    pub fn new(grace: bool) -> Self {
        Self { table: Mutex::new(Table::new(grace)) }
    }

    /// Asks for a lock. A request that waits already under this name goes on waiting.
    ///
    /// # Errors
    /// `Locked` if somebody is in the way of who does not want to wait; `Deadlock`; `NoLocks`; `SessionExpired`.
    pub fn set(
        &self,
        session: &Session,
        ino: InodeNo,
        lock: &Lock,
        wait: WaitId,
        blocking: bool,
    ) -> Result<Asked, Status> {
        let mut table = self.live(session)?;
        table.set(session.number().0, ino, lock, wait, blocking)
    }

    /// Gives an owner's locks on a range up.
    ///
    /// # Errors
    /// `NoLocks` if that would leave more locks than there may be; `SessionExpired`.
    pub fn clear(
        &self,
        session: &Session,
        ino: InodeNo,
        space: LockSpace,
        owner: LockOwner,
        range: LockRange,
    ) -> Result<(), Status> {
        self.live(session)?.clear(Holder { session: session.number().0, owner }, ino, space, range)
    }

    /// What is in the way of a lock.
    pub fn test(&self, session: &Session, ino: InodeNo, lock: &Lock) -> TestedLock {
        self.table.lock().test(Holder { session: session.number().0, owner: lock.owner }, ino, lock)
    }

    /// Takes a lock again that was held before the server restarted; whether it is held now. `recovering`: the client had
    /// a session with the server before this one, so nobody else can have had the lock since.
    ///
    /// # Errors
    /// `SessionExpired`.
    pub fn reclaim(
        &self,
        session: &Session,
        ino: InodeNo,
        lock: &Lock,
        recovering: bool,
    ) -> Result<bool, Status> {
        Ok(self.live(session)?.reclaim(session.number().0, ino, lock, recovering))
    }

    /// Gives a wait up.
    ///
    /// # Errors
    /// `SessionExpired`.
    pub fn cancel(&self, session: &Session, wait: WaitId) -> Result<Cancelled, Status> {
        Ok(self.live(session)?.cancel(session.number().0, wait))
    }

    /// Resolves when waits of the session have ended, or the session or the server has: then with nothing.
    pub async fn settled(&self, session: &Session) -> Vec<SettledLock> {
        poll_fn(|context| {
            let mut table = self.table.lock();
            let settled = table.take_settled(session.number().0);
            if !settled.is_empty() || table.is_stopped() || session.is_ended() {
                return Poll::Ready(settled);
            }
            table.wake_with(session.number().0, context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// The session has ended: nothing is held or waited for in its name. Goes after the session is marked as ended.
    pub fn end_session(&self, session: RegionOwner) {
        self.table.lock().end_session(session.0);
    }

    /// Nobody can come back for locks any more: what was asked for meanwhile is looked at, in the order it came.
    pub fn end_grace(&self) {
        self.table.lock().end_grace();
    }

    /// The server is going down: nobody is held any longer.
    pub fn stop(&self) {
        self.table.lock().stop();
    }

    /// Counts.
    pub fn figures(&self) -> LockFigures {
        self.table.lock().figures()
    }

    /// The table, in the name of a session that goes on. Whoever ends one marks it first and then clears what it held,
    /// under the same mutex: nothing is left behind.
    fn live(&self, session: &Session) -> Result<parking_lot::MutexGuard<'_, Table>, Status> {
        let mut table = self.table.lock();
        if session.is_ended() {
            return Err(Status::SessionExpired);
        }
        table.count_for(session.number().0, session.peer());
        Ok(table)
    }
}
