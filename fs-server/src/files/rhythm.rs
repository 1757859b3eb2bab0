//! The prediction of a file's next sync: a program that syncs its writes does so again and again, after the same number of writes.
//!
//! A database's log, for example, has one write and one sync in turn. The request for the sync comes a round trip after the write's answer. A server
//! that expects it begins the sync at once, and the disk works while the answer travels (`files::begin_sync`). A wrong prediction costs one sync that
//! nobody waits for, and the next prediction is made only when the rhythm is found again.

use parking_lot::Mutex;

/// Most writes between two syncs that count as a rhythm: as many pages as one sync makes images of.
const MOST_WRITES: u32 = 16;

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// Writes since the last sync.
    writes: u32,
    /// Writes between the last two syncs.
    before: u32,
    /// Whether there were as many writes between the two syncs before those.
    is_steady: bool,
}

/// The rhythm of the writes and syncs of one file that clients ask for.
#[derive(Debug, Default)]
pub(crate) struct SyncRhythm(Mutex<State>);

impl SyncRhythm {
    /// Notes a write. `true`: the next request is likely to be a sync.
    pub(crate) fn wrote(&self) -> bool {
        let mut state = self.0.lock();
        state.writes = state.writes.saturating_add(1);
        state.is_steady && state.writes == state.before
    }

    /// Notes that a sync was asked for.
    pub(crate) fn synced(&self) {
        let mut state = self.0.lock();
        let writes = std::mem::take(&mut state.writes);
        state.is_steady = writes == state.before && (1..=MOST_WRITES).contains(&writes);
        state.before = writes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The predictions after each write, in rounds of so many writes and a sync.
    fn rounds(rhythm: &SyncRhythm, writes: &[u32]) -> Vec<bool> {
        let round = |writes: &u32| {
            let said: Vec<bool> = (0..*writes).map(|_| rhythm.wrote()).collect();
            rhythm.synced();
            said
        };
        writes.iter().flat_map(round).collect()
    }

    #[test]
    fn a_sync_is_expected_behind_as_many_writes_as_twice_before() {
        let rhythm = SyncRhythm::default();
        assert_eq!(rounds(&rhythm, &[1, 1, 1, 1]), [false, false, true, true]);
        // A write after which the predicted sync did not come: the rhythm has to be found again.
        assert_eq!(rounds(&rhythm, &[2, 1, 1, 1]), [true, false, false, false, true]);
        let rhythm = SyncRhythm::default();
        assert_eq!(rounds(&rhythm, &[3, 3, 3])[6..], [false, false, true]);
    }

    #[test]
    fn no_sync_is_expected_without_writes_or_behind_many() {
        let rhythm = SyncRhythm::default();
        assert!(rounds(&rhythm, &[0, 0, 0, 1]).iter().all(|expected| !expected));
        let many = [MOST_WRITES + 1; 4];
        assert!(rounds(&rhythm, &many).iter().all(|expected| !expected));
    }
}
