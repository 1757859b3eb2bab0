//! One-sided changes that no sync has covered, and atomics by request. There is no copy of them (`unsynced`): the bytes of one-sided ones went from the
//! program's memory to the server's, and no answer told their place among other changes; the word of an atomic has the effects of one-sided ones in it,
//! which are told to be lost (docs/native.md). A server that is killed loses them, and each handle of the file is told at its next sync (`losses`).
//!
//! # How it works
//! A change is noted when it is done, by a number that a sync compares with its mark. One that was under way in a recovery from a kill, and is
//! done by its completion, was done in a *life* of the server that is over: its file has lost it.

use super::{State, Unsynced};
use cuttlefs_common::ids::InodeNo;
use std::collections::BTreeMap;

/// A life of the server, as far as one-sided changes are concerned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Life(u64);

/// What was changed one-sidedly and not synced.
#[derive(Debug, Default)]
pub(super) struct OneSided {
    life: Life,
    /// The number of a file's last change. Bounded by the files that are changed between two syncs of the syncer.
    last: BTreeMap<InodeNo, u64>,
}

impl OneSided {
    /// A sync has succeeded that covers what has a number below `before`.
    pub(super) fn synced(&mut self, ino: Option<InodeNo>, before: u64) {
        match ino {
            Some(ino) if self.last.get(&ino).is_some_and(|number| *number < before) => {
                self.last.remove(&ino);
            }
            Some(_) => {}
            None => self.last.retain(|_, number| *number >= before),
        }
    }
}

impl State {
    /// The file's last change without a copy is the one of now.
    fn note_last_one_sided(&mut self, ino: InodeNo) {
        self.one_sided.last.insert(ino, self.next);
        self.next += 1;
    }
}

impl Unsynced {
    /// The server's present life. To be asked for before a change is posted.
    pub(crate) fn life(&self) -> Life {
        self.state.lock().one_sided.life
    }

    /// A one-sided change is done that was posted in this life.
    pub(crate) fn note_one_sided(&self, ino: InodeNo, life: Life) {
        let mut state = self.state.lock();
        if state.one_sided.life == life {
            state.note_last_one_sided(ino);
        } else {
            drop(state);
            self.losses.note(ino);
        }
    }

    /// A change is answered by `session` of which no copy is kept. If that session is over, it may be lost, unless its server's answers are durable.
    pub(crate) fn note_without_copy(&self, ino: InodeNo, session: u64) {
        let mut state = self.state.lock();
        if state.session == session {
            if !state.durable_answers {
                state.note_last_one_sided(ino);
            }
        } else if state.durable_before != Some(session) {
            drop(state);
            self.losses.note(ino);
        }
    }

    /// The server was killed: what was changed one-sidedly and not synced may be lost.
    pub(in crate::session) fn lose_one_sided(&self) {
        let mut state = self.state.lock();
        state.one_sided.life.0 += 1;
        let lost = std::mem::take(&mut state.one_sided.last);
        drop(state);
        for ino in lost.into_keys() {
            tracing::warn!(%ino, "what was written one-sidedly and not synced may be lost with a killed server; the next sync of the file says so");
            self.losses.note(ino);
        }
    }

    /// Whether no sync is needed.
    pub(in crate::session) fn owes_nothing(&self) -> bool {
        let state = self.state.lock();
        state.files.is_empty() && state.one_sided.last.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INO: InodeNo = InodeNo(7);

    #[test]
    fn a_kill_loses_what_no_sync_has_covered() {
        let unsynced = Unsynced::new(1 << 20);
        unsynced.begin_session(1, false);
        let told = unsynced.losses.before_open(INO);
        let is_told = || unsynced.losses.tell(INO, &told);
        unsynced.note_one_sided(INO, unsynced.life());
        unsynced.note_one_sided(InodeNo(8), unsynced.life());
        unsynced.synced(Some(INO), unsynced.mark());
        unsynced.lose_one_sided();
        assert!(!is_told(), "it was synced");
        assert!(unsynced.losses.tell(InodeNo(8), &unsynced.losses.before_open(InodeNo(8))));
        // A sync that began before the change was noted may have missed it.
        let mark = unsynced.mark();
        unsynced.note_one_sided(INO, unsynced.life());
        unsynced.synced(None, mark);
        assert!(!unsynced.owes_nothing());
        unsynced.lose_one_sided();
        assert!(is_told() && !is_told() && unsynced.owes_nothing());
        // Under way when the server was killed.
        let before = unsynced.life();
        unsynced.lose_one_sided();
        assert!(!is_told());
        unsynced.note_one_sided(INO, before);
        assert!(is_told() && unsynced.owes_nothing());
    }

    #[test]
    fn an_answered_change_without_a_copy_is_lost_with_its_session() {
        let unsynced = Unsynced::new(1 << 20);
        unsynced.begin_session(1, false);
        let told = unsynced.losses.before_open(INO);
        let is_told = || unsynced.losses.tell(INO, &told);
        unsynced.note_without_copy(INO, 1);
        assert!(!unsynced.owes_nothing());
        unsynced.begin_recovery();
        unsynced.lose_one_sided();
        assert!(is_told() && unsynced.owes_nothing());
        // Answered before the kill, and noted in the recovery from it, or behind that.
        unsynced.note_without_copy(INO, 1);
        assert!(is_told() && !is_told());
        unsynced.begin_session(2, true);
        unsynced.note_without_copy(INO, 1);
        assert!(is_told() && unsynced.owes_nothing());
        // By a server whose answers are durable, and noted behind the recovery from its death.
        unsynced.note_without_copy(INO, 2);
        assert!(unsynced.owes_nothing());
        unsynced.begin_recovery();
        unsynced.lose_one_sided();
        unsynced.begin_session(3, false);
        unsynced.note_without_copy(INO, 2);
        assert!(!is_told() && unsynced.owes_nothing());
    }
}
