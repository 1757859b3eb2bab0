//! Power losses of a store that makes checkpoints and reuses their space all the time: flushed records are there afterwards.
//!
//! The store tells the test of each sync of its files. The bytes that a file had at the beginning of a sync are certain when the sync has ended. Any
//! piece of later writes may be on the disk or not until the next sync has ended: a sector, a page, or as much as a storage engine writes at once.
//! The beginning of a write-out (`sync_file_range`) makes nothing certain. Images of what a power loss may leave are made right before syncs, when
//! most is uncertain.

use super::crash::{copy_files, open, options};
use super::{USER, World, format};
use crate::meta::{DataCommit, DiskOptions, DiskStore, FlushStep, Operation, RangeUpdate, Store};
use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::region::{Extent, ExtentState};
use cuttlefs_common::rpc::{NewNode, RenameMode, XattrMode};
use cuttlefs_common::world::{Random, SeededRandom};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const ROOT: InodeNo = InodeNo::ROOT;
/// Files that are written after the store was opened.
const FILES: [&str; 4] = ["records", "tail-0", "tail-1", "flushed"];
/// The files for direct writes, once the store has made them ready.
const DIRECT: [&str; 2] = ["direct-0", "direct-1"];
/// The name of the smaller file that replaces `records` when it shrinks, and the name under which syncs of the directory are told.
const DRAFT: &str = "records.new";
const DIRECTORY: &str = "meta";
/// Sizes in which a device may keep or lose writes: a sector, a page, and two sizes of an engine's own writes.
const PIECES: [usize; 4] = [512, 4096, 64 << 10, 512 << 10];

/// Maps the file's first `len` pages to pool pages that belong to it for good. In every second file the pages are only reserved.
fn commit_pages(world: &World, ino: InodeNo, len: u64) {
    let state = if ino.0.is_multiple_of(2) { ExtentState::Written } else { ExtentState::Unwritten };
    let (file_page, pool_page) = (FilePage(0), PoolPage(ino.0 * 8));
    let extents = (len > 0).then_some(Extent { file_page, pool_page, len_pages: len, state });
    let range = RangeUpdate { first: file_page, end: FilePage(8), extents: extents.into_iter().collect() };
    world.meta.commit_data(&[DataCommit::of_ranges(ino, vec![range], len * PAGE_SIZE_U64)]).expect("commit");
}

/// Makes, moves and removes names and pages, with attributes: so many that the store reuses its space again and again.
fn churn(world: &World, random: &dyn Random, names: u64, steps: usize) {
    for _ in 0..steps {
        let name = |number: u64| format!("a file with a name of common length {number}");
        let (one, other) = (name(random.next_u64() % names), name(random.next_u64() % names));
        let found = world.meta.lookup(ROOT, one.as_bytes());
        match (random.next_u64() % 8, found) {
            (0..=2, Ok(_)) => drop(world.unlink(ROOT, &one).expect("unlink")),
            (4, Ok(attr)) => commit_pages(world, attr.ino, random.next_u64() % 8),
            (3, Ok(_)) => {
                let rename = Operation::Rename {
                    parent: ROOT,
                    name: one.as_bytes(),
                    new_parent: ROOT,
                    new_name: other.as_bytes(),
                    mode: RenameMode::Replace,
                };
                drop(world.run(&rename).expect("rename"));
            }
            (_, Ok(attr)) => {
                let value = vec![random.next_u64() as u8; 200 + (random.next_u64() % 800) as usize];
                let (name, mode) = (b"user.some", XattrMode::Any);
                let set = Operation::SetXattr { ino: attr.ino, name, value: &value, mode };
                drop(world.meta.execute(USER, &set, &|_| false).expect("set an attribute"));
            }
            (_, Err(_)) => drop(world.make(ROOT, &one, NewNode::File).expect("make")),
        }
    }
}

/// A file as a power loss may leave it. Of the pieces that differ, about `kept_in_8` of eight are new.
fn torn(certain: &[u8], now: &[u8], piece: usize, kept_in_8: u64, random: &dyn Random) -> Vec<u8> {
    let keeps = || random.next_u64() % 8 < kept_in_8;
    let len = if keeps() { now.len() } else { certain.len() };
    let mut image = certain.to_vec();
    image.resize(certain.len().max(now.len()), 0);
    for (place, now) in image.chunks_mut(piece).zip(now.chunks(piece)) {
        if keeps() {
            place[..now.len()].copy_from_slice(now);
        }
    }
    image.truncate(len);
    image
}

/// A store's directory, and what is known of its files.
struct Watch {
    at: PathBuf,
    images: PathBuf,
    random: SeededRandom,
    /// The last marker whose flush was answered.
    flushed: AtomicU64,
    files: Mutex<Watched>,
    /// Inode number of the file `records` at the beginning.
    inode: u64,
}

#[derive(Default)]
struct Watched {
    /// Bytes of each file that are certain, and bytes that will be certain when the sync under way ends.
    certain: BTreeMap<&'static str, Vec<u8>>,
    syncing: BTreeMap<&'static str, Vec<u8>>,
    syncs: BTreeMap<&'static str, u64>,
    /// The file that replaced `records` is there under that name even after a power loss.
    is_renamed: bool,
    /// Images, the last marker that must be in each, and how each was made.
    images: Vec<(PathBuf, u64, String)>,
}

impl Watch {
    fn new(at: PathBuf, seed: u64) -> Arc<Self> {
        Arc::new(Self {
            images: at.with_extension("images"),
            random: SeededRandom::new(seed),
            flushed: AtomicU64::new(0),
            files: Mutex::default(),
            inode: fs::metadata(at.join("records")).expect("there").ino(),
            at,
        })
    }

    /// Whether another file replaced `records`, and a power loss might still undo that.
    fn is_renaming(&self, watched: &Watched) -> bool {
        let inode = fs::metadata(self.at.join("records")).expect("there").ino();
        inode != self.inode && !watched.is_renamed
    }

    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.at.join(name)).expect("read")
    }

    /// The names of the files that exist.
    fn names(&self) -> impl Iterator<Item = &'static str> {
        FILES.into_iter().chain(DIRECT.into_iter().filter(|name| self.at.join(name).exists()))
    }

    /// Notes that all files are certain as they are.
    fn begin(&self) {
        let now = self.names().map(|name| (name, self.read(name)));
        self.files.lock().certain.extend(now);
    }

    /// Notes the same for the files for direct writes, which the store has just made ready.
    fn begin_direct(&self) {
        let now = DIRECT.map(|name| (name, self.read(name)));
        self.files.lock().certain.extend(now);
    }

    /// Flushes as a worker does, by a direct write, or by a blocking flush if the store asks for that. Gives up some of the direct writes. Images are
    /// made when all of a direct write is in the file and none of it is certain, so that each image has some of its pieces.
    fn flush_directly(&self, world: &World, random: &dyn Random, direct: &mut u64) {
        let is_in = |one_of: u64| random.next_u64().is_multiple_of(one_of);
        loop {
            let (flush, write) = match world.meta.begin_flush().expect("begins") {
                FlushStep::Nothing => return,
                FlushStep::Block => return world.meta.flush().expect("flush"),
                FlushStep::Write(flush, write) => (flush, write),
            };
            write.file.write_all_at(write.buffer.as_slice(), write.offset).expect("write");
            if is_in(4) {
                self.lose("a direct write");
            }
            if is_in(8) {
                continue;
            }
            for is_done in [false, true] {
                DIRECT.iter().for_each(|name| self.told(name, is_done));
            }
            assert!(world.meta.end_flush(&flush, Ok(())).expect("ends"));
            *direct += 1;
            if flush.is_flush_due() && is_in(2) {
                world.meta.flush().expect("flush");
            }
            return;
        }
    }

    /// Notes that a sync of a file began, or ended.
    fn told(&self, name: &'static str, is_done: bool) {
        let watched = &mut *self.files.lock();
        let known_as = if name == "records" && self.is_renaming(watched) { DRAFT } else { name };
        match is_done {
            false if name != DIRECTORY => drop(watched.syncing.insert(known_as, self.read(name))),
            false => {}
            true => {
                *watched.syncs.entry(name).or_default() += 1;
                if name != DIRECTORY {
                    let now = watched.syncing.remove(known_as).expect("it began");
                    watched.certain.insert(known_as, now);
                } else if self.is_renaming(watched) {
                    let now = watched.certain.remove(DRAFT).unwrap_or_default();
                    watched.certain.insert("records", now);
                    watched.is_renamed = true;
                }
            }
        }
    }

    /// Makes an image: files as a power loss may leave them now.
    fn lose(&self, what: &str) {
        let watched = &mut *self.files.lock();
        let marker = self.flushed.load(Ordering::Acquire);
        let number = watched.images.len();
        let piece = PIECES[number % PIECES.len()];
        let kept_in_8 = [1, 4, 7][number % 3];
        let image = self.images.join(format!("{number}"));
        copy_files(&self.at, &image);
        let left = |name, now: &[u8]| {
            let certain = watched.certain.get(name).map_or(&[][..], Vec::as_slice);
            torn(certain, now, piece, kept_in_8, &self.random)
        };
        let write = |name, bytes: Vec<u8>| fs::write(image.join(name), bytes).expect("write");
        self.names().for_each(|name| write(name, left(name, &self.read(name))));
        if self.is_renaming(watched) {
            let now = left(DRAFT, &self.read("records"));
            if self.random.next_u64().is_multiple_of(2) {
                write("records", now);
            } else {
                write("records", watched.certain["records"].clone());
                write(DRAFT, now);
            }
        } else if self.at.join(DRAFT).exists() {
            write(DRAFT, left(DRAFT, &self.read(DRAFT)));
        }
        let what = format!("before a sync of {what}, pieces of {piece}, {kept_in_8} of 8 kept");
        watched.images.push((image, marker, what));
    }
}

/// The work that is done on a store.
#[derive(Clone, Copy)]
struct Run {
    names: u64,
    steps: usize,
    rounds: u64,
    /// On average, one of so many syncs makes an image.
    one_in: u64,
    is_direct: bool,
    /// Power losses one after another: some images are the store of another run with one loss less.
    losses: u32,
}

/// Returns how many syncs of the checkpoint and how many direct writes there were.
fn lose_power(seed: u64, run: Run) -> (u64, u64) {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("meta");
    let store = open(&path);
    format(&*store);
    store.flush().expect("flush");
    drop(store);
    lose_power_at(path, seed, run, 0)
}

/// The same for an existing store with `known` markers. The store is killed between its two lives; unsynced bytes are still in the page cache then.
fn lose_power_at(path: PathBuf, seed: u64, run: Run, known: u64) -> (u64, u64) {
    let watch = Watch::new(path.clone(), seed);
    watch.flushed.store(known, Ordering::Release);
    watch.begin();
    let random = SeededRandom::new(seed + 1);
    let mut direct = 0;
    let first = known + 1;
    for lives in [first..first + run.rounds / 2, first + run.rounds / 2..first + run.rounds] {
        let told = watch.clone();
        let observer = move |name: &'static str, is_done: bool| {
            if !is_done && told.random.next_u64().is_multiple_of(run.one_in) {
                told.lose(name);
            }
            told.told(name, is_done);
        };
        let store = Arc::new(DiskStore::open_observed(&path, options(), Box::new(observer)).expect("open"));
        if run.is_direct {
            store.prepare_sync();
            watch.begin_direct();
        }
        let world = World::on(store);
        for round in lives {
            churn(&world, &random, run.names, run.steps);
            // The marker may exist from a life that did not flush it.
            let _ = world.make(ROOT, &format!("flushed{round}"), NewNode::Directory);
            match run.is_direct {
                true => watch.flush_directly(&world, &random, &mut direct),
                false => world.meta.flush().expect("flush"),
            }
            watch.flushed.store(round, Ordering::Release);
        }
        world.assert_sound();
        churn(&world, &random, run.names, run.steps / 2);
    }
    let watched = watch.files.lock();
    for (number, (image, flushed, what)) in watched.images.iter().enumerate() {
        let look = || {
            let found = World::on(open(image));
            found.assert_sound();
            for known in 1..=*flushed {
                found.meta.lookup(ROOT, format!("flushed{known}").as_bytes()).expect("a marker is there");
            }
            // A change that is not flushed is there after a kill.
            let _ = found.make(ROOT, "not flushed", NewNode::File);
        };
        let looked = std::panic::catch_unwind(|| {
            if run.losses > 1 && number % 8 == 1 {
                let again = image.with_extension("again");
                copy_files(image, &again);
                let run = Run { losses: run.losses - 1, rounds: 8, one_in: 3, ..run };
                lose_power_at(again, seed + number as u64, run, *flushed);
            }
            look();
            look();
            World::on(open(image)).meta.lookup(ROOT, b"not flushed").expect("it was killed only");
        });
        assert!(looked.is_ok(), "seed {seed}, {}: {what}", image.display());
    }
    (watched.syncs.get("records").copied().unwrap_or(0), direct)
}

#[test]
fn what_was_flushed_survives_a_power_loss_however_often_space_is_reused() {
    let run = Run { names: 1500, steps: 300, rounds: 60, one_in: 3, is_direct: false, losses: 1 };
    let (syncs, _) = lose_power(7, run);
    // A checkpoint takes two syncs, so the space that one freed was reused about twenty times.
    assert!(syncs > 40, "{syncs} syncs of the checkpoint");
}

#[test]
fn what_a_direct_write_made_durable_survives_a_power_loss() {
    // Each flush has few changes, so that both files for direct writes are overwritten many times.
    let run = Run { names: 300, steps: 5, rounds: 500, one_in: 40, is_direct: true, losses: 1 };
    let (_, direct) = lose_power(1, run);
    assert!(direct > 300, "{direct} direct writes");
}

#[test]
fn what_was_flushed_survives_three_power_losses_and_kills_between_them() {
    for (seed, is_direct) in [(3, false), (4, true)] {
        let run = Run { names: 300, steps: 60, rounds: 16, one_in: 3, is_direct, losses: 3 };
        lose_power(seed, run);
    }
}

/// The number of names that stay, and how many others come with each, are removed, and leave room in the file.
const KEPT: usize = 200;
const GONE_FOR_ONE: usize = 19;
/// The number of names that are in the log only.
const IN_LOG: usize = 3;
/// A name that is made after the file was made smaller.
const LATEST: &str = "the latest";

fn kept_name(number: usize) -> String {
    format!("a name that stays {number}")
}

/// Checks the names that must be there after the power loss, and that the store works on: its file grows again over the part that was cut off.
fn look_at_shrunk(image: &std::path::Path) {
    let known = |world: &World| {
        world.assert_sound();
        for number in 0..KEPT + IN_LOG {
            world.meta.lookup(ROOT, kept_name(number).as_bytes()).expect("a name is there");
        }
    };
    let found = World::on(open(image));
    known(&found);
    assert_eq!(found.names(ROOT).into_iter().filter(|name| name != LATEST).count(), KEPT + IN_LOG);
    let names = |world: &World| {
        let grown = |number: u64| format!("a name with a value behind it {number}");
        for number in 0..1000 {
            world.make(ROOT, &grown(number), NewNode::Symlink(&[b'x'; 900])).expect("make");
        }
    };
    names(&found);
    found.store.settle().expect("settles");
    known(&found);
    drop(found);
    known(&World::on(open(image)));
}

/// Loses power at every sync while an opening store makes the file of records smaller. Syncs of the file `missing` do nothing. Returns the number of
/// images, and a message for each image that is not as it must be.
fn lose_power_shrinking(seed: u64, missing: &'static str) -> (usize, Vec<String>) {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("meta");
    let world = World::on({
        let store = open(&path);
        format(&*store);
        store
    });
    let gone = |kept: usize, number: usize| format!("a name that goes {kept} {number}");
    for kept in 0..KEPT {
        world.make(ROOT, &kept_name(kept), NewNode::Symlink(&[b'k'; 500])).expect("make");
        for number in 0..GONE_FOR_ONE {
            world.make(ROOT, &gone(kept, number), NewNode::Symlink(&[b'g'; 500])).expect("make");
        }
    }
    world.store.settle().expect("settles");
    for kept in 0..KEPT {
        (0..GONE_FOR_ONE).for_each(|number| drop(world.unlink(ROOT, &gone(kept, number)).expect("unlink")));
    }
    world.store.settle().expect("settles");
    for late in KEPT..KEPT + IN_LOG {
        world.make(ROOT, &kept_name(late), NewNode::File).expect("make");
    }
    world.meta.flush().expect("flush");
    drop(world);
    let len = || fs::metadata(path.join("records")).expect("there").len();
    let before = len();
    let watch = Watch::new(path.clone(), seed);
    watch.begin();
    let told = watch.clone();
    let observer = move |name: &'static str, is_done: bool| {
        if !is_done {
            // Some images have each size of pieces and each share of kept ones.
            (0..PIECES.len()).for_each(|_| told.lose(name));
        }
        if name != missing {
            told.told(name, is_done);
        }
    };
    let options = DiskOptions { give_back_least_bytes: 1 << 20, ..options() };
    let store = DiskStore::open_observed(&path, options, Box::new(observer)).expect("open");
    // This name is lost if a power loss brings the old file back: a checkpoint in the new file has emptied the log.
    let world = World::on(Arc::new(store));
    world.make(ROOT, LATEST, NewNode::File).expect("make");
    world.meta.flush().expect("flush");
    world.store.settle().expect("settles");
    world.unlink(ROOT, LATEST).expect("unlink");
    world.meta.flush().expect("flush");
    drop(world);
    assert!(len() < before / 2, "{before} bytes became {}", len());
    let watched = watch.files.lock();
    let wrong = watched.images.iter().filter_map(|(image, _, what)| {
        let looked = std::panic::catch_unwind(|| look_at_shrunk(image));
        looked.is_err().then(|| format!("seed {seed}, {}: {what}", image.display()))
    });
    (watched.images.len(), wrong.collect())
}

#[test]
fn a_power_loss_while_the_file_is_made_smaller_harms_nothing() {
    for seed in 0..2 {
        let (images, wrong) = lose_power_shrinking(seed, "none");
        assert!(images > 20, "{images} images");
        assert_eq!(wrong, Vec::<String>::new());
    }
}

#[test]
fn a_sync_that_is_missing_while_the_file_is_made_smaller_is_found() {
    for missing in [DRAFT, DIRECTORY] {
        // Threads decide where images are made, so a single seed may show nothing.
        let is_found = (3..13).any(|seed| !lose_power_shrinking(seed, missing).1.is_empty());
        assert!(is_found, "all images are as if syncs of {missing} were not missing");
    }
}

/// The environment variable `SEEDS` sets the number of seeds.
#[test]
#[ignore = "long"]
fn a_hundred_thousand_names_survive_power_losses() {
    let seeds = std::env::var("SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(1);
    for seed in 0..seeds {
        let run = Run { names: 100_000, steps: 20_000, rounds: 12, one_in: 40, is_direct: false, losses: 1 };
        lose_power(seed, run);
        lose_power(
            seed,
            Run { names: 3000, steps: 7, rounds: 20_000, one_in: 200, is_direct: true, losses: 1 },
        );
    }
}
