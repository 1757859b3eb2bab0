//! Requests about advisory locks. Only the request for ended waits waits itself, and it holds nothing.

use super::{Body, Call, PIECES_A_TURN, body, done};
use crate::locks::{Asked, Cancelled};
use cuttlefs_common::ids::{FileKey, InodeNo};
use cuttlefs_common::locks::{Lock, LockMode, LockOwner, LockRange, LockSpace, WaitId};
use cuttlefs_common::rpc::{AWAIT_LOCKS_MAX_MS, ReclaimLock, Reply, Rights};
use cuttlefs_common::status::Status;
use std::time::Duration;

impl Call<'_> {
    /// The inode that a filekey names: only files that the client has open can be locked.
    fn locked_file(&self, filekey: FileKey) -> Result<InodeNo, Status> {
        let (file, _) = self.context.server.files.resolve(self.session.number(), filekey)?;
        Ok(file.ino())
    }

    /// The same, if the file is open with the access that fcntl(2) demands for a lock on a range.
    fn lockable_file(&self, filekey: FileKey, lock: &Lock) -> Result<InodeNo, Status> {
        let (file, rights) = self.context.server.files.resolve(self.session.number(), filekey)?;
        let is_open_for = match (lock.space, lock.mode) {
            (LockSpace::Whole, _) => true,
            (LockSpace::Ranges, LockMode::Shared) => rights.read,
            (LockSpace::Ranges, LockMode::Exclusive) => rights.write,
        };
        if is_open_for { Ok(file.ino()) } else { Err(Status::Denied) }
    }
}

pub(super) fn set(
    call: &Call<'_>,
    filekey: FileKey,
    lock: &Lock,
    wait: WaitId,
    blocking: bool,
) -> Result<Body, Status> {
    let server = &call.context.server;
    let ino = call.lockable_file(filekey, lock)?;
    match server.locks.set(call.session, ino, lock, wait, blocking)? {
        // The attributes as of now: the holder before has written until it gave the lock up.
        Asked::Granted => match server.meta.attr(ino) {
            Ok(attr) => body(&Reply::Attr(attr)),
            Err(status) => {
                server.locks.clear(call.session, ino, lock.space, lock.owner, lock.range)?;
                Err(status)
            }
        },
        Asked::Queued => body(&Reply::Queued),
    }
}

pub(super) fn clear(
    call: &Call<'_>,
    ino: InodeNo,
    space: LockSpace,
    owner: LockOwner,
    range: LockRange,
) -> Result<Body, Status> {
    call.context.server.locks.clear(call.session, ino, space, owner, range)?;
    done()
}

pub(super) fn test(call: &Call<'_>, filekey: FileKey, lock: &Lock) -> Result<Body, Status> {
    let ino = call.locked_file(filekey)?;
    body(&Reply::Tested(call.context.server.locks.test(call.session, ino, lock)))
}

pub(super) async fn settled(call: &Call<'_>, hold_ms: u32) -> Result<Body, Status> {
    let hold = Duration::from_millis(u64::from(hold_ms.min(AWAIT_LOCKS_MAX_MS)));
    let ended = call.context.server.locks.settled(call.session);
    // If the connection ends, the client asks again over another one, and is answered there.
    let over = async {
        futures_lite::future::or(call.context.sleep(hold), call.connection.ended()).await;
        Vec::new()
    };
    // Ended waits are polled first, so that none is taken and then dropped.
    body(&Reply::Settled(futures_lite::future::or(ended, over).await))
}

pub(super) fn cancel(call: &Call<'_>, wait: WaitId) -> Result<Body, Status> {
    match call.context.server.locks.cancel(call.session, wait)? {
        Cancelled::GivenUp => done(),
        Cancelled::Ended(settled) => body(&Reply::Settled(vec![settled])),
        Cancelled::Unknown => body(&Reply::Settled(Vec::new())),
    }
}

/// Takes a client's locks again, if it had a session with the server before this one. A client whose lease ran out before has lost its locks: others
/// may have had them and given them up since.
pub(super) async fn reclaim(call: &Call<'_>, locks: &[ReclaimLock]) -> Result<Body, Status> {
    let server = &call.context.server;
    let recovering = server.sessions.may_reclaim(call.session.client());
    // The client must have the file open: a lock of a file that it has closed would end next, and it has no right to other files.
    let may_hold = |ino| !call.who.checked || call.has_open(ino, Rights::default());
    let take = |held: &ReclaimLock| match server.meta.attr(held.ino) {
        Ok(_) if !may_hold(held.ino) => Ok(false),
        Ok(_) => server.locks.reclaim(call.session, held.ino, &held.lock, recovering),
        Err(_) => Ok(false),
    };
    let mut taken = Vec::with_capacity(locks.len());
    for (number, held) in locks.iter().enumerate() {
        if number % PIECES_A_TURN == PIECES_A_TURN - 1 {
            call.give_way().await;
        }
        taken.push(take(held)?);
    }
    body(&Reply::LocksReclaimed(taken))
}
