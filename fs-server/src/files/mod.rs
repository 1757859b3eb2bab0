//! Files: the server's view of files as memory, and the operations on their contents.
//!
//! Owns the live mapping of every active file, the file table that clients read one-sidedly, filekeys, the list of pages to
//! write back, and the pool's space. The pages' bytes and their places belong to `pages/`.
//!
//! The functions here are the operations on a file's contents. Each takes the shared `Files`, the worker's own [`Disk`](crate::pool::Disk) and the
//! file. Their futures must be driven to completion (see `pages`).

/// The table of active files.
mod active;
/// The operations of `fallocate`.
mod allocate;
/// Ranges of open files that others may open by a key.
mod bound_regions;
/// Atomics on words of files.
mod change_word;
/// The changes of a request.
mod changed;
/// Copies within the server.
mod copy;
/// Moves of a file's pages to fewer places of the pool.
mod defragment;
/// Pages that leave a file.
mod detach;
/// One-sided writes past the CPU, for comparison.
mod exposed_writes;
/// One-sided reads that fault, for comparison.
mod faulting;
/// Reads.
mod fetch;
/// One active file.
mod file_region;
/// Random names of open files.
mod filekeys;
/// The free page queue.
mod free_pages;
/// Making of write grants.
mod grant_write;
/// Write grants.
mod grants;
/// Hot parts of files.
mod hot_set;
/// fsync of a few pages.
mod images;
/// Reading all of a file into frames.
mod load;
/// One-sided changes under a model checker.
#[cfg(feature = "model-check")]
pub mod model;
/// Frames and space for new pages of one-sided changes.
mod new_pages;
/// Changes since the start of the server, for clients that restore theirs.
mod newer;
/// One-sided changes under write grants.
mod one_sided;
/// One-sided changes that must wait.
mod one_sided_faults;
/// Promotion of hot units.
mod promote;
/// The live mapping of a file.
mod range_table;
/// Removal of inodes without names.
mod reap;
/// Restoring changes that a killed server lost.
mod restore;
/// Prediction of syncs.
mod rhythm;
/// Search for data and holes.
mod seek;
/// Parts of a large change.
mod steps;
/// Target translation for the NIC engine.
mod target;
/// What an RNIC's translation would hear of.
#[cfg(test)]
mod translation;
/// Changes of length.
mod truncate;
/// One-sided appends that no sync has covered.
mod unsynced_appends;
/// Writes.
mod write;
/// Write-back in groups.
mod write_back;

#[cfg(test)]
mod tests;

pub use active::ActiveFigures;
pub use allocate::allocate_for;
pub use bound_regions::RegionFacts;
pub use change_word::{Word, WordChanged, change_word};
pub use changed::Changed;
pub use copy::{Copied, copy_range};
pub use defragment::{Moved, defragment};
pub use fetch::fetch;
pub use file_region::FileRegion;
pub use filekeys::{FilePart, KeyedFile};
pub use free_pages::run_free_pages;
pub use grant_write::{GRANT_MAX_BYTES, Grantee, grant_write, return_grant};
pub use grants::{GrantFigures, GrantPages};
pub use images::{begin_sync, sync};
pub use load::load;
pub use newer::{NEWER_MAX, Newer};
pub use one_sided_faults::{FaultJob, run_fault, write_granted};
pub use promote::run_promotion;
pub use reap::reap;
pub use restore::{Changing, begin_change, restore, settle};
pub use seek::seek;
pub use truncate::{restore_length, truncate};
pub use write::{Asked, WriteAt, Writer, Written, write_for};
pub use write_back::{WRITE_BACK_INTERVAL, release_space, run_write_back, write_back_all};

use crate::committer::Committer;
use crate::meta::{Meta, NoteData};
use crate::pages::{HotUnit, PageView, Pages};
use crate::pool::space::{Space, SpaceFigures};
use crate::shares::{Resource, Taken};
use active::{ActiveFiles, MAX_INACTIVE_PIECES, MAX_INACTIVE_REGIONS};
use bound_regions::BoundRegions;
use cuttlefs_common::attr::{Attr, FileKind, InodeFlags};
use cuttlefs_common::ids::{FileKey, FilePage, FileSlot, InodeNo};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{RegionOwner, WindowId};
use cuttlefs_common::region::{FILE_SLOT_LEN, FileTable};
use cuttlefs_common::rpc::{Layout, Rights};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::Random;
use event_listener::Event;
use file_region::{FileState, Generations};
use filekeys::FileKeys;
use free_pages::FreePages;
use grants::GrantShares;
use one_sided_faults::FaultJobs;
use parking_lot::{Mutex, RwLock};
use range_table::RangeTable;
use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use write_back::DirtyFiles;

/// Default number of slots of the file table: 4 MiB of shared memory.
const DEFAULT_FILE_SLOTS: u32 = 65_536;

/// The length of the file table of a server.
pub(crate) const fn file_table_bytes() -> u64 {
    DEFAULT_FILE_SLOTS as u64 * FILE_SLOT_LEN as u64
}
/// A peer gets no more slots while it has more open files than one in this number of the slots.
const SLOT_SHARE: usize = 4;

/// Bounds for the numbers of files.
#[derive(Clone, Copy, Debug)]
pub struct FilesConfig {
    /// Slots of the file table.
    pub file_slots: u32,
    /// Regions that are kept of files that are not open.
    pub max_inactive: usize,
}

impl Default for FilesConfig {
    fn default() -> Self {
        Self { file_slots: DEFAULT_FILE_SLOTS, max_inactive: MAX_INACTIVE_REGIONS }
    }
}

/// An opened file.
#[derive(Clone, Debug)]
pub struct OpenedRegion {
    /// Its name in requests.
    pub filekey: FileKey,
    /// Its slot in the file table, if it has one.
    pub slot: Option<FileSlot>,
    /// The file.
    pub file: Arc<FileRegion>,
}

/// A closed file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClosedRegion {
    /// Its inode number.
    pub ino: InodeNo,
    /// Whether it is not open any more.
    pub last: bool,
    /// Whether it was opened by a region key, which somebody else may have ended.
    pub by_key: bool,
}

/// Counts of files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileFigures {
    /// Filekeys bound.
    pub filekeys: usize,
    /// Ranges of files that are bound.
    pub bound_regions: usize,
    /// Filekeys that were opened by the keys of these.
    pub opened_regions: usize,
    /// Write grants.
    pub grants: GrantFigures,
    /// Pages in the free page queue.
    pub free_page_queue: usize,
    /// The most that there may be.
    pub free_page_queue_bound: usize,
    /// Files that wait for write-back.
    pub dirty_files: usize,
    /// Active files.
    pub active: ActiveFigures,
}

/// All files of a server.
pub struct Files {
    pub(crate) pages: Arc<Pages>,
    /// The durable state of files, and all attributes.
    meta: Arc<Meta>,
    /// Makes batches of metadata durable.
    pub(crate) committer: Arc<Committer>,
    space: Arc<Space>,
    active: ActiveFiles,
    generations: Generations,
    keys: FileKeys,
    regions: BoundRegions,
    grants: Arc<GrantShares>,
    free_pages: FreePages,
    fault_jobs: FaultJobs,
    random: Arc<dyn Random>,
    /// Files that wait for write-back.
    dirty: DirtyFiles,
    /// Files whose contents are closed until the next start, because a part of a cut or of a freeing was committed and the rest could not be. Bounded
    /// by the number of files that were cut while the store failed. Locked inside the locks of `active`.
    closed: Mutex<BTreeSet<InodeNo>>,
    /// Changes since the start, while clients may have something to restore.
    pub(crate) newer: Newer,
    /// Set while clients may still restore changes that a server before has answered; `None`: nobody does.
    gathering: OnceLock<Arc<AtomicBool>>,
    /// The hot units of the last period, in units mode. Only their pages are warm.
    hot_set: Mutex<Vec<HotUnit>>,
    /// Held for reading while a one-sided write changes pages, so that a stop waits for it.
    one_sided_writes_ended: RwLock<bool>,
}

impl std::fmt::Debug for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Files").field("figures", &self.figures()).finish_non_exhaustive()
    }
}

impl Files {
    /// The files of a pool. `space` has the space that no extent record uses as free.
    ///
    /// # Errors
    /// If there is no memory for the file table.
    pub fn new(
        config: FilesConfig,
        pages: Arc<Pages>,
        space: Arc<Space>,
        committer: Arc<Committer>,
        random: Arc<dyn Random>,
    ) -> io::Result<Self> {
        let table = FileTable::new(config.file_slots)?;
        let (frames, wake) = (pages.frames().usable(), Arc::new(Event::new()));
        let free_pages = FreePages::new(frames, space.clone(), wake.clone());
        let grants = GrantShares::new(frames, wake);
        Ok(Self {
            pages,
            meta: committer.meta().clone(),
            committer,
            space,
            active: ActiveFiles::new(table, config.file_slots, config.max_inactive, MAX_INACTIVE_PIECES),
            generations: Generations::new(random.as_ref()),
            keys: FileKeys::default(),
            regions: BoundRegions::default(),
            grants,
            free_pages,
            fault_jobs: FaultJobs::default(),
            random,
            dirty: DirtyFiles::default(),
            closed: Mutex::default(),
            newer: Newer::default(),
            gathering: OnceLock::new(),
            hot_set: Mutex::default(),
            one_sided_writes_ended: RwLock::default(),
        })
    }

    /// The pages of the files.
    pub fn pages(&self) -> &Arc<Pages> {
        &self.pages
    }

    /// Notes a change of contents that was done. Metadata updates the times and the change counter.
    pub(crate) fn note_changed(&self, file: &FileRegion, note: NoteData) -> Result<Attr, Status> {
        self.meta.note_data(file.ino(), NoteData { modified: true, ..note })
    }

    /// The memory of a window, to export to initiators.
    pub fn window(&self, id: WindowId) -> Arc<SharedMemory> {
        match id {
            WindowId::Frames => self.pages.frames().memory().clone(),
            WindowId::Residency => self.pages.residency.table().memory().clone(),
            WindowId::FileTable => self.file_table().memory().clone(),
        }
    }

    /// The residency of a file's page. The caller holds the mapping's lock.
    fn view(&self, state: &FileState, page: FilePage) -> PageView {
        match state.table.get(page) {
            Some((pool, piece)) if piece.has_bytes() => self.pages.view(pool),
            _ => PageView::Zeros,
        }
    }

    pub(crate) fn file_table(&self) -> &FileTable {
        self.active.table()
    }

    /// Has the NIC engine read no file while this is set, where it has the pattern to say so: its readers ask by requests, which wait until clients have
    /// restored what they wrote. Holes and the end of a file would tell of a state that no answer has left. Called once, before the first request.
    pub fn read_by_requests_while(&self, gathering: Arc<AtomicBool>) {
        assert!(self.gathering.set(gathering).is_ok(), "told once");
    }

    fn is_gathering(&self) -> bool {
        self.gathering.get().is_some_and(|gathering| gathering.load(Ordering::Relaxed))
    }

    /// Drops regions that became clean, beyond the bound.
    pub(crate) fn trim_active(&self) {
        self.active.trim_all();
    }

    pub(crate) fn begin_reap(&self, ino: InodeNo) -> Result<Arc<FileRegion>, Status> {
        self.active.begin_reap(ino, || self.load(ino))
    }

    pub(crate) fn end_reap(&self, ino: InodeNo, gone: bool) {
        if gone {
            self.closed.lock().remove(&ino);
        }
        self.active.end_reap(ino, gone);
    }

    /// Closes the contents of a file until the next start, because a part of a change was committed and the rest cannot be. `false` if they were
    /// closed already.
    pub(crate) fn close_contents(&self, ino: InodeNo) -> bool {
        if !self.closed.lock().insert(ino) {
            return false;
        }
        // A load of the file from now on finds it in `closed`.
        self.active.close_contents(ino);
        true
    }

    /// Checks that a file's contents may be read and changed.
    ///
    /// # Errors
    /// `Io` if they are closed.
    pub(crate) fn check_contents(&self, ino: InodeNo) -> Result<(), Status> {
        if self.closed.lock().contains(&ino) { Err(Status::Io) } else { Ok(()) }
    }

    /// How many files have closed contents.
    pub fn closed_files(&self) -> usize {
        self.closed.lock().len()
    }

    /// The free space of the pool.
    pub fn space(&self) -> &Arc<Space> {
        &self.space
    }

    /// The figures of the pool's space. What no file has is free: also what is in the free page queue.
    pub fn space_figures(&self) -> SpaceFigures {
        let (queued, _) = self.free_pages.figures();
        let figures = self.space.figures();
        // The two were looked at one after the other.
        let queued = figures.used.min(queued as u64);
        SpaceFigures { free: figures.free + queued, used: figures.used - queued, ..figures }
    }

    fn load(&self, ino: InodeNo) -> Result<FileRegion, Status> {
        let attr = self.meta.attr(ino)?;
        match attr.kind {
            FileKind::File => {}
            FileKind::Directory => return Ok(FileRegion::of_directory(ino, self.generations.next())),
            _ => return Err(Status::Invalid),
        }
        let extents = self.meta.extents(ino)?;
        let table = RangeTable::from_extents(&extents, self.pages.count()).map_err(|error| {
            tracing::error!(%ino, %error, "the stored mapping of a file cannot be; check the pool");
            Status::Io
        })?;
        let file = FileRegion::new(ino, table, attr.size, self.generations.next());
        file.is_closed.store(self.check_contents(ino).is_err(), Ordering::Release);
        file.note_marks(attr.flags);
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

    /// Notes a file's new chattr marks. When this returns, no change of contents that they forbid is under way. The write grants of a file that has
    /// become immutable have ended.
    pub async fn note_flags(&self, ino: InodeNo, flags: InodeFlags) {
        let Some(file) = self.active.find(ino) else { return };
        file.note_marks(flags);
        if file.check_marks(false).is_err() {
            let _alone = file.order.write().await;
            if file.check_marks(true).is_err() {
                file.end_grants(0, u64::MAX);
            }
        }
    }

    /// Opens a regular file for an owner, or a directory, without any right, to keep it.
    ///
    /// # Errors
    /// As `file`; `Busy` if the owner has too many files open; `Denied` for owner 0.
    pub fn open(&self, owner: RegionOwner, ino: InodeNo, rights: Rights) -> Result<OpenedRegion, Status> {
        self.open_with(owner, ino, rights, None)
    }

    /// Like `open`; the filekey keeps `place`, a place in the peer's share.
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
        let file = self.active.open(ino, self.may_take_slot(place.as_ref()), || self.load(ino))?;
        match self.keys.bind(&*self.random, owner, rights, file.clone(), place) {
            Ok(filekey) => Ok(OpenedRegion { filekey, slot: file.slot(), file }),
            Err(status) => {
                self.active.close(ino);
                Err(status)
            }
        }
    }

    /// Whether the opener of a file may have a slot for it.
    fn may_take_slot(&self, place: Option<&Taken>) -> bool {
        let slots = self.active.table().slots() as usize;
        place.is_none_or(|place| place.peer().has_at_most(Resource::Filekeys, slots / SLOT_SHARE))
    }

    fn now_ms(&self) -> u64 {
        self.meta.now_ms()
    }

    /// The file of a filekey, and what the key permits.
    ///
    /// # Errors
    /// `Stale` if this owner has no such key.
    pub fn keyed(&self, owner: RegionOwner, filekey: FileKey) -> Result<KeyedFile, Status> {
        self.keys.look_up(owner, filekey, || self.now_ms())
    }

    /// The file of a filekey of a whole file, with the rights with which it was opened.
    ///
    /// # Errors
    /// `Stale` if this owner has no such key, `Denied` if it is good for a part of the file only.
    pub fn resolve(&self, owner: RegionOwner, filekey: FileKey) -> Result<(Arc<FileRegion>, Rights), Status> {
        match self.keyed(owner, filekey)? {
            KeyedFile { file, rights, part: None } => Ok((file, rights)),
            _ => Err(Status::Denied),
        }
    }

    /// The file behind a filekey that is good for reading.
    pub(crate) fn readable(&self, owner: RegionOwner, filekey: FileKey) -> Option<Arc<FileRegion>> {
        let keyed = self.keyed(owner, filekey).ok()?;
        keyed.rights.read.then_some(keyed.file)
    }

    /// The region of a file that is in memory, open or not.
    pub(crate) fn active(&self, ino: InodeNo) -> Option<Arc<FileRegion>> {
        self.active.find(ino)
    }

    /// Whether an owner has a file open with at least these rights.
    pub fn has_open(&self, owner: RegionOwner, ino: InodeNo, rights: Rights) -> bool {
        self.keys.has_open(owner, ino, rights)
    }

    /// Closes a filekey, and with it all that was opened by keys of its ranges; the last one is this filekey itself. If that was the last open of an
    /// inode without names, the caller reaps the inode.
    ///
    /// # Errors
    /// `Stale` if this owner has no such key.
    pub fn close(&self, owner: RegionOwner, filekey: FileKey) -> Result<Vec<ClosedRegion>, Status> {
        let file = self.keys.unbind(owner, filekey)?;
        Ok(self.close_unbound(filekey, file))
    }

    /// Closes every filekey of an owner.
    pub fn revoke(&self, owner: RegionOwner) -> Vec<ClosedRegion> {
        let unbound = self.keys.revoke(owner).into_iter();
        unbound.flat_map(|(filekey, file)| self.close_unbound(filekey, file)).collect()
    }

    fn close_unbound(&self, filekey: FileKey, file: Arc<FileRegion>) -> Vec<ClosedRegion> {
        let mut closed = self.close_all(self.regions.note_unbound(filekey));
        closed.push(self.closed(filekey, file, false));
        closed
    }

    /// Ends what a filekey had that is unbound.
    fn closed(&self, filekey: FileKey, file: Arc<FileRegion>, by_key: bool) -> ClosedRegion {
        let ino = file.ino();
        #[cfg(test)]
        file.state_mut().table.translation.cm_destroy(filekey);
        file.end_grants_of(filekey);
        drop(file);
        ClosedRegion { ino, last: self.active.close(ino) == 0, by_key }
    }

    /// How often an inode is open.
    pub fn opens(&self, ino: InodeNo) -> u32 {
        self.active.opens(ino)
    }

    /// A file's layout from `first_page` on, with its generation.
    pub fn layout(&self, file: &FileRegion, first_page: FilePage, max_extents: usize) -> Layout {
        file.layout(first_page, max_extents)
    }

    /// Counts as of about now.
    pub fn figures(&self) -> FileFigures {
        let (bound_regions, opened_regions) = self.regions.counts();
        let (free_page_queue, free_page_queue_bound) = self.free_pages.figures();
        FileFigures {
            filekeys: self.keys.len(),
            bound_regions,
            opened_regions,
            grants: self.grants.figures(),
            free_page_queue,
            free_page_queue_bound,
            dirty_files: self.dirty.len(),
            active: self.active.figures(),
        }
    }

    /// Whether a flush of metadata is under way. It may be over when this returns.
    pub fn is_flushing(&self) -> bool {
        self.committer.is_flushing()
    }

    /// Whether there was nothing left to write back when this looked.
    pub fn is_written_back(&self) -> bool {
        self.dirty.len() == 0 && self.pages.is_written_back()
    }

    /// Puts a file on the write-back list.
    fn list_dirty(&self, file: &Arc<FileRegion>) {
        self.dirty.list(file);
    }
}
