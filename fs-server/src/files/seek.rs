//! `SEEK_DATA` and `SEEK_HOLE`. Unwritten space is a hole, and so is the end of the file.
//!
//! A file may have as many pieces as pages, and a search may have to go through all of them. It examines a few at a time, and other requests get
//! their turn in between. A concurrent change is seen or not, piece by piece, as by a reader.

use crate::files::FileRegion;
use crate::files::range_table::Search;
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::rpc::SeekFor;
use cuttlefs_common::status::Status;

/// Pieces that are examined before other tasks of the worker, and others that want the file's state, get their turn: some ten microseconds. Few in
/// tests, so that searches have several steps.
pub(super) const PIECES_A_STEP: usize = if cfg!(test) { 2 } else { 512 };

/// Finds the first byte of data or of a hole at or after `offset`.
///
/// # Errors
/// `NoSuchOffset` at or past the end of the file, and for data if only a hole follows; `Stale`, `Io` (`FileRegion::usable`).
pub async fn seek(file: &FileRegion, offset: u64, seek: SeekFor) -> Result<u64, Status> {
    let mut page = offset / PAGE_SIZE_U64;
    loop {
        match step(file, offset, page, seek)? {
            Search::Found(found) => return Ok(found),
            Search::Nowhere => return Err(Status::NoSuchOffset),
            Search::GoOn(next) => page = next,
        }
        futures_lite::future::yield_now().await;
    }
}

/// Searches a bounded number of pieces from `page` on. The result is in bytes.
fn step(file: &FileRegion, offset: u64, page: u64, seek: SeekFor) -> Result<Search, Status> {
    file.usable()?;
    let state = file.state();
    if offset >= state.size {
        return Err(Status::NoSuchOffset);
    }
    let byte = |page: u64| offset.max(page.saturating_mul(PAGE_SIZE_U64));
    Ok(match seek {
        SeekFor::Data => match state.table.next_data(page, PIECES_A_STEP) {
            Search::Found(page) if byte(page) < state.size => Search::Found(byte(page)),
            Search::Found(_) => Search::Nowhere,
            other => other,
        },
        SeekFor::Hole => match state.table.next_hole(page, PIECES_A_STEP) {
            Search::Found(page) => Search::Found(byte(page).min(state.size)),
            other => other,
        },
    })
}
