//! The trait by which metadata is stored: ordered keys, atomic batches, an explicit flush.
//!
//! # Promises of an implementation
//! * `commit` is atomic: readers, and a start after a crash, see all of a batch or none of it.
//! * Batches are kept in order: after a crash the store has a prefix of them.
//! * When `flush` returns, every batch whose `commit` returned before the call survives a power loss.
//! * After a failed `commit` or `flush` the store refuses further batches until it is opened again: after a failed sync the contents of the device
//!   are unknown, so it is never tried again. `Full` is no such failure.
//!
//! `scan` sees each record as a whole, but a batch that is committed while it runs may be seen in part.

use super::key;
use super::page_map::{PageMap, PartVisitor};
use crate::pool::BlockWrite;
use std::collections::BTreeMap;
use std::io;

/// Largest value of a record. Engines are fast and careful with small values only; larger ones are stored in pieces.
pub const VALUE_MAX_BYTES: usize = 6 * 1024;

/// The direction of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the smallest key on.
    Forward,
    /// From the largest key on.
    Reverse,
}

/// A failure of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The engine or the device below it failed.
    #[error("metadata store: {operation} failed: {source}")]
    Backend {
        /// The operation that failed.
        operation: &'static str,
        /// The engine's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An earlier failure left the store in doubt.
    #[error("metadata store: closed after an earlier failure; restart the server")]
    Poisoned,
    /// There is no space for the batch. Nothing was done, and a later batch may find space.
    #[error("metadata store: no space left on the disk of meta/; delete something, or make space there")]
    Full,
}

/// Puts and removes that become visible and durable together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    changes: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
}

impl Batch {
    /// Sets a record; the last change of a key counts.
    pub fn put(&mut self, key: impl Into<Vec<u8>>, value: Vec<u8>) {
        self.changes.insert(key.into(), Some(value));
    }

    /// Removes a record, if it is there.
    pub fn remove(&mut self, key: impl Into<Vec<u8>>) {
        self.changes.insert(key.into(), None);
    }

    /// Whether it has no changes.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// The changes in the order of keys; `None` removes.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
        self.changes.iter().map(|(key, value)| (key.as_slice(), value.as_deref()))
    }

    /// Like [`Batch::iter`], with owned bytes.
    pub fn into_changes(self) -> impl Iterator<Item = (Vec<u8>, Option<Vec<u8>>)> {
        self.changes.into_iter()
    }
}

/// A function that gets the key and value of each record of a scan; `false` ends the scan.
pub type Visitor<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> bool;

/// Sizes of a store, in bytes, and their bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreFigures {
    /// Bytes on its device.
    pub disk: u64,
    /// Bytes that further records may take.
    pub room: u64,
    /// Bytes that the reserve holds.
    pub reserve: u64,
    /// Bytes that the reserve should hold.
    pub reserve_bound: u64,
    /// Memory of the changes that are in no checkpoint yet.
    pub since_checkpoint: u64,
    /// The size of these changes at which commits wait for the checkpoint.
    pub since_checkpoint_bound: u64,
    /// Most bytes of pages in memory.
    pub cache_bound: u64,
}

/// What must be done to make everything committed so far durable.
#[derive(Debug)]
pub enum SyncStep {
    /// Nothing.
    Nothing,
    /// Do this write, and call `end_sync` once it is durable.
    Write(DirectSync, BlockWrite),
    /// Call `flush`, which blocks.
    Block,
}

/// A sync by a direct write.
#[derive(Clone, Copy, Debug)]
pub struct DirectSync {
    /// All batches up to this one are durable after it.
    pub batch: u64,
    /// Whether a caller that can block should `flush` soon, because the files have no room for many more writes.
    pub is_flush_due: bool,
}

/// An ordered store of records. The module says what it promises.
pub trait Store: Send + Sync {
    /// Reads one record.
    ///
    /// # Errors
    /// [`StoreError`].
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError>;

    /// Visits the records of `from <= key < to`. The visitor may call the store.
    ///
    /// # Errors
    /// [`StoreError`].
    fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        direction: Direction,
        visit: Visitor<'_>,
    ) -> Result<(), StoreError>;

    /// Applies a batch as a whole or not at all. It survives the end of the process at once, or never; a power loss only after `flush`.
    ///
    /// # Errors
    /// [`StoreError`].
    fn commit(&self, batch: Batch) -> Result<(), StoreError>;

    /// Blocks until every batch committed so far is durable.
    ///
    /// # Errors
    /// [`StoreError`]; final, see the module.
    fn flush(&self) -> Result<(), StoreError>;

    /// Prepares the files that `begin_sync` needs for writes. Blocks. Called once, by the server.
    fn prepare_sync(&self) {}

    /// Begins a flush for a caller that does not want to block. There is one at a time; one that is given up counts for nothing.
    ///
    /// # Errors
    /// [`StoreError`].
    fn begin_sync(&self) -> Result<SyncStep, StoreError> {
        Ok(SyncStep::Block)
    }

    /// Ends a sync with the result of its write; `false` if a `flush` is needed after all.
    ///
    /// # Errors
    /// [`StoreError`]; final, see the module.
    fn end_sync(&self, _sync: DirectSync, written: io::Result<()>) -> Result<bool, StoreError> {
        written
            .map(|()| false)
            .map_err(|e| StoreError::Backend { operation: "sync the log", source: e.into() })
    }

    /// Whether `flush` would have nothing to do.
    fn is_durable(&self) -> bool;

    /// The number of records whose keys begin with `kind`, without a pass over them if possible.
    ///
    /// # Errors
    /// [`StoreError`].
    fn count(&self, kind: u8) -> Result<u64, StoreError>;

    /// Visits the map of the pool pages that extents have (`page_map`), without a pass over the extents if possible. Returns how many pages
    /// contradict it: 0, unless two extents have a page, or the map does not agree with the extents.
    ///
    /// # Errors
    /// [`StoreError`].
    fn pages(&self, visit: PartVisitor<'_>) -> Result<u64, StoreError> {
        let mut map = PageMap::default();
        let all = key::all(key::tag::EXTENT);
        self.scan(&all.from, &all.to, Direction::Forward, &mut |key, value| {
            map.add(key, value);
            true
        })?;
        map.visit(visit);
        Ok(map.contradictions)
    }

    /// Does now what the next opening would have to do first, as far as possible. For a clean stop.
    ///
    /// # Errors
    /// [`StoreError`]; everything committed is as durable as before.
    fn settle(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Computes the totals and the map anew from the records. For a store at rest.
    ///
    /// # Errors
    /// [`StoreError`].
    fn recount(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Bytes that further records may take before only removals should be committed. The room that removals need is kept back.
    fn room_bytes(&self) -> u64;

    /// Whether contents of files may be put into it now: there is plenty of room, and little waits for a checkpoint. Names and mappings are taken in
    /// any case.
    fn takes_contents(&self) -> bool {
        true
    }

    /// Figures for status.
    fn figures(&self) -> StoreFigures {
        StoreFigures::default()
    }

    /// Bytes that the store takes on its device.
    ///
    /// # Errors
    /// [`StoreError`].
    fn size_on_disk_bytes(&self) -> Result<u64, StoreError>;
}
