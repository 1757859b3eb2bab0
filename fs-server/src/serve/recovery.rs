//! Recovery after the store's own: everything that the batches promise about the pool, before any client is served.
//!
//! docs/log.md has the decision table, "Recovery, whole". The rows about files and batches are in `meta::disk_store`. Those about cuts, orphans and
//! requests are in the modules of these, and work on records that are whole by then. The rest is here:
//!
//! | found | action |
//! | --- | --- |
//! | images of pages | each is written to the page that its extent names; one data sync; one batch removes all of them |
//! | an image without such a page | damage: it is left out, and a message says so |
//! | batches that a killed server had not synced | one sync: every answer from here on may rest on them |
//!
//! # Failure
//! The server does not start. Until the batch that removes them is in the log, the next start finds all images.

use crate::pages;
use crate::pool::Disk;
use crate::pool::disk::IoError;
use crate::server::Server;
use cuttlefs_common::status::Status;

/// Images that are read and written at once: 1 MiB.
const IMAGES_AT_ONCE: usize = 256;

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum RecoveryError {
    /// The store's disk failed.
    #[error("{what}: {status}; the log above names the disk")]
    Store {
        /// The action that failed.
        what: &'static str,
        /// The store's error.
        status: Status,
    },
    /// The pool's disk failed.
    #[error(
        "synced pages cannot be put in their places: {0}; mend the pool's devices, or make room on their file system, then start again"
    )]
    Disk(#[from] IoError),
    /// The sync of the pool's disk failed.
    #[error(
        "synced pages cannot be put in their places: {0}; mend the pool's devices, or make room on their file system, then start again"
    )]
    Sync(std::io::Error),
    /// The start was cancelled.
    #[error("it was stopped")]
    Stopped,
}

fn store_fails(what: &'static str) -> impl FnOnce(Status) -> RecoveryError {
    move |status| RecoveryError::Store { what, status }
}

/// Recovers.
///
/// # Errors
/// If a disk fails, or the start is cancelled.
pub(super) async fn run(server: &Server, disk: &dyn Disk) -> Result<(), RecoveryError> {
    put_images(server, disk).await?;
    server.files.committer.flush().await.map_err(store_fails("metadata cannot be made durable"))
}

/// Writes the pages that have images to their places.
async fn put_images(server: &Server, disk: &dyn Disk) -> Result<(), RecoveryError> {
    let (mut behind, mut put) = (None, 0);
    loop {
        let images = server.meta.images(behind, IMAGES_AT_ONCE);
        let images = images.map_err(store_fails("images of pages cannot be read"))?;
        let Some(last) = images.last() else { break };
        behind = Some((last.ino, last.page));
        for stray in images.iter().filter(|image| image.pool_page.is_none()) {
            tracing::error!(ino = %stray.ino, page = %stray.page, "an image of a page that holds no bytes is left out: metadata is damaged; run cuttlefsd fsck");
        }
        let placed: Vec<_> =
            images.into_iter().filter_map(|image| Some((image.pool_page?, image.bytes))).collect();
        put += placed.len();
        pages::put_in_place(disk, placed).await?;
    }
    if behind.is_none() {
        return Ok(());
    }
    disk.sync().await.map_err(RecoveryError::Sync)?;
    server.meta.drop_images().map_err(store_fails("images of pages cannot be removed"))?;
    tracing::info!(pages = put, "synced pages were put in their places");
    Ok(())
}
