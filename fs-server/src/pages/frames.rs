//! The DRAM of the pool: one memfd of the size of the memory budget, cut into page-sized frames.
//!
//! Owns the memory, the free list and the reverse map from frame to pool page.
//!
//! # How it works
//! Frames 0, 1 and 2 are magic, black hole and zero, for good. Every other frame is in exactly one of three states: *free* (on the free list),
//! *private* (taken to be filled, with no entry that names it) or *owned* (one residency entry points at it). The free list is a stack, so that warm
//! frames are used first.
//!
//! # Invariants
//! * A frame is on the free list only when no residency entry points at it (invariant 1): the entry is moved before the
//!   frame is given back.
//! * The number of frames never changes: the budget is exact (invariant 6).
//!
//! # Failure
//! The lack of a free frame is an ordinary result (`None`), never an error and never a wait. If the filling of a private frame was abandoned while a
//! disk may still write to it, the frame is leaked and counted, because its reuse would corrupt bytes.

use crate::sync::{AtomicU32 as PinCount, Mutex};
use cuttlefs_common::ids::{FrameIndex, PAGE_SIZE, PoolPage};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::region::MagicPattern;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Smallest budget: the reserved frames and one more.
pub const MIN_FRAMES: u32 = FrameIndex::FIRST_USABLE.0 + 1;

/// The frames of a server.
#[derive(Debug)]
pub struct Frames {
    memory: Arc<SharedMemory>,
    free: Mutex<Vec<FrameIndex>>,
    /// Length of `free`, for readers that do not lock. Written under `free`'s lock. Relaxed: it is only a hint.
    free_count: AtomicU32,
    /// The pool page plus one; 0 if the frame is free or private. Written under the page's block lock. The eviction scan reads it, and checks the
    /// residency entry under the block lock afterwards: relaxed.
    owner: Vec<AtomicU64>,
    /// How many write grants hold each frame's page in memory. Raised under the page's block lock, which eviction has when it looks; lowered at any
    /// time: relaxed.
    pins: Vec<PinCount>,
    /// The place of the eviction hand. Relaxed: two scans at once only go faster.
    hand: AtomicU32,
    leaked: AtomicU32,
}

impl Frames {
    /// Allocates the whole budget at once: `count` frames, with the reserved ones.
    ///
    /// # Errors
    /// If there is no memory, or `count` is below [`MIN_FRAMES`].
    pub fn new(count: u32, magic: &MagicPattern) -> io::Result<Self> {
        if count < MIN_FRAMES {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("the memory budget gives {count} frames, {MIN_FRAMES} are the least; raise --memory"),
            ));
        }
        let memory = Arc::new(SharedMemory::new("cuttlefs-frames", count as usize * PAGE_SIZE)?);
        let mut page = [0u8; PAGE_SIZE];
        magic.fill(0, &mut page);
        memory.write(Self::offset(FrameIndex::MAGIC), &page);
        let free: Vec<FrameIndex> = (FrameIndex::FIRST_USABLE.0..count).rev().map(FrameIndex).collect();
        Ok(Self {
            memory,
            free_count: AtomicU32::new(free.len() as u32),
            free: Mutex::new(free),
            owner: (0..count).map(|_| AtomicU64::new(0)).collect(),
            pins: (0..count).map(|_| PinCount::new(0)).collect(),
            hand: AtomicU32::new(FrameIndex::FIRST_USABLE.0),
            leaked: AtomicU32::new(0),
        })
    }

    /// Byte offset of a frame in the memory.
    pub const fn offset(frame: FrameIndex) -> usize {
        frame.0 as usize * PAGE_SIZE
    }

    /// The memory, to be exported, registered and read from.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// Frames that can hold pages.
    pub fn usable(&self) -> u32 {
        self.owner.len() as u32 - FrameIndex::FIRST_USABLE.0
    }

    /// Free frames as of about now.
    pub fn free(&self) -> u32 {
        self.free_count.load(Ordering::Relaxed)
    }

    /// Frames lost to abandoned IO since the start.
    pub fn leaked(&self) -> u32 {
        self.leaked.load(Ordering::Relaxed)
    }

    /// Takes a free frame to fill it, if there is one.
    pub fn take(self: &Arc<Self>) -> Option<PrivateFrame> {
        let mut free = self.free.lock();
        let frame = free.pop()?;
        self.free_count.store(free.len() as u32, Ordering::Relaxed);
        drop(free);
        Some(PrivateFrame { frames: self.clone(), frame, state: PrivateState::Idle })
    }

    /// Frees a frame at which no entry points any more.
    pub(super) fn give_back(&self, frame: FrameIndex) {
        assert!(frame.0 >= FrameIndex::FIRST_USABLE.0, "frame {frame} is reserved and cannot become free");
        self.owner[frame.0 as usize].store(0, Ordering::Relaxed);
        let mut free = self.free.lock();
        // Only in tests: searching the free list for each frame would be most of the time for freeing a large file.
        assert!(!cfg!(test) || !free.contains(&frame), "frame {frame} was given back twice");
        free.push(frame);
        self.free_count.store(free.len() as u32, Ordering::Relaxed);
    }

    /// Notes whose bytes a frame has. Called under the page's block lock.
    pub(super) fn set_owner(&self, frame: FrameIndex, page: PoolPage) {
        self.owner[frame.0 as usize].store(page.0 + 1, Ordering::Relaxed);
    }

    /// The page that a frame has, as a hint that is to be checked against the residency entry.
    pub fn owner(&self, frame: FrameIndex) -> Option<PoolPage> {
        self.owner[frame.0 as usize].load(Ordering::Relaxed).checked_sub(1).map(PoolPage)
    }

    /// Keeps the page of a frame in memory until the pins are dropped. The caller has the page's block lock, or the frame to itself.
    pub(super) fn pin(&self, frame: FrameIndex) {
        self.pins[frame.0 as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Whether a write grant keeps the frame's page in memory.
    pub(crate) fn is_pinned(&self, frame: FrameIndex) -> bool {
        self.pins[frame.0 as usize].load(Ordering::Relaxed) > 0
    }

    /// Moves the eviction hand to the next frame whose page `is_cold`, at most `steps` frames far.
    pub(super) fn next_victim(
        &self,
        steps: &mut u32,
        is_cold: impl Fn(PoolPage) -> bool,
    ) -> Option<(FrameIndex, PoolPage)> {
        while *steps > 0 {
            *steps -= 1;
            let frame = self.next_frame();
            if let Some(page) = self.owner(frame).filter(|page| is_cold(*page)) {
                return Some((frame, page));
            }
        }
        None
    }

    /// The frame under the eviction hand, which moves to the next one.
    fn next_frame(&self) -> FrameIndex {
        let count = self.owner.len() as u32;
        self.hand
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |at| {
                Some(if at + 1 >= count { FrameIndex::FIRST_USABLE.0 } else { at + 1 })
            })
            .map(FrameIndex)
            .expect("the update always gives a value")
    }
}

/// Frames whose pages stay in memory until this is dropped.
#[derive(Debug)]
pub(crate) struct Pins {
    frames: Arc<Frames>,
    pinned: Vec<FrameIndex>,
}

impl Pins {
    /// None yet.
    pub(super) fn new(frames: Arc<Frames>) -> Self {
        Self { frames, pinned: Vec::new() }
    }

    /// One more.
    pub(super) fn add(&mut self, frame: FrameIndex) {
        self.frames.pin(frame);
        self.pinned.push(frame);
    }

    /// Takes over the pin of a frame that `other` has pinned.
    pub(crate) fn take_over(&mut self, other: &mut Pins, frame: FrameIndex) {
        if let Some(at) = other.pinned.iter().position(|pinned| *pinned == frame) {
            self.pinned.push(other.pinned.swap_remove(at));
        }
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        for frame in &self.pinned {
            self.frames.pins[frame.0 as usize].fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PrivateState {
    Idle,
    InFlight,
    Published,
}

/// A frame that was taken from the free list and is not published yet: nothing else names it. It is freed when dropped.
#[derive(Debug)]
pub struct PrivateFrame {
    frames: Arc<Frames>,
    frame: FrameIndex,
    state: PrivateState,
}

impl PrivateFrame {
    /// The frame's index.
    pub fn index(&self) -> FrameIndex {
        self.frame
    }

    /// Its byte offset in the frames' memory.
    pub fn offset(&self) -> usize {
        Frames::offset(self.frame)
    }

    /// Notes that a disk writes to the frame from now on. If it is dropped in this state, the frame is leaked and not reused.
    pub fn io_begins(&mut self) {
        self.state = PrivateState::InFlight;
    }

    /// Notes that the disk is done with the frame.
    pub fn io_ended(&mut self) {
        self.state = PrivateState::Idle;
    }

    /// Ends its being private, because a residency entry is about to name it.
    pub(super) fn into_published(mut self) -> FrameIndex {
        assert_eq!(self.state, PrivateState::Idle, "a frame is published while a disk fills it");
        self.state = PrivateState::Published;
        self.frame
    }
}

impl Drop for PrivateFrame {
    fn drop(&mut self) {
        match self.state {
            PrivateState::Idle => self.frames.give_back(self.frame),
            PrivateState::InFlight => {
                self.frames.leaked.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(frame = self.frame.0, "a frame is lost: its disk read was abandoned");
            }
            PrivateState::Published => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(count: u32) -> Arc<Frames> {
        Arc::new(Frames::new(count, &MagicPattern::new([0x5a; 32])).expect("frames"))
    }

    #[test]
    fn the_budget_is_exact_and_reserved_frames_hold_their_bytes() {
        let frames = frames(6);
        assert_eq!(frames.memory().len(), 6 * PAGE_SIZE);
        let taken: Vec<_> = std::iter::from_fn(|| frames.take()).collect();
        assert_eq!(taken.len(), 3);
        assert_eq!(frames.free(), 0);
        assert!(taken.iter().all(|frame| frame.index().0 >= 3));
        drop(taken);
        assert_eq!(frames.free(), 3);
        let mut page = [0u8; PAGE_SIZE];
        frames.memory().read(0, &mut page);
        assert!(page.iter().all(|byte| *byte == 0x5a));
        frames.memory().read(2 * PAGE_SIZE, &mut page);
        assert!(page.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn a_frame_abandoned_to_a_disk_is_never_reused() {
        let frames = frames(5);
        let mut frame = frames.take().expect("free");
        frame.io_begins();
        drop(frame);
        assert_eq!((frames.free(), frames.leaked()), (1, 1));
    }

    #[test]
    fn the_hand_goes_round_and_takes_what_is_cold() {
        let frames = frames(5);
        let a = frames.take().expect("free").into_published();
        let b = frames.take().expect("free").into_published();
        frames.set_owner(a, PoolPage(10));
        frames.set_owner(b, PoolPage(11));
        assert_eq!(frames.next_victim(&mut 2, |page| page.0 == 11), Some((b, PoolPage(11))));
        assert_eq!(frames.next_victim(&mut 2, |_| false), None);
        assert_eq!(frames.next_victim(&mut 4, |page| page.0 == 10), Some((a, PoolPage(10))));
    }

    #[test]
    fn too_small_a_budget_says_what_to_do() {
        let error = Frames::new(3, &MagicPattern::new([0; 32])).expect_err("too small");
        assert!(error.to_string().contains("--memory"));
    }
}
