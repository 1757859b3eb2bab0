//! Write-back: makes file contents durable, in groups (docs/ARCHITECTURE.md, "What is durable when").
//!
//! # The four steps of a group
//! 1. dirty frames to SSD;
//! 2. one data sync, shared by all groups that are this far (`DataSync`);
//! 3. one batch: fresh extents as written, lengths;
//! 4. for fsync, `flush` of the store.
//!
//! What a group covers is fixed at its start, file by file, in a snapshot under the mapping's lock; writes go on
//! meanwhile and are for the next group. `settle` keeps pages from leaving a file between its snapshot and its commit.
//!
//! # Failure
//! A file with a page that could not be written is left out of the commit and stays on the list. A failed data sync is
//! final: what is on SSD is unknown, so no write-back succeeds any more until the server is restarted.

use crate::pool::disk::{Disk, LocalFuture};
use crate::region::range_table::PieceState;
use crate::region::{DIRTY_FRACTION, DataCommit, FileRegion, MAX_DIRTY_FILES, RangeUpdate, Regions};
use cuttlefs_common::ids::{FilePage, PoolPage};
use cuttlefs_common::status::Status;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long written bytes stay in memory only, at most, if the disk keeps up.
pub const WRITE_BACK_INTERVAL: Duration = Duration::from_secs(1);
/// Files of one group at most: bounds the batch of the store and how many files are kept from shrinking meanwhile.
const MAX_GROUP_FILES: usize = 256;
/// How often a writer helps to clean frames before it goes on regardless; frames are bounded anyway, and a write
/// without a free frame goes past them.
const RELIEF_ROUNDS: usize = 16;
/// Frames cleaned in one round of help.
const RELIEF_PAGES: usize = 256;

/// Sleeps, as time comes in from outside.
pub trait Timer {
    /// Resolves after `duration`.
    fn sleep(&self, duration: Duration) -> LocalFuture<'static, ()>;
}

/// What of one file a group makes durable.
struct Snapshot {
    commit: DataCommit,
    /// The fresh ranges the commit covers.
    fresh: Vec<(u64, u64)>,
    dirty: BTreeMap<FilePage, PoolPage>,
}

fn snapshot(file: &FileRegion) -> Option<Snapshot> {
    // The mapping first, then the dirty list: a page is on the list before the mapping shows it.
    let (commit, fresh) = file.change_bookkeeping(|state| {
        let fresh = state.table.fresh();
        if !state.uncommitted && fresh.is_empty() {
            return None;
        }
        state.uncommitted = false;
        let mut ranges: Vec<RangeUpdate> = Vec::new();
        for piece in &fresh {
            let mut piece = *piece;
            // With its written neighbours it is one extent in the store as well.
            if let Some(before) = state.table.written_before(&piece) {
                piece.first = before.first;
                piece.pool = before.pool;
                piece.len += before.len;
            }
            if let Some(after) = state.table.written_after(&piece) {
                piece.len += after.len;
            }
            match ranges.last_mut() {
                // Two fresh pieces around one written piece claim it both.
                Some(last) if last.end.0 > piece.first => {
                    let overlap = last.end.0 - piece.first;
                    let extent = last.extents.last_mut().expect("each range here has its extent");
                    extent.len_pages += piece.len - overlap;
                    last.end = FilePage(piece.end());
                }
                _ => ranges.push(RangeUpdate {
                    first: FilePage(piece.first),
                    end: FilePage(piece.end()),
                    extents: vec![piece.extent()],
                }),
            }
        }
        let done = std::mem::take(&mut state.done).into_values().collect();
        let commit = DataCommit { ino: file.ino(), ranges, size: state.size, done };
        Some((commit, fresh.iter().map(|piece| (piece.first, piece.end())).collect()))
    })?;
    let dirty = std::mem::take(&mut *file.dirty.lock());
    Some(Snapshot { commit, fresh, dirty })
}

/// Undoes the snapshot of a file that could not be committed.
fn put_back(regions: &Regions, file: &Arc<FileRegion>, snapshot: Snapshot) {
    {
        let mut dirty = file.dirty.lock();
        for (page, pool) in snapshot.dirty {
            dirty.entry(page).or_insert(pool);
        }
    }
    file.change_bookkeeping(|state| {
        state.uncommitted = true;
        for done in snapshot.commit.done {
            // A later one of the slot says that this one was answered.
            state.done.entry((done.request.client, done.request.slot)).or_insert(done);
        }
    });
    regions.list_dirty(file);
}

/// Makes everything written to these files so far durable in the store's batches, and with `flush` on its disk.
///
/// # Errors
/// `Io` if some page, the sync or the store failed; files that could be written are committed all the same.
pub async fn write_back(
    regions: &Regions,
    disk: &dyn Disk,
    files: &[Arc<FileRegion>],
    flush: bool,
) -> Result<(), Status> {
    let mut files = files.to_vec();
    files.sort_by_key(|file| file.ino());
    files.dedup_by_key(|file| file.ino());
    let mut result = Ok(());
    for group in files.chunks(MAX_GROUP_FILES) {
        result = write_back_group(regions, disk, group).await.and(result);
    }
    result?;
    if flush { release_space(regions).await } else { Ok(()) }
}

async fn write_back_group(
    regions: &Regions,
    disk: &dyn Disk,
    files: &[Arc<FileRegion>],
) -> Result<(), Status> {
    if regions.data_sync.has_failed() {
        return Err(Status::Io);
    }
    // In order of inode, as every group does.
    let mut settled = Vec::with_capacity(files.len());
    for file in files {
        settled.push(file.settle.lock().await);
    }
    let mut group: Vec<(&Arc<FileRegion>, Snapshot)> =
        files.iter().filter_map(|file| Some((file, snapshot(file)?))).collect();
    if group.is_empty() {
        return Ok(());
    }
    let pages = group.iter().flat_map(|(_, snapshot)| snapshot.dirty.values().copied()).collect();
    let mut failed = regions.write_out(disk, pages).await;
    failed.sort_unstable();
    let mut result = Ok(());
    if !failed.is_empty() {
        result = Err(Status::Io);
        let (bad, good) = group.into_iter().partition(|(_, snapshot)| {
            snapshot.dirty.values().any(|page| failed.binary_search(page).is_ok())
        });
        group = good;
        let bad: Vec<_> = bad;
        bad.into_iter().for_each(|(file, snapshot)| put_back(regions, file, snapshot));
    }
    if regions.data_sync.sync(disk).await.is_err() {
        group.into_iter().for_each(|(file, snapshot)| put_back(regions, file, snapshot));
        return Err(Status::Io);
    }
    let commits: Vec<DataCommit> = group.iter().map(|(_, snapshot)| snapshot.commit.clone()).collect();
    let commit = async {
        // What the batch says was done can be found in the log.
        if let Some(log) = regions.redo() {
            log.committed().await?;
        }
        regions.meta.commit_data(&commits)
    };
    if let Err(status) = commit.await {
        group.into_iter().for_each(|(file, snapshot)| put_back(regions, file, snapshot));
        return Err(status);
    }
    for (file, snapshot) in &group {
        file.change_bookkeeping(|state| {
            for (first, end) in &snapshot.fresh {
                state.table.set_state(*first, *end, PieceState::Written);
            }
            state.durable_size = snapshot.commit.size;
        });
    }
    drop(settled);
    result
}

/// Writes back every file there is something to write back of, then flushes the store: whatever was written before
/// the call is durable when it returns, also what another write-back had begun with.
///
/// # Errors
/// As `write_back`.
pub async fn write_back_all(regions: &Regions, disk: &dyn Disk) -> Result<(), Status> {
    // Alone: a file somebody else took off the list and has not finished is one the caller was promised, too.
    let swept = regions.sweep.write().await;
    let mark = regions.redo().map(|log| (log, log.mark()));
    let listed = take_listed(regions, usize::MAX);
    let mut result = write_back(regions, disk, &listed, true).await;
    relist(regions, listed);
    drop(swept);
    regions.trim_active();
    if let Some((log, mark)) = mark {
        match result {
            Ok(()) => result = log.checkpoint(mark).await,
            Err(_) => log.refuse_waiting(),
        }
    }
    result
}

/// Takes files off the list, those with the lowest numbers first.
fn take_listed(regions: &Regions, most: usize) -> Vec<Arc<FileRegion>> {
    let mut list = regions.dirty_files.lock();
    let mut taken = Vec::new();
    while taken.len() < most
        && let Some((_, file)) = list.pop_first()
    {
        // Cleared before anybody looks at the file: whoever changes it from now on lists it again.
        file.listed.store(false, Ordering::Release);
        taken.push(file);
    }
    taken
}

/// Whatever is not clean goes on the list again, so that a failure is not forgotten.
fn relist(regions: &Regions, files: Vec<Arc<FileRegion>>) {
    for file in files {
        if !file.is_clean() && !file.is_reaped() {
            regions.list_dirty(&file);
        }
    }
}

/// Flushes the store and gives out again what was quarantined before.
///
/// # Errors
/// What the store says; then nothing is given out.
pub async fn release_space(regions: &Regions) -> Result<(), Status> {
    let mark = regions.space.quarantine_mark();
    regions.meta.flush().await?;
    regions.space.release_quarantined(mark);
    Ok(())
}

/// Before a write adds to them: if too many frames are dirty or too many files wait, helps to write back. Holds no
/// lock, so it cannot be in anybody's way; gives up after a while, so it cannot hang on a failing disk.
pub(super) async fn relieve(regions: &Regions, disk: &dyn Disk) {
    let bound = u64::from(regions.frames().usable()) / DIRTY_FRACTION;
    for _ in 0..RELIEF_ROUNDS {
        if regions.residency.dirty() <= bound {
            break;
        }
        if regions.clean(disk, RELIEF_PAGES).await == 0 {
            // Others have those pages locked; they are about to be done.
            futures_lite::future::yield_now().await;
        }
    }
    if regions.dirty_files.lock().len() > MAX_DIRTY_FILES {
        let _swept = regions.sweep.read().await;
        let listed = take_listed(regions, MAX_GROUP_FILES);
        // A failure was logged, and the files are on the list again.
        let _ = write_back(regions, disk, &listed, false).await;
        relist(regions, listed);
    }
}

/// Writes back every second, and when the log has no room, until `stopped` is set.
pub async fn run_write_back(regions: &Regions, disk: &dyn Disk, timer: &dyn Timer, stopped: &AtomicBool) {
    while !stopped.load(Ordering::Acquire) {
        match regions.redo() {
            Some(log) => {
                let pressed = log.pressed();
                futures_lite::future::or(timer.sleep(WRITE_BACK_INTERVAL), pressed).await;
            }
            None => timer.sleep(WRITE_BACK_INTERVAL).await,
        }
        if let Err(status) = write_back_all(regions, disk).await {
            tracing::error!(%status, "write-back failed; it is tried again in a second");
        }
    }
}
