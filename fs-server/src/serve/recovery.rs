//! Recovery: pages that have images are put in their places, what the redo log holds is done again, then what rings hold is
//! done, before anybody is served (docs/log.md and docs/durability.md have the decision tables; rings: `early/recovery.rs`).
//!
//! # Invariants
//! * Until all of it is in the pool and in metadata, durably, nothing of the log changes: a crash on the way finds the
//!   same log.
//! * Changes of recovery are not logged: the log begins its new life afterwards.

use crate::early;
use crate::log::{Again, Contents, FileChanges, FileLog, LogDevice, LogError, RedoLog};
use crate::pool::Disk;
use crate::region::FileRegion;
use crate::rights::Identity;
use crate::server::Server;
use crate::tier::{self, Source, WriteAt};
use cuttlefs_common::attr::{FileKind, SetAttr, SetTime, Timestamp};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::RegionOwner;
use cuttlefs_common::rpc::durable::RingStore;
use cuttlefs_common::rpc::{Allocate, MAX_TRANSFER_BYTES};
use cuttlefs_common::status::Status;
use std::path::Path;
use std::sync::Arc;

/// Images that are read and written at once: 1 MiB.
const IMAGES_AT_ONCE: usize = 256;

/// The redo log a server starts with.
pub struct LogParts {
    /// Where it is.
    pub device: Arc<dyn LogDevice>,
    /// What the server before this one left in it.
    pub held: Contents,
    /// Changes are logged from now on, too: every answered mutation is durable.
    pub acknowledges: bool,
}

impl LogParts {
    /// The log in a pool's directory for it, if there is one.
    ///
    /// # Errors
    /// [`LogError`]: something that was acknowledged cannot be read.
    pub fn found(directory: &Path, acknowledges: bool) -> Result<Option<Self>, LogError> {
        let Some(device) = FileLog::open(directory)? else {
            return Ok(None);
        };
        let held = Contents::read(&device)?;
        Ok(Some(Self { device: Arc::new(device), held, acknowledges }))
    }
}

/// What recovery did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Records found.
    pub records: usize,
    /// Files changed.
    pub files: usize,
    /// Files whose changes were not needed: they are gone.
    pub gone: usize,
}

/// Why acknowledged changes could not be done again.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "changes of inode {ino} that were acknowledged cannot be done again: {status}; the redo log is kept. Mend the pool's \
     devices or make room, then start again"
)]
pub struct RecoveryError {
    ino: InodeNo,
    status: Status,
}

/// Does again what the log holds, and begins its new life.
///
/// # Errors
/// [`RecoveryError`]; the log is as it was.
pub(super) async fn recover(
    server: &Server,
    disk: &dyn Disk,
    held: Contents,
) -> Result<Recovered, RecoveryError> {
    let mut recovered = Recovered { records: held.records, ..Recovered::default() };
    if held.is_empty() {
        return Ok(recovered);
    }
    let begun = server.clock.monotonic();
    tracing::info!(
        records = held.records,
        "the server before this one ended early; doing again what it had acknowledged"
    );
    let failed = |ino| move |status| RecoveryError { ino, status };
    for (ino, file_changes) in held.net.files {
        let attr = match server.meta.attr(ino) {
            Ok(attr) if attr.kind == FileKind::File => attr,
            Ok(_) | Err(Status::NotFound | Status::Stale) => {
                recovered.gone += 1;
                continue;
            }
            Err(status) => return Err(failed(ino)(status)),
        };
        let (mtime, ctime) = match file_changes.modified {
            Some((at, before)) if attr.change <= before => (at, at),
            // Metadata knows of it.
            _ => (attr.mtime, attr.ctime),
        };
        let again = async {
            let file = server.regions.file(ino)?;
            // Before anything is done: the next recovery, should this one be cut off, takes the times that it finds.
            server.meta.hold_times(ino, mtime, ctime)?;
            do_again(server, disk, &file, file_changes, (mtime, ctime)).await?;
            tier::note_modified(&server.regions, &file);
            server.meta.release_times(ino);
            Ok(())
        };
        again.await.map_err(failed(ino))?;
        recovered.files += 1;
    }
    tier::write_back_all(&server.regions, disk).await.map_err(failed(InodeNo(0)))?;
    let took_ms = (server.clock.monotonic() - begun).as_millis() as u64;
    let Recovered { records, files, gone } = recovered;
    tracing::info!(records, files, gone, took_ms, "recovery is done");
    Ok(recovered)
}

async fn do_again(
    server: &Server,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    file_changes: FileChanges,
    (mtime, ctime): (Timestamp, Timestamp),
) -> Result<(), Status> {
    let regions = &server.regions;
    for (request, placed) in file_changes.done.into_values() {
        tier::note_done(regions, file, request, placed);
    }
    for change in file_changes.changes {
        match change {
            Again::Write { offset, bytes } => {
                for (index, part) in bytes.chunks(MAX_TRANSFER_BYTES as usize).enumerate() {
                    let at = WriteAt::Offset(offset + index as u64 * u64::from(MAX_TRANSFER_BYTES));
                    tier::write(regions, disk, file, at, Source::Bytes(part)).await?;
                }
            }
            Again::AtLeast(size) if file.size() >= size => {}
            Again::Length(size) | Again::AtLeast(size) => {
                let (size_set, mtime) = (Some(size), Some(SetTime::At(mtime)));
                let set = SetAttr { size: size_set, mtime, ctime: Some(ctime), ..SetAttr::default() };
                server
                    .truncate(disk, &Identity::server(), RegionOwner::default(), file.ino(), size, &set)
                    .await?;
            }
            Again::Reserve { offset, len } => {
                let how = Allocate::Reserve { keep_size: true };
                match tier::allocate_range(regions, disk, file, offset, len, how).await {
                    // Nothing is in it, and what it was to be kept for comes next.
                    Ok(_) | Err(Status::NoSpace) => {}
                    Err(status) => return Err(status),
                }
            }
            Again::Zeros { offset, len, keep_space } => {
                let zero = Allocate::ZeroRange { keep_size: true };
                let how = if keep_space { zero } else { Allocate::PunchHole };
                match tier::allocate_range(regions, disk, file, offset, len, how).await {
                    // What it had reserved went elsewhere since; as a hole the range reads the same.
                    Err(Status::NoSpace) => {
                        tier::punch_hole(regions, disk, file, offset, len).await?;
                    }
                    other => {
                        other?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Puts what was synced, and is in images only, in its places.
async fn put_images(server: &Server, disk: &dyn Disk) -> Result<(), String> {
    let (mut behind, mut put) = (None, 0);
    loop {
        let images = server.meta.images(behind, IMAGES_AT_ONCE);
        let images = images.map_err(|status| format!("images of pages cannot be read: {status}"))?;
        let Some(last) = images.last() else { break };
        behind = Some((last.ino, last.page));
        for stray in images.iter().filter(|image| image.pool_page.is_none()) {
            tracing::error!(ino = %stray.ino, page = %stray.page, "an image of a page that holds no bytes is left out: metadata is damaged; run cuttlefsd fsck");
        }
        let placed: Vec<_> =
            images.into_iter().filter_map(|image| Some((image.pool_page?, image.bytes))).collect();
        put += placed.len();
        tier::put_in_place(disk, placed).await.map_err(|error| {
            format!("synced pages cannot be put in their places: {error}; mend the pool's devices, then start again")
        })?;
    }
    if behind.is_none() {
        return Ok(());
    }
    let synced = disk.sync().await;
    synced.map_err(|error| format!("synced pages cannot be put in their places: {error}"))?;
    let dropped = server.meta.drop_images();
    dropped.map_err(|status| format!("images of pages cannot be removed: {status}"))?;
    let flushed = server.regions.meta.flush().await;
    flushed.map_err(|status| format!("metadata cannot be made durable: {status}"))?;
    tracing::info!(pages = put, "synced pages were put in their places");
    Ok(())
}

/// Recovers what images hold, what the log holds, then what rings hold, and starts the log where changes are to be logged.
///
/// # Errors
/// What stands in the way, with what to do.
pub(super) async fn run(
    server: &Server,
    disk: &dyn Disk,
    log: Option<LogParts>,
    rings: Option<&RingStore>,
    random: &dyn cuttlefs_common::world::Random,
    threaded: bool,
) -> Result<(), String> {
    // First: whatever is done again is done over them.
    put_images(server, disk).await?;
    let mut begun = None;
    if let Some(LogParts { device, held, acknowledges }) = log {
        let turn = held.header.turn;
        if !held.is_empty() {
            // A killed server may have written what it had not synced. What is done again must be found by the next recovery,
            // too, should this one be cut off: without it an older record would go over what is in the pool by then.
            device
                .sync()
                .map_err(|error| format!("the redo log cannot be made durable: {error}; check its device"))?;
        }
        recover(server, disk, held).await.map_err(|error| error.to_string())?;
        // Also where changes are not logged from now on: what the log held must not be done again over newer ones, such as
        // those that rings hold.
        let log = RedoLog::begin(device, turn, server.clock.clone(), random, threaded)
            .map_err(|error| format!("the redo log cannot be started: {error}; check its device"))?;
        if acknowledges {
            begun = Some(log);
        } else {
            log.stop();
        }
    }
    if let Some(rings) = rings {
        early::recover(server, disk, rings).await.map_err(|error| error.to_string())?;
    }
    if let Some(log) = begun {
        server.regions.start_log(log);
    }
    Ok(())
}
