//! An access under way.

use super::request::{NpOp, NpOrder, NpStatus, NpWr};
use crate::ids::PAGE_SIZE;
use std::ops::RangeInclusive;

/// What is in a slot. It is changed where it is: an access takes some tens of nanoseconds, of which a move would be some.
pub(super) struct Flight {
    /// `false`: the slot is free, and all else without meaning.
    pub(super) is_under_way: bool,
    pub(super) wr: NpWr,
    /// Its completion says whether it met a page that was not there. Otherwise a READ's bytes do, or a WRITE's entries.
    pub(super) told: bool,
    /// It met one.
    pub(super) absent: bool,
    /// The access in whose room the entries from after are, and the page of the first of them.
    pub(super) entries_in: (usize, u64),
    /// A WRITE that goes for the second time.
    pub(super) repeated: bool,
    /// Pieces that the target was asked for.
    pub(super) calls: usize,
    pub(super) status: NpStatus,
    pub(super) old: u64,
}

impl Flight {
    /// A free slot.
    pub(super) const FREE: Self = Self {
        is_under_way: false,
        wr: NpWr {
            id: 0,
            op: NpOp::Read,
            offset: 0,
            local: None,
            len: 1,
            order: NpOrder::RELAXED,
            signaled: false,
        },
        told: false,
        absent: false,
        entries_in: (0, 0),
        repeated: false,
        calls: 0,
        status: NpStatus::Success,
        old: 0,
    };

    pub(super) fn begin(&mut self, wr: &NpWr, told: bool) {
        debug_assert!(!self.is_under_way, "the slot is free");
        self.is_under_way = true;
        self.wr = *wr;
        (self.told, self.absent, self.repeated) = (told, false, false);
        (self.calls, self.status, self.old) = (0, NpStatus::Success, 0);
    }

    pub(super) fn pages(&self) -> RangeInclusive<u64> {
        let last = self.wr.offset + u64::from(self.wr.len) - 1;
        self.wr.offset / PAGE_SIZE as u64..=last / PAGE_SIZE as u64
    }

    /// The part of the access that is in a page: offset in the access, length.
    pub(super) fn part(&self, page: u64) -> (usize, usize) {
        let start = (page * PAGE_SIZE as u64).max(self.wr.offset);
        let end = ((page + 1) * PAGE_SIZE as u64).min(self.wr.offset + u64::from(self.wr.len));
        ((start - self.wr.offset) as usize, (end - start) as usize)
    }
}

/// The bytes from the first part of an access that is to be asked for to the last.
pub(super) fn widened(
    so_far: Option<(usize, usize)>,
    (start, len): (usize, usize),
) -> Option<(usize, usize)> {
    Some((so_far.map_or(start, |(first, _)| first), start + len))
}
