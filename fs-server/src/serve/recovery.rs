//! Recovery behind the store's own: the promises of batches about the pool, before any client is served.
//!
//! docs/log.md has the decision table, "Recovery, whole". Its rows about files and batches are `meta::disk_store`'s; those about cuts, orphans
//! and requests are in the modules of these, and work on records that are whole by then. The rest is here:
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

/// What stands in the way of a start.
#[derive(Debug, thiserror::Error)]
pub enum RecoveryError {
    /// The store's disk fails.
    #[error("{what}: {status}; the log above names the disk")]
    Store {
        /// What cannot be done.
        what: &'static str,
        /// What the store said.
        status: Status,
    },
    /// The pool's disk fails.
    #[error("synced pages cannot be put in their places: {0}; mend the pool's devices, then start again")]
    Disk(#[from] IoError),
    /// Their data sync fails.
    #[error("synced pages cannot be put in their places: {0}; mend the pool's devices, then start again")]
    Sync(std::io::Error),
    /// Nobody waits for it any more.
    #[error("it was stopped")]
    Stopped,
}

fn store_fails(what: &'static str) -> impl FnOnce(Status) -> RecoveryError {
    move |status| RecoveryError::Store { what, status }
}

/// Recovers.
///
/// # Errors
/// What stands in the way.
pub(super) async fn run(server: &Server, disk: &dyn Disk) -> Result<(), RecoveryError> {
    put_images(server, disk).await?;
    server.files.committer.flush().await.map_err(store_fails("metadata cannot be made durable"))
}

/// Puts what was synced, and is in images only, in its places.
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
