//! Reads of pool pages: resident ones from their frames, the others in one batch from SSD (TeRM sections 4.2 and 4.3).
//!
//! # How it works
//! Each page comes with its residency entry as of its lookup. Resident pages are copied from their frames. The others are read in one batch: those
//! that are not cold into free frames while there are any, which makes them resident (this is how single pages are promoted), the rest into bounce
//! buffers. No lock is held meanwhile, unless the caller holds them. A page whose entry moved before its bytes were read is returned, and the caller
//! looks it up again.
//!
//! # Failure
//! A read error is `Io`, unless the page moved meanwhile: never wrong bytes, never zeros. A page whose checksum does not match is `Io`, too, if it
//! does not match with the locks held either.

use super::bytes::Sink;
use super::frames::{Frames, PrivateFrame};
use super::view::PageView;
use super::{Pages, add};
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::{Disk, IoBuffer, IoKind, IoRequest};
use cuttlefs_common::ids::{FrameIndex, InodeNo, PAGE_SIZE, PoolPage};
use cuttlefs_common::region::{PagePart, ResidencyEntry};
use cuttlefs_common::status::Status;

/// Most pages of one IO.
const MAX_READ_PAGES: usize = 64;

/// A read of pages of one file.
pub(crate) struct PageRead<'a> {
    pub(crate) pages: &'a Pages,
    pub(crate) disk: &'a dyn Disk,
    /// The file's inode number, for messages, and for the name of its sample units.
    pub(crate) ino: InodeNo,
    /// Whether the mapping's and the pages' locks are held.
    pub(crate) locked: bool,
    /// Whether no request waits for the bytes, so that only frames are filled.
    pub(crate) ahead: bool,
}

/// A page that is to be read from SSD.
struct Miss {
    part: PagePart,
    pool: PoolPage,
    before: ResidencyEntry,
    frame: Option<PrivateFrame>,
}

impl PageRead<'_> {
    /// Puts the bytes of these parts into `sink`, and zeros past `size`. Returns the parts whose pages moved.
    pub(crate) async fn run(
        &self,
        views: Vec<(PagePart, PageView)>,
        size: u64,
        sink: &mut Sink<'_>,
    ) -> Result<Vec<PagePart>, Status> {
        let mut moved = Vec::new();
        let mut misses = Vec::new();
        let mut tally = self.pages.tally(self.ino);
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
                    let frames = self.pages.frames();
                    let from = Frames::offset(before.frame()) + part.offset_in_page;
                    sink.put_from_memory(part.offset_in_request, part.len, frames.memory(), from);
                    if before.validates(self.pages.residency.table().load_after_copy(pool)) {
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
            add(&self.pages.counters.fetch_hits, hits);
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
        let mut tally = self.pages.tally(self.ino);
        for miss in &mut misses {
            if !self.ahead {
                tally.note(miss.part.page.0, miss.pool);
            }
            if self.ahead || self.pages.is_worth_a_frame(miss.pool) {
                miss.frame = self.pages.take_frame();
            }
        }
        drop(tally);
        if self.ahead {
            misses.retain(|miss| miss.frame.is_some());
        }
        let _permit = if misses.iter().any(|miss| miss.frame.is_none()) {
            Some(self.pages.bounce.acquire().await)
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
                // The read fills the buffer, or its bytes are not used.
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
                let still = miss.before.validates(self.pages.residency.table().load_after_copy(miss.pool));
                if !still {
                    moved.push(miss.part);
                    continue;
                }
                if let Err(error) = &done.result
                    && error.concerns(miss.pool)
                {
                    if error.is_rot() && !self.locked {
                        // Only with the locks held it is certain that the page and its sum belong together.
                        moved.push(miss.part);
                        continue;
                    }
                    self.pages.note_unreadable(error, self.ino, miss.part.page, miss.pool);
                    failed = true;
                    continue;
                }
                if !self.ahead {
                    add(&self.pages.counters.fetch_misses, 1);
                }
                let part = miss.part;
                match (&miss.frame, &done.buffer) {
                    (Some(frame), _) => {
                        let from = frame.offset() + part.offset_in_page;
                        let memory = self.pages.frames().memory();
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

    /// Publishes the frame into which the page was read, unless the page moved or is being changed.
    fn promote(&self, miss: Miss) {
        let Some(frame) = miss.frame else { return };
        let guard = if self.locked { None } else { self.pages.locks.try_lock(miss.pool) };
        if !self.locked && guard.is_none() {
            return;
        }
        // The entry did not move since before the read, so the frame has the page's bytes, and under the block lock the entry cannot move now.
        if self.pages.residency.load(miss.pool) == miss.before {
            self.pages.residency.publish(miss.pool, frame, false);
            let counters = &self.pages.counters;
            add(if self.ahead { &counters.promoted_ahead } else { &counters.promoted }, 1);
        }
    }
}

/// Zeros the part past the end of the file, where a page may have any bytes until the file grows.
fn clear_past_end(sink: &mut Sink<'_>, part: &PagePart, size: u64) {
    let start = part.page.byte_offset() + part.offset_in_page as u64;
    let inside = size.saturating_sub(start).min(part.len as u64) as usize;
    if inside < part.len {
        sink.put_zeros(part.offset_in_request + inside, part.len - inside);
    }
}

/// Groups misses that are neighbours in the pool and all have frames or all have none. Each group is one IO.
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
