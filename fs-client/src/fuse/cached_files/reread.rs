//! Pages that come back as they were before a write.
//!
//! The kernel copies the bytes of a write into a page, lets go of it, and sends the WRITE. If the page is forgotten in between, a READ may bring it back
//! with the bytes of before, and it would stay. So the ranges that are read within [`PREEMPTED`] after pages were forgotten are kept, and a WRITE of such
//! a range has it forgotten before it is answered.

use cuttlefs_common::ids::PAGE_SIZE;
use std::time::{Duration, Instant};

/// The longest time between the kernel's copy of a write into its pages and the WRITE that is counted on: a program's thread waits for a processor.
const PREEMPTED: Duration = Duration::from_secs(10);
/// The most ranges of READs of a file that are kept. With more, all of it is taken for read.
const RANGES_MAX: usize = 1024;

/// What was read of a file since pages were forgotten.
#[derive(Debug, Default)]
pub(super) struct Reread {
    last_forgotten: Option<Instant>,
    /// The ranges that were read since then.
    ranges: Vec<(u64, u64)>,
}

impl Reread {
    /// Whether pages were forgotten a moment ago, so that one that is being written may come back as it was before.
    fn is_racy(&self) -> bool {
        self.last_forgotten.is_some_and(|at| at.elapsed() < PREEMPTED)
    }

    /// A READ of `[from, to)` begins.
    pub(super) fn reads(&mut self, from: u64, to: u64) {
        if !self.is_racy() {
            return;
        }
        self.ranges.push((from, to));
        if self.ranges.len() > RANGES_MAX {
            self.ranges.clear();
            self.ranges.push((0, u64::MAX));
        }
    }

    /// All pages are going to be forgotten. READs that are under way now are forgotten with the pages that are there.
    pub(super) fn forgets(&mut self) {
        self.last_forgotten = Some(Instant::now());
        self.ranges.clear();
    }

    /// The pages of `[from, to)` are going to be forgotten behind a write past the page cache.
    pub(super) fn forgets_range(&mut self, from: u64, to: u64) {
        if self.is_racy() {
            self.drops(from, to);
        } else {
            self.ranges.clear();
        }
        self.last_forgotten = Some(Instant::now());
    }

    /// The kernel has forgotten all pages by itself.
    pub(super) fn forgot(&mut self) {
        self.ranges.clear();
    }

    /// Whether the pages of a write of `[from, to)` may have the bytes of before: they were read since pages of the file were forgotten. Then the caller
    /// has them forgotten.
    pub(super) fn may_have_replaced(&mut self, from: u64, to: u64) -> bool {
        self.is_racy() && self.drops(from, to)
    }

    /// Takes the pages of `[from, to)` out. Returns whether any of them was there.
    fn drops(&mut self, from: u64, to: u64) -> bool {
        let page = PAGE_SIZE as u64;
        let (from, to) = (from / page * page, to.div_ceil(page).saturating_mul(page));
        if !self.ranges.iter().any(|(first, end)| *first < to && from < *end) {
            return false;
        }
        let rests = |(first, end): (u64, u64)| {
            let parts = [(first, end.min(from)), (first.max(to), end)];
            parts.into_iter().filter(|(first, end)| first < end)
        };
        self.ranges = self.ranges.drain(..).flat_map(rests).collect();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_that_were_read_after_others_were_forgotten_are_forgotten_once_more() {
        let mut reread = Reread::default();
        reread.reads(0, 8192);
        assert!(!reread.may_have_replaced(0, 10), "nothing was forgotten: no page can have come back");
        reread.forgets();
        assert!(!reread.may_have_replaced(0, 10), "and was not read since");
        reread.reads(4096, 12288);
        assert!(!reread.may_have_replaced(0, 4096) && !reread.may_have_replaced(12288, 20000));
        assert!(reread.may_have_replaced(5000, 5010));
        assert!(!reread.may_have_replaced(4000, 8192), "the whole page was forgotten");
        assert!(reread.may_have_replaced(8192, 8193));
        reread.reads(0, 10);
        reread.forgets();
        assert!(!reread.may_have_replaced(0, u64::MAX), "all was forgotten");
        reread.reads(0, 8192);
        reread.forgets_range(0, 10);
        assert!(!reread.may_have_replaced(0, 4096) && reread.may_have_replaced(4096, 4097));
        for page in 0..2 * RANGES_MAX as u64 {
            reread.reads(page * 8192, page * 8192 + 4096);
        }
        assert!(reread.ranges.len() <= RANGES_MAX);
        assert!(reread.may_have_replaced(0, 1) && reread.may_have_replaced(5000, 5001));
    }
}
