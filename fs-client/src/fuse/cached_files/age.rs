//! Of which change of a file the kernel's pages are.
//!
//! Every change of a file moves its change counter. The kernel's pages are *of* a counter if no other client has changed the file between that counter
//! and now, as far as this mount has been told. This mount's own writes go into the pages, too, so they move the pages' counter along. When an open, a
//! granted lock or attributes bring a counter that the pages are not of, another client has changed the file, and the pages must go.
//!
//! * **Own changes are answered in any order.** A counter that is ahead is kept until those before it have come.
//! * **A counter may be of an own change that is not answered yet.** Then nothing is known ([`Look::Unknown`]) until the own changes that were under way
//!   have been answered. To call such pages stale would be worse than a needless READ: the kernel lets go of a written page before it sends the WRITE,
//!   and whoever reads the page after it was dropped gets the bytes of before.
//! * **Counters repeat** after a server has died with changes. So each comes with the epoch of the server: that of before the request, so that an answer
//!   of the next server is never taken for one of the last.
//!
//! A page that is filled later may be of a later change. That the pages are of a counter is a lower bound.

use crate::file::volume::Volume;

/// The most counters of own changes that are ahead of the pages' counter. With more, the pages are of no counter.
pub(super) const AHEAD_MAX: usize = 64;

/// A change of a file, by its counter and the epoch of the server that has counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fuse) struct At {
    pub(in crate::fuse) epoch: u64,
    pub(in crate::fuse) change: u64,
}

impl At {
    /// The change of this counter in an answer. `epoch` is the server's number before the request; `None` if another server has come since.
    pub(in crate::fuse) fn of<V: Volume + ?Sized>(volume: &V, epoch: u64, change: u64) -> Option<Self> {
        (volume.server_epoch() == epoch).then_some(Self { epoch, change })
    }
}

/// What the kernel's pages are to somebody who was told a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fuse) enum Look {
    /// There are none, or no other client has changed the file since.
    Good,
    /// Another client may have changed the file.
    Stale,
    /// An own change that is not answered yet may have counted. Its number is below this one.
    Unknown(u64),
}

/// The change that a file's pages are of.
#[derive(Debug, Default)]
pub(super) struct Age {
    /// `None`: not known.
    of: Option<At>,
    /// Own changes behind it that others are missing before.
    ahead: Vec<At>,
    /// Own changes that are under way, by number.
    under_way: Vec<u64>,
}

impl Age {
    /// Whether the pages are known to be of this change or a later one.
    pub(super) fn has(&self, at: At) -> bool {
        self.of.is_some_and(|of| of.epoch == at.epoch && at.change <= of.change)
    }

    /// What pages that do not have `at` are. `next` is the number of the next own change.
    pub(super) fn without(&self, at: At, next: u64) -> Look {
        let is_of_another = self.of.is_none_or(|of| of.epoch != at.epoch);
        if is_of_another || self.under_way.is_empty() { Look::Stale } else { Look::Unknown(next) }
    }

    /// The pages are of this change now. `None`: it is not known of which.
    pub(super) fn are_of(&mut self, at: Option<At>) {
        self.of = at;
        if let Some(at) = at {
            self.ahead.retain(|ahead| ahead.epoch == at.epoch && ahead.change > at.change);
            self.move_along();
        }
    }

    /// An own change begins.
    pub(super) fn begins(&mut self, number: u64) {
        self.under_way.push(number);
    }

    /// An own change was counted.
    pub(super) fn counted(&mut self, at: At) {
        if self.has(at) {
            return;
        }
        self.ahead.push(at);
        self.move_along();
        if self.ahead.len() > AHEAD_MAX {
            self.ahead.clear();
            self.of = None;
        }
    }

    /// An own change is under way no more.
    pub(super) fn ends(&mut self, number: u64) {
        self.under_way.retain(|under_way| *under_way != number);
    }

    /// Whether no own change is under way.
    pub(super) fn is_settled(&self) -> bool {
        self.under_way.is_empty()
    }

    /// Whether an own change is under way whose number is below this one.
    pub(super) fn awaits(&self, before: u64) -> bool {
        self.under_way.iter().any(|number| *number < before)
    }

    fn move_along(&mut self) {
        let Some(of) = &mut self.of else { return };
        let next = |of: &At| At { change: of.change + 1, ..*of };
        while let Some(place) = self.ahead.iter().position(|ahead| *ahead == next(of)) {
            *of = self.ahead.swap_remove(place);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_counters_are_kept() {
        let at = |change| At { epoch: 1, change };
        let mut age = Age::default();
        age.are_of(Some(at(1)));
        for change in 3..3 + 2 * AHEAD_MAX as u64 {
            age.counted(at(change));
        }
        assert!(age.ahead.len() <= AHEAD_MAX);
        assert_eq!(age.without(at(2), 0), Look::Stale);
    }
}
