//! The residency entries of pages as they were at the last look. An entry that is still the same after a page's bytes were read proves them (`remote`).
//!
//! Each mount has one table of fixed size. A page has one place in it, and the next page of that place replaces it. Entries of different servers say
//! nothing about each other, and a server that was started again is a different one: so its epoch is noted with each.
//!
//! # Invariant
//! An entry comes out as it went in: the page had it, at that server, at some moment before. (It comes back in truth only after 2^30 changes of
//! the page.)

use cuttlefs_common::ids::PoolPage;
use cuttlefs_common::region::ResidencyEntry;
use parking_lot::Mutex;
use std::sync::OnceLock;

/// The number of places: the table finds 256 MiB of pages that are read again. It takes 2 MiB, from the first entry on.
#[cfg(not(feature = "model-check"))]
const PLACES: usize = 1 << 16;
#[cfg(feature = "model-check")]
const PLACES: usize = 2;

/// The size of the table in bytes.
pub(crate) const KNOWN_ENTRIES_BYTES: usize = PLACES * size_of::<Mutex<Option<Known>>>();

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    epoch: u64,
    page: PoolPage,
    entry: ResidencyEntry,
}

/// The entries; see the module.
#[derive(Debug, Default)]
pub(super) struct KnownEntries {
    places: OnceLock<Box<[Mutex<Option<Known>>]>>,
}

impl KnownEntries {
    fn at(&self, page: PoolPage) -> &Mutex<Option<Known>> {
        let places = self.places.get_or_init(|| (0..PLACES).map(|_| Mutex::default()).collect());
        &places[page.0 as usize % PLACES]
    }

    /// The last known entry of a page of the server with this epoch, if the table has it.
    pub(super) fn get(&self, epoch: u64, page: PoolPage) -> Option<ResidencyEntry> {
        let known = *self.at(page).lock();
        known.filter(|known| known.epoch == epoch && known.page == page).map(|known| known.entry)
    }

    /// Notes the page's entry.
    pub(super) fn note(&self, epoch: u64, page: PoolPage, entry: ResidencyEntry) {
        *self.at(page).lock() = Some(Known { epoch, page, entry });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::ids::FrameIndex;

    #[test]
    fn a_place_has_one_page_of_one_server() {
        let entries = KnownEntries::default();
        let entry = ResidencyEntry::new(FrameIndex(7), 2, false);
        assert_eq!(entries.get(1, PoolPage(0)), None);
        entries.note(1, PoolPage(5), entry);
        assert_eq!(entries.get(1, PoolPage(5)), Some(entry));
        assert_eq!(entries.get(2, PoolPage(5)), None, "the next server's page may be in any frame");
        assert_eq!(entries.get(1, PoolPage(5 + PLACES as u64)), None);
        entries.note(1, PoolPage(5 + PLACES as u64), entry);
        assert_eq!(entries.get(1, PoolPage(5)), None);
    }
}
