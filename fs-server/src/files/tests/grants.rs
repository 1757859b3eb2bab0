//! Write grants: a walk of one-sided changes, changes by RPC, evictions, cuts and restarts by two sessions, beside a model that knows bytes, length,
//! space and what is granted; and each rule by itself.

use super::harness::{Storage, allocate_range, defragment_all, write};
use super::records::inode;
use crate::files::free_pages::fill_free_pages;
use crate::files::grants::GrantPages;
use crate::files::one_sided_faults::OneSided;
use crate::files::{
    FileRegion, Grantee, OpenedRegion, WriteAt, Writer, grant_write, return_grant, run_fault, sync, truncate,
    write_back_all, write_granted,
};
use crate::meta::Caller;
use crate::pages::Source;
use cuttlefs_common::attr::{Attr, InodeFlags, SetAttr};
use cuttlefs_common::ids::{FileKey, PAGE_SIZE, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::rdma::{
    FileAtomic, FileRead, FileTarget, FileValue, FileWrite, PeerKey, RegionOwner, WcStatus,
};
use cuttlefs_common::rpc::{Allocate, Rights};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Random, SeededRandom};
use cuttlefs_reference::Contents;
use futures_lite::future::block_on;
use std::sync::Arc;

pub(super) const INO: u64 = 1;
const POOL_PAGES: u64 = 96;
const FRAMES: u64 = 64;
/// No operation reaches past this offset.
const SPAN: u64 = 24 * PAGE_SIZE_U64;
pub(super) const BOTH: Rights = Rights { read: true, write: true };
pub(super) const OWNERS: [RegionOwner; 2] = [RegionOwner(7), RegionOwner(8)];

/// A session with the file open, and what it has been granted, as the model knows it.
pub(super) struct Session {
    pub(super) owner: RegionOwner,
    pub(super) opened: OpenedRegion,
    granted: Vec<(u64, u64)>,
}

impl Session {
    pub(super) fn open(storage: &Storage, owner: RegionOwner) -> Self {
        let opened = storage.files.open(owner, inode(INO), BOTH).expect("opens");
        Self { owner, opened, granted: Vec::new() }
    }

    fn covers(&self, offset: u64, end: u64) -> bool {
        let holds = |byte: u64| self.granted.iter().any(|(start, end)| (*start..*end).contains(&byte));
        (offset..end).all(holds)
    }

    fn lose(&mut self, offset: u64, end: u64) {
        // Nothing is lost where the range is empty, as that of a reservation, which empties no page.
        self.granted.retain(|(start, stop)| offset >= end || !(*start < end && offset < *stop));
    }
}

fn pages_of(storage: &Storage, offset: u64, len: u64) -> Result<GrantPages, Status> {
    let pages = (offset + len).div_ceil(PAGE_SIZE_U64) - offset / PAGE_SIZE_U64;
    storage.files.grants.take(&PeerKey::User(0), true, pages)
}

pub(super) fn grant(storage: &Storage, session: &Session, offset: u64, len: u64) -> Result<Attr, Status> {
    let pages = pages_of(storage, offset, len)?;
    let grantee = Grantee { owner: session.owner, filekey: session.opened.filekey };
    let file = &session.opened.file;
    block_on(grant_write(&storage.files, &storage.disk, file, grantee, (offset, len), pages))
}

fn set_mode(storage: &Storage, mode: u16) {
    let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
    storage.meta.set_attr(Caller::default(), inode(INO), &set, None).expect("set");
}

/// What became of changes: the engine made them, or they were faults. Most of these take a worker, which this world does not have.
#[derive(Default, Debug)]
struct Tally {
    grants: u32,
    engine: [u32; 3],
    faults: [u32; 3],
    refused: u32,
    /// Pages that were moved, with grants or without.
    moved: u32,
}

struct World {
    storage: Storage,
    sessions: Vec<Session>,
    model: Contents,
    random: SeededRandom,
    tally: Tally,
}

impl World {
    fn new(seed: u64) -> Self {
        let storage = Storage::new(POOL_PAGES, FRAMES);
        storage.meta.create(inode(INO));
        let sessions = OWNERS.iter().map(|owner| Session::open(&storage, *owner)).collect();
        let (model, random) = (Contents::default(), SeededRandom::new(seed));
        Self { storage, sessions, model, random, tally: Tally::default() }
    }

    fn below(&self, bound: u64) -> u64 {
        self.random.next_u64() % bound
    }

    fn range(&self) -> (u64, u64) {
        let offset = match self.below(3) {
            0 => self.below(SPAN / PAGE_SIZE_U64) * PAGE_SIZE_U64,
            _ => self.below(SPAN),
        };
        let len = match self.below(3) {
            0 => 1 + self.below(300),
            1 => PAGE_SIZE_U64 * (1 + self.below(4)),
            _ => 1 + self.below(10_000),
        };
        (offset, len.min(SPAN - offset))
    }

    /// In most cases a range that is granted to a session, before the end of the file.
    fn aimed(&self, who: usize) -> (u64, u64) {
        let granted = &self.sessions[who].granted;
        if granted.is_empty() || self.below(4) == 0 {
            return self.range();
        }
        let (start, end) = granted[self.below(granted.len() as u64) as usize];
        let end = end.min(self.model.size());
        if start >= end {
            return self.range();
        }
        let offset = start + self.below(end - start);
        (offset, 1 + self.below((end - offset).min(6000)))
    }

    fn bytes(&self, len: u64) -> Vec<u8> {
        (0..len).map(|_| self.random.next_u64() as u8).collect()
    }

    fn file(&self) -> Arc<FileRegion> {
        self.storage.file(INO)
    }

    /// A one-sided change: `attempt` as the engine makes it, and if it faults `again`. `None`: nothing was changed.
    fn one_sided<T>(
        &mut self,
        kind: usize,
        may: bool,
        attempt: impl FnOnce(&Storage) -> Result<Option<T>, WcStatus>,
        again: impl FnOnce(&Storage) -> Result<T, WcStatus>,
    ) -> Option<T> {
        match attempt(&self.storage) {
            Ok(done) => {
                assert!(may, "it is not granted");
                match done {
                    Some(value) => {
                        self.tally.engine[kind] += 1;
                        Some(value)
                    }
                    None => {
                        self.tally.faults[kind] += 1;
                        match again(&self.storage) {
                            Ok(value) => Some(value),
                            Err(WcStatus::RemoteOperation) => None,
                            Err(other) => panic!("{other:?}"),
                        }
                    }
                }
            }
            Err(WcStatus::RemoteAccess) => {
                assert!(!may, "it is granted");
                self.tally.refused += 1;
                None
            }
            Err(other) => panic!("{other:?}"),
        }
    }

    fn step(&mut self) {
        let (offset, len) = self.range();
        let who = self.below(2) as usize;
        let (owner, key) = (self.sessions[who].owner, self.sessions[who].opened.filekey);
        let size = self.model.size();
        let file = self.file();
        match self.below(27) {
            0..4 => match grant(&self.storage, &self.sessions[who], offset, len) {
                Ok(_) => {
                    self.tally.grants += 1;
                    self.sessions[who].lose(offset, offset + len);
                    self.sessions[who].granted.push((offset, offset + len));
                }
                Err(Status::Busy | Status::NoSpace) => {}
                Err(other) => panic!("{other:?}"),
            },
            4..8 => {
                let (offset, len) = self.aimed(who);
                let may = offset + len <= size && self.sessions[who].covers(offset, offset + len);
                let bytes = self.bytes(len);
                let attempt = |storage: &Storage| {
                    let done = storage.files.write_file(owner, key, offset, &bytes)?;
                    Ok((done == FileWrite::Done).then_some(()))
                };
                let again = |storage: &Storage| storage.files.write_file_faulting(owner, key, offset, &bytes);
                if self.one_sided(0, may, attempt, again).is_some() {
                    self.model.write(offset, &bytes);
                }
            }
            8..12 => {
                let may = !self.sessions[who].granted.is_empty();
                let bytes = self.bytes(len.min(SPAN.saturating_sub(size)).min(6000));
                let attempt = |storage: &Storage| match storage.files.append_file(owner, key, &bytes)? {
                    FileValue::Done(at) => Ok(Some(at)),
                    FileValue::Faults => Ok(None),
                };
                let again = |storage: &Storage| storage.files.append_file_faulting(owner, key, &bytes);
                if let Some(at) = self.one_sided(1, may, attempt, again) {
                    assert_eq!(at, size, "an append is at the end");
                    if !bytes.is_empty() {
                        self.model.write(at, &bytes);
                    }
                }
            }
            12..14 => {
                let offset = self.aimed(who).0 / 8 * 8;
                let may = offset + 8 <= size && self.sessions[who].covers(offset, offset + 8);
                let add = FileAtomic::FetchAdd { add: self.random.next_u64() };
                let attempt = |storage: &Storage| match storage.files.atomic_file(owner, key, offset, add)? {
                    FileValue::Done(old) => Ok(Some(old)),
                    FileValue::Faults => Ok(None),
                };
                let again = |storage: &Storage| storage.files.atomic_file_faulting(owner, key, offset, add);
                if let Some(old) = self.one_sided(2, may, attempt, again) {
                    let known = self.model.read(offset, 8).try_into().expect("eight bytes");
                    assert_eq!(old, u64::from_le_bytes(known));
                    self.model.write(offset, &add.apply(old).to_le_bytes());
                }
            }
            14..16 => {
                let append = self.below(2) == 0;
                let at = if append { WriteAt::End } else { WriteAt::Offset(offset) };
                let place = if append { size } else { offset };
                let bytes = self.bytes(len.min(SPAN.saturating_sub(place)));
                let (files, disk) = (&self.storage.files, &self.storage.disk);
                match block_on(write(files, disk, &file, at, Source::Bytes(&bytes))) {
                    Ok(_) if bytes.is_empty() => {}
                    Ok(_) => self.model.write(place, &bytes),
                    Err(Status::NoSpace) => {}
                    Err(other) => panic!("{other:?}"),
                }
            }
            16 => {
                let commit = |commit| {
                    self.storage.meta.commit_data(&[commit])?;
                    self.storage.meta.attr(inode(INO))
                };
                let (files, disk) = (&self.storage.files, &self.storage.disk);
                block_on(truncate(files, disk, &file, offset, commit)).expect("truncates");
                if offset < size {
                    self.sessions.iter_mut().for_each(|session| session.lose(offset, u64::MAX));
                }
                self.model.truncate(offset);
            }
            17 => {
                let how = [
                    Allocate::PunchHole,
                    Allocate::ZeroRange { keep_size: true },
                    Allocate::Reserve { keep_size: true },
                ][self.below(3) as usize];
                let (files, disk) = (&self.storage.files, &self.storage.disk);
                match block_on(allocate_range(files, disk, &file, offset, len, how)) {
                    Ok(_) => {
                        let end = offset + len;
                        let end = match how {
                            Allocate::PunchHole if end >= size => end.next_multiple_of(PAGE_SIZE_U64),
                            Allocate::Reserve { .. } => offset,
                            _ => end,
                        };
                        self.sessions.iter_mut().for_each(|session| session.lose(offset, end));
                        self.model.allocate(offset, len, how);
                    }
                    Err(Status::NoSpace) => {}
                    Err(other) => panic!("{other:?}"),
                }
            }
            18 => {
                block_on(self.storage.pages.evict(&self.storage.disk, 1 + self.below(FRAMES) as u32));
            }
            19 => block_on(write_back_all(&self.storage.files, &self.storage.disk)).expect("durable"),
            20 => block_on(sync(&self.storage.files, &self.storage.disk, &file)).expect("durable"),
            21 => {
                block_on(return_grant(&file, key, offset, len));
                self.sessions[who].lose(offset, offset + len);
            }
            22 => {
                drop(file);
                self.storage.files.close(owner, key).expect("closes");
                self.sessions[who] = Session::open(&self.storage, owner);
                assert_eq!(self.storage.files.write_file(owner, key, 0, b""), Err(WcStatus::RemoteAccess));
            }
            23 => block_on(fill_free_pages(&self.storage.files, &self.storage.disk)),
            24..26 => match block_on(defragment_all(&self.storage.files, &self.storage.disk, &file)) {
                Ok(pages) => self.tally.moved += pages as u32,
                Err(Status::NoSpace) => {}
                Err(other) => panic!("{other:?}"),
            },
            _ => {
                drop(file);
                block_on(write_back_all(&self.storage.files, &self.storage.disk)).expect("durable");
                self.sessions.clear();
                self.storage = self.storage.restart(self.storage.meta.crash(0));
                self.sessions = OWNERS.iter().map(|owner| Session::open(&self.storage, *owner)).collect();
            }
        }
    }

    fn check(&self) {
        self.storage.check();
        let file = self.file();
        assert_eq!(file.size(), self.model.size());
        assert_eq!(file.allocated_pages(), self.model.pages.len() as u64);
        assert_eq!(file.state().table.translation.bound(), self.sessions.len(), "each filekey is translated");
        let read = self.storage.read(&file, 0, SPAN as usize + 100).expect("reads");
        let wrong = read.iter().zip(&self.model.bytes).position(|(got, known)| got != known);
        assert_eq!((read.len() as u64, wrong), (self.model.size(), None));
        for session in &self.sessions {
            for (start, end) in &session.granted {
                let end = (*end).min(file.size());
                // Pages that the file got from others since the grant may be on SSD.
                let len = end.saturating_sub(*start);
                assert!(file.grants.lock().cover(session.opened.filekey, *start, *start + len));
            }
        }
    }
}

#[test]
fn one_sided_changes_are_as_a_model_knows_them() {
    let mut total = Tally::default();
    for seed in 0..10 {
        let mut world = World::new(seed);
        for step in 0..200 {
            // Shown if the step fails.
            println!("seed {seed}, step {step}");
            world.step();
            world.check();
        }
        let Tally { grants, engine, faults, refused, moved } = world.tally;
        total.grants += grants;
        total.refused += refused;
        total.moved += moved;
        (0..3).for_each(|kind| {
            total.engine[kind] += engine[kind];
            total.faults[kind] += faults[kind];
        });
    }
    // The walks are the same each time. An append beyond its grant finds the queue empty most times; a granted range has all that a change of it takes.
    let counts = [total.grants, total.refused, total.faults[1], total.moved];
    assert!(total.engine.iter().chain(&counts).all(|count| *count >= 20), "a step hardly came: {total:?}");
    assert_eq!((total.faults[0], total.faults[2]), (0, 0));
}

/// A file of three pages of which the middle one is a hole, written back.
fn sparse() -> (Storage, Session) {
    let storage = Storage::new(POOL_PAGES, FRAMES);
    storage.meta.create(inode(INO));
    let file = storage.file(INO);
    for page in [0, 2] {
        let at = WriteAt::Offset(page * PAGE_SIZE_U64);
        let bytes = [page as u8 + 1; PAGE_SIZE];
        block_on(write(&storage.files, &storage.disk, &file, at, Source::Bytes(&bytes))).expect("written");
    }
    block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
    block_on(storage.pages.evict(&storage.disk, FRAMES as u32));
    drop(file);
    let session = Session::open(&storage, OWNERS[0]);
    (storage, session)
}

fn write_at(storage: &Storage, session: &Session, offset: u64, bytes: &[u8]) -> Result<(), WcStatus> {
    let (owner, key) = (session.owner, session.opened.filekey);
    match storage.files.write_file(owner, key, offset, bytes)? {
        FileWrite::Done => Ok(()),
        FileWrite::Faults => storage.files.write_file_faulting(owner, key, offset, bytes),
    }
}

pub(super) fn append(storage: &Storage, session: &Session, bytes: &[u8]) -> Result<FileValue, WcStatus> {
    storage.files.append_file(session.owner, session.opened.filekey, bytes)
}

#[test]
fn a_grant_brings_its_pages_and_keeps_them() {
    let (storage, session) = sparse();
    let (files, end) = (&storage.files, 3 * PAGE_SIZE_U64);
    assert_eq!(write_at(&storage, &session, 0, b"no"), Err(WcStatus::RemoteAccess), "nothing is granted");
    let before = grant(&storage, &session, 0, end + 2 * PAGE_SIZE_U64).expect("granted");
    assert_eq!(before.size, end);
    assert_eq!(files.figures().grants.pages, 5);
    assert_eq!(block_on(storage.pages.evict(&storage.disk, FRAMES as u32)), 0, "all are pinned");
    let mut bytes = vec![0xEE; 3 * PAGE_SIZE];
    let read = files.read_file(session.owner, session.opened.filekey, 0, &mut bytes);
    assert_eq!(read, Ok(FileRead::Done(3 * PAGE_SIZE)));
    assert_eq!(bytes[PAGE_SIZE..2 * PAGE_SIZE], [0; PAGE_SIZE], "the hole is zeros as before");
    write_at(&storage, &session, PAGE_SIZE_U64 - 2, b"across").expect("granted");
    let after = storage.meta.attr(inode(INO)).expect("attr");
    assert!(after.change > before.change && after.mtime >= before.mtime, "others notice");
    let engine =
        |offset, bytes: &[u8]| files.write_file(session.owner, session.opened.filekey, offset, bytes);
    assert_eq!(engine(PAGE_SIZE_U64, b"ROSS"), Ok(FileWrite::Done));
    assert_eq!(engine(end, b"behind"), Err(WcStatus::RemoteAccess), "granted, and not the file's yet");
    assert_eq!(engine(end - 1, b"be"), Err(WcStatus::RemoteAccess));
    assert_eq!(engine(u64::MAX, b"be"), Err(WcStatus::RemoteAccess));
    assert_eq!(append(&storage, &session, b"behind"), Ok(FileValue::Done(end)));
    assert_eq!(append(&storage, &session, &[7; 2 * PAGE_SIZE - 6]), Ok(FileValue::Done(end + 6)));
    assert_eq!(engine(end, b"BEhind"), Ok(FileWrite::Done), "now it is");
    assert_eq!(append(&storage, &session, b"more"), Ok(FileValue::Faults), "the grant has no space left");
    assert_eq!(block_on(storage.pages.evict(&storage.disk, FRAMES as u32)), 0, "the new pages stay, too");
    let file = &session.opened.file;
    assert_eq!(storage.read(file, PAGE_SIZE_U64 - 2, 6).expect("reads"), b"acROSS");
    assert_eq!(storage.read(file, end, 8).expect("reads"), b"BEhind\x07\x07");
    storage.check();
    block_on(return_grant(file, session.opened.filekey, 4 * PAGE_SIZE_U64, 1));
    assert_eq!(engine(0, b"no"), Err(WcStatus::RemoteAccess), "returned");
    assert_eq!(files.figures().grants.pages, 0);
    block_on(write_back_all(files, &storage.disk)).expect("durable");
    assert_eq!(block_on(storage.pages.evict(&storage.disk, FRAMES as u32)), 5, "and they may go");
    storage.check();
}

#[test]
fn the_engine_makes_the_first_change_behind_a_sync() {
    let (storage, session) = sparse();
    let (files, file, end) = (&storage.files, &session.opened.file, 3 * PAGE_SIZE_U64);
    let (owner, key) = (session.owner, session.opened.filekey);
    grant(&storage, &session, 0, end + 3 * PAGE_SIZE_U64).expect("granted");
    let add = FileAtomic::FetchAdd { add: 1 };
    let swap = |expect, swap| FileAtomic::CompareSwap { expect, swap };
    let ones = u64::from_le_bytes([1; 8]);
    for round in 0..3 {
        let durable = || {
            block_on(sync(files, &storage.disk, file)).expect("durable");
            block_on(write_back_all(files, &storage.disk)).expect("durable");
            assert!(file.is_clean());
        };
        durable();
        let change = || storage.meta.attr(inode(INO)).expect("attr").change;
        let clean = change();
        assert_eq!(files.atomic_file(owner, key, 0, swap(0, 1)), Ok(FileValue::Done(ones + round)));
        assert!(file.is_clean() && change() == clean, "no swap is no change");
        assert_eq!(files.atomic_file(owner, key, 0, add), Ok(FileValue::Done(ones + round)));
        assert!(change() > clean);
        durable();
        assert_eq!(files.write_file(owner, key, 8, b"bytes"), Ok(FileWrite::Done));
        durable();
        let at = end + round * 100;
        assert_eq!(append(&storage, &session, &[round as u8; 100]), Ok(FileValue::Done(at)));
        durable();
        // What others change is kept apart from that.
        set_mode(&storage, 0o600 + round as u16);
        assert_eq!(files.write_file(owner, key, 16, b"more"), Ok(FileWrite::Done));
        assert_eq!(storage.meta.attr(inode(INO)).expect("attr").mode, 0o600 + round as u16);
        assert_eq!(storage.meta.attr(inode(INO)).expect("attr").size, at + 100);
    }
    assert_eq!(storage.pages.figures().counts.grant_faults, 0);
    block_on(write_back_all(files, &storage.disk)).expect("durable");
    block_on(return_grant(file, key, 0, u64::MAX));
    assert_eq!(storage.meta.live_count(), 0, "nobody holds it any more");
    storage.check();
}

#[test]
fn a_compare_swap_that_does_not_swap_waits_for_nothing() {
    let (storage, session) = sparse();
    let (owner, key) = (session.owner, session.opened.filekey);
    grant(&storage, &session, 0, PAGE_SIZE_U64).expect("granted");
    // Who changes this file takes its set-id bit away, which the engine cannot do.
    set_mode(&storage, 0o4755);
    let word = u64::from_le_bytes([1; 8]);
    let swap = |expect| storage.files.atomic_file(owner, key, 8, FileAtomic::CompareSwap { expect, swap: 5 });
    assert_eq!(swap(0), Ok(FileValue::Done(word)));
    assert_eq!(swap(word), Ok(FileValue::Faults));
}

#[test]
fn what_was_not_synced_is_lost_whole() {
    for keeps_batches in [false, true] {
        let (storage, session) = sparse();
        let (files, end) = (&storage.files, 3 * PAGE_SIZE_U64);
        let (owner, key) = (session.owner, session.opened.filekey);
        grant(&storage, &session, 0, end + 3 * PAGE_SIZE_U64).expect("granted");
        assert_eq!(files.append_file_faulting(owner, key, &[7; 100]), Ok(end));
        write_at(&storage, &session, 4, b"kept").expect("granted");
        block_on(sync(files, &storage.disk, &session.opened.file)).expect("durable");
        assert_eq!(files.append_file_faulting(owner, key, &[8; 5000]), Ok(end + 100));
        write_at(&storage, &session, 0, b"lost").expect("granted");
        assert_eq!(storage.read(&session.opened.file, 0, 8).expect("reads"), b"lostkept");
        // The process dies: what was in memory is gone, and so is the grant with its space.
        let meta = if keeps_batches { storage.meta.killed() } else { storage.meta.crash(0) };
        let next = storage.restart(meta);
        let file = next.file(INO);
        assert_eq!(file.size(), end + 100);
        assert_eq!(next.read(&file, 0, 9).expect("reads"), b"\x01\x01\x01\x01kept\x01");
        assert_eq!(next.read(&file, end, 5000).expect("reads"), [7; 100]);
        drop(file);
        next.check();
        let session = Session::open(&next, OWNERS[0]);
        let opened = next.files.write_file(owner, session.opened.filekey, 0, b"no");
        assert_eq!(opened, Err(WcStatus::RemoteAccess), "what is granted is granted anew");
    }
}

/// Makes a change as a worker does for the engine.
fn by_worker(storage: &Storage, session: &Session, what: OneSided) -> Result<u64, WcStatus> {
    let files = &storage.files;
    let _taken = files.fault_jobs();
    let (owner, key) = (session.owner, session.opened.filekey);
    std::thread::scope(|scope| {
        let fault = scope.spawn(|| files.resolve_fault_of_grant(owner, key, what));
        let job = files.fault_jobs().recv_blocking().expect("a job");
        block_on(run_fault(files, &storage.disk, job));
        fault.join().expect("no panic")
    })
}

/// What a grant has set aside is there in a full pool, also where the engine has to leave the change to a worker. Beyond it there is no space.
#[test]
fn in_a_full_pool_a_worker_takes_what_is_set_aside() {
    let storage = Storage::new(POOL_PAGES, FRAMES);
    storage.meta.create(inode(INO));
    let (session, page) = (Session::open(&storage, OWNERS[0]), PAGE_SIZE_U64);
    let (files, file) = (&storage.files, &session.opened.file);
    grant(&storage, &session, 0, 5 * page).expect("granted");
    storage.meta.create(inode(2));
    let (other, reserve) = (storage.file(2), Allocate::Reserve { keep_size: true });
    let all = files.space_figures().free * page;
    block_on(allocate_range(files, &storage.disk, &other, 0, all, reserve)).expect("reserved");
    assert_eq!(files.space_figures().free, 0);
    let run = |what| by_worker(&storage, &session, what);
    // Somebody has the locks of all pages, as a write-back has those of some: the worker waits.
    let busy = block_on(storage.pages.locks.lock_many((0..POOL_PAGES).map(PoolPage)));
    let placed = std::thread::scope(|scope| {
        let appending = scope.spawn(|| run(OneSided::Append { bytes: vec![7; 2 * PAGE_SIZE] }));
        std::thread::sleep(std::time::Duration::from_millis(20));
        drop(busy);
        appending.join().expect("no panic")
    });
    assert_eq!(placed, Ok(0));
    storage.check();
    let commit = |commit| {
        storage.meta.commit_data(&[commit])?;
        storage.meta.attr(inode(INO))
    };
    block_on(truncate(files, &storage.disk, file, 4 * page, commit)).expect("grows by a hole");
    assert_eq!(run(OneSided::Write { offset: 2 * page - 4, bytes: b"across".to_vec() }), Ok(0));
    let add = FileAtomic::FetchAdd { add: 5 };
    assert_eq!(run(OneSided::Atomic { offset: 3 * page, operation: add }), Ok(0));
    assert_eq!(run(OneSided::Append { bytes: vec![8; PAGE_SIZE - 1] }), Ok(4 * page));
    storage.check();
    let before = storage.meta.attr(inode(INO)).expect("attr");
    for len in [2, PAGE_SIZE] {
        assert_eq!(run(OneSided::Append { bytes: vec![9; len] }), Err(WcStatus::RemoteNoSpace));
    }
    assert_eq!(storage.meta.attr(inode(INO)), Ok(before), "nothing was changed");
    assert_eq!(run(OneSided::Append { bytes: vec![9] }), Ok(5 * page - 1), "there is room for a byte");
    let mut expected =
        [vec![7; 2 * PAGE_SIZE], vec![0; 2 * PAGE_SIZE], vec![8; PAGE_SIZE - 1], vec![9]].concat();
    expected[2 * PAGE_SIZE - 4..][..6].copy_from_slice(b"across");
    expected[3 * PAGE_SIZE] = 5;
    assert_eq!(storage.read(file, 0, 6 * PAGE_SIZE).expect("reads"), expected);
    block_on(write_back_all(files, &storage.disk)).expect("durable");
    assert_eq!(storage.read(file, 0, 6 * PAGE_SIZE).expect("reads"), expected);
    storage.check();
}

/// So it is for requests of the filekey, wherever in the range they write: a client may not know how long the file is.
#[test]
fn in_a_full_pool_requests_of_the_holder_take_what_is_set_aside() {
    let storage = Storage::new(POOL_PAGES, FRAMES);
    storage.meta.create(inode(INO));
    let (session, page) = (Session::open(&storage, OWNERS[0]), PAGE_SIZE_U64);
    let (files, file) = (&storage.files, &session.opened.file);
    grant(&storage, &session, page, 4 * page).expect("granted");
    storage.meta.create(inode(2));
    let (other, reserve) = (storage.file(2), Allocate::Reserve { keep_size: true });
    let all = files.space_figures().free * page;
    block_on(allocate_range(files, &storage.disk, &other, 0, all, reserve)).expect("reserved");
    let write = |filekey, at, bytes: &[u8]| {
        let (asked, anywhere) = (Writer::Request(None), |_: u64, _: u64| Ok(()));
        let by = (file, filekey);
        block_on(write_granted(files, &storage.disk, by, at, Source::Bytes(bytes), asked, &anywhere))
            .map(|written| written.offset)
    };
    let key = session.opened.filekey;
    assert_eq!(write(key, WriteAt::Offset(2 * page - 2), b"over"), Ok(2 * page - 2), "behind the end");
    assert_eq!(write(key, WriteAt::End, &[3; PAGE_SIZE]), Ok(2 * page + 2));
    assert_eq!(write(key, WriteAt::Offset(page), b"hole"), Ok(page), "before it");
    storage.check();
    let before = storage.meta.attr(inode(INO)).expect("attr");
    let others = Session::open(&storage, OWNERS[1]).opened.filekey;
    for (filekey, at) in [(key, 0), (key, 5 * page - 1), (key, 5 * page), (others, 4 * page)] {
        assert_eq!(write(filekey, WriteAt::Offset(at), b"no"), Err(Status::NoSpace), "at {at}");
    }
    assert_eq!(storage.meta.attr(inode(INO)), Ok(before), "nothing was changed");
    assert!(!file.state().unsynced_appends.are_before(u64::MAX), "their clients have copies");
    let mut expected = vec![0; 3 * PAGE_SIZE + 2];
    expected[PAGE_SIZE..][..4].copy_from_slice(b"hole");
    expected[2 * PAGE_SIZE - 2..][..4].copy_from_slice(b"over");
    expected[2 * PAGE_SIZE + 2..].fill(3);
    assert_eq!(storage.read(file, 0, 6 * PAGE_SIZE).expect("reads"), expected);
    block_on(write_back_all(files, &storage.disk)).expect("durable");
    assert_eq!(storage.read(file, 0, 6 * PAGE_SIZE).expect("reads"), expected);
    storage.check();
}

#[test]
fn a_worker_does_what_the_engine_cannot() {
    let (storage, session) = sparse();
    let (files, end) = (storage.files.clone(), 3 * PAGE_SIZE_U64);
    grant(&storage, &session, 0, end).expect("granted");
    // Somebody makes the file longer by a hole, and takes a page of the granted range out of its frame: no grant pins what came later.
    let run = |what| by_worker(&storage, &session, what);
    let longer = vec![5; 3 * PAGE_SIZE];
    assert_eq!(run(OneSided::Append { bytes: longer }), Ok(end));
    assert_eq!(run(OneSided::Write { offset: 8, bytes: b"eight".to_vec() }), Ok(0));
    let add = FileAtomic::FetchAdd { add: 1 };
    let word = u64::from_le_bytes([1; 8]);
    assert_eq!(run(OneSided::Atomic { offset: 16, operation: add }), Ok(word));
    assert_eq!(run(OneSided::Atomic { offset: 16, operation: add }), Ok(word + 1));
    let differs = FileAtomic::CompareSwap { expect: 0, swap: 1 };
    let change = storage.meta.attr(inode(INO)).expect("attr").change;
    assert_eq!(run(OneSided::Atomic { offset: 16, operation: differs }), Ok(word + 2));
    assert_eq!(storage.meta.attr(inode(INO)).expect("attr").change, change, "nothing was changed");
    // A longer file, whose new part is a hole, under a new grant that is made before.
    grant(&storage, &session, 0, 8 * PAGE_SIZE_U64).expect("granted");
    let commit = |commit| {
        storage.meta.commit_data(&[commit])?;
        storage.meta.attr(inode(INO))
    };
    let grown = truncate(&files, &storage.disk, &session.opened.file, 8 * PAGE_SIZE_U64, commit);
    block_on(grown).expect("grows");
    let hole = 7 * PAGE_SIZE_U64;
    assert_eq!(run(OneSided::Atomic { offset: hole, operation: add }), Ok(0));
    assert_eq!(run(OneSided::Write { offset: hole + 4090, bytes: b"end".to_vec() }), Ok(0));
    assert_eq!(storage.read(&session.opened.file, hole, 1).expect("reads"), [1]);
    let refused = |what| assert_eq!(run(what), Err(WcStatus::RemoteAccess));
    refused(OneSided::Write { offset: 8 * PAGE_SIZE_U64 - 1, bytes: b"no".to_vec() });
    refused(OneSided::Atomic { offset: 8 * PAGE_SIZE_U64, operation: add });
    block_on(return_grant(&session.opened.file, session.opened.filekey, 0, u64::MAX));
    refused(OneSided::Write { offset: 0, bytes: b"no".to_vec() });
    refused(OneSided::Append { bytes: b"no".to_vec() });
    storage.check();
    files.end_one_sided_writes();
    let (owner, key) = (session.owner, session.opened.filekey);
    let late = files.resolve_fault_of_grant(owner, key, OneSided::Append { bytes: b"no".to_vec() });
    assert_eq!(late, Err(WcStatus::RemoteOperation), "nobody waits for a worker that is gone");
}

#[test]
fn files_that_are_not_plain_are_not_changed_one_sidedly() {
    let (storage, session) = sparse();
    grant(&storage, &session, 0, 4 * PAGE_SIZE_U64).expect("granted");
    let mark = |flags| block_on(storage.files.note_flags(inode(INO), flags));
    mark(InodeFlags::APPEND_ONLY);
    assert_eq!(write_at(&storage, &session, 0, b"no"), Err(WcStatus::RemoteAccess));
    let append = |bytes| storage.files.append_file_faulting(session.owner, session.opened.filekey, bytes);
    assert_eq!(append(b"yes"), Ok(3 * PAGE_SIZE_U64));
    mark(InodeFlags::default());
    write_at(&storage, &session, 0, b"yes").expect("the grant still stands");
    mark(InodeFlags::IMMUTABLE);
    assert_eq!(storage.files.figures().grants.grants, 0, "a grant of what never changes");
    let refused = |what: &str| {
        let (owner, key) = (session.owner, session.opened.filekey);
        let add = FileAtomic::FetchAdd { add: 1 };
        assert_eq!(write_at(&storage, &session, 0, b"no"), Err(WcStatus::RemoteAccess), "{what}");
        assert_eq!(storage.files.atomic_file(owner, key, 0, add), Err(WcStatus::RemoteAccess), "{what}");
        assert_eq!(append(b"no"), Err(WcStatus::RemoteAccess), "{what}");
    };
    refused("immutable");
    mark(InodeFlags::default());
    refused("the grant has ended");
    grant(&storage, &session, 0, 4 * PAGE_SIZE_U64).expect("granted");
    write_at(&storage, &session, 0, b"yes").expect("plain");
    set_mode(&storage, 0o4755);
    assert_eq!(write_at(&storage, &session, 0, b"no"), Err(WcStatus::RemoteAccess), "set-id");
    set_mode(&storage, 0o755);
    write_at(&storage, &session, 0, b"yes").expect("plain");
    storage.files.close_contents(inode(INO));
    assert_eq!(write_at(&storage, &session, 0, b"no"), Err(WcStatus::RemoteOperation), "closed");
}

#[test]
fn keys_that_may_not_are_refused() {
    let (storage, session) = sparse();
    let files = &storage.files;
    grant(&storage, &session, 0, PAGE_SIZE_U64).expect("granted");
    let key = session.opened.filekey;
    let reading = files.open(OWNERS[0], inode(INO), Rights { read: true, write: false }).expect("opens");
    let other = files.open(OWNERS[1], inode(INO), BOTH).expect("opens");
    let add = FileAtomic::FetchAdd { add: 1 };
    for (owner, key) in [
        (OWNERS[1], key),
        (RegionOwner(0), key),
        (OWNERS[0], FileKey(5)),
        (OWNERS[0], reading.filekey),
        (OWNERS[1], other.filekey),
    ] {
        assert_eq!(files.write_file(owner, key, 0, b"no"), Err(WcStatus::RemoteAccess));
        assert_eq!(files.atomic_file(owner, key, 0, add), Err(WcStatus::RemoteAccess));
        assert_eq!(files.append_file(owner, key, b"no"), Err(WcStatus::RemoteAccess));
        assert_eq!(files.write_file_faulting(owner, key, 0, b"no"), Err(WcStatus::RemoteAccess));
        assert_eq!(files.atomic_file_faulting(owner, key, 0, add), Err(WcStatus::RemoteAccess));
        assert_eq!(files.append_file_faulting(owner, key, b"no"), Err(WcStatus::RemoteAccess));
    }
    assert_eq!(files.atomic_file(OWNERS[0], key, PAGE_SIZE_U64 - 4, add), Err(WcStatus::RemoteAccess));
    assert_eq!(files.atomic_file(OWNERS[0], key, u64::MAX - 7, add), Err(WcStatus::RemoteAccess));
    assert_eq!(storage.read(&session.opened.file, 0, 4).expect("reads"), [1; 4]);
    // The end of a session ends its grants, and gives back what they held.
    assert_eq!(files.figures().grants.grants, 1);
    files.revoke(OWNERS[0]);
    assert_eq!(files.figures().grants.grants, 0);
    assert_eq!(files.write_file(OWNERS[0], key, 0, b"no"), Err(WcStatus::RemoteAccess));
}

/// Who may write a file does not get all of its grants: a peer has half of what others leave.
#[test]
fn a_peer_leaves_grants_of_a_file_to_others() {
    const ROOT: u32 = 0;
    let storage = Storage::new(POOL_PAGES, 8192);
    storage.meta.create(inode(INO));
    let session = Session::open(&storage, OWNERS[0]);
    let file = &session.opened.file;
    let bytes = [1; 2 * PAGE_SIZE];
    block_on(write(&storage.files, &storage.disk, file, WriteAt::Offset(0), Source::Bytes(&bytes)))
        .expect("written");
    let mut words = (0..1024).map(|word| word * 8);
    let mut take = |uid| {
        let pages = storage.files.grants.take(&PeerKey::User(uid), uid == ROOT, 1).expect("pages for all");
        let grantee = Grantee { owner: session.owner, filekey: session.opened.filekey };
        let range = (words.next().expect("no more than a file may have"), 8);
        let granted = block_on(grant_write(&storage.files, &storage.disk, file, grantee, range, pages));
        granted.map(|_| range.0)
    };
    let mut take_all = |uid| {
        let mut taken = Vec::new();
        let end = loop {
            match take(uid) {
                Ok(offset) => taken.push(offset),
                Err(status) => break status,
            }
        };
        (taken, end)
    };
    let (one, end) = take_all(4001);
    assert_eq!((one.len(), end), (512, Status::Busy));
    let (two, end) = take_all(4002);
    assert_eq!((two.len(), end), (256, Status::Busy));
    block_on(return_grant(file, session.opened.filekey, two[0], 8));
    let figures = storage.files.figures().grants;
    assert_eq!(
        (figures.grants, figures.pages, figures.of_file_bound),
        (767, 767, 1024),
        "what is refused is not kept"
    );
    assert_eq!(take(4001), Err(Status::Busy), "one's own does not make room for oneself");
    take(4002).expect("in the share");
    take(ROOT).expect("all that others leave");
}

#[test]
fn a_grant_that_cannot_be_had_takes_nothing() {
    let (storage, session) = sparse();
    let files = &storage.files;
    assert_eq!(grant(&storage, &session, 0, 0), Err(Status::Invalid));
    assert_eq!(grant(&storage, &session, u64::MAX / 2, 2), Err(Status::TooLarge));
    // More than a quarter of the frames.
    assert_eq!(grant(&storage, &session, 0, 16 * PAGE_SIZE_U64), Err(Status::Busy));
    // Frames that others hold dirty and pinned.
    let held = storage.pages.take_spare(60);
    assert_eq!(grant(&storage, &session, 0, 6 * PAGE_SIZE_U64), Err(Status::Busy));
    drop(held);
    // The rest of the pool is another file's.
    storage.meta.create(inode(2));
    let (other, rest) = (storage.file(2), (POOL_PAGES - 3) * PAGE_SIZE_U64);
    let how = Allocate::Reserve { keep_size: true };
    block_on(allocate_range(files, &storage.disk, &other, 0, rest, how)).expect("reserved");
    assert_eq!(grant(&storage, &session, 0, 6 * PAGE_SIZE_U64), Err(Status::NoSpace));
    assert_eq!(files.figures().grants.pages, 0);
    storage.check();
}
