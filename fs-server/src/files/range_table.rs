//! The range table of a file: the places of its pages in the pool (FileMR's RangeMTT, section 3.2).
//!
//! Owns the live mapping: a B-tree of pieces keyed by first file page; gaps are holes.
//!
//! # States
//! | state     | reads see        | durable record says            |
//! |-----------|------------------|--------------------------------|
//! | Written   | the pool's bytes | written, at the same place     |
//! | Unwritten | zeros            | unwritten, at the same place   |
//! | Fresh     | the pool's bytes | nothing, or unwritten, as yet  |
//!
//! # Invariants
//! * Pieces do not overlap and none is empty; neighbours that could be one piece are one piece.
//! * `allocated`, `fresh_pages` and `fresh_starts` always agree with the pieces (checked in tests after each step).
//!
//! # Failure
//! Extents that come from the store are checked (`RangeError`); misuse from inside asserts.

use cuttlefs_common::ids::{FilePage, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::region::{Extent, ExtentState};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// The page after the last page that any file can have.
pub(super) const MAX_FILE_PAGES: u64 = (1 << 63) / PAGE_SIZE_U64;

/// The state of a mapped page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PieceState {
    /// The pool pages have the file's bytes, and the durable record says so.
    Written,
    /// Space is reserved; reads give zeros.
    Unwritten,
    /// The pool pages have the file's bytes, and the durable record does not say so yet.
    Fresh,
}

impl PieceState {
    /// Whether reads see the pool's bytes.
    pub(crate) const fn has_bytes(self) -> bool {
        matches!(self, Self::Written | Self::Fresh)
    }

    /// The state in an extent, for clients and the store.
    pub(crate) const fn extent_state(self) -> ExtentState {
        match self {
            Self::Written | Self::Fresh => ExtentState::Written,
            Self::Unwritten => ExtentState::Unwritten,
        }
    }
}

/// The file pages `[first, first + len)` are the pool pages `[pool, pool + len)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// First file page.
    pub first: u64,
    /// First pool page.
    pub pool: u64,
    /// Pages; never 0.
    pub len: u64,
    /// Their state.
    pub state: PieceState,
}

impl Piece {
    /// The page after the last file page.
    pub(crate) const fn end(&self) -> u64 {
        self.first + self.len
    }

    /// The piece as an extent.
    pub(crate) const fn extent(&self) -> Extent {
        Extent {
            file_page: FilePage(self.first),
            pool_page: PoolPage(self.pool),
            len_pages: self.len,
            state: self.state.extent_state(),
        }
    }

    /// The part inside `[first, end)`, if there is any.
    fn clip(&self, first: u64, end: u64) -> Option<Piece> {
        let from = self.first.max(first);
        let to = self.end().min(end);
        (from < to).then(|| Piece {
            first: from,
            pool: self.pool + (from - self.first),
            len: to - from,
            state: self.state,
        })
    }

    /// Whether `next` continues this piece in the file and in the pool, in the same state.
    const fn continues_with(&self, next: &Piece) -> bool {
        self.end() == next.first
            && self.pool + self.len == next.pool
            && matches!(
                (self.state, next.state),
                (PieceState::Written, PieceState::Written)
                    | (PieceState::Unwritten, PieceState::Unwritten)
                    | (PieceState::Fresh, PieceState::Fresh)
            )
    }
}

/// Why a stored mapping is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RangeError {
    /// An extent is empty, or reaches past the end of files or of the pool.
    #[error("the extent at file page {first} of {len} pages at pool page {pool} is out of range")]
    OutOfRange {
        /// File page.
        first: u64,
        /// Pool page.
        pool: u64,
        /// Pages.
        len: u64,
    },
    /// Two extents have the same file page.
    #[error("two extents claim file page {0}")]
    Overlap(u64),
}

/// The result of a search that examines a bounded number of pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Search {
    /// The first page that was searched for.
    Found(u64),
    /// There is no such page.
    Nowhere,
    /// There is none before this page, from which on nothing was examined.
    GoOn(u64),
}

/// The mapping of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RangeTable {
    pieces: BTreeMap<u64, Piece>,
    allocated: u64,
    fresh_pages: u64,
    fresh_starts: BTreeSet<u64>,
    #[cfg(test)]
    pub(super) translation: super::translation::Translation,
}

impl RangeTable {
    /// Checks and takes over a stored mapping.
    ///
    /// # Errors
    /// [`RangeError`] with the first bad extent.
    pub(crate) fn from_extents(extents: &[Extent], pool_pages: u64) -> Result<Self, RangeError> {
        let mut table = Self::default();
        for extent in extents {
            let (first, pool, len) = (extent.file_page.0, extent.pool_page.0, extent.len_pages);
            let fits = |start: u64, bound: u64| start.checked_add(len).is_some_and(|end| end <= bound);
            if len == 0 || !fits(first, MAX_FILE_PAGES) || !fits(pool, pool_pages) {
                return Err(RangeError::OutOfRange { first, pool, len });
            }
            if let Some(other) = table.pieces_in(first, first + len).next() {
                return Err(RangeError::Overlap(other.first));
            }
            let state = match extent.state {
                ExtentState::Written => PieceState::Written,
                ExtentState::Unwritten => PieceState::Unwritten,
            };
            table.insert(Piece { first, pool, len, state });
        }
        Ok(table)
    }

    /// Pages that the file has, in any state.
    pub(crate) fn allocated_pages(&self) -> u64 {
        self.allocated
    }

    /// Its pieces: what it takes of memory.
    pub(super) fn piece_count(&self) -> usize {
        self.pieces.len()
    }

    /// Pages in the state `Fresh`.
    pub(crate) fn fresh_pages(&self) -> u64 {
        self.fresh_pages
    }

    /// The pool page and state of a file page; `None` in a hole.
    pub(crate) fn get(&self, page: FilePage) -> Option<(PoolPage, PieceState)> {
        let (_, piece) = self.pieces.range(..=page.0).next_back()?;
        (page.0 < piece.end()).then(|| (PoolPage(piece.pool + (page.0 - piece.first)), piece.state))
    }

    /// The pieces of `[first, end)`, cut off at its ends, in file order.
    pub(crate) fn pieces_in(&self, first: u64, end: u64) -> impl Iterator<Item = Piece> + '_ {
        // `range` panics if the start is behind the end. An empty range has no pieces.
        let start = self
            .pieces
            .range(..=first)
            .next_back()
            .map_or(first, |(start, piece)| if piece.end() > first { *start } else { first });
        self.pieces.range(start..end.max(start)).filter_map(move |(_, piece)| piece.clip(first, end))
    }

    /// The holes of `[first, end)` as (first, length), in file order.
    pub(crate) fn holes_in(&self, first: u64, end: u64) -> Vec<(u64, u64)> {
        let mut holes = Vec::new();
        let mut at = first;
        for piece in self.pieces_in(first, end) {
            if piece.first > at {
                holes.push((at, piece.first - at));
            }
            at = piece.end();
        }
        if at < end {
            holes.push((at, end - at));
        }
        holes
    }

    /// Fresh pieces, in file order.
    pub(crate) fn fresh(&self) -> Vec<Piece> {
        self.fresh_starts.iter().map(|first| self.pieces[first]).collect()
    }

    /// A filekey of the file was bound.
    #[cfg(test)]
    pub(super) fn bind(&mut self, key: cuttlefs_common::ids::FileKey) {
        self.translation.cm_bind(key);
        self.translation.cm_init(key, self.pieces.values().copied());
    }

    /// Pages have this place from now on.
    #[cfg(test)]
    fn tell_placed(&mut self, piece: &Piece) {
        if piece.state.has_bytes() {
            self.translation.cm_update(piece);
        }
    }

    /// All pieces, in file order.
    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = Piece> + '_ {
        self.pieces.values().copied()
    }

    /// Maps a hole.
    pub(crate) fn insert(&mut self, piece: Piece) {
        assert!(piece.len > 0, "an empty piece");
        assert!(
            self.pieces_in(piece.first, piece.end()).next().is_none(),
            "file pages {}..{} are mapped already",
            piece.first,
            piece.end()
        );
        self.put_merged(piece);
        #[cfg(test)]
        self.tell_placed(&piece);
    }

    /// Changes the state of every mapped page of `[first, end)`; holes stay holes.
    pub(crate) fn set_state(&mut self, first: u64, end: u64, state: PieceState) {
        for mut piece in self.remove(first, end) {
            piece.state = state;
            self.put_merged(piece);
            #[cfg(test)]
            self.tell_placed(&piece);
        }
    }

    /// Unmaps `[first, end)` and returns the pieces that were there.
    pub(crate) fn remove(&mut self, first: u64, end: u64) -> Vec<Piece> {
        let inside: Vec<Piece> = self.pieces_in(first, end).collect();
        for piece in &inside {
            let (start, whole) = self
                .pieces
                .range(..=piece.first)
                .next_back()
                .map(|(start, whole)| (*start, *whole))
                .expect("a clipped piece comes from a whole one");
            self.take(start);
            if let Some(left) = whole.clip(0, piece.first) {
                self.put(left);
            }
            if let Some(right) = whole.clip(piece.end(), u64::MAX) {
                self.put(right);
            }
        }
        #[cfg(test)]
        inside.iter().for_each(|piece| self.translation.cm_invalidate(piece.first, piece.end()));
        inside
    }

    /// The first page at or after `page` that has bytes, if it is in one of the next `most` pieces.
    pub(crate) fn next_data(&self, page: u64, most: usize) -> Search {
        for (count, piece) in self.pieces_in(page, MAX_FILE_PAGES).enumerate() {
            if count == most {
                return Search::GoOn(piece.first);
            }
            if piece.state.has_bytes() {
                return Search::Found(piece.first);
            }
        }
        Search::Nowhere
    }

    /// The first page at or after `page` that has no bytes (a hole or unwritten), if it is in or before one of the next `most` pieces.
    pub(crate) fn next_hole(&self, page: u64, most: usize) -> Search {
        let mut at = page;
        for (count, piece) in self.pieces_in(page, MAX_FILE_PAGES).enumerate() {
            if piece.first > at || !piece.state.has_bytes() {
                break;
            }
            if count == most {
                return Search::GoOn(at);
            }
            at = piece.end();
        }
        Search::Found(at)
    }

    /// At most `max` extents, beginning with the one that contains or follows `first`, and the page up to which these tell everything (`None`: to the
    /// end of the file). Adjacent Written and Fresh pieces are one extent.
    pub(crate) fn extents(&self, first: FilePage, max: usize) -> (Vec<Extent>, Option<FilePage>) {
        let mut extents: Vec<Extent> = Vec::new();
        let start = self
            .pieces
            .range(..=first.0)
            .next_back()
            .filter(|(_, piece)| piece.end() > first.0)
            .map_or(first.0, |(start, _)| *start);
        for piece in self.pieces.range(start..).map(|(_, piece)| piece) {
            let next = piece.extent();
            if let Some(last) = extents.last_mut()
                && last.file_end() == next.file_page
                && last.pool_page.0 + last.len_pages == next.pool_page.0
                && last.state == next.state
            {
                last.len_pages += next.len_pages;
                continue;
            }
            if extents.len() == max {
                return (extents, Some(next.file_page));
            }
            extents.push(next);
        }
        (extents, None)
    }

    /// The Written piece that ends where `piece` begins, in the file and in the pool. Both can be one extent in the durable record.
    pub(crate) fn written_before(&self, piece: &Piece) -> Option<Piece> {
        let (_, before) = self.pieces.range(..piece.first).next_back()?;
        let as_written = Piece { state: PieceState::Written, ..*piece };
        before.continues_with(&as_written).then_some(*before)
    }

    /// The Written piece that begins where `piece` ends, in the file and in the pool.
    pub(crate) fn written_after(&self, piece: &Piece) -> Option<Piece> {
        let after = self.pieces.get(&piece.end())?;
        let as_written = Piece { state: PieceState::Written, ..*piece };
        as_written.continues_with(after).then_some(*after)
    }

    fn put_merged(&mut self, mut piece: Piece) {
        let before = self
            .pieces
            .range((Bound::Unbounded, Bound::Excluded(piece.first)))
            .next_back()
            .map(|(_, before)| *before);
        if let Some(before) = before
            && before.continues_with(&piece)
        {
            self.take(before.first);
            piece = Piece { len: before.len + piece.len, ..before };
        }
        if let Some(after) = self.pieces.get(&piece.end()).copied()
            && piece.continues_with(&after)
        {
            self.take(after.first);
            piece.len += after.len;
        }
        self.put(piece);
    }

    // Only `put` and `take` change the maps, so that the counters always agree with them.
    fn put(&mut self, piece: Piece) {
        self.allocated += piece.len;
        if piece.state == PieceState::Fresh {
            self.fresh_pages += piece.len;
            self.fresh_starts.insert(piece.first);
        }
        let replaced = self.pieces.insert(piece.first, piece);
        assert!(replaced.is_none(), "two pieces at file page {}", piece.first);
    }

    fn take(&mut self, first: u64) {
        let piece = self.pieces.remove(&first).expect("a piece that was just seen");
        self.allocated -= piece.len;
        if piece.state == PieceState::Fresh {
            self.fresh_pages -= piece.len;
            self.fresh_starts.remove(&piece.first);
        }
    }
}

#[cfg(test)]
#[path = "range_table_tests.rs"]
mod tests;
