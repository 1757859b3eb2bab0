//! Hot parts of files: clients' counts, translated to pool pages, and the hot set of whole units (`pages/hotspots.rs`).

use super::{FileRegion, Files};
use crate::pages::{HotUnit, Hotspots};
use cuttlefs_common::ids::{PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::region::UnitRecord;
use std::collections::HashSet;

impl Files {
    /// Notes what a client counted in one unit: `pages[i]` one-sided reads of the unit's `i`-th page. Comes from a
    /// peer that may read the file, or could before it closed it: pages past the end are ignored.
    pub(crate) fn note_counted(&self, file: &FileRegion, record: &UnitRecord, pages: &[u8]) {
        let first = u64::from(record.unit) * pages.len() as u64;
        // Counts of units past the end would take the places of existing units.
        if first >= file.size().div_ceil(PAGE_SIZE_U64) {
            return;
        }
        if self.pages.hotspots() == Hotspots::Pages {
            let state = file.state();
            for piece in state.table.pieces_in(first, first.saturating_add(pages.len() as u64)) {
                for page in piece.first..piece.end() {
                    let accesses = pages[(page - first) as usize];
                    if accesses > 0 {
                        self.pages.heat.add(PoolPage(piece.pool + (page - piece.first)), accesses);
                    }
                }
            }
        }
        let noted = u64::from(record.count);
        self.pages.note_counted(file.ino(), first, noted);
    }

    /// Ages the counts and finds the cold pages. Returns the units to promote, the hottest first. Called once a period.
    pub(super) async fn review(&self) -> Vec<HotUnit> {
        let units = self.pages.review().await;
        if self.pages.hotspots() == Hotspots::Units {
            self.change_hot_set(&units);
        }
        units
    }

    /// Marks pages of these units as warm, and pages of units that left the hot set as cold.
    fn change_hot_set(&self, units: &[HotUnit]) {
        let before = std::mem::replace(&mut *self.hot_set.lock(), units.to_vec());
        let now: HashSet<_> = units.iter().map(|unit| (unit.ino, unit.first_page)).collect();
        for unit in before.iter().filter(|unit| !now.contains(&(unit.ino, unit.first_page))) {
            // The file is loaded if it is not active, because nothing else would cool its pages. A file that is gone has no pages.
            if let Ok(file) = self.file(unit.ino) {
                self.mark_unit(&file, unit, 0);
            }
        }
        for unit in units {
            if let Some(file) = self.active.find(unit.ino) {
                self.mark_unit(&file, unit, u8::MAX);
            }
        }
    }

    fn mark_unit(&self, file: &FileRegion, unit: &HotUnit, heat: u8) {
        let state = file.state();
        let end = unit.first_page + self.pages.unit_pages();
        for piece in state.table.pieces_in(unit.first_page, end).filter(|piece| piece.state.has_bytes()) {
            (piece.pool..piece.pool + piece.len).for_each(|page| self.pages.heat.set(PoolPage(page), heat));
        }
    }
}
