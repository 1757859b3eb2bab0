//! The part of a file's contents that the store has, in terms of the file's change counter.
//!
//! A client whose server was killed makes its unsynced changes again (`files/restore.rs`). This record and the changes since the
//! server started decide whether such a change is there already, was overtaken by a later one, or may be made.
//!
//! # Invariants
//! * `until` is only raised with the bytes: every change of contents with that counter or a lower one is stored, or was overtaken
//!   by a stored one. A change that an fsync acknowledged is never above it.
//! * It comes from a change that a client asked for, never from one that was restored: those are of an earlier life of the server,
//!   and other clients may still have to restore theirs. `restored` says which clients have.

use cuttlefs_common::ids::ClientId;
use serde::{Deserialize, Serialize};

/// Change counters of one start of the server lie in one block of so many.
pub(super) const CHANGES_PER_START_BITS: u32 = 32;
/// Clients whose restored changes one file remembers. With one more all changes of earlier lives count as overtaken.
const RESTORED_MAX: usize = 4;

/// The life of the server that gave a change its counter.
fn life(change: u64) -> u64 {
    change >> CHANGES_PER_START_BITS
}

/// A file was made shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    /// To this length.
    pub size: u64,
    /// With this change.
    pub change: u64,
}

/// A client's changes, in the order in which the server answered them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientChange {
    /// Whose.
    pub client: ClientId,
    /// One of them, or all up to this one.
    pub change: u64,
}

/// What is to be done about a change that a client would restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing newer is there: it is made.
    Restore,
    /// It is there, or a later change of the same life of the server is: its client has lost nothing.
    Overtaken,
    /// Others changed the file before its client came back: it stays lost.
    Lost,
}

impl Verdict {
    /// About a change where one stands that has the counter `standing`.
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

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Changes of contents up to this one are in what is stored.
    pub until: u64,
    /// The last cut since: it is in what is stored, and not all that came before it is.
    pub cut: Option<Cut>,
    /// Changes of an earlier life, later than `until`, that clients have restored.
    restored: [Option<ClientChange>; RESTORED_MAX],
}

impl Written {
    /// All changes up to this one are in what is stored.
    pub fn cover(&mut self, until: u64) {
        if until > self.until {
            self.until = until;
            self.cut = self.cut.filter(|cut| cut.change > until);
            self.restored = self.restored.map(|restored| restored.filter(|restored| restored.change > until));
        }
    }

    /// The file was cut; what came before is not all in what is stored. Whoever cuts higher than an earlier cut of these sees to
    /// it that all is.
    pub fn cut(&mut self, cut: Cut) {
        let size = self.cut.map_or(cut.size, |before| before.size.min(cut.size));
        self.cut = Some(Cut { size, ..cut });
    }

    /// A client's changes up to this one, of an earlier life, are in what is stored. `now`: a change of this life.
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

    /// What is to be done about a client's change at a place of the file.
    pub fn verdict(&self, by: ClientChange, offset: u64) -> Verdict {
        let own = |restored: &&ClientChange| restored.client == by.client;
        let restored = || self.restored.iter().flatten();
        let cut = self.cut.filter(|cut| offset >= cut.size).map_or(0, |cut| cut.change);
        let own = restored().find(own).map_or(0, |own| own.change);
        let standing = self.until.max(cut).max(own);
        match Verdict::on(by.change, standing) {
            // Where others have restored theirs nobody knows any more.
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
