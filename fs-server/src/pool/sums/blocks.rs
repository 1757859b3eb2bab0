//! A bounded cache of sum blocks in memory, which are written back before each sync.
//!
//! # How it works
//! The first user of a block that is not in memory reads it, and further users wait: with two readers of one block, a changed sum could be replaced
//! by an older one. A user drops its blocks when it is done. When there are more blocks than the bound, the least recently used ones are dropped,
//! except those that are in use or changed. Changed blocks are written in the order of their numbers.
//!
//! # Invariants
//! * A block is in the map, or its bytes on disk are those that it last had in the map: it is dropped only when it is clean and not in use.
//! * A changed block is in `changed`, or on its way to the disk in a `Flush`, which puts it back if it fails.
//!
//! # Failure
//! A block that cannot be read fails the requests that need it. One that cannot be written stays changed, and the sync fails.

use super::layout::SUMS_PER_BLOCK;
use super::turn::Turns;
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::{Disk, IoBuffer, IoDone, IoKind, IoRequest};
use cuttlefs_common::ids::{PAGE_SIZE, PAGE_SIZE_U64};
use event_listener::Event;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Blocks that one batch of a flush writes.
const FLUSH_BATCH: usize = 64;

/// A block of sums.
#[derive(Debug)]
pub(super) struct SumBlock {
    number: u64,
    /// Whether it was used since the cache's hand last passed it. Relaxed: a hint.
    used: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    words: Box<[u32; SUMS_PER_BLOCK as usize]>,
    /// The number of changes so far.
    changes: u64,
    /// The value of `changes` whose bytes are on disk.
    written: u64,
}

impl SumBlock {
    fn parse(number: u64, bytes: &[u8]) -> Self {
        let mut words = Box::new([0; SUMS_PER_BLOCK as usize]);
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        }
        let state = Mutex::new(State { words, changes: 0, written: 0 });
        Self { number, used: AtomicBool::new(true), state }
    }

    /// Sum number `index`.
    pub(super) fn get(&self, index: usize) -> u32 {
        self.state.lock().words[index]
    }
}

/// The state of a block in the map.
#[derive(Debug)]
enum Slot {
    /// The block is being read.
    Loading,
    Here(Arc<SumBlock>),
}

#[derive(Debug, Default)]
struct Slots {
    map: HashMap<u64, Slot>,
    /// Numbers of the blocks in memory, in the order in which the hand passes them.
    order: VecDeque<u64>,
}

/// The cache of sum blocks.
#[derive(Debug)]
pub(super) struct Blocks {
    slots: Mutex<Slots>,
    /// Notified when a block was read, or could not be.
    loaded: Event,
    changed: Mutex<BTreeMap<u64, Arc<SumBlock>>>,
    /// Lets one task at a time write changed blocks.
    flushing: Turns,
    bound: usize,
}

/// Blocks that a user holds, so that they stay in memory.
pub(super) type Held = HashMap<u64, Arc<SumBlock>>;

/// Blocks that the holder of this must read. When it is dropped, others may read them.
#[derive(Debug)]
pub(super) struct Loads<'a> {
    blocks: &'a Blocks,
    /// The numbers of the blocks that were not read yet.
    numbers: Vec<u64>,
    /// The requests of the reads, one for each block. They go in front of the batch.
    pub requests: Vec<IoRequest>,
}

impl Drop for Loads<'_> {
    fn drop(&mut self) {
        if !self.numbers.is_empty() {
            let mut slots = self.blocks.slots.lock();
            for number in &self.numbers {
                slots.map.remove(number);
            }
            drop(slots);
            self.blocks.loaded.notify(usize::MAX);
        }
    }
}

impl Loads<'_> {
    /// Puts the blocks that were read into the cache; `done` has the results of `requests`, in order.
    ///
    /// # Errors
    /// The first block that could not be read. The others are put in all the same.
    pub(super) fn finish(mut self, done: impl Iterator<Item = IoDone>, held: &mut Held) -> io::Result<()> {
        let mut result = Ok(());
        for (number, done) in std::mem::take(&mut self.numbers).into_iter().zip(done) {
            let mut slots = self.blocks.slots.lock();
            match (done.result, done.buffer) {
                (Ok(()), IoBuffer::Owned(buffer)) => {
                    let block = Arc::new(SumBlock::parse(number, buffer.as_slice()));
                    held.insert(number, block.clone());
                    slots.map.insert(number, Slot::Here(block));
                    slots.order.push_back(number);
                }
                (done, _) => {
                    slots.map.remove(&number);
                    result = result.and(done.map_err(|error| error.source));
                }
            }
        }
        self.blocks.trim();
        self.blocks.loaded.notify(usize::MAX);
        result
    }
}

impl Blocks {
    /// An empty cache for `bound` blocks.
    pub(super) fn new(bound: usize) -> Self {
        let bound = bound.max(1);
        let flushing = Turns::of("checksums");
        Self { slots: Mutex::default(), loaded: Event::new(), changed: Mutex::default(), flushing, bound }
    }

    /// Most blocks that are kept when nobody uses them.
    pub(super) fn bound(&self) -> usize {
        self.bound
    }

    /// The number of blocks in memory.
    pub(super) fn len(&self) -> usize {
        self.slots.lock().order.len()
    }

    /// Whether a block is in memory.
    pub(super) fn is_here(&self, number: u64) -> bool {
        matches!(self.slots.lock().map.get(&number), Some(Slot::Here(_)))
    }

    /// Whether so many blocks are changed that they should be written before more are.
    pub(super) fn are_mostly_changed(&self) -> bool {
        self.changed.lock().len() > self.bound / 2
    }

    /// Puts the blocks in memory into `held`. The caller must read the returned ones, which nobody else reads yet.
    pub(super) fn begin(&self, numbers: &[u64], held: &mut Held) -> Loads<'_> {
        let mut loads = Loads { blocks: self, numbers: Vec::new(), requests: Vec::new() };
        let mut slots = self.slots.lock();
        for &number in numbers {
            match slots.map.get(&number) {
                Some(Slot::Here(block)) => {
                    block.used.store(true, Ordering::Relaxed);
                    held.insert(number, block.clone());
                }
                Some(Slot::Loading) => {}
                None => {
                    slots.map.insert(number, Slot::Loading);
                    loads.numbers.push(number);
                    loads.requests.push(IoRequest {
                        kind: IoKind::Read,
                        offset: number * PAGE_SIZE_U64,
                        buffer: IoBuffer::Owned(AlignedBuf::unfilled(PAGE_SIZE)),
                    });
                }
            }
        }
        drop(slots);
        loads
    }

    /// Waits until all blocks of `numbers` are held, and reads those that must be read.
    ///
    /// # Errors
    /// If a block cannot be read.
    pub(super) async fn hold(&self, disk: &dyn Disk, numbers: &[u64], held: &mut Held) -> io::Result<()> {
        loop {
            // The listener is made before the check, so that no notification in between is lost.
            let loaded = self.loaded.listen();
            let missing: Vec<u64> =
                numbers.iter().copied().filter(|number| !held.contains_key(number)).collect();
            if missing.is_empty() {
                return Ok(());
            }
            let mut loads = self.begin(&missing, held);
            if !loads.requests.is_empty() {
                let done = disk.submit(std::mem::take(&mut loads.requests)).await;
                loads.finish(done.into_iter(), held)?;
            } else if missing.iter().any(|number| !held.contains_key(number)) {
                loaded.await;
            }
        }
    }

    /// Changes a sum.
    pub(super) fn set(&self, block: &Arc<SumBlock>, index: usize, word: u32) {
        let mut state = block.state.lock();
        if state.words[index] == word {
            return;
        }
        state.words[index] = word;
        state.changes += 1;
        // Under the block's lock, because a flush that has just written the block compares `changes` under it.
        self.changed.lock().insert(block.number, block.clone());
    }

    /// Writes all blocks that were changed before the call.
    ///
    /// # Errors
    /// If a block could not be written; it stays changed.
    pub(super) async fn flush(&self, disk: &dyn Disk) -> io::Result<()> {
        // Flushes take turns, so that the blocks that an earlier flush took are on disk when this one has its turn.
        let mut turn = self.flushing.take().await;
        let mut flush = Flush { blocks: self, taken: std::mem::take(&mut *self.changed.lock()) };
        let numbers: Vec<u64> = flush.taken.keys().copied().collect();
        let mut result = Ok(());
        for chunk in numbers.chunks(FLUSH_BATCH) {
            let mut changes = Vec::with_capacity(chunk.len());
            let batch = chunk
                .iter()
                .map(|number| {
                    let mut buffer = AlignedBuf::unfilled(PAGE_SIZE);
                    let state = flush.taken[number].state.lock();
                    changes.push(state.changes);
                    for (bytes, word) in buffer.as_mut_slice().chunks_exact_mut(4).zip(state.words.iter()) {
                        bytes.copy_from_slice(&word.to_le_bytes());
                    }
                    IoRequest {
                        kind: IoKind::Write,
                        offset: number * PAGE_SIZE_U64,
                        buffer: IoBuffer::Owned(buffer),
                    }
                })
                .collect();
            let done = turn.write(disk, batch).await?;
            for ((number, changes), done) in chunk.iter().zip(changes).zip(done) {
                match done {
                    Ok(()) => {
                        // If the block was changed again meanwhile, that change has put it back into `changed`.
                        let block = flush.taken.remove(number).expect("a block is taken once");
                        block.state.lock().written = changes;
                    }
                    Err(error) => result = result.and(Err(error)),
                }
            }
        }
        drop(flush);
        self.trim();
        result
    }

    /// Drops blocks beyond the bound, unless they are in use or changed.
    fn trim(&self) {
        let mut slots = self.slots.lock();
        let mut looks = 2 * slots.order.len();
        while slots.order.len() > self.bound && looks > 0 {
            looks -= 1;
            let Some(number) = slots.order.pop_front() else { break };
            let can_go = match slots.map.get(&number) {
                // One reference is the map's own. New ones are made under this lock, or from another reference.
                Some(Slot::Here(block)) => {
                    !block.used.swap(false, Ordering::Relaxed) && Arc::strong_count(block) == 1
                }
                _ => unreachable!("a block in the order is here"),
            };
            if can_go {
                if let Some(Slot::Here(block)) = slots.map.remove(&number) {
                    let state = block.state.lock();
                    assert_eq!(state.changes, state.written, "a changed sum block was about to be forgotten");
                }
            } else {
                slots.order.push_back(number);
            }
        }
    }
}

/// Changed blocks on their way to the disk.
struct Flush<'a> {
    blocks: &'a Blocks,
    taken: BTreeMap<u64, Arc<SumBlock>>,
}

impl Drop for Flush<'_> {
    fn drop(&mut self) {
        let mut changed = self.blocks.changed.lock();
        for (number, block) in std::mem::take(&mut self.taken) {
            changed.insert(number, block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::simdisk::{SimDisk, SimFault};
    use cuttlefs_common::memory::SharedMemory;
    use futures_lite::future::block_on;

    fn disk(pages: u64) -> SimDisk {
        let disk = SimDisk::new(pages, Arc::new(SharedMemory::new("frames", PAGE_SIZE).expect("memfd")));
        (0..pages).for_each(|page| disk.poke(page, &[0; PAGE_SIZE]));
        disk
    }

    fn held(blocks: &Blocks, disk: &SimDisk, numbers: &[u64]) -> Held {
        let mut held = Held::new();
        block_on(blocks.hold(disk, numbers, &mut held)).expect("read");
        held
    }

    #[test]
    fn changed_blocks_stay_until_they_are_written_and_others_go() {
        let (disk, blocks) = (disk(20), Blocks::new(3));
        for number in 0..10 {
            let held = held(&blocks, &disk, &[number]);
            if number < 2 {
                blocks.set(&held[&number], 5, 77 + number as u32);
            }
        }
        assert!((3..=5).contains(&blocks.len()), "{}", blocks.len());
        assert!(blocks.are_mostly_changed());
        let reads = disk.counters().reads;
        assert_eq!(held(&blocks, &disk, &[0])[&0].get(5), 77);
        assert_eq!(disk.counters().reads, reads, "a changed block is here");
        disk.inject(SimFault { pages: 1..2, kind: Some(IoKind::Write), errno: 5, times: 1 });
        block_on(blocks.flush(&disk)).expect_err("a block could not be written");
        assert_eq!((disk.peek(0)[20], disk.peek(1)[20]), (77, 0));
        block_on(blocks.flush(&disk)).expect("now it can");
        assert_eq!(disk.peek(1)[20], 78);
        (10..20).for_each(|number| drop(held(&blocks, &disk, &[number])));
        assert!(blocks.len() <= 4);
        assert_eq!(held(&blocks, &disk, &[1])[&1].get(5), 78, "and comes back as it was");
    }

    #[test]
    fn who_gives_up_reading_lets_others_read() {
        let (disk, blocks) = (disk(4), Blocks::new(2));
        let mut mine = Held::new();
        let loads = blocks.begin(&[1, 2], &mut mine);
        assert_eq!(loads.requests.len(), 2);
        assert!(blocks.begin(&[1], &mut mine).requests.is_empty(), "one reads a block");
        drop(loads);
        assert_eq!(held(&blocks, &disk, &[1, 2]).len(), 2);
        disk.inject(SimFault { pages: 3..4, kind: Some(IoKind::Read), errno: 5, times: 1 });
        block_on(blocks.hold(&disk, &[3], &mut mine)).expect_err("not readable");
        assert_eq!(held(&blocks, &disk, &[3]).len(), 1);
    }
}
