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

use super::change::{Base, NewBytes, PageChange, PageOwner, Way};
use super::frames::Frames;
use super::{Pages, Source};
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::Disk;
use cuttlefs_common::ids::{FilePage, PoolPage};
use cuttlefs_common::region::ResidencyEntry;
use cuttlefs_common::status::Status;
use std::slice;

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
        change: impl FnOnce(u64) -> u64,
    ) -> Result<u64, Status> {
        let _guards = self.locks.lock_many([place.pool]).await;
        self.tally(owner.ino()).note(place.file_page.0, place.pool);
        if !self.residency.load(place.pool).is_resident() {
            let WordPlace { file_page, pool, offset_in_page } = place;
            let page = PageChange {
                file_page,
                pool,
                base: Base::Stored,
                offset_in_page,
                len: 8,
                offset_in_source: 0,
            };
            let mut ways = [self.take_frame().map_or(Way::Direct, Way::Frame)];
            let _permit = self.permit_for(&ways).await;
            let stored = self.read_stored(disk, owner, slice::from_ref(&page), &mut ways).await?;
            match ways {
                [Way::Frame(frame)] => self.residency.publish(pool, frame, false),
                _ => return self.change_word_on_ssd(disk, owner, &page, stored, change).await,
            }
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

    /// The word of a page without a frame, whose bytes were read. The caller has its lock.
    async fn change_word_on_ssd(
        &self,
        disk: &dyn Disk,
        owner: &impl PageOwner,
        page: &PageChange,
        mut stored: Vec<(usize, AlignedBuf)>,
        change: impl FnOnce(u64) -> u64,
    ) -> Result<u64, Status> {
        let mut bytes = [0; 8];
        let (_, read) = stored.first().expect("a part of a stored page is read");
        bytes.copy_from_slice(&read.as_slice()[page.offset_in_page..page.offset_in_page + 8]);
        let old = u64::from_le_bytes(bytes);
        let new = change(old);
        if new == old {
            return Ok(old);
        }
        let bytes = new.to_le_bytes();
        let bytes = NewBytes::From(Source::Bytes(&bytes));
        self.write_direct(disk, owner, slice::from_ref(page), bytes, &[(0, vec![0])], &mut stored)
            .await
            .map(|()| old)
    }
}
