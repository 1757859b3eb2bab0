//! The frame of a page at the last look: a guess for the next read, so that the page's bytes travel together with the entry that proves
//! them.
//!
//! Each mount has one table of fixed size. A page has one place in it, and the next page of that place replaces it. The two words of a place are
//! written one by one, and after a restart of the server its pages may be in other frames, so a guess may be of any page. A wrong guess costs a round
//! trip.

use cuttlefs_common::ids::PoolPage;
use cuttlefs_common::region::ResidencyEntry;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of places: the table finds 256 MiB of pages that are read again. It takes 1 MiB, from the first guess on.
#[cfg(not(feature = "model-check"))]
const PLACES: usize = 1 << 16;
#[cfg(feature = "model-check")]
const PLACES: usize = 2;

/// The size of the table in bytes.
pub(crate) const FRAME_GUESSES_BYTES: usize = PLACES * size_of::<Guess>();

#[derive(Debug, Default)]
struct Guess {
    /// The page number plus one; 0: none.
    page: AtomicU64,
    entry: AtomicU64,
}

/// The guesses; see the module.
#[derive(Debug, Default)]
pub(super) struct FrameGuesses {
    guesses: OnceLock<Box<[Guess]>>,
}

impl FrameGuesses {
    fn at(&self, page: PoolPage) -> &Guess {
        let guesses = self.guesses.get_or_init(|| (0..PLACES).map(|_| Guess::default()).collect());
        &guesses[page.0 as usize % PLACES]
    }

    /// The last known entry of the page, if the table has it. It may be wrong.
    pub(super) fn get(&self, page: PoolPage) -> Option<ResidencyEntry> {
        let guess = self.at(page);
        let known = guess.page.load(Ordering::Relaxed) == page.0.wrapping_add(1);
        known.then(|| ResidencyEntry(guess.entry.load(Ordering::Relaxed)))
    }

    /// Notes the page's entry.
    pub(super) fn note(&self, page: PoolPage, entry: ResidencyEntry) {
        let guess = self.at(page);
        // Written only if it is a different one: many threads read the same pages.
        if guess.entry.load(Ordering::Relaxed) != entry.0
            || guess.page.load(Ordering::Relaxed) != page.0.wrapping_add(1)
        {
            guess.entry.store(entry.0, Ordering::Relaxed);
            guess.page.store(page.0.wrapping_add(1), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::ids::FrameIndex;

    #[test]
    fn a_place_has_one_page() {
        let guesses = FrameGuesses::default();
        let entry = ResidencyEntry::new(FrameIndex(7), 2, false);
        assert_eq!(guesses.get(PoolPage(0)), None);
        guesses.note(PoolPage(5), entry);
        assert_eq!(guesses.get(PoolPage(5)), Some(entry));
        assert_eq!(guesses.get(PoolPage(5 + PLACES as u64)), None);
        guesses.note(PoolPage(5 + PLACES as u64), entry);
        assert_eq!(guesses.get(PoolPage(5)), None);
    }
}
