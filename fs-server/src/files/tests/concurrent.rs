//! Readers of all three kinds against writers, eviction, write-back, truncation, moves and reuse, on real threads. The writer of the first file writes
//! one-sidedly, under grants that its cuts and holes end.
//!
//! Every page is written whole, as one word repeated: file, page and version. A copy that mixes two versions, two
//! files or two pages shows at once. `floor` holds, for each page, the version of the last write that returned; a
//! reader that sees the same floor before and after must have read that version or a newer one.

use super::harness::Storage;
use super::harness::{punch_hole, write};
use super::records::inode;
use crate::files::{FileRegion, Files, Grantee, OpenedRegion};
use crate::files::{WriteAt, defragment, fetch, grant_write, reap, return_grant, truncate, write_back_all};
use crate::pages::Frames;
use crate::pages::{Sink, Source};
use cuttlefs_common::ids::{FilePage, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::rdma::{FileRead, FileTarget, FileWrite, PeerKey, RegionOwner, WcStatus, WindowId};
use cuttlefs_common::region::{ExtentState, FileTable, PageSet, ResidencyTable};
use cuttlefs_common::rpc::{Layout, Rights};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Random, SeededRandom, SystemRandom};
use futures_lite::future::block_on;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const POOL_PAGES: u64 = 100;
const FRAMES: u64 = 19;
const FILES: u64 = 3;
const FILE_PAGES: u64 = 24;
const OWNER: RegionOwner = RegionOwner(1);
/// The file whose writer has grants, and its session.
const GRANTED_FILE: u64 = 1;
const GRANTED_OWNER: RegionOwner = RegionOwner(2);
/// Steps of each writer, if no time is given: 3 s or so.
const STEPS: u64 = 20_000;
/// Pages that each kind of reader and writer has to see before the writers end, however slow the others are.
const HITS: u64 = 100;
/// Pages that have to be moved before the writers end.
const MOVES: u64 = 20;

struct World {
    storage: Storage,
    floors: Vec<Vec<AtomicU64>>,
    stop: AtomicBool,
    /// The end of the run, if a time is given.
    until: Option<Instant>,
    /// Pages read from frames, by kind of reader, and pages written one-sidedly, so that a run that tested nothing goes on or fails.
    hits: [AtomicU64; 4],
    /// Pages that were moved.
    moved: AtomicU64,
}

/// Ends the run when its thread panics: the others may wait for what that thread does.
struct EndOnPanic<'w>(&'w AtomicBool);

impl Drop for EndOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

fn word(ino: u64, page: u64, version: u64) -> u64 {
    // A word is never 0 and never one byte repeated, so it is neither a hole nor the magic pattern.
    (ino << 56) | (page << 40) | version
}

fn page_of(ino: u64, page: u64, version: u64) -> Vec<u8> {
    word(ino, page, version).to_le_bytes().repeat(PAGE_SIZE / 8)
}

/// The version of a page that was read; 0 for zeros.
fn version_of(ino: u64, page: u64, bytes: &[u8]) -> u64 {
    let first = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    for (index, word) in bytes.chunks_exact(8).enumerate() {
        let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
        assert_eq!(word, first, "file {ino} page {page} is torn at word {index}: {first:x} {word:x}");
    }
    if first == 0 {
        return 0;
    }
    assert_eq!(first >> 40, word(ino, page, 0) >> 40, "file {ino} page {page} shows {first:x}");
    first & ((1 << 40) - 1)
}

impl World {
    fn floor(&self, ino: u64, page: u64) -> &AtomicU64 {
        &self.floors[ino as usize][page as usize]
    }

    /// Compares the bytes that a read returned with the versions written before and after it.
    fn judge(&self, ino: u64, page: u64, before: u64, bytes: Option<&[u8]>) {
        let version = bytes.map_or(0, |bytes| version_of(ino, page, bytes));
        let after = self.floor(ino, page).load(Ordering::SeqCst);
        if before == after {
            assert!(
                version >= before,
                "file {ino} page {page}: version {version} after {before} was written"
            );
        }
    }

    fn running(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// Whether a writer goes on after so many steps.
    fn goes_on(&self, steps: u64) -> bool {
        let has_seen_all = || {
            self.hits.iter().all(|hits| hits.load(Ordering::Relaxed) > HITS)
                && self.moved.load(Ordering::Relaxed) > MOVES
        };
        self.running() && self.until.map_or(steps < STEPS || !has_seen_all(), |until| Instant::now() < until)
    }

    /// Writes whole pages under a grant of them, which is asked for if there is none. `false`: they are for a request.
    fn write_granted(&self, opened: &OpenedRegion, offset: u64, bytes: &[u8]) -> bool {
        let (files, disk) = (&*self.storage.files, &self.storage.disk.clone());
        let (filekey, len) = (opened.filekey, bytes.len() as u64);
        for _ in 0..2 {
            match files.write_file(GRANTED_OWNER, filekey, offset, bytes) {
                Ok(FileWrite::Done) => {
                    self.hits[3].fetch_add(len / PAGE_SIZE_U64, Ordering::Relaxed);
                    return true;
                }
                Ok(FileWrite::Faults) => return false,
                Err(WcStatus::RemoteAccess) => {}
                Err(other) => panic!("{other:?}"),
            }
            // Few frames are for grants.
            block_on(return_grant(&opened.file, filekey, 0, u64::MAX));
            let grantee = Grantee { owner: GRANTED_OWNER, filekey };
            let taken = files.grants.take(&PeerKey::User(0), true, len / PAGE_SIZE_U64);
            let granted = taken.and_then(|pages| {
                block_on(grant_write(files, disk, &opened.file, grantee, (offset, len), pages))
            });
            match granted {
                Ok(_) => {}
                Err(Status::Busy | Status::NoSpace) => return false,
                Err(other) => panic!("{other:?}"),
            }
        }
        false
    }

    fn writer(&self, ino: u64, seed: u64) {
        let (files, disk) = (&*self.storage.files, &self.storage.disk.clone());
        let random = SeededRandom::new(seed);
        let draw = |below: u64| random.next_u64() % below;
        let file = self.storage.file(ino);
        let rights = Rights { read: true, write: true };
        let granted =
            (ino == GRANTED_FILE).then(|| files.open(GRANTED_OWNER, inode(ino), rights).expect("opens"));
        let _end = EndOnPanic(&self.stop);
        let (mut version, mut steps) = (0, 0);
        while self.goes_on(steps) {
            steps += 1;
            let page = draw(FILE_PAGES);
            match draw(20) {
                0 => {
                    for at in page..FILE_PAGES {
                        self.floor(ino, at).store(0, Ordering::SeqCst);
                    }
                    let commit = |commit| {
                        self.storage.meta.commit_data(&[commit])?;
                        self.storage.meta.attr(inode(ino))
                    };
                    block_on(truncate(files, disk, &file, page * PAGE_SIZE_U64, commit)).expect("truncates");
                }
                1 => {
                    self.floor(ino, page).store(0, Ordering::SeqCst);
                    block_on(punch_hole(files, disk, &file, page * PAGE_SIZE_U64, PAGE_SIZE_U64))
                        .expect("punches");
                }
                _ => {
                    version += 1;
                    let pages = (1 + draw(3)).min(FILE_PAGES - page);
                    let bytes: Vec<u8> =
                        (page..page + pages).flat_map(|at| page_of(ino, at, version)).collect();
                    let offset = page * PAGE_SIZE_U64;
                    let is_done = granted.as_ref().is_some_and(|key| self.write_granted(key, offset, &bytes));
                    let written = if is_done {
                        Ok(())
                    } else {
                        let at = WriteAt::Offset(offset);
                        block_on(write(files, disk, &file, at, Source::Bytes(&bytes))).map(drop)
                    };
                    match written {
                        Ok(()) => (page..page + pages)
                            .for_each(|at| self.floor(ino, at).store(version, Ordering::SeqCst)),
                        Err(status) => assert_eq!(status, Status::NoSpace),
                    }
                }
            }
        }
    }

    /// Makes, writes and removes files, so that pages move between files.
    fn churner(&self, seed: u64) {
        let (files, disk) = (&*self.storage.files, &self.storage.disk.clone());
        let random = SeededRandom::new(seed);
        let mut ino = 100;
        while self.running() {
            // Inode numbers are never reused; the word holds eight bits of them.
            ino = if ino < 250 { ino + 1 } else { 100 };
            self.storage.meta.create(inode(ino));
            let file = self.storage.file(ino);
            for page in 0..1 + random.next_u64() % 6 {
                let bytes = page_of(ino, page, 1);
                let at = WriteAt::Offset(page * PAGE_SIZE_U64);
                match block_on(write(files, disk, &file, at, Source::Bytes(&bytes))) {
                    Ok(_) => {
                        let read = self.storage.read(&file, page * PAGE_SIZE_U64, PAGE_SIZE).expect("reads");
                        assert_eq!(version_of(ino, page, &read), 1);
                    }
                    Err(status) => assert_eq!(status, Status::NoSpace),
                }
            }
            drop(file);
            block_on(reap(files, inode(ino), || self.storage.meta.remove(inode(ino)).map(|_| false)))
                .expect("reaped");
        }
    }

    fn background(&self) {
        let (files, disk) = (&*self.storage.files, &self.storage.disk.clone());
        let mut round = 0u32;
        while self.running() {
            round += 1;
            block_on(files.pages.evict(disk, 1 + round % 7));
            if round.is_multiple_of(16) {
                block_on(write_back_all(files, disk)).expect("durable");
            }
            std::thread::yield_now();
        }
    }

    /// Moves pages of the files to fewer runs.
    fn mover(&self, seed: u64) {
        let (files, disk) = (&*self.storage.files, &self.storage.disk.clone());
        let random = SeededRandom::new(seed);
        while self.running() {
            let (ino, page) = (1 + random.next_u64() % FILES, random.next_u64() % FILE_PAGES);
            match block_on(defragment(files, disk, &self.storage.file(ino), FilePage(page))) {
                Ok(moved) => _ = self.moved.fetch_add(moved.pages, Ordering::Relaxed),
                Err(status) => assert_eq!(status, Status::NoSpace),
            }
            std::thread::yield_now();
        }
    }

    fn fetcher(&self, seed: u64) {
        let (files, disk) = (&*self.storage.files, &self.storage.disk.clone());
        let random = SeededRandom::new(seed);
        while self.running() {
            let (ino, page) = (1 + random.next_u64() % FILES, random.next_u64() % FILE_PAGES);
            let file = self.storage.file(ino);
            let before = self.floor(ino, page).load(Ordering::SeqCst);
            let mut bytes = vec![0; PAGE_SIZE];
            let at = page * PAGE_SIZE_U64;
            let sink = Sink::Bytes(&mut bytes);
            let valid =
                block_on(fetch(files, disk, &file, at, PAGE_SIZE, &PageSet::all(1), sink)).expect("reads");
            self.judge(ino, page, before, (valid > 0).then_some(&bytes));
            self.hits[0].fetch_add(1, Ordering::Relaxed);
        }
    }

    fn target_reader(&self, seed: u64) {
        let files = &*self.storage.files;
        let random = SeededRandom::new(seed);
        let rights = Rights { read: true, write: false };
        let keys: Vec<_> =
            (1..=FILES).map(|ino| files.open(OWNER, inode(ino), rights).expect("opens").filekey).collect();
        let mut bytes = vec![0; PAGE_SIZE];
        while self.running() {
            let (ino, page) = (1 + random.next_u64() % FILES, random.next_u64() % FILE_PAGES);
            let before = self.floor(ino, page).load(Ordering::SeqCst);
            let key = keys[ino as usize - 1];
            let read = files.read_file(OWNER, key, page * PAGE_SIZE_U64, &mut bytes).expect("readable");
            let FileRead::Done(valid) = read else { panic!("frames do not fault") };
            if !files.pages.magic().covers(0, &bytes) {
                self.judge(ino, page, before, (valid > 0).then_some(&bytes));
                self.hits[1].fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Reads as a client on a `shm` link does: from the windows, with a layout that it cached.
    fn initiator(&self, seed: u64) {
        let files = &*self.storage.files;
        let random = SeededRandom::new(seed);
        let table = FileTable::over(files.window(WindowId::FileTable));
        let residency = ResidencyTable::over(files.window(WindowId::Residency));
        let frames = files.window(WindowId::Frames);
        let rights = Rights { read: true, write: false };
        let opened: Vec<_> =
            (1..=FILES).map(|ino| files.open(OWNER, inode(ino), rights).expect("opens")).collect();
        let mut layouts: Vec<Option<Layout>> = vec![None; FILES as usize];
        let mut bytes = vec![0; PAGE_SIZE];
        while self.running() {
            let (ino, page) = (1 + random.next_u64() % FILES, random.next_u64() % FILE_PAGES);
            let index = ino as usize - 1;
            let slot = opened[index].slot.expect("slots are enough");
            let before = self.floor(ino, page).load(Ordering::SeqCst);
            let view = table.load(slot);
            let layout = match &layouts[index] {
                Some(layout) if layout.generation == view.generation => layout,
                _ => {
                    layouts[index] = Some(files.layout(&opened[index].file, FilePage(0), usize::MAX));
                    continue;
                }
            };
            if page * PAGE_SIZE_U64 >= view.size {
                continue;
            }
            let extent = layout.extents.iter().find(|extent| extent.covers(FilePage(page)));
            match extent {
                Some(extent) if extent.state == ExtentState::Written => {
                    let pool = extent.pool_page_of(FilePage(page));
                    let entry = residency.load(pool);
                    if !entry.is_resident() || entry.is_changing() {
                        continue;
                    }
                    frames.read(Frames::offset(entry.frame()), &mut bytes);
                    if !entry.validates(residency.load_after_copy(pool)) {
                        continue;
                    }
                }
                _ => bytes.fill(0),
            }
            if table.generation_after_copy(slot) == layout.generation {
                self.judge(ino, page, before, Some(&bytes));
                self.hits[2].fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// The environment variables `CUTTLEFS_STRESS_SECONDS` and `CUTTLEFS_STRESS_SEED` set its time and its random numbers.
#[test]
fn readers_never_see_a_torn_foreign_or_old_page() {
    let variable = |name: &str| std::env::var(name).ok().and_then(|value| value.parse().ok());
    let until =
        variable("CUTTLEFS_STRESS_SECONDS").map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let seed: u64 = variable("CUTTLEFS_STRESS_SEED").unwrap_or_else(|| SystemRandom.next_u64());
    println!("CUTTLEFS_STRESS_SEED={seed}");
    let storage = Storage::new(POOL_PAGES, FRAMES);
    (1..=FILES).for_each(|ino| storage.meta.create(inode(ino)));
    let world = World {
        storage,
        floors: (0..=FILES).map(|_| (0..FILE_PAGES).map(|_| AtomicU64::new(0)).collect()).collect(),
        stop: AtomicBool::new(false),
        until,
        hits: Default::default(),
        moved: AtomicU64::new(0),
    };
    // Open files are not removed from memory.
    let held: Vec<Arc<FileRegion>> = (1..=FILES).map(|ino| world.storage.file(ino)).collect();
    std::thread::scope(|scope| {
        let world = &world;
        let writers: Vec<_> =
            (1..=FILES).map(|ino| scope.spawn(move || world.writer(ino, seed ^ ino))).collect();
        let threads = [
            scope.spawn(move || world.churner(seed ^ 10)),
            scope.spawn(move || world.background()),
            scope.spawn(move || world.mover(seed ^ 15)),
            scope.spawn(move || world.fetcher(seed ^ 20)),
            scope.spawn(move || world.target_reader(seed ^ 30)),
            scope.spawn(move || world.initiator(seed ^ 40)),
        ];
        // A thread that panicked ends the run at once.
        while writers.iter().any(|thread| !thread.is_finished())
            && threads.iter().all(|thread| !thread.is_finished())
        {
            std::thread::sleep(Duration::from_millis(20));
        }
        world.stop.store(true, Ordering::Relaxed);
    });
    let files: &Files = &world.storage.files;
    println!("{:?} {:?} {:?}", world.hits, world.moved, files.figures());
    assert!(world.hits.iter().all(|hits| hits.load(Ordering::Relaxed) > HITS), "somebody hit nothing");
    assert!(world.moved.load(Ordering::Relaxed) > MOVES, "hardly a page was moved");
    drop(held);
    world.storage.check();
    block_on(write_back_all(files, &world.storage.disk)).expect("durable");
    world.storage.check();
}
