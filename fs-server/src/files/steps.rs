//! The parts of a mapping that one batch changes. They bound the size of a batch, and the wait for one, however large the file is.

use crate::files::range_table::{Piece, RangeTable};
use crate::meta::RangeUpdate;
use cuttlefs_common::ids::FilePage;

/// Most pieces of a step. Few in tests, so that changes have several steps.
pub(super) const STEP_PIECES: usize = if cfg!(test) { 2 } else { crate::meta::REAP_BATCH_EXTENTS };

/// A range of a file in steps.
#[derive(Debug, Default)]
pub(super) struct Steps(Vec<Step>);

/// A part of a range, and its pieces.
#[derive(Debug)]
pub(super) struct Step {
    pub first: u64,
    pub end: u64,
    pub pieces: Vec<Piece>,
}

impl Step {
    /// The change that removes all pieces of the step.
    pub(super) fn removal(&self) -> RangeUpdate {
        RangeUpdate { first: FilePage(self.first), end: FilePage(self.end), extents: Vec::new() }
    }
}

impl Steps {
    /// The steps for `[first, end)` of a file; none if the range has no pieces. Together they cover the range.
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

    /// Whether the range has no pieces.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The steps from the end of the file to its beginning, so that the removed records that a step leaves in the store lie behind all records that
    /// the next ones read.
    pub(super) fn last_first(self) -> impl ExactSizeIterator<Item = Step> {
        self.0.into_iter().rev()
    }
}
