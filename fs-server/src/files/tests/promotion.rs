//! Promotion of whole units: pages of hot units are brought into frames before they are requested, units that cooled down are evicted, and a page
//! that leaves its file leaves neither heat nor bytes behind.

use super::harness::{Storage, stamped};
use super::harness::{punch_hole, write};
use super::records::inode;
use crate::files::{WriteAt, fetch, reap, run_promotion, truncate, write_back_all};
use crate::pages::{Sink, Source};
use crate::pool::disk::LocalFuture;
use crate::pool::simdisk::SimMode;
use crate::timer::Timer;
use cuttlefs_common::ids::{FilePage, PAGE_SIZE, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::rdma::RegionOwner;
use cuttlefs_common::region::{PageSet, UnitRecord};
use cuttlefs_common::rpc::Rights;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{ManualClock, Random, SeededRandom};
use futures_lite::future::{block_on, poll_once, yield_now};
use std::cell::Cell;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const UNIT: u64 = 8;
const OWNER: RegionOwner = RegionOwner(1);
const PERIOD: Duration = Duration::from_secs(1);

/// A timer whose periods are over as soon as they begin.
struct Ticks;

impl Timer for Ticks {
    fn sleep(&self, _: Duration) -> LocalFuture<'static, ()> {
        Box::pin(yield_now())
    }
}

/// A timer whose periods end when the test says so: one for each count in the cell.
struct Periods(Rc<Cell<usize>>);

impl Timer for Periods {
    fn sleep(&self, _: Duration) -> LocalFuture<'static, ()> {
        let left = self.0.clone();
        Box::pin(async move {
            while left.get() == 0 {
                yield_now().await;
            }
            left.set(left.get() - 1);
        })
    }
}

/// A server in which seven units can be hot: of 67 frames three are never given out, and a sixteenth of the others is not for the hot set.
fn storage(files: u64) -> Storage {
    let storage = Storage::with_units(256, 67, UNIT as u32, 1);
    (1..=files).for_each(|ino| storage.meta.create(inode(ino)));
    storage
}

fn put(storage: &Storage, ino: u64, pages: u64) {
    let bytes = stamped(ino, 0, pages as usize * PAGE_SIZE);
    let at = WriteAt::Offset(0);
    block_on(write(&storage.files, &storage.disk, &storage.file(ino), at, Source::Bytes(&bytes)))
        .expect("writes");
}

/// Writes everything back, lets all heat decay, and evicts all pages.
fn cool(storage: &Storage) {
    block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
    (0..40).for_each(|_| drop(block_on(storage.files.review())));
    block_on(storage.pages.evict(&storage.disk, u32::MAX));
}

/// Lets promotion run for some periods.
fn promote(storage: &Storage, periods: usize) {
    let left = Rc::new(Cell::new(periods));
    let (timer, clock, stopped) = (Periods(left.clone()), ManualClock::default(), AtomicBool::new(false));
    let promotion = run_promotion(&storage.files, &storage.disk, &timer, &clock, PERIOD, &stopped);
    let mut promotion = pin!(promotion);
    // Polls for longer than the last period's work takes. Then the promotion sleeps and can be dropped.
    let mut idle = 0;
    while idle < 100 {
        assert!(block_on(poll_once(promotion.as_mut())).is_none());
        idle += usize::from(left.get() == 0);
    }
}

fn pool_pages(storage: &Storage, ino: u64) -> Vec<PoolPage> {
    let layout = storage.file(ino).layout(FilePage(0), usize::MAX);
    let pages = layout
        .extents
        .iter()
        .flat_map(|extent| (extent.pool_page.0..extent.pool_page.0 + extent.len_pages).map(PoolPage));
    pages.collect()
}

fn resident(storage: &Storage, pages: &[PoolPage]) -> usize {
    pages.iter().filter(|page| storage.pages.residency.load(**page).is_resident()).count()
}

fn access(storage: &Storage, ino: u64, page: u64, times: usize) {
    let file = storage.file(ino);
    for _ in 0..times {
        storage.read(&file, page * PAGE_SIZE_U64, PAGE_SIZE).expect("reads");
    }
}

#[test]
fn a_hot_unit_comes_whole_and_a_cooled_one_goes() {
    let storage = storage(2);
    let held = [storage.file(1), storage.file(2)];
    put(&storage, 1, 48);
    put(&storage, 2, 48);
    cool(&storage);
    let (first, second) = (pool_pages(&storage, 1), pool_pages(&storage, 2));
    assert_eq!((first.len(), resident(&storage, &first)), (48, 0));
    // The test reads one page of each of three units.
    for unit in 0..3 {
        access(&storage, 1, unit * UNIT, 10);
    }
    promote(&storage, 1);
    assert_eq!(resident(&storage, &first[..24]), 24, "whole units");
    assert_eq!(resident(&storage, &first[24..]), 0, "and no others");
    let ahead = storage.files.pages.figures().counts.promoted_ahead;
    assert!((21..=24).contains(&ahead), "{ahead}: all but the pages that were read");
    assert!(first[..24].iter().all(|page| storage.pages.heat.of(*page) == u8::MAX));
    // Reads make the other file far hotter, in nearly as many units as fit.
    for unit in 0..6 {
        access(&storage, 2, unit * UNIT, 200);
    }
    promote(&storage, 3);
    let fit = 64 * 15 / 16 / UNIT as usize;
    assert!(resident(&storage, &second) == 48 && fit == 7, "six of seven that fit");
    let warm = first.iter().filter(|page| storage.pages.heat.of(**page) > 0).count();
    assert_eq!(warm, UNIT as usize, "one unit of the first file is still in the hot set");
    assert!(storage.files.pages.figures().counts.evicted > 8);
    for ino in [1, 2] {
        let got = storage.read(&held[ino - 1], 0, 48 * PAGE_SIZE);
        assert_eq!(got, Ok(stamped(ino as u64, 0, 48 * PAGE_SIZE)));
    }
    storage.check();
}

#[test]
fn pages_that_leave_their_file_leave_their_heat() {
    let storage = storage(2);
    let file = storage.file(1);
    put(&storage, 1, 16);
    let pages = pool_pages(&storage, 1);
    promote(&storage, 1);
    assert!(pages.iter().all(|page| storage.pages.heat.of(*page) == u8::MAX));
    block_on(punch_hole(&storage.files, &storage.disk, &file, 0, 4 * PAGE_SIZE_U64)).expect("punches");
    let commit = |commit| {
        storage.meta.commit_data(&[commit])?;
        storage.meta.attr(inode(1))
    };
    block_on(truncate(&storage.files, &storage.disk, &file, 12 * PAGE_SIZE_U64, commit)).expect("truncates");
    let heat = |range: std::ops::Range<usize>| -> Vec<u8> {
        pages[range].iter().map(|page| storage.pages.heat.of(*page)).collect()
    };
    assert_eq!((heat(0..4), heat(12..16)), (vec![0; 4], vec![0; 4]));
    assert_eq!(heat(4..12), [u8::MAX; 8]);
    // A later period does not warm pages that no longer belong to the unit.
    promote(&storage, 1);
    assert_eq!((heat(0..4), heat(12..16)), (vec![0; 4], vec![0; 4]));
    drop(file);
    block_on(reap(&storage.files, inode(1), || storage.meta.remove(inode(1)).map(|_| false))).expect("reaps");
    assert_eq!(heat(0..16), [0; 16]);
    promote(&storage, 1);
    storage.check();
}

/// Files that nobody has open are dropped from memory; the heat of their units must not outlive the hot set.
#[test]
fn a_unit_cools_down_also_when_its_file_is_no_longer_active() {
    let storage = storage(2);
    put(&storage, 1, 8);
    block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
    let pages = pool_pages(&storage, 1);
    let held = storage.file(1);
    drop(block_on(storage.files.review()));
    assert!(pages.iter().all(|page| storage.pages.heat.of(*page) == u8::MAX));
    drop(held);
    storage.files.trim_active();
    assert_eq!(storage.files.figures().active.regions, 0, "the file is not in memory any more");
    (0..40).for_each(|_| drop(block_on(storage.files.review())));
    assert!(pages.iter().all(|page| storage.pages.heat.of(*page) == 0), "heat was left behind");
}

/// If every page was accessed between two reviews, the clock hand still must not evict a hot page just because it reaches that page first.
#[test]
fn regression_eviction_takes_the_tepid_before_the_hot() {
    let storage = Storage::new(256, 67);
    (1..=2).for_each(|ino| storage.meta.create(inode(ino)));
    put(&storage, 1, 24);
    put(&storage, 2, 32);
    block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
    let (hot, tepid) = (pool_pages(&storage, 1), pool_pages(&storage, 2));
    hot.iter().for_each(|page| storage.pages.heat.set(*page, 100));
    tepid.iter().for_each(|page| storage.pages.heat.set(*page, 3));
    assert_eq!((resident(&storage, &hot), resident(&storage, &tepid)), (24, 32));
    assert_eq!(storage.pages.heat.cold(), 0, "as of a review before those accesses");
    assert_eq!(block_on(storage.pages.evict(&storage.disk, 32)), 32);
    assert_eq!((resident(&storage, &hot), resident(&storage, &tepid)), (24, 0));
    assert_eq!(block_on(storage.pages.evict(&storage.disk, 100)), 24, "any, if nothing else is left");
    storage.check();
}

/// A client's counts are hints: counts of pages past the end of its file must not keep units of others out of the hot set.
#[test]
fn units_past_the_end_of_a_file_are_not_counted() {
    let storage = storage(1);
    put(&storage, 1, 12);
    cool(&storage);
    let opened = storage.files.open(OWNER, inode(1), Rights { read: true, write: false }).expect("opens");
    let count = |unit: u32, pages: [u8; UNIT as usize]| {
        let record = UnitRecord { filekey: opened.filekey, unit, count: u32::MAX };
        storage.files.note_counted(&opened.file, &record, &pages);
    };
    for unit in [2, 3, 1000, u32::MAX] {
        count(unit, [255; UNIT as usize]);
    }
    assert_eq!((storage.pages.scored_units(), storage.files.pages.figures().counts.counted), (0, 0));
    count(1, [255; UNIT as usize]);
    assert_eq!(storage.pages.scored_units(), 1);
    let hot = block_on(storage.files.review());
    assert_eq!(hot.iter().map(|unit| unit.first_page).collect::<Vec<_>>(), [UNIT]);
    promote(&storage, 1);
    assert_eq!(resident(&storage, &pool_pages(&storage, 1)), 4, "the unit ends with the file");
    storage.check();
}

/// The life of one file: random writes, cuts, punches and reads, each read compared with an array of bytes.
async fn live(storage: &Storage, ino: u64, seed: u64, steps: usize) {
    const PAGES: u64 = 30;
    let (files, disk) = (&*storage.files, &storage.disk);
    let random = SeededRandom::new(seed);
    let draw = |below: u64| random.next_u64() % below;
    let file = storage.file(ino);
    let mut model: Vec<u8> = Vec::new();
    for _ in 0..steps {
        let (offset, len) = (draw(PAGES) * PAGE_SIZE_U64 + draw(2) * draw(4096), 1 + draw(4 * PAGE_SIZE_U64));
        let inside = |at: u64, size: usize| (at as usize).min(size);
        match draw(10) {
            0 => {
                let commit = |commit| {
                    storage.meta.commit_data(&[commit])?;
                    storage.meta.attr(inode(ino))
                };
                truncate(files, disk, &file, offset, commit).await.expect("truncates");
                model.resize(offset as usize, 0);
            }
            1 => {
                punch_hole(files, disk, &file, offset, len).await.expect("punches");
                let size = model.len();
                model[inside(offset, size)..inside(offset + len, size)].fill(0);
            }
            2..=4 => {
                let bytes: Vec<u8> = (0..len).map(|_| draw(255) as u8 + 1).collect();
                let at = WriteAt::Offset(offset);
                match write(files, disk, &file, at, Source::Bytes(&bytes)).await {
                    Ok(_) => {
                        let end = (offset + len) as usize;
                        model.resize(model.len().max(end), 0);
                        model[offset as usize..end].copy_from_slice(&bytes);
                    }
                    Err(status) => assert_eq!(status, Status::NoSpace),
                }
            }
            _ => {
                let mut out = vec![0xEE; 4 * PAGE_SIZE];
                let first = offset / PAGE_SIZE_U64 * PAGE_SIZE_U64;
                let (len, sink) = (out.len(), Sink::Bytes(&mut out));
                let valid =
                    fetch(files, disk, &file, first, len, &PageSet::all(4), sink).await.expect("reads");
                let size = model.len();
                let expected = &model[inside(first, size)..inside(first + 4 * PAGE_SIZE_U64, size)];
                assert!(valid as usize == expected.len() && out[..expected.len()] == *expected, "at {first}");
            }
        }
        yield_now().await;
    }
}

/// Runs promotion, eviction and the lives of two files on one worker, over a disk that completes late and in any order.
#[test]
fn promotion_races_with_everything_and_no_byte_is_wrong() {
    let mut ahead = 0;
    for seed in 0..60 {
        let storage = Storage::with_units(72, 27, 4, seed);
        (1..=2).for_each(|ino| storage.meta.create(inode(ino)));
        storage.disk.set_mode(SimMode::Deferred);
        let random = SeededRandom::new(seed ^ 0x5eed);
        let (clock, stopped) = (ManualClock::default(), AtomicBool::new(false));
        let files = &*storage.files;
        let mut background: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = vec![
            Box::pin(run_promotion(files, &storage.disk, &Ticks, &clock, PERIOD, &stopped)),
            Box::pin(async {
                while !stopped.load(Ordering::Acquire) {
                    files.pages.evict(&storage.disk, 1 + random.next_u64() as u32 % 6).await;
                    for _ in 0..random.next_u64() % 8 {
                        yield_now().await;
                    }
                }
            }),
        ];
        let mut lives: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> =
            (1..=2).map(|ino| Box::pin(live(&storage, ino, seed * 2 + ino, 60)) as _).collect();
        while !lives.is_empty() || !background.is_empty() {
            if lives.is_empty() {
                stopped.store(true, Ordering::Release);
            }
            let tasks = if random.next_u64().is_multiple_of(2) { &mut background } else { &mut lives };
            if !tasks.is_empty() {
                let index = random.next_u64() as usize % tasks.len();
                if block_on(poll_once(tasks[index].as_mut())).is_some() {
                    drop(tasks.swap_remove(index));
                }
            }
            if !random.next_u64().is_multiple_of(3) {
                storage.disk.step();
            }
        }
        drop((lives, background));
        storage.disk.set_mode(SimMode::AtOnce);
        storage.check();
        ahead += storage.files.pages.figures().counts.promoted_ahead;
    }
    assert!(ahead > 1000, "promotion raced with nothing: {ahead}");
}
