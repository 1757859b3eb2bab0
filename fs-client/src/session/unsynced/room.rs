//! Room for the copy of a change, which is taken before the request is sent, and the signals to the syncer about it.
//!
//! Waiters for room have no order: a sync frees at least the room of all copies that were kept when the wait began, and
//! all waiters look again.

use super::{FILE_BYTES, State, Unsynced};
use std::time::{Duration, Instant};

/// The bounds of a mount's copies of unsynced changes, in bytes; between them it is a part of the machine's memory. Beyond it, writes wait for syncs.
/// With 128 MiB most of 1,000 MiB that are written at once is taken at memory's speed.
pub const UNSYNCED_BYTES_LEAST: usize = 32 << 20;
const UNSYNCED_BYTES_MOST: usize = 128 << 20;
const UNSYNCED_PART_OF_MEMORY: u64 = 64;

/// The bound of a mount's copies of unsynced changes on this machine, in bytes.
pub fn unsynced_bytes() -> usize {
    let machine = rustix::system::sysinfo();
    let memory = machine.totalram.saturating_mul(u64::from(machine.mem_unit));
    let part = usize::try_from(memory / UNSYNCED_PART_OF_MEMORY).unwrap_or(usize::MAX);
    part.clamp(UNSYNCED_BYTES_LEAST, UNSYNCED_BYTES_MOST)
}

/// Room for one change. Dropping it gives the room back; when the change is answered, the kept copy takes its place.
#[must_use]
#[derive(Debug)]
pub(crate) struct Room<'u> {
    unsynced: &'u Unsynced,
    cost: usize,
}

impl Room<'_> {
    /// The change was answered: from now on the cost of its kept copy counts.
    pub(super) fn end(mut self, state: &mut State) {
        state.reserved -= std::mem::take(&mut self.cost);
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        if self.cost > 0 {
            self.unsynced.state.lock().reserved -= self.cost;
            self.unsynced.has_room.notify_all();
        }
    }
}

impl Unsynced {
    /// The bound of kept copies, in bytes.
    pub(crate) fn bound(&self) -> usize {
        self.bound
    }

    /// Room for a change with this many bytes, if there is some now. If not, a sync becomes due.
    pub(crate) fn reserve(&self, bytes: usize) -> Option<Room<'_>> {
        self.reserve_in(&mut self.state.lock(), bytes)
    }

    fn reserve_in(&self, state: &mut State, bytes: usize) -> Option<Room<'_>> {
        let cost = self.cost_of(bytes) + FILE_BYTES;
        let used = state.cost + state.reserved;
        if used > 0 && used + cost > self.bound {
            state.is_wanted = true;
            self.tell_if_due(state);
            return None;
        }
        state.reserved += cost;
        Some(Room { unsynced: self, cost })
    }

    /// As `reserve`, but waits up to `patience`.
    pub(crate) fn reserve_within(&self, bytes: usize, patience: Duration) -> Option<Room<'_>> {
        let end = Instant::now() + patience;
        let mut state = self.state.lock();
        loop {
            if let Some(room) = self.reserve_in(&mut state, bytes) {
                return Some(room);
            }
            if state.has_ended || self.has_room.wait_until(&mut state, end).timed_out() {
                return None;
            }
        }
    }

    /// Whether somebody waits for room that a sync would free.
    pub(crate) fn is_short(&self) -> bool {
        is_short(&self.state.lock())
    }

    /// Waits until somebody waits for room, or, if syncs succeed, until half of it is taken; at most for `patience`. Returns whether one of the two
    /// is the case.
    pub(crate) fn wait_until_due(&self, syncs_succeed: bool, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        let mut state = self.state.lock();
        loop {
            if is_short(&state) || syncs_succeed && self.is_half_taken(&state) {
                return true;
            }
            if state.has_ended || self.is_due.wait_until(&mut state, end).timed_out() {
                return false;
            }
        }
    }

    /// The session ends: nobody waits any more.
    pub(crate) fn end_waits(&self) {
        self.state.lock().has_ended = true;
        self.is_due.notify_all();
        self.has_room.notify_all();
    }

    pub(super) fn tell_if_due(&self, state: &State) {
        if is_short(state) || self.is_half_taken(state) {
            self.is_due.notify_all();
        }
    }

    fn is_half_taken(&self, state: &State) -> bool {
        state.cost > self.bound / 2
    }
}

fn is_short(state: &State) -> bool {
    state.is_wanted && !state.files.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::ids::InodeNo;

    const INO: InodeNo = InodeNo(7);
    const BOUND: usize = 64 << 10;

    fn unsynced() -> Unsynced {
        let unsynced = Unsynced::new(BOUND);
        unsynced.begin_session(1, false);
        unsynced
    }

    fn used(unsynced: &Unsynced) -> usize {
        let state = unsynced.state.lock();
        state.cost + state.reserved
    }

    #[test]
    fn all_that_is_answered_is_kept_and_never_more_than_the_bound() {
        let unsynced = unsynced();
        let (mut kept, mut rooms) = (0, Vec::new());
        while let Some(room) = unsynced.reserve(1000) {
            rooms.push(room);
            assert!(used(&unsynced) <= BOUND);
        }
        for room in rooms {
            assert!(unsynced.note(room, 1, INO, kept * 1000, &[1; 1000], kept));
            kept += 1;
            assert!(used(&unsynced) <= BOUND);
        }
        assert_eq!(unsynced.changes_of(INO).len() as u64, kept);
        assert!(kept > 40, "{kept}");
        assert!(unsynced.is_short());
        unsynced.synced(None, unsynced.mark());
        assert!(used(&unsynced) == 0 && !unsynced.is_short());
    }

    #[test]
    fn small_changes_are_bounded_by_their_number() {
        let unsynced = Unsynced::new(super::super::CHANGES_MAX << 12);
        unsynced.begin_session(1, false);
        let mut kept = 0;
        while let Some(room) = unsynced.reserve(1) {
            assert!(unsynced.note(room, 1, InodeNo(kept % 100), kept, b"1", kept));
            kept += 1;
        }
        assert!((8000..=8192).contains(&kept), "{kept}");
    }

    #[test]
    fn what_was_not_answered_gives_its_room_back() {
        let unsynced = unsynced();
        let room = unsynced.reserve(40_000).expect("room");
        assert!(unsynced.reserve(40_000).is_none());
        drop(room);
        let room = unsynced.reserve(40_000).expect("room again");
        // An append that found less space was shorter than its room.
        assert!(unsynced.note(room, 1, INO, 0, &[1; 10], 1));
        assert!(used(&unsynced) < 1000);
        unsynced.begin_session(2, false);
        let room = unsynced.reserve(100).expect("room");
        let before = used(&unsynced);
        assert!(!unsynced.note(room, 1, INO, 0, &[1; 100], 2), "of a session before");
        assert!(used(&unsynced) < before);
    }

    #[test]
    fn a_change_larger_than_the_bound_has_it_alone() {
        let unsynced = unsynced();
        let room = unsynced.reserve(2 * BOUND).expect("nothing else is kept");
        assert!(unsynced.reserve(0).is_none());
        assert!(unsynced.note(room, 1, INO, 0, &[1; 2 * BOUND], 1));
        assert!(unsynced.reserve(0).is_none());
        unsynced.synced(Some(INO), unsynced.mark());
        assert!(unsynced.reserve(0).is_some());
    }

    #[test]
    fn who_waits_gets_room_when_a_sync_frees_it_and_the_syncer_hears_of_him() {
        const PATIENCE: Duration = Duration::from_secs(60);
        let unsynced = unsynced();
        assert!(!unsynced.wait_until_due(true, Duration::ZERO));
        let room = unsynced.reserve(20_000).expect("room");
        assert!(unsynced.note(room, 1, INO, 0, &[1; 20_000], 1));
        assert!(!unsynced.wait_until_due(true, Duration::ZERO), "less than half");
        let room = unsynced.reserve(20_000).expect("room");
        assert!(unsynced.note(room, 1, INO, 0, &[1; 20_000], 2));
        assert!(unsynced.wait_until_due(true, Duration::ZERO), "more than half");
        assert!(!unsynced.wait_until_due(false, Duration::ZERO), "syncs fail, and nobody waits");
        std::thread::scope(|scope| {
            let waiters: Vec<_> =
                (0..3).map(|_| scope.spawn(|| unsynced.reserve_within(50_000, PATIENCE).is_some())).collect();
            assert!(unsynced.wait_until_due(false, PATIENCE), "somebody waits");
            let mark = unsynced.mark();
            unsynced.synced(None, mark);
            for waiter in waiters {
                assert!(waiter.join().expect("a waiter"), "each had it when the one before gave it back");
            }
        });
        assert_eq!(used(&unsynced), 0);
        assert!(!unsynced.is_short());
    }
}
