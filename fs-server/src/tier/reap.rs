//! Reaping: an inode without names and opens goes, with its pages.

use super::detach::detach;
use crate::region::Regions;
use crate::region::range_table::MAX_FILE_PAGES;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;

/// Frees everything a regular file holds and returns how many pages that were. `commit` deletes the inode and all its
/// records in one batch; it is called once, when nobody can open the file any more.
///
/// # Errors
/// `Busy` if the file is open or being reaped: whoever closes it last, or the other reaper, will do it. What `commit`
/// says; then the file stays as it was.
pub async fn reap(
    regions: &Regions,
    ino: InodeNo,
    commit: impl FnOnce() -> Result<(), Status>,
) -> Result<u64, Status> {
    let file = regions.begin_reap(ino)?;
    let removed = {
        // Whoever began before the mark gets done first.
        let _alone = file.order.write().await;
        let _settled = file.settle.lock().await;
        if let Err(status) = commit() {
            regions.end_reap(ino, false);
            return Err(status);
        }
        file.dirty.lock().clear();
        file.change_layout(regions.file_table(), &regions.generations, |state| {
            state.size = 0;
            state.durable_size = 0;
            state.uncommitted = false;
            state.tail_is_zero = true;
            state.table.remove(0, MAX_FILE_PAGES)
        })
    };
    detach(regions, &removed).await;
    // Before the region is forgotten, so that what is on the list under this number is this file.
    regions.dirty_files.lock().remove(&ino);
    regions.end_reap(ino, true);
    Ok(removed.iter().map(|piece| piece.len).sum())
}
