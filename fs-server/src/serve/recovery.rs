//! Recovery behind the store's own: what batches promise of the pool, before anybody is served.
//!
//! docs/log.md has the decision table, "Recovery, whole". Its rows about files and batches are `meta::disk_store`'s; those about cuts, orphans
//! and requests are done where these live, of records that are whole by then. What is left is here:
//!
//! | found | done |
//! | --- | --- |
//! | images of pages | each is written to the page that its extent names; one data sync; one batch removes all of them |
//! | an image without such a page | damage: it is left out, and the log says so |
//! | batches that a killed server had not synced | one sync: whatever is told from here on may rest on them |
//!
//! # Failure
//! The server does not start. Until the batch that removes them is in the log, the next start finds all images.

use crate::pages;
use crate::pool::Disk;
use crate::server::Server;

/// Images that are read and written at once: 1 MiB.
const IMAGES_AT_ONCE: usize = 256;

/// Recovers.
///
/// # Errors
/// What stands in the way, with what to do.
pub(super) async fn run(server: &Server, disk: &dyn Disk) -> Result<(), String> {
    put_images(server, disk).await?;
    let flushed = server.files.committer.flush().await;
    flushed.map_err(|status| format!("metadata cannot be made durable: {status}"))
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
        pages::put_in_place(disk, placed).await.map_err(|error| {
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
    tracing::info!(pages = put, "synced pages were put in their places");
    Ok(())
}
