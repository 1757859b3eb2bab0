//! Accesses that a later READ of entries checks, in the order in which they were posted.
//!
//! WRITEs of pages that follow each other are a *run*: one READ of the entries checks them all (NP-RDMA section 3.1.1). Runs up to a READ that is
//! signaled are a *batch*, which that READ's completion ends. The READs of a batch go behind all of its WRITEs, so that no answer comes amid these and
//! takes the processor that sends them. Where completions tell of absent pages, a batch is what went with one doorbell.
//!
//! A run that somebody *awaits*, since a signaled request is in it or behind it, is checked with its doorbell, or as soon as it has `AWAITED_BYTES_MAX`.

use super::peer::ENTRIES_MAX;
use std::collections::VecDeque;
use std::ops::RangeInclusive;

/// Bytes of an awaited run, whose accesses all wait for the last. With fewer there are more READs of entries; with as many as a program has under way,
/// the next WRITEs begin only when all are done. Measured with sixteen WRITEs of 4 KiB under way (`bench np --figure 10`): 24 KiB 0.94 of pinned, 40 and
/// 48 KiB 0.98, 56 KiB 0.86, 64 KiB 0.77.
const AWAITED_BYTES_MAX: u64 = 40 << 10;

/// WRITEs of pages that follow each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// The access in whose room the entries come.
    pub(super) slot: usize,
    pub(super) pages: RangeInclusive<u64>,
    bytes: u64,
}

impl Run {
    /// The READ of an entry that nobody looks at, behind accesses that need no entries.
    fn of_nothing(slot: usize) -> Self {
        Self { slot, pages: 0..=0, bytes: 0 }
    }

    /// Whether these pages are some of it, or are next to it and fit.
    fn takes(&self, pages: &RangeInclusive<u64>) -> bool {
        (*self.pages.start()..=self.pages.end() + 1).contains(pages.start())
            && pages.end() - self.pages.start() < ENTRIES_MAX as u64
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Checks {
    /// Those of the batches, then those of none yet.
    accesses: VecDeque<usize>,
    /// How many accesses each batch has whose READ is under way.
    batches: VecDeque<usize>,
    /// Accesses of no batch.
    open: usize,
    /// The runs of no batch.
    runs: VecDeque<Run>,
    /// Somebody awaits one of these runs.
    is_awaited: bool,
}

impl Checks {
    /// Adds an access that needs no entries.
    pub(super) fn add(&mut self, slot: usize) {
        self.accesses.push_back(slot);
        self.open += 1;
    }

    /// Adds a WRITE.
    pub(super) fn add_write(&mut self, slot: usize, pages: RangeInclusive<u64>, len: u32) {
        self.add(slot);
        let bytes = u64::from(len);
        match self.runs.back_mut() {
            Some(run) if run.takes(&pages) => {
                run.pages = *run.pages.start()..=*run.pages.end().max(pages.end());
                run.bytes += bytes;
            }
            _ => self.runs.push_back(Run { slot, pages, bytes }),
        }
    }

    /// The access in whose room the entries of the last run come, and the page of the first of them.
    pub(super) fn entries_in(&self) -> Option<(usize, u64)> {
        self.runs.back().map(|run| (run.slot, *run.pages.start()))
    }

    /// Somebody awaits the last run. Returns whether it is long enough to be checked at once.
    pub(super) fn await_run(&mut self) -> bool {
        let Some(run) = self.runs.back() else { return false };
        self.is_awaited = true;
        run.bytes >= AWAITED_BYTES_MAX
    }

    pub(super) fn is_awaited(&self) -> bool {
        self.is_awaited
    }

    /// Makes a batch of all that is in none, if there is anything. [`Self::next_run`] gives what its READs are to bring.
    pub(super) fn close(&mut self) {
        self.is_awaited = false;
        let open = std::mem::take(&mut self.open);
        let Some(last) = self.accesses.back().copied().filter(|_| open > 0) else { return };
        self.batches.push_back(open);
        if self.runs.is_empty() {
            self.runs.push_back(Run::of_nothing(last));
        }
    }

    /// The next run of the batch that was just made, and whether it is the last, whose READ is signaled.
    pub(super) fn next_run(&mut self) -> Option<(Run, bool)> {
        let run = self.runs.pop_front()?;
        Some((run, self.runs.is_empty()))
    }

    /// Whether READs of batches are under way.
    pub(super) fn are_under_way(&self) -> bool {
        !self.batches.is_empty()
    }

    /// The READ of the first batch has come: how many accesses [`Self::next`] gives now.
    pub(super) fn batch_came(&mut self) -> usize {
        self.batches.pop_front().unwrap_or(0)
    }

    /// All accesses of no batch are known to be done, and there is no batch: how many [`Self::next`] gives now.
    pub(super) fn end_open(&mut self) -> usize {
        debug_assert!(!self.are_under_way() && self.runs.is_empty(), "these would be done first");
        std::mem::take(&mut self.open)
    }

    pub(super) fn next(&mut self) -> Option<usize> {
        self.accesses.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds WRITEs of a page each.
    fn add(checks: &mut Checks, pages: impl IntoIterator<Item = u64>, len: u32) {
        pages.into_iter().for_each(|page| checks.add_write(page as usize, page..=page, len));
    }

    /// Makes a batch, and returns its runs: slot, first page, last page.
    fn close(checks: &mut Checks) -> Vec<(usize, u64, u64)> {
        checks.close();
        let mut runs = Vec::new();
        while let Some((run, is_last)) = checks.next_run() {
            runs.push((run.slot, *run.pages.start(), *run.pages.end()));
            assert_eq!(is_last, checks.runs.is_empty());
        }
        runs
    }

    #[test]
    fn runs_are_of_neighbours_and_fit_the_room_of_an_access() {
        let mut checks = Checks::default();
        add(&mut checks, [3, 4, 4, 3, 5, 7, 6], 8);
        assert_eq!(checks.entries_in(), Some((6, 6)));
        assert_eq!(close(&mut checks), [(3, 3, 5), (7, 7, 7), (6, 6, 6)]);
        let most = ENTRIES_MAX as u64;
        add(&mut checks, 6..2 * most, 8);
        assert_eq!(
            close(&mut checks),
            [(6, 6, 5 + most), (6 + most as usize, 6 + most, 2 * most - 1)],
            "the next begins behind it"
        );
        assert!(close(&mut checks).is_empty() && checks.entries_in().is_none());
    }

    #[test]
    fn an_awaited_run_is_checked_when_it_is_long() {
        let mut checks = Checks::default();
        add(&mut checks, 0..9, 4096);
        assert!(!checks.is_awaited() && !checks.await_run() && checks.is_awaited());
        add(&mut checks, [9], 4096);
        assert!(checks.await_run());
        add(&mut checks, [19], 4096);
        assert!(checks.is_awaited(), "also where another run follows");
        close(&mut checks);
        assert!(!checks.is_awaited() && !checks.await_run());
    }

    #[test]
    fn batches_end_in_order_each_with_its_accesses() {
        let mut checks = Checks::default();
        add(&mut checks, [5, 6, 9], 8);
        assert_eq!(close(&mut checks), [(5, 5, 6), (9, 9, 9)]);
        checks.add(1);
        checks.add(2);
        assert_eq!(close(&mut checks), [(2, 0, 0)], "nothing of these is looked at");
        add(&mut checks, [8], 8);
        assert!(checks.are_under_way());
        for wanted in [&[5, 6, 9][..], &[1, 2]] {
            let count = checks.batch_came();
            let came: Vec<usize> = (0..count).filter_map(|_| checks.next()).collect();
            assert_eq!(came, wanted);
        }
        assert_eq!((checks.batch_came(), checks.are_under_way()), (0, false));
        close(&mut checks);
        assert_eq!((checks.batch_came(), checks.next(), checks.next()), (1, Some(8), None));
    }
}
