//! One active file: its live mapping and length, and the locks for their changes.
//!
//! A region has the range table, the live size, the generation and the slot under which clients see them, and the list of pages that were written in
//! frames since the last write-back.
//!
//! # Locks, in the order they are taken
//! 1. `order` (async): shared by overwrites that change neither mapping nor length, exclusive for all other changes. Reads
//!    take it only as the last resort.
//! 2. `settle` (async): held by a write-back from its snapshot to its commit, and by each operation that takes pages away
//!    from the file, so that a commit never names a page that has left.
//! 3. block locks (`BlockLocks`).
//! 4. `state` (plain): held for moments, never across an await; the NIC engine reads under it. `dirty` may be taken under it.
//!
//! # Invariants
//! * Bytes of the last page past the end of the file are zeros once `tail_is_zero`. They are made so before the file grows.
//! * A page is in `dirty` before the mapping shows its bytes, so a write-back that sees the mapping sees the page.
//! * The slot in the file table shows a generation only for the mapping it belongs to: both change under `state`.

use super::grants::Grants;
use super::range_table::{PieceState, RangeTable};
use super::rhythm::SyncRhythm;
use super::unsynced_appends::UnsyncedAppends;
use crate::meta::{Answer, ClientChange, DoneRequest, RequestId};
use crate::pages::PageOwner;
use crate::sync::{
    AsyncMutex, AsyncRwLock, AtomicBool as Flag, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use cuttlefs_common::attr::InodeFlags;
use cuttlefs_common::ids::{ClientId, FilePage, FileSlot, InodeNo, PAGE_SIZE_U64, PoolPage, SlotIndex};
use cuttlefs_common::region::FileTable;
use cuttlefs_common::rpc::Layout;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::Random;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A page that was written in its frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DirtyPage {
    /// Its pool page.
    pub(crate) pool: PoolPage,
    /// Whether its bytes are durable as an image in the store. The next write-back writes them to their place. A later change lists the page again
    /// without this.
    pub(crate) has_image: bool,
}

/// The state under the lock `state`.
#[derive(Debug)]
pub(crate) struct FileState {
    /// Live mapping.
    pub(crate) table: RangeTable,
    /// Live length in bytes.
    pub(crate) size: u64,
    /// Version of the mapping; clients cache layouts under it.
    pub(crate) generation: u64,
    /// The slot of the file table in which clients see generation and size.
    pub(crate) slot: Option<FileSlot>,
    /// The length in the durable record.
    pub(crate) durable_size: u64,
    /// One-sided appends that no sync has covered.
    pub(crate) unsynced_appends: UnsyncedAppends,
    /// Whether the last page's bytes past the end are zeros (or there are none, or the page has no bytes).
    pub(crate) tail_is_zero: bool,
    /// Whether contents or attributes changed since the last commit.
    pub(crate) uncommitted: bool,
    /// Whether pages were written directly to SSD since the last commit that followed a data sync. Set once they are there.
    pub(crate) is_written_directly: bool,
    /// Whether some page may have an image.
    pub(crate) has_images: bool,
    /// The last request of each slot that changed the file since the last commit. The next commit notes that they were done.
    pub(crate) done: BTreeMap<(ClientId, SlotIndex), DoneRequest>,
    /// Counter of the last change of contents that a client asked this server for; 0 if there was none since the file was loaded.
    pub(crate) contents: u64,
    /// The counter up to which the store has all of these changes, as far as this server committed them.
    pub(crate) covered: u64,
    /// The last change that each client has restored since the last commit.
    pub(crate) restored: Vec<ClientChange>,
}

impl FileState {
    /// Notes a request that was done and changed contents, with its counter and its answer, for the next commit.
    pub(crate) fn note_done(&mut self, request: RequestId, answer: Answer, change: u64) {
        self.uncommitted = true;
        self.contents = self.contents.max(change);
        self.done.insert((request.client, request.slot), DoneRequest { request, answer });
    }

    /// Shows clients the current length.
    pub(crate) fn show_size(&self, files: &FileTable) {
        if let Some(slot) = self.slot {
            files.set_size(slot, self.size);
        }
    }

    /// Shows clients a new generation, because the mapping has changed, and the length.
    pub(crate) fn show_layout(&mut self, files: &FileTable, generations: &Generations) {
        self.generation = generations.next();
        if let Some(slot) = self.slot {
            files.change_layout(slot, self.generation, self.size);
        }
    }

    /// Notes the counter of a client's change of contents that was done, for the next commit.
    pub(crate) fn note_contents(&mut self, change: u64) {
        self.contents = self.contents.max(change);
        // The bytes may have been committed already, without this counter.
        self.uncommitted |= self.contents > self.covered;
    }

    /// Notes that a client has restored its changes up to this one.
    pub(crate) fn note_restored(&mut self, by: ClientChange) {
        self.uncommitted = true;
        match self.restored.iter_mut().find(|known| known.client == by.client) {
            Some(known) => known.change = known.change.max(by.change),
            None => self.restored.push(by),
        }
    }
}

/// One active file.
#[derive(Debug)]
pub struct FileRegion {
    ino: InodeNo,
    /// Whether it is a directory, which has no bytes and is kept while it is open.
    is_directory: bool,
    /// Its chattr marks that forbid changes of contents, as of the last load or change of marks. Relaxed: who changes contents reads them under `order`,
    /// and who has set one waits for that.
    append_only: AtomicBool,
    immutable: AtomicBool,
    pub(crate) order: AsyncRwLock<()>,
    pub(crate) settle: AsyncMutex<()>,
    /// Shared by changes of contents that clients ask for, exclusive for restores. Taken before `order`.
    pub(crate) changes: AsyncRwLock<()>,
    state: RwLock<FileState>,
    pub(crate) dirty: Mutex<BTreeMap<FilePage, DirtyPage>>,
    /// Write grants of its ranges. Locked under `order`, by those who change the mapping or write one-sidedly, and before `state`.
    pub(super) grants: Mutex<Grants>,
    /// Whether it is in the write-back list. Set by writers, cleared by write-back before its snapshot.
    pub(crate) listed: Flag,
    /// Whether the inode was reaped; no operation may use the region then.
    pub(crate) reaped: AtomicBool,
    /// The rhythm of the syncs that clients ask for.
    pub(crate) rhythm: SyncRhythm,
    /// Whether its contents are closed (`Files::close_contents`). Set once, with release; read with acquire by every operation on contents, under the
    /// operation's locks.
    pub(super) is_closed: AtomicBool,
}

impl PageOwner for FileRegion {
    fn ino(&self) -> InodeNo {
        self.ino
    }

    fn list_page(&self, page: FilePage, pool: PoolPage) {
        self.dirty.lock().insert(page, DirtyPage { pool, has_image: false });
    }

    fn note_written_directly(&self) {
        self.change_bookkeeping(|state| state.is_written_directly = true);
    }
}

/// Gives out generations. There is one counter for all files, so no two layouts have the same generation.
#[derive(Debug)]
pub(crate) struct Generations(AtomicU64);

impl Generations {
    /// Begins at a random generation. For a moment a client may hold a layout of one server against the windows of another, and must see that they do
    /// not belong together.
    pub(crate) fn new(random: &dyn Random) -> Self {
        Self(AtomicU64::new(1 + (random.next_u64() >> 1)))
    }

    /// The next generation; never 0, which marks a free slot.
    pub(crate) fn next(&self) -> u64 {
        self.0.fetch_add(1, Ordering::Relaxed)
    }
}

impl FileRegion {
    /// The region of a directory, which only says that it is open.
    pub(crate) fn of_directory(ino: InodeNo, generation: u64) -> Self {
        Self { is_directory: true, ..Self::new(ino, RangeTable::default(), 0, generation) }
    }

    /// Whether the region is a directory's.
    pub(crate) fn is_directory(&self) -> bool {
        self.is_directory
    }

    /// The region of a file as the store has it.
    pub(crate) fn new(ino: InodeNo, mut table: RangeTable, size: u64, generation: u64) -> Self {
        // Bytes past the end must not reappear when the file grows. A store written by this code has none, but the records on a disk are not trusted:
        // such pages become reserved space.
        let last = size.div_ceil(PAGE_SIZE_U64);
        let beyond: Vec<_> =
            table.pieces_in(last, u64::MAX).filter(|piece| piece.state.has_bytes()).collect();
        for piece in beyond {
            tracing::warn!(%ino, page = piece.first, pages = piece.len, "bytes past the end of the file are dropped");
            table.set_state(piece.first, piece.end(), PieceState::Unwritten);
        }
        Self {
            ino,
            is_directory: false,
            append_only: AtomicBool::new(false),
            immutable: AtomicBool::new(false),
            order: AsyncRwLock::new(()),
            settle: AsyncMutex::new(()),
            changes: AsyncRwLock::new(()),
            state: RwLock::new(FileState {
                table,
                size,
                generation,
                slot: None,
                durable_size: size,
                unsynced_appends: UnsyncedAppends::default(),
                tail_is_zero: size.is_multiple_of(PAGE_SIZE_U64),
                uncommitted: false,
                is_written_directly: false,
                has_images: false,
                done: BTreeMap::new(),
                contents: 0,
                covered: 0,
                restored: Vec::new(),
            }),
            dirty: Mutex::new(BTreeMap::new()),
            grants: Mutex::default(),
            listed: Flag::new(false),
            reaped: AtomicBool::new(false),
            rhythm: SyncRhythm::default(),
            is_closed: AtomicBool::new(false),
        }
    }

    /// The inode number.
    pub fn ino(&self) -> InodeNo {
        self.ino
    }

    /// Live length in bytes.
    pub fn size(&self) -> u64 {
        self.state.read().size
    }

    /// Pages that the file has now.
    pub fn allocated_pages(&self) -> u64 {
        self.state.read().table.allocated_pages()
    }

    /// The file's slot, if it has one.
    pub fn slot(&self) -> Option<FileSlot> {
        self.state.read().slot
    }

    /// Whether the store has all changes of the file, and its one-sided appends are durable. Only such a file may be forgotten.
    pub fn is_clean(&self) -> bool {
        let state = self.state.read();
        !state.uncommitted
            && state.unsynced_appends.is_empty()
            && !state.is_written_directly
            && state.table.fresh_pages() == 0
            && self.dirty.lock().is_empty()
    }

    /// Pieces of its mapping.
    pub(super) fn pieces(&self) -> usize {
        self.state.read().table.piece_count()
    }

    /// The mapping as clients may cache it, from the extent at or after `first_page` on.
    pub fn layout(&self, first_page: FilePage, max_extents: usize) -> Layout {
        let state = self.state.read();
        let (extents, known_until) = state.table.extents(first_page, max_extents.max(1));
        Layout { generation: state.generation, extents, known_until }
    }

    pub(crate) fn state(&self) -> RwLockReadGuard<'_, FileState> {
        self.state.read()
    }

    /// The state, for a change in several parts. The caller shows the change to clients before it releases the lock.
    pub(crate) fn state_mut(&self) -> RwLockWriteGuard<'_, FileState> {
        self.state.write()
    }

    /// Changes the length only. Cached layouts stay valid.
    pub(crate) fn change_size(&self, files: &FileTable, change: impl FnOnce(&mut FileState)) {
        let mut state = self.state.write();
        let pages = state.table.allocated_pages();
        change(&mut state);
        debug_assert_eq!(pages, state.table.allocated_pages());
        state.show_size(files);
    }

    /// Changes the mapping, and the length with it. Clients see a new generation before this returns, and so before any page that left the file can
    /// be used for another one.
    pub(crate) fn change_layout<T>(
        &self,
        files: &FileTable,
        generations: &Generations,
        change: impl FnOnce(&mut FileState) -> T,
    ) -> T {
        let mut state = self.state.write();
        let result = change(&mut state);
        state.show_layout(files, generations);
        result
    }

    /// Changes state that clients do not see.
    pub(crate) fn change_bookkeeping<T>(&self, change: impl FnOnce(&mut FileState) -> T) -> T {
        change(&mut self.state.write())
    }

    /// Gives the file a slot.
    pub(crate) fn assign_slot(&self, files: &FileTable, slot: FileSlot) {
        let mut state = self.state.write();
        assert!(state.slot.is_none(), "inode {} has a slot already", self.ino);
        state.slot = Some(slot);
        files.publish(slot, self.ino, state.generation, state.size);
    }

    /// Takes the slot away, which makes all layouts invalid that clients cached under it.
    pub(crate) fn retire_slot(&self, files: &FileTable) -> Option<FileSlot> {
        let mut state = self.state.write();
        let slot = state.slot.take()?;
        files.retire(slot);
        Some(slot)
    }

    /// Notes its chattr marks.
    pub(crate) fn note_marks(&self, flags: InodeFlags) {
        self.append_only.store(flags.has(InodeFlags::APPEND_ONLY), Ordering::Relaxed);
        self.immutable.store(flags.has(InodeFlags::IMMUTABLE), Ordering::Relaxed);
    }

    /// Checks that its chattr marks allow a change of contents, also by who opened it before they were set, as ext4 does since Linux 5.3.
    ///
    /// # Errors
    /// `NotPermitted`.
    pub(crate) fn check_marks(&self, appends: bool) -> Result<(), Status> {
        let is_fixed =
            self.immutable.load(Ordering::Relaxed) || (!appends && self.append_only.load(Ordering::Relaxed));
        if is_fixed { Err(Status::NotPermitted) } else { Ok(()) }
    }

    pub(crate) fn is_reaped(&self) -> bool {
        self.reaped.load(Ordering::Acquire)
    }

    /// Whether nobody may read or change its contents until the server is restarted.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Checks that its contents may be read and changed.
    ///
    /// # Errors
    /// `Stale` if it was reaped, `Io` if its contents are closed.
    pub(crate) fn usable(&self) -> Result<(), Status> {
        match (self.is_reaped(), self.is_closed()) {
            (true, _) => Err(Status::Stale),
            (_, true) => Err(Status::Io),
            _ => Ok(()),
        }
    }
}
