//! Atomics on a word of a page.
//!
//! The word is read and changed under its page's block lock, so it is whole, and nobody changes it in between. A word that stays as it is makes no page
//! dirty. The NIC engine waits for nothing (`change_word_at_once`); a worker waits for the lock, and for the SSD if the page is in no frame:
//!
//! | page         | frame free | action                                  |
//! |--------------|------------|-----------------------------------------|
//! | resident     |            | the word in its frame                   |
//! | on SSD       | yes        | read into a frame, published, the same  |
//! | on SSD       | no         | read; direct write if the word changes  |
//!
//! # Failure
//! If the read fails, nothing is changed. After a failed direct write the page has the old word or the new one, as on any disk.

use super::change::PageOwner;
use super::frames::{Frames, PrivateFrame};
use super::{Pages, add};
use crate::pool::IoError;
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::{Disk, IoBuffer, IoKind, IoRequest};
use cuttlefs_common::ids::{FilePage, PAGE_SIZE, PoolPage};
use cuttlefs_common::region::ResidencyEntry;
use cuttlefs_common::status::Status;

/// A word of eight bytes in a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WordPlace {
    pub(crate) file_page: FilePage,
    pub(crate) pool: PoolPage,
    pub(crate) offset_in_page: usize,
}

impl Pages {
    /// A word, if its page's lock is free and the page is in a frame.
    pub(crate) fn word_at_once(&self, place: WordPlace) -> Option<u64> {
        let _guard = self.locks.try_lock(place.pool)?;
        let entry = self.residency.load(place.pool);
        entry.is_resident().then(|| self.locked_word(entry, place))
    }

    /// Applies `change` to a word, if its page's lock is free and the page is in a frame. Returns the value before.
    pub(crate) fn change_word_at_once(
        &self,
        owner: &impl PageOwner,
        place: WordPlace,
        change: impl FnOnce(u64) -> u64,
    ) -> Option<u64> {
        let _guard = self.locks.try_lock(place.pool)?;
        self.change_locked_word(owner, place, change)
    }

    /// Applies `change` to a word, wherever its page is. Returns the value before. The caller has the mapping's lock.
    ///
    /// # Errors
    /// `Io`; then the word may be changed if a direct write failed.
    pub(crate) async fn change_word(
        &self,
        disk: &dyn Disk,
        owner: &impl PageOwner,
        place: WordPlace,
        change: impl Fn(u64) -> u64,
    ) -> Result<u64, Status> {
        let _guards = self.locks.lock_many([place.pool]).await;
        self.tally(owner.ino()).note(place.file_page.0, place.pool);
        if !self.residency.load(place.pool).is_resident() {
            let Some(frame) = self.take_frame() else {
                return self.change_word_on_ssd(disk, owner, place, change).await;
            };
            self.read_into(disk, owner, place, frame).await?;
        }
        self.change_locked_word(owner, place, change).ok_or(Status::Io)
    }

    /// The word of a page in this frame. Whoever changes the page has its lock, so the word is whole.
    fn locked_word(&self, entry: ResidencyEntry, place: WordPlace) -> u64 {
        let mut bytes = [0; 8];
        let at = Frames::offset(entry.frame()) + place.offset_in_page;
        self.frames().memory().read(at, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    fn change_locked_word(
        &self,
        owner: &impl PageOwner,
        place: WordPlace,
        change: impl FnOnce(u64) -> u64,
    ) -> Option<u64> {
        let entry = self.residency.load(place.pool);
        if !entry.is_resident() {
            return None;
        }
        let memory = self.frames().memory();
        let old = self.locked_word(entry, place);
        let new = change(old);
        if new != old {
            owner.list_page(place.file_page, place.pool);
            self.residency.write_in_frame(place.pool, |at| {
                memory.write(at + place.offset_in_page, &new.to_le_bytes());
            });
        }
        Some(old)
    }

    /// Reads the page of a word into a frame. The caller has its lock.
    async fn read_into(
        &self,
        disk: &dyn Disk,
        owner: &impl PageOwner,
        place: WordPlace,
        mut frame: PrivateFrame,
    ) -> Result<(), Status> {
        frame.io_begins();
        let buffer = IoBuffer::Frames(vec![frame.index()]);
        let read = self.one_io(disk, place.pool, IoKind::Read, buffer).await;
        frame.io_ended();
        self.read_or_noted(read, owner, place)?;
        self.residency.publish(place.pool, frame, false);
        Ok(())
    }

    async fn change_word_on_ssd(
        &self,
        disk: &dyn Disk,
        owner: &impl PageOwner,
        place: WordPlace,
        change: impl Fn(u64) -> u64,
    ) -> Result<u64, Status> {
        // A holder of a permit waits for a disk only, never for a lock, so waiting for a permit under locks is safe.
        let _permit = self.bounce.acquire().await;
        let buffer = IoBuffer::Owned(AlignedBuf::unfilled(PAGE_SIZE));
        let read = self.one_io(disk, place.pool, IoKind::Read, buffer).await;
        let IoBuffer::Owned(mut page) = self.read_or_noted(read, owner, place)? else {
            return Err(Status::Io);
        };
        let word = &mut page.as_mut_slice()[place.offset_in_page..place.offset_in_page + 8];
        let mut bytes = [0; 8];
        bytes.copy_from_slice(word);
        let old = u64::from_le_bytes(bytes);
        let new = change(old);
        if new == old {
            return Ok(old);
        }
        word.copy_from_slice(&new.to_le_bytes());
        self.residency.begin_direct_write(place.pool);
        let written = self.one_io(disk, place.pool, IoKind::Write, IoBuffer::Owned(page)).await;
        self.residency.end_direct_write(place.pool);
        // Only a data sync makes it durable. It is noted when it is written, so that a sync that began before does not count.
        owner.note_written_directly();
        match written {
            Ok(_) => {
                add(&self.counters.direct_writes, 1);
                Ok(old)
            }
            Err(error) => {
                add(&self.counters.write_errors, 1);
                tracing::error!(%error, "a direct write of a word failed");
                Err(Status::Io)
            }
        }
    }

    /// Reads or writes one page.
    async fn one_io(
        &self,
        disk: &dyn Disk,
        pool: PoolPage,
        kind: IoKind,
        buffer: IoBuffer,
    ) -> Result<IoBuffer, IoError> {
        let request = IoRequest { kind, offset: pool.byte_offset(), buffer };
        let mut ended = disk.submit(vec![request]).await;
        let done = ended.pop().expect("each request ends");
        done.result.map(|()| done.buffer)
    }

    fn read_or_noted(
        &self,
        read: Result<IoBuffer, IoError>,
        owner: &impl PageOwner,
        place: WordPlace,
    ) -> Result<IoBuffer, Status> {
        add(&self.counters.read_modify_writes, 1);
        read.map_err(|error| {
            self.note_unreadable(&error, owner.ino(), place.file_page, place.pool);
            Status::Io
        })
    }
}
