//! The store in memory, for tests and simulation.
//!
//! It remembers which batches were flushed, so that a test can crash it at any batch: `MemoryStore::crashed` returns the store as a restart would
//! find it.
//!
//! A store with a `Life` ends with any batch or flush of its server. It leaves the same batches as the log of `disk_store`:
//!
//! | the server | left |
//! | --- | --- |
//! | is killed | every batch, because the log needs no sync to outlive it; the batch it died in is there as a whole or not at all |
//! | loses power | all flushed batches, and any number of the batches behind them, in order: a torn log ends at its first gap |
//! | dies in a flush | as if the flush had not begun, or had been done in part |

use super::key;
use super::store::{Batch, Direction, Store, StoreError, Visitor};
use crate::sync::RwLock;
use cuttlefs_common::life::{Event, Fate, Life};
use cuttlefs_common::world::Random;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, Ordering};

/// Records that a scan copies under the lock at a time. The visitor runs without the lock, because it may call the store, and a thread that takes a
/// read lock twice deadlocks with a writer that waits in between.
const SCAN_CHUNK: usize = 64;

type Records = BTreeMap<Vec<u8>, Vec<u8>>;

#[derive(Debug, Default)]
struct Contents {
    current: Records,
    /// The records as of the last flush.
    durable: Records,
    /// The batches since then, in order.
    unflushed: Vec<Batch>,
    /// The batch in which its server died.
    cut_off: Option<Batch>,
}

/// A fault that the store has on purpose, and that a test must notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreLie {
    /// `flush` makes nothing durable.
    Flush,
    /// Batches do not keep the records of done requests.
    Slots,
    /// Batches do not keep images of pages.
    Images,
    /// A batch that changes names drops the records of other clients' done requests.
    OtherSlots,
}

/// Records in a `BTreeMap`.
#[derive(Debug, Default)]
pub struct MemoryStore {
    contents: RwLock<Contents>,
    life: Life,
    lie: Option<StoreLie>,
    /// Whether batches and flushes fail. Set and read by one test; relaxed.
    fails: AtomicBool,
}

fn apply(records: &mut Records, batch: &Batch) {
    for (key, value) in batch.iter() {
        match value {
            Some(value) => records.insert(key.to_vec(), value.to_vec()),
            None => records.remove(key),
        };
    }
}

/// The batch without the puts of such records.
fn without(batch: Batch, is_left_out: fn(&[u8]) -> bool) -> Batch {
    let mut left = Batch::default();
    for (key, value) in batch.into_changes() {
        match value {
            Some(_) if is_left_out(&key) => {}
            Some(value) => left.put(key, value),
            None => left.remove(key),
        }
    }
    left
}

/// A batch of names that also removes the records of requests that it does not put.
fn forgetting_others(mut batch: Batch, records: &Records) -> Batch {
    if batch.iter().any(|(key, _)| key[0] == key::tag::ENTRY) {
        let puts: Vec<Vec<u8>> = batch.iter().map(|(key, _)| key.to_vec()).collect();
        let others = records.keys().filter(|key| key::is_slot(key) && !puts.contains(key));
        others.for_each(|key| batch.remove(key.clone()));
    }
    batch
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty store of a server that ends with this life.
    pub fn of(life: Life) -> Self {
        Self { life, ..Self::default() }
    }

    /// The same store with a fault from now on.
    pub fn lying(self, lie: Option<StoreLie>) -> Self {
        Self { lie, ..self }
    }

    /// The store as the next server finds it after a kill of this one.
    pub fn killed(&self, random: &dyn Random) -> Self {
        let left = self.left(|contents, batches| {
            let whole = batches - usize::from(contents.cut_off.is_some());
            whole + (random.next_u64() % 2) as usize
        });
        Self {
            contents: RwLock::new(left),
            life: self.life.clone(),
            lie: self.lie,
            fails: AtomicBool::new(false),
        }
    }

    /// The store as the next server finds it after a power loss.
    pub fn lost_power(&self, random: &dyn Random) -> Self {
        let mut left = self.left(|_, batches| (random.next_u64() % (batches as u64 + 1)) as usize);
        left.unflushed.clear();
        left.durable.clone_from(&left.current);
        Self {
            contents: RwLock::new(left),
            life: self.life.clone(),
            lie: self.lie,
            fails: AtomicBool::new(false),
        }
    }

    /// The contents after `kept` of the unflushed batches. The batch in which the server died counts as one of them.
    fn left(&self, kept: impl Fn(&Contents, usize) -> usize) -> Contents {
        let contents = self.contents.read();
        let mut batches: Vec<Batch> = contents.unflushed.iter().chain(&contents.cut_off).cloned().collect();
        batches.truncate(kept(&contents, batches.len()));
        let mut current = contents.durable.clone();
        batches.iter().for_each(|batch| apply(&mut current, batch));
        Contents { current, durable: contents.durable.clone(), unflushed: batches, cut_off: None }
    }

    /// Makes every batch and flush fail from now on, or ends that.
    #[cfg(test)]
    pub(crate) fn fail(&self, fails: bool) {
        self.fails.store(fails, Ordering::Relaxed);
    }

    fn check(&self) -> Result<(), StoreError> {
        if self.fails.load(Ordering::Relaxed) { Err(StoreError::Poisoned) } else { Ok(()) }
    }

    /// The number of batches that are not flushed yet.
    pub fn unflushed_batches(&self) -> usize {
        self.contents.read().unflushed.len()
    }

    /// The store after a crash that kept the first `kept_batches` unflushed batches.
    pub fn crashed(&self, kept_batches: usize) -> Self {
        let contents = self.contents.read();
        let mut records = contents.durable.clone();
        for batch in contents.unflushed.iter().take(kept_batches) {
            apply(&mut records, batch);
        }
        let survived = Contents { current: records.clone(), durable: records, ..Contents::default() };
        Self { contents: RwLock::new(survived), ..Self::default() }
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
            // `BTreeMap::range` panics if both ends exclude the same key.
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
        self.check()?;
        let mut contents = self.contents.write();
        let batch = match self.lie {
            Some(StoreLie::Slots) => without(batch, key::is_slot),
            Some(StoreLie::Images) => without(batch, |key| key[0] == key::tag::IMAGE),
            Some(StoreLie::OtherSlots) => forgetting_others(batch, &contents.current),
            _ => batch,
        };
        match self.life.meets(Event::Batch, batch.iter().count() as u64) {
            Fate::Happens => {}
            Fate::CutOff => {
                contents.cut_off = Some(batch);
                return Err(StoreError::Poisoned);
            }
            Fate::Never => return Err(StoreError::Poisoned),
        }
        apply(&mut contents.current, &batch);
        contents.unflushed.push(batch);
        Ok(())
    }

    fn flush(&self) -> Result<(), StoreError> {
        self.check()?;
        let contents = &mut *self.contents.write();
        match self.life.meets(Event::Flush, contents.unflushed.len() as u64) {
            Fate::Happens => {}
            Fate::CutOff | Fate::Never => return Err(StoreError::Poisoned),
        }
        if self.lie != Some(StoreLie::Flush) {
            for batch in contents.unflushed.drain(..) {
                apply(&mut contents.durable, &batch);
            }
        }
        Ok(())
    }

    fn is_durable(&self) -> bool {
        self.contents.read().unflushed.is_empty()
    }

    fn count(&self, kind: u8) -> Result<u64, StoreError> {
        Ok(self.contents.read().current.range(vec![kind]..).take_while(|(key, _)| key[0] == kind).count()
            as u64)
    }

    fn room_bytes(&self) -> u64 {
        u64::MAX
    }

    fn size_on_disk_bytes(&self) -> Result<u64, StoreError> {
        Ok(self.contents.read().current.iter().map(|(key, value)| (key.len() + value.len()) as u64).sum())
    }
}
