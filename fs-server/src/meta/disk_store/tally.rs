//! Totals over all records: the number of records of each kind, and the bytes of all.
//!
//! The tally is stored with each checkpoint, which updates it by its own changes. So it always agrees with the records, costs nothing when records
//! change, and need not be counted at a start.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Counts of records by the first byte of their keys.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Tally {
    /// The number of records of each kind.
    counts: BTreeMap<u8, u64>,
    /// The bytes of all keys and values, and of the map of pages.
    bytes: u64,
    /// Pages about which extents and the map of pages disagreed when a checkpoint changed both (`page_map`).
    pub contradictions: u64,
}

impl Tally {
    /// Notes that a record was changed, added or removed.
    pub(super) fn change(&mut self, key: &[u8], old: Option<&[u8]>, new: Option<&[u8]>) {
        let bytes = |value: &[u8]| (key.len() + value.len()) as u64;
        let count = self.counts.entry(key.first().copied().unwrap_or_default()).or_default();
        *count = (*count + u64::from(new.is_some())).saturating_sub(u64::from(old.is_some()));
        self.bytes = (self.bytes + new.map_or(0, bytes)).saturating_sub(old.map_or(0, bytes));
    }

    /// Notes the old and the new size of a part of the map of pages.
    pub(super) fn change_map(&mut self, old: Option<usize>, new: Option<usize>) {
        let bytes = |len: Option<usize>| len.map_or(0, |len| (size_of::<u64>() + len) as u64);
        self.bytes = (self.bytes + bytes(new)).saturating_sub(bytes(old));
    }

    /// The number of records of a kind.
    pub(super) fn count(&self, kind: u8) -> u64 {
        self.counts.get(&kind).copied().unwrap_or_default()
    }

    /// The bytes of all keys and values, and of the map of pages.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_counts_what_comes_and_goes() {
        let mut tally = Tally::default();
        tally.change(b"I1", None, Some(b"four"));
        tally.change(b"I2", None, Some(b""));
        tally.change(b"X", None, None);
        assert_eq!((tally.count(b'I'), tally.count(b'X'), tally.bytes()), (2, 0, 8));
        tally.change(b"I1", Some(b"four"), Some(b"eight by"));
        assert_eq!((tally.count(b'I'), tally.bytes()), (2, 12));
        tally.change(b"I1", Some(b"eight by"), None);
        tally.change(b"I2", Some(b""), None);
        assert_eq!((tally.count(b'I'), tally.bytes()), (0, 0));
    }
}
