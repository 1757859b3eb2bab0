//! Copies between files within the server, a chunk at a time through a buffer, as a reader and writer would.
//!
//! # Once
//! A copy that was done is not done again, for others may have written to either file since. The write of its last chunk is
//! that of the request: its place is noted with the bytes, is in the batch that makes them durable, and in the log's
//! record of them. Where that write ends is where the copy ended; it began where its request says.
//! A copy that ends early, for lack of space or of a source that was cut meanwhile, learns that behind its last write, and
//! notes its end then.
//!
//! # Failure
//! A server that dies between two chunks leaves a part of the copy, and nothing that says so: all of it is done again.

use super::fetch::fetch;
use super::write::{WriteAt, end_of, note_done, write_for};
use super::{Sink, Source};
use crate::log::Change;
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::Disk;
use crate::region::{FileRegion, Placed, Regions, RequestId};
use cuttlefs_common::region::PageSet;
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// Bytes copied by one call at most, so that one request does not hold a worker's attention for seconds. The caller
/// of `copy_file_range` goes on where it stopped.
pub const MAX_COPY_BYTES: u64 = 4 << 20;
/// Bytes in the buffer at a time.
const CHUNK_BYTES: u64 = 256 << 10;

/// Copies up to `len` bytes and returns how many were copied: fewer at the end of the source, and past
/// `MAX_COPY_BYTES`. The identity of the request, if it has one, becomes durable with the bytes.
///
/// # Errors
/// `Invalid` if the ranges overlap in one file; `Stale`, `Io` (`FileRegion::usable`); those of `fetch` and `write` if nothing could be copied.
pub async fn copy_range(
    regions: &Regions,
    disk: &dyn Disk,
    from: (&Arc<FileRegion>, u64),
    to: (&Arc<FileRegion>, u64),
    len: u64,
    request: Option<RequestId>,
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
                let request = request.filter(|_| done + valid as u64 == len);
                let at = WriteAt::Offset(to_offset + done);
                write_for(regions, disk, to, at, source, request, None).await?;
            }
            Ok(valid)
        };
        match step.await {
            Ok(0) => break,
            Ok(copied) => done += copied as u64,
            Err(status) if done == 0 => return Err(status),
            Err(_) => break,
        }
        // What is in memory is copied without a wait: others' requests come in between.
        futures_lite::future::yield_now().await;
    }
    if let Some(request) = request
        && (1..len).contains(&done)
    {
        // If it cannot be noted it is done again, should its answer be lost.
        note_early_end(regions, to, to_offset + done, request).await.ok();
    }
    Ok(done)
}

/// Notes that a copy ended at `end`, before all was copied.
async fn note_early_end(
    regions: &Regions,
    to: &Arc<FileRegion>,
    end: u64,
    request: RequestId,
) -> Result<(), Status> {
    let ticket = regions.begin_change(0, 1).await?;
    let _shared = to.order.read().await;
    to.usable()?;
    regions.log(ticket.as_ref(), Some(request), to, Change::Copied { end })?;
    note_done(regions, to, request, Placed { offset: end, len: 0 });
    Ok(())
}
