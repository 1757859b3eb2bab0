//! Stretches: parts of a file without holes that could lie in fewer runs of the pool, and the places for them.

use crate::files::range_table::RangeTable;
use crate::pool::space::{Run, Space};
use cuttlefs_common::ids::PoolPage;

/// Pieces of a table that are looked at for one step. Few in tests, so that stretches are cut.
pub(super) const LOOK_PIECES: usize = if cfg!(test) { 8 } else { 1024 };
/// Most pages of a stretch: 256 MiB. Runs of that length are long enough, and a place for one is found in a moment.
pub(super) const LOOK_PAGES: u64 = if cfg!(test) { 16 } else { 65_536 };

/// File pages without a hole among them. The first one does not go on in the pool where the page before it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    /// First file page.
    pub first: u64,
    /// The page behind the last one.
    pub end: u64,
    /// Pages of the stretch that do not lie behind the page before them: one at least, the first.
    pub breaks: usize,
    /// The pool page behind that of the page before the stretch.
    pub near: PoolPage,
    /// The beginning of the run before the stretch, if it may be moved along: it begins behind a hole, and is not long.
    pub lead: Option<u64>,
    /// Whether the page at `end` lies behind the last one in the pool.
    pub is_cut: bool,
}

/// The result of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The next stretch.
    Stretch(Stretch),
    /// There is none before this page, from which on nothing was looked at.
    GoOn(u64),
    /// There is none up to the end of the file.
    Nothing,
}

/// File pages that are neighbours in the pool.
struct Lead {
    start: u64,
    end: u64,
    /// The pool page behind the last one.
    pool_end: u64,
    /// Whether the page before `start` is the file's.
    goes_on: bool,
}

/// The first stretch at or behind a page, as far as the next pieces tell. The pages before are left as they are.
pub(super) fn find(table: &RangeTable, first: u64) -> Found {
    let before = first.checked_sub(1).and_then(|page| table.get(page.into()));
    let mut lead =
        before.map(|(pool, _)| Lead { start: first, end: first, pool_end: pool.0 + 1, goes_on: true });
    for (count, piece) in table.pieces_in(first, u64::MAX).enumerate() {
        if count == LOOK_PIECES {
            return Found::GoOn(piece.first);
        }
        let (end, pool_end) = (piece.end(), piece.pool + piece.len);
        match &mut lead {
            Some(lead) if lead.end == piece.first && lead.pool_end == piece.pool => {
                (lead.end, lead.pool_end) = (end, pool_end);
            }
            Some(lead) if lead.end == piece.first => return Found::Stretch(behind(table, lead)),
            _ => lead = Some(Lead { start: piece.first, end, pool_end, goes_on: false }),
        }
    }
    Found::Nothing
}

/// The stretch behind a run.
fn behind(table: &RangeTable, lead: &Lead) -> Stretch {
    let (first, full) = (lead.end, lead.end.saturating_add(LOOK_PAGES));
    let (mut end, mut pool_end) = (first, lead.pool_end);
    let (mut breaks, mut is_cut) = (0, false);
    for (count, piece) in table.pieces_in(first, u64::MAX).enumerate() {
        if piece.first != end {
            break;
        }
        let goes_on = piece.pool == pool_end;
        if count == LOOK_PIECES || end == full {
            is_cut = goes_on;
            break;
        }
        breaks += usize::from(!goes_on);
        let len = piece.len.min(full - end);
        (end, pool_end) = (end + len, piece.pool + len);
        if len < piece.len {
            is_cut = true;
            break;
        }
    }
    let may_move = !lead.goes_on && lead.end - lead.start <= LOOK_PAGES;
    let (near, lead) = (PoolPage(lead.pool_end), may_move.then_some(lead.start));
    Stretch { first, end, breaks, near, lead, is_cut }
}

impl Stretch {
    /// Takes the first `most` pages of a place in which there are fewer breaks. Returns the file page that is to be moved there first, and the place;
    /// `None` if there is no better place. `hint`: the pages of the whole file, for which a place is looked for first.
    ///
    /// One run is best, behind what is in place or anywhere. Among places of several runs, one behind what is in place goes first, so that the next
    /// step goes on in the run that this one has begun.
    pub(super) fn take_place(&self, space: &Space, hint: u64, most: u64) -> Option<(u64, Run)> {
        let whole = self.lead.unwrap_or(self.first);
        let hint = hint.min(LOOK_PAGES).max(self.end - whole);
        let tries = [
            (self.first, self.end - self.first, Some(self.near), true),
            (whole, hint, None, true),
            (whole, self.end - whole, None, true),
            (self.first, self.end - self.first, None, true),
            (self.first, self.end - self.first, Some(self.near), false),
            (whole, self.end - whole, None, false),
        ];
        tries.into_iter().find_map(|(from, pages, near, in_one)| {
            let is_better = |runs: &[Run]| {
                let goes_on = runs[0].first == self.near;
                let at_the_start = usize::from(!goes_on && self.lead != Some(from));
                let breaks = at_the_start + runs.len() - 1 + usize::from(self.is_cut);
                breaks < self.breaks && (goes_on || near.is_none()) && (runs.len() == 1 || !in_one)
            };
            let keep = |runs: &[Run]| if is_better(runs) { most.min(self.end - from) } else { 0 };
            space.allocate_first(pages, near, keep).map(|run| (from, run))
        })
    }
}

#[cfg(test)]
#[path = "stretch_tests.rs"]
mod tests;
