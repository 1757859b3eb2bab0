//! Requests that an earlier life of the server did and whose answers its clients did not get.
//!
//! A client sends a request again until it is answered. Within the life of a server the slot keeps the answer. Beyond it the metadata has
//! the answer (`meta/answer.rs`): when the client has come back and says which requests it has no answer to, their answers are put into
//! their slots, as if this server had given them. From then on the slots answer.
//!
//! The file of such an answer is opened here: an answer names a filekey, a slot and a ticket of one life of the server. So a file that
//! has lost its last name meanwhile stays, like any open file: until its client has come back, the grace period keeps it.
//!
//! A client that had got the answer to a change of length would restore the length if it is not durable. For an answer that it did not
//! get, the length is restored here.
//!
//! # Failure
//! A file may be gone: freed by the server that made it, which knew of no client that had it open, or after the end of the grace period,
//! or with the session of a client that came back too late. Then the answer is `Stale`; a file without a name, which no other client has
//! seen, is made once more.

use super::{Body, Call, body};
use crate::meta::ClientChange;
use crate::meta::{Answer, RequestId};
use crate::rights::Identity;
use crate::rpc::dispatch::reply_to;
use crate::server::Asker;
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::{FileKey, TraceId};
use cuttlefs_common::rpc::{Opened, Reply, RequestHeader, Restored, Rights, Unanswered};
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// Puts the answer to a request into its slot, if an earlier life of the server did it and the slot is fresh.
pub(super) async fn recall(call: &Call<'_>, &Unanswered { slot, seq }: &Unanswered) {
    let Ok(place) = call.session.slot(slot) else { return };
    if !place.lock().is_fresh() {
        return;
    }
    let server = &call.context.server;
    let answer = server.meta.answer_to(RequestId { client: call.session.client(), slot, seq });
    let result = match answer.transpose() {
        None => return,
        Some(Ok(answer)) => match told(call, answer).await {
            Err(Status::Stale) if matches!(answer, Answer::Opened { attr, .. } if attr.nlink == 0) => return,
            result => result,
        },
        Some(Err(status)) => Err(status),
    };
    tracing::debug!(%slot, seq, ?answer, "a request that was done by the server before this one");
    // Told by this server, it is as durable as any answer of its own.
    call.changed.note_records();
    let opened = result.as_ref().ok().and_then(|(_, opened)| *opened);
    let header =
        RequestHeader { slot, seq, trace: TraceId(0), uid: 0, gid: 0, umask: 0, drops_privileges: false };
    let reply = reply_to(call.connection, &header, result.map(|(body, _)| body));
    let is_recalled = place.lock().recall(seq, Arc::from(reply.to_vec()));
    if let Some(filekey) = opened.filter(|_| !is_recalled) {
        server.close(call.session.number(), &[filekey]).await;
    }
}

/// What the request is told, and what that opens.
async fn told(call: &Call<'_>, answer: Answer) -> Result<(Body, Option<FileKey>), Status> {
    let reply = match answer {
        Answer::Done => Reply::Done,
        Answer::Attr(attr) => Reply::Attr(attr),
        Answer::Length(attr) => {
            restore_length(call, &attr).await?;
            Reply::Attr(attr)
        }
        Answer::Opened { attr, rights } => {
            let opened = open(call, &attr, rights).await?;
            return Ok((body(&Reply::Opened(opened))?, Some(opened.filekey)));
        }
        Answer::Written { offset, len, size, change } => Reply::Written { offset, len, size, change },
        Answer::Copied { len, change } => Reply::Copied { len, change },
    };
    Ok((body(&reply)?, None))
}

/// Who asked for it was let, so that rights of now do not matter, but where nothing may be changed any more.
async fn open(call: &Call<'_>, attr: &Attr, rights: Rights) -> Result<Opened, Status> {
    if call.grant.read_only && rights.write {
        return Err(Status::ReadOnly);
    }
    call.context.server.meta.attr(attr.ino)?;
    call.load(call.bind(attr, rights)?, rights).await
}

async fn restore_length(call: &Call<'_>, attr: &Attr) -> Result<(), Status> {
    let server = &call.context.server;
    let file = match server.files.file(attr.ino) {
        // Nobody can see what length it had.
        Err(Status::Stale | Status::NotFound) => return Ok(()),
        file => file?,
    };
    let asker = Asker { who: &Identity::server(), owner: call.session.number(), changed: call.changed };
    let change = ClientChange { client: call.session.client(), change: attr.change };
    let by = (change, call.session.peer().key());
    let disk = call.context.disk.as_ref();
    // Where others have changed it since, theirs stands.
    server.restore(disk, asker, &file, by, Restored::End(attr.size)).await.map(drop)
}
