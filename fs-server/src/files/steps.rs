//! Parts of a mapping that one batch changes: so that no batch, and no wait for one, grows with a file.

use crate::files::range_table::{Piece, RangeTable};
use crate::meta::RangeUpdate;
use cuttlefs_common::ids::FilePage;

/// Pieces of a step. Few in tests, so that they have steps.
pub(super) const STEP_PIECES: usize = if cfg!(test) { 2 } else { crate::meta::REAP_BATCH_EXTENTS };

/// The pieces of a range, in parts.
#[derive(Debug, Default)]
pub(super) struct Steps(Vec<Step>);

/// A part of a range and what it holds.
#[derive(Debug)]
pub(super) struct Step {
    pub first: u64,
    pub end: u64,
    pub pieces: Vec<Piece>,
}

impl Step {
    /// The change that takes all of it away.
    pub(super) fn removal(&self) -> RangeUpdate {
        RangeUpdate { first: FilePage(self.first), end: FilePage(self.end), extents: Vec::new() }
    }
}

impl Steps {
    /// What `[first, end)` of a file holds; nothing if that is nothing. Together the parts are all of the range.
    pub(super) fn of(table: &RangeTable, first: u64, end: u64) -> Self {
        let pieces: Vec<Piece> = table.pieces_in(first, end.max(first)).collect();
        let mut steps: Vec<Step> = pieces
            .chunks(STEP_PIECES)
            .map(|pieces| Step { first: pieces[0].first, end, pieces: pieces.to_vec() })
            .collect();
        if let Some(step) = steps.first_mut() {
            step.first = first;
        }
        for at in 1..steps.len() {
            steps[at - 1].end = steps[at].first;
        }
        Self(steps)
    }

    /// Whether the range holds nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The last pages first. So what a step leaves of removed records in the store is behind all that the next ones look
    /// through.
    pub(super) fn last_first(self) -> impl ExactSizeIterator<Item = Step> {
        self.0.into_iter().rev()
    }
}
