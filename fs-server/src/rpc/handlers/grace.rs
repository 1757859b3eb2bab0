//! Requests whose outcome depends on clients that come back to a new server.
//!
//! After a kill of the server, answered changes may be with their clients only, which make them again (`session/`). Until
//! they have, no other client opens, reads, measures or changes a file. So an open after the writer's close finds the
//! written bytes, and an append goes behind them. Names are durable, and so are changed without a wait.
//!
//! A new server does not know either which files without a name are open: clients come back for them until the grace period
//! ends (`session/`). Until then such a file, and its space, may stay or go. After a power loss it may even have gone before
//! and be back. So a request that depends on such a file waits until that is known:
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
use cuttlefs_common::rpc::Request;
use cuttlefs_common::status::Status;
use std::cell::RefCell;
use std::time::Duration;

/// How often those who wait look again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// How often while clients come back, which takes some hundredths of a second.
const SOON: Duration = Duration::from_millis(10);

/// What a request names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Named {
    /// Nothing that waits for the end of the grace period.
    Known,
    /// A file that may stay or go.
    Undecided,
    /// What has no name and is open nowhere.
    Gone,
}

/// The kind of an inode without a name that nobody has open.
fn nameless(server: &Server, ino: InodeNo) -> Option<FileKind> {
    let attr = server.meta.attr(ino).ok()?;
    (attr.nlink == 0 && server.files.opens(ino) == 0).then_some(attr.kind)
}

fn look(server: &Server, request: &mut Request<'_>) -> Named {
    let named = match request {
        Request::Reclaim { .. } => return Named::Known,
        // In the order in which they are looked at: what is wrong with the first one is the answer.
        Request::Link { ino, parent, .. } => vec![*parent, *ino],
        Request::Rename { parent, new_parent, .. } => vec![*parent, *new_parent],
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

/// Whether a request's outcome hangs on what files hold.
fn tells_of_contents(server: &Server, request: &Request<'_>) -> bool {
    match request {
        // A directory's are as durable as its names.
        Request::GetAttr { ino } => server.meta.attr(*ino).is_ok_and(|attr| attr.kind == FileKind::File),
        Request::Open { .. }
        | Request::Create { .. }
        | Request::Layout { .. }
        | Request::Fetch { .. }
        | Request::Seek { .. }
        | Request::Write { .. }
        | Request::Allocate { .. }
        | Request::CopyRange { .. } => true,
        Request::SetAttr { set, .. } => set.size.is_some(),
        _ => false,
    }
}

/// Resolves when what the request tells of, or changes, is as its clients left it.
///
/// # Errors
/// `SessionExpired`: the session ended meanwhile.
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

/// Resolves when every inode that the request names is known to be there or not.
///
/// # Errors
/// `Stale`: one is not.
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

/// Makes an attempt at what takes space, in a turn of its session; as long as space may come, another one.
///
/// # Errors
/// What the last attempt says.
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
        // If none does, the last that did may have gone since the attempt.
        is_last = !some_hold_space(server);
        if !is_last {
            pause(call, LOOK_AGAIN).await?;
        }
    }
}

/// Whether files that may go when the grace period ends have pages.
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
    // Its lease may have run out meanwhile.
    if call.session.is_ended() { Err(Status::SessionExpired) } else { Ok(()) }
}
