//! The table of active files: at most one `FileRegion` for each inode, so that all requests change the same one.
//!
//! Owns the regions, their open counts, a bounded cache of regions that are not open, and the free slots of the file
//! table.
//!
//! # How it works
//! The table is sharded by inode. A region is loaded under its shard's lock, so that a load cannot bring back a state that another load already
//! changed, committed and dropped. That holds up opens in the same shard for one read of the store, and nothing on the one-sided path. A region is
//! dropped when it is not open, is clean, has no other reference, and the cache is over one of its bounds: of regions, and of the pieces of their
//! mappings, which are most of a fragmented file's memory. It keeps its slot until then, so that a client that opens it again finds its cached layout
//! still valid.
//!
//! # Failure
//! Without a free slot (more open files than slots) a file is opened without one and read by RPC.

use super::file_region::FileRegion;
use cuttlefs_common::ids::{FileSlot, InodeNo};
use cuttlefs_common::region::FileTable;
use cuttlefs_common::status::Status;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Shards of the table, so that opens of different files seldom wait for each other.
const SHARDS: usize = 16;
/// Regions of files that are not open, in all shards together. A region of a small file takes about 500 bytes, so these take 8 MiB.
pub(super) const MAX_INACTIVE_REGIONS: usize = 16 * 1024;
/// Pieces of their mappings, in all shards together. A piece takes about 100 bytes, so these take 26 MiB.
pub(super) const MAX_INACTIVE_PIECES: usize = 256 * 1024;
/// How many more inactive regions of a shard than must be dropped are tried. Those that cannot be dropped are dirty and can be after the next
/// write-back.
const TRIM_ATTEMPTS: usize = 8;

#[derive(Debug)]
struct Entry {
    file: Arc<FileRegion>,
    opens: u32,
    /// When it was last used, counted in uses of the shard.
    used: u64,
}

/// The files that are not open.
#[derive(Debug, Default)]
struct Inactive {
    /// By their last uses, with the pieces that their mappings had then.
    by_use: BTreeMap<u64, (InodeNo, usize)>,
    /// The sum of the pieces.
    pieces: usize,
}

impl Inactive {
    fn insert(&mut self, used: u64, ino: InodeNo, file: &FileRegion) {
        let pieces = file.pieces();
        self.by_use.insert(used, (ino, pieces));
        self.pieces += pieces;
    }

    /// Takes the file of this use out, if it is here.
    fn remove(&mut self, used: u64) {
        self.pieces -= self.by_use.remove(&used).map_or(0, |(_, pieces)| pieces);
    }

    fn len(&self) -> usize {
        self.by_use.len()
    }

    /// The longest unused one first.
    fn inodes(&self) -> impl Iterator<Item = InodeNo> + '_ {
        self.by_use.values().map(|(ino, _)| *ino)
    }
}

#[derive(Debug, Default)]
struct Shard {
    entries: HashMap<InodeNo, Entry>,
    inactive: Inactive,
    uses: u64,
}

/// All active files.
#[derive(Debug)]
pub(super) struct ActiveFiles {
    shards: Vec<Mutex<Shard>>,
    table: FileTable,
    free_slots: Mutex<Vec<FileSlot>>,
    inactive_per_shard: usize,
    pieces_per_shard: usize,
}

/// Counts of regions and slots.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActiveFigures {
    /// Regions in memory.
    pub regions: usize,
    /// Regions of files that are open.
    pub open: usize,
    /// Slots not in use.
    pub free_slots: usize,
}

impl ActiveFiles {
    /// No files, all of the table's slots free.
    pub(super) fn new(table: FileTable, slots: u32, max_inactive: usize, max_pieces: usize) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            free_slots: Mutex::new((0..slots.min(table.slots())).rev().map(FileSlot).collect()),
            table,
            inactive_per_shard: max_inactive.div_ceil(SHARDS),
            pieces_per_shard: max_pieces.div_ceil(SHARDS),
        }
    }

    /// The file table, which is exported to initiators.
    pub(super) fn table(&self) -> &FileTable {
        &self.table
    }

    fn shard(&self, ino: InodeNo) -> MutexGuard<'_, Shard> {
        self.shards[ino.0 as usize % SHARDS].lock()
    }

    /// The file's region, which is loaded if it is not in memory.
    ///
    /// # Errors
    /// As `load`; `Stale` if the inode was reaped.
    pub(super) fn get(
        &self,
        ino: InodeNo,
        load: impl FnOnce() -> Result<FileRegion, Status>,
    ) -> Result<Arc<FileRegion>, Status> {
        let mut shard = self.shard(ino);
        let file = shard.get(ino, load)?;
        self.trim(&mut shard);
        Ok(file)
    }

    /// The file's region if it is active.
    pub(super) fn find(&self, ino: InodeNo) -> Option<Arc<FileRegion>> {
        self.shard(ino).entries.get(&ino).map(|entry| entry.file.clone())
    }

    /// Like `get`, and counts an open. Gives the file a slot if there is one, and its opener `may_take` one.
    ///
    /// # Errors
    /// As `get`.
    pub(super) fn open(
        &self,
        ino: InodeNo,
        may_take: bool,
        load: impl FnOnce() -> Result<FileRegion, Status>,
    ) -> Result<Arc<FileRegion>, Status> {
        let mut shard = self.shard(ino);
        let file = shard.get(ino, load)?;
        shard.change_opens(ino, 1);
        if may_take
            && file.slot().is_none()
            && !file.is_directory()
            && !file.is_closed()
            && let Some(slot) = self.find_slot(&shard)
        {
            file.assign_slot(&self.table, slot);
        }
        Ok(file)
    }

    /// Counts a close; returns how many opens remain.
    pub(super) fn close(&self, ino: InodeNo) -> u32 {
        let mut shard = self.shard(ino);
        let opens = shard.change_opens(ino, -1);
        self.trim(&mut shard);
        opens
    }

    /// How often the file is open.
    pub(super) fn opens(&self, ino: InodeNo) -> u32 {
        self.shard(ino).entries.get(&ino).map_or(0, |entry| entry.opens)
    }

    /// Closes the contents of a file, if it is active. It gets no slot any more, so that clients' one-sided reads fail.
    pub(super) fn close_contents(&self, ino: InodeNo) {
        let shard = self.shard(ino);
        if let Some(entry) = shard.entries.get(&ino) {
            entry.file.is_closed.store(true, Ordering::Release);
            self.release_slot(&entry.file);
        }
    }

    /// Drops regions beyond the bound that write-back has made clean.
    pub(super) fn trim_all(&self) {
        for shard in &self.shards {
            self.trim(&mut shard.lock());
        }
    }

    /// Marks a file that is not open as being reaped: from now on it cannot be opened or loaded.
    ///
    /// # Errors
    /// `Busy` if it is open or being reaped; as `load`.
    pub(super) fn begin_reap(
        &self,
        ino: InodeNo,
        load: impl FnOnce() -> Result<FileRegion, Status>,
    ) -> Result<Arc<FileRegion>, Status> {
        let mut shard = self.shard(ino);
        let file = shard.get(ino, load).map_err(|status| match status {
            // Another task is reaping it already.
            Status::Stale => Status::Busy,
            other => other,
        })?;
        if shard.entries.get(&ino).is_some_and(|entry| entry.opens > 0) {
            return Err(Status::Busy);
        }
        file.reaped.store(true, Ordering::Release);
        Ok(file)
    }

    /// Ends a reap. If the inode is `gone`, its region is dropped; else the file stays.
    pub(super) fn end_reap(&self, ino: InodeNo, gone: bool) {
        let mut shard = self.shard(ino);
        if gone {
            if let Some(entry) = shard.remove(ino) {
                self.release_slot(&entry.file);
            }
        } else if let Some(entry) = shard.entries.get(&ino) {
            entry.file.reaped.store(false, Ordering::Release);
        }
    }

    /// Counts as of about now.
    pub(super) fn figures(&self) -> ActiveFigures {
        let mut figures =
            ActiveFigures { free_slots: self.free_slots.lock().len(), ..ActiveFigures::default() };
        for shard in &self.shards {
            let shard = shard.lock();
            figures.regions += shard.entries.len();
            figures.open += shard.entries.len() - shard.inactive.len();
        }
        figures
    }

    fn find_slot(&self, shard: &Shard) -> Option<FileSlot> {
        if let Some(slot) = self.free_slots.lock().pop() {
            return Some(slot);
        }
        // A file that is not open gives up its slot: one of this shard if possible, else one of a shard whose lock is free.
        if let Some(slot) = shard.steal_slot(&self.table) {
            return Some(slot);
        }
        self.shards
            .iter()
            .filter_map(|shard| shard.try_lock())
            .find_map(|shard| shard.steal_slot(&self.table))
    }

    fn release_slot(&self, file: &FileRegion) {
        if let Some(slot) = file.retire_slot(&self.table) {
            self.free_slots.lock().push(slot);
        }
    }

    fn trim(&self, shard: &mut Shard) {
        let excess = shard.inactive.len().saturating_sub(self.inactive_per_shard);
        let is_over = |shard: &Shard| {
            shard.inactive.len() > self.inactive_per_shard || shard.inactive.pieces > self.pieces_per_shard
        };
        if !is_over(shard) {
            return;
        }
        let candidates: Vec<InodeNo> = shard.inactive.inodes().take(excess + TRIM_ATTEMPTS).collect();
        for ino in candidates {
            if !is_over(shard) {
                break;
            }
            // A count of 1 is the table's own reference, and new ones are only made under this lock.
            let can_go = shard
                .entries
                .get(&ino)
                .is_some_and(|entry| Arc::strong_count(&entry.file) == 1 && entry.file.is_clean());
            if can_go && let Some(entry) = shard.remove(ino) {
                self.release_slot(&entry.file);
            }
        }
    }
}

impl Shard {
    fn get(
        &mut self,
        ino: InodeNo,
        load: impl FnOnce() -> Result<FileRegion, Status>,
    ) -> Result<Arc<FileRegion>, Status> {
        self.uses += 1;
        let used = self.uses;
        if let Some(entry) = self.entries.get_mut(&ino) {
            if entry.file.is_reaped() {
                return Err(Status::Stale);
            }
            if entry.opens == 0 {
                self.inactive.remove(entry.used);
                self.inactive.insert(used, ino, &entry.file);
            }
            entry.used = used;
            return Ok(entry.file.clone());
        }
        let file = Arc::new(load()?);
        self.entries.insert(ino, Entry { file: file.clone(), opens: 0, used });
        self.inactive.insert(used, ino, &file);
        Ok(file)
    }

    fn change_opens(&mut self, ino: InodeNo, by: i32) -> u32 {
        self.uses += 1;
        let used = self.uses;
        let entry = self.entries.get_mut(&ino).expect("an open file is in the table");
        if entry.opens == 0 {
            self.inactive.remove(entry.used);
        }
        entry.used = used;
        entry.opens = entry.opens.checked_add_signed(by).expect("a file is closed as often as it was opened");
        if entry.opens == 0 {
            self.inactive.insert(used, ino, &entry.file);
        }
        entry.opens
    }

    fn remove(&mut self, ino: InodeNo) -> Option<Entry> {
        let entry = self.entries.remove(&ino)?;
        self.inactive.remove(entry.used);
        Some(entry)
    }

    fn steal_slot(&self, table: &FileTable) -> Option<FileSlot> {
        self.inactive
            .inodes()
            .filter_map(|ino| self.entries.get(&ino))
            .find_map(|entry| entry.file.retire_slot(table))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::range_table::RangeTable;
    use cuttlefs_common::ids::{FilePage, PoolPage};
    use cuttlefs_common::region::{Extent, ExtentState};

    fn files(slots: u32, max_inactive: usize) -> ActiveFiles {
        ActiveFiles::new(FileTable::new(slots).expect("table"), slots, max_inactive, MAX_INACTIVE_PIECES)
    }

    fn load(ino: u64) -> impl FnOnce() -> Result<FileRegion, Status> {
        move || Ok(FileRegion::new(InodeNo(ino), RangeTable::default(), 0, ino))
    }

    #[test]
    fn one_region_an_inode_while_anyone_has_it() {
        let files = files(4, 0);
        let a = files.open(InodeNo(1), true, load(1)).expect("open");
        let b = files.open(InodeNo(1), true, || panic!("loaded twice")).expect("open");
        assert!(Arc::ptr_eq(&a, &b));
        assert_eq!(files.close(InodeNo(1)), 1);
        assert_eq!(files.close(InodeNo(1)), 0);
        // It is still referenced, so it stays the only region of the inode.
        assert_eq!(files.figures().regions, 1);
        drop((a, b));
        files.trim_all();
        assert_eq!(files.figures(), ActiveFigures { regions: 0, open: 0, free_slots: 4 });
    }

    #[test]
    fn mappings_in_many_pieces_are_dropped_before_there_are_many_files() {
        let max_pieces = 4 * SHARDS;
        let files = ActiveFiles::new(FileTable::new(4).expect("table"), 4, 1 << 20, max_pieces);
        let in_pieces = |ino: u64, pieces: u64| {
            let extent = |piece: u64| Extent {
                file_page: FilePage(2 * piece),
                pool_page: PoolPage(3 * piece),
                len_pages: 1,
                state: ExtentState::Written,
            };
            let extents: Vec<Extent> = (0..pieces).map(extent).collect();
            let table = RangeTable::from_extents(&extents, 1000).expect("a mapping");
            move || Ok(FileRegion::new(InodeNo(ino), table, 0, ino))
        };
        // All in one shard.
        let [first, second, third] = [1, 2, 3].map(|turn| turn * SHARDS as u64);
        files.open(InodeNo(first), true, in_pieces(first, 3)).expect("open");
        files.open(InodeNo(second), true, in_pieces(second, 100)).expect("open");
        files.close(InodeNo(first));
        assert_eq!(files.figures().regions, 2, "what is open does not count");
        files.get(InodeNo(third), in_pieces(third, 2)).expect("loaded");
        assert!(files.find(InodeNo(first)).is_none(), "the longest unused one goes");
        assert!(files.find(InodeNo(third)).is_some());
        files.close(InodeNo(second));
        assert_eq!(files.figures(), ActiveFigures { regions: 0, open: 0, free_slots: 4 });
    }

    #[test]
    fn slots_run_out_and_are_taken_from_files_nobody_has_open() {
        let files = files(2, 100);
        let one = files.open(InodeNo(1), true, load(1)).expect("open");
        let two = files.open(InodeNo(2), true, load(2)).expect("open");
        let three = files.open(InodeNo(3), true, load(3)).expect("open");
        assert!(one.slot().is_some() && two.slot().is_some() && three.slot().is_none());
        files.close(InodeNo(1));
        let stolen = one.slot();
        let five = files.open(InodeNo(5), false, load(5)).expect("open");
        assert_eq!(five.slot(), None, "who opens it has its share");
        let four = files.open(InodeNo(4), true, load(4)).expect("open");
        assert_eq!(four.slot(), stolen);
        assert!(one.slot().is_none());
        let slot = four.slot().expect("slot");
        assert_eq!(files.table().load(slot).generation, 4);
    }

    #[test]
    fn a_dirty_region_is_never_dropped() {
        let files = files(2, 0);
        let file = files.open(InodeNo(1), true, load(1)).expect("open");
        file.change_bookkeeping(|state| state.uncommitted = true);
        drop(file);
        files.close(InodeNo(1));
        files.trim_all();
        let file = files.get(InodeNo(1), || panic!("it was dropped")).expect("kept");
        file.change_bookkeeping(|state| state.uncommitted = false);
        drop(file);
        files.trim_all();
        assert_eq!(files.figures().regions, 0);
    }

    #[test]
    fn closed_contents_have_no_slot() {
        let files = files(2, 10);
        files.close_contents(InodeNo(1));
        let file = files.open(InodeNo(1), true, load(1)).expect("open");
        let slot = file.slot().expect("a slot");
        files.close_contents(InodeNo(1));
        assert_eq!((file.slot(), file.usable()), (None, Err(Status::Io)));
        assert_eq!(files.table().load(slot).generation, 0, "who reads one-sidedly sees it");
        let again = files.open(InodeNo(1), true, || panic!("loaded twice")).expect("open");
        assert_eq!(again.slot(), None);
        assert_eq!(files.figures().free_slots, 2);
    }

    #[test]
    fn a_reaped_inode_cannot_be_opened_and_an_open_one_not_reaped() {
        let files = files(2, 10);
        files.open(InodeNo(1), true, load(1)).expect("open");
        assert_eq!(files.begin_reap(InodeNo(1), load(1)).expect_err("open"), Status::Busy);
        files.close(InodeNo(1));
        files.begin_reap(InodeNo(1), load(1)).expect("closed");
        assert_eq!(files.open(InodeNo(1), true, load(1)).expect_err("reaped"), Status::Stale);
        assert_eq!(files.begin_reap(InodeNo(1), load(1)).expect_err("twice"), Status::Busy);
        files.end_reap(InodeNo(1), false);
        files.open(InodeNo(1), true, load(1)).expect("it stayed");
        files.close(InodeNo(1));
        files.begin_reap(InodeNo(1), load(1)).expect("closed");
        files.end_reap(InodeNo(1), true);
        assert_eq!(files.figures(), ActiveFigures { regions: 0, open: 0, free_slots: 2 });
    }
}
