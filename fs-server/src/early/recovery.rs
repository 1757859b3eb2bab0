//! What the rings of the server before this one hold, done before anybody is served (docs/durability.md).
//!
//! The redo log has been done again by then, written back and begun anew: it says which writes of each ring were executed.
//! A write it does not know of was not seen by anybody, so it may come after everything the log holds.
//!
//! # Invariants
//! * What was executed of a ring is durable before the next file of it is touched, so the last number of a ring that is
//!   durable says of every record whether it was executed, also after a crash on the way.
//! * A ring keeps what it holds until all of it is durable.

use super::execute::is_final;
use super::rot_watch::RotWatch;
use crate::meta::RequestId;
use crate::pool::Disk;
use crate::region::FileRegion;
use crate::server::Server;
use crate::tier::{self, Source, WriteAt};
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::{ClientId, InodeNo};
use cuttlefs_common::rpc::durable::{FoundRing, RingStore, RingStoreError};
use cuttlefs_common::rpc::{EarlyWrite, ring_client, ring_slot};
use cuttlefs_common::status::Status;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Why a ring stops the start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RingRecoveryError {
    /// It cannot be read.
    #[error(
        "a ring cannot be read: {0}; it may hold acknowledged writes. Restore it from a copy, or move it away to go \
             on without what it holds"
    )]
    Rings(#[from] RingStoreError),
    /// What it holds cannot be done.
    #[error(
        "a write of inode {ino} that was acknowledged cannot be executed: {status}; {path} is kept. Mend the pool's \
         devices or make room, then start again"
    )]
    Write { path: PathBuf, ino: InodeNo, status: Status },
}

#[derive(Default)]
struct Counts {
    executed: u64,
    /// The redo log or the pool has them.
    known: u64,
    /// Their files are gone, or they could not have been done at any time.
    gone: u64,
}

/// Executes what rings hold, and removes them: clients that come back are given new ones, and their numbers go on.
///
/// # Errors
/// [`RingRecoveryError`]: nothing of the ring is lost.
pub(crate) async fn recover(
    server: &Server,
    disk: &dyn Disk,
    store: &RingStore,
) -> Result<(), RingRecoveryError> {
    let mut counts = Counts::default();
    for id in store.clients()? {
        if let Some(found) = store.found(id)? {
            execute(server, disk, &found, &mut counts).await?;
            found.executed()?;
        }
        store.remove(id)?;
    }
    let Counts { executed, known, gone } = counts;
    if executed + known + gone > 0 {
        tracing::info!(executed, known, gone, "what rings held is done");
    }
    server.early.recovered.store(executed, Ordering::Relaxed);
    Ok(())
}

async fn execute(
    server: &Server,
    disk: &dyn Disk,
    found: &FoundRing,
    counts: &mut Counts,
) -> Result<(), RingRecoveryError> {
    let failed = |ino| move |status| RingRecoveryError::Write { path: found.path().to_owned(), ino, status };
    let mut changed: Option<Arc<FileRegion>> = None;
    // Of the ring's client, which its first write names.
    let mut done: Option<(ClientId, u64)> = None;
    for request in found.requests() {
        let write = match EarlyWrite::parse(request.body) {
            Ok(write) if ring_client(write.client, write.ring) == found.client() => write,
            _ => {
                tracing::warn!(ring = %found.path().display(), "what is no early write is left out");
                continue;
            }
        };
        let slot = ring_slot(write.ring);
        let last = match done {
            Some((client, last)) if client == write.client => last,
            _ => {
                let record = server.meta.last_request(write.client, slot).map_err(failed(write.ino))?;
                record.map_or(0, |record| record.seq)
            }
        };
        done = Some((write.client, last));
        if request.seq <= last {
            counts.known += 1;
            continue;
        }
        if changed.as_ref().is_some_and(|file| file.ino() != write.ino)
            && let Some(file) = changed.take()
        {
            flush(server, disk, &file).await.map_err(failed(file.ino()))?;
        }
        let id = RequestId { client: write.client, slot, seq: request.seq };
        let watched = RotWatch::new(disk);
        match apply(server, &watched, &write, id).await {
            Ok(file) => {
                changed = Some(file);
                counts.executed += 1;
            }
            Err(status) if is_final(status) => counts.gone += 1,
            Err(_) if watched.saw_rot() => {
                server.early.note_lost(write.client, write.ino);
                counts.gone += 1;
            }
            Err(status) => return Err(failed(write.ino)(status)),
        }
        done = Some((write.client, request.seq));
    }
    if let Some(file) = changed {
        flush(server, disk, &file).await.map_err(failed(file.ino()))?;
    }
    Ok(())
}

async fn apply(
    server: &Server,
    disk: &dyn Disk,
    write: &EarlyWrite<'_>,
    id: RequestId,
) -> Result<Arc<FileRegion>, Status> {
    if server.meta.attr(write.ino)?.kind != FileKind::File {
        return Err(Status::Invalid);
    }
    let file = server.regions.file(write.ino)?;
    let at = write.at.map_or(WriteAt::End, WriteAt::Offset);
    tier::write_for(&server.regions, disk, &file, at, Source::Bytes(write.bytes), Some(id), None).await?;
    Ok(file)
}

/// One file is one batch: its contents, its length and which write was the last are durable together.
async fn flush(server: &Server, disk: &dyn Disk, file: &Arc<FileRegion>) -> Result<(), Status> {
    tier::write_back(&server.regions, disk, std::slice::from_ref(file), true).await
}
