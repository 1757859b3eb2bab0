//! Requests about sessions: attach, reclaim and detach.

use super::recall::recall;
use super::{Body, Call, PIECES_A_TURN, body, done};
use crate::export;
use crate::pages::policy::Exposure;
use crate::rights::Judge;
use crate::rpc::connection::Connection;
use crate::rpc::worker::WorkerContext;
use cuttlefs_common::ids::FileKey;
use cuttlefs_common::pool_uuid::PoolUuid;
use cuttlefs_common::rpc::{
    Attached, OneSidedReads, Opened, Reclaim, Reply, RequestHeader, SLOTS_PER_SESSION, SessionSecret,
    Unanswered,
};
use cuttlefs_common::status::Status;
use std::rc::Rc;
use std::sync::Arc;

/// The first request of a connection: opens or joins the client's session.
pub(crate) fn attach(
    context: &Rc<WorkerContext>,
    connection: &Arc<Connection>,
    header: &RequestHeader,
    secret: &SessionSecret,
    label: &str,
    subtree: &[u8],
) -> Result<Body, Status> {
    let server = &context.server;
    let peer = connection.qp().peer();
    let grant = server.admission.exports.grant(&peer, &server.meta)?;
    let who = grant.identify(header, None);
    let judge = Judge { meta: &server.meta, who: &who };
    let below = export::components(subtree)?;
    let root = export::walk(grant.root, &below, |parent, name| {
        judge.directory(parent)?;
        server.meta.lookup(parent, name)
    })?;
    let client = secret.client();
    let (session, is_new) = server.sessions.attach(client, connection.peer(), label, root)?;
    if is_new {
        server.remember(&session)?;
    }
    let read_only = grant.read_only;
    if !connection.attach(&session, grant) {
        // A connection stays with its first session; for another one the client opens another connection.
        return Err(Status::Invalid);
    }
    let policy = server.files.pages().policy();
    let rnic = server.rnics.get(connection.rnic());
    let shows_window = server.files.pages().shows_window();
    body(&Reply::Attached(Attached {
        server_epoch: server.about.epoch,
        pool: PoolUuid(server.meta.uuid()),
        session: session.number().0,
        lease_ms: server.sessions.lease().as_millis() as u32,
        slots: SLOTS_PER_SESSION,
        root: session.root(),
        magic: server.files.pages().magic(),
        read_only,
        clean_predecessor: server.meta.clean_predecessor(),
        one_sided: match policy.exposure {
            Exposure::Magic => OneSidedReads::Magic,
            Exposure::Pinned | Exposure::Faulting => OneSidedReads::Whole,
            Exposure::Hidden => OneSidedReads::Off,
        },
        sampling: (policy.promotes && policy.exposure == Exposure::Magic).then_some(server.about.sampling),
        durable_answers: server.about.durable_answers,
        windows: rnic.windows(),
        page_window: shows_window.then(|| rnic.page_window(connection.qp().as_ref())).flatten(),
    }))
}

/// Opens files again that were open before the server restarted or the session ended. Files that an earlier attempt opened are closed only after
/// that, so that a file without a name is not freed in between.
pub(super) async fn reclaim(call: &Call<'_>, files: &[Reclaim]) -> Result<Body, Status> {
    let mut opened = Vec::with_capacity(files.len());
    for (number, file) in files.iter().enumerate() {
        if number % PIECES_A_TURN == PIECES_A_TURN - 1 {
            call.give_way().await;
        }
        opened.push(match reclaim_one(call, file) {
            Ok(bound) => call.load(bound, file.rights).await.ok(),
            Err(_) => None,
        });
    }
    close_attempt_before(call, opened.iter().flatten().map(|opened| opened.filekey)).await;
    body(&Reply::Reclaimed(opened))
}

/// Opens one file again. A client with a ticket had the file open and gets it whatever its mode is by now, unless its export has become read-only. A
/// client without a ticket needs the rights.
fn reclaim_one(call: &Call<'_>, file: &Reclaim) -> Result<Opened, Status> {
    let server = &call.context.server;
    if call.grant.read_only && file.rights.write {
        return Err(Status::ReadOnly);
    }
    let attr = server.meta.attr(file.ino)?;
    let client = call.session.client();
    let is_good = |ticket| server.admission.tickets.is_good(ticket, client, file.ino, file.rights);
    if !file.ticket.is_some_and(is_good) {
        call.judge().check_rights(&attr, file.rights)?;
    }
    call.bind(&attr, file.rights)
}

async fn close_attempt_before(call: &Call<'_>, reclaimed: impl Iterator<Item = FileKey>) {
    let unknown = call.session.note_reclaimed(call.connection.number(), reclaimed);
    let server = &call.context.server;
    server.close(call.session.number(), &unknown).await;
    call.session.prune_reclaimed(|filekey| server.files.resolve(call.session.number(), filekey).is_ok());
}

/// The client has reclaimed all files that it had open, and has no answers to the requests `unanswered`.
pub(super) async fn recovered(call: &Call<'_>, unanswered: &[Unanswered]) -> Result<Body, Status> {
    close_attempt_before(call, std::iter::empty()).await;
    // Before the grace period ends, which keeps the files that the answers open.
    for request in unanswered {
        recall(call, request).await;
    }
    call.context.server.sessions.recovered(call.session.client());
    call.context.server.settle_grace();
    done()
}

/// The client ends its session.
pub(super) async fn detach(call: &Call<'_>) -> Result<Body, Status> {
    let server = &call.context.server;
    server.sessions.end(call.session);
    server.locks.end_session(call.session.number());
    server.settle_grace();
    server.revoke(call.session).await;
    server.forget(&[call.session.client()]);
    done()
}
