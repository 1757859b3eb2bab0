//! The residency entries of pages as they were at the last look. An entry that is still the same after a page's bytes were read proves them (`remote`).
//!
//! Each mount has one table of fixed size. A page has one place in it, and the next page of that place replaces it. Entries of different servers say
//! nothing about each other, and a server that was started again is a different one: so its epoch is noted with each.
//!
//! A look around (`look_around`) notes pages that are in no frame, with its number. Until the next look begins they count as away.
//!
//! # Invariant
//! An entry comes out as it went in: the page had it, at that server, at some moment before. (It comes back in truth only after 2^30 changes of
//! the page.)

use cuttlefs_common::ids::PoolPage;
use cuttlefs_common::region::ResidencyEntry;
use parking_lot::Mutex;
use std::num::NonZeroU64;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of places: the table finds 256 MiB of pages that are read again. It takes 2 MiB, from the first entry on.
#[cfg(not(feature = "model-check"))]
pub(super) const PLACES: usize = 1 << 16;
#[cfg(feature = "model-check")]
pub(super) const PLACES: usize = 2;

/// The size of the table in bytes.
pub(crate) const KNOWN_ENTRIES_BYTES: usize = PLACES * size_of::<Mutex<Option<Known>>>();

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Known {
    epoch: u64,
    page: PoolPage,
    entry: ResidencyEntry,
    /// The number of the look around that found it; `BY_A_READ` if none did.
    look: NonZeroU64,
}

const BY_A_READ: NonZeroU64 = NonZeroU64::MIN;

/// The entries; see the module.
#[derive(Debug)]
pub(super) struct KnownEntries {
    places: OnceLock<Box<[Mutex<Option<Known>>]>>,
    /// The number of the last look around; before the first one that of reads.
    look: AtomicU64,
}

impl Default for KnownEntries {
    fn default() -> Self {
        Self { places: OnceLock::new(), look: AtomicU64::new(BY_A_READ.get()) }
    }
}

impl KnownEntries {
    fn at(&self, page: PoolPage) -> &Mutex<Option<Known>> {
        let places = self.places.get_or_init(|| (0..PLACES).map(|_| Mutex::default()).collect());
        &places[page.0 as usize % PLACES]
    }

    fn known(&self, epoch: u64, page: PoolPage) -> Option<Known> {
        let known = *self.at(page).lock();
        known.filter(|known| known.epoch == epoch && known.page == page)
    }

    /// The last known entry of a page of the server with this epoch, if the table has it.
    pub(super) fn get(&self, epoch: u64, page: PoolPage) -> Option<ResidencyEntry> {
        self.known(epoch, page).map(|known| known.entry)
    }

    /// Whether the last look around found the page in no frame, and nobody has looked at it since.
    pub(super) fn is_away(&self, epoch: u64, page: PoolPage) -> bool {
        let look = self.look.load(Ordering::Relaxed);
        look > BY_A_READ.get() && self.known(epoch, page).is_some_and(|known| known.look.get() == look)
    }

    /// Notes the page's entry.
    pub(super) fn note(&self, epoch: u64, page: PoolPage, entry: ResidencyEntry) {
        *self.at(page).lock() = Some(Known { epoch, page, entry, look: BY_A_READ });
    }

    /// Begins a look around: what earlier ones have found counts no more.
    pub(super) fn begin_look(&self) {
        self.look.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes what the look around has found: by this entry the page is in no frame.
    pub(super) fn note_away(&self, epoch: u64, page: PoolPage, entry: ResidencyEntry) {
        let look = NonZeroU64::new(self.look.load(Ordering::Relaxed)).unwrap_or(BY_A_READ);
        *self.at(page).lock() = Some(Known { epoch, page, entry, look });
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

    #[test]
    fn a_page_is_away_until_the_next_look_or_read() {
        let entries = KnownEntries::default();
        let (page, away) = (PoolPage(5), ResidencyEntry::new(FrameIndex::MAGIC, 2, false));
        entries.note(1, page, away);
        assert!(!entries.is_away(1, page), "reads look again");
        entries.begin_look();
        assert!(!entries.is_away(1, page));
        entries.note_away(1, page, away);
        assert!(entries.is_away(1, page) && !entries.is_away(2, page) && !entries.is_away(1, PoolPage(6)));
        entries.begin_look();
        assert!(!entries.is_away(1, page));
        entries.note_away(1, page, away);
        entries.note(1, page, ResidencyEntry::new(FrameIndex(7), 4, false));
        assert!(!entries.is_away(1, page));
    }
}
