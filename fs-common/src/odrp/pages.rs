//! The memory of a node: pages, the queue of free ones, translation tables.
//!
//! # Invariants
//! 1. A page is in exactly one place: an element of the queue, an entry of one table, or in the hands of a chain that is under way.
//! 2. Elements of the queue outside of `head .. tail` are zero, and entries that map nothing.
//!
//! Chains change all of this through the RNIC. `set_right` establishes the invariants anew while no chain is under way: free is what no table maps.

use super::chains::{Keys, Kind, Ring};
use crate::ids::PAGE_SIZE;
use crate::memory::SharedMemory;
use crate::rdma::chain::{FIRST_ADDRESS, View};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Bytes of a page.
pub(super) const PAGE_LEN: u32 = PAGE_SIZE as u32;
/// The most pages of a node, and of a table: 1 TiB.
pub const PAGES_MAX: u64 = 1 << 28;
/// Bytes of an address.
const WORD: usize = 8;

/// A translation table: the address of the page of each entry, big-endian, or zero.
#[derive(Clone, Debug)]
pub struct Table {
    /// Its memory.
    pub memory: Arc<SharedMemory>,
    /// Its entries.
    pub pages: u64,
}

impl Table {
    /// An empty table.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new(pages: u64) -> io::Result<Self> {
        Ok(Self { memory: Arc::new(SharedMemory::new("cuttlefs-odrp-table", pages as usize * WORD)?), pages })
    }

    /// The address that an entry has; 0 if it maps nothing.
    pub fn get(&self, page: u64) -> u64 {
        u64::from_be(self.memory.load_u64(page as usize * WORD))
    }

    /// Entries that map something.
    pub fn mapped(&self) -> u64 {
        (0..self.pages).filter(|page| self.get(*page) != 0).count() as u64
    }
}

/// What was found when the queue was set right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Pages that tables map.
    pub mapped: u64,
    /// Pages that are free now.
    pub free: u64,
    /// Entries that named no page, or a page that another entry has: they map nothing now. None, as long as chains are the only ones that write tables.
    pub wrong: u64,
}

/// Pages, and the queue of free ones.
#[derive(Clone, Debug)]
pub struct Pages {
    /// The pages.
    pub pool: Arc<SharedMemory>,
    /// Elements, head, tail.
    pub free: Arc<SharedMemory>,
    count: u64,
    ring_len: u64,
}

impl Pages {
    /// `count` pages, all of them free.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new(count: u64) -> io::Result<Self> {
        let count = count.clamp(1, PAGES_MAX);
        // Two elements at least, so that one element is within the bits that are counted.
        let ring_len = count.next_power_of_two().max(2) * WORD as u64;
        let pool = SharedMemory::new("cuttlefs-odrp-pool", count as usize * PAGE_SIZE)?;
        let free = SharedMemory::new("cuttlefs-odrp-free", ring_len as usize + 2 * WORD)?;
        let pages = Self { pool: Arc::new(pool), free: Arc::new(free), count, ring_len };
        pages.set_right(&[]);
        Ok(pages)
    }

    /// The number of pages.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Where head and tail are.
    pub fn ring(&self) -> Ring {
        Ring { head_at: self.ring_len, tail_at: self.ring_len + WORD as u64, top: self.ring_len / 2 }
    }

    /// The address of a page.
    pub fn address(&self, page: u64) -> u64 {
        FIRST_ADDRESS + page * PAGE_SIZE as u64
    }

    /// The page at an address.
    pub fn page_at(&self, address: u64) -> Option<u64> {
        let offset = address.checked_sub(FIRST_ADDRESS)?;
        let page = offset / PAGE_SIZE as u64;
        (offset.is_multiple_of(PAGE_SIZE as u64) && page < self.count).then_some(page)
    }

    /// The elements of the queue that are not zero, in the ring's order.
    #[cfg(test)]
    pub fn queued(&self) -> Vec<u64> {
        let elements =
            (0..self.ring_len as usize / WORD).map(|at| u64::from_be(self.free.load_u64(at * WORD)));
        elements.filter(|address| *address != 0).collect()
    }

    /// Pages that are free, by head and tail. A chain under way may have moved one of the two.
    pub fn free_count(&self) -> u64 {
        let ring = self.ring();
        let at = |offset: u64| self.free.load_u64(offset as usize);
        let between = at(ring.tail_at).wrapping_sub(at(ring.head_at)) & (self.ring_len - 1);
        match between / WORD as u64 {
            // Full or empty: the element says which.
            0 if self.element_at_head() == 0 => 0,
            0 => self.ring_len / WORD as u64,
            free => free,
        }
    }

    fn element_at_head(&self) -> u64 {
        let head = self.free.load_u64(self.ring().head_at as usize);
        let offset = head.wrapping_sub(FIRST_ADDRESS) & (self.ring_len - WORD as u64);
        self.free.load_u64(offset as usize)
    }

    /// Makes the queue anew from the tables. No chain may be under way.
    pub fn set_right(&self, tables: &[&Table]) -> Found {
        let mut found = Found::default();
        let mut taken = vec![0u64; (self.count as usize).div_ceil(64)];
        for table in tables {
            for entry in 0..table.pages {
                let address = table.get(entry);
                if address == 0 {
                    continue;
                }
                let bit = |page: u64| 1u64 << (page % 64);
                match self.page_at(address) {
                    Some(page) if taken[page as usize / 64] & bit(page) == 0 => {
                        taken[page as usize / 64] |= bit(page);
                        found.mapped += 1;
                    }
                    _ => {
                        table.memory.store_u64(entry as usize * WORD, 0, Ordering::Release);
                        found.wrong += 1;
                    }
                }
            }
        }
        self.free.fill(0, self.ring_len as usize, 0);
        for page in (0..self.count).filter(|page| taken[*page as usize / 64] >> (page % 64) & 1 == 0) {
            let element = self.address(page).to_be();
            self.free.store_u64(found.free as usize * WORD, element, Ordering::Release);
            found.free += 1;
        }
        let ring = self.ring();
        let tail = (found.free * WORD as u64) & (self.ring_len - 1);
        self.free.store_u64(ring.head_at as usize, FIRST_ADDRESS, Ordering::Release);
        self.free.store_u64(ring.tail_at as usize, FIRST_ADDRESS + tail, Ordering::Release);
        found
    }
}

/// What the chains of a kind may do with each memory. The views are of `queue`, `pool`, `free`, `table` in this order.
pub fn views(kind: Kind, [queue, pool, free, table]: [View; 4]) -> Vec<View> {
    let mut views = vec![queue.writable()];
    views.push(if kind.brings() { pool.writable() } else { pool });
    if kind.changes_queue() {
        views.push(free.atomic());
    }
    let table = table.of_words();
    views.push(match kind {
        Kind::Load | Kind::MappedStore => table,
        Kind::UnmappedStore => table.writable(),
        Kind::Invalidate => table.atomic(),
    });
    views
}

/// The keys of four views.
pub fn keys([queue, pool, free, table]: &[View; 4]) -> Keys {
    Keys { queue: queue.key(), pool: pool.key(), free: free.key(), table: table.key() }
}
