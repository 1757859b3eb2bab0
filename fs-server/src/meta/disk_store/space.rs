//! Space on the metadata's disk: a reserve, and the check whether there is room for more records.
//!
//! A full file system must still be able to delete, and deleting takes space: a record in the log, new pages of the B-tree. So
//! * `meta/reserve` holds unused space. A write that finds no space gives it up and tries again. It is taken back as soon as twice as much is free.
//! * An operation that makes more records (a name, an inode, an attribute, an extent) is refused while less than twice the reserve is left. That
//!   counts the free space, the reserve's own, and the space of deleted records in the file of records (`spare`). An amount as large as the reserve
//!   must be outside of that file, because the log can grow nowhere else. An operation that removes records is never refused, as long as a byte can
//!   be written.
//!
//! # Bound
//! `RESERVE_BYTES`, or an eighth of the file system if that is less.

use super::tail::CACHE_PAGE_BYTES;
use parking_lot::{Condvar, Mutex};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The reserve's name.
const NAME: &str = "reserve";
/// Bytes of the reserve. Operations that add records are refused when less than twice this is left. That is enough for the checkpoints that it bounds
/// (`overlay_most_bytes`), three of which take space before the pages that the first of them replaced are used again, and for the log beside them.
pub(super) const RESERVE_BYTES: u64 = 64 << 20;
/// The reserve is at most this part of the file system.
const RESERVE_PART: u64 = 8;
/// Room from which on the log's files may be filled ahead: many times what they keep, so that nobody misses it.
const PLENTY_BYTES: u64 = 512 << 20;
/// How old the figure of free space may be.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct Known {
    looked: Option<Instant>,
    free_bytes: u64,
    /// Bytes that the reserve holds.
    held_bytes: u64,
    /// Bytes of the file of records that are used up before the file grows.
    spare_bytes: u64,
}

/// A test's function that is called before and after each sync of a file.
#[cfg(test)]
pub type SyncObserver = Box<dyn Fn(&'static str, bool) + Send + Sync>;

/// The reserve, and the known free space. All files are written and synced through it.
pub(super) struct Space {
    reserve: File,
    directory: File,
    /// Bytes that the reserve should hold.
    wanted_bytes: u64,
    known: Mutex<Known>,
    closing: AtomicBool,
    /// A test can say that its disk is full.
    #[cfg(test)]
    full: AtomicBool,
    /// Whether something waits for space that even the reserve did not give. Relaxed: it is only a report.
    stuck: AtomicBool,
    closed: Condvar,
    closed_lock: Mutex<()>,
    #[cfg(test)]
    observer: std::sync::OnceLock<SyncObserver>,
}

impl std::fmt::Debug for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Space")
            .field("wanted_bytes", &self.wanted_bytes)
            .field("known", &self.known)
            .finish_non_exhaustive()
    }
}

fn free_bytes(directory: &File) -> io::Result<(u64, u64)> {
    let found = rustix::fs::fstatvfs(directory)?;
    Ok((found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize))
}

impl Space {
    /// Opens the reserve, of at most `most_bytes`, and fills it as far as there is space.
    ///
    /// # Errors
    /// [`io::Error`] if the file cannot be opened. Lack of space is no error.
    pub(super) fn open(directory: &Path, most_bytes: u64) -> io::Result<Self> {
        let reserve =
            File::options().read(true).write(true).create(true).truncate(false).open(directory.join(NAME))?;
        let directory = File::open(directory)?;
        let (free, all) = free_bytes(&directory)?;
        let held_bytes = reserve.metadata()?.blocks() * 512;
        let space = Self {
            reserve,
            directory,
            wanted_bytes: most_bytes.min(all / RESERVE_PART),
            known: Mutex::new(Known { looked: None, free_bytes: free, held_bytes, spare_bytes: 0 }),
            closing: AtomicBool::new(false),
            #[cfg(test)]
            full: AtomicBool::new(false),
            stuck: AtomicBool::new(false),
            closed: Condvar::new(),
            closed_lock: Mutex::new(()),
            #[cfg(test)]
            observer: std::sync::OnceLock::new(),
        };
        space.refill();
        Ok(space)
    }

    /// Takes the reserve back if twice as much is free.
    pub(super) fn refill(&self) {
        let mut known = self.known.lock();
        let Ok((free, _)) = free_bytes(&self.directory) else { return };
        known.free_bytes = free;
        let missing = self.wanted_bytes.saturating_sub(known.held_bytes);
        if missing == 0 || free < missing + self.wanted_bytes {
            return;
        }
        // The blocks are behind the end of an empty file, so that a copy of the pool does not have them. A file system without fallocate has no
        // reserve.
        let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
        if rustix::fs::fallocate(self.reserve.as_fd(), flags, 0, self.wanted_bytes).is_ok() {
            known.held_bytes = self.wanted_bytes;
            known.looked = None;
        }
    }

    /// Gives the reserve up. Returns whether there was one.
    fn release(&self) -> bool {
        let mut known = self.known.lock();
        // Two changes of the length: if it stayed the same, the file system might keep blocks behind the end.
        let cut = || self.reserve.set_len(1).and_then(|()| self.reserve.set_len(0));
        if known.held_bytes == 0 || cut().is_err() {
            return false;
        }
        tracing::warn!(
            bytes = known.held_bytes,
            "the metadata's disk is full: its reserve is used until something is deleted"
        );
        known.held_bytes = 0;
        true
    }

    /// The bytes that are free or in the reserve, and the spare bytes in the file of records. `is_anew` asks the file system again.
    fn left(&self, known: &mut Known, is_anew: bool) -> (u64, u64) {
        if is_anew || known.looked.is_none_or(|looked| looked.elapsed() > LOOK_INTERVAL) {
            if let Ok((free, _)) = free_bytes(&self.directory) {
                known.free_bytes = free;
            }
            known.looked = Some(Instant::now());
        }
        (known.free_bytes + known.held_bytes, known.spare_bytes)
    }

    /// Bytes that records may still take, without the reserve.
    pub(super) fn room_bytes(&self) -> u64 {
        let known = &mut *self.known.lock();
        let mut look = |is_anew| {
            let (outside, spare) = self.left(known, is_anew);
            let all = (outside + spare).saturating_sub(2 * self.wanted_bytes);
            all.min(outside.saturating_sub(self.wanted_bytes))
        };
        // Nothing is refused because of an old figure, from which the bytes of overwrites were subtracted as well.
        match look(false) {
            0 => look(true),
            room => room,
        }
    }

    /// Whether so little room is left that the spare bytes in the file of records matter.
    pub(super) fn is_short(&self) -> bool {
        self.room_bytes() < self.wanted_bytes
    }

    /// Bytes that are free or in the reserve.
    pub(super) fn outside_bytes(&self) -> u64 {
        self.left(&mut self.known.lock(), true).0
    }

    /// Notes the spare bytes in the file of records.
    pub(super) fn set_spare(&self, bytes: u64) {
        self.known.lock().spare_bytes = bytes;
    }

    /// Bytes that the reserve should hold, and bytes that it holds.
    pub(super) fn reserve_bytes(&self) -> (u64, u64) {
        (self.wanted_bytes, self.known.lock().held_bytes)
    }

    /// Writes all of the bytes. If there is no space, gives up the reserve and tries again.
    ///
    /// # Errors
    /// [`io::Error`]; `StorageFull` if there is still no space. A part may be written.
    pub(super) fn write_all_at(&self, file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
        #[cfg(test)]
        if self.full.load(Ordering::Acquire) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        // The bytes are subtracted from the last figure, so that they are not used twice. An overwrite subtracts too much, until the next look at the
        // file system.
        {
            let mut known = self.known.lock();
            known.free_bytes = known.free_bytes.saturating_sub(bytes.len() as u64);
        }
        match file.write_all_at(bytes, at) {
            Err(error) if error.kind() == io::ErrorKind::StorageFull && self.release() => {
                file.write_all_at(bytes, at)
            }
            done => done,
        }
    }

    /// Whether there is so much room that files may be filled ahead.
    pub(super) fn is_plenty(&self) -> bool {
        #[cfg(test)]
        if self.full.load(Ordering::Acquire) {
            return false;
        }
        self.room_bytes() >= PLENTY_BYTES
    }

    /// Fills a file with zeros behind its end, from one offset to another, if there is plenty of room. Returns whether it did. Does not use the
    /// reserve.
    pub(super) fn fill(&self, file: &File, from: u64, until: u64) -> bool {
        if !self.is_plenty() {
            return false;
        }
        // One page at a time: the kernel caches each write as one piece. A change of one byte makes the whole piece dirty, and waits if too much is
        // dirty.
        let zeros = [0; CACHE_PAGE_BYTES as usize];
        let mut at = from;
        let mut filled = Ok(());
        while filled.is_ok() && at < until {
            let len = (CACHE_PAGE_BYTES - at % CACHE_PAGE_BYTES).min(until - at);
            filled = file.write_all_at(&zeros[..len as usize], at);
            at += len;
        }
        if filled.is_err() {
            // Later appends make the file longer by themselves.
            let _ = file.set_len(from);
        }
        filled.is_ok()
    }

    /// Makes the bytes durable that were written to the file of this name.
    ///
    /// # Errors
    /// [`io::Error`].
    #[cfg_attr(not(test), expect(unused_variables))]
    pub(super) fn sync(&self, name: &'static str, file: &File) -> io::Result<()> {
        #[cfg(test)]
        self.observer.get().inspect(|observer| observer(name, false));
        let synced = file.sync_data();
        #[cfg(test)]
        self.observer.get().inspect(|observer| observer(name, true));
        synced
    }

    /// Makes the disk full for a test, or ends that.
    #[cfg(test)]
    pub fn set_full(&self, full: bool) {
        self.full.store(full, Ordering::Release);
    }

    /// Sets the function that is told of syncs.
    #[cfg(test)]
    pub fn observe(&self, observer: SyncObserver) {
        assert!(self.observer.set(observer).is_ok(), "one observer");
    }

    /// Ends all waiting for space.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        let _lock = self.closed_lock.lock();
        self.closed.notify_all();
    }

    /// Whether the store is being closed.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Notes whether something waits for space.
    pub(super) fn set_stuck(&self, stuck: bool) {
        self.stuck.store(stuck, Ordering::Relaxed);
    }

    /// Whether something waits for space.
    pub(super) fn is_stuck(&self) -> bool {
        self.stuck.load(Ordering::Relaxed)
    }

    /// Waits for this time, or until the store is closed.
    pub(super) fn wait(&self, so_long: Duration) {
        let mut lock = self.closed_lock.lock();
        if !self.is_closing() {
            self.closed.wait_for(&mut lock, so_long);
        }
    }
}
