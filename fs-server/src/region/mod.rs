//! File regions: the server's view of files as memory (DESIGN section 1).
//!
//! Owns the frames, the residency and file tables that clients read one-sidedly, the live mapping of every active
//! file, and filekeys. What moves bytes between them is in `tier/`.
//!
//! One `Regions` serves all workers and the NIC engine. Everything in it is `Send + Sync`; the futures that take a
//! [`Disk`](crate::pool::Disk) belong to one worker and must be driven to completion: dropped half way they leave a
//! page marked as changing (its readers fall back to RPC for ever) and may lose a frame, but never mix up bytes.

/// The table of active files.
mod active;
/// Who may change a page.
mod block_locks;
/// Making frames clean and free.
mod evict;
/// Reads that fault, for comparison.
mod faulting;
/// One active file.
mod file_region;
/// Names of open files.
mod filekeys;
/// The DRAM.
mod frames;
/// Which pages are hot.
mod heat;
/// Which sample units are.
mod hot_units;
/// Where accesses are noted, and what follows from them.
mod hotspots;
/// The in-memory twin of metadata.
pub mod memory_meta;
/// Metadata as regions see it.
pub mod meta_port;
#[cfg(feature = "model-check")]
mod model;
/// What has changed since the start, for clients that come back.
mod newer;
/// What regions are compared with.
pub mod policy;
/// The live mapping of a file.
pub mod range_table;
/// Changes of residency entries.
mod residency;
mod rhythm;
/// Target translation.
mod target;

pub use active::{ActiveFigures, MAX_INACTIVE_REGIONS};
pub use evict::run_eviction;
pub use file_region::FileRegion;
pub use filekeys::MAX_FILEKEYS_PER_OWNER;
pub use frames::{Frames, MIN_FRAMES, PrivateFrame};
pub use hot_units::{HotUnit, MAX_UNITS};
pub use hotspots::{DEFAULT_UNIT_PAGES, Hotspots};
pub use meta_port::{
    Answer, ClientChange, Covers, CutStep, DataCommit, DoneRequest, Images, MetaPort, NoteData, PageImage,
    RangeUpdate, RequestId, Verdict, Written,
};
pub use newer::{NEWER_MAX, Newer};

pub(crate) use block_locks::BlockLocks;
pub(crate) use file_region::{DirtyPage, FileState, Generations};
pub(crate) use residency::Residency;
pub(crate) use target::PageView;

use crate::pool::space::{Run, Space};
use crate::pool::{CachedPool, DataSync, IoError, PageSums};
use crate::shares::{Resource, Taken};
use active::ActiveFiles;
use async_lock::{RwLock, Semaphore};
use cuttlefs_common::attr::{Attr, FileKind, InodeFlags};
use cuttlefs_common::ids::{FileKey, FilePage, FileSlot, InodeNo, PAGE_SIZE, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{RegionOwner, WindowId};
use cuttlefs_common::region::{FileTable, MagicPattern, ResidencyTable};
use cuttlefs_common::rpc::{Layout, Rights};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::Random;
use event_listener::Event;
use filekeys::FileKeys;
use heat::Heat;
use hot_units::HotUnits;
use parking_lot::Mutex;
use policy::{PolicyName, RegionPolicy};
use range_table::RangeTable;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Slots of the file table unless told otherwise: 4 MiB of shared memory.
pub const DEFAULT_FILE_SLOTS: u32 = 65_536;
/// Whose open files would take more than this part of the slots gets no more of them.
const SLOT_SHARE: usize = 4;
/// Requests that may hold bounce buffers at once; further ones wait in line. As many small ones as keep an SSD busy;
/// those of more than 16 KiB also hold one of a worker's registered buffers, of which there are few.
pub const MAX_BOUNCE_REQUESTS: usize = 128;
/// Dirty frames may be one in so many... of two: beyond half of the frames writers help to write back before they
/// add more, so that the other half is there for reads.
pub const DIRTY_FRACTION: u64 = 2;
/// Files that wait for write-back at most before writers help: bounds the memory a flood of small files takes.
pub const MAX_DIRTY_FILES: usize = 16 * 1024;

/// Sizes of a server's regions.
#[derive(Clone, Copy, Debug)]
pub struct RegionsConfig {
    /// Pages of the pool.
    pub pool_pages: u64,
    /// The memory budget; rounded down to whole frames.
    pub memory_bytes: u64,
    /// Slots of the file table.
    pub file_slots: u32,
    /// Regions kept of files nobody has open.
    pub max_inactive: usize,
    /// How they are served.
    pub policy: RegionPolicy,
    /// What is promoted.
    pub hotspots: Hotspots,
    /// Pages of a sample unit.
    pub unit_pages: u32,
}

impl RegionsConfig {
    /// The defaults for a pool and a budget.
    pub const fn new(pool_pages: u64, memory_bytes: u64) -> Self {
        Self {
            pool_pages,
            memory_bytes,
            file_slots: DEFAULT_FILE_SLOTS,
            max_inactive: MAX_INACTIVE_REGIONS,
            policy: RegionPolicy::of(PolicyName::Term),
            hotspots: Hotspots::Pages,
            unit_pages: DEFAULT_UNIT_PAGES,
        }
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counts since the start. Added to by workers and the NIC engine, read by status; relaxed.
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub(crate) $name: AtomicU64,)* }

        /// Counts since the start, in pages unless they say otherwise.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct RegionCounts { $($(#[$doc])* pub $name: u64,)* }

        impl Counters {
            fn snapshot(&self) -> RegionCounts {
                RegionCounts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Fetched from frames.
    fetch_hits,
    /// Fetched from SSD.
    fetch_misses,
    /// Read from SSD into a frame and kept there.
    promoted,
    /// Read from SSD into frames ahead of any request, with their hot unit.
    promoted_ahead,
    /// Sent from a frame back to SSD.
    evicted,
    /// Read one-sidedly, as clients counted.
    counted,
    /// Written from frames to SSD.
    written_back,
    /// Written to SSD past the frames.
    direct_writes,
    /// Read for a partial write.
    read_modify_writes,
    /// Read by the NIC engine from frames.
    target_hits,
    /// Answered by the NIC engine with the magic pattern.
    target_magic,
    /// READs (not pages) of which it answered some that way.
    target_magic_reads,
    /// READs (not pages) that faulted in the NIC engine and stalled their queue pair.
    odp_faults,
    /// Pages of those READs.
    odp_fault_pages,
    /// Not read because of the device, or because of their checksums.
    read_errors,
    /// Of these, those whose checksums did not match their bytes.
    rotten_pages,
    /// Not written because of the device.
    write_errors,
}

pub(crate) fn add(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// An opened file.
#[derive(Clone, Debug)]
pub struct OpenedRegion {
    /// Names it from now on.
    pub filekey: FileKey,
    /// Its slot in the file table, if there was one.
    pub slot: Option<FileSlot>,
    /// The file.
    pub file: Arc<FileRegion>,
}

/// A closed file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClosedRegion {
    /// Which.
    pub ino: InodeNo,
    /// Nobody has it open any more.
    pub last: bool,
}

/// How much of what is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionFigures {
    /// Frames that can hold pages.
    pub frames: u32,
    /// Of these, free.
    pub free_frames: u32,
    /// Of these, dirty.
    pub dirty_frames: u64,
    /// Frames lost to abandoned IO.
    pub leaked_frames: u32,
    /// Filekeys bound.
    pub filekeys: usize,
    /// Files waiting for write-back.
    pub dirty_files: usize,
    /// Active files.
    pub active: ActiveFigures,
    /// Counts since the start.
    pub counts: RegionCounts,
}

/// All file regions of a server.
pub struct Regions {
    pub(crate) residency: Residency,
    pub(crate) locks: BlockLocks,
    pub(crate) space: Arc<Space>,
    pub(crate) generations: Generations,
    pub(crate) meta: Arc<dyn MetaPort>,
    pub(crate) counters: Counters,
    /// Files with something to write back, by inode so that groups are taken in lock order.
    pub(crate) dirty_files: Mutex<BTreeMap<InodeNo, Arc<FileRegion>>>,
    /// Held while files that were taken off that list are being written back: shared by writers that help, alone by
    /// whoever must know that nothing is left. Taken before any other lock.
    pub(crate) sweep: RwLock<()>,
    /// The data syncs, which all workers share.
    pub(crate) data_sync: DataSync,
    /// Permits for requests with bounce buffers.
    pub(crate) bounce: Semaphore,
    /// Told when free frames run low.
    pub(crate) frames_low: Event,
    pub(crate) clean_hand: AtomicU64,
    pub(crate) heat: Heat,
    units: HotUnits,
    /// The hot units of the last period, in units mode: their pages are the only warm ones.
    hot_set: Mutex<Vec<HotUnit>>,
    hotspots: Hotspots,
    active: ActiveFiles,
    keys: FileKeys,
    random: Arc<dyn Random>,
    magic: MagicPattern,
    pool_pages: u64,
    policy: RegionPolicy,
    /// What one-sided reads fault in, under the policy that has them do so.
    mapped: Option<Arc<CachedPool>>,
    /// Files that owe a write which was acknowledged and cannot be executed before the next start. Bounded by what rings
    /// hold. Taken inside the locks of `active`.
    owing: Mutex<BTreeSet<InodeNo>>,
    /// What has changed since the start, as long as clients may have something to restore.
    pub newer: Newer,
    /// The checksums of the disks that this is used with, if they have any.
    sums: Option<Arc<PageSums>>,
}

impl std::fmt::Debug for Regions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Regions").field("figures", &self.figures()).finish_non_exhaustive()
    }
}

impl Regions {
    /// Takes the memory. `space` knows what every extent record uses; the magic pattern is drawn from `random`.
    ///
    /// # Errors
    /// The memory cannot be had, or the budget is too small.
    pub fn new(
        config: RegionsConfig,
        space: Arc<Space>,
        meta: Arc<dyn MetaPort>,
        random: Arc<dyn Random>,
    ) -> io::Result<Self> {
        let mut pattern = [0u8; 32];
        random.fill(&mut pattern);
        let magic = MagicPattern::new(pattern);
        let count = u32::try_from(config.memory_bytes / PAGE_SIZE_U64).unwrap_or(u32::MAX);
        let frames = Arc::new(Frames::new(count, &magic)?);
        let residency = ResidencyTable::new(config.pool_pages)?;
        let table = FileTable::new(config.file_slots)?;
        Ok(Self {
            residency: Residency::new(residency, frames),
            locks: BlockLocks::default(),
            space,
            generations: Generations::new(random.as_ref()),
            meta,
            counters: Counters::default(),
            dirty_files: Mutex::default(),
            sweep: RwLock::new(()),
            data_sync: DataSync::default(),
            bounce: Semaphore::new(MAX_BOUNCE_REQUESTS),
            frames_low: Event::new(),
            clean_hand: AtomicU64::new(0),
            heat: Heat::new(config.pool_pages, count),
            units: HotUnits::new(config.unit_pages),
            hot_set: Mutex::default(),
            hotspots: config.hotspots,
            active: ActiveFiles::new(table, config.file_slots, config.max_inactive),
            keys: FileKeys::default(),
            random,
            magic,
            pool_pages: config.pool_pages,
            policy: config.policy,
            mapped: None,
            owing: Mutex::default(),
            newer: Newer::default(),
            sums: None,
        })
    }

    /// The same, with the mapped pool that reads which fault are served from.
    pub fn with_mapped(self, mapped: Option<Arc<CachedPool>>) -> Self {
        Self { mapped, ..self }
    }

    /// A change of contents is done: metadata takes its time and its counter.
    pub(crate) fn note_changed(&self, file: &FileRegion, note: NoteData) -> Result<Attr, Status> {
        self.meta.note_data(file.ino(), NoteData { modified: true, ..note })
    }

    /// The same, over disks with checksums.
    pub fn with_sums(self, sums: Arc<PageSums>) -> Self {
        Self { sums: Some(sums), ..self }
    }

    /// Space was taken that nothing durable names.
    pub(crate) fn note_allocated(&self, runs: &[Run]) {
        if let Some(sums) = &self.sums {
            runs.iter().for_each(|run| sums.note_allocated(run.first.0..run.end().0));
        }
    }

    /// Counts and logs a page that could not be read.
    pub(crate) fn note_unreadable(&self, error: &IoError, ino: InodeNo, page: FilePage, pool: PoolPage) {
        add(&self.counters.read_errors, 1);
        if error.is_rot() {
            add(&self.counters.rotten_pages, 1);
            tracing::error!(%ino, %page, pool_page = %pool, "a page's bytes do not match its checksum; its reads fail (which file: find MOUNT -inum INO)");
        } else {
            tracing::error!(%error, %ino, %page, pool_page = %pool, "a page could not be read");
        }
    }

    /// How regions are served.
    pub fn policy(&self) -> RegionPolicy {
        self.policy
    }

    /// Covers what is on SSD; told to clients when they attach.
    pub fn magic(&self) -> MagicPattern {
        self.magic
    }

    /// The frames, to register with disks and devices.
    pub fn frames(&self) -> &Arc<Frames> {
        self.residency.frames()
    }

    /// The memory of a window, to export to initiators.
    pub fn window(&self, id: WindowId) -> Arc<SharedMemory> {
        match id {
            WindowId::Frames => self.frames().memory().clone(),
            WindowId::Residency => self.residency.table().memory().clone(),
            WindowId::FileTable => self.file_table().memory().clone(),
        }
    }

    pub(crate) fn file_table(&self) -> &FileTable {
        self.active.table()
    }

    /// Lets regions go that became clean.
    pub(crate) fn trim_active(&self) {
        self.active.trim_all();
    }

    pub(crate) fn begin_reap(&self, ino: InodeNo) -> Result<Arc<FileRegion>, Status> {
        self.active.begin_reap(ino, || self.load(ino))
    }

    pub(crate) fn end_reap(&self, ino: InodeNo, gone: bool) {
        if gone {
            // What it owed goes with it.
            self.owing.lock().remove(&ino);
        }
        self.active.end_reap(ino, gone);
    }

    /// A write of this file was acknowledged and cannot be executed before the next start: until then nobody sees its
    /// contents without that write, and nobody changes what the write would go over. `false`: that was so already.
    pub(crate) fn close_contents(&self, ino: InodeNo) -> bool {
        if !self.owing.lock().insert(ino) {
            return false;
        }
        // Whoever loads it from here on sees the set.
        self.active.close_contents(ino);
        true
    }

    /// Whether a file's contents may be seen and changed.
    ///
    /// # Errors
    /// `Io` if it owes a write.
    pub(crate) fn check_contents(&self, ino: InodeNo) -> Result<(), Status> {
        if self.owing.lock().contains(&ino) { Err(Status::Io) } else { Ok(()) }
    }

    /// How many files owe a write.
    pub fn closed_files(&self) -> usize {
        self.owing.lock().len()
    }

    /// The free space of the pool.
    pub fn space(&self) -> &Arc<Space> {
        &self.space
    }

    fn load(&self, ino: InodeNo) -> Result<FileRegion, Status> {
        let attr = self.meta.attr(ino)?;
        match attr.kind {
            FileKind::File => {}
            FileKind::Directory => return Ok(FileRegion::of_directory(ino, self.generations.next())),
            _ => return Err(Status::Invalid),
        }
        let extents = self.meta.extents(ino)?;
        let table = RangeTable::from_extents(&extents, self.pool_pages).map_err(|error| {
            tracing::error!(%ino, %error, "the stored mapping of a file cannot be; check the pool");
            Status::Io
        })?;
        let file = FileRegion::new(ino, table, attr.size, self.generations.next());
        file.owes.store(self.check_contents(ino).is_err(), Ordering::Release);
        file.append_only.store(attr.flags.has(InodeFlags::APPEND_ONLY), Ordering::Relaxed);
        Ok(file)
    }

    /// The region of a regular file, for operations by inode.
    ///
    /// # Errors
    /// `NotFound`, `IsDirectory`, `Invalid` (no regular file), `Stale` (being reaped), `Io`.
    pub fn file(&self, ino: InodeNo) -> Result<Arc<FileRegion>, Status> {
        let file = self.active.get(ino, || self.load(ino))?;
        if file.is_directory() { Err(Status::IsDirectory) } else { Ok(file) }
    }

    /// A file's marks are these now.
    pub fn note_flags(&self, ino: InodeNo, flags: InodeFlags) {
        if let Some(file) = self.active.find(ino) {
            file.append_only.store(flags.has(InodeFlags::APPEND_ONLY), Ordering::Relaxed);
        }
    }

    /// Opens a regular file for an owner, or a directory: without any right, to keep it.
    ///
    /// # Errors
    /// As `file`; `Busy` if the owner has too many files open; `Denied` for owner 0.
    pub fn open(&self, owner: RegionOwner, ino: InodeNo, rights: Rights) -> Result<OpenedRegion, Status> {
        self.open_with(owner, ino, rights, None)
    }

    /// As `open`; the filekey keeps `place`, of the share of the peer that opens.
    ///
    /// # Errors
    /// As `open`.
    pub fn open_with(
        &self,
        owner: RegionOwner,
        ino: InodeNo,
        rights: Rights,
        place: Option<Taken>,
    ) -> Result<OpenedRegion, Status> {
        let slots = self.active.table().slots() as usize;
        let may_take = place
            .as_ref()
            .is_none_or(|place| place.peer().has_at_most(Resource::Filekeys, slots / SLOT_SHARE));
        let file = self.active.open(ino, may_take, || self.load(ino))?;
        match self.keys.bind(&*self.random, owner, rights, file.clone(), place) {
            Ok(filekey) => Ok(OpenedRegion { filekey, slot: file.slot(), file }),
            Err(status) => {
                self.active.close(ino);
                Err(status)
            }
        }
    }

    /// The file behind a filekey, with the rights it was bound with.
    ///
    /// # Errors
    /// `Stale` if this owner has no such key.
    pub fn resolve(&self, owner: RegionOwner, filekey: FileKey) -> Result<(Arc<FileRegion>, Rights), Status> {
        self.keys.resolve(owner, filekey)
    }

    /// Whether an owner has a file open with at least these rights.
    pub fn has_open(&self, owner: RegionOwner, ino: InodeNo, rights: Rights) -> bool {
        self.keys.has_open(owner, ino, rights)
    }

    /// Ends a filekey. If that was the last open of an inode without names, reap it.
    ///
    /// # Errors
    /// `Stale` if this owner has no such key.
    pub fn close(&self, owner: RegionOwner, filekey: FileKey) -> Result<ClosedRegion, Status> {
        Ok(self.closed(self.keys.unbind(owner, filekey)?))
    }

    /// Ends every filekey of an owner.
    pub fn revoke(&self, owner: RegionOwner) -> Vec<ClosedRegion> {
        self.keys.revoke(owner).into_iter().map(|file| self.closed(file)).collect()
    }

    fn closed(&self, file: Arc<FileRegion>) -> ClosedRegion {
        let ino = file.ino();
        drop(file);
        ClosedRegion { ino, last: self.active.close(ino) == 0 }
    }

    /// How often an inode is open.
    pub fn opens(&self, ino: InodeNo) -> u32 {
        self.active.opens(ino)
    }

    /// A file's layout from `first_page` on, with the generation it belongs to.
    pub fn layout(&self, file: &FileRegion, first_page: FilePage, max_extents: usize) -> Layout {
        file.layout(first_page, max_extents)
    }

    /// Figures of about this moment.
    pub fn figures(&self) -> RegionFigures {
        RegionFigures {
            frames: self.frames().usable(),
            free_frames: self.frames().free(),
            dirty_frames: self.residency.dirty(),
            leaked_frames: self.frames().leaked(),
            filekeys: self.keys.len(),
            dirty_files: self.dirty_files.lock().len(),
            active: self.active.figures(),
            counts: self.counters.snapshot(),
        }
    }

    /// Data syncs since the start.
    pub fn data_syncs(&self) -> u64 {
        self.data_sync.count()
    }

    /// Whether a flush of metadata is under way; a guess.
    pub fn is_flushing(&self) -> bool {
        self.meta.is_flushing()
    }

    /// Whether the SSD holds everything, as far as anybody knows.
    pub fn is_written_back(&self) -> bool {
        self.residency.dirty() == 0 && self.dirty_files.lock().is_empty() && !self.data_sync.has_failed()
    }

    /// Puts a file on the write-back list.
    pub(crate) fn list_dirty(&self, file: &Arc<FileRegion>) {
        if !file.listed.swap(true, Ordering::AcqRel) {
            self.dirty_files.lock().insert(file.ino(), file.clone());
        }
    }

    /// Takes a free frame; wakes eviction if that leaves few.
    pub(crate) fn take_frame(&self) -> Option<PrivateFrame> {
        if !self.policy.uses_frames() {
            return None;
        }
        let frame = self.frames().take();
        if let Some(frame) = &frame {
            self.frames().memory().spoil(frame.offset(), PAGE_SIZE);
        }
        if self.policy.promotes && self.frames().free() < self.low_water() {
            self.frames_low.notify(1);
        }
        frame
    }

    /// Below so many free frames eviction runs: enough for a few large requests to find room, at most a sixteenth.
    pub(crate) fn low_water(&self) -> u32 {
        (self.frames().usable() / 16).clamp(1, 2048)
    }
}
