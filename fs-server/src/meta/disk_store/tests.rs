//! Overlays, checkpoints under way, and a disk that is full.

use super::*;
use crate::meta::extent_edit::ExtentEdit;
use crate::meta::key;
use crate::meta::name::HashKey;
use crate::meta::operation::RangeUpdate;
use crate::meta::view::View;
use cuttlefs_common::ids::{FilePage, InodeNo, PoolPage};
use cuttlefs_common::region::{Extent, ExtentState};
use std::collections::BTreeMap;
use std::time::Instant;

fn opened(path: &Path, checkpoint_bytes: u64) -> DiskStore {
    let options =
        DiskOptions { cache_bytes: 1 << 20, reserve_bytes: 0, checkpoint_bytes, ..DiskOptions::default() };
    DiskStore::open(path, options).expect("open")
}

fn put(store: &DiskStore, number: u32) -> Result<(), StoreError> {
    let mut batch = Batch::default();
    batch.put(format!("Z{number:06}").into_bytes(), vec![number as u8; 300]);
    if number >= 50 {
        batch.remove(format!("Z{:06}", number - 50).into_bytes());
    }
    store.commit(batch)
}

fn all(store: &DiskStore, direction: Direction) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut found = Vec::new();
    let visit: Visitor<'_> = &mut |key, value| {
        found.push((key.to_vec(), value.to_vec()));
        true
    };
    store.scan(b"Z", b"[", direction, visit).expect("scan");
    found
}

fn expected(last: u32) -> Vec<(Vec<u8>, Vec<u8>)> {
    let first = (last + 1).saturating_sub(50);
    (first..=last).map(|number| (format!("Z{number:06}").into_bytes(), vec![number as u8; 300])).collect()
}

#[test]
fn layers_are_one_store_while_checkpoints_go_on() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("meta");
    let store = opened(&path, 8 << 10);
    for number in 0..3000 {
        put(&store, number).expect("commits");
        if number % 100 == 99 {
            let forward = all(&store, Direction::Forward);
            assert_eq!(forward, expected(number));
            let mut reverse = all(&store, Direction::Reverse);
            reverse.reverse();
            assert_eq!(reverse, forward);
            assert_eq!(store.count(b'Z').expect("count"), 50);
        }
    }
    // On a slow disk the last checkpoints are still under way.
    let until = Instant::now() + Duration::from_secs(60);
    while store.shared.layers().base.applied <= 1000 {
        assert!(Instant::now() < until, "checkpoints are made");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(store);
    let store = opened(&path, 8 << 10);
    assert_eq!(all(&store, Direction::Forward), expected(2999));
    assert_eq!(store.count(b'Z').expect("count"), 50);
}

/// Opens the store in `from`, commits batches until the `nth` sync of a checkpoint, and copies the files to `to` at that moment, as a kill would
/// leave them, with some batches already in the log's other file. Checks that the store begins with all batches up to `least`. Returns the last batch
/// that the copy must have.
fn killed_in_a_checkpoint(from: &Path, to: &Path, nth: u64, least: u32) -> u32 {
    let [committed, syncs, kept] = [0; 3].map(|zero| Arc::new(AtomicU64::new(zero)));
    let observer = {
        let (committed, kept) = (committed.clone(), kept.clone());
        let (from, to) = (from.to_path_buf(), to.to_path_buf());
        move |name: &'static str, is_done: bool| {
            let begun = committed.load(Ordering::Acquire);
            let is_checkpoint = name == checkpoint::FILE_NAME && !is_done && begun > 0;
            if !is_checkpoint || syncs.fetch_add(1, Ordering::Relaxed) + 1 != nth {
                return;
            }
            while committed.load(Ordering::Acquire) < begun + 20 {
                std::thread::yield_now();
            }
            let least = committed.load(Ordering::Acquire);
            std::fs::create_dir(&to).expect("makes a directory");
            for file in std::fs::read_dir(&from).expect("lists").map(|file| file.expect("lists")) {
                std::fs::copy(file.path(), to.join(file.file_name())).expect("copies");
            }
            kept.store(least, Ordering::Release);
        }
    };
    let options = DiskOptions {
        cache_bytes: 1 << 20,
        reserve_bytes: 0,
        checkpoint_bytes: 8 << 10,
        ..DiskOptions::default()
    };
    let store = DiskStore::open_observed(from, options, Box::new(observer)).expect("open");
    let found = all(&store, Direction::Forward);
    let number = |key: &[u8]| str::from_utf8(&key[1..]).expect("digits").parse::<u32>().expect("a number");
    let mut last = found.last().map_or(0, |(key, _)| number(key));
    assert!(last >= least, "{least} was there, and {last} is");
    assert!(found.is_empty() || found == expected(last), "up to {last}");
    loop {
        last += 1;
        put(&store, last).expect("commits");
        committed.store(u64::from(last), Ordering::Release);
        match kept.load(Ordering::Acquire) {
            0 => {}
            least => return least as u32,
        }
    }
}

#[test]
fn lives_that_each_end_in_a_checkpoint_lose_nothing() {
    let directory = tempfile::tempdir().expect("directory");
    let path = |life: u64| directory.path().join(format!("meta{life}"));
    let store = opened(&path(0), 8 << 10);
    put(&store, 0).expect("commits");
    drop(store);
    (0..40).fold(0, |least, life| killed_in_a_checkpoint(&path(life), &path(life + 1), 1 + life % 4, least));
}

/// Once, each of 150,000 scans that ended with their first record copied 64 records.
#[test]
fn a_scan_that_ends_at_once_copies_few_records_and_a_whole_one_each_once() {
    let directory = tempfile::tempdir().expect("directory");
    let store = opened(&directory.path().join("meta"), 1 << 20);
    let mut batch = Batch::default();
    (0..1000_u32).for_each(|number| batch.put(format!("Z{number:06}").into_bytes(), vec![1]));
    store.commit(batch).expect("commits");
    let copied_by = |direction, most: usize| {
        overlay::COPIED.set(0);
        let mut left = most;
        let visit: Visitor<'_> = &mut |_, _| {
            left -= 1;
            left > 0
        };
        store.scan(b"Z", b"[", direction, visit).expect("scan");
        overlay::COPIED.get()
    };
    for direction in [Direction::Forward, Direction::Reverse] {
        assert!(copied_by(direction, 1) <= 2, "{direction:?}: the first record only");
        assert!(copied_by(direction, 10) <= 20, "{direction:?}: ten records");
        assert_eq!(copied_by(direction, usize::MAX), 1000, "{direction:?}: all of them");
    }
}

/// Many extents of a file were removed and as many are added. Once, each search for the extent in front passed all that were removed.
#[test]
fn who_puts_extents_where_many_were_removed_walks_over_them_once() {
    const EXTENTS: u64 = 2000;
    let directory = tempfile::tempdir().expect("directory");
    let store = opened(&directory.path().join("meta"), u64::MAX);
    let (ino, all) = (InodeNo(7), || (0..EXTENTS).map(|number| FilePage(2 * number)));
    let mut batch = Batch::default();
    all().for_each(|page| batch.remove(key::extent(ino, page)));
    store.commit(batch).expect("commits");
    overlay::COPIED.set(0);
    let view = View::of_store(&store, HashKey([7; 16]));
    let mut edit = ExtentEdit::default();
    for file_page in all() {
        let (pool_page, state) = (PoolPage(file_page.0), ExtentState::Written);
        let extents = vec![Extent { file_page, pool_page, len_pages: 1, state }];
        let update = RangeUpdate { first: file_page, end: FilePage(file_page.0 + 1), extents };
        edit.replace(view, ino, &update).expect("an extent more");
    }
    assert_eq!(edit.allocated_delta(), i128::from(EXTENTS));
    let copied = overlay::COPIED.get() as u64;
    assert!(copied <= 4 * EXTENTS, "{copied} records for {EXTENTS} extents");
}

#[test]
fn many_removals_begin_a_checkpoint() {
    let directory = tempfile::tempdir().expect("directory");
    let store = opened(&directory.path().join("meta"), u64::MAX);
    for first in (0..2 * REMOVED_MOST).step_by(64) {
        let mut batch = Batch::default();
        (first..first + 64).for_each(|number| batch.remove(format!("Z{number:06}").into_bytes()));
        store.commit(batch).expect("commits");
    }
    let began = std::time::Instant::now();
    while store.shared.layers().base.applied == 0 {
        assert!(began.elapsed().as_secs() < 60, "no checkpoint is made");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn a_record_that_is_written_again_and_again_does_not_grow_the_log_for_ever() {
    let directory = tempfile::tempdir().expect("directory");
    let store = opened(&directory.path().join("meta"), 8 << 10);
    // These commits are more than the bound of the log, at which commits wait. The overlay has only one record all the time.
    for _ in 0..OVERLAY_MAX_BYTES / 300 + 1000 {
        put(&store, 7).expect("commits");
        if store.shared.layers().base.applied > 0 {
            return;
        }
    }
    panic!("no checkpoint was made: {} bytes of log", store.shared.last.lock().tail.len_bytes());
}

#[test]
fn a_settled_store_has_no_log() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("meta");
    let store = opened(&path, u64::MAX);
    let empty = store.shared.last.lock().tail.len_bytes();
    store.settle().expect("nothing to do");
    (0..200).for_each(|number| put(&store, number).expect("commits"));
    assert!(store.shared.last.lock().tail.len_bytes() > empty + 60_000);
    store.settle().expect("settles");
    assert_eq!(store.shared.last.lock().tail.len_bytes(), empty);
    assert_eq!(store.shared.layers().base.applied, 200);
    put(&store, 200).expect("goes on");
    drop(store);
    assert_eq!(all(&opened(&path, u64::MAX), Direction::Forward), expected(200));
}

#[test]
fn an_opening_gives_back_what_deleted_records_left() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("meta");
    let store = opened(&path, 1 << 20);
    let many = |remove: bool| {
        for first in (0..200_000u32).step_by(1000) {
            let mut batch = Batch::default();
            for number in first..first + 1000 {
                // Every thousandth record stays, so that some are left all over the file.
                let key = format!("Y{number:06}").into_bytes();
                if !remove {
                    batch.put(key, vec![number as u8; 400]);
                } else if number % 1000 != 0 {
                    batch.remove(key);
                }
            }
            store.commit(batch).expect("commits");
        }
        store.settle().expect("settles");
    };
    many(false);
    let most = checkpoint::file_bytes(&store.shared.path);
    many(true);
    (0..60).for_each(|number| put(&store, number).expect("commits"));
    drop(store);
    let store = opened(&path, 1 << 20);
    let left = checkpoint::file_bytes(&store.shared.path);
    assert!(most > 80 << 20 && left < most / 10, "{most} bytes became {left}");
    assert_eq!(all(&store, Direction::Forward), expected(59));
    assert_eq!(store.count(b'Y').expect("count"), 200);
    for number in (0..200_000).step_by(1000) {
        let found = store.get(format!("Y{number:06}").as_bytes()).expect("reads");
        assert_eq!(found, Some(vec![number as u8; 400]));
    }
}

#[test]
fn a_disk_that_is_full_for_a_while_harms_nothing() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("meta");
    let store = opened(&path, 8 << 10);
    (0..500).for_each(|number| put(&store, number).expect("commits"));
    store.flush().expect("flushes");
    store.shared.space.set_full(true);
    for _ in 0..3 {
        assert!(matches!(put(&store, 500), Err(StoreError::Full)), "the log has no space");
    }
    store.flush().expect("what was committed is durable");
    assert_eq!(all(&store, Direction::Forward), expected(499));
    store.shared.space.set_full(false);
    (500..1000).for_each(|number| put(&store, number).expect("commits"));
    assert_eq!(all(&store, Direction::Forward), expected(999));
    drop(store);
    assert_eq!(all(&opened(&path, 8 << 10), Direction::Forward), expected(999));
}

#[test]
fn a_checkpoint_waits_for_space_and_readers_do_not() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("meta");
    let store = opened(&path, u64::MAX);
    (0..500).for_each(|number| put(&store, number).expect("commits"));
    let shared = store.shared.clone();
    let (frozen, base, batch) = {
        let mut last = shared.last.lock();
        let mut layers = shared.layers.write();
        let frozen = std::mem::take(&mut layers.active);
        layers.frozen = Some(frozen.clone());
        last.tail.turn();
        (frozen, layers.base.clone(), last.batch)
    };
    shared.space.set_full(true);
    std::thread::scope(|scope| {
        let checkpoint = scope.spawn(|| shared.make_checkpoint(&frozen, base.clone(), batch));
        while !shared.space.is_stuck() {
            std::thread::yield_now();
        }
        assert_eq!(all(&store, Direction::Forward), expected(499));
        shared.space.set_full(false);
        checkpoint.join().expect("no panic").expect("it is written in the end");
    });
    let found: BTreeMap<_, _> = all(&store, Direction::Forward).into_iter().collect();
    assert_eq!(found.into_iter().collect::<Vec<_>>(), expected(499));
    assert!(store.shared.layers().base.applied == batch && store.shared.layers().frozen.is_none());
    drop((store, shared, base, frozen));
    assert_eq!(all(&opened(&path, 8 << 10), Direction::Forward), expected(499));
}

#[test]
fn contents_are_taken_as_long_as_few_wait() {
    let directory = tempfile::tempdir().expect("directory");
    let store = opened(&directory.path().join("meta"), u64::MAX);
    let key = |page| key::image(InodeNo(5), FilePage(page)).to_vec();
    let put = |page| {
        let mut batch = Batch::default();
        batch.put(key(page), vec![1; 4096]);
        store.commit(batch).expect("commits");
    };
    let most = CONTENTS_MOST_BYTES / 4096;
    (0..most).for_each(|page| {
        assert!(store.takes_contents());
        put(page);
    });
    assert!(!store.takes_contents());
    // A newer version of an image takes no more room, and a removed image makes room.
    put(0);
    let mut batch = Batch::default();
    batch.remove(key(1));
    store.commit(batch).expect("commits");
    assert!(store.takes_contents());
    assert_eq!(store.shared.layers().active.image_bytes(), CONTENTS_MOST_BYTES - 4096);
    put(1);
    assert!(!store.takes_contents());
    store.settle().expect("settles");
    assert!(store.takes_contents(), "what is in a checkpoint does not wait");
}
