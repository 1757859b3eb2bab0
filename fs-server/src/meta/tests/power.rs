//! Power losses of a store that makes checkpoints and reuses their space all the time: what was flushed is there.
//!
//! The test is told of each sync of the store's files. What a file held when a sync of it began, and was answered, is
//! certain; of what was written since any piece is there and any is not, until the next sync is answered: by sectors, by pages,
//! or by what a storage engine writes at once. Beginning to write (`sync_file_range`) makes nothing certain. Images are made right before
//! syncs, when most is uncertain.

use super::crash::{copy_files, open};
use super::{USER, World, format};
use crate::meta::{DataCommit, Operation, RangeUpdate};
use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::region::{Extent, ExtentState};
use cuttlefs_common::rpc::{NewNode, RenameMode, XattrMode};
use cuttlefs_common::world::{Random, SeededRandom};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const ROOT: InodeNo = InodeNo::ROOT;
/// Files that are written after the store was opened.
const FILES: [&str; 4] = ["records", "tail-0", "tail-1", "flushed"];
/// What a device may keep or lose as one: a sector, a page, and two sizes of an engine's own writes.
const PIECES: [usize; 4] = [512, 4096, 64 << 10, 512 << 10];

/// The file has so many pages now; those of the pool are its own for good, and those of every second file are only reserved.
fn commit_pages(world: &World, ino: InodeNo, len: u64) {
    let state = if ino.0.is_multiple_of(2) { ExtentState::Written } else { ExtentState::Unwritten };
    let (file_page, pool_page) = (FilePage(0), PoolPage(ino.0 * 8));
    let extents = (len > 0).then_some(Extent { file_page, pool_page, len_pages: len, state });
    let range = RangeUpdate { first: file_page, end: FilePage(8), extents: extents.into_iter().collect() };
    world.meta.commit_data(&[DataCommit::of_ranges(ino, vec![range], len * PAGE_SIZE_U64)]).expect("commit");
}

/// Names and pages that come, move and go, with attributes. So many, that the store gives space out again and again.
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

/// What a power loss may leave of a file: of the pieces that differ, some `kept_in_8` of eight are new.
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

/// A store's files, watched.
struct Watch {
    at: PathBuf,
    images: PathBuf,
    random: SeededRandom,
    /// The last marker whose flush was answered.
    flushed: AtomicU64,
    files: Mutex<Watched>,
}

#[derive(Default)]
struct Watched {
    /// What is certain, and what will be if the sync under way is answered.
    certain: BTreeMap<&'static str, Vec<u8>>,
    syncing: BTreeMap<&'static str, Vec<u8>>,
    syncs: BTreeMap<&'static str, u64>,
    /// Images, and the marker that must be in each.
    images: Vec<(PathBuf, u64, String)>,
}

impl Watch {
    fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.at.join(name)).expect("read")
    }

    fn told(&self, name: &'static str, is_done: bool, one_in: u64) {
        let watched = &mut *self.files.lock();
        if is_done {
            let now = watched.syncing.remove(name).expect("it began");
            watched.certain.insert(name, now);
            *watched.syncs.entry(name).or_default() += 1;
            return;
        }
        let marker = self.flushed.load(Ordering::Acquire);
        if self.random.next_u64().is_multiple_of(one_in) {
            let number = watched.images.len();
            let piece = PIECES[number % PIECES.len()];
            let kept_in_8 = [1, 4, 7][number % 3];
            let image = self.images.join(format!("{number}"));
            copy_files(&self.at, &image);
            for name in FILES {
                let left = torn(&watched.certain[name], &self.read(name), piece, kept_in_8, &self.random);
                fs::write(image.join(name), left).expect("write");
            }
            let what = format!("before a sync of {name}, pieces of {piece}, {kept_in_8} of 8 kept");
            watched.images.push((image, marker, what));
        }
        watched.syncing.insert(name, self.read(name));
    }
}

/// Gives how many syncs of the checkpoint there were.
fn lose_power(seed: u64, names: u64, steps: usize, rounds: u64, one_in: u64) -> u64 {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("meta");
    let store = open(&path);
    format(&*store);
    let watch = Arc::new(Watch {
        images: directory.path().join("images"),
        random: SeededRandom::new(seed),
        flushed: AtomicU64::new(0),
        files: Mutex::default(),
        at: path,
    });
    let certain = FILES.map(|name| (name, watch.read(name)));
    watch.files.lock().certain.extend(certain);
    let told = watch.clone();
    store.observe_syncs(Box::new(move |name, is_done| told.told(name, is_done, one_in)));
    let world = World::on(store);
    let random = SeededRandom::new(seed + 1);
    for round in 1..=rounds {
        churn(&world, &random, names, steps);
        world.directory(ROOT, &format!("flushed{round}"));
        world.meta.flush().expect("flush");
        watch.flushed.store(round, Ordering::Release);
    }
    world.assert_sound();
    drop(world);
    let watched = watch.files.lock();
    assert!(watched.images.len() > 10, "{} images", watched.images.len());
    for (image, flushed, what) in &watched.images {
        let looked = std::panic::catch_unwind(|| {
            let found = World::on(open(image));
            found.assert_sound();
            for known in 1..=*flushed {
                found.meta.lookup(ROOT, format!("flushed{known}").as_bytes()).expect("a marker is there");
            }
        });
        assert!(looked.is_ok(), "seed {seed}, {}: {what}", image.display());
    }
    watched.syncs["records"]
}

#[test]
fn what_was_flushed_survives_a_power_loss_however_often_space_is_reused() {
    let syncs = lose_power(7, 1500, 300, 60, 3);
    // Two each: so often was what the one before had freed written over.
    assert!(syncs > 40, "{syncs} syncs of the checkpoint");
}

/// `SEEDS=20` for more of them.
#[test]
#[ignore = "long"]
fn a_hundred_thousand_names_survive_power_losses() {
    let seeds = std::env::var("SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(1);
    for seed in 0..seeds {
        lose_power(seed, 100_000, 20_000, 12, 40);
    }
}
