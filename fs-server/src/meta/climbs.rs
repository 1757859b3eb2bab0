//! The check whether a directory lies below another: a rename that moves one must know, or the tree could get a loop.
//!
//! # How it works
//! The way from a directory to the root has no bound. A rename looks at the first `NEAR_LEVELS` of it under the writer
//! (`apply`), which are all levels of an ordinary tree. If the way is longer, the rename is refused with `Status::Busy`, and
//! nothing is done. Then its caller climbs outside of the writer, some levels at a time (`Meta::climb`, `Climb::step`), and asks
//! again with the climb still held: `apply` finds the way here.
//!
//! Meanwhile directories move. Each level is read and noted under `ways`. A move of a directory looks here after its commit
//! (`Climbs::note`), and forgets each way that leads through the directory by another parent than its new one. So a level is
//! either read after the move, or found by the move. The rename is refused with `Busy` again, and its climb begins anew. Moves
//! elsewhere in the tree do not matter, so only moves of directories above it make a climb begin anew.
//!
//! # Invariants
//! * Under the writer, a way that has ended is the present one.
//! * `LEVELS_MAX` bounds a way, and so the cost and memory of a climb. Directories can be made below that, and moved within the
//!   directory that they are in; none can be moved there from another one (`Status::NameTooLong`): no path is as long.
//!
//! # Failure
//! A way with a directory twice is damage: the directories form a loop.

use super::error::MetaError;
use super::metadata::Meta;
use super::record::InodeRecord;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::collections::btree_map::{BTreeMap, Entry};

/// Levels from a directory to the root that are climbed under the writer: as much work as any other operation. Few in tests, so
/// that they climb outside of it.
pub(super) const NEAR_LEVELS: usize = if cfg!(test) { 2 } else { 64 };
/// Levels climbed outside of the writer before others on the worker have their turn.
const LEVELS_A_STEP: usize = if cfg!(test) { 2 } else { 64 };
/// Most levels from the root to a directory that another one is moved to: twice of what a path of 4,096 bytes can name.
pub const LEVELS_MAX: usize = if cfg!(test) { 64 } else { 4096 };

/// How a way ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// At the root.
    Root,
    /// Nobody knows: it is longer than `LEVELS_MAX`.
    TooLong,
}

/// A way from a directory towards the root.
#[derive(Debug)]
struct Way {
    /// Directories on it, and the one each is in. With the directory where it begins.
    above: HashMap<InodeNo, InodeNo>,
    /// Where it goes on.
    next: InodeNo,
    end: Option<End>,
}

impl Way {
    fn from(directory: InodeNo) -> Self {
        Self { above: HashMap::new(), next: directory, end: None }
    }

    /// One level up, if it has not ended.
    fn climb(&mut self, parent: impl FnOnce(InodeNo) -> Result<InodeNo, MetaError>) -> Result<(), MetaError> {
        if self.end.is_some() {
            return Ok(());
        }
        if self.above.len() == LEVELS_MAX {
            self.end = Some(End::TooLong);
            return Ok(());
        }
        let at = self.next;
        let above = parent(at)?;
        if self.above.insert(at, above).is_some() {
            return Err(MetaError::Inconsistent { what: "directories form a loop", ino: at.0 });
        }
        self.next = above;
        self.end = (at == InodeNo::ROOT).then_some(End::Root);
        Ok(())
    }
}

/// The ways that are being climbed, each by the directory where it begins.
#[derive(Debug, Default)]
pub struct Climbs {
    /// Taken under the writer's mutex, too, and for a level at a time.
    ways: Mutex<BTreeMap<InodeNo, Way>>,
}

impl Climbs {
    /// Whether `directory` is `ancestor` or below it. `None`: nobody has climbed from there.
    pub(super) fn is_below(&self, directory: InodeNo, ancestor: InodeNo) -> Option<Result<bool, Status>> {
        let ways = self.ways.lock();
        let way = ways.get(&directory)?;
        let is_on_it = way.above.contains_key(&ancestor);
        Some(match way.end? {
            _ if is_on_it => Ok(true),
            End::Root => Ok(false),
            End::TooLong => Err(Status::NameTooLong),
        })
    }

    /// A rename left an inode so. Under the writer's mutex, when others can read it.
    pub(super) fn note(&self, ino: InodeNo, record: &InodeRecord) {
        self.ways.lock().retain(|_, way| way.above.get(&ino).is_none_or(|above| *above == record.parent));
    }
}

/// A climb from a directory to the root. While it is held, a rename to there knows the way, unless it was changed.
pub struct Climb<'m> {
    meta: &'m Meta,
    directory: InodeNo,
}

impl Meta {
    /// Begins to climb from a directory.
    pub fn climb(&self, directory: InodeNo) -> Climb<'_> {
        self.climbs.ways.lock().insert(directory, Way::from(directory));
        Climb { meta: self, directory }
    }
}

impl Climb<'_> {
    /// Climbs some levels, without the writer's mutex. Gives whether there is more to do; not so either when somebody changed the
    /// way, of which the next rename hears.
    ///
    /// # Errors
    /// `Stale` if the directory is gone, `Io`.
    pub fn step(&mut self) -> Result<bool, Status> {
        for _ in 0..LEVELS_A_STEP {
            let mut ways = self.meta.climbs.ways.lock();
            let Entry::Occupied(mut way) = ways.entry(self.directory) else { return Ok(false) };
            let parent = |ino| self.meta.inode(ino).map(|record| record.parent);
            way.get_mut().climb(parent).map_err(|error| self.meta.fail("climb", error))?;
            if way.get().end.is_some() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Drop for Climb<'_> {
    fn drop(&mut self) {
        self.meta.climbs.ways.lock().remove(&self.directory);
    }
}
