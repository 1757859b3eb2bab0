//! The store's in-memory twin, for tests and simulation.
//!
//! It remembers which batches were flushed, so a crash can be played at any batch: [`MemoryStore::crashed`]
//! gives the store as a restart would find it.

use super::store::{Batch, Direction, Store, StoreError, Visitor};
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::ops::Bound;

/// Records a scan copies under the lock at a time. The visitor runs without the lock, because it may call the
/// store, and a read lock taken twice by one thread deadlocks with a writer waiting between.
const SCAN_CHUNK: usize = 64;

type Records = BTreeMap<Vec<u8>, Vec<u8>>;

#[derive(Debug, Default)]
struct Contents {
    current: Records,
    /// As of the last flush.
    durable: Records,
    /// Batches since, in order.
    unflushed: Vec<Batch>,
}

/// Records in a `BTreeMap`.
#[derive(Debug, Default)]
pub struct MemoryStore {
    contents: RwLock<Contents>,
}

fn apply(records: &mut Records, batch: &Batch) {
    for (key, value) in batch.iter() {
        match value {
            Some(value) => records.insert(key.to_vec(), value.to_vec()),
            None => records.remove(key),
        };
    }
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many batches are not flushed yet.
    pub fn unflushed_batches(&self) -> usize {
        self.contents.read().unflushed.len()
    }

    /// The store as it may be found after a crash that kept the first `kept_batches` unflushed batches.
    pub fn crashed(&self, kept_batches: usize) -> Self {
        let contents = self.contents.read();
        let mut records = contents.durable.clone();
        for batch in contents.unflushed.iter().take(kept_batches) {
            apply(&mut records, batch);
        }
        let survived = Contents { current: records.clone(), durable: records, unflushed: Vec::new() };
        Self { contents: RwLock::new(survived) }
    }
}

impl Store for MemoryStore {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        Ok(self.contents.read().current.get(key).cloned())
    }

    fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        direction: Direction,
        visit: Visitor<'_>,
    ) -> Result<(), StoreError> {
        let mut low = Bound::Included(from.to_vec());
        let mut high = Bound::Excluded(to.to_vec());
        if from >= to {
            return Ok(());
        }
        loop {
            let bounds = (low.clone(), high.clone());
            let chunk: Vec<(Vec<u8>, Vec<u8>)> = {
                let contents = self.contents.read();
                let range = contents.current.range(bounds).map(|(key, value)| (key.clone(), value.clone()));
                match direction {
                    Direction::Forward => range.take(SCAN_CHUNK).collect(),
                    Direction::Reverse => range.rev().take(SCAN_CHUNK).collect(),
                }
            };
            for (key, value) in &chunk {
                if !visit(key, value) {
                    return Ok(());
                }
            }
            let last_chunk = chunk.len() < SCAN_CHUNK;
            let Some((key, _)) = chunk.into_iter().next_back().filter(|_| !last_chunk) else {
                return Ok(());
            };
            // `BTreeMap::range` refuses a range excluded on both ends at one key.
            match direction {
                Direction::Forward => {
                    if key.as_slice() >= to {
                        return Ok(());
                    }
                    low = Bound::Excluded(key);
                }
                Direction::Reverse => high = Bound::Excluded(key),
            }
        }
    }

    fn commit(&self, batch: Batch) -> Result<(), StoreError> {
        let mut contents = self.contents.write();
        apply(&mut contents.current, &batch);
        contents.unflushed.push(batch);
        Ok(())
    }

    fn flush(&self) -> Result<(), StoreError> {
        let contents = &mut *self.contents.write();
        for batch in contents.unflushed.drain(..) {
            apply(&mut contents.durable, &batch);
        }
        Ok(())
    }

    fn persist(&self) -> Result<(), StoreError> {
        self.flush()
    }

    fn is_persistent(&self) -> bool {
        self.contents.read().unflushed.is_empty()
    }

    fn size_on_disk_bytes(&self) -> Result<u64, StoreError> {
        Ok(self.contents.read().current.iter().map(|(key, value)| (key.len() + value.len()) as u64).sum())
    }
}
