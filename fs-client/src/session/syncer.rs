//! Syncs by the mount itself: copies of unsynced changes (`unsynced`) are dropped when the changes are durable.
//!
//! # How it works
//! The thread *syncer* syncs everything each [`SYNC_PERIOD`]. As soon as half of the room for copies is taken, it syncs the file that
//! has more than half of all copies, if there is one, else everything. So a stream seldom waits. Writers that find no room wait for
//! it together: one sync serves all. In a process without background threads the first waiter syncs.
//!
//! # Failure
//! While the server is away the sync waits for it, and waiters for room wait, too, as for any answer. They can be interrupted: their
//! requests have not been sent. A sync that fails leaves all copies, and is tried again when the period is over; an fsync of such a
//! file gets the error from the server. If a writer waits for room meanwhile, the files are synced one by one: the copies of a file
//! whose sync fails are dropped, and each of its handles is told (`losses`). So every waiter gets room with the second answer of the
//! server.

use super::Session;
use super::unsynced::Room;
use crate::transport::FsError;
use crate::transport::interrupt;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::panic_ends;
use cuttlefs_common::rpc::{Request, SyncScope};
use cuttlefs_common::status::Status;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How often bytes are synced for which no program has asked; until then copies of them are kept. Twice the server's write-back interval, so that
/// little is left to do in most cases.
const SYNC_PERIOD: Duration = Duration::from_secs(2);
/// How often a waiter for room checks whether its caller was interrupted.
const ROOM_SLICE: Duration = Duration::from_millis(100);
/// How long a waiter for room rests where another call syncs, in a process without background threads.
const ROOM_REST: Duration = Duration::from_millis(1);

/// The body of the thread. Ends when the session is shut down.
pub(super) fn run(session: &Session) {
    let unsynced = session.unsynced();
    let mut syncs_succeed = true;
    let mut next = Instant::now() + SYNC_PERIOD;
    while !session.is_shut_down() {
        panic_ends::plant("syncer");
        let is_due = unsynced.wait_until_due(syncs_succeed, next.saturating_duration_since(Instant::now()));
        if unsynced.owes_nothing() {
            next = Instant::now() + SYNC_PERIOD;
            continue;
        }
        let most = unsynced.heaviest().filter(|_| is_due && Instant::now() < next);
        match session.free_room(most) {
            Ok(()) => syncs_succeed = true,
            Err(FsError::ShutDown) => return,
            Err(error) => {
                tracing::debug!(%error, "a sync that nobody asked for failed");
                syncs_succeed = false;
            }
        }
        if most.is_none() {
            next = Instant::now() + SYNC_PERIOD;
        }
    }
}

impl Session {
    /// Room to keep a copy of a change with this many bytes. To be called before the request is sent.
    ///
    /// # Errors
    /// `Interrupted` if nobody waits for the change any more; `ShutDown`.
    pub(crate) fn room_for(&self, bytes: usize) -> Result<Room<'_>, FsError> {
        if let Some(room) = self.unsynced.reserve(bytes) {
            return Ok(room);
        }
        self.unsynced_waits.fetch_add(1, Ordering::Relaxed);
        loop {
            if self.is_shut_down() {
                return Err(FsError::ShutDown);
            }
            if interrupt::is_interrupted() {
                return Err(FsError::Interrupted);
            }
            let room = match self.options.background {
                true => self.unsynced.reserve_within(bytes, ROOM_SLICE),
                false => self.sync_for_room(bytes)?,
            };
            if let Some(room) = room {
                return Ok(room);
            }
        }
    }

    /// In a process without background threads: syncs, unless another call does.
    fn sync_for_room(&self, bytes: usize) -> Result<Option<Room<'_>>, FsError> {
        let turn = self.syncing.try_lock();
        // The call that had the turn before may have freed some room.
        if let Some(room) = self.unsynced.reserve(bytes) {
            return Ok(Some(room));
        }
        match turn {
            Some(_turn) if self.unsynced.is_short() => {
                let freed = self.free_room(self.unsynced.heaviest());
                // Other errors: another call's sync may have freed some room before.
                if let Err(error @ (FsError::ShutDown | FsError::Interrupted)) = freed {
                    return Err(error);
                }
            }
            _ => self.rest(ROOM_REST),
        }
        Ok(None)
    }

    /// Syncs one file, or everything, so that its copies are dropped. If that fails and a writer waits for room, syncs the files one by one, and
    /// gives up the copies of those that fail.
    ///
    /// # Errors
    /// The server's error if nobody waits for room; `ShutDown`, `Interrupted`.
    fn free_room(&self, of: Option<InodeNo>) -> Result<(), FsError> {
        let mark = self.unsynced.mark();
        let sync = |of: Option<InodeNo>| {
            let scope = of.map_or(SyncScope::All, SyncScope::InodeContents);
            match self.call(&self.own_caller(), || Request::Sync(scope), |_| Ok(())) {
                // The file is gone, so its bytes are not needed.
                Err(FsError::Server(Status::Stale | Status::NotFound)) if of.is_some() => {}
                result => result?,
            }
            self.unsynced.synced(of, mark);
            Ok(())
        };
        let failed = match sync(of) {
            Err(FsError::Server(status)) if self.unsynced.is_short() => status,
            result => return result,
        };
        tracing::debug!(%failed, "somebody waits for a sync that failed: files are synced one by one");
        for ino in of.map_or_else(|| self.unsynced.files(), |ino| vec![ino]) {
            match sync(Some(ino)) {
                Ok(()) => {}
                Err(FsError::Server(status)) => {
                    tracing::error!(%ino, %status, "a file cannot be synced, and others need the room of what is kept of it to be restored after a kill of the server; its next fsync fails");
                    self.unsynced.give_up(ino, mark);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
