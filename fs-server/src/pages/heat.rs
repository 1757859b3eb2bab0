//! The heat of each pool page, which decides whether the page is in DRAM (TeRM section 4.4).
//!
//! There is one byte for each pool page: how often it was accessed recently. Requests to the server are counted at once; clients' one-sided reads are
//! added when their counters are pulled.
//!
//! # How it works
//! After `WINDOW` accesses for each frame all counts are halved, so that an old hotspot fades. Once a period a sample of the resident pages tells
//! which count is *cold*: about one resident page in `COLD_SHARE` has this count or less. Eviction takes cold pages, and a page read from SSD is kept
//! only if it is not cold. This is TinyLFU (Einziger et al., 2017) with exact counts, which take one byte for 4,096.
//!
//! # Why pages and not units
//! TeRM counts and promotes units of 1 MiB. If hot pages are scattered (Zipfian accesses of 4 KiB), all units are alike: with half of the data in
//! DRAM 22 % of the reads miss (27 % in the paper). With counts of pages 7 % miss; the least possible is 5 %. Both can be measured:
//! `--hotspots units` and `pages`.
//!
//! # Invariants
//! * Counts are hints: relaxed loads and stores, of which some may be lost. Only placement depends on them.

use cuttlefs_common::ids::PoolPage;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Accesses per frame after which counts are halved. A smaller number forgets faster, a larger one tells tepid pages apart better: with 8, a moved
/// hotspot is resident again in half the time that 64 takes, and 0.2 % more of all reads miss.
const WINDOW: u64 = 8;
/// About one resident page in this number is cold.
const COLD_SHARE: usize = 16;
/// Most resident pages that are sampled in a period.
pub(super) const COLD_SAMPLES: u32 = 1 << 16;
/// Pages whose counts are halved at a time. Other tasks run in between.
const AGE_STEP: usize = 1 << 18;

/// The counts.
#[derive(Debug)]
pub(crate) struct Heat {
    pages: Vec<AtomicU8>,
    /// Accesses since the counts were last halved.
    noted: AtomicU64,
    /// Accesses after which the counts are halved.
    window: u64,
    /// The next page whose count is halved; `pages.len()` if no halving is under way.
    aging: AtomicU64,
    cold: AtomicU8,
}

impl Heat {
    /// A pool whose pages were never accessed; `frames` of them can be resident.
    pub(crate) fn new(pool_pages: u64, frames: u32) -> Self {
        let pages: Vec<_> = (0..pool_pages).map(|_| AtomicU8::new(0)).collect();
        Self {
            noted: AtomicU64::new(0),
            window: WINDOW * u64::from(frames).max(1),
            aging: AtomicU64::new(pages.len() as u64),
            cold: AtomicU8::new(0),
            pages,
        }
    }

    /// Adds accesses of a page and returns its count. Pages past the pool are ignored.
    pub(crate) fn add(&self, page: PoolPage, accesses: u8) -> u8 {
        let Some(count) = self.pages.get(page.0 as usize) else {
            return 0;
        };
        let now = count.load(Ordering::Relaxed).saturating_add(accesses);
        count.store(now, Ordering::Relaxed);
        self.noted.fetch_add(u64::from(accesses), Ordering::Relaxed);
        now
    }

    /// Counts one access.
    pub(crate) fn touch(&self, page: PoolPage) -> u8 {
        self.add(page, 1)
    }

    /// The count of a page.
    pub(crate) fn of(&self, page: PoolPage) -> u8 {
        self.pages.get(page.0 as usize).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Sets the count of a page; to 0 for a page that leaves its file, so that it starts anew in another one.
    pub(crate) fn set(&self, page: PoolPage, count: u8) {
        if let Some(place) = self.pages.get(page.0 as usize) {
            place.store(count, Ordering::Relaxed);
        }
    }

    /// The highest count of a cold page.
    pub(crate) fn cold(&self) -> u8 {
        self.cold.load(Ordering::Relaxed)
    }

    pub(super) fn set_cold(&self, cold: u8) {
        self.cold.store(cold, Ordering::Relaxed);
    }

    /// Halves the counts of some pages, if it is time. `true`: call it again soon.
    pub(super) fn age_step(&self) -> bool {
        let len = self.pages.len();
        let mut at = self.aging.load(Ordering::Relaxed) as usize;
        if at >= len {
            if self.noted.load(Ordering::Relaxed) < self.window {
                return false;
            }
            self.noted.store(0, Ordering::Relaxed);
            at = 0;
        }
        let end = len.min(at + AGE_STEP);
        for count in &self.pages[at..end] {
            let old = count.load(Ordering::Relaxed);
            if old > 0 {
                count.store(old / 2, Ordering::Relaxed);
            }
        }
        self.aging.store(end as u64, Ordering::Relaxed);
        end < len
    }
}

/// The lowest count that at least one page in `COLD_SHARE` of a sample does not exceed.
pub(super) fn cold_of(sample: impl Iterator<Item = u8>) -> u8 {
    let mut with = [0usize; 256];
    let mut all = 0;
    for count in sample {
        with[count as usize] += 1;
        all += 1;
    }
    let mut below = 0;
    for (count, pages) in with.iter().enumerate() {
        below += pages;
        if below * COLD_SHARE >= all {
            return count as u8;
        }
    }
    u8::MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_saturate_and_halve_after_a_window() {
        let heat = Heat::new(10, 2);
        assert_eq!(heat.add(PoolPage(3), 200), 200);
        assert_eq!(heat.add(PoolPage(3), 200), 255);
        assert_eq!(heat.touch(PoolPage(4)), 1);
        assert_eq!(heat.add(PoolPage(10), 1), 0, "past the pool");
        assert!(!heat.age_step(), "all in one step");
        assert_eq!((heat.of(PoolPage(3)), heat.of(PoolPage(4))), (127, 0));
        heat.age_step();
        assert_eq!(heat.of(PoolPage(3)), 127, "not before the next window is full");
    }

    #[test]
    fn a_large_pool_ages_in_steps() {
        let pages = AGE_STEP as u64 + 5;
        let heat = Heat::new(pages, 1);
        heat.add(PoolPage(0), 8);
        heat.add(PoolPage(pages - 1), 8);
        assert!(heat.age_step());
        assert_eq!((heat.of(PoolPage(0)), heat.of(PoolPage(pages - 1))), (4, 8));
        assert!(!heat.age_step());
        assert_eq!((heat.of(PoolPage(0)), heat.of(PoolPage(pages - 1))), (4, 4));
    }

    #[test]
    fn cold_is_what_the_coldest_sixteenth_has() {
        assert_eq!(cold_of(std::iter::empty()), 0);
        assert_eq!(cold_of((0..160).map(|index| if index < 10 { 3 } else { 9 })), 3);
        assert_eq!(cold_of((0..160).map(|index| if index < 9 { 3 } else { 9 })), 9);
        assert_eq!(cold_of(std::iter::repeat_n(255, 7)), 255);
    }
}
