//! The write grants that an open file holds, as far as this side knows (docs/file-regions.md). The server has the last word: a change that is not granted any
//! more is refused there, with nothing changed, and goes as a request.
//!
//! A grant is of a filekey. A recovery gives the open file another one, so its grants are *lost*, and asked for again by the next change. One for which
//! the server has no room then stays lost, and a change asks again, once in `ASK_AGAIN`. A grant that the server has taken back is *ended*, and stays so
//! until its holder asks again.

use cuttlefs_common::ids::FileKey;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::time::Duration;

/// A lost grant for which there was no room is not asked for again before: each time the server reads the pages of its range, and looks for space.
const ASK_AGAIN: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// It is asked for.
    Wanted,
    /// This filekey has it, as far as is known.
    Given,
    /// The server has taken it back.
    Ended,
    /// Its holder does not want it any more, and the server does not know yet.
    Leaving,
}

#[derive(Clone, Copy, Debug)]
struct Held {
    end: u64,
    /// The filekey that it was given to.
    by: FileKey,
    phase: Phase,
    /// When the server had no room for it since it was lost, by the link's clock.
    full_at: Option<Duration>,
}

impl Held {
    fn stands(&self, key: FileKey) -> bool {
        self.phase == Phase::Given && self.by == key
    }

    fn is_lost(&self, key: FileKey) -> bool {
        self.phase == Phase::Given && self.by != key
    }
}

#[derive(Debug, Default)]
struct State {
    /// By first byte. No two overlap.
    held: BTreeMap<u64, Held>,
    /// The file has at least this length, unless somebody has cut it, which ends the grants behind its new end.
    known_len: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct HeldGrants {
    state: Mutex<State>,
    /// Held while a grant is given back, and while one is asked for: a return ends whatever has a byte of its range when it comes to the server.
    returning: Mutex<()>,
}

impl State {
    fn covers(&self, key: FileKey, offset: u64, end: u64) -> bool {
        let mut at = offset;
        while at < end {
            match self.held.range(..=at).next_back() {
                Some((_, held)) if at < held.end && held.stands(key) => at = held.end,
                _ => return false,
            }
        }
        true
    }

    fn end(&mut self, key: FileKey, offset: u64, end: u64) {
        for (start, held) in self.held.range_mut(..end) {
            if held.stands(key) && held.end > offset {
                held.phase = Phase::Ended;
                tracing::debug!(start, end = held.end, "a write grant has ended");
            }
        }
    }
}

impl HeldGrants {
    /// Held while grants are given back or asked for.
    pub(super) fn returning(&self) -> MutexGuard<'_, ()> {
        self.returning.lock()
    }

    /// Notes that a grant is asked for. `false`: a held one has a part of the range.
    pub(super) fn want(&self, offset: u64, end: u64) -> bool {
        let mut state = self.state.lock();
        if state.held.range(..end).next_back().is_some_and(|(_, held)| held.end > offset) {
            return false;
        }
        state.held.insert(offset, Held { end, by: FileKey(0), phase: Phase::Wanted, full_at: None });
        true
    }

    /// The server has given the grant that begins here to this filekey; the file has this length.
    pub(super) fn given(&self, offset: u64, by: FileKey, len: u64) {
        let mut state = self.state.lock();
        state.known_len = len;
        if let Some(held) = state.held.get_mut(&offset)
            && held.phase != Phase::Leaving
        {
            (held.by, held.phase, held.full_at) = (by, Phase::Given, None);
        }
    }

    /// The grant that begins here was asked for again in vain. One that stands stands, for the server replaces it only by another. One that is lost
    /// stays so if there was no room for it, at the time `no_room`. Any other has ended. Returns whether it has.
    pub(super) fn not_given(&self, offset: u64, key: FileKey, no_room: Option<Duration>) -> bool {
        let mut state = self.state.lock();
        let Some(held) = state.held.get_mut(&offset) else { return true };
        match no_room {
            _ if held.stands(key) || held.phase == Phase::Leaving => false,
            Some(now) if held.is_lost(key) => {
                held.full_at = Some(now);
                false
            }
            _ => {
                held.phase = Phase::Ended;
                true
            }
        }
    }

    /// The grant that begins here was not given.
    pub(super) fn forget(&self, offset: u64) {
        self.state.lock().held.remove(&offset);
    }

    /// The holder of the grant that begins here does not want it any more. Whether it must be given back.
    pub(crate) fn leave(&self, offset: u64) -> bool {
        let mut state = self.state.lock();
        let held = state.held.get_mut(&offset).filter(|held| held.phase != Phase::Leaving);
        held.map(|held| held.phase = Phase::Leaving).is_some()
    }

    /// The grants with a byte of a range that are to be given back, with their filekeys.
    pub(super) fn leaving(&self, offset: u64, end: u64) -> Vec<(u64, u64, FileKey)> {
        let state = self.state.lock();
        let leaving = state.held.range(..end).filter(|(_, held)| held.phase == Phase::Leaving);
        leaving
            .filter(|(_, held)| held.end > offset)
            .map(|(start, held)| (*start, held.end, held.by))
            .collect()
    }

    /// Whether the grant that begins here stands, as far as is known.
    pub(crate) fn stands(&self, offset: u64, key: FileKey) -> bool {
        self.state.lock().held.get(&offset).is_some_and(|held| held.stands(key))
    }

    /// The grants that a recovery has lost, and that are to be asked for now.
    pub(crate) fn lost(&self, key: FileKey, now: Duration) -> Vec<(u64, u64)> {
        let state = self.state.lock();
        let is_due = |held: &Held| held.full_at.is_none_or(|at| now >= at + ASK_AGAIN);
        let lost = state.held.iter().filter(|(_, held)| held.is_lost(key) && is_due(held));
        lost.map(|(offset, held)| (*offset, held.end)).collect()
    }

    /// Whether this filekey may overwrite a range, as far as is known: it is granted, and before the known end of the file.
    pub(crate) fn permits(&self, key: FileKey, offset: u64, end: u64) -> bool {
        let state = self.state.lock();
        state.covers(key, offset, end) && end <= state.known_len
    }

    /// Whether this filekey may append: any grant permits that.
    pub(crate) fn permit_appends(&self, key: FileKey) -> bool {
        self.state.lock().held.values().any(|held| held.stands(key))
    }

    /// Whether nothing is held.
    pub(crate) fn is_empty(&self) -> bool {
        self.state.lock().held.is_empty()
    }

    /// The server has refused a change of this range by this filekey. One that a recovery has replaced by `now` is refused because it names nothing any
    /// more: its grants are lost, and not ended.
    pub(crate) fn refused(&self, key: FileKey, now: FileKey, offset: u64, end: u64) {
        if key != now {
            return;
        }
        self.state.lock().end(key, offset, end);
    }

    /// The server had no space for a write of this range by request. What a grant of all of it has set aside would have been space: so one has ended.
    pub(crate) fn lacked_space(&self, key: FileKey, now: FileKey, offset: u64, end: u64) {
        let mut state = self.state.lock();
        if key == now && state.covers(key, offset, end) {
            state.end(key, offset, end);
        }
    }

    /// The file has at least this length.
    pub(crate) fn note_len(&self, len: u64) {
        let mut state = self.state.lock();
        state.known_len = state.known_len.max(len);
    }

    /// This open file was given this length.
    pub(crate) fn set_len(&self, len: u64) {
        self.state.lock().known_len = len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: FileKey = FileKey(5);
    const NEXT: FileKey = FileKey(6);
    const NOW: Duration = Duration::from_secs(9);

    #[test]
    fn neighbours_are_as_one_and_a_recovery_loses_all() {
        let grants = HeldGrants::default();
        assert!(grants.want(0, 100) && grants.want(100, 200) && grants.want(300, 400));
        for (offset, end) in [(0, 1), (99, 101), (50, 350), (399, 500)] {
            assert!(!grants.want(offset, end), "{offset} {end}");
        }
        assert!(!grants.permits(KEY, 0, 10), "not given yet");
        assert_eq!(grants.lost(KEY, NOW), []);
        [0, 100, 300].iter().for_each(|offset| grants.given(*offset, KEY, 150));
        assert!(grants.permits(KEY, 50, 150));
        assert!(!grants.permits(KEY, 50, 151));
        grants.note_len(400);
        grants.note_len(350);
        assert!(grants.permits(KEY, 300, 400));
        assert!(!grants.permits(KEY, 199, 301));
        assert!(!grants.permits(NEXT, 0, 1));
        assert!(grants.permit_appends(KEY) && !grants.permit_appends(NEXT));
        grants.refused(KEY, NEXT, 0, 400);
        assert!(grants.permits(KEY, 0, 101), "the filekey was refused, and not the grant");
        grants.refused(KEY, KEY, 150, 160);
        assert!(!grants.permits(KEY, 0, 101));
        assert!(grants.stands(0, KEY) && !grants.stands(100, KEY) && grants.stands(300, KEY));
        assert_eq!(grants.lost(NEXT, NOW), [(0, 100), (300, 400)]);
        grants.given(0, NEXT, 400);
        assert!(grants.permits(NEXT, 0, 100));
        // What is given back blocks its range until the server knows.
        assert!(grants.leave(0) && !grants.leave(0) && !grants.leave(50));
        assert!(!grants.permits(NEXT, 0, 100));
        assert!(!grants.want(50, 60));
        grants.given(0, NEXT, 400);
        assert_eq!(grants.leaving(99, 400), [(0, 100, NEXT)]);
        assert_eq!(grants.leaving(100, 400), []);
        grants.forget(0);
        assert!(grants.want(50, 60));
        [50, 100, 300].iter().for_each(|offset| grants.forget(*offset));
        assert!(grants.is_empty());
    }
    #[test]
    fn a_lost_grant_without_room_is_asked_for_again_later_and_others_end() {
        let grants = HeldGrants::default();
        for offset in [0, 100, 200, 300] {
            assert!(grants.want(offset, offset + 100));
            grants.given(offset, KEY, 400);
        }
        assert!(!grants.not_given(0, KEY, None) && grants.stands(0, KEY), "it was renewed in vain");
        grants.refused(KEY, KEY, 0, 1);
        assert!(grants.not_given(0, KEY, Some(NOW)), "its holder asked");
        assert_eq!(grants.lost(NEXT, NOW), [(100, 200), (200, 300), (300, 400)]);
        assert!(!grants.not_given(100, NEXT, Some(NOW)));
        assert!(grants.not_given(200, NEXT, None), "not for lack of room");
        let soon = NOW + ASK_AGAIN - Duration::from_millis(1);
        assert_eq!(grants.lost(NEXT, soon), [(300, 400)]);
        assert_eq!(grants.lost(NEXT, NOW + ASK_AGAIN), [(100, 200), (300, 400)]);
        assert!(!grants.stands(100, NEXT));
        grants.given(100, NEXT, 400);
        assert!(grants.stands(100, NEXT));
        assert_eq!(grants.lost(KEY, NOW), [(100, 200)], "another recovery: at once");
    }

    #[test]
    fn a_write_without_space_in_a_granted_range_tells_that_the_grant_has_ended() {
        let grants = HeldGrants::default();
        for (offset, end) in [(0, 100), (100, 200), (300, 400)] {
            assert!(grants.want(offset, end));
            grants.given(offset, KEY, 50);
        }
        grants.lacked_space(KEY, KEY, 150, 250);
        grants.lacked_space(KEY, NEXT, 300, 310);
        assert!([0, 100, 300].iter().all(|offset| grants.stands(*offset, KEY)), "a part, an earlier key");
        grants.lacked_space(KEY, KEY, 50, 150);
        assert!(!grants.stands(0, KEY) && !grants.stands(100, KEY) && grants.stands(300, KEY));
    }
}
