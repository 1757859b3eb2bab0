//! Checksums of pool pages: a CRC32C for each page, verified by every read from SSD.
//!
//! `PageSums` has the sums and the marks of a pool, for all workers. `SummedDisk` is a worker's disk with them: the layers above read and write pages
//! as on any disk. docs/pages.md, "Checksums", has the crash cases.
//!
//! # A page's sum
//! | value | meaning |
//! | --- | --- |
//! | 0 | never written: a read of the page fails |
//! | 0xffffffff | a write of the page failed or was abandoned: the page is a mix of old and new, and is not verified |
//! | other | CRC32C of the page's bytes, then of its number as 8 little-endian bytes; 1 if that is one of the values above |
//!
//! The number is included so that a page that was written to another's place is noticed. Sums are 4 little-endian bytes each, in the order of pages.
//!
//! # How it works
//! Pages are overwritten in place, and a power loss may leave any mix of the old and the new bytes, and the old or the new sum. So before a page is
//! overwritten on which a file may rely, its zone is marked durably (`marks`). After a crash a mismatch in a marked zone belongs to a write that was
//! not synced, and POSIX permits it. A mismatch anywhere else is rot. A page that was allocated and not written since needs no mark, because no
//! durable extent has it.
//!
//! # Invariants
//! * When a write is done, its sum is in `blocks`. When a sync is done, the sums of all writes before it are on disk as well.
//! * A write to a page whose `settled` bit is set has its zone marked durably from before it begins until it and its
//!   sum are durable.
//! * `settled` is set for every page that a durable extent says is written, and perhaps for others.
//!
//! # Failure
//! A page whose sum does not match is an `IoError` that says so (`IoError::is_rot`) and names the page, so that its neighbours in the same IO can be
//! told apart (`IoError::concerns`). A failed sync of any caller is final (`final_sync`).

mod blocks;
mod disk;
mod final_sync;
/// The places of sums.
pub mod layout;
mod marks;
mod memory_marks;
mod turn;

pub use disk::{SummedDisk, Verdict};
pub use layout::{SUMS_PER_BLOCK, SumLayout, ZONE_PAGES};
pub use marks::MarkStore;
pub use memory_marks::MemoryMarks;

use blocks::Blocks;
use cuttlefs_common::ids::{PAGE_SIZE, PoolPage};
use marks::Marks;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Default memory for sum blocks: the sums of 16 GiB of pages in use.
pub const DEFAULT_CACHE_BYTES: usize = 16 << 20;

/// The sum of a page that was never written.
const NEVER: u32 = 0;
/// The sum of a page that is not verified.
const UNKNOWN: u32 = u32::MAX;

/// The sum of a page with these bytes.
pub fn page_sum(page: PoolPage, bytes: &[u8]) -> u32 {
    debug_assert_eq!(bytes.len(), PAGE_SIZE);
    match crc32c::crc32c_append(crc32c::crc32c(bytes), &page.0.to_le_bytes()) {
        NEVER | UNKNOWN => 1,
        sum => sum,
    }
}

/// Pages whose sums do not match their bytes.
#[derive(Debug, thiserror::Error)]
#[error("the checksum does not match the bytes of pool pages {}", list(.pages))]
pub struct RottenPages {
    /// The pages, in ascending order.
    pub pages: Vec<PoolPage>,
}

fn list(pages: &[PoolPage]) -> String {
    pages.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Counts since the start.
#[derive(Debug, Default)]
struct Counters {
    verified: AtomicU64,
    accepted: AtomicU64,
    unverified: AtomicU64,
    resummed: AtomicU64,
    foreground: AtomicU64,
}

/// Figures, in pages unless they say otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SumFigures {
    /// Pages whose sums matched when they were read.
    pub verified: u64,
    /// Pages read in a zone that was being written to when the last server went down, whose sums did not match.
    pub accepted: u64,
    /// Pages read without a sum, because a write of them had failed.
    pub unverified: u64,
    /// Pages that got a new sum after a crash or a failed write.
    pub resummed: u64,
    /// Marked zones.
    pub marked_zones: u64,
    /// Marked zones that the last server left and that were not recovered yet.
    pub recovering_zones: u64,
    /// Times a write waited for a mark.
    pub mark_waits: u64,
    /// Sum blocks in memory.
    pub blocks: usize,
    /// Most sum blocks in memory when nobody uses them.
    pub blocks_bound: usize,
}

/// The sums and marks of a pool.
#[derive(Debug)]
pub struct PageSums {
    layout: SumLayout,
    blocks: Blocks,
    marks: Marks,
    /// A bit for each page.
    settled: Box<[AtomicU64]>,
    /// Set once, with release, after a failed sync; read with acquire after every sync.
    sync_failed: AtomicBool,
    counters: Counters,
}

impl PageSums {
    /// The sums of a pool with this layout. Durable extents say that the pages whose bits are set in `written` are written, and `marked` are the
    /// zones that the server before left marked in `store`. `cache_bytes` bounds the sum blocks in memory.
    pub fn new(
        layout: SumLayout,
        cache_bytes: usize,
        mut written: Vec<u64>,
        marked: impl IntoIterator<Item = u64>,
        store: Arc<dyn MarkStore>,
    ) -> Self {
        written.resize(layout.pages().div_ceil(64) as usize, 0);
        let zones = layout.zones();
        let marks = Marks::new(marked.into_iter().filter(|zone| *zone < zones), store);
        let (left, ..) = marks.figures();
        if left > 0 {
            tracing::info!(
                zones = left,
                "the last server did not stop cleanly; what it was writing is looked at"
            );
        }
        Self {
            blocks: Blocks::new(cache_bytes / PAGE_SIZE),
            marks,
            layout,
            settled: written.into_iter().map(AtomicU64::new).collect(),
            sync_failed: AtomicBool::new(false),
            counters: Counters::default(),
        }
    }

    /// The places of all pages and sums.
    pub fn layout(&self) -> &SumLayout {
        &self.layout
    }

    fn set_settled(&self, page: PoolPage, value: bool) {
        let (word, mask) = (&self.settled[(page.0 / 64) as usize], 1 << (page.0 % 64));
        // Relaxed: a page's bit is changed and read under its block lock, or before anybody else knows the page.
        if value {
            word.fetch_or(mask, Ordering::Relaxed)
        } else {
            word.fetch_and(!mask, Ordering::Relaxed)
        };
    }

    /// Whether the page was written since it was allocated, as far as this server and the extents of its start tell.
    pub fn is_settled(&self, page: PoolPage) -> bool {
        self.settled[(page.0 / 64) as usize].load(Ordering::Relaxed) & (1 << (page.0 % 64)) != 0
    }

    /// Whether a write of this page would now wait neither for its sum nor for its zone's mark.
    pub fn may_overwrite_at_once(&self, page: PoolPage) -> bool {
        self.blocks.is_here(self.layout.sum(page).block)
            && (!self.is_settled(page) || self.marks.is_marked(self.layout.zone(page)))
    }

    /// Notes that these free pages belong to a file now. Until they are written, no durable extent has their bytes.
    pub fn note_allocated(&self, pages: Range<u64>) {
        pages.for_each(|page| self.set_settled(PoolPage(page), false));
    }

    /// The number of IOs of requests and of write-back so far. The scrub gives way while it grows.
    pub fn foreground(&self) -> u64 {
        self.counters.foreground.load(Ordering::Relaxed)
    }

    /// Figures as of about now.
    pub fn figures(&self) -> SumFigures {
        let (marked_zones, recovering_zones, mark_waits) = self.marks.figures();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SumFigures {
            verified: count(&self.counters.verified),
            accepted: count(&self.counters.accepted),
            unverified: count(&self.counters.unverified),
            resummed: count(&self.counters.resummed),
            marked_zones,
            recovering_zones,
            mark_waits,
            blocks: self.blocks.len(),
            blocks_bound: self.blocks.bound(),
        }
    }
}

fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

#[cfg(test)]
mod marks_tests;
#[cfg(test)]
mod tests;
