//! What was committed and is not in the checkpoint yet: records over those of the checkpoint, and removals of such.
//!
//! Two layers: batches go to the *active* one; a checkpoint under way writes the *frozen* one, which no longer changes. Both
//! hide the checkpoint below them. A `Layers` is what a reader looks at: it stays whole for as long as it is held, whatever
//! checkpoints do meanwhile, because the layers and the B-tree's snapshot are kept by it.

use super::checkpoint::Snapshot;
use crate::meta::key::tag;
use crate::meta::page_map::{NO_PAGES, PageChanges, PartChange, PartVisitor};
use crate::meta::store::{Batch, Direction, StoreError, Visitor};
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Memory of a record beside its bytes: nodes of the map, two allocations.
const RECORD_OVERHEAD_BYTES: usize = 96;
/// Records of a layer that a scan copies under its lock at a time: the visitor runs without it, for it may call the store. Few at
/// first, for many scans end with the first record: each new extent of a batch looks for the one before it.
const FIRST_CHUNK: usize = 2;
/// Then twice as many each time, up to this.
const SCAN_CHUNK: usize = 64;

type Value = Option<Arc<[u8]>>;
type Bounds = (Bound<Vec<u8>>, Bound<Vec<u8>>);
/// Some records; and, if there may be more, the last key up to which these are all.
type Chunk = (Vec<(Vec<u8>, Value)>, Option<Vec<u8>>);

/// One layer.
#[derive(Debug, Default)]
pub struct Overlay {
    records: RwLock<BTreeMap<Vec<u8>, Value>>,
    /// Written under the lock, read without; relaxed, for they are only compared with bounds.
    bytes: AtomicU64,
    /// Records of extents.
    extents: AtomicU64,
    /// Bytes of images of pages.
    images: AtomicU64,
    /// Removals.
    removed: AtomicU64,
}

fn weight(key: &[u8], value: Option<&[u8]>) -> usize {
    RECORD_OVERHEAD_BYTES + key.len() + value.map_or(0, <[u8]>::len)
}

impl Overlay {
    /// Puts a batch; readers of single records see all of it or nothing.
    pub fn put(&self, batch: Batch) {
        let mut records = self.records.write();
        let mut bytes = self.bytes.load(Ordering::Relaxed);
        let mut images = self.images.load(Ordering::Relaxed);
        let mut removed = self.removed.load(Ordering::Relaxed);
        for (key, value) in batch.into_changes() {
            bytes += weight(&key, value.as_deref()) as u64;
            let (key_len, kind) = (key.len(), key.first().copied());
            let is_image = kind == Some(tag::IMAGE);
            images += value.as_ref().filter(|_| is_image).map_or(0, |value| value.len() as u64);
            removed += u64::from(value.is_none());
            if let Some(old) = records.insert(key, value.map(Into::into)) {
                let is_removal = old.is_none();
                let old_len = old.map_or(0, |old| old.len());
                bytes -= (RECORD_OVERHEAD_BYTES + key_len + old_len) as u64;
                images -= if is_image { old_len as u64 } else { 0 };
                removed -= u64::from(is_removal);
            } else if kind == Some(tag::EXTENT) {
                self.extents.fetch_add(1, Ordering::Relaxed);
            }
        }
        self.bytes.store(bytes, Ordering::Relaxed);
        self.images.store(images, Ordering::Relaxed);
        self.removed.store(removed, Ordering::Relaxed);
    }

    /// Memory it takes, about.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Records in it, removals among them.
    pub fn len(&self) -> u64 {
        self.records.read().len() as u64
    }

    /// Of them, those of extents: each also changes the map of pages.
    pub fn extents(&self) -> u64 {
        self.extents.load(Ordering::Relaxed)
    }

    /// Removals in it: scans walk over them.
    pub fn removed(&self) -> u64 {
        self.removed.load(Ordering::Relaxed)
    }

    /// Bytes of images of pages that a checkpoint of it would write.
    pub fn image_bytes(&self) -> u64 {
        self.images.load(Ordering::Relaxed)
    }

    /// Whether nothing was put.
    pub fn is_empty(&self) -> bool {
        self.records.read().is_empty()
    }

    /// What it says of a record: nothing, removed, or its value.
    fn get(&self, key: &[u8]) -> Option<Value> {
        self.records.read().get(key).cloned()
    }

    /// Visits all of a layer that no longer changes.
    ///
    /// # Errors
    /// The visitor's.
    pub fn visit<E>(&self, mut visit: impl FnMut(&[u8], Option<&[u8]>) -> Result<(), E>) -> Result<(), E> {
        self.records.read().iter().try_for_each(|(key, value)| visit(key, value.as_deref()))
    }

    /// The next records within the bounds, at most so many.
    fn chunk(&self, bounds: &Bounds, direction: Direction, most: usize) -> Chunk {
        let records = self.records.read();
        let range = records.range(bounds.clone()).map(|(key, value)| (key.clone(), value.clone()));
        let chunk: Vec<_> = match direction {
            Direction::Forward => range.take(most).collect(),
            Direction::Reverse => range.rev().take(most).collect(),
        };
        #[cfg(test)]
        COPIED.with(|copied| copied.set(copied.get() + chunk.len()));
        let last = (chunk.len() == most).then(|| chunk.last().map(|(key, _)| key.clone())).flatten();
        (chunk, last)
    }
}

/// What a reader looks at.
#[derive(Debug, Clone)]
pub struct Layers {
    /// Batches go here.
    pub active: Arc<Overlay>,
    /// What a checkpoint is writing.
    pub frozen: Option<Arc<Overlay>>,
    /// The last checkpoint.
    pub base: Arc<Snapshot>,
}

impl Layers {
    /// One record.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        let found = self.active.get(key).or_else(|| self.frozen.as_ref()?.get(key));
        match found {
            Some(value) => Ok(value.map(|value| value.to_vec())),
            None => self.base.get(key),
        }
    }

    /// Records whose keys begin with a byte.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn count(&self, kind: u8) -> Result<u64, StoreError> {
        let mut count = self.base.tally.count(kind);
        for (key, value) in self.differing(kind) {
            let was_there = self.base.get(&key)?.is_some();
            count = (count + u64::from(value.is_some())).saturating_sub(u64::from(was_there));
        }
        Ok(count)
    }

    /// The records of a kind that differ from the checkpoint's, as they are now.
    fn differing(&self, kind: u8) -> BTreeMap<Vec<u8>, Value> {
        let mut records = BTreeMap::new();
        for layer in self.frozen.iter().chain([&self.active]) {
            let layer = layer.records.read();
            let of_kind = layer.range(vec![kind]..).take_while(|(key, _)| key.first() == Some(&kind));
            records.extend(of_kind.map(|(key, value)| (key.clone(), value.clone())));
        }
        records
    }

    /// Which pages extents name; see [`crate::meta::Store::pages`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn pages(&self, visit: PartVisitor<'_>) -> Result<u64, StoreError> {
        let mut changes = PageChanges::default();
        for (key, value) in self.differing(tag::EXTENT) {
            changes.change(&key, self.base.get(&key)?.as_deref(), value.as_deref());
        }
        let mut changed = changes.into_parts();
        let mut contradictions = self.base.tally.contradictions;
        let mut tell = |key, mut bits, change: Option<PartChange>| {
            contradictions += change.map_or(0, |change| change.apply(&mut bits));
            visit(key, &bits);
        };
        for part in self.base.pages()? {
            let (key, bits) = part?;
            while let Some(before) = changed.first_entry().filter(|first| *first.key() < key) {
                let (key, change) = before.remove_entry();
                tell(key, NO_PAGES, Some(change));
            }
            tell(key, bits, changed.remove(&key));
        }
        changed.into_iter().for_each(|(key, change)| tell(key, NO_PAGES, Some(change)));
        Ok(contradictions)
    }

    /// Visits records in order; see [`crate::meta::Store::scan`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        direction: Direction,
        visit: Visitor<'_>,
    ) -> Result<(), StoreError> {
        let mut base = self.base.range(from, to)?;
        let mut next_below = || match direction {
            Direction::Forward => base.next().transpose(),
            Direction::Reverse => base.next_back().transpose(),
        };
        let is_before = |one: &[u8], other: &[u8]| match direction {
            Direction::Forward => one < other,
            Direction::Reverse => one > other,
        };
        let mut below = next_below()?;
        let mut bounds = (Bound::Included(from.to_vec()), Bound::Excluded(to.to_vec()));
        let mut most = FIRST_CHUNK;
        loop {
            let (chunk, last) = self.chunk(&bounds, direction, most);
            most = (2 * most).min(SCAN_CHUNK);
            for (key, value) in chunk {
                while let Some((below_key, below_value)) = below.take_if(|(below, _)| is_before(below, &key))
                {
                    if !visit(&below_key, &below_value) {
                        return Ok(());
                    }
                    below = next_below()?;
                }
                if below.as_ref().is_some_and(|(below, _)| *below == key) {
                    below = next_below()?;
                }
                if let Some(value) = value
                    && !visit(&key, &value)
                {
                    return Ok(());
                }
            }
            let Some(last) = last else { break };
            // `BTreeMap::range` refuses a range excluded on both ends at one key.
            match direction {
                Direction::Forward => bounds.0 = Bound::Excluded(last),
                Direction::Reverse if last == from => break,
                Direction::Reverse => bounds.1 = Bound::Excluded(last),
            }
        }
        while let Some((key, value)) = below {
            if !visit(&key, &value) {
                return Ok(());
            }
            below = next_below()?;
        }
        Ok(())
    }

    /// The next records of both layers, in order.
    fn chunk(&self, bounds: &Bounds, direction: Direction, most: usize) -> Chunk {
        let (active, active_last) = self.active.chunk(bounds, direction, most);
        let Some(frozen) = &self.frozen else { return (active, active_last) };
        let (frozen, frozen_last) = frozen.chunk(bounds, direction, most);
        let mut merged: BTreeMap<_, _> = frozen.into_iter().collect();
        merged.extend(active);
        let last = match direction {
            Direction::Forward => active_last.into_iter().chain(frozen_last).min(),
            Direction::Reverse => active_last.into_iter().chain(frozen_last).max(),
        };
        let mut chunk: Vec<_> = match direction {
            Direction::Forward => merged.into_iter().collect(),
            Direction::Reverse => merged.into_iter().rev().collect(),
        };
        if let Some(last) = &last {
            // Behind it one of the layers may have more.
            let whole = chunk.iter().position(|(key, _)| key == last).map_or(0, |at| at + 1);
            chunk.truncate(whole);
        }
        (chunk, last)
    }
}

#[cfg(test)]
std::thread_local! {
    /// Records that scans of this thread copied.
    pub(super) static COPIED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}
