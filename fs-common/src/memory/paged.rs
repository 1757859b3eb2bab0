//! Memory whose pages come and go under constant addresses, for an RNIC that looks each page up: what the IOMMU is to a commodity RNIC in
//! NP-RDMA (sections 3.1 and 4.2), in software.
//!
//! Owns two memories. *Frames* hold pages' bytes; frame 0 is the signature page, frame 1 the black hole, the others hold pages. The *table* has an
//! entry for each page, which says in which frame it is, and a word for each WRITE that is under way:
//!
//! ```text
//! 0      slots: 64 of 64 bytes; the first word is 0, or the pages that an RNIC is writing: 1 + the first; above 48 bits, how many follow it
//! 4096   entries: one u64 a page
//!
//!  63            32 31              2   1   0
//! +----------------+-----------------+---+---+
//! |     frame      |     version     | a | d |     a: an RNIC used the page; d: an RNIC wrote it
//! +----------------+-----------------+---+---+
//! ```
//!
//! A page that has no frame has entry frame 0: who reads it gets the signature, and what is written to it goes to the black hole. A zeroed table is a
//! valid one: no page has a frame. So making the memory touches none of it.
//!
//! `translated` has how RNICs copy.
//!
//! # Ordering
//! An RNIC that writes puts the pages into its slot, *then* loads their entries; the owner hides a page in its entry, *then* looks at the slots; both have
//! a sequentially consistent fence between (Dekker). So either the RNIC finds the page gone, or the owner finds the WRITE under way and waits for its
//! end. That is the flush of the IOMMU's cache in the paper. An RNIC that reads announces nothing: it loads the entry again behind the bytes, and throws
//! them away if it is another one. The owner's fence is also before the frame's next bytes: who has loaded one of these finds the page hidden.
//!
//! So a copy of a page, as far as it goes, is of one frame while that is the page's, and a frame is used for another page only when nobody writes to it.
//!
//! # Invariants
//! * A version is odd while the page is on its way out, and no version of a page comes again before 2^29 moves of it.
//! * An RNIC sets `d` before its first byte is in the frame, while the page has the frame. The owner takes the bit with the frame.
//!
//! # Failure
//! Peers that map the table (over `shm`) are trusted, but nothing they put there leads out of the memory: frames are checked at each use, and the
//! owner keeps its own record of which page has which frame. A peer that stops in the middle of a WRITE keeps the pages of that copy where they are, at
//! most `translated::WRITE_BATCH`, and no others.

pub mod translated;

pub use translated::Translated;

use super::SharedMemory;
use crate::ids::PAGE_SIZE;
use crate::sync::fence;
use parking_lot::Mutex;
use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// WRITEs that may be under way at once.
pub const SLOTS: usize = 64;
/// Slots of RNICs that run in the owner's process; the others are one a peer that maps the memory.
pub const LOCAL_SLOTS: usize = 8;
/// Bytes from slot to slot: a cache line, so that RNICs do not disturb each other.
const SLOT_STRIDE: usize = 64;
/// Where the entries begin in the table.
pub const ENTRIES_AT: usize = SLOTS * SLOT_STRIDE;
/// The frame that pages without a frame show to readers.
pub const SIGNATURE_FRAME: u32 = 0;
/// The frame into which writes to pages without a frame go.
pub const BLACK_HOLE_FRAME: u32 = 1;
/// The first frame that holds a page.
pub const FIRST_FRAME: u32 = 2;
/// The memory has fewer pages: so many have a number in a slot's word.
const PAGES_MAX: u64 = 1 << 48;

/// See [`PeerSlots`].
const RETIRED: u64 = u64::MAX;
const VERSION_MASK: u32 = 0x3fff_ffff;
const ACCESSED: u64 = 2;
const DIRTY: u64 = 1;

/// One entry of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageEntry(pub u64);

impl PageEntry {
    /// Packs an entry; the version is taken modulo 2^30.
    pub const fn new(frame: u32, version: u32, dirty: bool) -> Self {
        Self((frame as u64) << 32 | ((version & VERSION_MASK) as u64) << 2 | dirty as u64)
    }

    /// The entry in eight bytes that a READ brought.
    pub const fn of(bytes: [u8; 8]) -> Self {
        Self(u64::from_le_bytes(bytes))
    }

    /// The frame that has the bytes.
    pub const fn frame(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// The number of the page's moves.
    pub const fn version(self) -> u32 {
        (self.0 >> 2) as u32 & VERSION_MASK
    }

    /// Whether the page has a frame.
    pub const fn is_resident(self) -> bool {
        self.frame() >= FIRST_FRAME
    }

    /// Whether an RNIC wrote the page since it has its frame.
    pub const fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }

    /// Whether an RNIC used the page since the owner last asked.
    pub const fn is_accessed(self) -> bool {
        self.0 & ACCESSED != 0
    }

    /// Whether the page had its frame from one load, which gave `self`, to another, which gave `after`: then a WRITE between the two went into the
    /// page. How the RNICs used it meanwhile does not matter.
    pub const fn stayed(self, after: Self) -> bool {
        self.is_resident() && (self.0 ^ after.0) & !(ACCESSED | DIRTY) == 0
    }
}

/// The slots of peers that map the memory.
#[derive(Debug, Default)]
struct PeerSlots {
    /// Whose each slot is; 0: nobody's; `RETIRED`: of a peer that is gone and may still write. The owner's process's slots come first and are not used
    /// here.
    owners: Vec<u64>,
}

/// Memory whose pages come and go: the owner's side. See the module.
#[derive(Debug)]
pub struct PagedMemory {
    translated: Translated,
    peers: Mutex<PeerSlots>,
}

impl PagedMemory {
    /// Memory of `pages` pages, for which there are `frames` frames. No page has one yet. `signature` is the signature page.
    ///
    /// # Errors
    /// The system has no memory for it.
    pub fn new(pages: u64, frames: u32, signature: &[u8; PAGE_SIZE]) -> io::Result<Self> {
        let no_room = || io::Error::new(io::ErrorKind::OutOfMemory, "more than this machine can address");
        let pages_len = usize::try_from(pages).ok().filter(|_| pages < PAGES_MAX);
        let table_len = pages_len.and_then(|pages| pages.checked_mul(8));
        let table_len = table_len.and_then(|len| len.checked_add(ENTRIES_AT)).ok_or_else(no_room)?;
        let frames_len = (frames as usize).checked_add(FIRST_FRAME as usize).ok_or_else(no_room)?;
        let frames_len = frames_len.checked_mul(PAGE_SIZE).ok_or_else(no_room)?;
        let frames = SharedMemory::new("cuttlefs-np-frames", frames_len)?;
        frames.write(SIGNATURE_FRAME as usize * PAGE_SIZE, signature);
        let table = SharedMemory::new("cuttlefs-np-table", table_len)?;
        Ok(Self {
            translated: Translated::new(frames, table, pages),
            peers: Mutex::new(PeerSlots { owners: vec![0; SLOTS] }),
        })
    }

    /// What RNICs see.
    pub fn translated(&self) -> &Translated {
        &self.translated
    }

    /// The entry of a page.
    pub fn entry(&self, page: u64) -> PageEntry {
        PageEntry(self.table().load_u64(Translated::entry_at(page)))
    }

    fn table(&self) -> &SharedMemory {
        self.translated.table()
    }

    /// Gives a page that has none a frame, which holds the page's bytes already.
    pub fn show(&self, page: u64, frame: u32, dirty: bool) {
        assert!(frame >= FIRST_FRAME, "no page has a reserved frame");
        let entry = self.entry(page);
        let version = entry.version().wrapping_add(if entry.version() % 2 == 1 { 1 } else { 2 });
        let shown = PageEntry::new(frame, version, dirty);
        self.table().store_u64(Translated::entry_at(page), shown.0, Ordering::Release);
    }

    /// Takes a page away from RNICs: from now on they find the signature and the black hole. Its version is odd until [`Self::gone`] or
    /// [`Self::show`]. Returns whether an RNIC has written it. WRITEs that had begun go on: see [`Self::wait_for_writes`].
    pub fn hide(&self, page: u64) -> PageEntry {
        let entry = self.entry(page);
        let hidden = PageEntry::new(SIGNATURE_FRAME, entry.version().wrapping_add(1) | 1, false);
        let before = PageEntry(self.table().swap_u64(Translated::entry_at(page), hidden.0));
        fence(Ordering::SeqCst);
        before
    }

    /// The page that was hidden is out.
    pub fn gone(&self, page: u64) {
        let entry = self.entry(page);
        let gone = PageEntry::new(SIGNATURE_FRAME, entry.version().wrapping_add(entry.version() & 1), false);
        self.table().store_u64(Translated::entry_at(page), gone.0, Ordering::Release);
    }

    /// Whether an RNIC writes this page.
    pub fn is_written(&self, page: u64) -> bool {
        (0..SLOTS).any(|slot| translated::announces(self.table().load_u64(slot * SLOT_STRIDE), page))
    }

    /// Waits until no WRITE to a page that was hidden is under way. `false`: one still is, of a peer that has stopped.
    pub fn wait_for_writes(&self, page: u64, patience: Duration) -> bool {
        let mut since = None;
        while self.is_written(page) {
            if since.get_or_insert_with(Instant::now).elapsed() > patience {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Whether an RNIC has used the page since this was last asked.
    pub fn take_accessed(&self, page: u64) -> bool {
        let entry = self.entry(page);
        // If the entry changes meanwhile, it was used.
        entry.is_accessed()
            && self
                .table()
                .compare_exchange_u64(Translated::entry_at(page), entry.0, entry.0 & !ACCESSED)
                .map_or(true, |_| true)
    }

    /// A slot for a peer that maps the memory; `None`: there are no more.
    pub fn claim_slot(&self, peer: u64) -> Option<usize> {
        let mut peers = self.peers.lock();
        let slot = (LOCAL_SLOTS..SLOTS).find(|slot| peers.owners[*slot] == 0)?;
        peers.owners[slot] = peer;
        Some(slot)
    }

    /// Takes a slot back of which no peer has heard.
    pub fn return_slot(&self, slot: usize) {
        self.peers.lock().owners[slot] = 0;
    }

    /// Takes the slots of a peer back whose connection has ended. `is_over`: it writes nothing any more. The slot of another one is not given out
    /// again, since that one may still use it.
    pub fn release_slots(&self, peer: u64, is_over: bool) {
        let mut peers = self.peers.lock();
        for (slot, owner) in peers.owners.iter_mut().enumerate().filter(|(_, owner)| **owner == peer) {
            if is_over {
                self.table().store_u64(slot * SLOT_STRIDE, 0, Ordering::Release);
            }
            *owner = if is_over { 0 } else { RETIRED };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MARK: u8 = 0x5a;

    fn memory(pages: u64, frames: u32) -> PagedMemory {
        PagedMemory::new(pages, frames, &[MARK; PAGE_SIZE]).expect("memory")
    }

    #[test]
    fn golden_bits() {
        let entry = PageEntry::new(0x0102_0304, 0x0506_0708, true);
        assert_eq!(entry.0, 0x0102_0304_1418_1c21);
        assert_eq!((entry.frame(), entry.version()), (0x0102_0304, 0x0506_0708));
        assert!(entry.is_dirty() && !entry.is_accessed() && entry.is_resident());
        assert_eq!(PageEntry::of([0x21, 0x1c, 0x18, 0x14, 4, 3, 2, 1]), entry);
        assert_eq!(PageEntry::new(3, u32::MAX, false).version(), VERSION_MASK);
    }

    #[test]
    fn only_the_same_place_and_version_stayed() {
        let entry = PageEntry::new(5, 4, false);
        assert!(entry.stayed(PageEntry(entry.0 | ACCESSED | DIRTY)));
        assert!(!entry.stayed(PageEntry::new(5, 6, false)));
        assert!(!entry.stayed(PageEntry::new(6, 4, false)));
        let absent = PageEntry::new(SIGNATURE_FRAME, 4, false);
        assert!(!absent.stayed(absent));
    }

    #[test]
    fn pages_without_frames_show_the_signature_and_swallow_writes() {
        let memory = memory(4, 2);
        let rnic = memory.translated();
        let mut out = [0; 100];
        assert!(!rnic.read(PAGE_SIZE as u64 - 50, &mut out));
        assert_eq!(out, [MARK; 100]);
        assert!(!rnic.write(PAGE_SIZE as u64 - 50, &[1; 100]));
        rnic.read(PAGE_SIZE as u64 - 50, &mut out);
        assert_eq!(out, [MARK; 100], "the signature is never written");
        rnic.frames().fill(2 * PAGE_SIZE, 2 * PAGE_SIZE, 7);
        memory.show(1, 2, false);
        assert!(!rnic.write(PAGE_SIZE as u64 - 50, &[1; 100]), "one of the two is not there");
        assert!(!rnic.read(PAGE_SIZE as u64 - 50, &mut out));
        assert!(rnic.write(PAGE_SIZE as u64, &[1; 50]) && rnic.read(PAGE_SIZE as u64, &mut out[50..]));
        assert_eq!((&out[..50], &out[50..]), (&[MARK; 50][..], &[1; 50][..]));
        let shown = memory.entry(1);
        assert!(shown.is_dirty() && shown.is_accessed() && shown.version() == 2);
        assert!(memory.take_accessed(1) && !memory.take_accessed(1));
        assert!(memory.hide(1).is_dirty());
        assert_eq!(memory.entry(1).version(), 3);
        assert!(memory.wait_for_writes(1, Duration::ZERO));
        memory.gone(1);
        assert_eq!((memory.entry(1).version(), memory.entry(1).is_resident()), (4, false));
    }

    #[test]
    fn a_peer_that_stops_in_a_write_keeps_its_pages_and_no_others() {
        let memory = memory(6, 6);
        let slot = memory.claim_slot(77).expect("a slot");
        (0..6).for_each(|page| memory.show(page, FIRST_FRAME + page as u32, false));
        let announced = memory.translated().announce(slot, &(1..4));
        for page in 0..6 {
            memory.hide(page);
        }
        let is_free = |page| memory.wait_for_writes(page, Duration::from_millis(1));
        assert_eq!([0, 1, 2, 3, 4, 5].map(is_free), [true, false, false, false, true, true]);
        std::mem::forget(announced);
        memory.release_slots(77, false);
        assert!(
            (LOCAL_SLOTS + 1..SLOTS - 1).all(|_| memory.claim_slot(78) != Some(slot)),
            "somebody may still write"
        );
        assert!(memory.is_written(1));
        let other = memory.claim_slot(79).expect("another");
        std::mem::forget(memory.translated().announce(other, &(5..6)));
        assert!(memory.is_written(5));
        memory.release_slots(79, true);
        assert!(!memory.is_written(5), "the dead do not write");
        assert_eq!(memory.claim_slot(80), Some(other));
    }

    #[test]
    fn a_slots_word_names_its_pages_and_no_others() {
        for (first, count) in [(0, 1), (0, 16), (5, 3), (PAGES_MAX - 17, 16), (PAGES_MAX - 2, 1)] {
            let word = translated::announcement(&(first..first + count));
            let named = |page: u64| translated::announces(word, page);
            assert!((first..first + count).all(named), "{first} {count}");
            assert!(!named(first + count), "{first} {count}");
            assert!(first == 0 || !named(first - 1), "{first} {count}");
            assert!(!translated::announces(0, first), "an empty slot names none");
        }
    }

    #[test]
    fn an_entry_that_leads_out_of_the_frames_is_an_absent_page() {
        let memory = memory(4, 2);
        memory.table().store_u64(ENTRIES_AT, PageEntry::new(u32::MAX, 0, false).0, Ordering::Release);
        memory.table().store_u64(ENTRIES_AT + 8, PageEntry::new(4, 0, false).0, Ordering::Release);
        let mut out = [0; 2 * PAGE_SIZE];
        memory.translated().write(0, &[1; 2 * PAGE_SIZE]);
        memory.translated().read(0, &mut out);
        assert!(out.iter().all(|byte| *byte == MARK));
    }

    proptest! {
        #[test]
        fn ranges_are_copied_page_by_page(
            offset in 0usize..30 * PAGE_SIZE,
            len in prop_oneof![0usize..PAGE_SIZE, 0usize..18 * PAGE_SIZE],
            slot in 8usize..SLOTS,
            places in Just((0..48u32).collect::<Vec<_>>()).prop_shuffle(),
            sorted in any::<bool>(),
        ) {
            let memory = memory(48, 48);
            // Frames in the order of pages, so that neighbours are copied at once, or in another one.
            for (page, place) in places.iter().enumerate() {
                memory.show(page as u64, FIRST_FRAME + if sorted { page as u32 } else { *place }, false);
            }
            let source = SharedMemory::new("source", 18 * PAGE_SIZE).expect("memory");
            let bytes: Vec<u8> = (0..len).map(|at| (at / 7) as u8 | 1).collect();
            source.write(0, &bytes);
            prop_assert!(memory.translated().copy_in(slot, offset as u64, &source, 0, len));
            let mut out = vec![0; 48 * PAGE_SIZE];
            prop_assert!(memory.translated().read(0, &mut out));
            prop_assert_eq!(&out[offset..offset + len], &bytes[..]);
            prop_assert!(out[..offset].iter().chain(&out[offset + len..]).all(|byte| *byte == 0));
            source.fill(0, len, 0);
            prop_assert!(memory.translated().copy_out(offset as u64, &source, 0, len));
            let mut again = vec![0; len];
            source.read(0, &mut again);
            prop_assert_eq!(&again, &bytes);
            // Pages that are gone: all others are as they were.
            let gone = (offset / PAGE_SIZE) as u64 + 1;
            memory.hide(gone);
            let mut found = vec![0; len];
            let touched = len > 0 && (offset + len - 1) / PAGE_SIZE >= gone as usize;
            prop_assert_eq!(memory.translated().read(offset as u64, &mut found), !touched);
            for (at, byte) in found.iter().enumerate() {
                let wanted = if ((offset + at) / PAGE_SIZE) as u64 == gone { MARK } else { bytes[at] };
                prop_assert_eq!(*byte, wanted, "at {}", at);
            }
        }
    }
}
