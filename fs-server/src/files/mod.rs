//! Files: the server's view of files as memory (DESIGN section 1), and the operations on their contents (sections 3 and 4).
//!
//! Owns the live mapping of every active file, the file table that clients read one-sidedly, filekeys, the list of pages to
//! write back, and the pool's space. The pages' bytes and their places belong to `pages/`.
//!
//! Functions here are the operations on a file's contents. Each takes the shared `Files`, the worker's own
//! [`Disk`](crate::pool::Disk) and the file; their futures must be driven to completion (see `pages`).

/// The table of active files.
mod active;
/// What `fallocate` does.
mod allocate;
/// What a request has changed.
mod changed;
/// Copies within the server.
mod copy;
/// Pages that leave a file.
mod detach;
/// Writes past the CPU, for comparison.
mod exposed_writes;
/// Reads that fault, for comparison.
mod faulting;
/// Reads.
mod fetch;
/// One active file.
mod file_region;
/// Names of open files.
mod filekeys;
/// Hot parts of files.
mod hot_set;
/// fsync of little.
mod images;
/// All of a file into frames.
mod load;
/// What has changed since the start, for clients that come back.
mod newer;
/// Hot units, ahead of requests.
mod promote;
/// The live mapping of a file.
mod range_table;
/// Inodes that go.
mod reap;
/// What a killed server lost.
mod restore;
/// When a sync is to be expected.
mod rhythm;
/// Data and holes.
mod seek;
/// Parts of a large change.
mod steps;
/// Target translation.
mod target;
/// Changes of length.
mod truncate;
/// Writes.
mod write;
/// What becomes durable, in groups.
mod write_back;

#[cfg(test)]
mod tests;

pub use active::ActiveFigures;
pub use allocate::allocate_for;
pub use changed::Changed;
pub use copy::{Copied, copy_range};
pub use fetch::fetch;
pub use file_region::FileRegion;
pub use images::{begin_sync, sync};
pub use load::load;
pub use newer::{NEWER_MAX, Newer};
pub use promote::run_promotion;
pub use reap::reap;
pub use restore::{begin_change, restore};
pub use seek::seek;
pub use truncate::{restore_length, truncate};
pub use write::{Asked, WriteAt, Written, write_for};
pub use write_back::{WRITE_BACK_INTERVAL, release_space, run_write_back, write_back_all};

use crate::committer::Committer;
use crate::meta::{Meta, NoteData};
use crate::pages::{HotUnit, PageView, Pages};
use crate::pool::space::Space;
use crate::shares::{Resource, Taken};
use active::{ActiveFiles, MAX_INACTIVE_REGIONS};
use cuttlefs_common::attr::{Attr, FileKind, InodeFlags};
use cuttlefs_common::ids::{FileKey, FilePage, FileSlot, InodeNo};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{RegionOwner, WindowId};
use cuttlefs_common::region::FileTable;
use cuttlefs_common::rpc::{Layout, Rights};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::Random;
use file_region::{FileState, Generations};
use filekeys::FileKeys;
use parking_lot::{Mutex, RwLock};
use range_table::RangeTable;
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use write_back::DirtyFiles;

/// Slots of the file table unless told otherwise: 4 MiB of shared memory.
const DEFAULT_FILE_SLOTS: u32 = 65_536;
/// Whose open files would take more than this part of the slots gets no more of them.
const SLOT_SHARE: usize = 4;

/// How many files there may be at a time.
#[derive(Clone, Copy, Debug)]
pub struct FilesConfig {
    /// Slots of the file table.
    pub file_slots: u32,
    /// Regions kept of files nobody has open.
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
pub struct FileFigures {
    /// Filekeys bound.
    pub filekeys: usize,
    /// Files waiting for write-back.
    pub dirty_files: usize,
    /// Active files.
    pub active: ActiveFigures,
}

/// All files of a server.
pub struct Files {
    pub(crate) pages: Arc<Pages>,
    /// What is durable of files, and every attribute.
    meta: Arc<Meta>,
    /// What makes that so.
    pub(crate) committer: Arc<Committer>,
    space: Arc<Space>,
    active: ActiveFiles,
    generations: Generations,
    keys: FileKeys,
    random: Arc<dyn Random>,
    /// Files with something to write back.
    dirty: DirtyFiles,
    /// Files whose contents are closed until the next start: a cut or a freeing of them was committed in part, and its rest could
    /// not be. Bounded by the files that were cut while the store failed. Taken inside the locks of `active`.
    closed: Mutex<BTreeSet<InodeNo>>,
    /// What has changed since the start, as long as clients may have something to restore.
    pub(crate) newer: Newer,
    /// The hot units of the last period, in units mode: their pages are the only warm ones.
    hot_set: Mutex<Vec<HotUnit>>,
    /// Held while a one-sided write changes pages, which comparators alone do: a stop waits for them.
    one_sided_writes_ended: RwLock<bool>,
}

impl std::fmt::Debug for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Files").field("figures", &self.figures()).finish_non_exhaustive()
    }
}

impl Files {
    /// The files of a pool. `space` knows what every extent record uses.
    ///
    /// # Errors
    /// The file table's memory cannot be had.
    pub fn new(
        config: FilesConfig,
        pages: Arc<Pages>,
        space: Arc<Space>,
        committer: Arc<Committer>,
        random: Arc<dyn Random>,
    ) -> io::Result<Self> {
        let table = FileTable::new(config.file_slots)?;
        Ok(Self {
            pages,
            meta: committer.meta().clone(),
            committer,
            space,
            active: ActiveFiles::new(table, config.file_slots, config.max_inactive),
            generations: Generations::new(random.as_ref()),
            keys: FileKeys::default(),
            random,
            dirty: DirtyFiles::default(),
            closed: Mutex::default(),
            newer: Newer::default(),
            hot_set: Mutex::default(),
            one_sided_writes_ended: RwLock::default(),
        })
    }

    /// What the files consist of.
    pub fn pages(&self) -> &Arc<Pages> {
        &self.pages
    }

    /// A change of contents is done: metadata takes its time and its counter.
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

    /// Looks a page of a file up. The caller holds the mapping's lock.
    fn view(&self, state: &FileState, page: FilePage) -> PageView {
        match state.table.get(page) {
            Some((pool, piece)) if piece.has_bytes() => self.pages.view(pool),
            _ => PageView::Zeros,
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
            self.closed.lock().remove(&ino);
        }
        self.active.end_reap(ino, gone);
    }

    /// A change of this file was committed in part, and its rest cannot be before the next start: until then nobody sees or changes
    /// its contents. `false`: that was so already.
    pub(crate) fn close_contents(&self, ino: InodeNo) -> bool {
        if !self.closed.lock().insert(ino) {
            return false;
        }
        // Whoever loads it from here on sees the set.
        self.active.close_contents(ino);
        true
    }

    /// Whether a file's contents may be seen and changed.
    ///
    /// # Errors
    /// `Io` if they are closed.
    pub(crate) fn check_contents(&self, ino: InodeNo) -> Result<(), Status> {
        if self.closed.lock().contains(&ino) { Err(Status::Io) } else { Ok(()) }
    }

    /// How many files' contents are closed.
    pub fn closed_files(&self) -> usize {
        self.closed.lock().len()
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
        let table = RangeTable::from_extents(&extents, self.pages.count()).map_err(|error| {
            tracing::error!(%ino, %error, "the stored mapping of a file cannot be; check the pool");
            Status::Io
        })?;
        let file = FileRegion::new(ino, table, attr.size, self.generations.next());
        file.is_closed.store(self.check_contents(ino).is_err(), Ordering::Release);
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

    /// The file behind a filekey that is good for reading.
    pub(crate) fn readable(&self, owner: RegionOwner, filekey: FileKey) -> Option<Arc<FileRegion>> {
        let (file, rights) = self.resolve(owner, filekey).ok()?;
        rights.read.then_some(file)
    }

    /// The region of a file that is in memory, open or not.
    pub(crate) fn active(&self, ino: InodeNo) -> Option<Arc<FileRegion>> {
        self.active.find(ino)
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
    pub fn figures(&self) -> FileFigures {
        FileFigures {
            filekeys: self.keys.len(),
            dirty_files: self.dirty.len(),
            active: self.active.figures(),
        }
    }

    /// Whether a flush of metadata is under way; a guess.
    pub fn is_flushing(&self) -> bool {
        self.committer.is_flushing()
    }

    /// Whether the SSD holds everything, as far as anybody knows.
    pub fn is_written_back(&self) -> bool {
        self.dirty.len() == 0 && self.pages.is_written_back()
    }

    /// Puts a file on the write-back list.
    fn list_dirty(&self, file: &Arc<FileRegion>) {
        self.dirty.list(file);
    }
}
