//! The part of a file's contents that the store has, as change counters.
//!
//! A client whose server was killed restores its unsynced changes (`files/restore.rs`). This record and the changes since the server started decide
//! whether such a change is already there, was overtaken by a later one, or may be made.
//!
//! # Invariants
//! * `until` is only raised together with the bytes: every change of contents with this counter or a lower one is stored, or was overtaken by a
//!   stored one. A change that an fsync acknowledged never has a higher one.
//! * It is the counter of a change that a client asked for, never of a restored one: restored changes are of an earlier life of the server, and other
//!   clients may still have to restore theirs. `restored` says which clients have.

use cuttlefs_common::ids::ClientId;
use serde::{Deserialize, Serialize};

/// The change counters of one start of the server are a block of this many bits.
pub(super) const CHANGES_PER_START_BITS: u32 = 32;
/// Clients whose restored changes a file remembers. If there is one more, all changes of earlier lives count as overtaken.
const RESTORED_MAX: usize = 4;

/// The life of the server in which a change got its counter.
fn life(change: u64) -> u64 {
    change >> CHANGES_PER_START_BITS
}

/// A change that made a file shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    /// The new length.
    pub size: u64,
    /// Its change counter.
    pub change: u64,
}

/// A client's changes, in the order in which the server answered them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientChange {
    /// The client.
    pub client: ClientId,
    /// The counter of one of the changes, or of the last of several.
    pub change: u64,
}

/// The decision about a change that a client wants to restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing newer is there: the change is made.
    Restore,
    /// The change is there, or a later one of the same life of the server is: the client has lost nothing.
    Overtaken,
    /// Others changed the file before the client came back: the change stays lost.
    Lost,
}

impl Verdict {
    /// The verdict on a change in a place whose last change has the counter `standing`.
    pub fn on(change: u64, standing: u64) -> Self {
        if change > standing {
            Self::Restore
        } else if life(change) == life(standing) {
            Self::Overtaken
        } else {
            Self::Lost
        }
    }
}

/// The stored part of a file's contents (see the module).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// All changes of contents up to this counter are stored.
    pub until: u64,
    /// A cut since then: it is stored, and some of the changes before it are not.
    pub cut: Option<Cut>,
    /// Changes of an earlier life, later than `until`, that clients have restored.
    restored: [Option<ClientChange>; RESTORED_MAX],
}

impl Written {
    /// Notes that all changes up to this counter are stored.
    pub fn cover(&mut self, until: u64) {
        if until > self.until {
            self.until = until;
            self.cut = self.cut.filter(|cut| cut.change > until);
            self.restored = self.restored.map(|restored| restored.filter(|restored| restored.change > until));
        }
    }

    /// Notes a cut. Some of the changes before it may not be stored. A caller that cuts at a higher offset than an earlier cut makes sure that all
    /// are.
    pub fn cut(&mut self, cut: Cut) {
        let size = self.cut.map_or(cut.size, |before| before.size.min(cut.size));
        self.cut = Some(Cut { size, ..cut });
    }

    /// Notes that a client's changes up to this one, of an earlier life, are stored. `now`: the counter of a change of this life.
    pub fn restore(&mut self, by: ClientChange, now: u64) {
        if by.change <= self.until {
            return;
        }
        let known = self.restored.iter_mut().flatten().find(|known| known.client == by.client);
        if let Some(known) = known {
            known.change = known.change.max(by.change);
        } else if let Some(free) = self.restored.iter_mut().find(|restored| restored.is_none()) {
            *free = Some(by);
        } else {
            self.cover(now);
        }
    }

    /// The verdict on a client's change at an offset of the file.
    pub fn verdict(&self, by: ClientChange, offset: u64) -> Verdict {
        let own = |restored: &&ClientChange| restored.client == by.client;
        let restored = || self.restored.iter().flatten();
        let cut = self.cut.filter(|cut| offset >= cut.size).map_or(0, |cut| cut.change);
        let own = restored().find(own).map_or(0, |own| own.change);
        let standing = self.until.max(cut).max(own);
        match Verdict::on(by.change, standing) {
            // Other clients have restored later changes, and it is not known where.
            Verdict::Restore
                if restored().any(|other| other.client != by.client && other.change > by.change) =>
            {
                Verdict::Lost
            }
            verdict => verdict,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(life: u64, number: u64) -> u64 {
        life << CHANGES_PER_START_BITS | number
    }

    fn by(client: u128, change: u64) -> ClientChange {
        ClientChange { client: ClientId(client), change }
    }

    #[test]
    fn what_is_stored_is_not_restored_and_what_is_newer_is() {
        let mut written = Written::default();
        written.cover(at(3, 10));
        written.cover(at(3, 4));
        for (change, verdict) in [
            (at(3, 9), Verdict::Overtaken),
            (at(3, 10), Verdict::Overtaken),
            (at(3, 11), Verdict::Restore),
            (at(2, 99), Verdict::Lost),
        ] {
            assert_eq!(written.verdict(by(1, change), 0), verdict, "{change:x}");
        }
    }

    #[test]
    fn what_was_cut_off_stays_off() {
        let mut written = Written::default();
        written.cover(at(3, 1));
        written.cut(Cut { size: 100, change: at(3, 5) });
        assert_eq!(written.verdict(by(1, at(3, 4)), 99), Verdict::Restore);
        assert_eq!(written.verdict(by(1, at(3, 4)), 100), Verdict::Overtaken);
        assert_eq!(written.verdict(by(1, at(3, 6)), 100), Verdict::Restore);
        written.cut(Cut { size: 10, change: at(3, 7) });
        assert_eq!(written.verdict(by(1, at(3, 6)), 50), Verdict::Overtaken);
        written.cover(at(3, 6));
        assert!(written.cut.is_some(), "it came later");
        written.cover(at(3, 7));
        assert_eq!(written.cut, None);
    }

    #[test]
    fn who_has_restored_is_remembered() {
        let mut written = Written::default();
        written.cover(at(3, 1));
        written.restore(by(1, at(3, 5)), at(4, 1));
        assert_eq!(written.verdict(by(1, at(3, 5)), 0), Verdict::Overtaken, "once");
        assert_eq!(written.verdict(by(1, at(3, 6)), 0), Verdict::Restore);
        assert_eq!(written.verdict(by(2, at(3, 4)), 0), Verdict::Lost, "it may go over that");
        assert_eq!(written.verdict(by(2, at(3, 6)), 0), Verdict::Restore, "it is later");
        for client in 2..=4 {
            written.restore(by(client, at(3, 6)), at(4, 1));
        }
        assert_eq!(written.until, at(3, 1));
        written.restore(by(5, at(3, 7)), at(4, 2));
        assert_eq!(written.until, at(4, 2), "too many");
        assert_eq!(written.verdict(by(1, at(3, 9)), 0), Verdict::Lost);
    }
}
