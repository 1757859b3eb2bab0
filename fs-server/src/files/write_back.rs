//! Write-back: makes file contents durable, in groups (docs/recovery.md, "What is durable when").
//!
//! # The four steps of a group
//! 1. dirty frames are written to SSD;
//! 2. one data sync, shared by all groups that are this far (`DataSync`);
//! 3. one batch: fresh extents become written, lengths are set, images of the files' pages are removed;
//! 4. for fsync, a flush of the store.
//!
//! An fsync of few pages goes another way, and its pages are written back here later (`images`).
//!
//! The contents of a group are fixed at its start, file by file, in a snapshot under the mapping's lock. Later writes belong to the next group.
//! `settle` keeps pages from leaving a file between its snapshot and its commit.
//!
//! # Failure
//! A file with a page that could not be written is left out of the commit and stays on the list. So do all pages that were taken and not committed,
//! also if the future is dropped or its task panics (`Taken`, `Listed`): a later fsync cannot find an empty list and report success. A failed data
//! sync is final: the contents of the SSD are unknown, so every write-back fails until the server is restarted.

use super::file_region::DirtyPage;
use super::range_table::{Piece, PieceState, RangeTable};
use super::{FileRegion, FileState, Files};
use crate::meta::{Covers, CutStep, DataCommit, Images, RangeUpdate};
use crate::pool::disk::Disk;
use crate::sync::{AsyncRwLock, Mutex};
use crate::timer::Timer;
use cuttlefs_common::ids::{FilePage, InodeNo};
use cuttlefs_common::panic_ends;
use cuttlefs_common::status::Status;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long written bytes stay in memory only, if the disk keeps up.
pub const WRITE_BACK_INTERVAL: Duration = Duration::from_secs(1);
/// Most files of one group. That bounds the store's batch, and how many files cannot shrink meanwhile.
const MAX_GROUP_FILES: usize = 256;
/// Runs of pages that become free together. Allocations meanwhile wait for these at most.
const RELEASE_BATCH: usize = 4096;

/// Most files that wait for write-back before writers help. That bounds the memory that a flood of small files takes.
const MAX_DIRTY_FILES: usize = 16 * 1024;

/// The files that wait for write-back.
#[derive(Debug, Default)]
pub(super) struct DirtyFiles {
    /// By inode, so that groups are taken in lock order.
    list: Mutex<BTreeMap<InodeNo, Arc<FileRegion>>>,
    /// Held while files that were taken off the list are being written back: shared by writers that help, exclusive for a write-back that must not
    /// leave anything out. Taken before any other lock.
    sweep: AsyncRwLock<()>,
}

impl DirtyFiles {
    /// The number of files.
    pub(super) fn len(&self) -> usize {
        self.list.lock().len()
    }

    /// Whether a file is on the list.
    #[cfg(feature = "model-check")]
    pub(super) fn has(&self, ino: InodeNo) -> bool {
        self.list.lock().contains_key(&ino)
    }

    /// Puts a file on the list.
    pub(super) fn list(&self, file: &Arc<FileRegion>) {
        if !file.listed.swap(true, Ordering::AcqRel) {
            self.list.lock().insert(file.ino(), file.clone());
        }
    }

    /// Removes an inode that is gone.
    pub(super) fn remove(&self, ino: InodeNo) {
        self.list.lock().remove(&ino);
    }
}

/// The changes of one file that a group makes durable, taken from the file. Changes that were not committed are given back when this is dropped, so
/// that a later write-back of the file finds them and does not report success without them.
pub(super) struct Taken<'a> {
    files: &'a Files,
    file: &'a Arc<FileRegion>,
    pub(super) commit: DataCommit,
    /// The fresh ranges that the commit covers.
    fresh: Vec<(u64, u64)>,
    pub(super) dirty: BTreeMap<FilePage, DirtyPage>,
    was_written_directly: bool,
    is_committed: bool,
}

impl<'a> Taken<'a> {
    /// Takes a file's snapshot; `None` if there is nothing to make durable. The caller has settled the file, and writes all dirty pages to their
    /// places before it commits.
    fn from(files: &'a Files, file: &'a Arc<FileRegion>) -> Option<Self> {
        // A page is on the list before the mapping shows it.
        file.change_bookkeeping(|state| {
            let mut listed = file.dirty.lock();
            let is_uncommitted = state.uncommitted || state.table.fresh_pages() > 0;
            if !is_uncommitted && !state.is_written_directly && listed.is_empty() {
                return None;
            }
            let dirty = std::mem::take(&mut *listed);
            let mut taken = Self::of(files, file, state, dirty);
            taken.was_written_directly = std::mem::take(&mut state.is_written_directly);
            if std::mem::take(&mut state.has_images) {
                taken.commit.images = Images::Drop;
            }
            Some(taken)
        })
    }

    /// The state as it is, with these pages taken off the list. No image is put or removed.
    pub(super) fn of(
        files: &'a Files,
        file: &'a Arc<FileRegion>,
        state: &mut FileState,
        dirty: BTreeMap<FilePage, DirtyPage>,
    ) -> Self {
        let fresh = state.table.fresh();
        state.uncommitted = false;
        let ranges = ranges_of(&state.table, &fresh);
        let done = std::mem::take(&mut state.done).into_values().collect();
        let restored = std::mem::take(&mut state.restored);
        let covers = Covers::Changes { until: state.contents, restored };
        let (cut, images) = (CutStep::Unchanged, Images::Put(Vec::new()));
        let commit = DataCommit { ino: file.ino(), ranges, size: state.size, done, covers, cut, images };
        let fresh = fresh.iter().map(|piece| (piece.first, piece.end())).collect();
        Self { files, file, commit, fresh, dirty, was_written_directly: false, is_committed: false }
    }

    /// Notes that the store has the commit.
    pub(super) fn committed(&mut self) {
        self.is_committed = true;
        self.file.change_bookkeeping(|state| {
            for (first, end) in &self.fresh {
                state.table.set_state(*first, *end, PieceState::Written);
            }
            state.durable_size = self.commit.size;
            if let Covers::Changes { until, .. } = self.commit.covers {
                state.covered = until;
            }
        });
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if self.is_committed {
            return;
        }
        {
            let mut dirty = self.file.dirty.lock();
            for (page, listed) in std::mem::take(&mut self.dirty) {
                dirty.entry(page).or_insert(listed);
            }
        }
        self.file.change_bookkeeping(|state| {
            state.uncommitted = true;
            state.is_written_directly |= self.was_written_directly;
            state.has_images |= self.commit.images == Images::Drop;
            for done in std::mem::take(&mut self.commit.done) {
                // A later request of the same slot implies that this one was answered.
                state.done.entry((done.request.client, done.request.slot)).or_insert(done);
            }
            if let Covers::Changes { restored, .. } = std::mem::take(&mut self.commit.covers) {
                restored.into_iter().for_each(|by| state.note_restored(by));
            }
        });
        self.files.list_dirty(self.file);
    }
}

/// Fresh pieces as changes of the store's extents.
fn ranges_of(table: &RangeTable, fresh: &[Piece]) -> Vec<RangeUpdate> {
    let mut ranges: Vec<RangeUpdate> = Vec::new();
    for piece in fresh {
        let mut piece = *piece;
        // A fresh piece and the written pieces next to it are one extent in the store.
        if let Some(before) = table.written_before(&piece) {
            piece.first = before.first;
            piece.pool = before.pool;
            piece.len += before.len;
        }
        if let Some(after) = table.written_after(&piece) {
            piece.len += after.len;
        }
        match ranges.last_mut() {
            // Two fresh pieces with one written piece between them both include that piece.
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
    ranges
}

/// Makes all changes of these files so far durable: in the store's batches, and with `flush` on its disk.
///
/// # Errors
/// `Io` if a page, the sync or the store failed. Files that could be written are committed all the same.
pub(super) async fn write_back(
    files: &Files,
    disk: &dyn Disk,
    which: &[Arc<FileRegion>],
    flush: bool,
) -> Result<(), Status> {
    let mut which = which.to_vec();
    which.sort_by_key(|file| file.ino());
    which.dedup_by_key(|file| file.ino());
    let mut result = Ok(());
    for group in which.chunks(MAX_GROUP_FILES) {
        result = write_back_group(files, disk, group).await.and(result);
    }
    result?;
    if flush { flush_files(files, &which).await } else { Ok(()) }
}

/// Flushes the store: what was committed of these files is durable when it returns.
///
/// # Errors
/// As `release_space`.
pub(super) async fn flush_files(files: &Files, which: &[Arc<FileRegion>]) -> Result<(), Status> {
    let committed = |file: &&Arc<FileRegion>| {
        let state = file.state();
        state.unsynced_appends.committed(state.durable_size)
    };
    let appends: Vec<_> = which.iter().filter_map(|file| Some((file, committed(&file)?))).collect();
    release_space(files).await?;
    for (file, committed) in appends {
        file.change_bookkeeping(|state| state.unsynced_appends.flushed(committed));
    }
    Ok(())
}

async fn write_back_group(files: &Files, disk: &dyn Disk, which: &[Arc<FileRegion>]) -> Result<(), Status> {
    if files.pages.data_sync.has_failed() {
        return Err(Status::Io);
    }
    // In the order of inodes, like every group.
    let mut settled = Vec::with_capacity(which.len());
    for file in which {
        settled.push(file.settle.lock().await);
    }
    // Declared after `settled`, so that uncommitted changes are given back before another task settles these files.
    let mut group: Vec<Taken<'_>> = which.iter().filter_map(|file| Taken::from(files, file)).collect();
    if group.is_empty() {
        return Ok(());
    }
    let pages = group.iter().flat_map(|taken| taken.dirty.values().map(|page| page.pool)).collect();
    let mut failed = files.pages.write_out(disk, pages).await;
    failed.sort_unstable();
    let result = if failed.is_empty() { Ok(()) } else { Err(Status::Io) };
    group.retain(|taken| !taken.dirty.values().any(|page| failed.binary_search(&page.pool).is_ok()));
    if files.pages.data_sync.sync(disk).await.is_err() {
        return Err(Status::Io);
    }
    let commits: Vec<DataCommit> = group.iter().map(|taken| taken.commit.clone()).collect();
    files.meta.commit_data(&commits)?;
    group.iter_mut().for_each(Taken::committed);
    drop(group);
    drop(settled);
    result
}

/// Writes back all files that wait for it, then flushes the store: everything that was written before the call is durable when it returns, also if
/// another write-back had begun with it.
///
/// # Errors
/// As `write_back`.
pub async fn write_back_all(files: &Files, disk: &dyn Disk) -> Result<(), Status> {
    // Exclusive, so that it waits for files that another write-back has taken off the list and not finished.
    let swept = files.dirty.sweep.write().await;
    let listed = Listed::take(files, usize::MAX);
    let result = write_back(files, disk, &listed.listed, true).await;
    drop(listed);
    drop(swept);
    files.trim_active();
    result
}

/// Files that were taken off the list. When this is dropped, those that are not clean are listed again.
struct Listed<'a> {
    files: &'a Files,
    listed: Vec<Arc<FileRegion>>,
}

impl<'a> Listed<'a> {
    /// Takes the `most` files with the lowest numbers.
    fn take(files: &'a Files, most: usize) -> Self {
        let mut list = files.dirty.list.lock();
        let mut listed = Vec::new();
        while listed.len() < most
            && let Some((_, file)) = list.pop_first()
        {
            // Cleared before the file is read: a later change lists it again.
            file.listed.store(false, Ordering::Release);
            listed.push(file);
        }
        Self { files, listed }
    }
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        for file in &self.listed {
            if !file.is_clean() && !file.is_reaped() {
                self.files.list_dirty(file);
            }
        }
    }
}

/// Flushes the store, and frees the pages that were quarantined before.
///
/// # Errors
/// As the flush; then no page is freed.
pub async fn release_space(files: &Files) -> Result<(), Status> {
    let mark = files.space.quarantine_mark();
    files.committer.flush().await?;
    while files.space.release_some(mark, RELEASE_BATCH) {
        futures_lite::future::yield_now().await;
    }
    Ok(())
}

/// Called before a write: if too many frames are dirty or too many files wait, helps to write back. It holds no lock, so it delays nobody else, and
/// it stops after a while, so it cannot hang on a failing disk.
pub(super) async fn relieve(files: &Files, disk: &dyn Disk) {
    files.pages.relieve(disk).await;
    if files.dirty.len() > MAX_DIRTY_FILES {
        let _swept = files.dirty.sweep.read().await;
        let listed = Listed::take(files, MAX_GROUP_FILES);
        // A failure was logged, and the files are on the list again.
        let _ = write_back(files, disk, &listed.listed, false).await;
    }
}

/// Writes back every second, until `stopped` is set.
pub async fn run_write_back(files: &Files, disk: &dyn Disk, timer: &dyn Timer, stopped: &AtomicBool) {
    while !stopped.load(Ordering::Acquire) {
        timer.sleep(WRITE_BACK_INTERVAL).await;
        panic_ends::plant("write-back");
        if let Err(status) = write_back_all(files, disk).await {
            tracing::error!(%status, "write-back failed; it is tried again in a second");
        }
    }
}
