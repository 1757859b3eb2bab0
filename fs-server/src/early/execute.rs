//! Executing early writes on a worker: as an ordinary write, but for the space it may take and the number under which it
//! is remembered.
//!
//! The answer goes out once the write is applied. It need not wait for the redo log: the ring holds the write until the
//! log does.
//!
//! # Failure
//! A write that fails for a device, and whatever stands behind it in its ring, is *owed*: the next start executes it.
//! Before its sender hears so, its file is closed to everybody (`Regions::close_contents`). So nothing that somebody
//! did knowing of the failure is older than the write, and nothing that anybody is shown lacks it.

use super::ring::{Progress, Ring};
use super::rot_watch::RotWatch;
use crate::meta::RequestId;
use crate::rpc::turns::Claim;
use crate::rpc::worker::WorkerContext;
use crate::server::Server;
use crate::tier::{self, Source, WriteAt, Written};
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::rpc::durable::{Executed, Request};
use cuttlefs_common::rpc::{EarlyWrite, EarlyWritten};
use cuttlefs_common::status::Status;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Executes a ring's writes, one after the other, until there is none.
pub(crate) async fn run(context: Rc<WorkerContext>, ring: Arc<Ring>) {
    while let Some(job) = ring.next() {
        // A client takes turns with itself: all its requests are one queue there. What a client that is gone left behind is
        // the server's own to do.
        let session = context.server.sessions.of(ring.client);
        let peer = session.map_or_else(|| context.server.shares.own(), |session| session.peer().clone());
        let turn = context.turns.take(&Claim::new(&peer, ring.client.0 as u64)).await;
        let mut answer = Vec::new();
        let executed = execute(&context, &ring, &job.request(ring.id), &mut answer).await;
        drop(turn);
        job.finish(executed, answer);
        futures_lite::future::yield_now().await;
    }
}

async fn execute(
    context: &WorkerContext,
    ring: &Ring,
    request: &Request<'_>,
    answer: &mut Vec<u8>,
) -> Executed {
    let Progress { done, failed } = *ring.progress.lock();
    let Ok(write) = EarlyWrite::parse(request.body) else {
        return Executed::Done(Status::Malformed.code());
    };
    if let Some(status) = failed.filter(|_| request.seq > done) {
        return owe(&context.server, &write, status);
    }
    let id = RequestId { client: ring.client, slot: ring.slot, seq: request.seq };
    let disk = RotWatch::new(context.disk.as_ref());
    let result = if request.seq <= done {
        again(context, &write, id)
    } else {
        apply(context, &disk, ring, &write, id).await
    };
    match result {
        Ok(written) => {
            answer.extend_from_slice(&written.encode());
            Executed::Done(0)
        }
        Err(status) if is_final(status) || disk.saw_rot() => {
            if disk.saw_rot() {
                context.server.early.note_lost(ring.client, write.ino);
            }
            let mut progress = ring.progress.lock();
            progress.done = progress.done.max(request.seq);
            Executed::Done(status.code())
        }
        Err(status) => {
            fail(ring, status);
            owe(&context.server, &write, status)
        }
    }
}

/// A ring's next write cannot be executed before the next start, and so can none behind it.
pub(super) fn fail(ring: &Ring, status: Status) {
    if ring.fail(status) {
        tracing::error!(
            client = %ring.client,
            %status,
            "an acknowledged write could not be executed; it is kept in its ring, which takes nothing more, and the files \
             that it and those behind it change can be neither read nor changed until it is. Check the pool's devices, \
             then restart the server: it executes them first"
        );
    }
}

/// A write stays in its ring for the next start. Its file is closed before anybody hears of that.
pub(super) fn owe(server: &Server, write: &EarlyWrite<'_>, status: Status) -> Executed {
    if server.regions.close_contents(write.ino) {
        tracing::warn!(ino = %write.ino, "a file is closed until the restart: a write of it was acknowledged and not executed");
    }
    Executed::Kept(status.code())
}

/// Whether a write would fail so again, whenever it was tried: nothing of it is lost.
pub(super) fn is_final(status: Status) -> bool {
    matches!(
        status,
        Status::NotFound
            | Status::Stale
            | Status::Invalid
            | Status::IsDirectory
            | Status::TooLarge
            | Status::Malformed
    )
}

/// A write that was executed before, under this or an earlier connection.
fn again(context: &WorkerContext, write: &EarlyWrite<'_>, id: RequestId) -> Result<EarlyWritten, Status> {
    let meta = &context.server.meta;
    let attr = meta.attr(write.ino)?;
    let placed = meta.request_done(id).ok().flatten().and_then(|record| record.placed);
    let offset = write.at.or(placed.map(|placed| placed.offset)).unwrap_or(u64::MAX);
    Ok(EarlyWritten { offset, size: attr.size, change: attr.change })
}

async fn apply(
    context: &WorkerContext,
    disk: &RotWatch<'_>,
    ring: &Ring,
    write: &EarlyWrite<'_>,
    id: RequestId,
) -> Result<EarlyWritten, Status> {
    let server = &context.server;
    if server.meta.attr(write.ino)?.kind != FileKind::File {
        return Err(Status::Invalid);
    }
    let file = server.regions.file(write.ino)?;
    let at = write.at.map_or(WriteAt::End, WriteAt::Offset);
    let source = Source::Bytes(write.bytes);
    let reserve = Some(&ring.reserve);
    let written = tier::write_for(&server.regions, disk, &file, at, source, Some(id), reserve).await?;
    ring.progress.lock().done = id.seq;
    let Written { offset, len, attr } = written;
    server.counters.written_bytes.fetch_add(u64::from(len), Ordering::Relaxed);
    Ok(EarlyWritten { offset, size: attr.size, change: attr.change })
}
