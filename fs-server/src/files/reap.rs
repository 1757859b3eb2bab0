//! Reaping: removes an inode without names that is not open, with its pages.

use super::detach::detach;
use super::steps::STEP_PIECES;
use crate::files::Files;
use crate::files::range_table::MAX_FILE_PAGES;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;

/// Frees all pages of a regular file and returns how many there were. `commit` deletes the inode and all its records, or the last of them if there
/// are many, and returns whether there are more. It is called when nobody can open the file any more, again and again until no records are left;
/// other requests get their turn in between.
///
/// # Errors
/// `Busy` if the file is open or being reaped: the last close or the other reaper will free it. Errors of `commit`: if the first call fails, the file
/// stays as it was; else its pages are lost until a restart.
pub async fn reap(
    files: &Files,
    ino: InodeNo,
    mut commit: impl FnMut() -> Result<bool, Status>,
) -> Result<u64, Status> {
    let file = files.begin_reap(ino)?;
    let pages = {
        // Waits for the operations that began before the mark.
        let _alone = file.order.write().await;
        let _settled = file.settle.lock().await;
        let mut begun = false;
        loop {
            match commit() {
                Ok(true) => begun = true,
                Ok(false) => break,
                Err(status) => {
                    // The file has lost a part, so nobody may see the rest.
                    if begun {
                        files.close_contents(ino);
                    }
                    files.end_reap(ino, false);
                    return Err(status);
                }
            }
            futures_lite::future::yield_now().await;
        }
        file.dirty.lock().clear();
        let mut pages = 0;
        loop {
            let removed = file.change_layout(files.file_table(), &files.generations, |state| {
                state.size = 0;
                state.durable_size = 0;
                (state.uncommitted, state.is_written_directly) = (false, false);
                state.tail_is_zero = true;
                let rest = state.table.pieces_in(0, MAX_FILE_PAGES).nth(STEP_PIECES).map(|piece| piece.first);
                state.table.remove(0, rest.unwrap_or(MAX_FILE_PAGES))
            });
            if removed.is_empty() {
                break pages;
            }
            pages += removed.iter().map(|piece| piece.len).sum::<u64>();
            detach(files, &removed).await;
            futures_lite::future::yield_now().await;
        }
    };
    // Before the region is dropped: until then the listed file with this number is this one.
    files.dirty.remove(ino);
    files.end_reap(ino, true);
    Ok(pages)
}
