//! Copies between files within the server: a chunk at a time through a buffer, as by reads and writes.
//!
//! # A copy is made once
//! A finished copy is not repeated, because other clients may have written to either file since. The write of its last chunk notes the copy's answer
//! together with the bytes, so both are in one batch. A copy that ends early, because space ran out or the source was cut meanwhile, learns that
//! after its last write, and notes its answer then.
//!
//! # Failure
//! A server that dies between two chunks leaves a part of the copy and no record of it. The whole copy is repeated then.

use super::fetch::fetch;
use super::write::{Asked, WriteAt, Written, end_of, note_done, write_for};
use crate::files::{FileRegion, Files};
use crate::meta::{Answer, RequestId};
use crate::pages::{Sink, Source};
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::Disk;
use cuttlefs_common::region::PageSet;
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// Most bytes that one call copies, so that one request does not occupy a worker for seconds. The caller of `copy_file_range` continues where it
/// stopped.
pub(super) const MAX_COPY_BYTES: u64 = 4 << 20;
/// Bytes of the buffer.
const CHUNK_BYTES: u64 = 256 << 10;

/// The result of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Bytes copied.
    pub len: u64,
    /// The target's change counter after the last of them.
    pub change: u64,
}

/// Copies up to `len` bytes: fewer at the end of the source, and at most `MAX_COPY_BYTES`. The answer to the request, if there is one, becomes
/// durable with the bytes.
///
/// # Errors
/// `Invalid` if the ranges overlap in one file; `Stale`, `Io` (`FileRegion::usable`); those of `fetch` and `write` if nothing could be copied.
pub async fn copy_range(
    files: &Files,
    disk: &dyn Disk,
    from: (&Arc<FileRegion>, u64),
    to: (&Arc<FileRegion>, u64),
    len: u64,
    request: Option<RequestId>,
) -> Result<Copied, Status> {
    let ((from, from_offset), (to, to_offset)) = (from, to);
    // Also if there is nothing to copy, because the lengths of such files may be wrong as well.
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
    let mut copied = Copied { len: 0, change: files.meta.attr(to.ino())?.change };
    while copied.len < len {
        let done = copied.len;
        let chunk = (len - done).min(CHUNK_BYTES) as usize;
        let step = async {
            let at = from_offset + done;
            let all = PageSet::all(cuttlefs_common::region::divide(at, chunk).len());
            let bytes = &mut buffer.as_mut_slice()[..chunk];
            let valid = fetch(files, disk, from, at, chunk, &all, Sink::Bytes(bytes)).await? as usize;
            if valid == 0 {
                return Ok(None);
            }
            let source = Source::Bytes(&buffer.as_slice()[..valid]);
            let len_now = done + valid as u64;
            let answer = |written: &Written| Answer::Copied { len: len_now, change: written.attr.change };
            let asked: Option<Asked<'_>> =
                request.filter(|_| len_now == len).map(|request| (request, &answer as _));
            let at = WriteAt::Offset(to_offset + done);
            let written = write_for(files, disk, to, at, source, asked).await?;
            Ok(Some(Copied { len: len_now, change: written.attr.change }))
        };
        match step.await {
            Ok(Some(more)) => copied = more,
            Ok(None) => break,
            Err(status) if done == 0 => return Err(status),
            Err(_) => break,
        }
        // Copying bytes in memory never waits, so other requests get their turn here.
        futures_lite::future::yield_now().await;
    }
    if let Some(request) = request
        && (1..len).contains(&copied.len)
    {
        // If it cannot be noted and the answer is lost, the copy is repeated.
        let _shared = to.order.read().await;
        if to.usable().is_ok() {
            let Copied { len, change } = copied;
            note_done(files, to, request, Answer::Copied { len, change }, change);
        }
    }
    Ok(copied)
}
