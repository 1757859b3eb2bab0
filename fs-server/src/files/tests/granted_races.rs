//! Granted WRITEs and atomics of two sessions, and atomics by request, on real threads, beside cuts, punched holes, evictions, write-back, returned grants and another file that
//! takes the pages: counters are exact, no page is torn or another's, and what was written stays where nobody cuts.
//!
//! The file has three parts. Its first page has the counters. The *kept* pages are written by their session only, and never cut; the *cut* ones are also
//! cut off, punched and grown again. A page is one word repeated: file, page and version.

use super::grants::{INO, OWNERS, Session, grant};
use super::harness::{Storage, punch_hole, write};
use super::records::inode;
use crate::files::{
    FileRegion, Word, WriteAt, change_word, return_grant, run_fault, truncate, write_back_all,
};
use crate::pages::Source;
use cuttlefs_common::ids::{PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::rdma::{FileAtomic, FileRead, FileTarget, FileValue, FileWrite, RegionOwner, WcStatus};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Random, SeededRandom, SystemRandom};
use futures_lite::future::block_on;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

const POOL_PAGES: u64 = 64;
const FRAMES: u64 = 163;
/// Both sessions are granted all of the file: two in five frames would be too many.
const FILE_PAGES: u64 = 16;
const KEPT: std::ops::Range<u64> = 1..8;
const CUT: std::ops::Range<u64> = 8..FILE_PAGES;
/// The word that is added to, and the one that is swapped.
const ADDED: u64 = 64;
const SWAPPED: u64 = 2048;
/// Changes of each session at least, and what the cutter does, if no other number is asked for. Sessions go on as long as it does.
const CHANGES: u64 = 1500;
const CUTS: u64 = 250;
const OTHER: u64 = 2;

struct World {
    storage: Storage,
    sessions: [Session; 2],
    /// The last version of each page that was begun, and of a kept page the last one that is done.
    begun: [AtomicU64; FILE_PAGES as usize],
    done: [AtomicU64; FILE_PAGES as usize],
    adds: AtomicU64,
    swaps: AtomicU64,
    by_request: AtomicU64,
    renewed: AtomicU64,
    /// The threads with a bounded number of things to do that are not done.
    running: AtomicUsize,
    has_cut_all: AtomicBool,
    stop: AtomicBool,
}

fn word(file: u64, page: u64, version: u64) -> u64 {
    (file << 56) | (page << 40) | version
}

/// The version of a page that was read; 0 for zeros.
fn version_of(file: u64, page: u64, bytes: &[u8]) -> u64 {
    let word_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let first = word_at(0);
    for at in (0..bytes.len()).step_by(8) {
        assert_eq!(word_at(at), first, "file {file} page {page} is torn at byte {at}");
    }
    if first == 0 {
        return 0;
    }
    assert_eq!(first >> 40, word(file, page, 0) >> 40, "file {file} page {page} shows {first:x}");
    first & ((1 << 40) - 1)
}

/// Says that a thread is done. If it panics, it ends the others.
struct Ends<'w>(&'w World);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop.store(true, Ordering::SeqCst);
        }
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The thread that makes the changes which have to wait. If it panics, nobody waits for it.
struct NoWorker<'w>(&'w World);

impl Drop for NoWorker<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop.store(true, Ordering::SeqCst);
            self.0.storage.files.end_one_sided_writes();
        }
    }
}

impl World {
    fn new() -> Self {
        let storage = Storage::new(POOL_PAGES, FRAMES);
        storage.meta.create(inode(INO));
        storage.meta.create(inode(OTHER));
        let sessions = OWNERS.map(|owner| Session::open(&storage, owner));
        let bytes = vec![0; PAGE_SIZE];
        let (files, disk) = (&storage.files, &storage.disk);
        for page in 0..FILE_PAGES {
            let at = WriteAt::Offset(page * PAGE_SIZE_U64);
            block_on(write(files, disk, &sessions[0].opened.file, at, Source::Bytes(&bytes))).expect("space");
        }
        Self {
            storage,
            sessions,
            begun: Default::default(),
            done: Default::default(),
            adds: AtomicU64::new(0),
            swaps: AtomicU64::new(0),
            by_request: AtomicU64::new(0),
            renewed: AtomicU64::new(0),
            running: AtomicUsize::new(3),
            has_cut_all: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        }
    }

    fn file(&self) -> &Arc<FileRegion> {
        &self.sessions[0].opened.file
    }

    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::SeqCst)
    }

    /// Does a one-sided change until it is done: as the engine, and as a fault where it must wait. What is refused is granted again.
    fn persist<T>(
        &self,
        who: usize,
        mut attempt: impl FnMut() -> Result<Option<T>, WcStatus>,
        mut fault: impl FnMut() -> Result<T, WcStatus>,
        may_give_up: impl Fn() -> bool,
    ) -> Option<T> {
        loop {
            let done = attempt().and_then(|done| done.map_or_else(&mut fault, Ok));
            match done {
                Ok(value) => return Some(value),
                // Some thread has panicked.
                Err(_) if !self.goes_on() => return None,
                Err(WcStatus::RemoteAccess) if may_give_up() => return None,
                Err(WcStatus::RemoteAccess) => {
                    self.renewed.fetch_add(1, Ordering::Relaxed);
                    match grant(&self.storage, &self.sessions[who], 0, FILE_PAGES * PAGE_SIZE_U64) {
                        // Frames or space are short for a moment.
                        Ok(_) | Err(Status::Busy | Status::NoSpace) => {}
                        Err(other) => panic!("{other:?}"),
                    }
                }
                // No space before the next flush, or a page that is evicted each time.
                Err(WcStatus::RemoteOperation) => std::thread::yield_now(),
                Err(other) => panic!("{other:?}"),
            }
        }
    }

    fn atomic(&self, who: usize, offset: u64, operation: FileAtomic) -> u64 {
        let (owner, key) = self.key(who);
        let files = &self.storage.files;
        let attempt = || match files.atomic_file(owner, key, offset, operation)? {
            FileValue::Done(old) => Ok(Some(old)),
            FileValue::Faults => Ok(None),
        };
        let fault = || files.atomic_file_faulting(owner, key, offset, operation);
        self.persist(who, attempt, fault, || false).expect("it does not give up")
    }

    /// The same by a request. In a moment without frames the page is changed on SSD.
    fn atomic_by_request(&self, who: usize, offset: u64, operation: FileAtomic) -> u64 {
        let (files, disk, file) = (&self.storage.files, &self.storage.disk, self.file());
        let changed =
            change_word(files, disk, (file, self.key(who).1), Word { offset, operation }, &|_, _| Ok(()));
        self.by_request.fetch_add(1, Ordering::Relaxed);
        block_on(changed).expect("its page is never cut off").old
    }

    fn key(&self, who: usize) -> (RegionOwner, cuttlefs_common::ids::FileKey) {
        (self.sessions[who].owner, self.sessions[who].opened.filekey)
    }

    /// Writes a page of its own. A page that is cut off by now is left out.
    fn write_page(&self, who: usize, page: u64) {
        let (owner, key) = self.key(who);
        let files = &self.storage.files;
        let version = self.begun[page as usize].fetch_add(1, Ordering::SeqCst) + 1;
        let bytes = word(INO, page, version).to_le_bytes().repeat(PAGE_SIZE / 8);
        let offset = page * PAGE_SIZE_U64;
        let attempt = || {
            let done = files.write_file(owner, key, offset, &bytes)?;
            Ok((done == FileWrite::Done).then_some(()))
        };
        let fault = || files.write_file_faulting(owner, key, offset, &bytes);
        let is_cut_off = || self.file().size() < offset + PAGE_SIZE_U64;
        let done = self.persist(who, attempt, fault, is_cut_off);
        if KEPT.contains(&page) {
            assert!(done.is_some(), "nobody cuts it");
            self.done[page as usize].store(version, Ordering::SeqCst);
        }
    }

    fn changer(&self, who: usize, seed: u64, changes: u64) {
        let _ends = Ends(self);
        let random = SeededRandom::new(seed);
        let below = |bound: u64| random.next_u64() % bound;
        let mut done = 0;
        while self.goes_on() && (done < changes || !self.has_cut_all.load(Ordering::SeqCst)) {
            done += 1;
            match below(8) {
                0 => {
                    self.atomic(who, ADDED, FileAtomic::FetchAdd { add: 1 });
                    self.adds.fetch_add(1, Ordering::Relaxed);
                }
                1 => {
                    self.atomic_by_request(who, ADDED, FileAtomic::FetchAdd { add: 1 });
                    self.adds.fetch_add(1, Ordering::Relaxed);
                }
                2 => {
                    // Once more than what is there, whoever comes between.
                    let mut known = 0;
                    loop {
                        let swap = FileAtomic::CompareSwap { expect: known, swap: known + 1 };
                        let old = match below(2) {
                            0 => self.atomic(who, SWAPPED, swap),
                            _ => self.atomic_by_request(who, SWAPPED, swap),
                        };
                        if old == known {
                            break;
                        }
                        known = old;
                    }
                    self.swaps.fetch_add(1, Ordering::Relaxed);
                }
                // Every second page is a session's own.
                _ => self.write_page(who, 1 + 2 * below(FILE_PAGES / 2 - 1) + who as u64),
            }
        }
    }

    fn cutter(&self, seed: u64, cuts: u64) {
        let _ends = Ends(self);
        let (files, disk, file) = (&self.storage.files, &self.storage.disk, self.file());
        let random = SeededRandom::new(seed);
        let below = |bound: u64| random.next_u64() % bound;
        let set_len = |len: u64| {
            let commit = |commit| {
                self.storage.meta.commit_data(&[commit])?;
                self.storage.meta.attr(inode(INO))
            };
            block_on(truncate(files, disk, file, len, commit)).expect("cut or grown");
        };
        for _ in 0..cuts {
            if !self.goes_on() {
                return;
            }
            let page = CUT.start + below(CUT.end - CUT.start);
            match below(8) {
                0 => set_len(page * PAGE_SIZE_U64),
                1 | 2 => set_len(FILE_PAGES * PAGE_SIZE_U64),
                3 => drop(
                    block_on(punch_hole(files, disk, file, page * PAGE_SIZE_U64, PAGE_SIZE_U64))
                        .expect("punched"),
                ),
                4 => {
                    let who = below(2) as usize;
                    block_on(return_grant(file, self.key(who).1, 0, u64::MAX));
                }
                5 => block_on(write_back_all(files, disk)).expect("durable"),
                _ => drop(block_on(self.storage.pages.evict(disk, 1 + below(FRAMES) as u32))),
            }
            std::thread::yield_now();
        }
        self.has_cut_all.store(true, Ordering::SeqCst);
    }

    /// Fills the other file with pages that were cut off, and empties it.
    fn reuser(&self) {
        let (files, disk, file) = (&self.storage.files, &self.storage.disk, self.storage.file(OTHER));
        let mut version = 0;
        while self.goes_on() {
            version += 1;
            for page in 0..6 {
                let bytes = word(OTHER, page, version).to_le_bytes().repeat(PAGE_SIZE / 8);
                let at = WriteAt::Offset(page * PAGE_SIZE_U64);
                match block_on(write(files, disk, &file, at, Source::Bytes(&bytes))) {
                    Ok(_) => {
                        let read = self.storage.read(&file, page * PAGE_SIZE_U64, PAGE_SIZE).expect("reads");
                        assert_eq!(version_of(OTHER, page, &read), version);
                    }
                    Err(status) => assert_eq!(status, Status::NoSpace),
                }
            }
            let commit = |commit| {
                self.storage.meta.commit_data(&[commit])?;
                self.storage.meta.attr(inode(OTHER))
            };
            block_on(truncate(files, disk, &file, 0, commit)).expect("emptied");
        }
    }

    /// Reads as clients do, by request and by the engine.
    fn reader(&self, seed: u64) {
        let random = SeededRandom::new(seed);
        let (owner, key) = self.key(0);
        let mut bytes = vec![0; PAGE_SIZE];
        while self.goes_on() {
            let page = 1 + random.next_u64() % (FILE_PAGES - 1);
            let before = self.done[page as usize].load(Ordering::SeqCst);
            let offset = page * PAGE_SIZE_U64;
            let valid = if random.next_u64().is_multiple_of(2) {
                let read = self.storage.read(self.file(), offset, PAGE_SIZE).expect("reads");
                bytes[..read.len()].copy_from_slice(&read);
                read.len()
            } else {
                match self.storage.files.read_file(owner, key, offset, &mut bytes).expect("readable") {
                    FileRead::Done(valid) => valid,
                    FileRead::Faults => panic!("frames do not fault"),
                }
            };
            if valid == 0 || self.storage.files.pages.magic().covers(0, &bytes) {
                assert!(valid > 0 || CUT.contains(&page), "page {page} is cut off");
                continue;
            }
            let version = version_of(INO, page, &bytes[..valid]);
            assert!(version >= before, "page {page}: version {version} after {before} was written");
            assert!(version <= self.begun[page as usize].load(Ordering::SeqCst), "page {page}: {version}");
        }
    }
}

/// `CUTTLEFS_STRESS_SEED` repeats the random numbers, but not the schedule of the threads; `CUTTLEFS_STRESS_CHANGES` sets the number of changes of each
/// session, and with it that of the cuts.
#[test]
fn granted_writes_and_atomics_race_with_all_that_takes_pages() {
    let variable = |name: &str| std::env::var(name).ok().and_then(|value| value.parse().ok());
    let seed: u64 = variable("CUTTLEFS_STRESS_SEED").unwrap_or_else(|| SystemRandom.next_u64());
    let changes = variable("CUTTLEFS_STRESS_CHANGES").unwrap_or(CHANGES);
    println!("CUTTLEFS_STRESS_SEED={seed}");
    let world = World::new();
    let jobs = world.storage.files.fault_jobs();
    std::thread::scope(|scope| {
        let world = &world;
        scope.spawn(move || {
            let _end = NoWorker(world);
            while let Ok(job) = jobs.recv_blocking() {
                block_on(run_fault(&world.storage.files, &world.storage.disk, job));
            }
        });
        let cuts = changes * CUTS / CHANGES;
        let bounded = [
            scope.spawn(move || world.changer(0, seed ^ 1, changes)),
            scope.spawn(move || world.changer(1, seed ^ 2, changes)),
            scope.spawn(move || world.cutter(seed ^ 10, cuts)),
        ];
        let others = [scope.spawn(move || world.reuser()), scope.spawn(move || world.reader(seed ^ 20))];
        // A thread that panicked ends the run at once.
        while world.running.load(Ordering::SeqCst) > 0 && others.iter().all(|thread| !thread.is_finished()) {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        world.stop.store(true, Ordering::SeqCst);
        let ended = bounded.into_iter().chain(others).map(|thread| thread.join());
        let panicked = ended.filter(Result::is_err).count();
        world.storage.files.end_one_sided_writes();
        assert_eq!(panicked, 0, "somebody saw what must not be; see above");
    });
    world.storage.check();
    let (files, file) = (&world.storage.files, world.file());
    block_on(write_back_all(files, &world.storage.disk)).expect("durable");
    world.storage.check();
    let first = world.storage.read(file, 0, PAGE_SIZE).expect("reads");
    let counter = |at: u64| u64::from_le_bytes(first[at as usize..][..8].try_into().expect("eight bytes"));
    assert_eq!(counter(ADDED), world.adds.load(Ordering::SeqCst), "additions are exact");
    assert_eq!(counter(SWAPPED), world.swaps.load(Ordering::SeqCst), "swaps are exact");
    for page in KEPT {
        let read = world.storage.read(file, page * PAGE_SIZE_U64, PAGE_SIZE).expect("reads");
        assert_eq!(version_of(INO, page, &read), world.done[page as usize].load(Ordering::SeqCst));
    }
    let counts = world.storage.pages.figures().counts;
    let renewed = world.renewed.load(Ordering::SeqCst);
    println!("{renewed} renewals, {counts:?}");
    assert!(world.by_request.load(Ordering::SeqCst) > 100, "no atomic was by request");
    assert!(counts.target_writes > 100 && renewed > 0 && counts.evicted > 0, "nothing raced");
}
