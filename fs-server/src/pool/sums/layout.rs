//! Where sums and intents lie: pure arithmetic over the pages of each data file.
//!
//! They lie behind the pages they are about, in the same data file, so that one `fdatasync` covers both. For disks they
//! are pages like any other, numbered on from the pool's last page:
//!
//! ```text
//! data file      [superblock 64 KiB][pages][sum blocks][intents, copy A][intents, copy B]
//! page numbers                       pool   pool.pages + ...
//! ```
//!
//! # Invariants
//! * A data file's sums and intents are about its own pages.
//! * Numbers of pool pages are below `pages()`, those of sum and intent blocks are not.

use super::intent::{REGIONS_PER_SECTOR, SECTORS_PER_BLOCK};
use cuttlefs_common::ids::PoolPage;

/// Sums in a block of 4 KiB.
pub const SUMS_PER_BLOCK: u64 = 1024;
/// Pages of a region, for which there is one intent: 1 MiB. Smaller ones cost more syncs to mark, larger ones leave more
/// pages unverified after a power loss.
pub const REGION_PAGES: u64 = 256;
/// Regions of one intent block.
const REGIONS_PER_BLOCK: u64 = (REGIONS_PER_SECTOR * SECTORS_PER_BLOCK) as u64;

/// Sum blocks of a data file with so many pages.
pub const fn sum_blocks(pages: u64) -> u64 {
    pages.div_ceil(SUMS_PER_BLOCK)
}

/// Intent blocks of a data file with so many pages; of one copy.
pub const fn intent_blocks(pages: u64) -> u64 {
    pages.div_ceil(REGION_PAGES).div_ceil(REGIONS_PER_BLOCK)
}

/// Pages of a data file that are no pool pages: sums, and both copies of the intents.
pub const fn extra_pages(pages: u64) -> u64 {
    sum_blocks(pages) + 2 * intent_blocks(pages)
}

/// The most pool pages that fit `room` pages together with what they need beside them.
pub const fn pages_that_fit(room: u64) -> u64 {
    // More pages never need less room: between what fits and what does not, by halves.
    let (mut fits, mut fits_not) = (0, room + 1);
    while fits_not - fits > 1 {
        let middle = fits + (fits_not - fits) / 2;
        if middle + extra_pages(middle) <= room {
            fits = middle;
        } else {
            fits_not = middle;
        }
    }
    fits
}

/// One data file's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    first_page: u64,
    pages: u64,
    /// Page number of its first sum block.
    first_extra: u64,
    first_region: u64,
}

/// Where everything is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SumLayout {
    parts: Vec<Part>,
    pages: u64,
    all_pages: u64,
    regions: u64,
}

/// A sum's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumPlace {
    /// Page number of its block.
    pub block: u64,
    /// Which of the block's sums it is.
    pub index: usize,
}

/// A place of an intent sector: page number of its block in one copy and the other, and which sector of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntentBlock {
    /// Number among the blocks of its data file.
    pub number: u64,
    /// In copy A and copy B.
    pub copies: [u64; 2],
    /// The first region it is about.
    pub first_region: u64,
    /// How many; fewer than it has bits for in a file's last block.
    pub regions: u64,
}

impl SumLayout {
    /// Of data files with so many pages each.
    pub fn new(files: impl IntoIterator<Item = u64>) -> Self {
        let files: Vec<u64> = files.into_iter().collect();
        let pages = files.iter().sum();
        let (mut first_page, mut first_extra, mut first_region) = (0, pages, 0);
        let mut parts = Vec::with_capacity(files.len());
        for pages in files {
            parts.push(Part { first_page, pages, first_extra, first_region });
            first_page += pages;
            first_extra += extra_pages(pages);
            first_region += pages.div_ceil(REGION_PAGES);
        }
        Self { parts, pages, all_pages: first_extra, regions: first_region }
    }

    /// Pool pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Pool pages, sum blocks and intent blocks.
    pub fn all_pages(&self) -> u64 {
        self.all_pages
    }

    /// Regions.
    pub fn regions(&self) -> u64 {
        self.regions
    }

    fn part_of(&self, page: PoolPage) -> &Part {
        assert!(page.0 < self.pages, "pool page {page} is past the pool's end");
        &self.parts[self.parts.partition_point(|part| part.first_page + part.pages <= page.0)]
    }

    /// Where a page's sum is.
    pub fn sum(&self, page: PoolPage) -> SumPlace {
        let part = self.part_of(page);
        let at = page.0 - part.first_page;
        SumPlace { block: part.first_extra + at / SUMS_PER_BLOCK, index: (at % SUMS_PER_BLOCK) as usize }
    }

    /// The region a page is in.
    pub fn region(&self, page: PoolPage) -> u64 {
        let part = self.part_of(page);
        part.first_region + (page.0 - part.first_page) / REGION_PAGES
    }

    /// Pages of a region: the first, and the one behind the last.
    pub fn pages_of_region(&self, region: u64) -> (PoolPage, PoolPage) {
        assert!(region < self.regions, "region {region} is past the pool's end");
        let part = &self.parts[self.parts.partition_point(|part| part.first_region <= region) - 1];
        let first = part.first_page + (region - part.first_region) * REGION_PAGES;
        (PoolPage(first), PoolPage((first + REGION_PAGES).min(part.first_page + part.pages)))
    }

    /// All intent blocks, in order of their regions.
    pub fn intent_blocks(&self) -> impl Iterator<Item = IntentBlock> + '_ {
        self.parts.iter().flat_map(|part| {
            let (regions, blocks) = (part.pages.div_ceil(REGION_PAGES), intent_blocks(part.pages));
            let copy = part.first_extra + sum_blocks(part.pages);
            (0..blocks).map(move |block| IntentBlock {
                number: block,
                copies: [copy + block, copy + blocks + block],
                first_region: part.first_region + block * REGIONS_PER_BLOCK,
                regions: (regions - block * REGIONS_PER_BLOCK).min(REGIONS_PER_BLOCK),
            })
        })
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
            let extras: u64 = files.iter().map(|pages| extra_pages(*pages)).sum();
            assert_eq!(layout.all_pages(), layout.pages() + extras);
            let mut seen = BTreeSet::new();
            for page in (0..layout.pages()).step_by(if layout.pages() > 10_000 { 97 } else { 1 }) {
                let place = layout.sum(PoolPage(page));
                assert!(seen.insert((place.block, place.index)));
                let (first, end) = layout.pages_of_region(layout.region(PoolPage(page)));
                assert!((first.0..end.0).contains(&page));
            }
            let mut blocks: BTreeSet<u64> = seen.iter().map(|(block, _)| *block).collect();
            let mut region = 0;
            for block in layout.intent_blocks() {
                assert_eq!(block.first_region, region);
                region += block.regions;
                block.copies.iter().for_each(|copy| assert!(blocks.insert(*copy), "{block:?}"));
            }
            assert_eq!(region, layout.regions());
            let expected: Vec<u64> = (layout.pages()..layout.all_pages()).collect();
            assert_eq!(blocks.into_iter().collect::<Vec<_>>(), expected, "{files:?}");
        }
    }

    #[test]
    fn as_many_pages_as_fit() {
        for room in [3, 4, 100, 1024, 1027, 5000, 1 << 20, (1 << 28) + 77] {
            let pages = pages_that_fit(room);
            assert!(pages + extra_pages(pages) <= room, "{room}");
            assert!(pages + 1 + extra_pages(pages + 1) > room, "{room}: {pages}");
        }
        assert_eq!((pages_that_fit(0), pages_that_fit(2)), (0, 0));
    }
}
