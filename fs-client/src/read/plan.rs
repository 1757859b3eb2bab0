//! The plan of a target-translated read: the runs of pages to read one-sidedly, and the pages that are on SSD by the bitmap, which are fetched at
//! once.

use super::bitmap::PageBitmap;
use cuttlefs_common::region::{PageSet, divide};

/// Which parts of a request are read one-sidedly, and which are fetched.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    runs: Vec<(usize, usize)>,
    absent: PageSet,
}

impl Plan {
    /// Divides `[offset, offset + len)` by the bitmap.
    pub(super) fn new(bitmap: &PageBitmap, offset: u64, len: usize) -> Self {
        let mut runs: Vec<(usize, usize)> = Vec::new();
        let mut absent = PageSet::none_of_range(offset, len);
        for (index, part) in divide(offset, len).enumerate() {
            if bitmap.is_absent(part.page) {
                absent.insert(index);
                continue;
            }
            match runs.last_mut() {
                Some((start, run)) if *start + *run == part.offset_in_request => *run += part.len,
                _ => runs.push((part.offset_in_request, part.len)),
            }
        }
        Self { runs, absent }
    }

    /// The runs to read one-sidedly: (offset in the request, length), in order and not touching each other.
    pub(super) fn runs(&self) -> &[(usize, usize)] {
        &self.runs
    }

    /// Whether the request's page `index` is not read one-sidedly.
    pub(super) fn is_absent(&self, index: usize) -> bool {
        self.absent.contains(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::ids::PAGE_SIZE;

    #[test]
    fn neighbours_share_a_run_and_absent_pages_split_it() {
        // Pages 0 and 1 present, 2 absent, 3 present.
        let bitmap = PageBitmap::new(vec![0b1111_1011]);
        let plan = Plan::new(&bitmap, 100, 4 * PAGE_SIZE - 100);
        assert_eq!(plan.runs(), [(0, 2 * PAGE_SIZE - 100), (3 * PAGE_SIZE - 100, PAGE_SIZE)]);
        assert!(plan.is_absent(2));
        let none = Plan::new(&PageBitmap::new(vec![0]), 0, PAGE_SIZE);
        assert!(none.runs().is_empty());
    }
}
