//! The free pool pages.
//!
//! A page is free, used, or quarantined (docs/pages.md, "Reuse of a page"). At the start the used pages are those that extents have, as metadata's
//! map of pages says.
//!
//! # How it works
//! A bitmap has a bit for each page, set if the page is not free. It is divided into parts of 8,192 pages. For each part the number of free pages and
//! the longest free run are known, and the parts are listed by the latter, in powers of two. So the memory is a bit for each page and some 20 bytes
//! for each part, however fragmented the pool is, and an allocation reads a kilobyte of bits for each part from which it takes pages. It takes pages
//! in this order:
//!
//! 1. the page `near` and those behind it, if they are free, so that a growing file stays in one piece;
//! 2. else from a part whose longest run has room for all of it, from a small one if possible, and there from the smallest run that is long enough
//!    (so that large runs stay large); among equals from the first. An allocation that is larger than a part takes the shortest row of free parts
//!    that is long enough, or else the longest;
//! 3. else from the long runs of a part with one of the longest runs, and again for the rest.
//!
//! # Invariants
//! * `free + used + quarantined == pages`, always; the numbers of a part agree with its bits.
//! * A page is allocated only from free runs. A quarantined page becomes free only through `release_some` (invariant 3).
//!
//! # Failure
//! Too little free space is `NoSpace` and changes nothing. Contradictory metadata, or a page past the end, is a `SpaceError` at the start. Giving
//! back a page that is not used breaks an invariant of the caller and panics: otherwise one page would be given to two files.

use crate::bits;
use crate::sync::Mutex;
use cuttlefs_common::ids::PoolPage;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// Pages of a part: a kilobyte of bits.
const PART_PAGES: u64 = 8192;
/// The number of lists of parts: one for each logarithm of the longest free run.
const LISTS: usize = PART_PAGES.ilog2() as usize + 1;
/// Parts of one list that are examined for one whose longest run is long enough, or for the longest run.
const LOOKS: usize = 32;

/// A run of pages that are neighbours in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Run {
    /// The first page.
    pub first: PoolPage,
    /// The number of pages; not zero.
    pub len: u64,
}

impl Run {
    /// The page behind the last one.
    pub const fn end(self) -> PoolPage {
        PoolPage(self.first.0 + self.len)
    }
}

/// Stands for all pages that were quarantined up to some moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QuarantineSeq(pub u64);

/// Numbers of pages in each state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpaceFigures {
    /// All pages.
    pub pages: u64,
    /// Pages that can be allocated.
    pub free: u64,
    /// Pages of files.
    pub used: u64,
    /// Pages that have left their file and cannot be allocated yet.
    pub quarantined: u64,
}

/// Fewer pages are free than were asked for. None was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no space: {wanted} pages wanted, {free} free and {quarantined} not yet reusable")]
pub struct NoSpace {
    /// The pages that were asked for.
    pub wanted: u64,
    /// The free pages.
    pub free: u64,
    /// The pages that a flush of the metadata could free.
    pub quarantined: u64,
}

/// Metadata that is contradictory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpaceError {
    /// Two extents have the same page, or it is not known which pages the extents have.
    #[error(
        "it contradicts itself about {0} pages of the pool, which two files name, or a file names and the record of free pages \
         does not; `cuttlefsd fsck --pool DIR` says which, and `--repair` mends it"
    )]
    Contradictions(u64),
    /// An extent reaches past the pool's end.
    #[error(
        "it names pool pages {first}+{len}, and the pool has {pages}: is a data file missing? If not, `cuttlefsd fsck --pool DIR` \
         says which file does, and `--repair` mends it"
    )]
    OutOfRange {
        /// The extent's first page.
        first: PoolPage,
        /// Its length in pages.
        len: u64,
        /// The number of the pool's pages.
        pages: u64,
    },
}

/// The free space of a pool; all workers share it.
#[derive(Debug)]
pub struct Space {
    state: Mutex<State>,
}

/// The figures of a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Part {
    free: u32,
    longest: u32,
}

#[derive(Debug)]
struct State {
    pages: u64,
    /// A bit for each page: whether it is not free.
    taken: Vec<u64>,
    parts: Vec<Part>,
    /// Parts with free pages, by the logarithm of the longest free run.
    lists: [BTreeSet<u32>; LISTS],
    free: u64,
    /// Quarantined runs: first page -> length, to notice a page that is freed twice.
    quarantined_by_first: BTreeMap<u64, u64>,
    /// The same runs in the order in which they were quarantined.
    quarantine: VecDeque<(QuarantineSeq, Run)>,
    quarantined: u64,
    last_seq: QuarantineSeq,
}

impl Space {
    /// The free space of a pool of `pages`, of which the pages whose bits are set in `used` are used.
    ///
    /// # Errors
    /// `SpaceError::OutOfRange` if a used page is past the end.
    pub fn new(pages: u64, mut used: Vec<u64>) -> Result<Self, SpaceError> {
        let words = pages.div_ceil(64) as usize;
        let all = used.len().max(words) as u64 * 64;
        used.resize(used.len().max(words), 0);
        if let Some(past) = bits::next_run(&used, pages..all, true) {
            let (first, len) = (PoolPage(past.start), past.end - past.start);
            return Err(SpaceError::OutOfRange { first, len, pages });
        }
        used.truncate(words);
        let parts = pages.div_ceil(PART_PAGES);
        let mut state = State {
            pages,
            taken: used,
            parts: vec![Part::default(); parts as usize],
            lists: Default::default(),
            free: 0,
            quarantined_by_first: BTreeMap::new(),
            quarantine: VecDeque::new(),
            quarantined: 0,
            last_seq: QuarantineSeq::default(),
        };
        (0..parts).for_each(|part| state.look_at(part));
        Ok(Self { state: Mutex::new(state) })
    }

    /// Allocates `pages` pages, all or none, in as few runs as possible. `near` is the page that the caller prefers, usually the one behind the
    /// file's last. The file should use the runs in their order. For zero pages there are no runs.
    ///
    /// # Errors
    /// `NoSpace`, with nothing allocated.
    pub fn allocate(&self, pages: u64, near: Option<PoolPage>) -> Result<Vec<Run>, NoSpace> {
        let mut state = self.state.lock();
        if pages > state.free {
            return Err(NoSpace { wanted: pages, free: state.free, quarantined: state.quarantined });
        }
        Ok(state.take(pages, near))
    }

    /// Looks for places for `pages` pages as `allocate` does, and allocates the first pages of the first run only: as many as `keep` says of the runs.
    /// Nobody else finds the other pages missing meanwhile. `None` if too few are free, or `keep` says 0.
    pub fn allocate_first(
        &self,
        pages: u64,
        near: Option<PoolPage>,
        keep: impl FnOnce(&[Run]) -> u64,
    ) -> Option<Run> {
        let mut state = self.state.lock();
        if pages == 0 || pages > state.free {
            return None;
        }
        let mut runs = state.take(pages, near);
        let len = keep(&runs).min(runs[0].len);
        let kept = Run { len, ..runs[0] };
        runs[0] = Run { first: kept.end(), len: runs[0].len - len };
        state.set(&runs, false);
        state.check();
        (len > 0).then_some(kept)
    }

    /// Gives back pages that no metadata has and no IO touched since they were allocated. They are free at once.
    pub fn give_back(&self, runs: &[Run]) {
        let mut state = self.state.lock();
        runs.iter().filter(|run| run.len > 0).for_each(|run| state.assert_used(*run));
        state.set(runs, false);
        state.check();
    }

    /// Quarantines pages that left their file. They cannot be allocated until `release_some` is called with a sequence number that is not less than
    /// the returned one.
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

    /// A mark that covers all pages quarantined so far. It is taken before the flush that makes their records durable, and released after it.
    pub fn quarantine_mark(&self) -> QuarantineSeq {
        self.state.lock().last_seq
    }

    /// Frees all pages that were quarantined up to and including `up_to`. Returns how many they were.
    #[cfg(test)]
    pub fn release_quarantined(&self, up_to: QuarantineSeq) -> u64 {
        self.state.lock().release(up_to, usize::MAX).0
    }

    /// Frees at most `runs` runs that were quarantined up to and including `up_to`, the oldest first. Returns whether there are more. Allocations
    /// meanwhile wait for so many runs at most.
    pub fn release_some(&self, up_to: QuarantineSeq, runs: usize) -> bool {
        self.state.lock().release(up_to, runs).1
    }

    /// Whether a page is allocated: neither free nor quarantined.
    pub fn is_used(&self, page: PoolPage) -> bool {
        let state = self.state.lock();
        let quarantined = state.quarantined_by_first.range(..=page.0).next_back();
        bits::count(&state.taken, page.0..page.0 + 1) == 1
            && quarantined.is_none_or(|(first, len)| page.0 >= first + len)
    }

    /// Exact figures as of now.
    pub fn figures(&self) -> SpaceFigures {
        let state = self.state.lock();
        SpaceFigures {
            pages: state.pages,
            free: state.free,
            used: state.pages - state.free - state.quarantined,
            quarantined: state.quarantined,
        }
    }

    /// The number of free runs: how fragmented the pool is.
    #[cfg(test)]
    pub fn free_runs(&self) -> usize {
        let state = self.state.lock();
        bits::runs(&state.taken, 0..state.pages, false).count()
    }
}

impl State {
    /// Like `Space::release_some`; also returns how many pages became free.
    fn release(&mut self, up_to: QuarantineSeq, runs: usize) -> (u64, bool) {
        let mut released = Vec::new();
        while let Some(&(seq, run)) = self.quarantine.front()
            && seq <= up_to
            && released.len() < runs
        {
            self.quarantine.pop_front();
            self.quarantined_by_first.remove(&run.first.0);
            self.quarantined -= run.len;
            released.push(run);
        }
        self.set(&released, false);
        self.check();
        let pages = released.iter().map(|run| run.len).sum();
        (pages, self.quarantine.front().is_some_and(|(seq, _)| *seq <= up_to))
    }

    fn range_of(&self, part: u64) -> Range<u64> {
        part * PART_PAGES..((part + 1) * PART_PAGES).min(self.pages)
    }

    /// Updates the figures of a part after its bits changed.
    fn look_at(&mut self, part: u64) {
        let mut now = Part::default();
        for run in bits::runs(&self.taken, self.range_of(part), false) {
            let len = (run.end - run.start) as u32;
            now.free += len;
            now.longest = now.longest.max(len);
        }
        let before = std::mem::replace(&mut self.parts[part as usize], now);
        self.free = self.free - u64::from(before.free) + u64::from(now.free);
        let list = |part: Part| part.longest.checked_ilog2();
        if list(before) != list(now) {
            list(before).map(|list| self.lists[list as usize].remove(&(part as u32)));
            list(now).map(|list| self.lists[list as usize].insert(part as u32));
        }
    }

    /// Sets or clears the bits of runs.
    fn set(&mut self, runs: &[Run], taken: bool) {
        let mut changed = BTreeSet::new();
        for run in runs.iter().filter(|run| run.len > 0) {
            bits::fill(&mut self.taken, run.first.0..run.end().0, taken);
            changed.extend(run.first.0 / PART_PAGES..run.end().0.div_ceil(PART_PAGES));
        }
        changed.into_iter().for_each(|part| self.look_at(part));
    }

    /// Takes `pages` pages, as many of which are free.
    fn take(&mut self, pages: u64, near: Option<PoolPage>) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let mut left = pages;
        if let Some(near) = near.filter(|near| near.0 < self.pages) {
            self.take_run(near.0, &mut left, &mut runs);
        }
        while left > 0 {
            self.take_best(&mut left, &mut runs);
        }
        self.check();
        runs
    }

    /// Takes up to `left` pages from `first` on, as far as they are free.
    fn take_run(&mut self, first: u64, left: &mut u64, runs: &mut Vec<Run>) {
        let end = self.pages.min(first.saturating_add(*left));
        let end = bits::find(&self.taken, first..end, true).unwrap_or(end);
        let run = Run { first: PoolPage(first), len: end - first };
        if run.len == 0 {
            return;
        }
        self.set(&[run], true);
        *left -= run.len;
        match runs.last_mut() {
            Some(last) if last.end() == run.first => last.len += run.len,
            _ => runs.push(run),
        }
    }

    /// Takes pages from the best place for `left` pages. At least one page is free.
    fn take_best(&mut self, left: &mut u64, runs: &mut Vec<Run>) {
        if *left >= PART_PAGES
            && let Some(first) = self.free_parts(*left)
        {
            return self.take_run(first, left, runs);
        }
        let wanted = *left;
        if let Some(part) = self.part_with(wanted) {
            let fits = bits::runs(&self.taken, self.range_of(part), false)
                .filter(|run| run.end - run.start >= wanted)
                .min_by_key(|run| run.end - run.start);
            let run = fits.expect("what is told of a part is what its bits say");
            return self.take_run(run.start, left, runs);
        }
        let list = self.lists.iter().rev().find(|list| !list.is_empty()).expect("pages were counted as free");
        let longest = |part: &&u32| (self.parts[**part as usize].longest, std::cmp::Reverse(**part));
        let part = *list.iter().take(LOOKS).max_by_key(longest).expect("the list is not empty");
        // All runs that are more than half as long are taken together, so that a part in many pieces is not read again for each of them.
        let long = u64::from(self.parts[part as usize].longest).div_ceil(2);
        let long_runs: Vec<_> = bits::runs(&self.taken, self.range_of(part.into()), false)
            .filter(|run| run.end - run.start >= long)
            .collect();
        let mut taken = Vec::new();
        for run in long_runs {
            let run = Run { first: PoolPage(run.start), len: (run.end - run.start).min(*left) };
            *left -= run.len;
            taken.push(run);
            if *left == 0 {
                break;
            }
        }
        self.set(&taken, true);
        for run in taken {
            match runs.last_mut() {
                Some(last) if last.end() == run.first => last.len += run.len,
                _ => runs.push(run),
            }
        }
    }

    /// A part with a run of so many pages, in the first list that has one.
    fn part_with(&self, pages: u64) -> Option<u64> {
        let has = |part: &&u32| u64::from(self.parts[**part as usize].longest) >= pages;
        let lists = self.lists.get(pages.ilog2() as usize..)?;
        lists.iter().find_map(|list| list.iter().take(LOOKS).find(has)).map(|part| u64::from(*part))
    }

    /// The first page of the shortest row of free parts with so many pages, or of the longest row if none is long enough.
    fn free_parts(&self, pages: u64) -> Option<u64> {
        let free = |part: &&u32| u64::from(self.parts[**part as usize].longest) == PART_PAGES;
        let mut rows: Vec<Range<u64>> = Vec::new();
        for part in self.lists[LISTS - 1].iter().filter(free).map(|part| u64::from(*part)) {
            match rows.last_mut() {
                Some(row) if row.end == part => row.end += 1,
                _ => rows.push(part..part + 1),
            }
        }
        let len = |row: &Range<u64>| (row.end - row.start) * PART_PAGES;
        let fits = rows.iter().filter(|row| len(row) >= pages).min_by_key(|row| len(row));
        let longest = || rows.iter().rev().max_by_key(|row| len(row));
        let row = fits.or_else(longest)?;
        // The free run of the first of these parts may begin in the part before.
        let before = row.start.saturating_sub(1) * PART_PAGES..row.start * PART_PAGES;
        let begins =
            bits::runs(&self.taken, before.clone(), false).filter(|run| run.end == before.end).last();
        Some(begins.map_or(before.end, |run| run.start))
    }

    /// Panics unless all pages of a run are used: freeing a free page would give it to two files, which must stop the server instead of corrupting
    /// the pool.
    fn assert_used(&self, run: Run) {
        let end = run.first.0.checked_add(run.len).filter(|&end| end <= self.pages);
        let end = end.unwrap_or_else(|| panic!("{run:?} is past the pool's {} pages", self.pages));
        if let Some(free) = bits::find(&self.taken, run.first.0..end, false) {
            panic!("{run:?} is given back, but {free} is free");
        }
        if let Some((&other, &len)) = self.quarantined_by_first.range(..end).next_back() {
            assert!(other + len <= run.first.0, "{run:?} is given back, but {other}+{len} is quarantined");
        }
    }

    fn check(&self) {
        assert!(self.free + self.quarantined <= self.pages, "more pages than there are");
    }
}

#[cfg(test)]
#[path = "space_tests.rs"]
mod tests;
