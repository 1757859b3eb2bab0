//! Scrubs: they find rotten pages, heal those that are in frames, and finish the recovery after a crash.

use super::harness::write;
use super::harness::{Storage, stamped};
use super::records::inode;
use crate::files::{WriteAt, write_back_all};
use crate::meta::PassFigures;
use crate::meta::ScrubRecord;
use crate::pages::Source;
use crate::pages::{Scrub, ScrubFigures};
use crate::pool::disk::LocalFuture;
use crate::pool::simdisk::SimMode;
use crate::timer::Timer;
use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE, PoolPage};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{ManualClock, Random, SeededRandom};
use futures_lite::future::{block_on, poll_once, yield_now};
use parking_lot::Mutex;
use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const INO: InodeNo = inode(1);
const PAGES: usize = 12;

/// A timer whose sleeps move the clock.
struct Moves<'a>(&'a ManualClock);

impl Timer for Moves<'_> {
    fn sleep(&self, duration: Duration) -> LocalFuture<'static, ()> {
        self.0.advance(duration);
        Box::pin(yield_now())
    }
}

/// A server with a file of `PAGES` pages, written back: all of it on SSD only, or all of it in clean frames as well.
fn storage(evicted: bool) -> Storage {
    let storage = Storage::new(64, 40);
    storage.meta.create(INO);
    put(&storage, 0, PAGES);
    block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
    if evicted {
        assert_eq!(block_on(storage.pages.evict(&storage.disk, PAGES as u32)), PAGES as u32);
    }
    storage
}

fn put(storage: &Storage, page: usize, pages: usize) {
    put_bytes(storage, page, &stamped(1, (page * PAGE_SIZE) as u64, pages * PAGE_SIZE));
}

fn put_bytes(storage: &Storage, page: usize, bytes: &[u8]) {
    let at = WriteAt::Offset((page * PAGE_SIZE) as u64);
    let file = storage.file(1);
    block_on(write(&storage.files, &storage.disk, &file, at, Source::Bytes(bytes))).expect("writes");
}

fn pool_page(storage: &Storage, page: u64) -> PoolPage {
    storage.file(1).state().table.get(FilePage(page)).expect("mapped").0
}

fn flip(storage: &Storage, page: PoolPage) {
    let mut bytes: [u8; PAGE_SIZE] = storage.disk.peek(page.0).try_into().expect("a page");
    bytes[1000] ^= 4;
    storage.disk.poke(page.0, &bytes);
}

/// Recovers all zones, then does a whole pass.
fn scrub(storage: &Storage) -> PassFigures {
    let clock = ManualClock::default();
    let figures = Mutex::new(ScrubFigures::default());
    let summed = storage.disk.summed();
    let scrub = Scrub {
        pages: &storage.pages,
        space: storage.files.space(),
        disk: &summed,
        timer: &Moves(&clock),
        clock: &clock,
        name: &|_| true,
        figures: &figures,
        keep: &|_| {},
        seen: Cell::new(0),
        found: RefCell::default(),
    };
    block_on(scrub.recover()).expect("recovers");
    assert!(summed.next_recovering().is_none());
    let found = block_on(scrub.pass(1 << 20, &AtomicBool::new(false))).expect("a pass");
    assert!(!figures.lock().is_running);
    found
}

#[test]
fn what_rotted_on_ssd_is_found_and_what_is_in_a_frame_is_healed() {
    let on_ssd = storage(true);
    let clean = PassFigures { pages: PAGES as u64, ..PassFigures::default() };
    assert_eq!(scrub(&on_ssd), clean);
    let page = pool_page(&on_ssd, 5);
    flip(&on_ssd, page);
    assert_eq!(scrub(&on_ssd), PassFigures { rotten: 1, ..clean });
    let file = on_ssd.file(1);
    assert_eq!(on_ssd.read(&file, (5 * PAGE_SIZE) as u64, 10), Err(Status::Io));
    assert_eq!(on_ssd.read(&file, 0, PAGES * PAGE_SIZE), Err(Status::Io), "no part of a range is made up");
    assert_eq!(on_ssd.read(&file, 0, 5 * PAGE_SIZE), Ok(stamped(1, 0, 5 * PAGE_SIZE)));
    assert_eq!(on_ssd.files.pages.figures().counts.rotten_pages, 2);
    put(&on_ssd, 5, 1);
    block_on(write_back_all(&on_ssd.files, &on_ssd.disk)).expect("durable");
    assert_eq!(scrub(&on_ssd), clean);
    on_ssd.check();

    let in_frames = storage(false);
    let page = pool_page(&in_frames, 5);
    let before = in_frames.disk.peek(page.0);
    flip(&in_frames, page);
    assert_eq!(scrub(&in_frames), PassFigures { rotten: 1, healed: 1, ..clean });
    assert_eq!(in_frames.disk.peek(page.0), before);
    assert_eq!(scrub(&in_frames), clean);
    in_frames.check();
}

#[test]
fn after_a_crash_all_is_recovered_and_the_next_pass_finds_nothing() {
    let mut resummed = 0;
    for seed in 0..60 {
        println!("seed {seed}");
        let random = SeededRandom::new(seed);
        let storage = storage(true);
        // Pages are overwritten in place, and the power fails at some point of the write-back.
        for _ in 0..1 + random.next_u64() % 4 {
            let other: Vec<u8> = stamped(seed + 2, 0, PAGE_SIZE);
            put_bytes(&storage, random.next_u64() as usize % PAGES, &other);
        }
        storage.disk.set_mode(SimMode::Deferred);
        {
            let mut writing = pin!(write_back_all(&storage.files, &storage.disk));
            for _ in 0..random.next_u64() % 12 {
                if block_on(poll_once(&mut writing)).is_some() {
                    break;
                }
                storage.disk.step();
            }
        }
        storage.disk.crash(&random);
        storage.disk.set_mode(SimMode::AtOnce);
        let after = storage.restart(storage.meta.crash(0));
        let found = scrub(&after);
        assert_eq!((found.rotten, found.unreadable), (0, 0), "seed {seed}");
        let file = after.file(1);
        after.read(&file, 0, PAGES * PAGE_SIZE).expect("readable");
        let sums = after.disk.summed().sums().figures();
        assert_eq!((sums.accepted, sums.recovering_zones), (0, 0), "all have their sums");
        resummed += sums.resummed;
    }
    println!("{resummed} pages had new sums");
    assert!(resummed > 10);
}

/// Pages of a file that takes a scrub several steps.
const MANY: usize = 300;

/// Does a pass from the beginning, or the rest of the one in `before`. Stops when the state was kept `keeps` times. Returns the kept states and the
/// figures.
fn pass_of(
    storage: &Storage,
    clock: &ManualClock,
    before: Option<&ScrubRecord>,
    keeps: usize,
) -> (Vec<ScrubRecord>, ScrubFigures) {
    let pages = storage.pool_pages;
    let figures = Mutex::new(before.map(|record| ScrubFigures::kept(record, pages)).unwrap_or_default());
    let summed = storage.disk.summed();
    let (kept, stopped) = (RefCell::new(Vec::new()), AtomicBool::new(false));
    let scrub = Scrub {
        pages: &storage.pages,
        space: storage.files.space(),
        disk: &summed,
        timer: &Moves(clock),
        clock,
        name: &|_| true,
        figures: &figures,
        keep: &|record| {
            kept.borrow_mut().push(*record);
            stopped.store(kept.borrow().len() >= keeps, Ordering::Relaxed);
        },
        seen: Cell::new(0),
        found: RefCell::default(),
    };
    // At this rate a step takes longer than a minute, so the state is kept after each.
    block_on(scrub.pass(2048, &stopped)).expect("a pass");
    let figures = *figures.lock();
    (kept.into_inner(), figures)
}

#[test]
fn a_pass_that_a_restart_cut_off_goes_on_from_where_it_was() {
    let storage = Storage::new(MANY as u64 + 100, 40);
    storage.meta.create(INO);
    // One write has at most 1 MiB.
    put(&storage, 0, 150);
    put(&storage, 150, MANY - 150);
    block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
    block_on(storage.pages.evict(&storage.disk, 40));
    let clock = ManualClock::default();
    clock.advance(Duration::from_secs(1000));
    let (_, whole) = pass_of(&storage, &clock, None, usize::MAX);
    assert_eq!(whole.current, PassFigures { pages: MANY as u64, ..PassFigures::default() });
    assert!(whole.last.is_some() && !whole.is_unfinished && whole.last_ended_secs > whole.began_secs);

    // One rotten page is in the first part of the pass, one in the rest.
    let (early, late) = (pool_page(&storage, 3), pool_page(&storage, MANY as u64 - 3));
    assert!(early.0 < 64 && late.0 > 256, "{early} {late}");
    flip(&storage, early);
    flip(&storage, late);
    let (kept, cut) = pass_of(&storage, &clock, None, 2);
    assert!(cut.is_unfinished && !cut.is_running && cut.last.is_none());
    let record = *kept.last().expect("kept");
    let position = record.position.expect("unfinished");
    assert!((64..256).contains(&position), "{position}");
    assert_eq!(record.current.rotten, 1);
    let (kept, rest) = pass_of(&storage, &clock, Some(&record), usize::MAX);
    assert!(kept.iter().all(|record| record.position.is_none_or(|at| at > position)), "{kept:?}");
    assert_eq!(rest.last, Some(PassFigures { pages: MANY as u64, rotten: 2, ..PassFigures::default() }));
    assert_eq!(rest.began_secs, cut.began_secs, "it is one pass");

    // The figures of the pass are there after the next start.
    let record = *kept.last().expect("kept");
    let next = ScrubFigures::kept(&record, storage.pool_pages);
    assert_eq!(
        (next.last, next.last_ended_secs, next.is_unfinished),
        (rest.last, rest.last_ended_secs, false)
    );
    assert_eq!(next.record(), Some(record));
    // A kept position outside of the pool is ignored.
    let beyond = ScrubRecord { position: Some(storage.pool_pages + 1), ..record };
    assert!(!ScrubFigures::kept(&beyond, storage.pool_pages).is_unfinished);
}
