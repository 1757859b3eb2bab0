//! A mount's locks: those that it holds at the server, and the waits for locks.
//!
//! # How it works
//! A lock is asked for in one request. If there is a wait, the server says so at once; the thread of the request goes on to other work, and the
//! waiter stays in [`OwnLocks`]. Two threads of the mount look after all waiters ([`waiting`]): one asks the server for the ends of waits, one
//! gives up the waits of interrupted waiters. They start with the first wait.
//!
//! Granted locks are noted, and reclaimed from the next server before any other request goes out. A mount that was silent for longer than its
//! lease has lost its locks. Their owner's next operation on them fails once with `Io`, so that it knows, and the open file that they were
//! taken through is fenced: reads and writes through it fail from then on. Changes that were made through it under the lock are restored like
//! all others.
//!
//! # Invariants
//! * The table and its notes belong to one session. An answer of an older session is not noted: its server is gone, and its lock was not
//!   reclaimed, so the request is made once more.
//! * Locks of a file are given up before it is closed.
//! * At most one request about one owner's locks of a file is under way ([`OwnLocks::turn`]). The kernel names the owner of locks through an
//!   open file description (`F_OFD_SETLK`) by the description's address: the next description may have the same address while the locks of the
//!   one before are given up.
//! * A lock that a request under way gives up or makes shared is not reclaimed: the killed server may have done it, and granted the lock to
//!   other clients, which reclaim it.
//! * Bytes that were written before a lock is given up, or becomes shared, are durable at the server by then: so they are not restored over the
//!   next holder's writes after a kill.
//!
//! # Failure
//! While the server is away all requests wait, also those for locks that are not to wait for other holders.

mod held;
mod table;
mod waiter;
mod waiting;

pub(super) use table::OwnLocks;
pub use waiter::{GrantedLock, LockWaiter};

use super::{ServerOpen, Session};
use crate::transport::{Caller, FsError, Lane};
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::locks::{Lock, LockMode, LockOwner, LockRange, LockSpace, WaitId};
use cuttlefs_common::rpc::{
    BlockingLock, RECLAIM_LOCKS_MAX, Reply, Request, SettledLock, SyncScope, TestedLock,
};
use cuttlefs_common::status::Status;
use held::{Before, Owned};
use std::sync::Arc;
use std::time::{Duration, Instant};
use table::{Noted, RELEASE_PATIENCE, Wait};

/// How often the question for a blocking lock is repeated while the server cannot answer it.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// The server's answer to a request for a lock.
enum Answer {
    /// The lock is held; these are the file's attributes.
    Granted(Attr),
    /// The request waits for other locks.
    Queued,
}

fn unexpected<T>() -> Result<T, FsError> {
    tracing::error!("the server's reply does not belong to the request");
    Err(FsError::Server(Status::Malformed))
}

impl Session {
    /// Requests a lock. `waiter` is answered now, or by another thread when the lock is granted or will not be.
    pub(crate) fn set_lock(
        self: &Arc<Self>,
        caller: &Caller,
        file: &Arc<ServerOpen>,
        lock: Lock,
        blocking: bool,
        waiter: Arc<dyn LockWaiter>,
    ) {
        // One that does not block waits too, for the end of the grace period.
        if !waiting::start(self) {
            let _told = waiter.answer(Err(FsError::Server(Status::NoLocks)));
            return;
        }
        let owned = Owned { ino: file.ino(), space: lock.space, owner: lock.owner };
        let _turn = self.locks.turn(owned);
        if self.locks.take_lost(owned) {
            let _told = waiter.answer(Err(FsError::Server(Status::Io)));
            return;
        }
        if lock.mode == LockMode::Shared && self.locks.is_known(owned) {
            // Other clients may share the lock from then on.
            self.sync_for_next_holder(caller, owned.ino);
        }
        let id = self.locks.begin(Wait {
            file: file.clone(),
            lock,
            blocking,
            waiter,
            queued: false,
            before: Before::default(),
        });
        match self.ask_for_lock(caller, id, file, lock, blocking) {
            // The interrupt may have come before the wait could be found.
            Ok(true) => self.lock_waits_interrupted(),
            Ok(false) => {}
            Err(error) => self.end_wait(id, Err(error)),
        }
    }

    /// Sends the request until the answer counts. `true`: the request waits.
    fn ask_for_lock(
        &self,
        caller: &Caller,
        id: WaitId,
        file: &Arc<ServerOpen>,
        lock: Lock,
        blocking: bool,
    ) -> Result<bool, FsError> {
        let give_up_at = Instant::now() + RELEASE_PATIENCE;
        let refused = Owned { ino: file.ino(), space: lock.space, owner: lock.owner };
        loop {
            let released = self.locks.released();
            let build = || Request::SetLock { filekey: file.filekey(), lock, wait: id, blocking };
            let take = |reply: Reply<'_>| match reply {
                Reply::Attr(attr) => Ok(Answer::Granted(attr)),
                Reply::Queued => Ok(Answer::Queued),
                _ => unexpected(),
            };
            let asked = self.call_noting_session(caller, build, take);
            match asked {
                Ok((Answer::Granted(attr), session)) => {
                    if self.grant(id, session, Some(&attr)) == Noted::Done {
                        return Ok(false);
                    }
                }
                Ok((Answer::Queued, session)) => {
                    if self.locks.queued(id, session) == Noted::Done {
                        return Ok(true);
                    }
                }
                // The kernel does not wait for the end of a close: a program may know that the file is closed while this mount is still giving its
                // lock up.
                Err(FsError::Server(Status::Locked))
                    if Instant::now() < give_up_at && self.locks.wait_for_release(refused, released) => {}
                Err(_) if file.is_fenced() => return Err(FsError::Server(Status::Io)),
                Err(error) => return Err(error),
            }
        }
    }

    /// The server of `session` says that a wait ended with the lock.
    fn grant(&self, id: WaitId, session: u64, attr: Option<&Attr>) -> Noted {
        let (noted, wait) = self.locks.granted(id, session);
        if let Some(wait) = wait {
            let change = attr.map(|attr| attr.change);
            if !wait.waiter.answer(Ok(GrantedLock { change })) {
                self.locks.unwanted(wait.owned(), wait.lock.range);
            }
        }
        noted
    }

    /// A wait ended without the lock, or was given up.
    fn end_wait(&self, id: WaitId, result: Result<GrantedLock, FsError>) {
        if let Some(wait) = self.locks.forget(id) {
            let _told = wait.waiter.answer(result);
        }
    }

    /// Gives up an owner's locks in a range.
    ///
    /// # Errors
    /// The server's error; `Io` once for locks that were lost.
    pub(crate) fn unlock(
        &self,
        caller: &Caller,
        ino: InodeNo,
        space: LockSpace,
        owner: LockOwner,
        range: LockRange,
    ) -> Result<(), FsError> {
        let owned = Owned { ino, space, owner };
        let _turn = self.locks.turn(owned);
        self.unlock_in_turn(caller, owned, range)
    }

    fn unlock_in_turn(&self, caller: &Caller, owned: Owned, range: LockRange) -> Result<(), FsError> {
        let Owned { ino, space, owner } = owned;
        let lost = self.locks.take_lost(owned);
        self.sync_for_next_holder(caller, ino);
        loop {
            let build = || Request::Unlock { ino, space, owner, range };
            let take = |reply: Reply<'_>| if reply == Reply::Done { Ok(()) } else { unexpected() };
            let before = self.locks.give_up(owned, range);
            match self.call_noting_session(caller, build, take) {
                Ok(((), session)) if self.locks.cleared(owned, range, session) == Noted::Done => break,
                Ok(_) => {}
                Err(error) => {
                    self.locks.keep(owned, before);
                    return Err(error);
                }
            }
        }
        if lost { Err(FsError::Server(Status::Io)) } else { Ok(()) }
    }

    /// Makes this mount's changes of a file durable. Otherwise they would be restored after a kill of the server, over the writes of the lock's next
    /// holder.
    fn sync_for_next_holder(&self, caller: &Caller, ino: InodeNo) {
        if !self.unsynced.files().contains(&ino) {
            return;
        }
        let mark = self.unsynced.mark();
        let build = || Request::Sync(SyncScope::InodeContents(ino));
        match self.call(caller, build, |_| Ok(())) {
            Ok(()) => self.unsynced.synced(Some(ino), mark),
            // A sync of the file will return the error; the lock is given up all the same.
            Err(error) => {
                tracing::warn!(%ino, %error, "a file could not be synced before its lock was given up")
            }
        }
    }

    /// A lock that blocks this one, if there is one. Waits until the server can say.
    ///
    /// # Errors
    /// The server's error.
    pub(crate) fn test_lock(
        &self,
        caller: &Caller,
        file: &ServerOpen,
        lock: Lock,
    ) -> Result<Option<BlockingLock>, FsError> {
        loop {
            let build = || Request::TestLock { filekey: file.filekey(), lock };
            let tested = self.call(caller, build, |reply| match reply {
                Reply::Tested(tested) => Ok(tested),
                _ => unexpected(),
            })?;
            match tested {
                TestedLock::Free => return Ok(None),
                TestedLock::Blocked(held) => return Ok(Some(held)),
                TestedLock::Unknown if self.is_shut_down() => return Err(FsError::ShutDown),
                TestedLock::Unknown => self.link.pause(ASK_AGAIN),
            }
        }
    }

    /// A process closed a file: it gives up the locks that it took on the file through fcntl(2), by whichever descriptor.
    pub(crate) fn release_owner(&self, ino: InodeNo, owner: LockOwner) {
        let owned = Owned { ino, space: LockSpace::Ranges, owner };
        if self.locks.is_known(owned) {
            let _turn = self.locks.turn(owned);
            self.release(owned);
        }
    }

    /// The last descriptor of an open file is closed: gives up the locks that end with it. These are the locks of flock(2), and those of fcntl(2) on
    /// open file descriptions, of which the kernel says nothing more.
    pub(crate) fn release_open(&self, file: &ServerOpen) {
        if let Some(owned) = self.locks.begin_release(file) {
            for owned in owned {
                let _turn = self.locks.turn(owned);
                // Otherwise a later open file of the same owner has taken the locks over.
                if self.locks.is_through(owned, file) {
                    self.release(owned);
                }
            }
            self.locks.end_release();
        }
    }

    fn release(&self, owned: Owned) {
        match self.unlock_in_turn(&self.own_caller(), owned, LockRange::WHOLE) {
            // A warning was logged when the lock was lost, and the end of the mount gives all locks up.
            Ok(()) | Err(FsError::ShutDown | FsError::Server(Status::Io)) => {}
            Err(error) => {
                tracing::warn!(ino = %owned.ino, %error, "locks of a closed file could not be given up");
            }
        }
    }

    /// The first session begins: no lock is held yet.
    pub(super) fn begin_locks(&self, session: u64) {
        self.locks.begin_session(session);
    }

    /// Reclaims the held locks at a new session, and requests again those that are waited for. `None`: the connection broke, and everything is tried
    /// again.
    pub(super) fn recover_locks(&self, lane: &mut Lane, session: u64, seq: &mut u64) -> Option<()> {
        let (held, waits) = self.locks.begin_session(session);
        for batch in held.chunks(RECLAIM_LOCKS_MAX) {
            let request = Request::ReclaimLocks { locks: batch.to_vec() };
            let reclaimed = match lane.call_recovering(&self.link, &request, seq)? {
                Ok(body) => match Reply::parse(body) {
                    Ok(Reply::LocksReclaimed(reclaimed)) => reclaimed,
                    _ => return None,
                },
                Err(status) => {
                    tracing::warn!(%status, "the server gives no locks back");
                    Vec::new()
                }
            };
            let mut reclaimed = reclaimed.into_iter().chain(std::iter::repeat(false));
            for lost in batch.iter().filter(|_| reclaimed.next() == Some(false)) {
                if let Some(file) = self.locks.lose(lost) {
                    file.fence();
                }
            }
        }
        for (id, file, lock, blocking) in waits {
            let request = Request::SetLock { filekey: file.filekey(), lock, wait: id, blocking };
            match lane.call_recovering(&self.link, &request, seq)? {
                Ok(body) => match Reply::parse(body) {
                    Ok(Reply::Queued) => {}
                    Ok(Reply::Attr(attr)) => {
                        let _current = self.grant(id, session, Some(&attr));
                    }
                    _ => return None,
                },
                Err(status) => {
                    let status = if file.is_fenced() { Status::Io } else { status };
                    self.end_wait(id, Err(FsError::Server(status)));
                }
            }
        }
        Some(())
    }

    /// Asks the server once how waits ended, and answers their waiters. The server holds the question for `hold` at most.
    ///
    /// # Errors
    /// `ShutDown` if the mount ends.
    pub fn await_locks(&self, hold: Duration) -> Result<(), FsError> {
        let hold_ms = u32::try_from(hold.as_millis()).unwrap_or(u32::MAX);
        let mut lane = self.locks_lane();
        let settled = lane.call(
            &self.own_caller(),
            |_| Request::AwaitLocks { hold_ms },
            |reply, _| match reply {
                Reply::Settled(settled) => Ok(settled),
                _ => unexpected(),
            },
        )?;
        let session = lane.session_number();
        drop(lane);
        settled.iter().for_each(|settled| self.settled(settled, session));
        Ok(())
    }

    fn settled(&self, settled: &SettledLock, session: u64) {
        if !self.locks.is_of(session) {
            return;
        }
        match settled.result {
            Ok(()) => {
                // The holder before has written.
                let attr = self.locks.file_of(settled.wait).and_then(|file| {
                    let build = || Request::GetAttr { ino: file.ino() };
                    let take = |reply: Reply<'_>| match reply {
                        Reply::Attr(attr) => Ok(attr),
                        _ => unexpected(),
                    };
                    self.call(&self.own_caller(), build, take).ok()
                });
                // If the session is over by now, the lock was requested again at the next one.
                let _or_outdated = self.grant(settled.wait, session, attr.as_ref());
            }
            Err(status) => self.end_wait(settled.wait, Err(FsError::Server(status))),
        }
    }

    /// Some waiters may have been interrupted. Does not wait for the server.
    pub(crate) fn lock_waits_interrupted(&self) {
        self.locks.interrupted();
    }

    /// Gives up locks that were granted to a waiter that had another answer before, because it was killed.
    fn release_unwanted(&self) {
        for (Owned { ino, space, owner }, range) in self.locks.take_unwanted() {
            match self.unlock(&self.own_caller(), ino, space, owner, range) {
                Ok(()) | Err(FsError::ShutDown) => {}
                Err(error) => tracing::warn!(%ino, %error, "a lock that nobody wants could not be given up"),
            }
        }
    }

    /// Gives up a wait whose waiter was interrupted.
    ///
    /// # Errors
    /// `ShutDown` if the mount ends.
    fn cancel_lock(&self, id: WaitId) -> Result<(), FsError> {
        loop {
            let build = || Request::CancelLock { wait: id };
            let take = |reply: Reply<'_>| match reply {
                Reply::Done => Ok(None),
                Reply::Settled(settled) => Ok(Some(settled)),
                _ => unexpected(),
            };
            let (ended, session) = self.call_noting_session(&self.own_caller(), build, take)?;
            // Otherwise the lock was requested again meanwhile, at the next server.
            if self.locks.is_of(session) {
                match ended {
                    None => self.end_wait(id, Err(FsError::Server(Status::Cancelled))),
                    Some(settled) => settled.iter().for_each(|settled| self.settled(settled, session)),
                }
                return Ok(());
            }
        }
    }

    /// The mount ends: answers all waiters.
    pub(super) fn end_lock_waits(&self) {
        for wait in self.locks.end() {
            let _told = wait.waiter.answer(Err(FsError::ShutDown));
        }
    }
}
