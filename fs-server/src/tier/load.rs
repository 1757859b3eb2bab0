//! Loading: brings every page of a file into frames (region policy `pin`), where all of them stay.
//!
//! # How it works
//! Batch after batch: the mapping's shared lock, the pages' block locks, one IO for each group of neighbours, publish.
//! There is a frame for each page of the pool, and the block locks keep two loads from taking two for one page.
//!
//! # Failure
//! A page that cannot be read fails the load with `Io`, and so the open: a file that is open for reading is all in
//! frames. What was loaded before stays.

use crate::pool::disk::{Disk, IoBuffer, IoKind, IoRequest};
use crate::region::{FileRegion, PrivateFrame, Regions, add};
use cuttlefs_common::ids::{FilePage, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::size::ByteSize;
use cuttlefs_common::status::Status;

/// Pages of one batch: 1 MiB, as the largest request.
const BATCH_PAGES: usize = 256;
/// Pages of one IO at most, as of a fetch.
const MAX_IO_PAGES: usize = 64;
/// Pages looked at under the mapping's lock at once: a fraction of a millisecond.
const LOOK_PAGES: u64 = 64 * 1024;
/// From so many pages to load on, the log says so: on a slow disk whoever opened it waits noticeably (64 MiB).
const NOTABLE_PAGES: u64 = 16 * 1024;

/// Makes all of the file resident. Returns how many pages had to be read.
///
/// # Errors
/// `Io` if a page cannot be read, or there is no frame for it; `Stale` if the file was reaped.
pub async fn load(regions: &Regions, disk: &dyn Disk, file: &FileRegion) -> Result<u64, Status> {
    let pages = file.allocated_pages();
    let notable = pages >= NOTABLE_PAGES;
    let mut next = 0;
    let mut loaded = 0;
    while let Some((batch, after)) = absent(regions, file, next) {
        next = after;
        if batch.is_empty() {
            futures_lite::future::yield_now().await;
            continue;
        }
        if notable && loaded == 0 {
            let size = ByteSize(pages * PAGE_SIZE_U64);
            tracing::info!(ino = %file.ino(), %size, "loading a file into memory before its open is answered");
        }
        loaded += load_batch(regions, disk, file, &batch).await?;
    }
    if notable && loaded > 0 {
        tracing::info!(ino = %file.ino(), loaded = %ByteSize(loaded * PAGE_SIZE_U64), "a file is in memory");
    }
    Ok(loaded)
}

/// Pages with bytes that are not resident, from `first` on, and where to go on; `None` at the end of the file.
fn absent(regions: &Regions, file: &FileRegion, first: u64) -> Option<(Vec<FilePage>, u64)> {
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
            if !regions.residency.load(pool).is_resident() {
                found.push(FilePage(page));
            }
        }
    }
    Some((found, stop))
}

async fn load_batch(
    regions: &Regions,
    disk: &dyn Disk,
    file: &FileRegion,
    batch: &[FilePage],
) -> Result<u64, Status> {
    let _mapping = file.order.read().await;
    file.usable()?;
    // As mapped now, and until the lock goes.
    let mut pools: Vec<(PoolPage, FilePage)> = {
        let state = file.state();
        let mapped = batch.iter().filter_map(|page| Some((*page, state.table.get(*page)?)));
        mapped.filter(|(_, (_, piece))| piece.has_bytes()).map(|(page, (pool, _))| (pool, page)).collect()
    };
    pools.sort_unstable();
    let _guards = regions.locks.lock_many(pools.iter().map(|(pool, _)| *pool)).await;
    pools.retain(|(pool, _)| !regions.residency.load(*pool).is_resident());
    let mut groups: Vec<Vec<(PoolPage, FilePage, PrivateFrame)>> = Vec::new();
    for (pool, page) in pools {
        let Some(frame) = regions.take_frame() else {
            tracing::error!(ino = %file.ino(), "there is no frame for a page of a file that is to be in memory");
            return Err(Status::Io);
        };
        match groups.last_mut() {
            Some(group)
                if group.len() < MAX_IO_PAGES
                    && group.last().is_some_and(|(last, ..)| last.0 + 1 == pool.0) =>
            {
                group.push((pool, page, frame));
            }
            _ => groups.push(vec![(pool, page, frame)]),
        }
    }
    groups.iter_mut().flatten().for_each(|(.., frame)| frame.io_begins());
    let requests = groups
        .iter()
        .map(|group| IoRequest {
            kind: IoKind::Read,
            offset: group[0].0.byte_offset(),
            buffer: IoBuffer::Frames(group.iter().map(|(.., frame)| frame.index()).collect()),
        })
        .collect();
    let mut loaded = 0;
    let mut result = Ok(());
    for (group, done) in groups.into_iter().zip(disk.submit(requests).await) {
        for (pool, page, mut frame) in group {
            frame.io_ended();
            match &done.result {
                Err(error) if error.concerns(pool) => {
                    regions.note_unreadable(error, file.ino(), page, pool);
                    result = Err(Status::Io);
                }
                _ => {
                    regions.residency.publish(pool, frame, false);
                    loaded += 1;
                }
            }
        }
    }
    add(&regions.counters.promoted, loaded);
    result.map(|()| loaded)
}
