//! Page division and page bitmaps (TeRM section 4.2): a request is cut at page boundaries, and a set has one bit for each of its pages.

use crate::ids::{FilePage, PAGE_SIZE_U64};
use serde::{Deserialize, Serialize};
use smallvec::{SmallVec, smallvec};

/// The part of one page that a request touches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagePart {
    /// The page.
    pub page: FilePage,
    /// First byte inside the page.
    pub offset_in_page: usize,
    /// Bytes of this page.
    pub len: usize,
    /// Offset of the part in the request's buffer.
    pub offset_in_request: usize,
}

/// Cuts `[offset, offset + len)` at page boundaries, in order. The caller has checked that the end does not
/// overflow.
pub fn divide(offset: u64, len: usize) -> impl ExactSizeIterator<Item = PagePart> + Clone {
    let first = offset / PAGE_SIZE_U64;
    let count = pages_spanned(offset, len);
    (0..count).map(move |index| {
        let page = first + index as u64;
        let start = offset.max(page * PAGE_SIZE_U64);
        let end = (offset + len as u64).min((page + 1) * PAGE_SIZE_U64);
        PagePart {
            page: FilePage(page),
            offset_in_page: (start % PAGE_SIZE_U64) as usize,
            len: (end - start) as usize,
            offset_in_request: (start - offset) as usize,
        }
    })
}

/// How many pages `[offset, offset + len)` touches.
fn pages_spanned(offset: u64, len: usize) -> usize {
    if len == 0 {
        return 0;
    }
    let first = offset / PAGE_SIZE_U64;
    let last = (offset + len as u64 - 1) / PAGE_SIZE_U64;
    (last - first + 1) as usize
}

/// A set of pages of one request: bit `i` is the request's `i`-th page. On the wire: little-endian words.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageSet {
    /// Inline for up to 1 MiB of pages, so that the read path does not allocate.
    words: SmallVec<[u64; 4]>,
}

impl PageSet {
    /// The empty set for a request of `pages` pages.
    pub fn none(pages: usize) -> Self {
        Self { words: smallvec![0; pages.div_ceil(64)] }
    }

    /// The empty set for a request over `[offset, offset + len)`.
    pub fn none_of_range(offset: u64, len: usize) -> Self {
        Self::none(pages_spanned(offset, len))
    }

    /// The set of all pages of a request of `pages` pages.
    pub fn all(pages: usize) -> Self {
        let mut set = Self::none(pages);
        for index in 0..pages {
            set.insert(index);
        }
        set
    }

    /// Adds a page.
    pub fn insert(&mut self, index: usize) {
        self.words[index / 64] |= 1 << (index % 64);
    }

    /// Whether the page is in the set; pages past its end are not.
    pub fn contains(&self, index: usize) -> bool {
        self.words.get(index / 64).is_some_and(|word| word >> (index % 64) & 1 == 1)
    }

    /// Whether no page is in the set.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// How many pages are in the set.
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether the set has no bit for a page at or past `pages`; check this for every set that a peer sends.
    pub fn fits(&self, pages: usize) -> bool {
        self.words.len() <= pages.div_ceil(64)
            && self.words.last().is_none_or(|last| {
                let used = pages - (self.words.len() - 1) * 64;
                used >= 64 || last >> used == 0
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PAGE_SIZE;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_cover_the_request_once(offset in 0u64..1 << 40, len in 0usize..100_000) {
            let parts: Vec<_> = divide(offset, len).collect();
            let mut at = offset;
            for part in &parts {
                prop_assert_eq!(part.page.byte_offset() + part.offset_in_page as u64, at);
                prop_assert_eq!(part.offset_in_request as u64, at - offset);
                prop_assert!(part.len > 0 && part.offset_in_page + part.len <= PAGE_SIZE);
                at += part.len as u64;
            }
            prop_assert_eq!(at, offset + len as u64);
        }

        #[test]
        fn a_set_knows_its_bound(pages in 0usize..300, extra in 0usize..300) {
            prop_assert!(PageSet::all(pages).fits(pages));
            prop_assert_eq!(PageSet::all(pages).count(), pages);
            let mut set = PageSet::none(pages.max(extra + 1));
            set.insert(extra);
            prop_assert_eq!(set.fits(pages) , extra < pages);
        }
    }
}
