//! Reaping: an inode without names and opens is removed, with its pages.

use super::detach::detach;
use super::steps::STEP_PIECES;
use crate::files::Files;
use crate::files::range_table::MAX_FILE_PAGES;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;

/// Frees everything a regular file holds and returns how many pages that were. `commit` deletes the inode and all its
/// records, or the last of them if there are many, and says whether there are more; it is called when nobody can open the
/// file any more, until there are none, and others get their turn in between.
///
/// # Errors
/// `Busy` if the file is open or being reaped: whoever closes it last, or the other reaper, will do it. What `commit`
/// says; if it said so at first the file stays as it was, else its pages are nobody's until a restart.
pub async fn reap(
    files: &Files,
    ino: InodeNo,
    mut commit: impl FnMut() -> Result<bool, Status>,
) -> Result<u64, Status> {
    let file = files.begin_reap(ino)?;
    let pages = {
        // Whoever began before the mark gets done first.
        let _alone = file.order.write().await;
        let _settled = file.settle.lock().await;
        let mut begun = false;
        loop {
            match commit() {
                Ok(true) => begun = true,
                Ok(false) => break,
                Err(status) => {
                    // Of one that has lost a part nobody may see the rest.
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
    // Before the region is forgotten, so that what is on the list under this number is this file.
    files.dirty.remove(ino);
    files.end_reap(ino, true);
    Ok(pages)
}
