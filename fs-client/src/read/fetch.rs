//! Sparse fetch (TeRM section 4.2): one RPC for all the pages of a request that are missing.
//!
//! The pages of a short request come in the reply: a WRITE and its acknowledgement would cost more than the copy. Those of a longer one are pushed by
//! the server into the lane's data buffer by RDMA WRITE, each at its place in the request, and are copied from there into the caller's buffer. Pages
//! that are not in the set are not changed.

use super::Reads;
use crate::session::{ServerOpen, SessionLane};
use crate::transport::{Caller, FsError};
use cuttlefs_common::region::{PageSet, divide};
use cuttlefs_common::rpc::{MAX_INLINE_BYTES, Reply, Request, Sink};
use cuttlefs_common::status::Status;
use std::sync::atomic::Ordering;

impl Reads {
    /// Fetches the pages of `missing` into their places in `out`. Returns how many bytes of the request precede the end of the file.
    ///
    /// # Errors
    /// The server's error. An SSD error is an error of the whole request: no read returns other bytes than the file's.
    pub(crate) fn fetch(
        &self,
        lane: &mut SessionLane<'_>,
        caller: &Caller,
        file: &ServerOpen,
        offset: u64,
        missing: &PageSet,
        out: &mut [u8],
    ) -> Result<usize, FsError> {
        let len = u32::try_from(out.len()).map_err(|_| FsError::Server(Status::Invalid))?;
        let is_short = out.len() <= MAX_INLINE_BYTES;
        self.counters.sparse_fetches.fetch_add(1, Ordering::Relaxed);
        lane.call(
            caller,
            |buffer| Request::Fetch {
                filekey: file.filekey(),
                offset,
                len,
                pages: missing.clone(),
                sink: if is_short { Sink::Inline } else { Sink::Push(buffer.remote(len)) },
            },
            |reply, buffer| {
                let Reply::Fetched { valid_len, mut inline } = reply else {
                    return Err(FsError::Server(Status::Malformed));
                };
                let valid_len = (valid_len as usize).min(out.len());
                for (index, part) in divide(offset, valid_len).enumerate() {
                    if !missing.contains(index) {
                        continue;
                    }
                    let target = &mut out[part.offset_in_request..part.offset_in_request + part.len];
                    if is_short {
                        let (bytes, rest) =
                            inline.split_at_checked(part.len).ok_or(FsError::Server(Status::Malformed))?;
                        target.copy_from_slice(bytes);
                        inline = rest;
                    } else {
                        buffer.read(part.offset_in_request, target);
                    }
                }
                Ok(valid_len)
            },
        )
    }
}
