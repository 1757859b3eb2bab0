//! The free room in the file of records.
//!
//! redb writes to free pages of its file before it makes the file longer, so the space of deleted records in it is room, like free
//! space outside of it. redb can tell exactly how many pages are in use, but only by a walk through the tree. So
//! * while there is plenty of room there is no count: the records' bytes say how much is in use at most;
//! * when room is short (`Space::is_short`), each checkpoint is followed by a count, and so is a start. A long count is made for a
//!   fifth of the time only; in between, each checkpoint counts as having taken the most that it can take.
//!
//! * A file that is mostly empty is made smaller (`Checkpoint::moved`): at a start, if that gives much back and takes little time; and
//!   with a count. redb uses a free page only if its size and place fit, so that on a small file system not all spare room can be
//!   used.
//!
//! # Invariant
//! Never more is told to be free than is. Pages that redb has not got back yet, because a reader or its last commit may reach them,
//! count as used. Of the file only the part on the disk counts, for a hole in it takes space when it is written.
//!
//! # Failure
//! As the checkpoint's.

use super::TREE_PER_RECORD_BYTES;
use super::checkpoint::{self, Checkpoint};
use super::space::Space;
use super::tally::Tally;
use crate::meta::store::StoreError;
use std::path::Path;
use std::time::{Duration, Instant};

/// A count that takes no longer is made with each checkpoint, which takes longer itself.
const COUNT_CHEAP: Duration = Duration::from_millis(100);
/// So many times as long as a longer one took none is made.
const COUNT_PAUSE: u32 = 4;
/// One block of the file in so many has checksums.
const SUMS_PART: u64 = 1025;

/// A file is made smaller only if what it keeps takes no more than this,
const MOVED_MOST_BYTES: u64 = 128 << 20;
/// and so much of it is not.
const MOVED_LEAST_BYTES: u64 = 1 << 20;

#[derive(Debug)]
struct Count {
    /// Last batch of the checkpoint that was counted.
    applied: u64,
    ended: Instant,
    took: Duration,
}

/// What is known of it.
#[derive(Debug)]
pub(super) struct Spare {
    /// Bytes of the file that are in use, at most.
    used_bytes: u64,
    last: Option<Count>,
}

/// What records of so many bytes take at most.
fn most_bytes(tally: &Tally) -> u64 {
    TREE_PER_RECORD_BYTES * tally.bytes()
}

impl Spare {
    /// Nothing was counted yet. The records are these.
    pub(super) fn new(tally: &Tally) -> Self {
        Self { used_bytes: most_bytes(tally), last: None }
    }

    /// A checkpoint was made, which took at most so much; the records are these now.
    pub(super) fn grow(&mut self, cost_bytes: u64, tally: &Tally) {
        self.used_bytes = self.used_bytes.saturating_add(cost_bytes).min(most_bytes(tally));
    }

    /// Whether it has to be counted in the checkpoint up to this batch.
    pub(super) fn is_wanted(&self, space: &Space, applied: u64) -> bool {
        let is_time = |last: &Count| {
            last.took <= COUNT_CHEAP || last.ended.elapsed() >= last.took.saturating_mul(COUNT_PAUSE)
        };
        let is_old = self.last.as_ref().is_none_or(|last| last.applied != applied && is_time(last));
        is_old && space.is_short()
    }

    /// Counts. Nobody should hold the checkpoint before this one, so that its pages are free.
    ///
    /// # Errors
    /// [`StoreError::Backend`]; final.
    pub(super) fn count(&mut self, checkpoint: &Checkpoint, applied: u64) -> Result<(), StoreError> {
        let began = Instant::now();
        self.used_bytes = checkpoint.count_used_bytes()?;
        self.last = Some(Count { applied, ended: Instant::now(), took: began.elapsed() });
        Ok(())
    }

    /// Whether the file is mostly empty, and there is space for what it keeps.
    pub(super) fn is_to_move(&self, space: &Space, directory: &Path) -> bool {
        let (takes, used) = (checkpoint::file_bytes(directory), self.used_bytes);
        // Leaves may be less full in the new file.
        used <= MOVED_MOST_BYTES
            && takes >= 2 * used + MOVED_LEAST_BYTES
            && space.outside_bytes() >= used + used / 2 + MOVED_LEAST_BYTES
    }

    /// Whether it is even if it keeps as much as it may, by that much: what a start looks at.
    pub(super) fn is_to_move_at_start(&self, least_bytes: u64, space: &Space, directory: &Path) -> bool {
        let takes = checkpoint::file_bytes(directory);
        takes >= 4 * self.used_bytes + least_bytes && self.is_to_move(space, directory)
    }

    /// Tells what is free in the file of this directory.
    pub(super) fn tell(&self, space: &Space, directory: &Path) {
        let takes = checkpoint::file_bytes(directory);
        space.set_spare((takes - takes.div_ceil(SUMS_PART)).saturating_sub(self.used_bytes));
    }
}
