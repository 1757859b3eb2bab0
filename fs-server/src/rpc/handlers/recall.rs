//! Requests that an earlier server did, and whose answers did not reach their clients.
//!
//! A client sends a request again until it is answered. During the life of a server the slot keeps the answer. After that, metadata has it
//! (`meta/answer.rs`). A client that comes back names the requests to which it has no answer. Their answers are put into their slots as if this
//! server had given them, and from then on the slots answer.
//!
//! If such an answer opens a file, the file is opened here, because a filekey, a file slot and a ticket belong to one life of the server. So a file
//! that has lost its last name meanwhile stays, like any open file. Until its client has come back, the grace period keeps it.
//!
//! A client that has the answer to a change of length restores the length if it is not durable. If it has no answer, the length is restored here.
//!
//! # Failure
//! A file may have been freed: by the server that made it, which knew of no client that had it open, or at the end of the grace period, or with the
//! session of a client that came back too late. Then the answer is `Stale`. If the request made a file without a name, which no other client has
//! seen, the request is run again instead.

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

/// Puts the answer to a request into its slot, if an earlier server did the request and the slot is fresh.
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
    // Like any answer of this server, it must be durable before it is given.
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

/// The answer to the request, and the filekey of the file that it opens.
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

/// Opens the file of an answer. The request was allowed when it was done, so today's rights do not matter, unless the export has become read-only.
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
        // The file is gone, so nobody can see its length.
        Err(Status::Stale | Status::NotFound) => return Ok(()),
        file => file?,
    };
    let asker = Asker { who: &Identity::server(), owner: call.session.number(), changed: call.changed };
    let change = ClientChange { client: call.session.client(), change: attr.change };
    let by = (change, call.session.peer().key());
    let disk = call.context.disk.as_ref();
    // If other clients have changed the file since, their changes stay.
    server.restore(disk, asker, &file, by, Restored::End(attr.size)).await.map(drop)
}
