//! The store on sled 0.34.
//!
//! # What sled needs from us
//! * Its flush writes the log with `sync_file_range`, which flushes no device cache and no file size: it covers
//!   a crash of the machine's software, not a power loss. `flush` therefore adds an `fdatasync` of the log file
//!   through a descriptor of our own.
//! * It moves values that fill a quarter of a log segment into files of their own, which it does not sync. Values
//!   are therefore bounded (`VALUE_MAX_BYTES`) so that no page of its tree gets there.
//! * It writes `conf` when it makes a database and never syncs it; a database whose `conf` is not whole does not open.
//!   Opening therefore syncs it.
//! * A crash while it writes a snapshot leaves `snap.*.generating`, which the next start mistakes for a whole
//!   snapshot and refuses to open. The file is renamed only after it is synced, so one that still has that name
//!   was never relied upon, and is removed before opening.
//! * It panics on some damage; opening is therefore guarded (`panic_ends::survive`), here and nowhere else.
//! * Its newest records are in the process's memory only: `sled_tail` keeps them for when the process is killed.
//! * What it recovers ends where its log's checksums do: rot in the middle of the log looks like an end. `sled_flushed`
//!   knows how far it must go.
//! * Its own batches are slow and block on flushes: see `sled_journal` for what stands in their place.
//!
//! # On failure
//! The first failed commit or flush poisons the store: everything after it fails until the server restarts.

use super::sled_flushed::Flushed;
use super::sled_journal::{self, INLINE_MAX_BYTES, JournalError};
use super::sled_tail::Tail;
use super::store::{Batch, Direction, Store, StoreError, VALUE_MAX_BYTES, Visitor};
use cuttlefs_common::panic_ends;
use parking_lot::{Mutex, RwLock};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What sled says of a database: its version and segment size.
const SLED_CONFIG: &str = "conf";
/// Suffix of a snapshot that was not finished.
const UNFINISHED_SNAPSHOT: &str = ".generating";

/// Bytes of a log segment; sled's default, named because the bound on values follows from it.
const SEGMENT_BYTES: usize = 512 * 1024;
/// Records of a leaf of sled's tree: it splits at more than 16.
const RECORDS_PER_LEAF: usize = 17;
/// Largest key (an extended attribute's) and sled's own bytes for each record, generously.
const RECORD_OVERHEAD_BYTES: usize = 512;
// A leaf stays below a quarter of a segment, from where on sled would put it into an unsynced file.
const _: () = assert!(RECORDS_PER_LEAF * (VALUE_MAX_BYTES + RECORD_OVERHEAD_BYTES) < SEGMENT_BYTES / 4);
const _: () = assert!(INLINE_MAX_BYTES + RECORD_OVERHEAD_BYTES < SEGMENT_BYTES / 4);
/// Tree of the journal.
const JOURNAL_TREE: &str = "journal";
/// Its one record.
const JOURNAL_KEY: &[u8] = b"J";

/// How to open a sled store.
#[derive(Clone, Copy, Debug)]
pub struct SledOptions {
    /// Bound of sled's page cache in bytes. Sled counts encoded pages, so its resident memory is up to about
    /// twice that.
    pub cache_bytes: u64,
}

impl Default for SledOptions {
    fn default() -> Self {
        // Holds the hot part of a few hundred thousand inodes, and is small beside any sensible `--memory`.
        Self { cache_bytes: 64 << 20 }
    }
}

/// Records in a sled tree.
#[derive(Debug)]
pub struct SledStore {
    db: sled::Db,
    journal: sled::Tree,
    /// Held while a batch is committed.
    last: Mutex<Last>,
    /// Held by a flush: the tail has room for one.
    flushing: Mutex<()>,
    /// Held for writing while a batch's records change one by one, so that `get` sees all of it or nothing.
    applying: RwLock<()>,
    log_file: File,
    flushed: Flushed,
    path: PathBuf,
    /// There may be files of large batches. Set by commits, cleared and set again by flushes.
    large_batches: AtomicBool,
    /// Number of the last batch, and of the last that survives a power loss. Only ever raised; release and acquire, so
    /// that who has seen its batch committed sees it here.
    committed: AtomicU64,
    persistent: AtomicU64,
    /// Set once, by whoever fails first; read before each batch. Relaxed: it guards no other memory.
    poisoned: AtomicBool,
}

/// Where commits have come to.
#[derive(Debug)]
struct Last {
    /// Number of the last batch.
    batch: u64,
    tail: Tail,
}

fn backend(
    operation: &'static str,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> StoreError {
    StoreError::Backend { operation, source: source.into() }
}

fn remove_unfinished_snapshots(path: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("snap.") && name.ends_with(UNFINISHED_SNAPSHOT) {
            tracing::warn!(file = %name, "removing a metadata snapshot that a crash left unfinished");
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

impl SledStore {
    /// Opens the store in `path`, making it if it is not there.
    ///
    /// # Errors
    /// [`StoreError::Backend`] if it is in use, damaged, or cannot be read.
    pub fn open(path: &Path, options: SledOptions) -> Result<Self, StoreError> {
        std::fs::create_dir_all(path).map_err(|e| backend("make the directory", e))?;
        remove_unfinished_snapshots(path).map_err(|e| backend("clean up", e))?;
        let config = sled::Config::new()
            .path(path)
            .cache_capacity(options.cache_bytes)
            .segment_size(SEGMENT_BYTES)
            .mode(sled::Mode::HighThroughput)
            // Durability is asked for, by fsync or once a second, and never assumed.
            .flush_every_ms(None);
        let db = panic_ends::survive(|| config.open())
            .map_err(|_| backend("open", "sled panicked on what it found; restore meta/ from a backup"))?
            .map_err(|e| backend("open", e))?;
        let open = |path: &Path| File::open(path).map_err(|e| backend("open", e));
        let store = Self {
            log_file: open(&path.join("db"))?,
            flushed: Flushed::open(path).map_err(|e| backend("open", e))?,
            journal: db.open_tree(JOURNAL_TREE).map_err(|e| backend("open the journal", e))?,
            last: Mutex::new(Last { batch: 0, tail: Tail::open(path).map_err(|e| backend("open", e))? }),
            flushing: Mutex::new(()),
            applying: RwLock::new(()),
            db,
            path: path.to_path_buf(),
            large_batches: AtomicBool::new(true),
            committed: AtomicU64::new(0),
            persistent: AtomicU64::new(0),
            poisoned: AtomicBool::new(false),
        };
        store.redo()?;
        store.flush()?;
        store.last.lock().tail.begin().map_err(|e| backend("empty the tail", e))?;
        open(&path.join(SLED_CONFIG))?.sync_all().map_err(|e| backend("sync sled's configuration", e))?;
        // The names of the files, and the directory's own.
        open(path)?.sync_all().map_err(|e| backend("sync the directory", e))?;
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            open(parent)?.sync_all().map_err(|e| backend("sync the pool directory", e))?;
        }
        Ok(store)
    }

    fn check(&self) -> Result<(), StoreError> {
        if self.poisoned.load(Ordering::Relaxed) { Err(StoreError::Poisoned) } else { Ok(()) }
    }

    fn poison(&self, error: StoreError) -> StoreError {
        self.poisoned.store(true, Ordering::Relaxed);
        error
    }

    /// Completes the batch a crash may have cut, then applies those that sled does not have at all.
    fn redo(&self) -> Result<(), StoreError> {
        let journalled = self.journal.get(JOURNAL_KEY).map_err(|e| backend("read the journal", e))?;
        let mut last = 0;
        if let Some(value) = journalled {
            let (seq, batch) =
                sled_journal::decode(&self.path, &value).map_err(|e| backend("read the journal", e))?;
            last = seq;
            self.change(batch).map_err(|e| backend("redo", e))?;
        }
        let tail = Tail::read(&self.path, last).map_err(|e| backend("read the tail", e))?;
        if !tail.is_empty() {
            tracing::info!(
                batches = tail.len(),
                "the last server was killed; redoing what it had not flushed"
            );
        }
        for (seq, batch) in tail {
            // As at first: the journal record before the batch, for a crash may cut this one too.
            let journalled = sled_journal::encode(&self.path, seq, &batch)
                .and_then(|encoded| Ok(self.journal.insert(JOURNAL_KEY, encoded.record)?));
            journalled.map_err(|e| backend("redo", e))?;
            self.change(batch).map_err(|e| backend("redo", e))?;
            last = seq;
        }
        self.last.lock().batch = last;
        let flushed = self.flushed.batch();
        if last < flushed {
            let what = format!(
                "batch {flushed} was flushed and the last one found is {last}: meta/ is damaged; restore the pool from a copy"
            );
            return Err(backend("open", what));
        }
        Ok(())
    }

    fn change(&self, batch: Batch) -> Result<(), sled::Error> {
        let _exclusive = self.applying.write();
        for (key, value) in batch.into_changes() {
            match value {
                Some(value) => self.db.insert(key, value)?,
                None => self.db.remove(key)?,
            };
        }
        Ok(())
    }

    fn journal_and_change(&self, batch: Batch) -> Result<(), JournalError> {
        let mut last = self.last.lock();
        last.batch += 1;
        let journalled = sled_journal::encode(&self.path, last.batch, &batch)?;
        if !journalled.is_inline {
            self.large_batches.store(true, Ordering::Release);
        }
        last.tail.append(&journalled.record, self.persistent.load(Ordering::Acquire))?;
        self.journal.insert(JOURNAL_KEY, journalled.record)?;
        self.change(batch)?;
        self.committed.store(last.batch, Ordering::Release);
        Ok(())
    }

    /// All batches up to this one survive a power loss.
    fn note_persistent(&self, batch: u64) {
        self.persistent.fetch_max(batch, Ordering::AcqRel);
    }

    fn sync_tail(&self) -> Result<(), StoreError> {
        let (batch, files) = {
            let last = self.last.lock();
            (last.batch, last.tail.files())
        };
        for file in files {
            file.sync_data().map_err(|e| backend("sync the tail", e))?;
        }
        self.note_persistent(batch);
        Ok(())
    }

    fn sync(&self) -> Result<(), StoreError> {
        let _one_at_a_time = self.flushing.lock();
        // Read before the flush: the journal record of this batch, or a later one, will be durable after it.
        let flushed_batch = {
            let mut last = self.last.lock();
            last.tail.turn();
            last.batch
        };
        let large_batches = self.large_batches.swap(false, Ordering::AcqRel);
        self.db.flush().map_err(|e| backend("flush", e))?;
        self.log_file.sync_data().map_err(|e| backend("fdatasync", e))?;
        self.flushed.note(flushed_batch).map_err(|e| backend("note the flush", e))?;
        self.note_persistent(flushed_batch);
        self.last.lock().tail.empty_the_other().map_err(|e| backend("empty the tail", e))?;
        if large_batches {
            let kept = sled_journal::remove_files(&self.path, |seq| seq >= flushed_batch)
                .map_err(|e| backend("remove a large batch's file", e))?;
            if kept {
                self.large_batches.store(true, Ordering::Release);
            }
        }
        Ok(())
    }
}

impl Store for SledStore {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        let _shared = self.applying.read();
        let value = self.db.get(key).map_err(|e| backend("get", e))?;
        Ok(value.map(|value| value.to_vec()))
    }

    fn scan(
        &self,
        from: &[u8],
        to: &[u8],
        direction: Direction,
        visit: Visitor<'_>,
    ) -> Result<(), StoreError> {
        if from >= to {
            return Ok(());
        }
        let mut range = self.db.range(from..to);
        loop {
            let next = match direction {
                Direction::Forward => range.next(),
                Direction::Reverse => range.next_back(),
            };
            let Some(record) = next else { return Ok(()) };
            let (key, value) = record.map_err(|e| backend("scan", e))?;
            if !visit(&key, &value) {
                return Ok(());
            }
        }
    }

    fn commit(&self, batch: Batch) -> Result<(), StoreError> {
        self.check()?;
        self.journal_and_change(batch).map_err(|e| self.poison(backend("commit", e)))
    }

    fn flush(&self) -> Result<(), StoreError> {
        self.check()?;
        self.sync().map_err(|error| self.poison(error))
    }

    fn persist(&self) -> Result<(), StoreError> {
        self.check()?;
        self.sync_tail().map_err(|error| self.poison(error))
    }

    fn is_persistent(&self) -> bool {
        self.persistent.load(Ordering::Acquire) >= self.committed.load(Ordering::Acquire)
    }

    fn size_on_disk_bytes(&self) -> Result<u64, StoreError> {
        self.db.size_on_disk().map_err(|e| backend("size", e))
    }
}
