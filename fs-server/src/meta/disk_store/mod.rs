//! The store on a disk: a log of batches, a checkpoint of their records, and the changes between in memory.
//!
//! * `tail`, `logged` the log: a batch is in it before any reader sees it; `direct` records that are durable without a sync of the log
//! * `overlay` the batches committed since the last checkpoint, in memory
//! * `checkpoint`, `summed_file` all batches before those, in a B-tree (redb) with checksums below it; `tally` and the map of pages
//!   (`page_map`): totals of its records
//! * `flushed` the number of the last durable batch; `space` the reserve, and whether there is room; `spare` the room in the B-tree's file
//!
//! # How it works
//! `commit` appends the batch to the log, where it outlives the process from then on, and puts it into the active overlay. `flush` syncs the log: one
//! sync. A caller that does not want to block makes a direct write instead (`begin_sync`), if that is possible. When the active overlay is large
//! enough, a thread freezes it, switches the log to its other file, and writes the frozen overlay into the B-tree; meanwhile readers look through
//! both overlays. Once that is durable, the overlay is dropped, and the log's first file is overwritten next time. `settle`, at a clean stop, does so
//! with all batches, so that the next start has no log to read.
//!
//! # Crashes
//!
//! | the store died | found | opening |
//! | --- | --- | --- |
//! | before a batch was whole in the log | a torn end | stops there; no client was told of the batch |
//! | after that | the batch after a kill; after a power loss if it was synced | applies it, and goes on behind it |
//! | while a checkpoint was written | the checkpoint before; both log files | applies both, and makes the checkpoint |
//! | after the checkpoint was durable | the new checkpoint; both log files | skips the batches that it has |
//! | by a power loss that left records behind a gap, or only in a direct write | the records before the gap | makes a checkpoint of them, and begins the log anew, in another life |
//! | while that was done | that checkpoint; the old log | skips the batches that it has |
//! | with a damaged header, block or record | sums or numbers that do not fit | refuses, or an error where it is read |
//!
//! # Failure
//! The first failed write or sync poisons the store: everything after it fails until the server restarts. A full disk is no failure: see `space`.
//!
//! # Bound
//! `OVERLAY_MAX_BYTES` twice, in memory and in the log, and the B-tree's cache. On a disk with little room both are smaller: see
//! `overlay_most_bytes`.

mod checkpoint;
mod direct;
#[cfg(test)]
mod direct_tests;
mod flushed;
mod logged;
#[cfg(test)]
pub mod made;
mod overlay;
#[cfg(test)]
mod pages_tests;
mod replay;
mod short_key;
mod space;
mod spare;
mod summed_file;
mod syncs;
mod tail;
mod tally;
#[cfg(test)]
mod tests;

use super::page_map::PartVisitor;
use super::store::{Batch, DirectSync, Direction, Store, StoreError, StoreFigures, SyncStep, Visitor};
use checkpoint::{Checkpoint, Snapshot};
use direct::Direct;
use flushed::Flushed;
use overlay::{Layers, Overlay};
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use space::{RESERVE_BYTES, Space};
use spare::Spare;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tail::Tail;
use tally::Tally;

/// Default size of the active overlay at which a checkpoint begins.
const CHECKPOINT_BYTES: u64 = 16 << 20;
/// Least space that an opening gives back: less is not worth the time.
const GIVE_BACK_LEAST_BYTES: u64 = 32 << 20;
/// How many times as large as the active overlay the log may grow before a checkpoint begins. Records that were put and removed again, as images of
/// pages are within seconds, are no longer in memory, and no work for a checkpoint.
const LOG_PER_MEMORY: u64 = 3;
/// Number of removals at which a checkpoint begins. Each scan of their range walks over them, also one that ends with the first record, and some
/// scans are made with the writer held.
const REMOVED_MOST: u64 = 8192;
/// Size at which commits wait for the checkpoint under way.
const OVERLAY_MAX_BYTES: u64 = 64 << 20;
/// Most contents of files that wait for a checkpoint. Those that are there when it begins are written into the tree, and removed within a second.
/// With so many syncs, a sync of the data files is shared by several anyway.
const CONTENTS_MOST_BYTES: u64 = 8 << 20;
/// Most bytes that a checkpoint writes for a record besides the record itself: its leaf, and a part of the nodes above. The same for an extent's part
/// of the map of pages.
const RECORD_PAGES_BYTES: u64 = 8 << 10;
/// Space for a checkpoint that is always assumed.
const CHECKPOINT_LEAST_BYTES: u64 = 64 << 10;
/// About how many times a file of the log is filled ahead until a checkpoint is due.
const FILLS_PER_CHECKPOINT: u64 = 16;
/// Most bytes that are filled ahead at a time, and the default. The next sync takes a millisecond more.
const FILL_MOST_BYTES: u64 = 1 << 20;
/// How long the checkpoint's thread sleeps if it is not woken.
const IDLE_WAIT: Duration = Duration::from_secs(1);
/// How many times the size of its records a B-tree may take: pages are at least half full, and large values are rounded up.
const TREE_PER_RECORD_BYTES: u64 = 3;

/// Options for opening a store.
#[derive(Clone, Copy, Debug)]
pub struct DiskOptions {
    /// Most bytes of the B-tree's page cache.
    pub cache_bytes: u64,
    /// Most bytes of the reserve.
    pub reserve_bytes: u64,
    /// Bytes of memory of the changes since the last checkpoint at which the next one begins. A leaf that many batches change is written once, so a
    /// larger number is cheaper; but a start after a kill reads these changes again.
    pub checkpoint_bytes: u64,
    /// An opening makes the file of records smaller if at least so many bytes of it, and most of it, are empty.
    pub give_back_least_bytes: u64,
    /// The length of each of the two files for direct writes; a power of two.
    pub direct_bytes: u64,
}

impl Default for DiskOptions {
    fn default() -> Self {
        // This has room for the hot part of a few hundred thousand inodes, and is little beside any sensible `--memory`.
        Self {
            cache_bytes: 64 << 20,
            reserve_bytes: RESERVE_BYTES,
            checkpoint_bytes: CHECKPOINT_BYTES,
            give_back_least_bytes: GIVE_BACK_LEAST_BYTES,
            direct_bytes: direct::FILE_BYTES,
        }
    }
}

/// The parts of a checkpoint that is being made: the overlay, the checkpoint before, and the last batch in the overlay.
type Frozen = (Arc<Overlay>, Arc<Snapshot>, u64);

/// The end of the log.
#[derive(Debug)]
struct Last {
    /// The number of the last batch.
    batch: u64,
    tail: Tail,
    direct: Direct,
    /// Whether a checkpoint is asked for, although none is due.
    is_wanted: bool,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    /// Replaced, under `spare`, when its file is made smaller.
    checkpoint: RwLock<Arc<Checkpoint>>,
    layers: RwLock<Layers>,
    /// Locked while a batch is committed, and while overlay and log are switched.
    last: Mutex<Last>,
    /// Used with `last`: a checkpoint is done, or wanted.
    turned: Condvar,
    /// Locked during a sync of the log.
    syncing: Mutex<()>,
    flushed: Flushed,
    space: Arc<Space>,
    /// Locked while the pages of a checkpoint are counted or moved. Taken after `last`.
    spare: Mutex<Spare>,
    checkpoint_bytes: u64,
    cache_bytes: u64,
    /// The numbers of the last batch, and of the last one that survives a power loss. Only ever raised. Release and acquire, so that a thread whose
    /// batch was committed sees it here.
    committed: AtomicU64,
    persistent: AtomicU64,
    /// The number of the last batch that survives a power loss in the log or a checkpoint. Like `persistent`.
    settled: AtomicU64,
    /// Set once, at the first failure; read before each batch. Relaxed: it guards no other memory.
    poisoned: AtomicBool,
}

/// A store of records on a disk.
#[derive(Debug)]
pub struct DiskStore {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

fn backend(
    operation: &'static str,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> StoreError {
    StoreError::Backend { operation, source: source.into() }
}

impl DiskStore {
    /// Opens the store in `path`, or makes it if it does not exist.
    ///
    /// # Errors
    /// [`StoreError::Backend`] if it is in use, damaged, or cannot be read.
    pub fn open(path: &Path, options: DiskOptions) -> Result<Self, StoreError> {
        std::fs::create_dir_all(path).map_err(|e| backend("make the directory", e))?;
        let opened = |e: io::Error| backend("open", e);
        if path.join("conf").exists() && !path.join(checkpoint::FILE_NAME).exists() {
            let what = "meta/ is of an older version, which kept metadata on sled; serve it with that, or format a new pool";
            return Err(backend("open", what));
        }
        let space = Arc::new(Space::open(path, options.reserve_bytes).map_err(opened)?);
        Self::open_with(path, options, space)
    }

    fn open_with(path: &Path, options: DiskOptions, space: Arc<Space>) -> Result<Self, StoreError> {
        let opened = |e: io::Error| backend("open", e);
        let mut checkpoint = Checkpoint::open(path, options.cache_bytes, space.clone())?;
        let mut base = checkpoint.snapshot()?;
        let spare = Spare::new(&base.tally);
        if spare.is_to_move_at_start(options.give_back_least_bytes, &space, path)
            && let Some(moved) = checkpoint.moved(&base, &space)?
        {
            (base, checkpoint) = (moved.snapshot()?, moved);
        }
        let applied = base.applied;
        let shared = Shared {
            checkpoint: RwLock::new(Arc::new(checkpoint)),
            spare: Mutex::new(spare),
            layers: RwLock::new(Layers { active: Arc::default(), frozen: None, base: Arc::new(base) }),
            last: Mutex::new(Last {
                batch: applied,
                tail: Tail::open(
                    path,
                    space.clone(),
                    (options.checkpoint_bytes / FILLS_PER_CHECKPOINT).clamp(512, FILL_MOST_BYTES),
                )
                .map_err(opened)?,
                direct: Direct::new(options.direct_bytes),
                is_wanted: false,
            }),
            turned: Condvar::new(),
            syncing: Mutex::new(()),
            flushed: Flushed::open(path).map_err(opened)?,
            space,
            checkpoint_bytes: options.checkpoint_bytes,
            cache_bytes: options.cache_bytes,
            path: path.to_path_buf(),
            committed: AtomicU64::new(applied),
            persistent: AtomicU64::new(applied),
            settled: AtomicU64::new(applied),
            poisoned: AtomicBool::new(false),
        };
        let frozen = shared.redo()?;
        // Makes the names of the files durable, and the directory's own.
        let sync = |path: &Path| File::open(path).and_then(|directory| directory.sync_all());
        sync(path).map_err(|e| backend("sync the directory", e))?;
        if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            sync(parent).map_err(|e| backend("sync the pool directory", e))?;
        }
        let shared = Arc::new(shared);
        let worker = shared.clone();
        let thread = std::thread::Builder::new().name("checkpoint".into()).spawn(move || worker.run(frozen));
        Ok(Self { shared, thread: Some(thread.map_err(|e| backend("start a thread", e))?) })
    }
}

#[cfg(test)]
impl DiskStore {
    /// Like `open`; a test is told of each sync from the beginning.
    pub fn open_observed(
        path: &Path,
        options: DiskOptions,
        observer: space::SyncObserver,
    ) -> Result<Self, StoreError> {
        let space = Space::open(path, options.reserve_bytes).expect("opens");
        space.observe(observer);
        Self::open_with(path, options, Arc::new(space))
    }

    /// Tells a test of each sync from now on.
    pub fn observe_syncs(&self, observer: space::SyncObserver) {
        self.shared.space.observe(observer);
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        self.shared.space.close();
        // Under the lock, so that the thread does not miss it between its check and its sleep.
        drop(self.shared.last.lock());
        self.shared.turned.notify_all();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the checkpoint's thread panicked");
        }
    }
}

impl Shared {
    fn check(&self) -> Result<(), StoreError> {
        if self.poisoned.load(Ordering::Relaxed) { Err(StoreError::Poisoned) } else { Ok(()) }
    }

    fn poison(&self, error: StoreError) -> StoreError {
        if !matches!(error, StoreError::Full) {
            self.poisoned.store(true, Ordering::Relaxed);
        }
        error
    }

    fn checkpoint(&self) -> Arc<Checkpoint> {
        self.checkpoint.read().clone()
    }

    fn layers(&self) -> Layers {
        self.layers.read().clone()
    }

    /// Applies the batches of the log that the checkpoint does not have. Returns the parts of the checkpoint that the server before was making.
    fn redo(&self) -> Result<Option<Frozen>, StoreError> {
        let mut last = self.last.lock();
        let mut layers = self.layers.write();
        let began = Instant::now();
        let replay = replay::read(&self.path, last.batch).map_err(|e| backend("read the log", e))?;
        last.batch = replay.last;
        if replay.batches > 0 {
            tracing::info!(
                batches = replay.batches,
                bytes = replay.bytes,
                ms = began.elapsed().as_millis(),
                "metadata: read what the log has and the checkpoint has not"
            );
        }
        let durable = self.flushed.batch();
        if last.batch < durable {
            let what = format!(
                "batch {durable} was durable and the last one found is {}: meta/ is damaged; restore the pool from a copy, or \
                 move meta/flushed away to go on without what is missing",
                last.batch
            );
            return Err(backend("open", what));
        }
        let mut frozen = None;
        if let Some(left) = replay.left {
            last.tail.go_on(left);
            layers.active = Arc::new(replay.active);
            frozen = replay.frozen.map(|(frozen, batch)| (Arc::new(frozen), layers.base.clone(), batch));
            layers.frozen = frozen.as_ref().map(|(frozen, ..)| frozen.clone());
            for (name, file) in last.tail.begin_sync() {
                self.space.sync(name, &file).map_err(|e| backend("sync the log", e))?;
            }
        } else {
            if !replay.active.is_empty() {
                self.checkpoint().write(&replay.active, last.batch, &layers.base.tally)?;
                layers.base = Arc::new(self.checkpoint().snapshot()?);
                *self.spare.lock() = Spare::new(&layers.base.tally);
            }
            last.tail.begin().map_err(|e| backend("empty the log", e))?;
        }
        self.spare.lock().tell(&self.space, &self.path);
        self.committed.store(last.batch, Ordering::Release);
        self.note_settled(last.batch)?;
        Ok(frozen)
    }

    /// Most space that an overlay's checkpoint takes: all pages that it changes are written anew before the old ones can be used again.
    fn checkpoint_cost(base: &Tally, overlay: &Overlay) -> u64 {
        let leaves = overlay.len() + overlay.extents();
        let pages = (leaves * RECORD_PAGES_BYTES).min(TREE_PER_RECORD_BYTES * base.bytes());
        pages + TREE_PER_RECORD_BYTES * overlay.bytes()
    }

    /// Space that the active overlay's checkpoint and its log may take: half of the space left beside the checkpoint under way, so that the next one
    /// still finds some; and half of the reserve if none is left, for operations that remove records.
    fn overlay_most_bytes(&self, layers: &Layers) -> u64 {
        let under_way =
            layers.frozen.as_ref().map_or(0, |frozen| Self::checkpoint_cost(&layers.base.tally, frozen));
        let left = self.space.room_bytes().saturating_sub(under_way);
        (left.max(self.space.reserve_bytes().0) / 2).max(CHECKPOINT_LEAST_BYTES)
    }

    /// Whether the active overlay has so many bytes in memory, or so many in the log, or takes one in `part` of the space that it may take.
    fn has_grown(&self, last: &Last, memory_bytes: u64, log_bytes: u64, part: u64) -> bool {
        let layers = self.layers();
        let (active, log) = (&layers.active, last.tail.current_bytes());
        active.bytes() >= memory_bytes
            || log >= log_bytes
            || Self::checkpoint_cost(&layers.base.tally, active) + log
                >= self.overlay_most_bytes(&layers) / part
    }

    /// Whether commits must wait for the checkpoint under way.
    fn is_full(&self, last: &Last) -> bool {
        self.has_grown(last, OVERLAY_MAX_BYTES, OVERLAY_MAX_BYTES, 1)
    }

    /// Whether a checkpoint begins as soon as none is under way.
    fn is_due(&self, last: &Last) -> bool {
        self.has_grown(last, self.checkpoint_bytes, self.checkpoint_bytes.saturating_mul(LOG_PER_MEMORY), 2)
            || self.layers().active.removed() >= REMOVED_MOST
    }

    fn commit(&self, batch: Batch) -> Result<(), StoreError> {
        let mut last = self.last.lock();
        while self.is_full(&last) {
            if self.space.is_stuck() {
                return Err(StoreError::Full);
            }
            self.check()?;
            self.turned.notify_all();
            self.turned.wait_for(&mut last, IDLE_WAIT);
        }
        let bytes = logged::encode(last.batch + 1, &batch);
        let appended = last.tail.append(&bytes, self.persistent.load(Ordering::Acquire));
        let record = appended.map_err(|e| match e.kind() {
            io::ErrorKind::StorageFull => StoreError::Full,
            _ => backend("commit", e),
        })?;
        last.batch += 1;
        let batch_number = last.batch;
        last.direct.keep(batch_number, record);
        let active = self.layers.read().active.clone();
        active.put(batch);
        self.committed.store(last.batch, Ordering::Release);
        if self.is_due(&last) {
            self.turned.notify_all();
        }
        Ok(())
    }

    /// The checkpoint's thread. The first checkpoint may have begun before the store was opened.
    fn run(&self, mut begun: Option<Frozen>) {
        let ended = loop {
            match begun.take().map_or_else(|| self.freeze(), |begun| Ok(Some(begun))) {
                Ok(Some((frozen, base, batch))) => {
                    if let Err(error) = self.make_checkpoint(&frozen, base, batch) {
                        break Err(error);
                    }
                }
                ended => break ended.map(drop),
            }
        };
        if let Err(error) = ended {
            if !self.space.is_closing() {
                tracing::error!(%error, "metadata: a checkpoint failed; check the disk of meta/, then restart the server");
            }
            self.poison(error);
            self.turned.notify_all();
        }
    }

    /// Waits until a checkpoint is due, and begins it; `None` once the store is closed.
    fn freeze(&self) -> Result<Option<Frozen>, StoreError> {
        let mut last = self.last.lock();
        loop {
            if self.space.is_closing() || self.poisoned.load(Ordering::Relaxed) {
                return Ok(None);
            }
            self.space.refill();
            if self.is_due(&last) || std::mem::take(&mut last.is_wanted) {
                let mut layers = self.layers.write();
                let frozen = std::mem::take(&mut layers.active);
                layers.frozen = Some(frozen.clone());
                last.tail.turn();
                return Ok(Some((frozen, layers.base.clone(), last.batch)));
            }
            let applied = self.layers.read().base.applied;
            if self.spare.lock().is_wanted(&self.space, applied) {
                MutexGuard::unlocked(&mut last, || self.count_spare(applied))?;
                continue;
            }
            let waited = self.turned.wait_for(&mut last, IDLE_WAIT);
            // Removed records leave room only once they are in a checkpoint.
            last.is_wanted |=
                waited.timed_out() && self.space.is_short() && !self.layers.read().active.is_empty();
        }
    }

    fn make_checkpoint(&self, frozen: &Overlay, base: Arc<Snapshot>, batch: u64) -> Result<(), StoreError> {
        self.checkpoint().write(frozen, batch, &base.tally)?;
        let cost_bytes = Self::checkpoint_cost(&base.tally, frozen);
        drop(base);
        let base = Arc::new(self.checkpoint().snapshot()?);
        self.spare.lock().grow(cost_bytes, &base.tally);
        self.note_settled(batch)?;
        {
            let mut layers = self.layers.write();
            layers.frozen = None;
            layers.base = base;
        }
        // Before the waiting commits go on: by the bound of the used space alone they would be refused.
        self.count_spare(batch)?;
        let mut last = self.last.lock();
        last.tail.give_up_the_other().map_err(|e| backend("empty the log", e))?;
        self.turned.notify_all();
        Ok(())
    }

    /// Tells `Space` how much of the file of records is spare; counts it if that matters. Makes a file that is mostly empty smaller.
    fn count_spare(&self, applied: u64) -> Result<(), StoreError> {
        let mut spare = self.spare.lock();
        if spare.is_wanted(&self.space, applied) {
            spare.count(&self.checkpoint(), applied)?;
            let base = self.layers.read().base.clone();
            // Nobody writes to it: only the thread that makes checkpoints comes here, and a recount waits for `spare`.
            if spare.is_to_move(&self.space, &self.path)
                && let Some(moved) = self.checkpoint().moved(&base, &self.space)?
            {
                self.layers.write().base = Arc::new(moved.snapshot()?);
                *self.checkpoint.write() = Arc::new(moved);
            }
        }
        spare.tell(&self.space, &self.path);
        Ok(())
    }

    /// Puts all committed batches into a checkpoint, if there is space for it.
    fn settle(&self) -> Result<(), StoreError> {
        let mut last = self.last.lock();
        loop {
            let layers = self.layers();
            if self.space.is_stuck() {
                return Ok(());
            }
            if layers.active.is_empty() && layers.frozen.is_none() {
                // So the next start reads nothing of the log.
                return last.tail.give_back().map_err(|e| backend("empty the log", e));
            }
            self.check()?;
            last.is_wanted = !layers.active.is_empty();
            self.turned.notify_all();
            self.turned.wait_for(&mut last, IDLE_WAIT);
        }
    }

    /// Makes a checkpoint of all batches, and computes its totals anew. The log keeps its batches, which are skipped at a start.
    fn recount(&self) -> Result<(), StoreError> {
        // The checkpoint's thread begins none without this lock.
        let mut last = self.last.lock();
        while self.layers.read().frozen.is_some() {
            self.check()?;
            self.turned.wait_for(&mut last, IDLE_WAIT);
        }
        let mut spare = self.spare.lock();
        let layers = self.layers();
        self.checkpoint().write(&layers.active, last.batch, &layers.base.tally)?;
        self.checkpoint().recount()?;
        let base = Arc::new(self.checkpoint().snapshot()?);
        *spare = Spare::new(&base.tally);
        *self.layers.write() = Layers { active: Arc::default(), frozen: None, base };
        self.note_settled(last.batch)
    }

    /// Bytes of the file of records and of the log on the disk.
    fn all_bytes(&self) -> u64 {
        let last = self.last.lock();
        checkpoint::file_bytes(&self.path) + last.tail.len_bytes() + last.direct.len_bytes()
    }
}

impl Store for DiskStore {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        self.shared.layers().get(key)
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
        self.shared.layers().scan(from, to, direction, visit)
    }

    fn commit(&self, batch: Batch) -> Result<(), StoreError> {
        self.shared.check()?;
        self.shared.commit(batch).map_err(|error| self.shared.poison(error))
    }

    fn flush(&self) -> Result<(), StoreError> {
        self.shared.check()?;
        self.shared.sync_log().map_err(|error| self.shared.poison(error))
    }

    fn prepare_sync(&self) {
        self.shared.prepare_sync();
    }

    fn begin_sync(&self) -> Result<SyncStep, StoreError> {
        self.shared.check()?;
        Ok(self.shared.begin_sync())
    }

    fn end_sync(&self, sync: DirectSync, written: io::Result<()>) -> Result<bool, StoreError> {
        self.shared.end_sync(sync, written).map_err(|error| self.shared.poison(error))
    }

    fn is_durable(&self) -> bool {
        self.shared.persistent.load(Ordering::Acquire) >= self.shared.committed.load(Ordering::Acquire)
    }

    fn count(&self, kind: u8) -> Result<u64, StoreError> {
        self.shared.layers().count(kind)
    }

    fn pages(&self, visit: PartVisitor<'_>) -> Result<u64, StoreError> {
        self.shared.layers().pages(visit)
    }

    fn settle(&self) -> Result<(), StoreError> {
        self.shared.settle()
    }

    fn recount(&self) -> Result<(), StoreError> {
        self.shared.check()?;
        self.shared.recount().map_err(|error| self.shared.poison(error))
    }

    fn room_bytes(&self) -> u64 {
        self.shared.space.room_bytes()
    }

    fn takes_contents(&self) -> bool {
        let layers = self.shared.layers();
        let of_all = |bytes: fn(&Overlay) -> u64| -> u64 {
            [Some(&layers.active), layers.frozen.as_ref()]
                .into_iter()
                .flatten()
                .map(|layer| bytes(layer))
                .sum()
        };
        of_all(Overlay::image_bytes) < CONTENTS_MOST_BYTES
            && of_all(Overlay::bytes) < OVERLAY_MAX_BYTES / 2
            && !self.shared.space.is_short()
    }

    fn figures(&self) -> StoreFigures {
        let shared = &self.shared;
        let layers = shared.layers();
        let (reserve_bound, reserve) = shared.space.reserve_bytes();
        StoreFigures {
            disk: shared.all_bytes(),
            room: shared.space.room_bytes(),
            reserve,
            reserve_bound,
            since_checkpoint: layers.active.bytes() + layers.frozen.map_or(0, |frozen| frozen.bytes()),
            since_checkpoint_bound: OVERLAY_MAX_BYTES,
            cache_bound: shared.cache_bytes,
        }
    }

    fn size_on_disk_bytes(&self) -> Result<u64, StoreError> {
        Ok(self.shared.all_bytes())
    }
}
