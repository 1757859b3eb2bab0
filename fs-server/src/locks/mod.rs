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

/// Bound on the locks of one client: ten times those of a database that locks each page of its working set. A walk through such a list takes a tenth
/// of a millisecond.
pub(crate) const LOCKS_PER_CLIENT: usize = 16_384;
/// Bound on the requests of one client that wait for locks or whose end it has not been told.
pub(crate) const WAITS_PER_CLIENT: usize = 4096;

/// The answer to a request for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// The lock is held.
    Granted,
    /// The request waits for the lock.
    Queued,
}

/// The outcome of giving a wait up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// The wait is over, without the lock.
    GivenUp,
    /// The wait had ended before, with this result, and the client had not been told.
    Ended(SettledLock),
    /// There is no such wait: the client has been told of its end.
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

/// The holder of a lock: a client's session, and an owner in it.
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

    /// Asks for a lock. A request that already waits under this number goes on waiting.
    ///
    /// # Errors
    /// `Locked` if another lock is in the way and the request is not blocking; `Deadlock`; `NoLocks`; `SessionExpired`.
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

    /// Gives up an owner's locks on a range.
    ///
    /// # Errors
    /// `NoLocks` if that would split a lock and leave more locks than there may be; `SessionExpired`.
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

    /// The first lock in the way of this one, if there is one.
    pub fn test(&self, session: &Session, ino: InodeNo, lock: &Lock) -> TestedLock {
        self.table.lock().test(Holder { session: session.number().0, owner: lock.owner }, ino, lock)
    }

    /// Takes a lock again that was held before the server restarted. Returns whether it is held now. `recovering`: the client had a session with the
    /// server before this one, so no other client can have had the lock since.
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

    /// Gives up a wait.
    ///
    /// # Errors
    /// `SessionExpired`.
    pub fn cancel(&self, session: &Session, wait: WaitId) -> Result<Cancelled, Status> {
        Ok(self.live(session)?.cancel(session.number().0, wait))
    }

    /// Resolves when waits of the session have ended, with these; or when the session or the server ends, with none.
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

    /// Ends a session's locks and waits. Called after the session was marked as ended.
    pub fn end_session(&self, session: RegionOwner) {
        self.table.lock().end_session(session.0);
    }

    /// Ends the grace period: no client can reclaim locks any more. Grants the requests that came meanwhile in their order, as far as possible.
    pub fn end_grace(&self) {
        self.table.lock().end_grace();
    }

    /// Ends the waiting of all `settled` calls, because the server is going down.
    pub fn stop(&self) {
        self.table.lock().stop();
    }

    /// Counts.
    pub fn figures(&self) -> LockFigures {
        self.table.lock().figures()
    }

    /// The table, for a session that has not ended. A session that ends is marked first and its locks are cleared then, under the same mutex, so that
    /// none stays behind.
    fn live(&self, session: &Session) -> Result<parking_lot::MutexGuard<'_, Table>, Status> {
        let mut table = self.table.lock();
        if session.is_ended() {
            return Err(Status::SessionExpired);
        }
        table.count_for(session.number().0, session.peer());
        Ok(table)
    }
}
