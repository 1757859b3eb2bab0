//! The prediction of a file's next sync: a program that syncs its writes does so again and again, after the same number of writes.
//!
//! A database's log has one write and one sync, in turn. The request for the sync comes a round trip after the write's answer. A
//! server that expects it begins the sync at once, and the disk works while the answer travels (`files::begin_sync`). A wrong
//! prediction costs one sync without a waiter: the rhythm has to be found again before the next prediction.

use parking_lot::Mutex;

/// Most writes between two syncs that are a rhythm: what one sync makes images of.
const MOST_WRITES: u32 = 16;

#[derive(Clone, Copy, Debug, Default)]
struct State {
    /// Writes since the last sync.
    writes: u32,
    /// Writes between the two syncs of before.
    before: u32,
    /// As many as between the two before those.
    is_steady: bool,
}

/// The writes and syncs that clients ask for of one file.
#[derive(Debug, Default)]
pub(crate) struct SyncRhythm(Mutex<State>);

impl SyncRhythm {
    /// A write is done. `true`: a sync is likely to be asked for next.
    pub(crate) fn wrote(&self) -> bool {
        let mut state = self.0.lock();
        state.writes = state.writes.saturating_add(1);
        state.is_steady && state.writes == state.before
    }

    /// A sync is asked for.
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

    /// What each write of some rounds said: so many writes and a sync each.
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
        // A write that no sync follows is noticed, and the rhythm is to be found again.
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
