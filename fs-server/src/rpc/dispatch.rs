//! The path from a received message to a sent reply: decode, admit, call, reply. One task for each request.
//!
//! # Failure
//! A message that does not parse ends its connection with a logged reason; other connections go on. A request that
//! breaks the export's rules or POSIX's limits is answered with a status and changes nothing.

use super::admit;
use super::connection::{Arrived, Connection};
use super::handlers::{self, Effect};
use super::reply::{Body, Message};
use super::turns::Claim;
use super::worker::WorkerContext;
use crate::files::Changed;
use crate::session::Admission;
use crate::veil::Veil;
use cuttlefs_common::breach::Breach;
use cuttlefs_common::panic_ends;
use cuttlefs_common::rpc::{HEADER_LEN, Request, RequestHeader};
use cuttlefs_common::status::Status;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Serves a message that came in on a connection.
pub(crate) async fn serve(context: Rc<WorkerContext>, connection: Arc<Connection>, arrived: Arrived) {
    let (message, receive) = connection.message(arrived);
    match parse(&message) {
        Ok((header, mut request)) => {
            if let Some(veil) = veil_of(&connection) {
                veil.reveal_request(&mut request);
            }
            // `false` if the server is going down: then the client asks the next server.
            if context.server.drain.begin() {
                context.server.counters.count_rpc(&request);
                panic_ends::plant("request");
                answer(&context, &connection, &header, request).await;
                context.server.drain.end();
                connection.answered(receive);
            }
        }
        Err(error) => end_connection(&context, &connection, &error),
    }
    context.retire(&connection);
}

fn parse(message: &[u8]) -> Result<(RequestHeader, Request<'_>), Breach> {
    let (header, bytes) = RequestHeader::parse(message)?;
    Ok((header, Request::parse(bytes)?))
}

/// Ends the connection of a peer that does not keep to the protocol.
pub(super) fn end_connection(
    context: &WorkerContext,
    connection: &Connection,
    error: &dyn std::fmt::Display,
) {
    context.server.counters.bad_messages.fetch_add(1, Ordering::Relaxed);
    tracing::warn!(peer = %connection.qp().peer(), %error, "malformed message; closing this connection");
    connection.close();
}

async fn answer(
    context: &Rc<WorkerContext>,
    connection: &Arc<Connection>,
    header: &RequestHeader,
    request: Request<'_>,
) {
    let result = match &request {
        // An attach and a status request need no session, and an attach is idempotent by itself.
        Request::Attach { secret, label, subtree } => {
            handlers::attach(context, connection, header, secret, label, subtree)
        }
        Request::Status => handlers::status(context, connection),
        _ => {
            let Some(session) = connection.session().cloned() else {
                return Message::new(header, Err(Status::SessionExpired)).send(connection).await;
            };
            if let Err(status) = context.server.sessions.note_request(&session) {
                return Message::new(header, Err(status)).send(connection).await;
            }
            let admission =
                session.slot(header.slot).and_then(|slot| slot.lock().admit(header.seq, connection.number()));
            match admission {
                Err(status) => return Message::new(header, Err(status)).send(connection).await,
                Ok(Admission::Replay(reply)) => return connection.send(&reply).await,
                Ok(Admission::Running) => return,
                Ok(Admission::Run) => {}
            }
            let once = admit::must_run_once(&request);
            let effect = Effect::default();
            let mut result = handlers::run(context, connection, &session, header, request, &effect).await;
            if result.is_ok() {
                let claim = Claim::new(connection.peer(), session.number().0);
                result = make_durable(context, &claim, &effect.changed).await.and(result);
            }
            let unanswered = effect.unanswered.get();
            let reply = reply_to(connection, header, result);
            // A request that is not answered runs again when it is sent again, so no answer is kept.
            let kept = (once && !unanswered).then(|| Arc::from(reply.to_vec()));
            let answer_to = match session.slot(header.slot) {
                Ok(slot) => slot.lock().finish(kept),
                Err(_) => connection.number(),
            };
            if unanswered {
                // The client may have sent it again on that connection and been told that it runs. The end of the connection makes the client send it
                // once more.
                if let Some(other) = context.server.admission.connections.get(answer_to) {
                    other.close();
                }
            } else if answer_to == connection.number() {
                reply.send(connection).await;
            } else if let Some(other) = context.server.admission.connections.get(answer_to) {
                other.send(&reply.to_vec()).await;
            }
            return;
        }
    };
    reply_to(connection, header, result).send(connection).await;
}

/// Waits until the changes of a request are durable, if answers are, if its client wants that, or if these changes are behind one-sided appends that may
/// be lost. No other code waits for that.
async fn make_durable(context: &Rc<WorkerContext>, claim: &Claim, changed: &Changed) -> Result<(), Status> {
    let server = &context.server;
    if !server.about.durable_answers {
        if changed.is_behind_appends() {
            server.counters.syncs_for_appends.fetch_add(1, Ordering::Relaxed);
        } else if !changed.is_wanted_durable() {
            return Ok(());
        }
    }
    let _turn = if changed.has_contents() { Some(context.turns.take(claim).await) } else { None };
    changed.make_durable(&server.files, context.disk.as_ref()).await
}

/// The permutation of inode numbers for a connection's client, if it has one.
fn veil_of(connection: &Connection) -> Option<&Veil> {
    connection.grant()?.veil.as_deref()
}

/// The message for a handler's result, with the inode numbers that the client knows.
pub(super) fn reply_to(
    connection: &Connection,
    header: &RequestHeader,
    result: Result<Body, Status>,
) -> Message {
    let result = match (veil_of(connection), result) {
        (Some(veil), Ok(Body::Encoded(encoded))) => veil.hide_reply(&encoded[HEADER_LEN..]),
        // The reply of a fetch has no inode number.
        (_, result) => result,
    };
    Message::new(header, result)
}
