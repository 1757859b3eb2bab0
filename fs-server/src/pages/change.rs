//! Changes of pages: the only place where bytes of the pool change, page by page (TeRM section 4.3).
//!
//! | page                          | frame free | action                                         |
//! |-------------------------------|------------|------------------------------------------------|
//! | resident                      |            | bytes into its frame                           |
//! | on SSD, whole                 | yes        | bytes into a frame, published                  |
//! | on SSD, partial               | yes        | read into a frame, bytes over it, published    |
//! | new or unwritten              | yes        | zeros and bytes into a frame, published        |
//! | on SSD, whole                 | no         | direct write                                   |
//! | on SSD, partial               | no         | read, bytes over it, direct write              |
//! | new or unwritten              | no         | zeros and bytes, direct write                  |
//!
//! All pages of a request are locked together. All reads are one batch, before any byte is changed, and all direct writes are one batch.
//!
//! # Failure
//! If a read fails, nothing is changed. If a direct write fails, its pages have old or new bytes, as on any disk.

use super::bytes::Source;
use super::frames::{Frames, PrivateFrame};
use super::{Pages, add};
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::{Disk, IoBuffer, IoKind, IoRequest};
use async_lock::SemaphoreGuard;
use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE, PoolPage};
use cuttlefs_common::region::PagePart;
use cuttlefs_common::status::Status;

/// Most pages of one direct IO.
pub(crate) const MAX_DIRECT_PAGES: usize = 64;

/// The bytes of a page around the changed ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Base {
    /// The page's bytes as they are.
    Stored,
    /// Zeros: the page is new or was unwritten, and is not resident.
    Zeros,
}

/// A change of a part of one page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageChange {
    pub(crate) file_page: FilePage,
    pub(crate) pool: PoolPage,
    pub(crate) base: Base,
    pub(crate) offset_in_page: usize,
    pub(crate) len: usize,
    /// The offset of the bytes in the source.
    pub(crate) offset_in_source: usize,
}

/// The new bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NewBytes<'a> {
    From(Source<'a>),
    Zeros,
}

impl PageChange {
    /// The change of a part of a write.
    pub(crate) fn of(part: PagePart, pool: PoolPage, base: Base) -> Self {
        Self {
            file_page: part.page,
            pool,
            base,
            offset_in_page: part.offset_in_page,
            len: part.len,
            offset_in_source: part.offset_in_request,
        }
    }

    fn is_whole(&self) -> bool {
        self.len == PAGE_SIZE
    }

    fn apply_to_frame(&self, frames: &Frames, frame_offset: usize, bytes: &NewBytes<'_>) {
        let at = frame_offset + self.offset_in_page;
        match bytes {
            NewBytes::From(source) => {
                source.copy_to_memory(self.offset_in_source, self.len, frames.memory(), at);
            }
            NewBytes::Zeros => frames.memory().fill(at, self.len, 0),
        }
    }

    fn apply_to_slice(&self, page: &mut [u8], bytes: &NewBytes<'_>) {
        let part = &mut page[self.offset_in_page..self.offset_in_page + self.len];
        match bytes {
            NewBytes::From(source) => source.copy_to_slice(self.offset_in_source, part),
            NewBytes::Zeros => part.fill(0),
        }
    }
}

/// The file of the changed pages. It records what a write-back must make durable. Its functions are called under the pages' block locks.
pub(crate) trait PageOwner {
    /// The inode number, for messages, and for the name of its sample units.
    fn ino(&self) -> InodeNo;
    /// Notes that a page was written in its frame, or is about to be.
    fn list_page(&self, page: FilePage, pool: PoolPage);
    /// Notes that pages were written directly to SSD.
    fn note_written_directly(&self);
}

pub(super) enum Way {
    Resident,
    Frame(PrivateFrame),
    Direct,
}

impl Pages {
    /// Makes all changes, each on another page. Pages that were written in frames are on their owner's list when this returns.
    pub(crate) async fn change(
        &self,
        disk: &dyn Disk,
        owner: &impl PageOwner,
        changes: &[PageChange],
        bytes: NewBytes<'_>,
    ) -> Result<(), Status> {
        let _guards = self.locks.lock_many(changes.iter().map(|change| change.pool)).await;
        let mut tally = self.tally(owner.ino());
        changes.iter().for_each(|change| tally.note(change.file_page.0, change.pool));
        drop(tally);
        let mut ways: Vec<Way> = changes
            .iter()
            .map(|change| {
                if self.residency.load(change.pool).is_resident() {
                    assert_eq!(change.base, Base::Stored, "pool page {} is new and resident", change.pool);
                    Way::Resident
                } else {
                    self.take_frame().map_or(Way::Direct, Way::Frame)
                }
            })
            .collect();
        let _permit = self.permit_for(&ways).await;
        let mut stored = self.read_stored(disk, owner, changes, &mut ways).await?;

        let mut direct: Vec<(usize, Vec<usize>)> = Vec::new();
        for (index, (change, way)) in changes.iter().zip(ways).enumerate() {
            match way {
                Way::Resident => {
                    owner.list_page(change.file_page, change.pool);
                    self.residency.write_in_frame(change.pool, |at| {
                        change.apply_to_frame(self.frames(), at, &bytes);
                    });
                }
                Way::Frame(frame) => {
                    if change.base == Base::Zeros && !change.is_whole() {
                        self.frames().memory().fill(frame.offset(), PAGE_SIZE, 0);
                    }
                    change.apply_to_frame(self.frames(), frame.offset(), &bytes);
                    // Listed under the block lock: a write-back that takes the list meanwhile waits for the lock next.
                    owner.list_page(change.file_page, change.pool);
                    self.residency.publish(change.pool, frame, true);
                }
                Way::Direct => match direct.last_mut() {
                    Some((_, group))
                        if group.len() < MAX_DIRECT_PAGES
                            && group
                                .last()
                                .is_some_and(|last| changes[*last].pool.0 + 1 == change.pool.0) =>
                    {
                        group.push(index);
                    }
                    _ => direct.push((index, vec![index])),
                },
            }
        }
        self.write_direct(disk, owner, changes, bytes, &direct, &mut stored).await
    }

    /// A permit for buffers, if a page is written directly. A holder of one waits for a disk only, never for a lock, so waiting for it under locks is safe.
    pub(super) async fn permit_for(&self, ways: &[Way]) -> Option<SemaphoreGuard<'_>> {
        match ways.iter().any(|way| matches!(way, Way::Direct)) {
            true => Some(self.bounce.acquire().await),
            false => None,
        }
    }

    /// Reads the pages on SSD that are only partly overwritten, in one batch: into their new frames, or into buffers, which are returned by the index
    /// of the change.
    pub(super) async fn read_stored(
        &self,
        disk: &dyn Disk,
        owner: &impl PageOwner,
        changes: &[PageChange],
        ways: &mut [Way],
    ) -> Result<Vec<(usize, AlignedBuf)>, Status> {
        let mut batch = Vec::new();
        let mut wanted = Vec::new();
        for (index, change) in changes.iter().enumerate() {
            if change.base != Base::Stored || change.is_whole() {
                continue;
            }
            let buffer = match &mut ways[index] {
                Way::Resident => continue,
                Way::Frame(frame) => {
                    frame.io_begins();
                    IoBuffer::Frames(vec![frame.index()])
                }
                Way::Direct => IoBuffer::Owned(AlignedBuf::unfilled(PAGE_SIZE)),
            };
            wanted.push(index);
            batch.push(IoRequest { kind: IoKind::Read, offset: change.pool.byte_offset(), buffer });
        }
        let mut buffers = Vec::new();
        if batch.is_empty() {
            return Ok(buffers);
        }
        add(&self.counters.read_modify_writes, batch.len() as u64);
        let mut failed = false;
        for (index, done) in wanted.into_iter().zip(disk.submit(batch).await) {
            if let Way::Frame(frame) = &mut ways[index] {
                frame.io_ended();
            }
            if let Err(error) = done.result {
                let change = &changes[index];
                self.note_unreadable(&error, owner.ino(), change.file_page, change.pool);
                failed = true;
            } else if let IoBuffer::Owned(buffer) = done.buffer {
                buffers.push((index, buffer));
            }
        }
        if failed { Err(Status::Io) } else { Ok(buffers) }
    }

    /// Makes changes on SSD, in one batch; each group is of neighbouring pages.
    pub(super) async fn write_direct(
        &self,
        disk: &dyn Disk,
        owner: &impl PageOwner,
        changes: &[PageChange],
        bytes: NewBytes<'_>,
        groups: &[(usize, Vec<usize>)],
        stored: &mut Vec<(usize, AlignedBuf)>,
    ) -> Result<(), Status> {
        if groups.is_empty() {
            return Ok(());
        }
        let batch = groups
            .iter()
            .map(|(first, group)| {
                let mut buffer = AlignedBuf::zeroed(group.len() * PAGE_SIZE);
                for (index, page) in group.iter().zip(buffer.as_mut_slice().chunks_exact_mut(PAGE_SIZE)) {
                    if let Some(at) = stored.iter().position(|(of, _)| of == index) {
                        page.copy_from_slice(stored.swap_remove(at).1.as_slice());
                    }
                    changes[*index].apply_to_slice(page, &bytes);
                }
                IoRequest {
                    kind: IoKind::Write,
                    offset: changes[*first].pool.byte_offset(),
                    buffer: IoBuffer::Owned(buffer),
                }
            })
            .collect();
        let pages = || groups.iter().flat_map(|(_, group)| group).map(|index| changes[*index].pool);
        pages().for_each(|page| self.residency.begin_direct_write(page));
        let done = disk.submit(batch).await;
        pages().for_each(|page| self.residency.end_direct_write(page));
        // Only a data sync makes these durable. They are noted when they are written, so that a sync that began before does not count.
        owner.note_written_directly();
        let mut result = Ok(());
        for ((_, group), done) in groups.iter().zip(done) {
            match done.result {
                Ok(()) => add(&self.counters.direct_writes, group.len() as u64),
                Err(error) => {
                    add(&self.counters.write_errors, group.len() as u64);
                    tracing::error!(%error, pages = group.len(), "a direct write failed");
                    result = Err(Status::Io);
                }
            }
        }
        result
    }
}
