//! The façade: it orders the changes of metadata, and has the live inodes beside them.
//!
//! One mutex orders mutations: apply, commit, settle. Readers do not take it. Everything may be called from any thread. `flush` blocks on the device;
//! the other functions use memory only (and read the store on disk if its cache misses).

use super::answer::Answer;
use super::apply::apply;
use super::climbs::Climbs;
use super::error::MetaError;
use super::key;
use super::live::{Live, LiveInodes, SettleKind};
use super::name::HashKey;
use super::operation::{ApplyContext, Caller, Operation, Outcome};
use super::record::{self, CounterRecord, FORMAT_VERSION, InodeRecord, ScrubRecord, SlotRecord, SuperRecord};
use super::store::{Batch, DirectSync, Store, StoreError, StoreFigures, SyncStep};
use super::view::View;
use super::written::{CHANGES_PER_START_BITS, Written};
use crate::pool::BlockWrite;
use crate::sync::Mutex;
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::attr::{FileKind, InodeFlags};
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE_U64};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::Clock;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Inode numbers that are reserved at a time. A number is used only below a durable bound, and the bound is raised in the batch of a create when half
/// of the block is left. So with a flush a second the bound keeps ahead of 30 thousand creates a second, and faster creates pay one flush for each
/// block. A crash skips at most two blocks of 2^64 numbers.
const INO_BLOCK: u64 = 1 << 16;
/// About the bytes that an inode with its name takes on the store's device, for `df`.
const INODE_BYTES: u64 = 1024;
/// The most free inodes that are reported, for programs that add such figures up.
const ROOM_INODES_MAX: u64 = 1 << 40;

/// The parameters of a new store.
#[derive(Clone, Copy, Debug)]
pub struct Format {
    /// The pool's identity.
    pub uuid: [u8; 16],
    /// Secret key of the name hash, drawn from the system's random numbers.
    pub hash_key: HashKey,
    /// Owner of the root directory.
    pub root: Caller,
    /// Permission bits of the root directory.
    pub root_mode: u16,
}

/// State that only the holder of the writer's mutex changes.
#[derive(Debug)]
pub(super) struct Writer {
    /// The next inode number to give out.
    next_ino: u64,
}

/// What must be done to make everything so far durable.
#[derive(Debug)]
pub enum FlushStep {
    /// Nothing.
    Nothing,
    /// Do this write, and call `end_flush` once it is durable.
    Write(DirectFlush, BlockWrite),
    /// Call `flush`, which blocks.
    Block,
}

/// A flush by a direct write.
#[derive(Debug)]
pub struct DirectFlush {
    sync: DirectSync,
    /// The bound of reserved inode numbers that it makes durable.
    reserved: u64,
}

impl DirectFlush {
    /// Whether a caller that can block should `flush` soon.
    pub fn is_flush_due(&self) -> bool {
        self.sync.is_flush_due
    }
}

/// The metadata of a pool.
pub struct Meta {
    pub(super) store: Arc<dyn Store>,
    pub(super) hash_key: HashKey,
    pub(super) live: Arc<LiveInodes>,
    pub(super) clock: Arc<dyn Clock>,
    uuid: [u8; 16],
    clean_predecessor: Option<u64>,
    pub(super) change_floor: u64,
    pub(super) writer: Mutex<Writer>,
    /// Bound of reserved inode numbers in the store. Written under the writer's mutex, after the commit; read by `flush` before it syncs the store.
    /// Release and acquire: a bound that is read was committed.
    reserved: AtomicU64,
    /// Bound of reserved inode numbers that is durable. Only ever raised (`fetch_max`). Release and acquire as above, with the flush in between.
    durable_reserved: AtomicU64,
    pub(super) orphans: Mutex<BTreeSet<InodeNo>>,
    pub(super) climbs: Climbs,
    /// The number of inodes, for status; relaxed.
    inodes: AtomicU64,
    /// Store failures and records that did not parse; relaxed.
    damage: AtomicU64,
}

impl std::fmt::Debug for Meta {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Meta").field("reserved", &self.reserved).field("inodes", &self.inodes).finish()
    }
}

fn counter(store: &dyn Store, key: &[u8]) -> Result<Option<u64>, MetaError> {
    let Some(value) = store.get(key)? else {
        return Ok(None);
    };
    let CounterRecord(number) = record::parse(&value).map_err(MetaError::record(key))?;
    Ok(Some(number))
}

fn superblock(store: &dyn Store) -> Result<SuperRecord, MetaError> {
    let value = store.get(key::SUPERBLOCK)?.ok_or(MetaError::NotFormatted)?;
    let superblock: SuperRecord = record::parse(&value).map_err(MetaError::record(key::SUPERBLOCK))?;
    if superblock.format_version != FORMAT_VERSION {
        return Err(MetaError::Format { found: superblock.format_version, expected: FORMAT_VERSION });
    }
    Ok(superblock)
}

impl Meta {
    /// Makes an empty file system in an empty store, durably.
    ///
    /// # Errors
    /// [`MetaError::AlreadyFormatted`], or the store's.
    pub fn format(store: &dyn Store, clock: &dyn Clock, format: &Format) -> Result<(), MetaError> {
        if store.get(key::SUPERBLOCK)?.is_some() {
            return Err(MetaError::AlreadyFormatted);
        }
        let now = clock.now();
        let root = InodeRecord {
            kind: FileKind::Directory,
            mode: format.root_mode & 0o7777,
            nlink: 2,
            uid: format.root.uid,
            gid: format.root.gid,
            rdev: 0,
            size: PAGE_SIZE_U64,
            allocated_pages: 0,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            change: 1,
            parent: InodeNo::ROOT,
            xattrs: 0,
            flags: InodeFlags::default(),
            written: Written::default(),
            name_lost: 0,
        };
        let superblock = SuperRecord {
            format_version: FORMAT_VERSION,
            uuid: format.uuid,
            hash_key: format.hash_key,
            created: now,
        };
        let mut batch = Batch::default();
        batch.put(key::SUPERBLOCK, record::encode(&superblock));
        batch.put(key::NEXT_INO, record::encode(&CounterRecord(InodeNo::ROOT.0 + 1)));
        batch.put(key::STARTS, record::encode(&CounterRecord(0)));
        batch.put(key::inode(InodeNo::ROOT), record::encode(&root));
        store.commit(batch)?;
        store.flush()?;
        Ok(())
    }

    /// The identity of a store's pool, and the key of its name hash.
    ///
    /// # Errors
    /// [`MetaError`].
    pub fn identity(store: &dyn Store) -> Result<([u8; 16], HashKey), MetaError> {
        let superblock = superblock(store)?;
        Ok((superblock.uuid, superblock.hash_key))
    }

    /// Opens a formatted store: finishes cuts that the server before this one had begun, and collects orphans.
    ///
    /// # Errors
    /// [`MetaError`].
    pub fn open(store: Arc<dyn Store>, clock: Arc<dyn Clock>) -> Result<Self, MetaError> {
        let superblock = superblock(&*store)?;
        let next_ino = counter(&*store, key::NEXT_INO)?.ok_or(MetaError::NotFormatted)?;
        let starts = counter(&*store, key::STARTS)?.ok_or(MetaError::NotFormatted)? + 1;
        let mut batch = Batch::default();
        batch.put(key::NEXT_INO, record::encode(&CounterRecord(next_ino + INO_BLOCK)));
        batch.put(key::STARTS, record::encode(&CounterRecord(starts)));
        let clean_predecessor = counter(&*store, key::CLEAN)?;
        // A later clean stop must put it again.
        batch.remove(key::CLEAN);
        store.commit(batch)?;
        store.flush()?;
        let meta = Self {
            hash_key: superblock.hash_key,
            live: Arc::default(),
            clock,
            uuid: superblock.uuid,
            clean_predecessor,
            change_floor: starts << CHANGES_PER_START_BITS,
            writer: Mutex::new(Writer { next_ino }),
            reserved: AtomicU64::new(next_ino + INO_BLOCK),
            durable_reserved: AtomicU64::new(next_ino + INO_BLOCK),
            orphans: Mutex::new(BTreeSet::new()),
            climbs: Climbs::default(),
            inodes: AtomicU64::new(0),
            damage: AtomicU64::new(0),
            store,
        };
        meta.finish_cuts()?;
        *meta.orphans.lock() = meta.all_inos(key::tag::ORPHAN)?.into_iter().collect();
        meta.inodes.store(meta.store.count(key::tag::INODE)?, Ordering::Relaxed);
        Ok(meta)
    }

    pub(super) fn all_inos(&self, tag: u8) -> Result<Vec<InodeNo>, MetaError> {
        let keys = self.stored().keys(&key::all(tag))?;
        let parse = |key: Vec<u8>| {
            key::parse_ino(&key).ok_or_else(|| MetaError::record(&key)(record::RecordError::Malformed))
        };
        keys.into_iter().map(parse).collect()
    }

    /// The stored metadata, without live inodes.
    pub(super) fn stored(&self) -> View<'_> {
        View::of_store(&*self.store, self.hash_key)
    }

    /// Turns an error into a status. Damage is logged and counted here, and nowhere else.
    pub(super) fn fail(&self, operation: &'static str, error: MetaError) -> Status {
        let advice = match &error {
            MetaError::Refused(status) => return *status,
            MetaError::Store(StoreError::Full) => return Status::NoSpace,
            MetaError::Store(_) => "check the pool's device and its free space, then restart the server",
            _ => "stop the server, copy meta/ away, and restore it from a backup; other files are unharmed",
        };
        self.damage.fetch_add(1, Ordering::Relaxed);
        tracing::error!(operation, %error, advice, "metadata failed");
        Status::Io
    }

    /// The pool's identity.
    pub fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// The pool's secret.
    pub fn hash_key(&self) -> HashKey {
        self.hash_key
    }

    /// The epoch of the server before this one, if it stopped with nothing left to write back.
    pub fn clean_predecessor(&self) -> Option<u64> {
        self.clean_predecessor
    }

    /// The number of inodes, with orphans.
    pub fn inode_count(&self) -> u64 {
        self.inodes.load(Ordering::Relaxed)
    }

    /// Figures of the store.
    pub fn store_figures(&self) -> StoreFigures {
        self.store.figures()
    }

    /// Whether more records may be put: names, inodes, attributes, extents. Removals need no room.
    pub fn has_room(&self) -> bool {
        self.store.room_bytes() > 0
    }

    /// Whether images of pages may be put into the store now.
    pub fn takes_images(&self) -> bool {
        self.store.takes_contents()
    }

    /// About the number of inodes for which there is room.
    pub fn room_inodes(&self) -> u64 {
        (self.store.room_bytes() / INODE_BYTES).min(ROOM_INODES_MAX)
    }

    /// The number of inodes with data that is not durable.
    pub fn live_count(&self) -> usize {
        self.live.len()
    }

    /// Failures of the store and damaged records since the start.
    pub fn damage_count(&self) -> u64 {
        self.damage.load(Ordering::Relaxed)
    }

    /// Does an operation as one batch, which is visible when this returns, and durable with the next `flush`.
    ///
    /// `is_open` says whether an inode that loses its last name must be kept. It is called under the writer's mutex, so it must not call back here. A
    /// caller that opens a file registers that *before* it reads the file's attributes, so that the file is either seen as open or found to be gone.
    ///
    /// # Errors
    /// As POSIX says; `Io` if the metadata cannot be read or written.
    pub fn execute(
        &self,
        caller: Caller,
        operation: &Operation<'_>,
        is_open: &dyn Fn(InodeNo) -> bool,
    ) -> Result<Outcome, Status> {
        let mut writer = self.writer.lock();
        self.execute_locked(&mut writer, caller, operation, is_open)
            .map_err(|e| self.fail(name_of(operation), e))
    }

    /// Like `execute`, if `judge` allows the operation. `judge` sees the metadata on which the operation is done: no other change comes in between.
    /// If it returns another operation, that is done instead. It is called under the writer's mutex: it may look things up here (`attr`, `lookup`),
    /// and must not call functions that take that mutex.
    ///
    /// # Errors
    /// The errors of `execute`, and those of `judge`.
    pub fn execute_judged<'o>(
        &self,
        caller: Caller,
        operation: &Operation<'o>,
        is_open: &dyn Fn(InodeNo) -> bool,
        judge: &dyn Fn(&Operation<'o>) -> Result<Option<Operation<'o>>, Status>,
    ) -> Result<Outcome, Status> {
        let mut writer = self.writer.lock();
        let instead = judge(operation)?;
        let operation = instead.as_ref().unwrap_or(operation);
        self.execute_locked(&mut writer, caller, operation, is_open)
            .map_err(|e| self.fail(name_of(operation), e))
    }

    pub(super) fn execute_locked(
        &self,
        writer: &mut Writer,
        caller: Caller,
        operation: &Operation<'_>,
        is_open: &dyn Fn(InodeNo) -> bool,
    ) -> Result<Outcome, MetaError> {
        if operation.makes_inode() {
            self.ensure_number(writer)?;
        }
        let looked = RefCell::default();
        let outcome = match operation {
            // It writes times and counters of notes, and has none of its own.
            Operation::CommitData { .. } => {
                self.execute_on(writer, caller, operation, is_open, &|ino| self.live.get(ino))
            }
            _ => self.execute_on(writer, caller, operation, is_open, &|ino| self.live.look(ino, &looked)),
        };
        self.live.end_batch(&looked.into_inner());
        outcome
    }

    fn execute_on(
        &self,
        writer: &mut Writer,
        caller: Caller,
        operation: &Operation<'_>,
        is_open: &dyn Fn(InodeNo) -> bool,
        live: &dyn Fn(InodeNo) -> Option<Live>,
    ) -> Result<Outcome, MetaError> {
        let context = ApplyContext {
            now: self.clock.now(),
            caller,
            new_ino: InodeNo(writer.next_ino),
            change_floor: self.change_floor,
            is_open,
            climbs: &self.climbs,
        };
        let changed = |ino| live(ino).map(|live| live.writable());
        let view = View::new(&*self.store, self.hash_key, &changed);
        let mut applied = apply(&view, operation, &context)?;
        if adds(operation, &applied.outcome) && !self.has_room() {
            return Err(Status::NoSpace.into());
        }
        let kind = match operation {
            Operation::CommitData { .. } => SettleKind::DataCommit,
            Operation::SetAttr { set: SetAttr { size: Some(size), .. }, .. } => SettleKind::Truncation(*size),
            _ => SettleKind::Other,
        };
        if let Some(attr) = &mut applied.outcome.attr
            && let Some(mut live) = live(attr.ino)
        {
            if let Some(Some(record)) = applied.inodes.get(&attr.ino) {
                live.settle(record, kind);
            }
            *attr = live.record.attr(attr.ino);
        }
        if let (SettleKind::Truncation(size), Some(attr)) = (kind, &mut applied.outcome.attr) {
            attr.size = size;
        }
        if let Some(request) = caller.request
            && !applied.batch.is_empty()
        {
            // In the same batch, so that after a crash the effect and its answer are both there, or neither.
            let answer = Answer::to(operation, applied.outcome.attr, caller.opens);
            let slot = key::client_slot(request.client, request.slot);
            applied.batch.put(slot, record::encode(&SlotRecord { seq: request.seq, answer }));
        }
        let reserve = applied.outcome.created.then(|| self.reserve(writer, &mut applied.batch)).flatten();
        if !applied.batch.is_empty() {
            self.store.commit(applied.batch)?;
        }
        if let Some(bound) = reserve {
            self.reserved.store(bound, Ordering::Release);
        }
        for (ino, record) in &applied.inodes {
            self.live.settle(*ino, record.as_ref(), kind);
            if let (Operation::Rename { .. }, Some(record)) = (operation, record) {
                self.climbs.note(*ino, record);
            }
        }
        self.account(writer, &applied.outcome);
        Ok(applied.outcome)
    }

    fn account(&self, writer: &mut Writer, outcome: &Outcome) {
        if outcome.created {
            writer.next_ino += 1;
            self.inodes.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(ino) = outcome.orphaned {
            self.orphans.lock().insert(ino);
        }
        if let Some(ino) = outcome.named {
            self.orphans.lock().remove(&ino);
        }
        if let Some(ino) = outcome.reaped {
            self.orphans.lock().remove(&ino);
            self.inodes.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Adds a reservation to the batch if half of the block is left. Returns the new bound.
    fn reserve(&self, writer: &Writer, batch: &mut Batch) -> Option<u64> {
        let reserved = self.reserved.load(Ordering::Relaxed);
        if reserved.saturating_sub(writer.next_ino) > INO_BLOCK / 2 {
            return None;
        }
        let bound = reserved.max(writer.next_ino) + INO_BLOCK;
        batch.put(key::NEXT_INO, record::encode(&CounterRecord(bound)));
        Some(bound)
    }

    /// Makes sure that the next inode number is below the durable bound.
    fn ensure_number(&self, writer: &Writer) -> Result<(), MetaError> {
        if writer.next_ino < self.durable_reserved.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut batch = Batch::default();
        if let Some(bound) = self.reserve(writer, &mut batch) {
            self.store.commit(batch)?;
            self.reserved.store(bound, Ordering::Release);
        }
        self.flush_store()
    }

    /// For tests: sets the number of the next new inode.
    #[cfg(test)]
    pub(crate) fn number_next(&self, ino: InodeNo) {
        self.writer.lock().next_ino = ino.0;
    }

    fn flush_store(&self) -> Result<(), MetaError> {
        let reserved = self.reserved.load(Ordering::Acquire);
        self.store.flush()?;
        self.durable_reserved.fetch_max(reserved, Ordering::AcqRel);
        Ok(())
    }

    /// Prepares the files that `begin_flush` needs for writes. Blocks. Called once.
    pub fn prepare_flushes(&self) {
        self.store.prepare_sync();
    }

    /// Begins a flush for a caller that does not want to block. There is one at a time; one that is given up counts for nothing.
    ///
    /// # Errors
    /// As `flush`.
    pub fn begin_flush(&self) -> Result<FlushStep, Status> {
        let reserved = self.reserved.load(Ordering::Acquire);
        Ok(match self.store.begin_sync().map_err(|e| self.fail("flush", e.into()))? {
            SyncStep::Nothing => FlushStep::Nothing,
            SyncStep::Block => FlushStep::Block,
            SyncStep::Write(sync, write) => FlushStep::Write(DirectFlush { sync, reserved }, write),
        })
    }

    /// Ends a flush with the result of its write; `false` if a `flush` is needed after all.
    ///
    /// # Errors
    /// As `flush`.
    pub fn end_flush(&self, flush: &DirectFlush, written: std::io::Result<()>) -> Result<bool, Status> {
        let ended = self.store.end_sync(flush.sync, written).map_err(|e| self.fail("flush", e.into()))?;
        if ended {
            self.durable_reserved.fetch_max(flush.reserved, Ordering::AcqRel);
        }
        Ok(ended)
    }

    /// Blocks until all operations so far are durable.
    ///
    /// # Errors
    /// `Io`; final: the store takes no further batch until the server restarts.
    pub fn flush(&self) -> Result<(), Status> {
        self.flush_store().map_err(|e| self.fail("flush", e))
    }

    /// Whether all operations so far are durable.
    pub fn is_durable(&self) -> bool {
        self.store.is_durable()
    }

    /// The stored state of the scrub; `None` if there is none, or it cannot be read: then the scrub begins anew.
    pub fn scrub(&self) -> Option<ScrubRecord> {
        let read = || match self.store.get(key::SCRUB)? {
            Some(value) => record::parse(&value).map(Some).map_err(MetaError::record(key::SCRUB)),
            None => Ok(None),
        };
        read().unwrap_or_else(|error| {
            self.fail("scrub", error);
            None
        })
    }

    /// Stores the state of the scrub. Durable with the next `flush`.
    ///
    /// # Errors
    /// `Io`.
    pub fn keep_scrub(&self, scrub: &ScrubRecord) -> Result<(), Status> {
        let _writer = self.writer.lock();
        let mut batch = Batch::default();
        batch.put(key::SCRUB, record::encode(scrub));
        self.store.commit(batch).map_err(|e| self.fail("keep_scrub", e.into()))
    }

    /// Gives back the unused part of the reserved inode numbers, and flushes. For a clean stop, when nothing calls any more; later calls work all the
    /// same. `clean`: the server of this epoch has written everything back, which the next server may tell its clients.
    ///
    /// # Errors
    /// `Io`.
    pub fn close(&self, clean: Option<u64>) -> Result<(), Status> {
        let writer = self.writer.lock();
        let mut batch = Batch::default();
        batch.put(key::NEXT_INO, record::encode(&CounterRecord(writer.next_ino)));
        if let Some(epoch) = clean {
            batch.put(key::CLEAN, record::encode(&CounterRecord(epoch)));
        }
        let close = || {
            // Lowered first, so that a later create must reserve again.
            self.durable_reserved.store(writer.next_ino, Ordering::Release);
            self.reserved.store(writer.next_ino, Ordering::Release);
            self.store.commit(batch)?;
            self.flush_store()?;
            if let Err(error) = self.store.settle() {
                tracing::warn!(%error, "the next start will have to read the metadata's log");
            }
            Ok(())
        };
        close().map_err(|e| self.fail("close", e))
    }
}

/// Whether an operation adds records to the store, without bound: such operations are refused while there is no room. A rename adds as many as it
/// removes, except a whiteout. Write-back of data that was accepted must not fail.
fn adds(operation: &Operation<'_>, outcome: &Outcome) -> bool {
    match operation {
        Operation::Make { .. }
        | Operation::CreateNameless { .. }
        | Operation::Link { .. }
        | Operation::SetXattr { .. } => true,
        Operation::Create { .. } | Operation::Rename { .. } => outcome.created,
        Operation::Unlink { .. }
        | Operation::Rmdir { .. }
        | Operation::SetAttr { .. }
        | Operation::DropPrivileges { .. }
        | Operation::RemoveXattr { .. }
        | Operation::CommitData { .. }
        | Operation::ReapOrphan { .. }
        | Operation::PutClient { .. }
        | Operation::EndSession { .. }
        | Operation::RemoveClient { .. } => false,
    }
}

fn name_of(operation: &Operation<'_>) -> &'static str {
    match operation {
        Operation::Make { .. } => "make",
        Operation::Create { .. } => "create",
        Operation::CreateNameless { .. } => "create_nameless",
        Operation::Link { .. } => "link",
        Operation::Unlink { .. } => "unlink",
        Operation::Rmdir { .. } => "rmdir",
        Operation::Rename { .. } => "rename",
        Operation::SetAttr { .. } => "set_attr",
        Operation::SetXattr { .. } => "set_xattr",
        Operation::DropPrivileges { .. } => "drop_privileges",
        Operation::RemoveXattr { .. } => "remove_xattr",
        Operation::CommitData { .. } => "commit_data",
        Operation::ReapOrphan { .. } => "reap",
        Operation::PutClient { .. } => "put_client",
        Operation::EndSession { .. } => "end_session",
        Operation::RemoveClient { .. } => "remove_client",
    }
}
