//! Loading: reads all pages of a file into frames (region policy `pin`), where they stay.
//!
//! # How it works
//! For each batch: take the mapping's shared lock and the pages' block locks, do one IO for each group of neighbours, publish. There is a frame for
//! each page of the pool, and the block locks keep two loads from taking two frames for one page.
//!
//! # Failure
//! If a page cannot be read, the load fails with `Io`, and with it the open, so that a file that is open for reading is in frames as a whole. Loaded
//! pages stay loaded.

use super::{FileRegion, Files};
use crate::pool::disk::Disk;
use cuttlefs_common::ids::{FilePage, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::size::ByteSize;
use cuttlefs_common::status::Status;

/// Pages of one batch: 1 MiB, like the largest request.
const BATCH_PAGES: usize = 256;
/// Pages that are examined at a time under the mapping's lock: a fraction of a millisecond.
const LOOK_PAGES: u64 = 64 * 1024;
/// The load of at least this many pages is logged: on a slow disk its open takes noticeably long (64 MiB).
const NOTABLE_PAGES: u64 = 16 * 1024;

/// Makes all of the file resident. Returns how many pages were read.
///
/// # Errors
/// `Io` if a page cannot be read, or there is no frame for it; `Stale` if the file was reaped.
pub async fn load(files: &Files, disk: &dyn Disk, file: &FileRegion) -> Result<u64, Status> {
    let pages = file.allocated_pages();
    let notable = pages >= NOTABLE_PAGES;
    let mut next = 0;
    let mut loaded = 0;
    while let Some((batch, after)) = absent(files, file, next) {
        next = after;
        if batch.is_empty() {
            futures_lite::future::yield_now().await;
            continue;
        }
        if notable && loaded == 0 {
            let size = ByteSize(pages * PAGE_SIZE_U64);
            tracing::info!(ino = %file.ino(), %size, "loading a file into memory before its open is answered");
        }
        loaded += load_batch(files, disk, file, &batch).await?;
    }
    if notable && loaded > 0 {
        tracing::info!(ino = %file.ino(), loaded = %ByteSize(loaded * PAGE_SIZE_U64), "a file is in memory");
    }
    Ok(loaded)
}

/// The pages with bytes that are not resident, from `first` on, and the page at which to continue; `None` at the end of the file.
fn absent(files: &Files, file: &FileRegion, first: u64) -> Option<(Vec<FilePage>, u64)> {
    let state = file.state();
    let end = state.size.div_ceil(PAGE_SIZE_U64);
    if first >= end {
        return None;
    }
    let mut found = Vec::new();
    let stop = end.min(first + LOOK_PAGES);
    for piece in state.table.pieces_in(first, stop).filter(|piece| piece.state.has_bytes()) {
        for page in piece.first..piece.end() {
            if found.len() == BATCH_PAGES {
                return Some((found, page));
            }
            let pool = PoolPage(piece.pool + (page - piece.first));
            if !files.pages.is_resident(pool) {
                found.push(FilePage(page));
            }
        }
    }
    Some((found, stop))
}

async fn load_batch(
    files: &Files,
    disk: &dyn Disk,
    file: &FileRegion,
    batch: &[FilePage],
) -> Result<u64, Status> {
    let _mapping = file.order.read().await;
    file.usable()?;
    // The mapping as of now, which stays until the lock is released.
    let mut pools: Vec<(PoolPage, FilePage)> = {
        let state = file.state();
        let mapped = batch.iter().filter_map(|page| Some((*page, state.table.get(*page)?)));
        mapped.filter(|(_, (_, piece))| piece.has_bytes()).map(|(page, (pool, _))| (pool, page)).collect()
    };
    pools.sort_unstable();
    files.pages.load(disk, file.ino(), pools).await
}
