//! Live inodes: those whose data changed in memory and is not durable yet.
//!
//! A write moves size, allocation, times and change counter here, and nowhere else; a data commit moves them to
//! the store. Other operations read and write *around* it: they see the live times and counter, and write them,
//! but with the durable size and allocation, which alone may be on disk.
//!
//! # Ordering
//! A shard's lock is held over the load of a record that is not live, so an inode cannot become live, or stop being it,
//! between the two: all that is read was true at one instant. Lock order: the writer's mutex, then a shard, then the store.
//!
//! An inode's change counter also says in which order its contents and its times were changed, by notes and by batches:
//! clients' restored changes are judged by it. So no two of them may take the same value. A batch takes the one after the
//! value it was made from; a note that comes before the batch has settled takes a later one (`look`, `end_batch`).
//!
//! # Bound
//! One entry for each inode with dirty data; the region layer bounds those by its dirty limit.

use super::record::InodeRecord;
use cuttlefs_common::attr::Timestamp;
use cuttlefs_common::ids::InodeNo;
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::cell::RefCell;
use std::collections::HashMap;

/// Shards of the table: a few times the number of worker threads.
const SHARDS: usize = 16;

/// What changed in memory about an inode's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoteData {
    /// The length now.
    pub size: Option<u64>,
    /// Pages held now, fresh ones included.
    pub allocated_pages: Option<u64>,
    /// Contents changed: times and change counter move.
    pub modified: bool,
}

/// A live inode.
#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
    /// As everybody sees it.
    pub record: InodeRecord,
    /// Length in the store.
    pub durable_size: u64,
    /// Pages in the store.
    pub durable_pages: u64,
}

impl Live {
    /// Starts from what is stored.
    pub(super) fn from_stored(record: InodeRecord) -> Self {
        Self { record, durable_size: record.size, durable_pages: record.allocated_pages }
    }

    /// As a batch may write it.
    pub(super) fn writable(&self) -> InodeRecord {
        InodeRecord { size: self.durable_size, allocated_pages: self.durable_pages, ..self.record }
    }

    /// A batch wrote `stored`. Gives whether the inode is still live.
    pub(super) fn settle(&mut self, stored: &InodeRecord, kind: SettleKind) -> bool {
        let live = self.record;
        let noted_meanwhile = match kind {
            SettleKind::DataCommit => live.change != stored.change,
            // The operation moved the counter on from what was live when it began.
            SettleKind::Truncation(_) | SettleKind::Other => live.change >= stored.change,
        };
        if kind != SettleKind::DataCommit {
            self.record = *stored;
            if noted_meanwhile {
                // The note came after the batch, whatever the clock said.
                self.record.mtime = live.mtime;
                self.record.ctime = live.ctime;
                self.record.change = live.change + 1;
            }
        }
        (self.record.size, self.record.allocated_pages) = match kind {
            SettleKind::Truncation(size) => {
                let fresh = live.allocated_pages.saturating_sub(self.durable_pages);
                (size, stored.allocated_pages + fresh)
            }
            SettleKind::DataCommit | SettleKind::Other => (live.size, live.allocated_pages),
        };
        self.record.written = stored.written;
        self.durable_size = stored.size;
        self.durable_pages = stored.allocated_pages;
        noted_meanwhile
            || self.record.size != self.durable_size
            || self.record.allocated_pages != self.durable_pages
    }
}

/// What a batch did to the data of the inodes it wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SettleKind {
    /// Made live data durable.
    DataCommit,
    /// Set the live length to this; the stored one may stay below it.
    Truncation(u64),
    /// Nothing.
    Other,
}

/// Live inodes whose numbers have the same remainder.
#[derive(Debug, Default)]
pub(super) struct Shard {
    inodes: HashMap<InodeNo, Live>,
    /// What the batch under way is made from: a few.
    in_batch: Vec<InodeNo>,
}

impl Shard {
    pub(super) fn get(&self, ino: InodeNo) -> Option<&Live> {
        self.inodes.get(&ino)
    }

    /// Makes an inode live.
    pub(super) fn add(&mut self, ino: InodeNo, record: InodeRecord) {
        self.inodes.insert(ino, Live::from_stored(record));
    }

    /// Notes a change in memory of a live inode; gives it as it is now.
    pub(super) fn note(
        &mut self,
        ino: InodeNo,
        note: NoteData,
        now: Timestamp,
        change_floor: u64,
    ) -> InodeRecord {
        let in_batch = self.in_batch.contains(&ino);
        let Live { record, .. } = self.inodes.get_mut(&ino).expect("the inode is live");
        record.size = note.size.unwrap_or(record.size);
        record.allocated_pages = note.allocated_pages.unwrap_or(record.allocated_pages);
        if note.modified {
            (record.mtime, record.ctime) = (now, now);
            // The next one is the batch's.
            record.change = (record.change + 1).max(change_floor) + u64::from(in_batch);
        }
        *record
    }
}

/// The live inodes.
#[derive(Debug, Default)]
pub(super) struct LiveInodes {
    shards: [RwLock<Shard>; SHARDS],
}

impl LiveInodes {
    fn shard(&self, ino: InodeNo) -> &RwLock<Shard> {
        &self.shards[ino.0 as usize % SHARDS]
    }

    pub(super) fn read(&self, ino: InodeNo) -> RwLockReadGuard<'_, Shard> {
        self.shard(ino).read()
    }

    pub(super) fn write(&self, ino: InodeNo) -> RwLockWriteGuard<'_, Shard> {
        self.shard(ino).write()
    }

    pub(super) fn get(&self, ino: InodeNo) -> Option<Live> {
        self.read(ino).get(ino).copied()
    }

    /// As `get`, for a batch to be made from. `looked` is for `end_batch`.
    pub(super) fn look(&self, ino: InodeNo, looked: &RefCell<Vec<InodeNo>>) -> Option<Live> {
        let mut shard = self.write(ino);
        shard.in_batch.push(ino);
        looked.borrow_mut().push(ino);
        shard.get(ino).copied()
    }

    /// The batch has settled, or there is none.
    pub(super) fn end_batch(&self, looked: &[InodeNo]) {
        for ino in looked {
            self.write(*ino).in_batch.retain(|other| other != ino);
        }
    }

    pub(super) fn settle(&self, ino: InodeNo, stored: Option<&InodeRecord>, kind: SettleKind) {
        // Most operations are on inodes that are not live: look before taking the shard for writing.
        if self.read(ino).get(ino).is_none() {
            return;
        }
        let mut shard = self.write(ino);
        let Some(live) = shard.inodes.get_mut(&ino) else {
            return;
        };
        let keep = stored.is_some_and(|stored| live.settle(stored, kind));
        if !keep {
            shard.inodes.remove(&ino);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.read().inodes.len()).sum()
    }
}
