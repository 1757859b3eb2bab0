//! Changes that are committed and not in the checkpoint yet: new values of records, and removals.
//!
//! There are two layers: batches go to the *active* one; a checkpoint under way writes the *frozen* one, which does not change. Both hide the
//! checkpoint below them. A reader has a `Layers`, which keeps the layers and the B-tree's snapshot, so that it stays consistent for as long as it is
//! held, also while checkpoints are made.

use super::checkpoint::Snapshot;
use super::short_key::Key;
use crate::meta::key::tag;
use crate::meta::page_map::{NO_PAGES, PageChanges, PartChange, PartVisitor};
use crate::meta::store::{Batch, Direction, StoreError, Visitor};
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Most memory of a record besides its bytes: nodes of the map, an allocation.
const RECORD_OVERHEAD_BYTES: usize = 96;
/// Records of a layer that a scan copies under its lock at a time. The visitor runs without the lock, because it may call the store. The first chunk
/// is small, because many scans end with the first record: each new extent of a batch looks for the one before it.
const FIRST_CHUNK: usize = 2;
/// Each further chunk is twice as large, up to this.
const SCAN_CHUNK: usize = 64;

/// The value of a record; `None` if it is removed.
pub(super) type Value = Option<Arc<[u8]>>;
/// Records by their keys.
pub(super) type Records = BTreeMap<Key, Value>;
type Bounds = (Bound<Key>, Bound<Key>);
/// Some records; and, if there may be more, the last key up to which no record is missing.
type Chunk = (Vec<(Key, Value)>, Option<Key>);

/// One layer of changes.
#[derive(Debug, Default)]
pub(super) struct Overlay {
    records: RwLock<Records>,
    /// Written under the lock, read without it. Relaxed: it is only compared with bounds.
    bytes: AtomicU64,
    /// The number of extents' records.
    extents: AtomicU64,
    /// Bytes of images of pages.
    images: AtomicU64,
    /// The number of removals.
    removed: AtomicU64,
}

fn weight(key: &[u8], value: Option<&[u8]>) -> usize {
    RECORD_OVERHEAD_BYTES + key.len() + value.map_or(0, <[u8]>::len)
}

/// The bytes of an image of a page; 0 for other records.
fn image_bytes(key: &[u8], value: Option<&[u8]>) -> u64 {
    if key.first() == Some(&tag::IMAGE) { value.map_or(0, |value| value.len() as u64) } else { 0 }
}

impl Overlay {
    /// A layer with these records.
    pub(super) fn of(records: Records) -> Self {
        let made = Self::default();
        let (mut bytes, mut extents, mut images, mut removed) = (0, 0, 0, 0);
        for (key, value) in &records {
            let (key, value) = (key.as_slice(), value.as_deref());
            bytes += weight(key, value) as u64;
            extents += u64::from(key.first() == Some(&tag::EXTENT));
            images += image_bytes(key, value);
            removed += u64::from(value.is_none());
        }
        made.bytes.store(bytes, Ordering::Relaxed);
        made.extents.store(extents, Ordering::Relaxed);
        made.images.store(images, Ordering::Relaxed);
        made.removed.store(removed, Ordering::Relaxed);
        *made.records.write() = records;
        made
    }

    /// Puts a batch. Readers of single records see all of it or nothing.
    pub(super) fn put(&self, batch: Batch) {
        let mut records = self.records.write();
        let mut bytes = self.bytes.load(Ordering::Relaxed);
        let mut images = self.images.load(Ordering::Relaxed);
        let mut removed = self.removed.load(Ordering::Relaxed);
        for (key, value) in batch.into_changes() {
            bytes += weight(&key, value.as_deref()) as u64;
            images += image_bytes(&key, value.as_deref());
            removed += u64::from(value.is_none());
            let (is_extent, key) = (key.first() == Some(&tag::EXTENT), Key::from(key));
            match records.entry(key) {
                Entry::Vacant(place) => {
                    place.insert(value.map(Into::into));
                    self.extents.fetch_add(u64::from(is_extent), Ordering::Relaxed);
                }
                Entry::Occupied(mut place) => {
                    let old = place.insert(value.map(Into::into));
                    let (key, old) = (place.key().as_slice(), old.as_deref());
                    bytes -= weight(key, old) as u64;
                    images -= image_bytes(key, old);
                    removed -= u64::from(old.is_none());
                }
            }
        }
        self.bytes.store(bytes, Ordering::Relaxed);
        self.images.store(images, Ordering::Relaxed);
        self.removed.store(removed, Ordering::Relaxed);
    }

    /// About the memory that it takes, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The number of records, with removals.
    pub(super) fn len(&self) -> u64 {
        self.records.read().len() as u64
    }

    /// The number of extents' records among these: each also changes the map of pages.
    pub(super) fn extents(&self) -> u64 {
        self.extents.load(Ordering::Relaxed)
    }

    /// The number of removals, over which scans walk.
    pub(super) fn removed(&self) -> u64 {
        self.removed.load(Ordering::Relaxed)
    }

    /// Bytes of images of pages that a checkpoint of it would write.
    pub(super) fn image_bytes(&self) -> u64 {
        self.images.load(Ordering::Relaxed)
    }

    /// Whether it has no changes.
    pub(super) fn is_empty(&self) -> bool {
        self.records.read().is_empty()
    }

    /// Its change of a record: `None` if there is none, else the value or a removal.
    fn get(&self, key: &[u8]) -> Option<Value> {
        self.records.read().get(key).cloned()
    }

    /// Visits all records of a layer that no longer changes.
    ///
    /// # Errors
    /// The visitor's.
    pub(super) fn visit<E>(
        &self,
        mut visit: impl FnMut(&[u8], Option<&[u8]>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.records.read().iter().try_for_each(|(key, value)| visit(key.as_slice(), value.as_deref()))
    }

    /// The next records within the bounds, at most `most`.
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

/// The records whose keys begin with this byte.
fn of_kind(records: &Records, kind: u8) -> impl Iterator<Item = (&[u8], &Value)> {
    let from = (Bound::Included(&[kind][..]), Bound::Unbounded);
    let behind = records.range::<[u8], _>(from).map(|(key, value)| (key.as_slice(), value));
    behind.take_while(move |(key, _)| key.first() == Some(&kind))
}

/// The layers that a reader sees.
#[derive(Debug, Clone)]
pub(super) struct Layers {
    /// The layer to which batches go.
    pub active: Arc<Overlay>,
    /// The layer that a checkpoint is writing.
    pub frozen: Option<Arc<Overlay>>,
    /// The last checkpoint.
    pub base: Arc<Snapshot>,
}

impl Layers {
    /// Reads one record.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(super) fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        let found = self.active.get(key).or_else(|| self.frozen.as_ref()?.get(key));
        match found {
            Some(value) => Ok(value.map(|value| value.to_vec())),
            None => self.base.get(key),
        }
    }

    /// The number of records whose keys begin with this byte.
    ///
    /// # Errors
    /// [`StoreError`].
    pub(super) fn count(&self, kind: u8) -> Result<u64, StoreError> {
        let mut count = self.base.tally.count(kind);
        self.visit_differing(kind, |_, old, new| {
            count = (count + u64::from(new.is_some())).saturating_sub(u64::from(old.is_some()));
        })?;
        Ok(count)
    }

    /// Visits the records of a kind that may differ from the checkpoint's: the key, the checkpoint's value, and the present value. Nothing is
    /// committed meanwhile.
    fn visit_differing(
        &self,
        kind: u8,
        mut visit: impl FnMut(&[u8], Option<&[u8]>, Option<&[u8]>),
    ) -> Result<(), StoreError> {
        let layers: Vec<_> =
            self.frozen.iter().chain([&self.active]).map(|layer| layer.records.read()).collect();
        let mut layers = layers.iter().rev().map(|layer| of_kind(layer, kind).peekable());
        let (mut above, mut below) = (layers.next(), layers.next());
        let mut base = self.base.ascending(kind)?;
        let mut tell = |key: &[u8], value: &Value| {
            visit(key, base.get(key)?, value.as_deref());
            Ok(())
        };
        for (key, value) in above.iter_mut().flatten() {
            while let Some((before, value)) =
                below.as_mut().and_then(|below| below.next_if(|(below, _)| *below < key))
            {
                tell(before, value)?;
            }
            below.as_mut().and_then(|below| below.next_if(|(below, _)| *below == key));
            tell(key, value)?;
        }
        below.into_iter().flatten().try_for_each(|(key, value)| tell(key, value))
    }

    /// Visits the map of the pages that extents have; see [`crate::meta::Store::pages`].
    ///
    /// # Errors
    /// [`StoreError`].
    pub(super) fn pages(&self, visit: PartVisitor<'_>) -> Result<u64, StoreError> {
        let mut changes = PageChanges::default();
        self.visit_differing(tag::EXTENT, |key, old, new| changes.change(key, old, new))?;
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
    pub(super) fn scan(
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
        let mut bounds = (Bound::Included(from.into()), Bound::Excluded(to.into()));
        let mut most = FIRST_CHUNK;
        loop {
            let (chunk, last) = self.chunk(&bounds, direction, most);
            most = (2 * most).min(SCAN_CHUNK);
            for (key, value) in &chunk {
                let key = key.as_slice();
                while let Some((below_key, below_value)) = below.take_if(|(below, _)| is_before(below, key)) {
                    if !visit(&below_key, &below_value) {
                        return Ok(());
                    }
                    below = next_below()?;
                }
                if below.as_ref().is_some_and(|(below, _)| *below == key) {
                    below = next_below()?;
                }
                if let Some(value) = value
                    && !visit(key, value)
                {
                    return Ok(());
                }
            }
            let Some(last) = last else { break };
            // `BTreeMap::range` panics if both ends exclude the same key.
            match direction {
                Direction::Forward => bounds.0 = Bound::Excluded(last),
                Direction::Reverse if last.as_slice() == from => break,
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
            // Behind this key one of the layers may have more records.
            let whole = chunk.iter().position(|(key, _)| key == last).map_or(0, |at| at + 1);
            chunk.truncate(whole);
        }
        (chunk, last)
    }
}

#[cfg(test)]
std::thread_local! {
    /// The number of records that scans of this thread have copied.
    pub(super) static COPIED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}
