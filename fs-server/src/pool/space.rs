//! Which pool pages are free.
//!
//! Free space is not stored anywhere: at start it is what no extent record names, so it can never disagree with
//! the metadata. In memory a page is free, used, or quarantined (docs/ARCHITECTURE.md, "Who may use a page").
//!
//! # How it works
//! Free runs are kept twice: by first page (`by_first`), to merge neighbours and to go on where a file ends, and by
//! length (`by_len`), to find a run that fits. Every step is a B-tree operation, so an allocation is O(log n) for
//! each run it takes. Where an allocation goes:
//!
//! 1. to the page `near` and those behind it, if they are free, so that a file that grows stays in one piece;
//! 2. else to the smallest run that holds all of it (best fit keeps large runs large); of equals, the first;
//! 3. else, to the largest run, whole, and again with what is left.
//!
//! # Invariants
//! * Free runs neither overlap nor touch; both trees hold the same runs.
//! * `free + used + quarantined == pages`, always.
//! * Of the free pages `withheld` are promised to reserves; they are never more than are free. Only the allocation that
//!   names a reserve may take its pages, so what a reserve was made for does not fail for want of space.
//! * A page is given out only from free runs; a quarantined page becomes free only through `release_quarantined`
//!   (invariant 3).
//!
//! # Failure
//! Too little free space is `NoSpace` and changes nothing. Metadata that names a page twice, or one past the end,
//! is a `SpaceError` at start. Giving back a page that is not used is a broken invariant of the caller and asserts:
//! going on would hand one page to two files.

use cuttlefs_common::ids::PoolPage;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Pages that are neighbours in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// The first.
    pub first: PoolPage,
    /// How many; not zero.
    pub len: u64,
}

impl Run {
    /// The page behind the last one.
    pub const fn end(self) -> PoolPage {
        PoolPage(self.first.0 + self.len)
    }
}

/// Names everything that was quarantined up to some moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QuarantineSeq(pub u64);

/// How much of the pool is in which state, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceFigures {
    /// All of it.
    pub pages: u64,
    /// Can be allocated.
    pub free: u64,
    /// Belongs to files.
    pub used: u64,
    /// Left its file, and cannot be allocated yet.
    pub quarantined: u64,
    /// Of the free ones, promised to reserves.
    pub withheld: u64,
}

/// Free pages that are kept for somebody: which ones is open until he takes them. Goes back with `Space::release`.
#[derive(Debug)]
pub struct Reserve {
    pages: u64,
    full: u64,
}

impl Reserve {
    /// None.
    pub const EMPTY: Self = Self { pages: 0, full: 0 };

    /// Whether it is none.
    pub fn is_ended(&self) -> bool {
        self.full == 0
    }

    /// Pages it has now.
    pub fn pages(&self) -> u64 {
        self.pages
    }
}

/// Less is free than was asked for. Nothing was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no space: {wanted} pages wanted, {free} free and {quarantined} not yet reusable")]
pub struct NoSpace {
    /// What was asked for.
    pub wanted: u64,
    /// What there is for whoever asks.
    pub free: u64,
    /// What a flush of the metadata could make free.
    pub quarantined: u64,
}

/// The metadata cannot be right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpaceError {
    /// Two extents hold the same page.
    #[error(
        "metadata names the same page twice: pool page {page}; do not write to this pool, check it first"
    )]
    NamedTwice {
        /// The first such page.
        page: PoolPage,
    },
    /// An extent reaches past the pool's end.
    #[error("metadata names pool pages {first}+{len}, and the pool has {pages}; is a data file missing?")]
    OutOfRange {
        /// The extent's first page.
        first: PoolPage,
        /// Its length in pages.
        len: u64,
        /// Pages there are.
        pages: u64,
    },
}

/// The pool's free space. One for all workers.
#[derive(Debug)]
pub struct Space {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    pages: u64,
    /// First page -> length, of free runs.
    by_first: BTreeMap<u64, u64>,
    /// (length, first page) of the same runs.
    by_len: BTreeSet<(u64, u64)>,
    free: u64,
    /// Of these, promised to reserves.
    withheld: u64,
    /// First page -> length of quarantined runs, to catch a page that is freed twice.
    quarantined_by_first: BTreeMap<u64, u64>,
    /// The same runs in the order they came.
    quarantine: VecDeque<(QuarantineSeq, Run)>,
    quarantined: u64,
    last_seq: QuarantineSeq,
}

impl Space {
    /// The free space of a pool of `pages` in which `used` are taken; `used` comes in any order.
    ///
    /// # Errors
    /// `SpaceError` if runs overlap or reach past the end.
    pub fn new(pages: u64, used: impl IntoIterator<Item = (PoolPage, u64)>) -> Result<Self, SpaceError> {
        let mut used: Vec<(PoolPage, u64)> = used.into_iter().filter(|&(_, len)| len > 0).collect();
        used.sort_unstable();
        let mut state = State { pages, ..State::default() };
        let mut next_free = 0;
        for (first, len) in used {
            let end = first.0.checked_add(len).filter(|&end| end <= pages);
            let end = end.ok_or(SpaceError::OutOfRange { first, len, pages })?;
            if first.0 < next_free {
                return Err(SpaceError::NamedTwice { page: first });
            }
            if first.0 > next_free {
                state.insert_free(next_free, first.0 - next_free);
            }
            next_free = end;
        }
        if next_free < pages {
            state.insert_free(next_free, pages - next_free);
        }
        Ok(Self { state: Mutex::new(state) })
    }

    /// Takes `pages`, all or none, in as few runs as there are; `near` is the page the caller would like best,
    /// usually the one behind the file's last. The runs come in the order the file should use them. For zero
    /// pages there are no runs.
    ///
    /// # Errors
    /// `NoSpace` with nothing taken.
    pub fn allocate(&self, pages: u64, near: Option<PoolPage>) -> Result<Vec<Run>, NoSpace> {
        let mut state = self.state.lock();
        let free = state.free - state.withheld;
        if pages > free {
            return Err(NoSpace { wanted: pages, free, quarantined: state.quarantined });
        }
        Ok(state.take(pages, near))
    }

    /// The same with a reserve behind it, which is filled up again as far as there are pages.
    ///
    /// # Errors
    /// `NoSpace` with nothing taken.
    pub fn allocate_from(
        &self,
        reserve: &mut Reserve,
        pages: u64,
        near: Option<PoolPage>,
    ) -> Result<Vec<Run>, NoSpace> {
        let mut state = self.state.lock();
        let free = state.free - state.withheld + reserve.pages;
        if pages > free {
            return Err(NoSpace { wanted: pages, free, quarantined: state.quarantined });
        }
        let own = pages.min(reserve.pages);
        reserve.pages -= own;
        state.withheld -= own;
        let runs = state.take(pages, near);
        state.top_up(reserve);
        state.check();
        Ok(runs)
    }

    /// A reserve of `full` pages, or of as many as are free.
    pub fn reserve(&self, full: u64) -> Reserve {
        let mut reserve = Reserve { pages: 0, full };
        self.state.lock().top_up(&mut reserve);
        reserve
    }

    /// Fills a reserve up as far as there are pages; whether it is full.
    pub fn top_up(&self, reserve: &mut Reserve) -> bool {
        if reserve.pages < reserve.full {
            self.state.lock().top_up(reserve);
        }
        reserve.pages == reserve.full
    }

    /// Ends a reserve: its pages are for everybody.
    pub fn release(&self, reserve: Reserve) {
        self.state.lock().withheld -= reserve.pages;
    }

    /// Gives back what was allocated and never named by metadata nor reached by an IO: free at once.
    pub fn give_back(&self, runs: &[Run]) {
        let mut state = self.state.lock();
        for run in runs.iter().filter(|run| run.len > 0) {
            state.assert_used(*run);
            state.merge_free(run.first.0, run.len);
        }
        state.check();
    }

    /// Takes pages that left their file out of use; they stay unusable until `release_quarantined` with a
    /// sequence number that is not less than the one returned.
    pub fn quarantine(&self, runs: &[Run]) -> QuarantineSeq {
        let mut state = self.state.lock();
        state.last_seq.0 += 1;
        let seq = state.last_seq;
        for &run in runs.iter().filter(|run| run.len > 0) {
            state.assert_used(run);
            state.quarantined += run.len;
            state.quarantined_by_first.insert(run.first.0, run.len);
            state.quarantine.push_back((seq, run));
        }
        state.check();
        seq
    }

    /// Covers everything quarantined so far: take it before the flush that makes those pages' records durable,
    /// release it after.
    pub fn quarantine_mark(&self) -> QuarantineSeq {
        self.state.lock().last_seq
    }

    /// Makes everything quarantined up to and with `up_to` free; returns how many pages that were.
    pub fn release_quarantined(&self, up_to: QuarantineSeq) -> u64 {
        let mut state = self.state.lock();
        let mut released = 0;
        while let Some(&(seq, run)) = state.quarantine.front()
            && seq <= up_to
        {
            state.quarantine.pop_front();
            state.quarantined_by_first.remove(&run.first.0);
            state.quarantined -= run.len;
            state.merge_free(run.first.0, run.len);
            released += run.len;
        }
        state.check();
        released
    }

    /// Exact figures of this moment.
    pub fn figures(&self) -> SpaceFigures {
        let state = self.state.lock();
        SpaceFigures {
            pages: state.pages,
            free: state.free,
            used: state.pages - state.free - state.quarantined,
            quarantined: state.quarantined,
            withheld: state.withheld,
        }
    }

    /// Number of free runs, for status: how fragmented the pool is.
    pub fn free_runs(&self) -> usize {
        self.state.lock().by_first.len()
    }
}

impl State {
    fn insert_free(&mut self, first: u64, len: u64) {
        self.by_first.insert(first, len);
        self.by_len.insert((len, first));
        self.free += len;
    }

    fn remove_free(&mut self, first: u64, len: u64) {
        let by_first = self.by_first.remove(&first);
        let by_len = self.by_len.remove(&(len, first));
        assert!(by_first == Some(len) && by_len, "both trees hold the same runs");
        self.free -= len;
    }

    /// Takes `pages`, of which so many are free.
    fn take(&mut self, pages: u64, near: Option<PoolPage>) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let mut left = pages;
        if let Some(near) = near.filter(|_| left > 0)
            && let Some(run) = self.take_at(near.0, left)
        {
            left -= run.len;
            runs.push(run);
        }
        while left > 0 {
            let run = self.take_best(left);
            left -= run.len;
            match runs.last_mut() {
                Some(last) if last.end() == run.first => last.len += run.len,
                _ => runs.push(run),
            }
        }
        self.check();
        runs
    }

    fn top_up(&mut self, reserve: &mut Reserve) {
        let pages = (reserve.full - reserve.pages).min(self.free - self.withheld);
        reserve.pages += pages;
        self.withheld += pages;
    }

    /// Takes up to `want` pages from `first` on, if `first` is free.
    fn take_at(&mut self, first: u64, want: u64) -> Option<Run> {
        let (&run_first, &run_len) = self.by_first.range(..=first).next_back()?;
        let run_end = run_first + run_len;
        if first >= run_end {
            return None;
        }
        let len = want.min(run_end - first);
        self.remove_free(run_first, run_len);
        if first > run_first {
            self.insert_free(run_first, first - run_first);
        }
        if first + len < run_end {
            self.insert_free(first + len, run_end - first - len);
        }
        Some(Run { first: PoolPage(first), len })
    }

    /// Takes up to `want` pages from the best run. At least one page is free.
    fn take_best(&mut self, want: u64) -> Run {
        let fitting = self.by_len.range((want, 0)..).next();
        let &(_, first) = fitting.or(self.by_len.last()).expect("free pages were counted before taking any");
        self.take_at(first, want).expect("a run of the tree is free")
    }

    /// Makes a run free and merges it with its neighbours.
    fn merge_free(&mut self, mut first: u64, mut len: u64) {
        if let Some((&before, &before_len)) = self.by_first.range(..first).next_back()
            && before + before_len == first
        {
            self.remove_free(before, before_len);
            first = before;
            len += before_len;
        }
        if let Some(&after_len) = self.by_first.get(&(first + len)) {
            self.remove_free(first + len, after_len);
            len += after_len;
        }
        self.insert_free(first, len);
    }

    /// Freeing a page that is free would give it to two files: that must stop the server, not corrupt the pool.
    fn assert_used(&self, run: Run) {
        let end = run.first.0.checked_add(run.len).filter(|&end| end <= self.pages);
        let end = end.unwrap_or_else(|| panic!("{run:?} is past the pool's {} pages", self.pages));
        for (what, runs) in [("free", &self.by_first), ("quarantined", &self.quarantined_by_first)] {
            if let Some((&other, &len)) = runs.range(..end).next_back() {
                assert!(other + len <= run.first.0, "{run:?} is given back, but {other}+{len} is {what}");
            }
        }
    }

    fn check(&self) {
        debug_assert_eq!(self.by_first.len(), self.by_len.len());
        assert!(self.free + self.quarantined <= self.pages, "more pages than there are");
        assert!(self.withheld <= self.free, "pages are promised that are not free");
    }
}

#[cfg(test)]
#[path = "space_tests.rs"]
mod tests;
