//! Fetch: reads the wanted pages of a request (TeRM sections 4.2 and 4.3).
//!
//! # How it works
//! Under the mapping's lock, held for moments, every page is looked up with its residency entry. Resident pages are
//! copied from their frames; the others are read in one batch, those that are not cold into free frames while there are
//! any (they become resident: this is how single pages are promoted), the rest into bounce buffers. No lock is held
//! meanwhile. A page whose entry
//! moved before its bytes were there is looked up again; after a few rounds the rest is done with the file's and the
//! pages' locks held, when nothing can move.
//!
//! # Failure
//! A read error is `Io` for the request, unless the page moved meanwhile: never wrong bytes, never zeros. So is a page
//! whose checksum does not match, once that was found with the locks held.

use super::Sink;
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::{Disk, IoBuffer, IoKind, IoRequest};
use crate::region::{FileRegion, Frames, PageView, PrivateFrame, Regions, add};
use cuttlefs_common::ids::{FrameIndex, MAX_FILE_SIZE, PAGE_SIZE, PoolPage};
use cuttlefs_common::region::{PagePart, PageSet, ResidencyEntry, divide};
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use cuttlefs_common::status::Status;

/// Rounds without locks. A page moves at most a few times in the time of a read unless it is written all the time.
const OPTIMISTIC_ROUNDS: usize = 3;
/// Pages of one IO at most.
const MAX_READ_PAGES: usize = 64;

/// Reads the pages of `pages` (bit `i`: the request's `i`-th page) of `[offset, offset + len)` into `sink`, each at
/// its place. Returns how many bytes of the request precede the end of the file; wanted bytes after it are zeros.
///
/// # Errors
/// `TooLarge`, `Invalid` (longer than one transfer, or `sink` too short), `Stale`, `Io`.
pub async fn fetch(
    regions: &Regions,
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
    let mut round = Round { regions, disk, file, size: file.size(), locked: false, ahead: false };
    for _ in 0..OPTIMISTIC_ROUNDS {
        pending = round.run(pending, &mut sink).await?;
        if pending.is_empty() {
            return Ok(round.valid_len(offset, len));
        }
        futures_lite::future::yield_now().await;
    }
    let _mapping = file.order.read().await;
    let pools: Vec<PoolPage> = {
        let state = file.state();
        pending.iter().filter_map(|part| state.table.get(part.page)).map(|(pool, _)| pool).collect()
    };
    let _guards = regions.locks.lock_many(pools).await;
    round.locked = true;
    pending = round.run(pending, &mut sink).await?;
    assert!(pending.is_empty(), "pages moved under their locks");
    Ok(round.valid_len(offset, len))
}

/// Reads pages `[first, end)` of a file into frames ahead of any request, as far as there are frames. Pages that cannot
/// be read or that move meanwhile are left out: whoever wants them will see.
pub(super) async fn bring(regions: &Regions, disk: &dyn Disk, file: &FileRegion, first: u64, end: u64) {
    let parts = (first..end)
        .map(|page| PagePart { page: page.into(), offset_in_page: 0, len: PAGE_SIZE, offset_in_request: 0 })
        .collect();
    let mut round = Round { regions, disk, file, size: file.size(), locked: false, ahead: true };
    // Failures are counted and logged where they happen.
    let _ = round.run(parts, &mut Sink::Nowhere).await;
}

struct Round<'a> {
    regions: &'a Regions,
    disk: &'a dyn Disk,
    file: &'a FileRegion,
    /// The shortest the file was in any round: what lies past it was cut meanwhile.
    size: u64,
    /// The file's and the pages' locks are held.
    locked: bool,
    /// Nobody waits for the bytes: only frames are filled.
    ahead: bool,
}

/// A page to be read from SSD.
struct Miss {
    part: PagePart,
    pool: PoolPage,
    before: ResidencyEntry,
    frame: Option<PrivateFrame>,
}

impl Round<'_> {
    fn valid_len(&self, offset: u64, len: usize) -> u32 {
        // At most MAX_TRANSFER_BYTES, so it fits.
        self.size.saturating_sub(offset).min(len as u64) as u32
    }

    /// One round; returns the parts that moved.
    async fn run(&mut self, parts: Vec<PagePart>, sink: &mut Sink<'_>) -> Result<Vec<PagePart>, Status> {
        self.file.usable()?;
        let (size, views) = {
            let state = self.file.state();
            let views: Vec<_> =
                parts.into_iter().map(|part| (part, self.regions.view(&state, part.page))).collect();
            (state.size, views)
        };
        self.size = self.size.min(size);
        let mut moved = Vec::new();
        let mut misses = Vec::new();
        let mut tally = self.regions.tally(self.file);
        let mut hits = 0;
        for (part, view) in views {
            match view {
                PageView::Zeros => sink.put_zeros(part.offset_in_request, part.len),
                PageView::Pool(_, entry) if entry.is_changing() => moved.push(part),
                PageView::Pool(pool, before) if !before.is_resident() => {
                    misses.push(Miss { part, pool, before, frame: None });
                }
                PageView::Pool(..) if self.ahead => {}
                PageView::Pool(pool, before) => {
                    let frames = self.regions.frames();
                    let from = Frames::offset(before.frame()) + part.offset_in_page;
                    sink.put_from_memory(part.offset_in_request, part.len, frames.memory(), from);
                    if before.validates(self.regions.residency.table().load_after_copy(pool)) {
                        tally.note(part.page.0, pool);
                        hits += 1;
                        clear_past_end(sink, &part, size);
                    } else {
                        moved.push(part);
                    }
                }
            }
        }
        drop(tally);
        if hits > 0 {
            add(&self.regions.counters.fetch_hits, hits);
        }
        if !misses.is_empty() {
            self.read(misses, size, sink, &mut moved).await?;
        }
        Ok(moved)
    }

    async fn read(
        &self,
        mut misses: Vec<Miss>,
        size: u64,
        sink: &mut Sink<'_>,
        moved: &mut Vec<PagePart>,
    ) -> Result<(), Status> {
        let mut tally = self.regions.tally(self.file);
        for miss in &mut misses {
            if !self.ahead {
                tally.note(miss.part.page.0, miss.pool);
            }
            if self.ahead || self.regions.is_worth_a_frame(miss.pool) {
                miss.frame = self.regions.take_frame();
            }
        }
        drop(tally);
        if self.ahead {
            misses.retain(|miss| miss.frame.is_some());
        }
        let _permit = if misses.iter().any(|miss| miss.frame.is_none()) {
            Some(self.regions.bounce.acquire().await)
        } else {
            None
        };
        let groups = group_neighbours(misses);
        let mut batch = Vec::with_capacity(groups.len());
        let mut groups: Vec<Vec<Miss>> = groups;
        for group in &mut groups {
            let frames: Vec<FrameIndex> = group
                .iter_mut()
                .filter_map(|miss| miss.frame.as_mut())
                .map(|frame| {
                    frame.io_begins();
                    frame.index()
                })
                .collect();
            let buffer = if frames.is_empty() {
                // The read fills it, or nobody looks.
                IoBuffer::Owned(AlignedBuf::unfilled(group.len() * PAGE_SIZE))
            } else {
                IoBuffer::Frames(frames)
            };
            batch.push(IoRequest { kind: IoKind::Read, offset: group[0].pool.byte_offset(), buffer });
        }
        let mut failed = false;
        for (mut group, done) in groups.into_iter().zip(self.disk.submit(batch).await) {
            group.iter_mut().filter_map(|miss| miss.frame.as_mut()).for_each(PrivateFrame::io_ended);
            for (index, miss) in group.into_iter().enumerate() {
                let still = miss.before.validates(self.regions.residency.table().load_after_copy(miss.pool));
                if !still {
                    moved.push(miss.part);
                    continue;
                }
                if let Err(error) = &done.result
                    && error.concerns(miss.pool)
                {
                    if error.is_rot() && !self.locked {
                        // Under the locks it is for certain: nobody changes page or sum there.
                        moved.push(miss.part);
                        continue;
                    }
                    self.regions.note_unreadable(error, self.file.ino(), miss.part.page, miss.pool);
                    failed = true;
                    continue;
                }
                if !self.ahead {
                    add(&self.regions.counters.fetch_misses, 1);
                }
                let part = miss.part;
                match (&miss.frame, &done.buffer) {
                    (Some(frame), _) => {
                        let from = frame.offset() + part.offset_in_page;
                        let memory = self.regions.frames().memory();
                        sink.put_from_memory(part.offset_in_request, part.len, memory, from);
                    }
                    (None, IoBuffer::Owned(buffer)) => {
                        let from = index * PAGE_SIZE + part.offset_in_page;
                        sink.put_from_slice(
                            part.offset_in_request,
                            &buffer.as_slice()[from..from + part.len],
                        );
                    }
                    (None, IoBuffer::Frames(_)) => {
                        unreachable!("a group without frames has a buffer")
                    }
                }
                clear_past_end(sink, &part, size);
                self.promote(miss);
            }
        }
        if failed { Err(Status::Io) } else { Ok(()) }
    }

    /// Publishes the frame the page was read into, unless the page moved or is being changed.
    fn promote(&self, miss: Miss) {
        let Some(frame) = miss.frame else { return };
        let guard = if self.locked { None } else { self.regions.locks.try_lock(miss.pool) };
        if !self.locked && guard.is_none() {
            return;
        }
        // The entry did not move since before the read, so the frame holds the page's bytes, and under the block
        // lock it cannot move now.
        if self.regions.residency.load(miss.pool) == miss.before {
            self.regions.residency.publish(miss.pool, frame, false);
            let counters = &self.regions.counters;
            add(if self.ahead { &counters.promoted_ahead } else { &counters.promoted }, 1);
        }
    }
}

/// Bytes of a page past the end of the file are whatever they are until the file grows; nobody sees them.
fn clear_past_end(sink: &mut Sink<'_>, part: &PagePart, size: u64) {
    let start = part.page.byte_offset() + part.offset_in_page as u64;
    let inside = size.saturating_sub(start).min(part.len as u64) as usize;
    if inside < part.len {
        sink.put_zeros(part.offset_in_request + inside, part.len - inside);
    }
}

/// Groups misses that are neighbours in the pool and alike in having a frame: each group is one IO.
fn group_neighbours(misses: Vec<Miss>) -> Vec<Vec<Miss>> {
    let mut groups: Vec<Vec<Miss>> = Vec::new();
    for miss in misses {
        match groups.last_mut() {
            Some(group)
                if group.len() < MAX_READ_PAGES
                    && group.last().is_some_and(|last| {
                        last.pool.0 + 1 == miss.pool.0 && last.frame.is_some() == miss.frame.is_some()
                    }) =>
            {
                group.push(miss);
            }
            _ => groups.push(vec![miss]),
        }
    }
    groups
}
