//! Counting accesses, and the cold pages and hot units that follow from the counts (TeRM section 4.4).
//!
//! The server counts the accesses that it serves itself. It learns of clients' one-sided reads from their counters (`rpc/sampling.rs`). Once a period
//! `files/promote.rs` calls [`Pages::review`], and promotes the units that it returns.
//!
//! There are two modes, chosen at the start ([`Hotspots`]):
//! * *pages* (the default): each page has a count of its own, and a page that is read from SSD is kept if it is not cold. A unit is promoted ahead
//!   only if all of it is hot, as when hot pages are neighbours.
//! * *units*: as in the paper. The hottest units that fit are the hot set. Their pages are warm, and all others cold.

use super::heat::{COLD_SAMPLES, cold_of};
use super::hot_units::HotUnit;
use super::{Pages, add};
use cuttlefs_common::ids::{FrameIndex, InodeNo, PoolPage};
use std::fmt;
use std::str::FromStr;

/// Default number of pages of a sample unit: the paper's 1 MiB.
pub(super) const DEFAULT_UNIT_PAGES: u32 = 256;
/// In pages mode a unit is promoted ahead if it is hotter than the mean unit by this factor.
const AHEAD_FACTOR: u64 = 2;
/// The hot set may have this number of sixteenths of the frames. The rest is for pages that are being written and moved.
const HOT_SIXTEENTHS: u64 = 15;

/// The unit of promotion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hotspots {
    /// Single pages, and units of which all pages are hot.
    #[default]
    Pages,
    /// Whole units, as in the paper.
    Units,
}

impl fmt::Display for Hotspots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pages => "pages",
            Self::Units => "units",
        })
    }
}

impl FromStr for Hotspots {
    type Err = String;

    fn from_str(input: &str) -> Result<Self, Self::Err> {
        match input {
            "pages" => Ok(Self::Pages),
            "units" => Ok(Self::Units),
            _ => Err(format!("`{input}` cannot be promoted; give pages or units")),
        }
    }
}

impl Pages {
    /// A tally for the accesses to a file's pages that the server makes for one request.
    pub(super) fn tally(&self, ino: InodeNo) -> AccessTally<'_> {
        AccessTally { of: self, ino, page: 0, pages: 0 }
    }

    /// Adds a client's counts of one unit of a file to the unit's score, without those of its pages.
    pub(crate) fn note_counted(&self, ino: InodeNo, first_page: u64, accesses: u64) {
        self.units.add(ino, first_page, accesses);
        add(&self.counters.counted, accesses);
    }

    /// Whether a page that was just read from SSD is kept in a frame.
    pub(super) fn is_worth_a_frame(&self, pool: PoolPage) -> bool {
        !self.policy().promotes
            || self.frames().free() > 2 * self.low_water()
            || self.heat.of(pool) > self.heat.cold()
    }

    /// Ages the counts and finds the cold pages. Returns the units to promote, the hottest first. Called once a period.
    pub(crate) async fn review(&self) -> Vec<HotUnit> {
        // Pages that got frames since the last eviction are shown now at the latest.
        self.residency.settle_window();
        while self.heat.age_step() {
            futures_lite::future::yield_now().await;
        }
        let units = self.units.end_period();
        match self.hotspots {
            Hotspots::Pages => {
                let usable = self.frames().usable();
                let step = usable.div_ceil(COLD_SAMPLES).max(1) as usize;
                let sample = (0..usable).step_by(step).filter_map(|index| {
                    let owner = self.frames().owner(FrameIndex(FrameIndex::FIRST_USABLE.0 + index))?;
                    Some(self.heat.of(owner))
                });
                self.heat.set_cold(cold_of(sample));
                hot_as_a_whole(units, self.units.unit_pages(), self.heat.cold())
            }
            Hotspots::Units => {
                self.heat.set_cold(0);
                self.fitting(units)
            }
        }
    }

    /// The hottest units that fit.
    fn fitting(&self, mut units: Vec<HotUnit>) -> Vec<HotUnit> {
        let fit = u64::from(self.frames().usable()) * HOT_SIXTEENTHS / 16 / self.units.unit_pages();
        units.truncate(fit as usize);
        units
    }

    /// Makes pages warm that were not accessed yet, so that they are not the next to be evicted.
    pub(crate) fn warm(&self, pages: impl Iterator<Item = PoolPage>) {
        let warm = self.heat.cold().saturating_add(1);
        for pool in pages.filter(|pool| self.heat.of(*pool) < warm) {
            self.heat.set(pool, warm);
        }
    }

    /// The number of pages of a sample unit.
    pub(crate) fn unit_pages(&self) -> u64 {
        self.units.unit_pages()
    }

    /// The mode of finding hotspots.
    pub fn hotspots(&self) -> Hotspots {
        self.hotspots
    }

    /// The highest count of a cold page.
    pub fn cold_heat(&self) -> u8 {
        self.heat.cold()
    }

    /// The number of units that have a score.
    pub fn scored_units(&self) -> usize {
        self.units.len()
    }
}

/// The accesses of one request. Consecutive pages of a unit are one addition to its score, because all workers share the lock of the scores.
pub(super) struct AccessTally<'r> {
    of: &'r Pages,
    ino: InodeNo,
    /// The last page that was noted, and how many pages of its unit are not added to the score yet.
    page: u64,
    pages: u64,
}

impl AccessTally<'_> {
    /// Notes one page.
    pub(super) fn note(&mut self, page: u64, pool: PoolPage) {
        if !self.of.policy().promotes {
            return;
        }
        if self.of.hotspots == Hotspots::Pages {
            self.of.heat.touch(pool);
        }
        let unit_pages = self.of.units.unit_pages();
        if self.page / unit_pages != page / unit_pages {
            self.add();
        }
        self.page = page;
        self.pages += 1;
    }

    fn add(&mut self) {
        if self.pages > 0 {
            self.of.units.add(self.ino, self.page, std::mem::take(&mut self.pages));
        }
    }
}

impl Drop for AccessTally<'_> {
    fn drop(&mut self) {
        self.add();
    }
}

/// The units that are much hotter than the mean unit, and whose pages are on average hotter than cold ones.
fn hot_as_a_whole(mut units: Vec<HotUnit>, unit_pages: u64, cold: u8) -> Vec<HotUnit> {
    let total: u64 = units.iter().map(|unit| unit.score).sum();
    let mean = total / (units.len() as u64).max(1);
    let least = (AHEAD_FACTOR * mean).max((u64::from(cold) + 1) * unit_pages);
    units.retain(|unit| unit.score > least);
    units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_units_that_stand_out_are_promoted_ahead() {
        let unit = |first_page, score| HotUnit { ino: InodeNo(5), first_page, score };
        let even: Vec<_> = (0..10).map(|index| unit(index * 256, 1000 + index)).collect();
        assert_eq!(hot_as_a_whole(even, 256, 0), [], "scattered hot pages make all units alike");
        let mut skewed: Vec<_> = (1..10).map(|index| unit(index * 256, 10)).collect();
        skewed.insert(0, unit(0, 5000));
        assert_eq!(hot_as_a_whole(skewed.clone(), 256, 3), [unit(0, 5000)]);
        assert_eq!(hot_as_a_whole(skewed, 256, 30), [], "its pages are no hotter than cold ones");
    }

    #[test]
    fn names_round_trip() {
        for way in [Hotspots::Pages, Hotspots::Units] {
            assert_eq!(way.to_string().parse(), Ok(way));
        }
        assert!("bytes".parse::<Hotspots>().is_err());
    }
}
