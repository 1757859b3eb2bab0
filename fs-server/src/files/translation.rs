//! A translation beside the range table, in tests only: an RNIC's RangeMTT that hears of each change of the layout by the calls of FileMR's Table 2, and
//! must be as the range table at every check. The server's engine has no use for it, because it walks the range table itself (docs/filemr.md).
//!
//! | call | where |
//! | --- | --- |
//! | `cm_bind`, `cm_init` | a filekey is bound (`filekeys`) |
//! | `cm_update` | pages get bytes, at the place that they have or at a new one (`RangeTable::insert`, `set_state`) |
//! | `cm_invalidate` | pages leave the file or lose their bytes (`RangeTable::remove`, `set_state`) |
//! | `cm_destroy` | a filekey has ended (`Files::closed`) |

use super::range_table::{Piece, RangeTable};
use cuttlefs_common::ids::FileKey;
use std::collections::{BTreeMap, HashMap};

/// Entries by first file page: first pool page, pages.
type Entries = BTreeMap<u64, (u64, u64)>;

/// The entries of a file for each of its filekeys.
#[derive(Clone, Debug, Default)]
pub(crate) struct Translation(HashMap<FileKey, Entries>);

/// Two tables are the same whoever has them open.
impl PartialEq for Translation {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Translation {}

fn cut_out(entries: &mut Entries, first: u64, end: u64) {
    let before = entries.range(..first).next_back().map_or(first, |(page, _)| *page);
    let hit: Vec<u64> = entries.range(before..end).map(|(page, _)| *page).collect();
    for page in hit {
        let (pool, len) = entries[&page];
        if page + len <= first {
            continue;
        }
        entries.remove(&page);
        if page < first {
            entries.insert(page, (pool, first - page));
        }
        if page + len > end {
            entries.insert(end, (pool + (end - page), page + len - end));
        }
    }
}

fn put(entries: &mut Entries, mut first: u64, mut pool: u64, mut len: u64) {
    if let Some((page, (before, pages))) =
        entries.range(..first).next_back().map(|(page, entry)| (*page, *entry))
        && page + pages == first
        && before + pages == pool
    {
        entries.remove(&page);
        (first, pool, len) = (page, before, pages + len);
    }
    if let Some((behind, pages)) = entries.get(&(first + len)).copied()
        && pool + len == behind
    {
        entries.remove(&(first + len));
        len += pages;
    }
    entries.insert(first, (pool, len));
}

impl Translation {
    pub(crate) fn cm_bind(&mut self, key: FileKey) {
        assert!(self.0.insert(key, Entries::new()).is_none(), "{key} is bound twice");
    }

    pub(crate) fn cm_init(&mut self, key: FileKey, pieces: impl Iterator<Item = Piece>) {
        let entries = self.0.get_mut(&key).expect("it was bound");
        pieces.filter(|piece| piece.state.has_bytes()).for_each(|piece| {
            put(entries, piece.first, piece.pool, piece.len);
        });
    }

    pub(crate) fn cm_update(&mut self, piece: &Piece) {
        for entries in self.0.values_mut() {
            cut_out(entries, piece.first, piece.end());
            put(entries, piece.first, piece.pool, piece.len);
        }
    }

    pub(crate) fn cm_invalidate(&mut self, first: u64, end: u64) {
        self.0.values_mut().for_each(|entries| cut_out(entries, first, end));
    }

    pub(crate) fn cm_destroy(&mut self, key: FileKey) {
        assert!(self.0.remove(&key).is_some(), "{key} is not bound");
    }

    /// How many filekeys have entries.
    pub(crate) fn bound(&self) -> usize {
        self.0.len()
    }

    /// Checks that each filekey's entries are the pages with bytes of the table.
    pub(crate) fn check(&self, table: &RangeTable) {
        let mut wanted = Entries::new();
        for piece in table.iter().filter(|piece| piece.state.has_bytes()) {
            put(&mut wanted, piece.first, piece.pool, piece.len);
        }
        for (key, entries) in &self.0 {
            assert_eq!(*entries, wanted, "the translation of {key} is not the layout");
        }
    }
}
