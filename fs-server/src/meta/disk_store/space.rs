//! Space on the metadata's disk: a reserve, and the check whether there is room for more.
//!
//! A file system that is full must still be able to delete, and to delete takes space: a record in the log, new pages of the
//! B-tree. So
//! * `meta/reserve` holds unused space. A write that finds no space gives it up and tries again; it is taken back as soon as there
//!   is twice as much free.
//! * An operation that makes more records (a name, an inode, an attribute, an extent) is refused while less than twice the reserve
//!   is left. Left is the free space, the reserve's own, and the space of deleted records in the file of records (`spare`). As much
//!   of it as the reserve must be outside of that file, for the log grows nowhere else. An operation that removes records is never
//!   refused, as long as a byte can be written.
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

/// Its name.
const NAME: &str = "reserve";
/// Twice this is there when what adds is refused first: enough for the checkpoints that are bounded by it (`overlay_most_bytes`),
/// three of which take space before the pages that the first of them replaced are used again, and for the log beside them.
pub(super) const RESERVE_BYTES: u64 = 64 << 20;
/// Part of the file system that it is at most.
const RESERVE_PART: u64 = 8;
/// Room from which on some may be taken ahead: many times what the log's files keep, so that nobody misses it.
const PLENTY_BYTES: u64 = 512 << 20;
/// How old the knowledge of free space may be.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug)]
struct Known {
    looked: Option<Instant>,
    free_bytes: u64,
    /// Bytes of the reserve that are held.
    held_bytes: u64,
    /// Bytes of the file of records that further ones are written to before it takes more.
    spare_bytes: u64,
}

/// What a test is told of each sync of a file, before it and after it.
#[cfg(test)]
pub type SyncObserver = Box<dyn Fn(&'static str, bool) + Send + Sync>;

/// The reserve, and what is known of free space. All files are written and synced through it.
pub(super) struct Space {
    reserve: File,
    directory: File,
    /// What the reserve should hold.
    wanted_bytes: u64,
    known: Mutex<Known>,
    closing: AtomicBool,
    /// A test's disk is full.
    #[cfg(test)]
    full: AtomicBool,
    /// Something waits for space that even the reserve did not give. Relaxed: only looked at.
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
    /// [`io::Error`] if the file cannot be opened; having no space is none.
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

    /// Takes the reserve back if there is twice as much free.
    pub(super) fn refill(&self) {
        let mut known = self.known.lock();
        let Ok((free, _)) = free_bytes(&self.directory) else { return };
        known.free_bytes = free;
        let missing = self.wanted_bytes.saturating_sub(known.held_bytes);
        if missing == 0 || free < missing + self.wanted_bytes {
            return;
        }
        // Behind the end of an empty file, so that a copy of the pool has none of it. A file system without fallocate has
        // no reserve.
        let flags = rustix::fs::FallocateFlags::KEEP_SIZE;
        if rustix::fs::fallocate(self.reserve.as_fd(), flags, 0, self.wanted_bytes).is_ok() {
            known.held_bytes = self.wanted_bytes;
            known.looked = None;
        }
    }

    /// Gives the reserve up. Whether there was any.
    fn release(&self) -> bool {
        let mut known = self.known.lock();
        // Cut to an end and then over it: what lies behind the end of a file that stays as long may be left there.
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

    /// What is left: free, held by the reserve, and besides spare in the file of records.
    fn left(&self, known: &mut Known, is_anew: bool) -> (u64, u64) {
        if is_anew || known.looked.is_none_or(|looked| looked.elapsed() > LOOK_INTERVAL) {
            if let Ok((free, _)) = free_bytes(&self.directory) {
                known.free_bytes = free;
            }
            known.looked = Some(Instant::now());
        }
        (known.free_bytes + known.held_bytes, known.spare_bytes)
    }

    /// Bytes that records may still take, the reserve left out.
    pub(super) fn room_bytes(&self) -> u64 {
        let known = &mut *self.known.lock();
        let mut look = |is_anew| {
            let (outside, spare) = self.left(known, is_anew);
            let all = (outside + spare).saturating_sub(2 * self.wanted_bytes);
            all.min(outside.saturating_sub(self.wanted_bytes))
        };
        // Nobody is refused by what is only known to have been written, maybe over what was there.
        match look(false) {
            0 => look(true),
            room => room,
        }
    }

    /// Whether there is so little room that it matters what is spare in the file of records.
    pub(super) fn is_short(&self) -> bool {
        self.room_bytes() < self.wanted_bytes
    }

    /// Bytes that are free or held by the reserve.
    pub(super) fn outside_bytes(&self) -> u64 {
        self.left(&mut self.known.lock(), true).0
    }

    /// Notes what is spare in the file of records.
    pub(super) fn set_spare(&self, bytes: u64) {
        self.known.lock().spare_bytes = bytes;
    }

    /// What the reserve should hold, and holds.
    pub(super) fn reserve_bytes(&self) -> (u64, u64) {
        (self.wanted_bytes, self.known.lock().held_bytes)
    }

    /// Writes all of it; without space, after the reserve was given up for it.
    ///
    /// # Errors
    /// [`io::Error`]; `StorageFull` if the reserve is gone, too. A part may be written.
    pub(super) fn write_all_at(&self, file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
        #[cfg(test)]
        if self.full.load(Ordering::Acquire) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        // What was looked at a moment ago is not there for two. Too much is taken off where bytes are written again: until the
        // next look.
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

    /// Whether there is so much room that some may be taken ahead, and kept.
    pub(super) fn is_plenty(&self) -> bool {
        #[cfg(test)]
        if self.full.load(Ordering::Acquire) {
            return false;
        }
        self.room_bytes() >= PLENTY_BYTES
    }

    /// Puts zeros into a file from one place to another, behind its end, if there is plenty of room; whether they are there. The
    /// reserve is not touched.
    pub(super) fn fill(&self, file: &File, from: u64, until: u64) -> bool {
        if !self.is_plenty() {
            return false;
        }
        // Page by page: the kernel caches what is written at once in one piece, and whoever changes a byte of a piece is taken
        // to have made all of it dirty, and waits for that where much is.
        let zeros = [0; CACHE_PAGE_BYTES as usize];
        let mut at = from;
        let mut filled = Ok(());
        while filled.is_ok() && at < until {
            let len = (CACHE_PAGE_BYTES - at % CACHE_PAGE_BYTES).min(until - at);
            filled = file.write_all_at(&zeros[..len as usize], at);
            at += len;
        }
        if filled.is_err() {
            // What comes next makes the file longer by itself.
            let _ = file.set_len(from);
        }
        filled.is_ok()
    }

    /// Makes durable what was written to the file of this name.
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

    /// Makes the disk full, or no longer.
    #[cfg(test)]
    pub fn set_full(&self, full: bool) {
        self.full.store(full, Ordering::Release);
    }

    /// Who is told of syncs.
    #[cfg(test)]
    pub fn observe(&self, observer: SyncObserver) {
        assert!(self.observer.set(observer).is_ok(), "one observer");
    }

    /// Who waits for space need not do so any longer.
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

    /// Waits so long, or until it is closed.
    pub(super) fn wait(&self, so_long: Duration) {
        let mut lock = self.closed_lock.lock();
        if !self.is_closing() {
            self.closed.wait_for(&mut lock, so_long);
        }
    }
}
