//! Requests whose outcome depends on clients that come back to a new server.
//!
//! After a kill of the server, clients may have the only copies of answered changes, and restore these (`session/`). Until all have done so, no other
//! client opens, reads, measures or changes a file. So an open after the writer's close finds the written bytes, and an append goes behind them.
//! Names are durable when they are answered, so they are changed without waiting.
//!
//! Nor does a new server know which files without a name are open: clients reclaim them until the grace period ends (`session/`). Until then it is
//! open whether such a file and its space stay. After a power loss the file may even have been freed before and be back. So a request that depends on
//! such a file waits until that is known:
//!
//! * a request that names such a file by number: the file is there if a client reclaims it, and `Stale` if none does;
//! * a request that finds no space while such files hold some.
//!
//! An inode that is no regular file is open nowhere: without a name it is `Stale` at once.
//!
//! # Invariants
//! * A waiting request holds no turn, no lock and no buffer: reclaiming clients need them.
//! * A client that has not reclaimed all of its own waits for nothing: it would wait for itself.
//! * A request waits at most for the rest of the grace period and the freeing of its files. For the contents of files it
//!   waits `GATHER` if no further client comes back, and some seconds more for clients that come back and do not finish.
//!
//! # Failure
//! A request that waits when the server stops is not answered: its client asks the next life of the server.

use super::Call;
use crate::rpc::reply::Body;
use crate::server::Server;
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{RegionKey, Request};
use cuttlefs_common::status::Status;
use std::cell::RefCell;
use std::time::Duration;

/// How long a waiting request pauses before it checks again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// The same while clients restore changes, which takes some hundredths of a second.
const SOON: Duration = Duration::from_millis(10);

/// The inodes that a request names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    /// None that depends on the end of the grace period.
    Known,
    /// A file that may be reclaimed or freed.
    Undecided,
    /// An inode without a name that is not open.
    Gone,
}

/// The kind of an inode, if it has no name and is not open.
fn nameless(server: &Server, ino: InodeNo) -> Option<FileKind> {
    let attr = server.meta.attr(ino).ok()?;
    (attr.nlink == 0 && server.files.opens(ino) == 0).then_some(attr.kind)
}

fn look(server: &Server, request: &mut Request<'_>) -> Named {
    let named = match request {
        Request::Reclaim { .. } => return Named::Known,
        // In the order in which the operation checks them: the first fault is the answer.
        Request::Link { ino, parent, .. } => vec![*parent, *ino],
        Request::Rename { parent, new_parent, .. } => vec![*parent, *new_parent],
        // An inode that is not known yet has no counter yet.
        Request::Changes { .. } => Vec::new(),
        one => {
            let named = RefCell::new(Vec::new());
            one.map_inodes(&|ino| {
                named.borrow_mut().push(ino);
                ino
            });
            named.into_inner()
        }
    };
    for ino in named {
        match nameless(server, ino) {
            Some(FileKind::File) => return Named::Undecided,
            Some(_) => return Named::Gone,
            None if server.meta.attr(ino).is_ok_and(|attr| attr.kind == FileKind::Directory) => {}
            None => break,
        }
    }
    Named::Known
}

/// Whether a request's outcome depends on the contents of files.
fn tells_of_contents(server: &Server, request: &Request<'_>) -> bool {
    match request {
        // The attributes of a directory are as durable as its names.
        Request::GetAttr { ino } => server.meta.attr(*ino).is_ok_and(|attr| attr.kind == FileKind::File),
        Request::Open { .. }
        | Request::Create { .. }
        | Request::Layout { .. }
        | Request::Fetch { .. }
        | Request::Seek { .. }
        | Request::Write { .. }
        | Request::Atomic { .. }
        | Request::Allocate { .. }
        | Request::CopyRange { .. }
        | Request::OpenRegion { .. }
        | Request::GrantWrite { .. } => true,
        Request::SetAttr { set, .. } => set.size.is_some(),
        _ => false,
    }
}

/// Resolves when clients have restored the contents that the request reads or changes.
///
/// # Errors
/// `SessionExpired` if the session ended meanwhile.
pub(super) async fn gathered(call: &Call<'_>, request: &Request<'_>) -> Result<(), Status> {
    let sessions = &call.context.server.sessions;
    while sessions.is_gathering()
        && tells_of_contents(&call.context.server, request)
        && sessions.has_recovered(call.session.client())
    {
        pause(call, SOON).await?;
    }
    Ok(())
}

/// Resolves when it is known of every inode that the request names whether it stays.
///
/// # Errors
/// `Stale` if one does not.
pub(super) async fn decided(call: &Call<'_>, request: &mut Request<'_>) -> Result<(), Status> {
    let server = &call.context.server;
    while !server.sessions.is_settled() {
        match look(server, request) {
            Named::Known => break,
            Named::Undecided if server.sessions.has_recovered(call.session.client()) => {
                pause(call, LOOK_AGAIN).await?
            }
            Named::Undecided | Named::Gone => return Err(Status::Stale),
        }
    }
    Ok(())
}

/// Resolves when a binding is there, or it is known that it will not be: in the grace period its client may still bind the range again.
///
/// # Errors
/// `SessionExpired` if the session ended meanwhile.
pub(super) async fn bound(call: &Call<'_>, key: &RegionKey) -> Result<(), Status> {
    let server = &call.context.server;
    while server.files.region(key).is_err()
        && server.sessions.may_reclaim(key.client)
        && server.sessions.has_recovered(call.session.client())
    {
        pause(call, SOON).await?;
    }
    Ok(())
}

/// Tries a request that takes space, in a turn of its session. Tries it again for as long as the end of the grace period may free space.
///
/// # Errors
/// The error of the last attempt.
pub(super) async fn with_space(
    call: &Call<'_>,
    attempt: impl AsyncFn() -> Result<Body, Status>,
) -> Result<Body, Status> {
    let server = &call.context.server;
    let mut is_last = false;
    loop {
        let was_settled = server.sessions.is_settled();
        let result = {
            let _turn = call.turn().await;
            attempt().await
        };
        let may_wait = !was_settled && !is_last && server.sessions.has_recovered(call.session.client());
        if !may_wait || !matches!(result, Err(Status::NoSpace)) {
            return result;
        }
        // If no file holds space now, the last that did may have been freed since the attempt, so one more attempt is made.
        is_last = !some_hold_space(server);
        if !is_last {
            pause(call, LOOK_AGAIN).await?;
        }
    }
}

/// Whether files that may be freed at the end of the grace period have pages.
fn some_hold_space(server: &Server) -> bool {
    server.meta.orphans().into_iter().any(|ino| {
        nameless(server, ino).is_some() && server.meta.attr(ino).is_ok_and(|attr| attr.allocated_bytes > 0)
    })
}

async fn pause(call: &Call<'_>, rest: Duration) -> Result<(), Status> {
    call.context.sleep(rest).await;
    if call.context.server.drain.is_stopping() {
        call.unanswered.set(true);
        return Err(Status::Io);
    }
    // The session may have ended meanwhile.
    if call.session.is_ended() { Err(Status::SessionExpired) } else { Ok(()) }
}
