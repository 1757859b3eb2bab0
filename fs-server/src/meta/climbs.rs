//! The check whether a directory lies below another. A rename that moves a directory needs it, or the tree could get a loop.
//!
//! # How it works
//! The path from a directory to the root has no bound. A rename looks at its first `NEAR_LEVELS` levels under the writer (`apply`), which is all of
//! it in an ordinary tree. If the path is longer, the rename is refused with `Status::Busy`, and nothing is done. Then its caller climbs outside of
//! the writer, some levels at a time (`Meta::climb`, `Climb::step`), and repeats the rename while it holds the climb: `apply` finds the path here.
//!
//! Meanwhile directories may move. Each level is read and noted under `ways`. After its commit, a move of a directory looks here (`Climbs::note`) and
//! drops each path that leads through the directory to another parent than its new one. So a level is either read after the move, or the move finds
//! it. The rename is then refused with `Busy` again, and its climb begins anew. Moves elsewhere in the tree do not matter: only moves of directories
//! above it make a climb begin anew.
//!
//! # Invariants
//! * Under the writer, a path that is complete is the present one.
//! * `LEVELS_MAX` bounds a path, and so the cost and memory of a climb. Directories can be made below that depth, and renamed within their parent;
//!   none can be moved there from another directory (`Status::NameTooLong`), because no path name is as long.
//!
//! # Failure
//! A path with the same directory twice is damage: the directories form a loop.

use super::error::MetaError;
use super::metadata::Meta;
use super::record::InodeRecord;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::collections::btree_map::{BTreeMap, Entry};

/// Levels from a directory to the root that are climbed under the writer: as much work as any other operation. Few in tests, so that these climb
/// outside of it.
pub(super) const NEAR_LEVELS: usize = if cfg!(test) { 2 } else { 64 };
/// Levels that are climbed outside of the writer before other tasks of the worker get their turn.
const LEVELS_A_STEP: usize = if cfg!(test) { 2 } else { 64 };
/// Most levels from the root to a directory into which another is moved: twice as many as a path of 4,096 bytes can name.
pub const LEVELS_MAX: usize = if cfg!(test) { 64 } else { 4096 };

/// The end of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The root.
    Root,
    /// Unknown, because the path is longer than `LEVELS_MAX`.
    TooLong,
}

/// A path from a directory towards the root.
#[derive(Debug)]
struct Way {
    /// The parent of each directory on the path, also of the first one.
    above: HashMap<InodeNo, InodeNo>,
    /// The directory whose parent is read next.
    next: InodeNo,
    end: Option<End>,
}

impl Way {
    fn from(directory: InodeNo) -> Self {
        Self { above: HashMap::new(), next: directory, end: None }
    }

    /// Climbs one level, if the path is not complete.
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

/// The paths that are being climbed, each under its first directory.
#[derive(Debug, Default)]
pub struct Climbs {
    /// Locked for one level at a time, also under the writer's mutex.
    ways: Mutex<BTreeMap<InodeNo, Way>>,
}

impl Climbs {
    /// Whether `directory` is `ancestor` or below it. `None` if nobody has climbed from there to the end.
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

    /// Drops paths that a rename has changed: `record` is the inode as the rename left it. Called under the writer's mutex, when others can read the
    /// record.
    pub(super) fn note(&self, ino: InodeNo, record: &InodeRecord) {
        self.ways.lock().retain(|_, way| way.above.get(&ino).is_none_or(|above| *above == record.parent));
    }
}

/// A climb from a directory to the root. While it is held, a rename into that directory knows its path, unless that was changed.
pub struct Climb<'m> {
    meta: &'m Meta,
    directory: InodeNo,
}

impl Meta {
    /// Begins a climb from a directory.
    pub fn climb(&self, directory: InodeNo) -> Climb<'_> {
        self.climbs.ways.lock().insert(directory, Way::from(directory));
        Climb { meta: self, directory }
    }
}

impl Climb<'_> {
    /// Climbs some levels, without the writer's mutex. Returns whether there is more to do. If the path was changed meanwhile, there is nothing more
    /// to do either, and the next rename is refused.
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
