//! The heat of each pool page, which decides whether the page is in DRAM (TeRM section 4.4).
//!
//! Owns one byte for each pool page: how often it was accessed of late. Requests to the server are counted at once;
//! clients' one-sided reads are added when their counters are pulled.
//!
//! # How it works
//! After `WINDOW` accesses for each frame all counts are halved, so that yesterday's hotspot leaves. Once a period a
//! sample of the resident pages tells which count is *cold*: about one resident page in `COLD_SHARE` has it or less.
//! Eviction takes cold pages, and a page read from SSD is kept only if it is not cold. This is TinyLFU (Einziger et
//! al., 2017) with exact counts, which cost one byte in 4,096.
//!
//! # Why pages and not units
//! TeRM counts and promotes units of 1 MiB. Where hot pages are scattered (Zipfian accesses of 4 KiB), all units are
//! alike: with half of the data in DRAM 22 % of the reads miss (27 % in the paper). With counts of pages 7 % miss; the
//! least possible is 5 %. Both can be measured: `--hotspots units` and `pages`.
//!
//! # Invariants
//! * Counts are hints: relaxed loads and stores that may lose to each other. Nothing but placement depends on them.

use cuttlefs_common::ids::PoolPage;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Accesses a frame after which counts are halved. Smaller forgets faster, larger tells tepid pages apart: with 8, a
/// moved hotspot is at home again in half the time that 64 takes, and 0.2 % more of all reads miss.
const WINDOW: u64 = 8;
/// One resident page in so many is cold.
const COLD_SHARE: usize = 16;
/// Resident pages looked at in a period at most.
pub(super) const COLD_SAMPLES: u32 = 1 << 16;
/// Pages aged in one go; a large pool's take their time in between.
const AGE_STEP: usize = 1 << 18;

/// The counts.
#[derive(Debug)]
pub(crate) struct Heat {
    pages: Vec<AtomicU8>,
    /// Accesses since counts were halved.
    noted: AtomicU64,
    /// So many halve them.
    window: u64,
    /// Where the halving stands; `pages.len()`: not under way.
    aging: AtomicU64,
    cold: AtomicU8,
}

impl Heat {
    /// All pages of a pool, never accessed; `frames` can be resident.
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

    /// Counts accesses of a page; returns what it has now. Pages past the pool are ignored.
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

    /// What a page has.
    pub(crate) fn of(&self, page: PoolPage) -> u8 {
        self.pages.get(page.0 as usize).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Says what a page has; also 0 for one that leaves its file, whose successor starts anew.
    pub(crate) fn set(&self, page: PoolPage, count: u8) {
        if let Some(place) = self.pages.get(page.0 as usize) {
            place.store(count, Ordering::Relaxed);
        }
    }

    /// Pages with so much or less are cold.
    pub(crate) fn cold(&self) -> u8 {
        self.cold.load(Ordering::Relaxed)
    }

    pub(super) fn set_cold(&self, cold: u8) {
        self.cold.store(cold, Ordering::Relaxed);
    }

    /// Halves counts if it is time to; one step of it. `true`: call again soon.
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

/// The least count that at least one in `COLD_SHARE` of a sample does not exceed.
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
