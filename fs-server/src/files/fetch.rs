//! Fetch: reads the wanted pages of a request (TeRM sections 4.2 and 4.3).
//!
//! # How it works
//! Every page is looked up with its residency entry under the mapping's lock, which is held for moments. The pages' bytes are then read without any
//! lock (`pages/read.rs`). A page whose entry moved before its bytes were read is looked up again. After a few rounds the rest is read with the
//! file's and the pages' locks held, so that nothing can move.
//!
//! # Failure
//! A read error is `Io` for the request, unless the page moved meanwhile: never wrong bytes, never zeros. A page whose checksum does not match is
//! `Io`, too, if it does not match with the locks held either.

use super::{FileRegion, Files};
use crate::pages::{PageRead, PageView, Sink};
use crate::pool::disk::Disk;
use cuttlefs_common::ids::{MAX_FILE_SIZE, PAGE_SIZE, PoolPage};
use cuttlefs_common::region::{PagePart, PageSet, divide};
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use cuttlefs_common::status::Status;

/// Rounds without locks. A page moves at most a few times during a read, unless it is written all the time.
const OPTIMISTIC_ROUNDS: usize = 3;

/// Reads the pages of `pages` (bit `i`: the request's `i`-th page) of `[offset, offset + len)` into `sink`, each at its place. Returns how many bytes
/// of the request are before the end of the file. Wanted bytes after it are zeros.
///
/// # Errors
/// `TooLarge`, `Invalid` (longer than one transfer, or `sink` too short), `Stale`, `Io`.
pub async fn fetch(
    files: &Files,
    disk: &dyn Disk,
    file: &FileRegion,
    offset: u64,
    len: usize,
    pages: &PageSet,
    mut sink: Sink<'_>,
) -> Result<u32, Status> {
    if len > MAX_TRANSFER_BYTES as usize || !sink.holds(len) {
        return Err(Status::Invalid);
    }
    if offset.checked_add(len as u64).is_none_or(|end| end > MAX_FILE_SIZE) {
        return Err(Status::TooLarge);
    }
    let mut pending: Vec<PagePart> = divide(offset, len)
        .enumerate()
        .filter(|(index, _)| pages.contains(*index))
        .map(|(_, part)| part)
        .collect();
    let mut round = Round::new(files, disk, file, false);
    for _ in 0..OPTIMISTIC_ROUNDS {
        pending = round.run(pending, &mut sink).await?;
        if pending.is_empty() {
            return Ok(round.valid_len(offset, len, &mut sink));
        }
        futures_lite::future::yield_now().await;
    }
    let _mapping = file.order.read().await;
    let pools: Vec<PoolPage> = {
        let state = file.state();
        pending.iter().filter_map(|part| state.table.get(part.page)).map(|(pool, _)| pool).collect()
    };
    let _guards = files.pages.locks.lock_many(pools).await;
    round.read.locked = true;
    pending = round.run(pending, &mut sink).await?;
    assert!(pending.is_empty(), "pages moved under their locks");
    Ok(round.valid_len(offset, len, &mut sink))
}

/// Reads the pages `[first, end)` of a file into frames ahead of requests, as far as there are free frames. Pages that cannot be read or that move
/// meanwhile are left out; a later request for them finds out why.
pub(super) async fn bring(files: &Files, disk: &dyn Disk, file: &FileRegion, first: u64, end: u64) {
    let parts = (first..end)
        .map(|page| PagePart { page: page.into(), offset_in_page: 0, len: PAGE_SIZE, offset_in_request: 0 })
        .collect();
    let mut round = Round::new(files, disk, file, true);
    // Failures are counted and logged where they happen.
    let _ = round.run(parts, &mut Sink::Nowhere).await;
}

struct Round<'a> {
    files: &'a Files,
    file: &'a FileRegion,
    read: PageRead<'a>,
    /// The length of the file at first, and the smallest one in any round: bytes past that were cut meanwhile.
    size_at_first: u64,
    size: u64,
}

impl<'a> Round<'a> {
    fn new(files: &'a Files, disk: &'a dyn Disk, file: &'a FileRegion, ahead: bool) -> Self {
        let read = PageRead { pages: &files.pages, disk, ino: file.ino(), locked: false, ahead };
        let size = file.size();
        Self { files, file, read, size_at_first: size, size }
    }

    /// How many bytes are before the end of the file. Those behind it that a round took before the file was cut are overwritten.
    fn valid_len(&self, offset: u64, len: usize, sink: &mut Sink<'_>) -> u32 {
        let valid = self.size.saturating_sub(offset).min(len as u64) as usize;
        if self.size < self.size_at_first {
            sink.put_zeros(valid, len - valid);
        }
        // At most MAX_TRANSFER_BYTES, so it fits.
        valid as u32
    }

    /// Does one round. Returns the parts whose pages moved.
    async fn run(&mut self, parts: Vec<PagePart>, sink: &mut Sink<'_>) -> Result<Vec<PagePart>, Status> {
        self.file.usable()?;
        let (size, views): (u64, Vec<(PagePart, PageView)>) = {
            let state = self.file.state();
            let view = |part: PagePart| (part, self.files.view(&state, part.page));
            (state.size, parts.into_iter().map(view).collect())
        };
        self.size = self.size.min(size);
        self.read.run(views, size, sink).await
    }
}
