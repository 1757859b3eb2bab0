//! `SEEK_DATA` and `SEEK_HOLE`: unwritten space is a hole, the end of the file is one, too.

use crate::region::FileRegion;
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::rpc::SeekFor;
use cuttlefs_common::status::Status;

/// Finds the first byte of data or of a hole at or after `offset`.
///
/// # Errors
/// `NoSuchOffset` at or past the end of the file, and for data if only a hole follows; `Stale`, `Io` (`FileRegion::usable`).
pub fn seek(file: &FileRegion, offset: u64, seek: SeekFor) -> Result<u64, Status> {
    file.usable()?;
    let state = file.state();
    if offset >= state.size {
        return Err(Status::NoSuchOffset);
    }
    let page = offset / PAGE_SIZE_U64;
    match seek {
        SeekFor::Data => state
            .table
            .next_data(page)
            .map(|page| offset.max(page * PAGE_SIZE_U64))
            .filter(|found| *found < state.size)
            .ok_or(Status::NoSuchOffset),
        SeekFor::Hole => {
            Ok(offset.max(state.table.next_hole(page).saturating_mul(PAGE_SIZE_U64)).min(state.size))
        }
    }
}
