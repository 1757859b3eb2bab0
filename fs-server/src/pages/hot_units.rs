//! The heat of each sample unit, which decides its promotion as a whole (TeRM section 4.4).
//!
//! There is a score for each unit of a file that was accessed recently: the accesses of the last period and half of the score before. Units that are
//! no longer accessed fade away.
//!
//! # Invariants
//! * At most `MAX_UNITS` units have scores. When there is no room, a new unit gets none until others have faded.

use cuttlefs_common::ids::InodeNo;
use parking_lot::Mutex;
use std::collections::HashMap;

/// Most units with a score: 64 GiB with the default unit.
pub const MAX_UNITS: usize = 64 << 10;

/// The name of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Unit {
    ino: InodeNo,
    number: u64,
}

#[derive(Debug)]
struct Score {
    before: u64,
    period: u64,
}

/// A unit with its score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HotUnit {
    /// The file, which may be gone.
    pub ino: InodeNo,
    /// First page of the unit.
    pub first_page: u64,
    /// Its score: accesses of pages.
    pub score: u64,
}

/// All scores.
#[derive(Debug)]
pub(super) struct HotUnits {
    unit_pages: u64,
    /// Held for moments by all that count.
    scores: Mutex<HashMap<Unit, Score>>,
}

impl HotUnits {
    /// No unit was accessed yet; a unit has `unit_pages` pages.
    pub(super) fn new(unit_pages: u32) -> Self {
        Self { unit_pages: u64::from(unit_pages.max(1)), scores: Mutex::default() }
    }

    /// The number of pages of a unit.
    pub(super) fn unit_pages(&self) -> u64 {
        self.unit_pages
    }

    /// The number of units that have a score.
    pub(super) fn len(&self) -> usize {
        self.scores.lock().len()
    }

    /// Adds accesses of pages to the unit of `page`.
    pub(super) fn add(&self, ino: InodeNo, page: u64, accesses: u64) {
        let unit = Unit { ino, number: page / self.unit_pages };
        let mut scores = self.scores.lock();
        if let Some(score) = scores.get_mut(&unit) {
            score.period = score.period.saturating_add(accesses);
        } else if scores.len() < MAX_UNITS {
            scores.insert(unit, Score { before: 0, period: accesses });
        }
    }

    /// Ends a period. Returns the units in descending order of their scores.
    pub(super) fn end_period(&self) -> Vec<HotUnit> {
        let mut scores = self.scores.lock();
        let mut units = Vec::with_capacity(scores.len());
        scores.retain(|unit, score| {
            score.before = score.before / 2 + std::mem::take(&mut score.period);
            if score.before > 0 {
                let first_page = unit.number * self.unit_pages;
                units.push(HotUnit { ino: unit.ino, first_page, score: score.before });
            }
            score.before > 0
        });
        drop(scores);
        units.sort_by_key(|unit| (std::cmp::Reverse(unit.score), unit.ino, unit.first_page));
        units
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(units: &HotUnits) -> Vec<(u64, u64, u64)> {
        units.end_period().iter().map(|unit| (unit.ino.0, unit.first_page, unit.score)).collect()
    }

    #[test]
    fn the_hottest_come_first_and_the_cold_fade() {
        let units = HotUnits::new(256);
        let (a, b) = (InodeNo(5), InodeNo(6));
        units.add(a, 0, 3);
        units.add(a, 255, 1);
        units.add(a, 256, 1);
        units.add(b, 700, 9);
        assert_eq!(found(&units), [(6, 512, 9), (5, 0, 4), (5, 256, 1)]);
        units.add(a, 256, 4);
        assert_eq!(found(&units), [(5, 256, 4), (6, 512, 4), (5, 0, 2)], "half of what was, and the new");
        for _ in 0..5 {
            units.end_period();
        }
        assert_eq!(units.len(), 0);
    }

    #[test]
    fn their_number_is_bounded() {
        let units = HotUnits::new(1);
        (0..MAX_UNITS as u64 + 10).for_each(|page| units.add(InodeNo(5), page, 1));
        assert_eq!(units.len(), MAX_UNITS);
    }
}
