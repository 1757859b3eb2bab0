//! The free room in the file of records.
//!
//! redb writes to free pages of its file before it makes the file longer. So the space of deleted records in it is room, like free space outside of
//! it. redb can tell exactly how many pages are in use, but only by a walk through the tree. So
//! * while there is plenty of room nothing is counted: the size of the records bounds the bytes in use;
//! * when room is short (`Space::is_short`), each checkpoint is followed by a count, and so is a start. Long counts take at most a fifth of the time;
//!   in between, each checkpoint counts as the most that it can take.
//!
//! * A file that is mostly empty is made smaller (`Checkpoint::moved`): at a start, if that gives much back and takes little time; and after a count.
//!   redb uses a free page only if its size and place fit, so on a small file system not all spare room can be used.
//!
//! # Invariant
//! The spare bytes are never overestimated. Pages that redb has not got back yet, because a reader or its last commit may reach them, count as used.
//! Only the part of the file that is on the disk counts, because a hole in it takes space when it is written.
//!
//! # Failure
//! As for the checkpoint.

use super::TREE_PER_RECORD_BYTES;
use super::checkpoint::{self, Checkpoint};
use super::space::Space;
use super::tally::Tally;
use crate::meta::store::StoreError;
use std::path::Path;
use std::time::{Duration, Instant};

/// A count that takes no longer than this is made after each checkpoint, which takes longer itself.
const COUNT_CHEAP: Duration = Duration::from_millis(100);
/// After a longer count, the next one waits this many times its duration.
const COUNT_PAUSE: u32 = 4;
/// One in so many blocks of the file has checksums.
const SUMS_PART: u64 = 1025;

/// A file is made smaller only if it keeps at most so many bytes,
const MOVED_MOST_BYTES: u64 = 128 << 20;
/// and gives at least so many bytes back.
const MOVED_LEAST_BYTES: u64 = 1 << 20;

#[derive(Debug)]
struct Count {
    /// The last batch of the checkpoint that was counted.
    applied: u64,
    ended: Instant,
    took: Duration,
}

/// The known use of the file of records.
#[derive(Debug)]
pub(super) struct Spare {
    /// A bound for the bytes of the file that are in use.
    used_bytes: u64,
    last: Option<Count>,
}

/// The most bytes that these records can take.
fn most_bytes(tally: &Tally) -> u64 {
    TREE_PER_RECORD_BYTES * tally.bytes()
}

impl Spare {
    /// Nothing was counted yet; `tally` has the size of the records.
    pub(super) fn new(tally: &Tally) -> Self {
        Self { used_bytes: most_bytes(tally), last: None }
    }

    /// Notes a checkpoint that took at most `cost_bytes`; `tally` has the present size of the records.
    pub(super) fn grow(&mut self, cost_bytes: u64, tally: &Tally) {
        self.used_bytes = self.used_bytes.saturating_add(cost_bytes).min(most_bytes(tally));
    }

    /// Whether the checkpoint up to this batch must be counted.
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

    /// Whether the file is mostly empty, and there is space for the bytes that it keeps.
    pub(super) fn is_to_move(&self, space: &Space, directory: &Path) -> bool {
        let (takes, used) = (checkpoint::file_bytes(directory), self.used_bytes);
        // Leaves may be less full in the new file.
        used <= MOVED_MOST_BYTES
            && takes >= 2 * used + MOVED_LEAST_BYTES
            && space.outside_bytes() >= used + used / 2 + MOVED_LEAST_BYTES
    }

    /// The same at a start, with nothing counted: whether the file is mostly empty even if it keeps as much as it may, by at least `least_bytes`.
    pub(super) fn is_to_move_at_start(&self, least_bytes: u64, space: &Space, directory: &Path) -> bool {
        let takes = checkpoint::file_bytes(directory);
        takes >= 4 * self.used_bytes + least_bytes && self.is_to_move(space, directory)
    }

    /// Tells `space` the spare bytes in the file of this directory.
    pub(super) fn tell(&self, space: &Space, directory: &Path) {
        let takes = checkpoint::file_bytes(directory);
        space.set_spare((takes - takes.div_ceil(SUMS_PART)).saturating_sub(self.used_bytes));
    }
}
