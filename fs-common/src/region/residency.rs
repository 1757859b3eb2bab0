//! The residency table: for each pool page a `u64` that tells where the page's bytes are.
//!
//! ```text
//!  63            32 31                1   0
//! +----------------+-------------------+---+
//! |  frame index   |       seq         | d |
//! +----------------+-------------------+---+
//! ```
//!
//! A zeroed table is a valid one: every page points at the magic frame, seq 0, clean.
//! It is NP-RDMA's version table (section 4.2) and TeRM's page table (section 4.1.1) in one.
//!
//! # Ordering
//! Written only by the server, under the page's block lock, with release; read by anyone with acquire.
//! A reader that sees the same even `seq` and frame before and after its copy, with an acquire fence
//! between the copy and the second load, has copied that page's bytes untorn.

use crate::ids::{FrameIndex, PoolPage};
use crate::memory::SharedMemory;
use crate::sync::fence;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const SEQ_MASK: u32 = 0x7fff_ffff;

/// One residency entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResidencyEntry(pub u64);

impl ResidencyEntry {
    /// Packs an entry; `seq` is taken modulo 2^31.
    pub const fn new(frame: FrameIndex, seq: u32, dirty: bool) -> Self {
        Self(((frame.0 as u64) << 32) | (((seq & SEQ_MASK) as u64) << 1) | dirty as u64)
    }

    /// The frame with the bytes; the magic frame if they are on SSD.
    pub const fn frame(self) -> FrameIndex {
        FrameIndex((self.0 >> 32) as u32)
    }

    /// The version; odd while bytes change.
    pub const fn seq(self) -> u32 {
        (self.0 >> 1) as u32 & SEQ_MASK
    }

    /// Whether the frame holds bytes that the SSD does not have.
    pub const fn is_dirty(self) -> bool {
        self.0 & 1 == 1
    }

    /// Whether the page is in a frame of its own.
    pub const fn is_resident(self) -> bool {
        self.frame().0 >= FrameIndex::FIRST_USABLE.0
    }

    /// Whether somebody is changing the page's bytes or place.
    pub const fn is_changing(self) -> bool {
        self.seq() & 1 == 1
    }

    /// The version after this one.
    pub const fn next_seq(self) -> u32 {
        self.seq().wrapping_add(1) & SEQ_MASK
    }

    /// Whether a copy made between two loads that gave `self` and `after` is valid: same frame, same even
    /// version. The dirty bit may change without a byte changing.
    pub const fn validates(self, after: Self) -> bool {
        !self.is_changing() && (self.0 | 1) == (after.0 | 1)
    }
}

/// The table of all residency entries of a pool, in shared memory.
#[derive(Clone, Debug)]
pub struct ResidencyTable {
    memory: Arc<SharedMemory>,
}

impl ResidencyTable {
    /// A table for `pool_pages` pages, all on SSD. Sparse: memory is used as entries are written.
    pub fn new(pool_pages: u64) -> io::Result<Self> {
        let len = usize::try_from(pool_pages.saturating_mul(8))
            .map_err(|_| io::Error::other("the pool is too large for this machine"))?;
        Ok(Self { memory: Arc::new(SharedMemory::new("cuttlefs-residency", len)?) })
    }

    /// A view of a table that another process owns.
    pub fn over(memory: Arc<SharedMemory>) -> Self {
        Self { memory }
    }

    /// The memory, to export to clients.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// The entry in eight bytes that a READ brought.
    pub fn entry_of(bytes: [u8; 8]) -> ResidencyEntry {
        ResidencyEntry(u64::from_le_bytes(bytes))
    }

    /// Whether the table has an entry for this page; check this for every page number that comes from a peer or a cached layout.
    pub fn covers(&self, page: PoolPage) -> bool {
        page.0.checked_mul(8).is_some_and(|offset| self.memory.contains(offset, 8))
    }

    /// Loads an entry with acquire ordering, before the copy it guards.
    pub fn load(&self, page: PoolPage) -> ResidencyEntry {
        ResidencyEntry(self.memory.load_u64(page.0 as usize * 8))
    }

    /// Loads an entry after the copy it validates: the fence keeps the copy's loads before this one.
    pub fn load_after_copy(&self, page: PoolPage) -> ResidencyEntry {
        fence(Ordering::Acquire);
        ResidencyEntry(self.memory.load_u64_relaxed(page.0 as usize * 8))
    }

    /// Stores an entry with release ordering. Server only, under the page's block lock.
    pub fn store(&self, page: PoolPage, entry: ResidencyEntry) {
        self.memory.store_u64(page.0 as usize * 8, entry.0, Ordering::Release);
    }

    /// Marks the page as changing: makes `seq` odd, ordered before the byte changes that follow. Server only, under the page's block lock. Returns
    /// the new entry.
    pub fn begin_change(&self, page: PoolPage) -> ResidencyEntry {
        let entry = self.load(page);
        assert!(!entry.is_changing(), "two writers of pool page {page}");
        let odd = ResidencyEntry::new(entry.frame(), entry.next_seq(), entry.is_dirty());
        self.memory.store_u64(page.0 as usize * 8, odd.0, Ordering::Relaxed);
        // Pairs with the acquire fence in `load_after_copy`: a reader that sees a changed byte also sees the odd `seq`.
        fence(Ordering::Release);
        odd
    }

    /// Ends the change of `begin_change`: the page is now in `frame`, and its version is even again.
    pub fn end_change(&self, page: PoolPage, frame: FrameIndex, dirty: bool) {
        let entry = self.load(page);
        assert!(entry.is_changing(), "pool page {page} was not being changed");
        self.store(page, ResidencyEntry::new(frame, entry.next_seq(), dirty));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bits() {
        let entry = ResidencyEntry::new(FrameIndex(0x0102_0304), 0x0506_0708, true);
        assert_eq!(entry.0, 0x0102_0304_0a0c_0e11);
        assert_eq!(entry.frame(), FrameIndex(0x0102_0304));
        assert_eq!(entry.seq(), 0x0506_0708);
        assert!(entry.is_dirty());
    }

    #[test]
    fn seq_wraps_inside_31_bits() {
        let last = ResidencyEntry::new(FrameIndex(9), SEQ_MASK, false);
        assert!(last.is_changing());
        assert_eq!(last.next_seq(), 0);
        assert_eq!(last.frame(), FrameIndex(9));
    }

    #[test]
    fn validation_wants_same_frame_and_even_seq_but_not_dirty() {
        let before = ResidencyEntry::new(FrameIndex(5), 4, false);
        assert!(before.validates(ResidencyEntry::new(FrameIndex(5), 4, true)));
        assert!(!before.validates(ResidencyEntry::new(FrameIndex(5), 6, false)));
        assert!(!before.validates(ResidencyEntry::new(FrameIndex(6), 4, false)));
        let odd = ResidencyEntry::new(FrameIndex(5), 5, false);
        assert!(!odd.validates(odd));
    }

    #[test]
    fn a_fresh_table_says_everything_is_on_ssd() {
        let table = ResidencyTable::new(100).expect("table");
        let entry = table.load(PoolPage(99));
        assert_eq!(entry.frame(), FrameIndex::MAGIC);
        assert!(!entry.is_resident() && !entry.is_changing() && !entry.is_dirty());
        table.begin_change(PoolPage(7));
        assert!(table.load(PoolPage(7)).is_changing());
        table.end_change(PoolPage(7), FrameIndex(3), true);
        assert_eq!(table.load(PoolPage(7)), ResidencyEntry::new(FrameIndex(3), 2, true));
        let mut bytes = [0; 8];
        table.memory().read(7 * 8, &mut bytes);
        assert_eq!(ResidencyTable::entry_of(bytes), table.load(PoolPage(7)));
        assert!(!table.covers(PoolPage(u64::MAX)));
    }
}
