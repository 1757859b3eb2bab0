//! Frames and table, as RNICs see them: how a READ and a WRITE copy.
//!
//! # READs
//! An RNIC loads the entries, copies, and loads them again. A page whose entry is the same had its frame all the while, so the bytes are the page's (page
//! versions, NP-RDMA section 3.1.2). A page whose entry is another one is copied again, some times, and then counts as one that is not there. Nobody
//! waits for a READ.
//!
//! # WRITEs
//! Bytes that went into a frame of another page cannot be taken back. So an RNIC announces the pages in its slot before it loads their entries, and an owner
//! waits for the end of what is announced ("Ordering" in the module above).
//!
//! # Bounds
//! A READ looks at up to `READ_BATCH` pages before it looks at the first again, a WRITE announces up to [`WRITE_BATCH`]: an owner waits for no more. Pages
//! that are side by side in the frames, too, are one copy.

use super::{
    ACCESSED, BLACK_HOLE_FRAME, DIRTY, ENTRIES_AT, FIRST_FRAME, LOCAL_SLOTS, PAGES_MAX, PageEntry,
    SIGNATURE_FRAME, SLOT_STRIDE,
};
use crate::ids::PAGE_SIZE;
use crate::memory::SharedMemory;
use crate::sync::fence;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Pages that one announcement of a WRITE names: 64 KiB take some microseconds.
pub const WRITE_BATCH: usize = 16;
/// Pages that a READ looks up together: the longest of most links. Shorter ones have no use for as much room.
const READ_BATCH: usize = 256;
const SHORT_READ_BATCH: usize = 16;
/// Looks at a page that moves all the time.
const LOOKS: usize = 3;

/// What a copy does to a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Read,
    Write,
}

impl Use {
    /// The frame in the place of one that is not there.
    const fn absent(self) -> PageEntry {
        let frame = match self {
            Self::Read => SIGNATURE_FRAME,
            Self::Write => BLACK_HOLE_FRAME,
        };
        PageEntry::new(frame, 0, false)
    }

    const fn marks(self) -> u64 {
        match self {
            Self::Read => ACCESSED,
            Self::Write => ACCESSED | DIRTY,
        }
    }
}

/// What a slot holds while the pages of `pages` are written: 1 + the first, and above 48 bits the number of the others.
pub(super) fn announcement(pages: &Range<u64>) -> u64 {
    (pages.end - pages.start - 1) << PAGES_MAX.trailing_zeros() | (pages.start + 1)
}

/// Whether a slot's word announces this page.
pub(super) fn announces(word: u64, page: u64) -> bool {
    let first = word & (PAGES_MAX - 1);
    first != 0 && (page + 1).wrapping_sub(first) <= word >> PAGES_MAX.trailing_zeros()
}

/// Frames and table: the owner's own, and those of peers that map the two memories.
#[derive(Debug)]
pub struct Translated {
    frames: Arc<SharedMemory>,
    table: Arc<SharedMemory>,
    pages: u64,
    /// Frames that lie inside of `frames`, whatever an entry names.
    frame_count: usize,
}

/// A slot with pages in it; empty again when this is dropped.
pub(super) struct Announced<'t> {
    of: &'t Translated,
    slot: usize,
}

impl Drop for Announced<'_> {
    fn drop(&mut self) {
        self.of.table.store_u64(self.slot * SLOT_STRIDE, 0, Ordering::Release);
    }
}

/// The pages of a range that are copied together.
#[derive(Clone, Debug)]
struct Batch {
    pages: Range<u64>,
    /// First byte in the first page.
    in_page: usize,
    /// First byte in the range.
    done: usize,
    len: usize,
}

impl Batch {
    /// The part of pages that follow each other, by their numbers in the batch: first byte in the first of them, in the range, and length.
    fn part(&self, pages: Range<usize>) -> (usize, usize, usize) {
        // Offsets from the first byte of the batch's first page.
        let start = (pages.start * PAGE_SIZE).max(self.in_page);
        let end = (pages.end * PAGE_SIZE).min(self.in_page + self.len);
        (start - pages.start * PAGE_SIZE, self.done + start - self.in_page, end - start)
    }
}

impl Translated {
    pub(super) fn new(frames: SharedMemory, table: SharedMemory, pages: u64) -> Self {
        let frame_count = frames.len() / PAGE_SIZE;
        Self { frames: Arc::new(frames), table: Arc::new(table), pages, frame_count }
    }

    /// A view of memory that another process owns.
    ///
    /// # Errors
    /// The memories are too small for that many pages.
    pub fn over(frames: SharedMemory, table: SharedMemory, len: u64) -> io::Result<Self> {
        let pages = len / PAGE_SIZE as u64;
        let table_len = pages.checked_mul(8).and_then(|entries| entries.checked_add(ENTRIES_AT as u64));
        let fits = table_len.is_some_and(|wanted| wanted <= table.len() as u64)
            && pages < PAGES_MAX
            && frames.len() >= (FIRST_FRAME as usize + 1) * PAGE_SIZE
            && len.is_multiple_of(PAGE_SIZE as u64);
        if !fits || !table.is_writable() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the peer's paged memory has a wrong size",
            ));
        }
        Ok(Self::new(frames, table, pages))
    }

    /// Length of the memory in bytes.
    pub fn len(&self) -> u64 {
        self.pages * PAGE_SIZE as u64
    }

    /// Whether there are no pages.
    pub fn is_empty(&self) -> bool {
        self.pages == 0
    }

    /// The frames.
    pub fn frames(&self) -> &Arc<SharedMemory> {
        &self.frames
    }

    /// The table.
    pub fn table(&self) -> &Arc<SharedMemory> {
        &self.table
    }

    pub(super) fn entry_at(page: u64) -> usize {
        ENTRIES_AT + page as usize * 8
    }

    /// Copies a range out, as an RNIC in the owner's process does. Returns whether all pages were there.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> bool {
        self.read_each(offset, out.len(), |at, done, part| {
            self.frames.read_as_rnic(at, &mut out[done..done + part]);
        })
    }

    /// Copies a range to other memory. Returns whether all pages were there.
    pub fn copy_out(&self, offset: u64, to: &SharedMemory, to_offset: usize, len: usize) -> bool {
        self.read_each(offset, len, |at, done, part| {
            self.frames.copy_as_rnic(at, to, to_offset + done, part);
        })
    }

    /// Copies bytes in, as an RNIC in the owner's process does. Returns whether all pages were there.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> bool {
        self.write_each(None, offset, bytes.len(), |at, done, part| {
            self.frames.write_word_last(at, &bytes[done..done + part]);
        })
    }

    /// Copies other memory to a range. The slot is this peer's. Returns whether all pages were there.
    pub fn copy_in(
        &self,
        slot: usize,
        offset: u64,
        from: &SharedMemory,
        from_offset: usize,
        len: usize,
    ) -> bool {
        self.write_each(Some(slot), offset, len, |at, done, part| {
            from.copy_to_word_last(from_offset + done, &self.frames, at, part);
        })
    }

    /// Copies bytes in, as [`Self::copy_in`] does.
    pub fn write_in(&self, slot: usize, offset: u64, bytes: &[u8]) -> bool {
        self.write_each(Some(slot), offset, bytes.len(), |at, done, part| {
            self.frames.write_word_last(at, &bytes[done..done + part]);
        })
    }

    /// Cuts a range into batches of up to `most` pages.
    fn batches(offset: u64, len: usize, most: usize) -> impl Iterator<Item = Batch> {
        let mut done = 0;
        std::iter::from_fn(move || {
            let at = offset + done as u64;
            let in_page = (at % PAGE_SIZE as u64) as usize;
            let part = (most * PAGE_SIZE - in_page).min(len - done);
            let pages = at / PAGE_SIZE as u64..(at + part as u64).div_ceil(PAGE_SIZE as u64);
            let batch = Batch { pages, in_page, done, len: part };
            done += part;
            (part > 0).then_some(batch)
        })
    }

    fn check(&self, offset: u64, len: usize) {
        assert!(
            offset.checked_add(len as u64).is_some_and(|end| end <= self.len()),
            "outside of paged memory"
        );
    }

    /// The entry of a page that is about to be used, with the marks of that; another frame's if the page is not there.
    fn look_up(&self, page: u64, how: Use) -> PageEntry {
        let at = Self::entry_at(page);
        loop {
            let entry = PageEntry(self.table.load_u64(at));
            if !entry.is_resident() || entry.frame() as usize >= self.frame_count {
                return how.absent();
            }
            let marked = PageEntry(entry.0 | how.marks());
            // A change of the entry sends this round again; only moves and first uses change it.
            if entry == marked || self.table.compare_exchange_u64(at, entry.0, marked.0).is_ok() {
                return marked;
            }
        }
    }

    /// Looks the pages of a batch up, and calls `copy` for their bytes: offset in the frames, offset in the range, length. Pages whose frames
    /// are side by side are one call. `look` is told of each entry.
    fn copy_batch(
        &self,
        batch: &Batch,
        how: Use,
        mut look: impl FnMut(usize, PageEntry),
        copy: &mut impl FnMut(usize, usize, usize),
    ) {
        let mut copy_run = |pages: Range<usize>, frame: u32| {
            let (in_page, done, len) = batch.part(pages);
            copy(frame as usize * PAGE_SIZE + in_page, done, len);
        };
        // The first page of what is side by side in the frames so far, its frame, and the frame behind.
        let (mut first, mut frame, mut next) = (0, 0, 0);
        for (index, page) in batch.pages.clone().enumerate() {
            let entry = self.look_up(page, how);
            look(index, entry);
            if entry.frame() != next {
                if index > 0 {
                    copy_run(first..index, frame);
                }
                (first, frame) = (index, entry.frame());
            }
            next = entry.frame() + 1;
        }
        copy_run(first..(batch.pages.end - batch.pages.start) as usize, frame);
    }

    fn read_each(&self, offset: u64, len: usize, mut copy: impl FnMut(usize, usize, usize)) -> bool {
        self.check(offset, len);
        let in_page = (offset % PAGE_SIZE as u64) as usize;
        if len == 0 {
            true
        } else if in_page + len <= PAGE_SIZE {
            self.read_page(offset / PAGE_SIZE as u64, (in_page, 0, len), LOOKS, &mut copy)
        } else if in_page + len <= SHORT_READ_BATCH * PAGE_SIZE {
            self.read_batches::<SHORT_READ_BATCH>(offset, len, &mut copy)
        } else {
            self.read_batches::<READ_BATCH>(offset, len, &mut copy)
        }
    }

    /// Reads a part of a page: first byte in the page, in the range, and length. Returns whether the page was there.
    fn read_page(
        &self,
        page: u64,
        (in_page, done, part): (usize, usize, usize),
        looks: usize,
        copy: &mut impl FnMut(usize, usize, usize),
    ) -> bool {
        for _ in 0..looks {
            let entry = self.look_up(page, Use::Read);
            copy(entry.frame() as usize * PAGE_SIZE + in_page, done, part);
            // The bytes were loaded before what is loaded now.
            fence(Ordering::Acquire);
            if !entry.is_resident() || self.is_still(page, entry) {
                return entry.is_resident();
            }
        }
        copy(Use::Read.absent().frame() as usize * PAGE_SIZE + in_page, done, part);
        false
    }

    fn read_batches<const MOST: usize>(
        &self,
        offset: u64,
        len: usize,
        copy: &mut impl FnMut(usize, usize, usize),
    ) -> bool {
        let mut all_there = true;
        let mut entries = [PageEntry::default(); MOST];
        for batch in Self::batches(offset, len, MOST) {
            self.copy_batch(&batch, Use::Read, |index, entry| entries[index] = entry, copy);
            // As in `read_page`.
            fence(Ordering::Acquire);
            for (index, (page, entry)) in batch.pages.clone().zip(&entries).enumerate() {
                all_there &= self.is_still(page, *entry)
                    || entry.is_resident()
                        && self.read_page(page, batch.part(index..index + 1), LOOKS - 1, copy);
            }
        }
        all_there
    }

    /// Whether a page is where it was when this entry was loaded.
    fn is_still(&self, page: u64, entry: PageEntry) -> bool {
        entry.stayed(PageEntry(self.table.load_u64(Self::entry_at(page))))
    }

    fn write_each(
        &self,
        slot: Option<usize>,
        offset: u64,
        len: usize,
        mut copy: impl FnMut(usize, usize, usize),
    ) -> bool {
        self.check(offset, len);
        let mut all_there = true;
        for batch in Self::batches(offset, len, WRITE_BATCH) {
            let announced = match slot {
                Some(slot) => self.announce(slot, &batch.pages),
                None => self.announce_here(&batch.pages),
            };
            let mut look = |_, entry: PageEntry| all_there &= entry.is_resident();
            self.copy_batch(&batch, Use::Write, &mut look, &mut copy);
            drop(announced);
        }
        all_there
    }

    /// Announces pages in a slot that is this caller's alone. What it loads now, an owner that hides one of them has changed, or it sees the slot.
    pub(super) fn announce(&self, slot: usize, pages: &Range<u64>) -> Announced<'_> {
        self.table.store_u64_fenced(slot * SLOT_STRIDE, announcement(pages));
        Announced { of: self, slot }
    }

    /// Announces pages in one of the slots of the owner's process.
    fn announce_here(&self, pages: &Range<u64>) -> Announced<'_> {
        loop {
            for slot in 0..LOCAL_SLOTS {
                let word = announcement(pages);
                if self.table.compare_exchange_u64_fenced(slot * SLOT_STRIDE, 0, word).is_ok() {
                    return Announced { of: self, slot };
                }
            }
            // Copies are short.
            std::thread::yield_now();
        }
    }
}
