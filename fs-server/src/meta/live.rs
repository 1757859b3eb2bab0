//! Live inodes: those whose data changed in memory and is not durable yet.
//!
//! A write changes size, allocation, times and change counter here, and nowhere else; a data commit moves them to the store. Other operations read
//! and write *around* that: they see and write the live times and counter, but write the durable size and allocation, because only these may be on
//! disk.
//!
//! # Ordering
//! A shard's lock is held while the record of an inode that is not live is loaded, so that the inode cannot become live, or stop being live, in
//! between: everything that is read was true at one instant. Lock order: the writer's mutex, then a shard, then the store.
//!
//! An inode's change counter also gives the order in which notes and batches changed its contents and times; restored changes of clients are judged
//! by it. So no two changes may have the same value. A batch takes the value after the one that it was made from. A note that comes before the batch
//! has settled takes a later one (`look`, `end_batch`).
//!
//! # Held inodes
//! The NIC engine notes changes without waiting for the store. So an inode with a write grant is held: it stays here when all of it is durable, equal
//! to its stored record, until nobody holds it (`HeldLive`).
//!
//! # Bound
//! One entry for each inode with dirty data, which the region layer bounds by its dirty limit, and one for each that is held, at most one for each
//! grant.

use super::record::InodeRecord;
use crate::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use cuttlefs_common::attr::Timestamp;
use cuttlefs_common::ids::InodeNo;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

/// Shards of the table: a few times the number of worker threads.
const SHARDS: usize = 16;

/// A change of an inode's data in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoteData {
    /// The new length.
    pub size: Option<u64>,
    /// The number of pages held now, with fresh ones.
    pub allocated_pages: Option<u64>,
    /// Whether contents changed, so that times and change counter move.
    pub modified: bool,
}

/// A live inode.
#[derive(Clone, Copy, Debug)]
pub(super) struct Live {
    /// The inode as all readers see it.
    pub record: InodeRecord,
    /// The length in the store.
    pub durable_size: u64,
    /// The number of pages in the store.
    pub durable_pages: u64,
    /// Whether there are changes that the store does not have.
    is_noted: bool,
}

impl Live {
    /// A live inode that equals its stored record.
    pub(super) fn from_stored(record: InodeRecord) -> Self {
        let (durable_size, durable_pages) = (record.size, record.allocated_pages);
        Self { record, durable_size, durable_pages, is_noted: false }
    }

    /// The record as a batch may write it.
    pub(super) fn writable(&self) -> InodeRecord {
        InodeRecord { size: self.durable_size, allocated_pages: self.durable_pages, ..self.record }
    }

    /// Updates the inode after a batch wrote `stored`. Returns whether it is still live.
    pub(super) fn settle(&mut self, stored: &InodeRecord, kind: SettleKind) -> bool {
        let live = self.record;
        let noted_meanwhile = self.is_noted
            && match kind {
                SettleKind::DataCommit => live.change != stored.change,
                // The operation set the counter to one more than the live value when it began.
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
        self.is_noted = noted_meanwhile
            || self.record.size != self.durable_size
            || self.record.allocated_pages != self.durable_pages;
        self.is_noted
    }
}

/// The effect of a batch on the data of the inodes that it wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SettleKind {
    /// The batch made live data durable.
    DataCommit,
    /// The batch set the live length to this value; the stored length may stay below.
    Truncation(u64),
    /// The batch did not change data.
    Other,
}

/// The live inodes of one shard.
#[derive(Debug, Default)]
pub(super) struct Shard {
    inodes: HashMap<InodeNo, Live>,
    /// The few inodes from which the batch under way is made.
    in_batch: Vec<InodeNo>,
    /// How often each inode is held.
    held: HashMap<InodeNo, usize>,
}

impl Shard {
    pub(super) fn get(&self, ino: InodeNo) -> Option<&Live> {
        self.inodes.get(&ino)
    }

    /// Makes an inode live.
    pub(super) fn add(&mut self, ino: InodeNo, record: InodeRecord) {
        self.inodes.insert(ino, Live::from_stored(record));
    }

    /// Notes a change in memory of a live inode. Returns the inode as of now.
    pub(super) fn note(
        &mut self,
        ino: InodeNo,
        note: NoteData,
        now: Timestamp,
        change_floor: u64,
    ) -> InodeRecord {
        let in_batch = self.in_batch.contains(&ino);
        let Live { record, is_noted, .. } = self.inodes.get_mut(&ino).expect("the inode is live");
        *is_noted |= note != NoteData::default();
        record.size = note.size.unwrap_or(record.size);
        record.allocated_pages = note.allocated_pages.unwrap_or(record.allocated_pages);
        if note.modified {
            (record.mtime, record.ctime) = (now, now);
            // The next value is the batch's.
            record.change = (record.change + 1).max(change_floor) + u64::from(in_batch);
        }
        *record
    }
}

/// Keeps an inode live until it is dropped.
#[derive(Debug)]
pub struct HeldLive {
    inodes: Arc<LiveInodes>,
    ino: InodeNo,
}

impl Drop for HeldLive {
    fn drop(&mut self) {
        let mut shard = self.inodes.write(self.ino);
        let Some(count) = shard.held.get_mut(&self.ino) else { return };
        *count -= 1;
        if *count > 0 {
            return;
        }
        shard.held.remove(&self.ino);
        // One that has changes stays until they are durable. So does one in a batch, which settles it.
        let is_idle =
            shard.get(self.ino).is_some_and(|live| !live.is_noted) && !shard.in_batch.contains(&self.ino);
        if is_idle {
            shard.inodes.remove(&self.ino);
        }
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

    /// Like `get`; also `None` if another thread is changing the shard.
    pub(super) fn get_at_once(&self, ino: InodeNo) -> Option<Live> {
        self.shard(ino).try_read()?.get(ino).copied()
    }

    /// Like `get`, for an inode from which a batch is made. `looked` is for `end_batch`.
    pub(super) fn look(&self, ino: InodeNo, looked: &RefCell<Vec<InodeNo>>) -> Option<Live> {
        let mut shard = self.write(ino);
        shard.in_batch.push(ino);
        looked.borrow_mut().push(ino);
        shard.get(ino).copied()
    }

    /// Called when the batch has settled, or is not made.
    pub(super) fn end_batch(&self, looked: &[InodeNo]) {
        for ino in looked {
            self.write(*ino).in_batch.retain(|other| other != ino);
        }
    }

    pub(super) fn settle(&self, ino: InodeNo, stored: Option<&InodeRecord>, kind: SettleKind) {
        // Most operations are on inodes that are not live, so the shard is read before it is locked for writing.
        if self.read(ino).get(ino).is_none() {
            return;
        }
        let mut shard = self.write(ino);
        let Some(live) = shard.inodes.get_mut(&ino) else {
            return;
        };
        let keep = stored.is_some_and(|stored| live.settle(stored, kind));
        if keep {
            return;
        }
        match stored.filter(|_| shard.held.contains_key(&ino)) {
            Some(stored) => shard.add(ino, *stored),
            None => {
                shard.inodes.remove(&ino);
            }
        }
    }

    /// Holds an inode. `load` is called for one that is not live, and has its stored record.
    pub(super) fn hold<E>(
        self: &Arc<Self>,
        ino: InodeNo,
        load: impl FnOnce() -> Result<InodeRecord, E>,
    ) -> Result<HeldLive, E> {
        let mut shard = self.write(ino);
        // The batch that is made from an inode that is not live does not expect that it is when it settles: then the first change loads it.
        if shard.get(ino).is_none() && !shard.in_batch.contains(&ino) {
            let record = load()?;
            shard.add(ino, record);
        }
        *shard.held.entry(ino).or_default() += 1;
        Ok(HeldLive { inodes: self.clone(), ino })
    }

    /// The number of inodes with something that the store has not.
    pub(super) fn len(&self) -> usize {
        let count = |shard: &Shard| shard.inodes.values().filter(|live| live.is_noted).count();
        self.shards.iter().map(|shard| count(&shard.read())).sum()
    }
}
