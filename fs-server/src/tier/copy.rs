//! Copies between files within the server, a chunk at a time through a buffer, as a reader and writer would.

use super::fetch::fetch;
use super::write::{WriteAt, end_of, write};
use super::{Sink, Source};
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::Disk;
use crate::region::{FileRegion, Regions};
use cuttlefs_common::region::PageSet;
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// Bytes copied by one call at most, so that one request does not hold a worker's attention for seconds. The caller
/// of `copy_file_range` goes on where it stopped.
pub const MAX_COPY_BYTES: u64 = 4 << 20;
/// Bytes in the buffer at a time.
const CHUNK_BYTES: u64 = 256 << 10;

/// Copies up to `len` bytes and returns how many were copied: fewer at the end of the source, and past
/// `MAX_COPY_BYTES`.
///
/// # Errors
/// `Invalid` if the ranges overlap in one file; `Stale`, `Io` (`FileRegion::usable`); those of `fetch` and `write` if nothing could be copied.
pub async fn copy_range(
    regions: &Regions,
    disk: &dyn Disk,
    from: (&Arc<FileRegion>, u64),
    to: (&Arc<FileRegion>, u64),
    len: u64,
) -> Result<u64, Status> {
    let ((from, from_offset), (to, to_offset)) = (from, to);
    // Also where there is nothing to copy: a length is as wrong as bytes.
    from.usable()?;
    to.usable()?;
    let len = len.min(from.size().saturating_sub(from_offset));
    if Arc::ptr_eq(from, to)
        && from_offset < to_offset.saturating_add(len)
        && to_offset < from_offset.saturating_add(len)
    {
        return Err(Status::Invalid);
    }
    let len = len.min(MAX_COPY_BYTES);
    end_of(to_offset, len as usize)?;
    let mut buffer = AlignedBuf::zeroed(CHUNK_BYTES.min(len.max(1)).next_multiple_of(4096) as usize);
    let mut done = 0;
    while done < len {
        let chunk = (len - done).min(CHUNK_BYTES) as usize;
        let step = async {
            let at = from_offset + done;
            let all = PageSet::all(cuttlefs_common::region::divide(at, chunk).len());
            let bytes = &mut buffer.as_mut_slice()[..chunk];
            let valid = fetch(regions, disk, from, at, chunk, &all, Sink::Bytes(bytes)).await? as usize;
            if valid > 0 {
                let source = Source::Bytes(&buffer.as_slice()[..valid]);
                write(regions, disk, to, WriteAt::Offset(to_offset + done), source).await?;
            }
            Ok(valid)
        };
        match step.await {
            Ok(0) => break,
            Ok(copied) => done += copied as u64,
            Err(status) if done == 0 => return Err(status),
            Err(_) => break,
        }
    }
    Ok(done)
}
