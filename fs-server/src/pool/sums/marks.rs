//! Which regions are marked: pages in them may be in the middle of being overwritten.
//!
//! # How it works
//! A region is marked, durably, before a page in it is overwritten that some file may rely upon. It stays marked while
//! writes to it are under way, until a sync has covered the last of them, and some time longer (`sweep` is called every
//! few seconds), so that a region that is written all the time is marked once. What is marked at a start was being
//! written when the server went down: it is *recovering* until each of its pages was looked at.
//!
//! | a region is | on disk | a page there whose sum does not match |
//! | --- | --- | --- |
//! | unmarked | clear, or still set | is rot |
//! | marked, not durably | clear or set | is rot: no write began |
//! | marked, durably | set | is rot while the server runs; after a crash, see the next row |
//! | recovering | set | was being written: accepted, and given a new sum |
//!
//! **What is durable** is not noted for each region: it follows from numbers. Each change of a bit is an `Edit`. A write of the
//! blocks takes every one that differs from what is on disk, so once it and a sync after it are done, all edits up to its
//! beginning are durable (`State::durable`), and a mark is durable when the edit that set its bit is among them. Many writers
//! of one region wait for the same edit, whoever of them writes it; nothing is left to be cleared up behind those who waited.
//!
//! # Invariants
//! * A bit is set durably before a write relies on it (`make_durable`), and cleared on disk only when page and sum of every
//!   write are durable (`synced`).
//! * A region that somebody begins to write, or writes, stays marked (`in_flight`).
//! * Intent blocks are written one after another (`Turns`), so the newest write of a block is the one that counts.
//!
//! # Failure
//! A write of the blocks that fails or is given up moves neither `Block::written` nor `State::durable`. What began for it has
//! ended then, and whoever comes next writes it. After a sync that failed nothing becomes durable any more (`FinalSync`).

use super::intent::{self, BlockBits, NO_BITS};
use super::layout::{IntentBlock, SumLayout};
use super::turn::{Turn, Turns};
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::{Disk, IoBuffer, IoKind, IoRequest};
use cuttlefs_common::ids::{PAGE_SIZE, PAGE_SIZE_U64};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// Sweeps a region stays marked without a write.
const IDLE_SWEEPS: u64 = 2;

/// Numbers the changes of bits since the start; the first is 1, and what was read from disk is older than all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Edit(u64);

#[derive(Debug)]
struct Block {
    place: IntentBlock,
    bits: BlockBits,
    /// The edit that changed it last.
    edited: Edit,
    /// The last edit of all when what is on disk of it was taken.
    written: Edit,
}

#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    /// What set its bit.
    set_by: Edit,
    is_recovering: bool,
    in_flight: u32,
    /// When a write to it ended last: as counted by `ended`, and by sweeps.
    last_end: u64,
    last_sweep: u64,
}

#[derive(Debug)]
struct State {
    blocks: Vec<Block>,
    regions: BTreeMap<u64, Mark>,
    /// The last edit.
    last_edit: Edit,
    /// All edits up to this one are durable.
    durable: Edit,
    /// Writes that ended.
    ended: u64,
    /// Of them, those that a sync covers.
    synced: u64,
    sweeps: u64,
}

/// The marks of a pool.
#[derive(Debug)]
pub struct Marks {
    state: Mutex<State>,
    writing: Turns,
    /// Regions that are recovering. Written under `state`, read by anyone.
    recovering: AtomicU64,
    /// Times a write had to wait until a mark was durable.
    waits: AtomicU64,
}

/// A block of intents is damaged in both copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the write intents of regions {first_region} to {last_region} are damaged in both copies: which pages were being \
     written is not known; `cuttlefsd fsck --repair` looks at all of them"
)]
pub struct IntentsDamaged {
    /// The first region.
    pub first_region: u64,
    /// The last.
    pub last_region: u64,
}

impl Marks {
    /// Nothing is marked.
    pub fn new(layout: &SumLayout) -> Self {
        let block = |place| Block { place, bits: NO_BITS, edited: Edit(0), written: Edit(0) };
        let blocks = layout.intent_blocks().map(block).collect();
        let state = State {
            blocks,
            regions: BTreeMap::new(),
            last_edit: Edit(0),
            durable: Edit(0),
            ended: 0,
            synced: 0,
            sweeps: 0,
        };
        Self {
            state: Mutex::new(state),
            writing: Turns::of("write intents"),
            recovering: AtomicU64::new(0),
            waits: AtomicU64::new(0),
        }
    }

    /// Reads what is marked, durably; those regions recover. Returns how many sectors were damaged in one copy.
    ///
    /// # Errors
    /// A device error; `IntentsDamaged` within `InvalidData`.
    pub async fn read(&self, disk: &dyn Disk) -> io::Result<usize> {
        let places: Vec<IntentBlock> = self.state.lock().blocks.iter().map(|block| block.place).collect();
        let mut damaged_in_all = 0;
        for (index, place) in places.iter().enumerate() {
            let batch = place
                .copies
                .map(|page| IoRequest {
                    kind: IoKind::Read,
                    offset: page * PAGE_SIZE_U64,
                    buffer: IoBuffer::Owned(AlignedBuf::unfilled(PAGE_SIZE)),
                })
                .into();
            let done = disk.submit(batch).await;
            let copy = |copy: usize| match (&done[copy].result, &done[copy].buffer) {
                (Ok(()), IoBuffer::Owned(buffer)) => Some(buffer.as_slice()),
                _ => None,
            };
            let mut state = self.state.lock();
            let joined = intent::join([copy(0), copy(1)], place.number);
            let Some((bits, damaged)) = joined else {
                let last_region = place.first_region + place.regions - 1;
                let error = IntentsDamaged { first_region: place.first_region, last_region };
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            };
            damaged_in_all += damaged;
            state.blocks[index].bits = bits;
            if damaged > 0 {
                state.edit(index);
            }
            for region in 0..place.regions {
                if intent::bit(&bits, region as usize) {
                    let mark = Mark { is_recovering: true, ..Mark::default() };
                    if state.regions.insert(place.first_region + region, mark).is_none() {
                        self.recovering.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        }
        if self.recovering.load(Ordering::Relaxed) > 0 {
            // A server that was killed may have written a mark and not synced it: the device may still lose what is read.
            disk.sync().await?;
        }
        Ok(damaged_in_all)
    }

    /// Writes intents anew, with no region marked, and makes that durable. Before anything is written to the pool.
    ///
    /// # Errors
    /// A device error.
    pub async fn clear(&self, disk: &dyn Disk) -> io::Result<()> {
        let mut turn = self.writing.take().await;
        {
            let mut state = self.state.lock();
            state.regions.clear();
            self.recovering.store(0, Ordering::Relaxed);
            for index in 0..state.blocks.len() {
                state.blocks[index].bits = NO_BITS;
                state.edit(index);
            }
        }
        self.make_durable(disk, &mut turn).await
    }

    /// Writes begin in these regions (distinct). When this returns they are marked durably.
    ///
    /// # Errors
    /// The mark could not be made durable: the writes must not begin, and have ended.
    pub async fn begin(&self, disk: &dyn Disk, regions: &BTreeSet<u64>) -> io::Result<()> {
        let set_by = self.state.lock().mark(regions);
        let begun = Begun { marks: self, regions };
        if !self.is_durable(set_by) {
            self.waits.fetch_add(1, Ordering::Relaxed);
            let mut turn = self.writing.take().await;
            // Whoever had the turn before may have written these as well.
            if !self.is_durable(set_by) {
                self.make_durable(disk, &mut turn).await?;
            }
        }
        std::mem::forget(begun);
        Ok(())
    }

    fn is_durable(&self, edit: Edit) -> bool {
        self.state.lock().durable >= edit
    }

    /// Makes all edits durable that were made before the call.
    async fn make_durable(&self, disk: &dyn Disk, turn: &mut Turn<'_>) -> io::Result<()> {
        let written = self.write(disk, turn).await?;
        disk.sync().await?;
        let mut state = self.state.lock();
        state.durable = state.durable.max(written);
        Ok(())
    }

    /// Writes blocks that differ from what is on disk; gives the last edit that is there now.
    async fn write(&self, disk: &dyn Disk, turn: &mut Turn<'_>) -> io::Result<Edit> {
        let (last_edit, blocks, batch) = {
            let state = self.state.lock();
            let differing = (0..state.blocks.len())
                .filter(|index| state.blocks[*index].edited > state.blocks[*index].written);
            let blocks: Vec<usize> = differing.collect();
            let mut batch = Vec::new();
            for block in blocks.iter().map(|index| &state.blocks[*index]) {
                for page in block.place.copies {
                    let mut buffer = AlignedBuf::unfilled(PAGE_SIZE);
                    intent::encode(&block.bits, block.place.number, buffer.as_mut_slice());
                    let (offset, buffer) = (page * PAGE_SIZE_U64, IoBuffer::Owned(buffer));
                    batch.push(IoRequest { kind: IoKind::Write, offset, buffer });
                }
            }
            (state.last_edit, blocks, batch)
        };
        turn.write(disk, batch).await?.into_iter().collect::<io::Result<()>>()?;
        let mut state = self.state.lock();
        for index in blocks {
            // Edits made meanwhile are not among what was written.
            state.blocks[index].written = last_edit;
        }
        Ok(last_edit)
    }

    /// Writes in these regions ended, and what they changed is told to whoever syncs.
    pub fn end(&self, regions: &BTreeSet<u64>) {
        let mut state = self.state.lock();
        state.ended += 1;
        let (ended, sweeps) = (state.ended, state.sweeps);
        for region in regions {
            let mark = state.regions.get_mut(region).expect("a region that is written to is marked");
            mark.in_flight -= 1;
            (mark.last_end, mark.last_sweep) = (ended, sweeps);
        }
    }

    /// Before a sync: what it will cover.
    pub fn before_sync(&self) -> u64 {
        self.state.lock().ended
    }

    /// After it: what it covered.
    pub fn after_sync(&self, covered: u64) {
        let mut state = self.state.lock();
        state.synced = state.synced.max(covered);
    }

    /// Whether some region could be cleared but for a sync.
    pub fn wants_sync(&self) -> bool {
        let state = self.state.lock();
        state.regions.values().any(|mark| {
            mark.in_flight == 0 && !mark.is_recovering && mark.last_end > state.synced && state.is_idle(mark)
        })
    }

    /// Clears regions that are idle, or with `all` every region it can. To be called every few seconds. Returns how many.
    ///
    /// # Errors
    /// A device error: the regions may be marked on disk for longer.
    pub async fn sweep(&self, disk: &dyn Disk, all: bool) -> io::Result<usize> {
        let mut turn = self.writing.take().await;
        let cleared = {
            let mut state = self.state.lock();
            state.sweeps += 1;
            let idle: Vec<u64> = state
                .regions
                .iter()
                .filter(|(_, mark)| {
                    mark.in_flight == 0
                        && !mark.is_recovering
                        && mark.last_end <= state.synced
                        && (all || state.is_idle(mark))
                })
                .map(|(region, _)| *region)
                .collect();
            for region in &idle {
                state.regions.remove(region);
                state.set(*region, false);
            }
            idle.len()
        };
        // Needs no sync: a mark that is on disk for longer is harmless.
        self.write(disk, &mut turn).await?;
        Ok(cleared)
    }

    /// Whether a region was being written when the server before went down, and was not looked at since.
    pub fn is_recovering(&self, region: u64) -> bool {
        self.recovering.load(Ordering::Relaxed) > 0
            && self.state.lock().regions.get(&region).is_some_and(|mark| mark.is_recovering)
    }

    /// The first region that recovers.
    pub fn next_recovering(&self) -> Option<u64> {
        let state = self.state.lock();
        state.regions.iter().find(|(_, mark)| mark.is_recovering).map(|(region, _)| *region)
    }

    /// All pages of a region were looked at, and have their sums.
    pub fn recovered(&self, region: u64) {
        let mut state = self.state.lock();
        state.ended += 1;
        let (ended, sweeps) = (state.ended, state.sweeps);
        if let Some(mark) = state.regions.get_mut(&region).filter(|mark| mark.is_recovering) {
            // Its new sums are to be synced before it is cleared.
            *mark = Mark { is_recovering: false, last_end: ended, last_sweep: sweeps, ..*mark };
            self.recovering.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Marked and recovering regions, and times a write waited for a mark.
    pub fn figures(&self) -> (u64, u64, u64) {
        let marked = self.state.lock().regions.len() as u64;
        (marked, self.recovering.load(Ordering::Relaxed), self.waits.load(Ordering::Relaxed))
    }
}

impl State {
    /// Marks regions that are being written from now on; the last edit their marks stand for.
    fn mark(&mut self, regions: &BTreeSet<u64>) -> Edit {
        let mut set_by = Edit(0);
        for region in regions {
            if !self.regions.contains_key(region) {
                let mark = Mark { set_by: self.set(*region, true), ..Mark::default() };
                self.regions.insert(*region, mark);
            }
            let mark = self.regions.get_mut(region).expect("it is marked by now");
            mark.in_flight += 1;
            set_by = set_by.max(mark.set_by);
        }
        set_by
    }

    fn set(&mut self, region: u64, value: bool) -> Edit {
        let index = self.blocks.partition_point(|block| block.place.first_region <= region) - 1;
        let block = &mut self.blocks[index];
        intent::set_bit(&mut block.bits, (region - block.place.first_region) as usize, value);
        self.edit(index)
    }

    /// A block was changed.
    fn edit(&mut self, block: usize) -> Edit {
        self.last_edit.0 += 1;
        self.blocks[block].edited = self.last_edit;
        self.last_edit
    }

    fn is_idle(&self, mark: &Mark) -> bool {
        self.sweeps >= mark.last_sweep + IDLE_SWEEPS
    }
}

/// Writes that have not begun yet.
struct Begun<'a> {
    marks: &'a Marks,
    regions: &'a BTreeSet<u64>,
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        self.marks.end(self.regions);
    }
}
