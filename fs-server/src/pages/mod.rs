//! The pool's pages: the part of them in DRAM, and every way in which their bytes are read and changed.
//!
//! This module has the frames, the residency table that clients read one-sidedly, the block locks, the heat of pages and of sample units, eviction,
//! and the data syncs. It knows no files: `files/`, which maps files to pages, calls it with pool pages, and names a file only for messages and for
//! the heat of its units.
//!
//! One `Pages` serves all workers and the NIC engine. Everything in it is `Send + Sync`. The futures that take a [`Disk`](crate::pool::Disk) belong
//! to one worker and must be driven to completion: if one is dropped half way, a page may stay marked as changing (its readers use RPC for ever) and
//! a frame may be lost, but bytes are never mixed up.
//!
//! All operations follow the page protocol of docs/pages.md. None evicts a page on the critical path: with a free frame a page becomes resident,
//! without one it is read or written past the frames.

/// Changes without any wait.
mod at_once;
/// The locks of pages.
mod block_locks;
/// Sources and sinks of bytes.
mod bytes;
/// Changes of bytes.
mod change;
/// Write-out and eviction.
mod evict;
/// The DRAM of the pool.
mod frames;
/// The heat of pages.
mod heat;
/// The heat of sample units.
mod hot_units;
/// Counting accesses, and what follows from the counts.
mod hotspots;
/// Copies of dirty pages for the log.
mod images;
/// Reading pages into frames for good.
mod load;
/// The page protocol under a model checker.
#[cfg(feature = "model-check")]
pub mod model;
/// The policies that are compared.
pub mod policy;
/// Reads of resident pages and of pages on SSD.
mod read;
/// Pages that get other places in the pool.
mod relocate;
/// Changes of residency entries.
mod residency;
/// The search for rotten pages.
mod scrub;
/// The state of a page at one moment.
mod view;
/// The pages as an RNIC sees them that translates addresses.
pub mod window;
/// Atomics on a word of a page.
mod word;

pub use bytes::{Sink, Source};
pub use evict::run_eviction;
pub use frames::{Frames, MIN_FRAMES};
pub use hot_units::MAX_UNITS;
pub use hotspots::Hotspots;
pub use images::put_in_place;
pub use scrub::{SWEEP_INTERVAL, Scrub, ScrubFigures, ScrubOptions, run_scrub, run_sweep};

pub(crate) use change::{Base, NewBytes, PageChange, PageOwner};
pub(crate) use frames::{Pins, PrivateFrame};
pub(crate) use hot_units::HotUnit;
pub(crate) use read::PageRead;
pub(crate) use relocate::PageMove;
pub(crate) use view::PageView;
pub(crate) use word::WordPlace;

use crate::pool::space::Run;
use crate::pool::{CachedDisk, CachedPool, DataSync, Disk, IoError, PageSums, SummedDisk};
use async_lock::Semaphore;
use block_locks::BlockLocks;
use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::region::{MagicPattern, ResidencyTable};
use cuttlefs_common::world::Random;
use event_listener::Event;
use heat::Heat;
use hot_units::HotUnits;
use hotspots::DEFAULT_UNIT_PAGES;
use policy::{PolicyName, RegionPolicy};
use residency::Residency;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use window::PageWindow;

/// Requests that may have bounce buffers at once; further ones wait. As many small ones as keep an SSD busy. Requests of more than 16 KiB also hold
/// one of a worker's registered buffers, of which there are few.
const MAX_BOUNCE_REQUESTS: usize = 128;

/// Sizes and policies of a server's pages.
#[derive(Clone, Copy, Debug)]
pub struct PagesConfig {
    /// Pages of the pool.
    pub pool_pages: u64,
    /// The memory budget; rounded down to whole frames.
    pub memory_bytes: u64,
    /// How pages are served.
    pub policy: RegionPolicy,
    /// The unit of promotion.
    pub hotspots: Hotspots,
    /// Pages of a sample unit.
    pub unit_pages: u32,
}

impl PagesConfig {
    /// The defaults for a pool and a budget.
    pub const fn new(pool_pages: u64, memory_bytes: u64) -> Self {
        Self {
            pool_pages,
            memory_bytes,
            policy: RegionPolicy::of(PolicyName::Term),
            hotspots: Hotspots::Pages,
            unit_pages: DEFAULT_UNIT_PAGES,
        }
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counts since the start. Workers and the NIC engine add to them, status reads them; relaxed.
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub(crate) $name: AtomicU64,)* }

        /// Counts since the start, in pages unless they say otherwise.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct PageCounts { $($(#[$doc])* pub $name: u64,)* }

        impl Counters {
            fn snapshot(&self) -> PageCounts {
                PageCounts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Fetched by RPC from frames.
    fetch_hits,
    /// Fetched by RPC from SSD.
    fetch_misses,
    /// Read from SSD into a frame, and kept there.
    promoted,
    /// Read from SSD into frames ahead of requests, with their hot unit.
    promoted_ahead,
    /// Evicted from a frame.
    evicted,
    /// Read one-sidedly, as clients counted.
    counted,
    /// Written from frames to SSD.
    written_back,
    /// Written directly to SSD.
    direct_writes,
    /// Read because a write overwrote a part of them.
    read_modify_writes,
    /// Copied to another place of the pool.
    relocated,
    /// Read from frames by the NIC engine.
    target_hits,
    /// Answered by the NIC engine with the magic pattern.
    target_magic,
    /// READs (not pages) that were answered with the magic pattern at least in part.
    target_magic_reads,
    /// Written by the NIC engine: under write grants, and under the policies that expose pages to it.
    target_writes,
    /// Atomics (not pages) of the NIC engine.
    target_atomics,
    /// APPENDs (not pages) of the NIC engine.
    target_appends,
    /// One-sided changes (not pages) under write grants that stalled their queue pair, and that a worker made.
    grant_faults,
    /// Pages that one-sided changes took from the free page queue.
    queue_pages,
    /// READs and WRITEs (not pages) that faulted in the NIC engine and stalled their queue pair.
    odp_faults,
    /// Pages of these READs and WRITEs.
    odp_fault_pages,
    /// Reads of pages that failed because of the device.
    read_errors,
    /// Reads of pages that failed because of their checksums.
    rotten_pages,
    /// Pages that could not be written because of the device.
    write_errors,
}

pub(crate) fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// Figures of a server's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageFigures {
    /// Frames that can hold pages.
    pub frames: u32,
    /// Free frames among these.
    pub free_frames: u32,
    /// Dirty frames among these.
    pub dirty_frames: u64,
    /// Frames lost to abandoned IO.
    pub leaked_frames: u32,
    /// Counts since the start.
    pub counts: PageCounts,
}

/// The pages of a server's pool.
pub struct Pages {
    pub(crate) residency: Residency,
    pub(crate) locks: BlockLocks,
    pub(crate) counters: Counters,
    /// The data syncs, which all workers share.
    pub(crate) data_sync: DataSync,
    pub(crate) heat: Heat,
    units: HotUnits,
    hotspots: Hotspots,
    /// Permits for requests with bounce buffers.
    bounce: Semaphore,
    /// Notified when few frames are free.
    frames_low: Event,
    clean_hand: AtomicU64,
    magic: MagicPattern,
    count: u64,
    policy: RegionPolicy,
    /// The mapped pool, into which one-sided reads fault under that policy.
    mapped: Option<Arc<CachedPool>>,
    /// The checksums of the disks with which this is used, if they have any.
    sums: Option<Arc<PageSums>>,
}

impl std::fmt::Debug for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pages").field("figures", &self.figures()).finish_non_exhaustive()
    }
}

impl Pages {
    /// Allocates the memory, and draws the magic pattern from `random`.
    ///
    /// # Errors
    /// If there is no memory, or the budget is too small.
    pub fn new(config: PagesConfig, random: &dyn Random) -> io::Result<Self> {
        let mut pattern = [0u8; 32];
        random.fill(&mut pattern);
        let magic = MagicPattern::new(pattern);
        let count = u32::try_from(config.memory_bytes / PAGE_SIZE_U64).unwrap_or(u32::MAX);
        let frames = Arc::new(Frames::new(count, &magic)?);
        let residency = ResidencyTable::new(config.pool_pages)?;
        Ok(Self {
            residency: Residency::new(residency, frames),
            locks: BlockLocks::default(),
            counters: Counters::default(),
            data_sync: DataSync::default(),
            heat: Heat::new(config.pool_pages, count),
            units: HotUnits::new(config.unit_pages),
            hotspots: config.hotspots,
            bounce: Semaphore::new(MAX_BOUNCE_REQUESTS),
            frames_low: Event::new(),
            clean_hand: AtomicU64::new(0),
            magic,
            count: config.pool_pages,
            policy: config.policy,
            mapped: None,
            sums: None,
        })
    }

    /// The same with a mapped pool, for reads that fault.
    pub fn with_mapped(self, mapped: Option<Arc<CachedPool>>) -> Self {
        Self { mapped, ..self }
    }

    /// The same with a window that shows the pages to an RNIC that translates. Called while no page is in a frame.
    pub fn with_window(self, window: Box<dyn PageWindow>) -> Self {
        Self { residency: self.residency.with_window(window), ..self }
    }

    /// Whether there is a window that shows the pages, and it is not lost.
    pub fn shows_window(&self) -> bool {
        self.residency.shows_window()
    }

    /// The same for disks with checksums.
    pub fn with_sums(self, sums: Arc<PageSums>) -> Self {
        Self { sums: Some(sums), ..self }
    }

    /// Notes that space was allocated that no durable extent has.
    pub(crate) fn note_allocated(&self, runs: &[Run]) {
        if let Some(sums) = &self.sums {
            runs.iter().for_each(|run| sums.note_allocated(run.first.0..run.end().0));
        }
    }

    /// Counts and logs a page that could not be read.
    fn note_unreadable(&self, error: &IoError, ino: InodeNo, page: FilePage, pool: PoolPage) {
        if error.is_rot() {
            add(&self.counters.rotten_pages, 1);
            tracing::error!(%ino, %page, pool_page = %pool, "a page's bytes do not match its checksum; its reads fail (which file: find MOUNT -inum INO)");
        } else {
            add(&self.counters.read_errors, 1);
            tracing::error!(%error, %ino, %page, pool_page = %pool, "a page could not be read");
        }
    }

    /// How pages are served.
    pub fn policy(&self) -> RegionPolicy {
        self.policy
    }

    /// The pattern in place of pages on SSD. Clients are told it when they attach.
    pub fn magic(&self) -> MagicPattern {
        self.magic
    }

    /// The frames, to be registered with disks and devices.
    pub fn frames(&self) -> &Arc<Frames> {
        self.residency.frames()
    }

    /// The number of pages of the pool.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// The mapped pool, into which one-sided reads fault under that policy.
    pub(crate) fn mapped(&self) -> Option<&Arc<CachedPool>> {
        self.mapped.as_ref()
    }

    /// A thread's disk over the mapped pool.
    pub(crate) fn mapped_disk(&self, pool: &Arc<CachedPool>) -> Rc<dyn Disk> {
        let disk = Rc::new(CachedDisk::new(pool.clone()));
        match &self.sums {
            Some(sums) => Rc::new(SummedDisk::new(disk, self.frames().memory().clone(), sums.clone())),
            None => disk,
        }
    }

    /// Whether these pages can be overwritten through the mapped pool now, without a wait.
    pub(crate) fn may_overwrite_at_once(&self, pool: &CachedPool, changes: &[PageChange]) -> bool {
        changes.iter().all(|change| {
            pool.is_cached(change.pool.byte_offset(), PAGE_SIZE)
                && self.locks.try_lock(change.pool).is_some()
                && self.sums.as_ref().is_none_or(|sums| sums.may_overwrite_at_once(change.pool))
        })
    }

    /// Figures as of about now.
    pub fn figures(&self) -> PageFigures {
        PageFigures {
            frames: self.frames().usable(),
            free_frames: self.frames().free(),
            dirty_frames: self.residency.dirty(),
            leaked_frames: self.frames().leaked(),
            counts: self.counters.snapshot(),
        }
    }

    /// Data syncs since the start.
    pub fn data_syncs(&self) -> u64 {
        self.data_sync.count()
    }

    /// Whether all frames were clean when this looked, and no data sync has failed.
    pub(crate) fn is_written_back(&self) -> bool {
        self.residency.dirty() == 0 && !self.data_sync.has_failed()
    }

    /// Takes a free frame, and wakes eviction if few are left.
    fn take_frame(&self) -> Option<PrivateFrame> {
        if !self.policy.uses_frames() {
            return None;
        }
        let mut frame = self.frames().take();
        if frame.is_none() {
            // Some frames may wait until the window no longer shows them.
            self.residency.settle_window();
            frame = self.frames().take();
        }
        if let Some(frame) = &frame {
            self.frames().memory().spoil(frame.offset(), PAGE_SIZE);
        }
        if self.policy.promotes && self.frames().free() < self.low_water() {
            self.frames_low.notify(1);
        }
        frame
    }

    /// The number of free frames below which eviction runs: enough for a few large requests, and at most a sixteenth.
    pub(crate) fn low_water(&self) -> u32 {
        (self.frames().usable() / 16).clamp(1, 2048)
    }
}
