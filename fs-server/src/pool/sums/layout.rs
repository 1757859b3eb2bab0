//! The places of sums, computed from the number of pages of each data file.
//!
//! The sums lie behind their pages, in the same data file, so that one `fdatasync` covers both. For disks they are pages like any other, numbered on
//! from the pool's last page:
//!
//! ```text
//! data file      [superblock 64 KiB][pages][sum blocks]
//! page numbers                       pool   pool.pages + ...
//! ```
//!
//! # Invariants
//! * A data file's sums are those of its own pages.
//! * Numbers of pool pages are below `pages()`, those of sum blocks are not.

use cuttlefs_common::ids::PoolPage;

/// Sums in one block of 4 KiB.
pub const SUMS_PER_BLOCK: u64 = 1024;
/// Pages of a zone, which has one mark: 1 MiB. Smaller zones cost more syncs for marks, larger ones leave more pages unverified after a power loss.
pub const ZONE_PAGES: u64 = 256;

/// Sum blocks of a data file with `pages` pages.
pub const fn sum_blocks(pages: u64) -> u64 {
    pages.div_ceil(SUMS_PER_BLOCK)
}

/// Most pool pages that fit into `room` pages together with their sum blocks.
pub const fn pages_that_fit(room: u64) -> u64 {
    // More pages never need less room, so a binary search finds the limit.
    let (mut fits, mut fits_not) = (0, room + 1);
    while fits_not - fits > 1 {
        let middle = fits + (fits_not - fits) / 2;
        if middle + sum_blocks(middle) <= room {
            fits = middle;
        } else {
            fits_not = middle;
        }
    }
    fits
}

/// The part of one data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    first_page: u64,
    pages: u64,
    /// The page number of its first sum block.
    first_extra: u64,
    first_zone: u64,
}

/// The places of all pages, sums and zones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SumLayout {
    parts: Vec<Part>,
    pages: u64,
    all_pages: u64,
    zones: u64,
}

/// The place of a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumPlace {
    /// The page number of its block.
    pub block: u64,
    /// Its index in the block.
    pub index: usize,
}

impl SumLayout {
    /// The layout for data files with these numbers of pages.
    pub fn new(files: impl IntoIterator<Item = u64>) -> Self {
        let files: Vec<u64> = files.into_iter().collect();
        let pages = files.iter().sum();
        let (mut first_page, mut first_extra, mut first_zone) = (0, pages, 0);
        let mut parts = Vec::with_capacity(files.len());
        for pages in files {
            parts.push(Part { first_page, pages, first_extra, first_zone });
            first_page += pages;
            first_extra += sum_blocks(pages);
            first_zone += pages.div_ceil(ZONE_PAGES);
        }
        Self { parts, pages, all_pages: first_extra, zones: first_zone }
    }

    /// The number of pool pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The number of pool pages and sum blocks.
    pub fn all_pages(&self) -> u64 {
        self.all_pages
    }

    /// The number of zones.
    pub fn zones(&self) -> u64 {
        self.zones
    }

    fn part_of(&self, page: PoolPage) -> &Part {
        assert!(page.0 < self.pages, "pool page {page} is past the pool's end");
        &self.parts[self.parts.partition_point(|part| part.first_page + part.pages <= page.0)]
    }

    /// The place of a page's sum.
    pub fn sum(&self, page: PoolPage) -> SumPlace {
        let part = self.part_of(page);
        let at = page.0 - part.first_page;
        SumPlace { block: part.first_extra + at / SUMS_PER_BLOCK, index: (at % SUMS_PER_BLOCK) as usize }
    }

    /// The zone of a page.
    pub fn zone(&self, page: PoolPage) -> u64 {
        let part = self.part_of(page);
        part.first_zone + (page.0 - part.first_page) / ZONE_PAGES
    }

    /// The first page of a zone, and the page behind its last.
    pub fn pages_of_zone(&self, zone: u64) -> (PoolPage, PoolPage) {
        assert!(zone < self.zones, "zone {zone} is past the pool's end");
        let part = &self.parts[self.parts.partition_point(|part| part.first_zone <= zone) - 1];
        let first = part.first_page + (zone - part.first_zone) * ZONE_PAGES;
        (PoolPage(first), PoolPage((first + ZONE_PAGES).min(part.first_page + part.pages)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_page_has_its_sum_and_nothing_overlaps() {
        for files in [&[1][..], &[1024], &[1025, 3, 256], &[257, 1_100_000]] {
            let layout = SumLayout::new(files.iter().copied());
            let extras: u64 = files.iter().map(|pages| sum_blocks(*pages)).sum();
            assert_eq!(layout.all_pages(), layout.pages() + extras);
            let mut seen = BTreeSet::new();
            for page in (0..layout.pages()).step_by(if layout.pages() > 10_000 { 97 } else { 1 }) {
                let place = layout.sum(PoolPage(page));
                assert!(seen.insert((place.block, place.index)));
                let (first, end) = layout.pages_of_zone(layout.zone(PoolPage(page)));
                assert!((first.0..end.0).contains(&page));
            }
            let blocks: BTreeSet<u64> = seen.iter().map(|(block, _)| *block).collect();
            let ends = (0..layout.zones()).map(|zone| layout.pages_of_zone(zone).1);
            assert_eq!(ends.max(), Some(PoolPage(layout.pages())));
            let expected: Vec<u64> = (layout.pages()..layout.all_pages()).collect();
            assert_eq!(blocks.into_iter().collect::<Vec<_>>(), expected, "{files:?}");
        }
    }

    #[test]
    fn as_many_pages_as_fit() {
        for room in [2, 3, 100, 1024, 1027, 5000, 1 << 20, (1 << 28) + 77] {
            let pages = pages_that_fit(room);
            assert!(pages + sum_blocks(pages) <= room, "{room}");
            assert!(pages + 1 + sum_blocks(pages + 1) > room, "{room}: {pages}");
        }
        assert_eq!((pages_that_fit(0), pages_that_fit(1)), (0, 0));
    }
}
