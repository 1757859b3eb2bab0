//! The narrow trait metadata is stored through: ordered keys, atomic batches, an explicit flush.
//!
//! # Promises of an implementation
//! * `commit` is atomic: a reader and a crash see all of a batch or none of it.
//! * Batches are kept in order: after a crash the store holds a prefix of them.
//! * `flush` returns when every batch whose `commit` returned before the call survives a power loss.
//! * A failed `commit` or `flush` leaves the store refusing further batches until it is opened again: after a failed
//!   sync the contents of the device are unknown, so it is never retried. `Full` is no such failure.
//!
//! `scan` sees each record whole, but a batch committed while it runs may be seen in part.

use super::key;
use super::page_map::{PageMap, PartVisitor};
use crate::pool::BlockWrite;
use std::collections::BTreeMap;
use std::io;

/// Largest value a record may have. Engines are fast and careful with small values only; whatever is larger is
/// kept in pieces.
pub const VALUE_MAX_BYTES: usize = 6 * 1024;

/// Which way a scan goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the smallest key on.
    Forward,
    /// From the largest key on.
    Reverse,
}

/// A step the store failed in.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The engine or the device below it failed.
    #[error("metadata store: {operation} failed: {source}")]
    Backend {
        /// What was tried.
        operation: &'static str,
        /// What the engine said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An earlier failure left the store in doubt.
    #[error("metadata store: closed after an earlier failure; restart the server")]
    Poisoned,
    /// There is no space for the batch; nothing was done, and a later one may find some.
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

    /// Whether nothing would change.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// The changes in key order; `None` removes.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
        self.changes.iter().map(|(key, value)| (key.as_slice(), value.as_deref()))
    }

    /// As [`Batch::iter`], giving the bytes away.
    pub fn into_changes(self) -> impl Iterator<Item = (Vec<u8>, Option<Vec<u8>>)> {
        self.changes.into_iter()
    }
}

/// What a scan hands each record to: key, value; `false` ends the scan.
pub type Visitor<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> bool;

/// What a store takes, in bytes, and what bounds that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreFigures {
    /// On its device.
    pub disk: u64,
    /// What further records may take.
    pub room: u64,
    /// Of the reserve, and what it should hold.
    pub reserve: u64,
    /// See `reserve`.
    pub reserve_bound: u64,
    /// Memory of what is in no checkpoint yet.
    pub since_checkpoint: u64,
    /// At which commits wait for the checkpoint.
    pub since_checkpoint_bound: u64,
    /// Of pages kept in memory at most.
    pub cache_bound: u64,
}

/// What it takes to make durable what was committed so far.
#[derive(Debug)]
pub enum SyncStep {
    /// Nothing.
    Nothing,
    /// This write, and `end_sync` once it is durable.
    Write(DirectSync, BlockWrite),
    /// `flush`, which blocks.
    Block,
}

/// A sync by a direct write.
#[derive(Clone, Copy, Debug)]
pub struct DirectSync {
    /// All batches up to this one are durable behind it.
    pub batch: u64,
    /// A `flush` should follow soon, by somebody who can block: what is written to has no room for many more.
    pub is_flush_due: bool,
}

/// An ordered store of records. See the module for what is promised.
pub trait Store: Send + Sync {
    /// One record.
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

    /// Applies a batch, all or nothing. It survives the process at once or never; a power loss only after `flush`.
    ///
    /// # Errors
    /// [`StoreError`].
    fn commit(&self, batch: Batch) -> Result<(), StoreError>;

    /// Blocks until every batch committed so far is durable.
    ///
    /// # Errors
    /// [`StoreError`]; final, see the module.
    fn flush(&self) -> Result<(), StoreError>;

    /// Makes ready what lets `begin_sync` give a write. Blocks; for once, by who serves the store.
    fn prepare_sync(&self) {}

    /// Begins what `flush` does, for who does not want to block. One at a time; one that is given up counts for nothing.
    ///
    /// # Errors
    /// [`StoreError`].
    fn begin_sync(&self) -> Result<SyncStep, StoreError> {
        Ok(SyncStep::Block)
    }

    /// The write of a sync ended so; `false` if it takes a `flush` after all.
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

    /// Records whose keys begin with `kind`, without a pass over them if that can be.
    ///
    /// # Errors
    /// [`StoreError`].
    fn count(&self, kind: u8) -> Result<u64, StoreError>;

    /// Which pool pages extents name (`page_map`), without a pass over the extents if that can be. Returns how many pages
    /// contradict that: 0, or two extents name one, or what is kept is not what the extents say.
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

    /// Does now what the next opening would have to do first, as far as that can be done. For a clean stop.
    ///
    /// # Errors
    /// [`StoreError`]; all that was committed is as durable as before.
    fn settle(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Makes anew from the records what is kept beside them. For a store at rest.
    ///
    /// # Errors
    /// [`StoreError`].
    fn recount(&self) -> Result<(), StoreError> {
        Ok(())
    }

    /// Bytes that further records may take before only removals should be committed; what those need is kept back.
    fn room_bytes(&self) -> u64;

    /// Whether contents of files may be put into it now: there is plenty of room, and little waits for a checkpoint. Names and
    /// mappings are taken in any case.
    fn takes_contents(&self) -> bool {
        true
    }

    /// Figures for people.
    fn figures(&self) -> StoreFigures {
        StoreFigures::default()
    }

    /// Bytes the store takes on its device.
    ///
    /// # Errors
    /// [`StoreError`].
    fn size_on_disk_bytes(&self) -> Result<u64, StoreError>;
}
