//! Several writers sync pages of the same zone of the pool, with idle time between that is long enough for marks to be cleared, and with write-backs
//! that are given up half-way. A writer whose sync succeeded finds its bytes after a power loss.

use super::harness::Storage;
use super::harness::write;
use super::records::inode;
use crate::files::write_back::write_back;
use crate::files::{WriteAt, write_back_all};
use crate::pages::Source;
use crate::pool::simdisk::SimMode;
use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Random, SeededRandom};
use futures_lite::future::{block_on, poll_once};
use std::future::Future;
use std::pin::{Pin, pin};

/// A bit more than two zones of 256 pages.
const POOL_PAGES: u64 = 600;
const FRAMES: u64 = 40;
/// Files of one page each, all in the first zone.
const WRITERS: u64 = 12;
/// A file whose pages fill the first zone and go on in the second.
const LARGE: u64 = 50;
const LARGE_PAGES: u64 = 300;
/// Enough sweeps to clear the mark of every zone without writes.
const SWEEPS: usize = 3;

fn version(ino: u64, number: u8) -> Vec<u8> {
    (0..PAGE_SIZE).map(|at| number ^ (ino as u8).wrapping_mul(29) ^ (at / 7) as u8).collect()
}

fn storage() -> Storage {
    let storage = Storage::new(POOL_PAGES, FRAMES);
    let inodes = (0..WRITERS).map(|writer| writer + 1).chain([LARGE]);
    inodes.for_each(|ino| storage.meta.create(inode(ino)));
    (1..=WRITERS).for_each(|ino| block_on(put(&storage, ino, 0, 0)).expect("writes"));
    (0..LARGE_PAGES).for_each(|page| block_on(put(&storage, LARGE, page, 0)).expect("writes"));
    block_on(write_back_all(&storage.files, &storage.disk)).expect("synced");
    storage
}

async fn put(storage: &Storage, ino: u64, page: u64, number: u8) -> Result<(), Status> {
    let bytes = version(ino, number);
    let (file, at) = (storage.file(ino), WriteAt::Offset(page * PAGE_SIZE as u64));
    write(&storage.files, &storage.disk, &file, at, Source::Bytes(&bytes)).await.map(|_| ())
}

async fn put_and_sync(storage: &Storage, ino: u64, page: u64, number: u8) -> Result<(), Status> {
    put(storage, ino, page, number).await?;
    write_back(&storage.files, &storage.disk, &[storage.file(ino)], true).await
}

/// Runs all calls to their ends, in an order that `random` chooses.
fn together<T>(
    storage: &Storage,
    mut calls: Vec<Pin<Box<dyn Future<Output = T> + '_>>>,
    random: &SeededRandom,
) -> Vec<T> {
    let mut results = Vec::new();
    while !calls.is_empty() {
        let index = (random.next_u64() % calls.len() as u64) as usize;
        if let Some(result) = block_on(poll_once(&mut calls[index])) {
            results.push(result);
            drop(calls.swap_remove(index));
        }
        if random.next_u64().is_multiple_of(3) {
            storage.disk.step();
        }
    }
    results
}

fn alone<T>(storage: &Storage, call: impl Future<Output = T>) -> T {
    let mut call = pin!(call);
    loop {
        if let Some(result) = block_on(poll_once(&mut call)) {
            return result;
        }
        assert!(storage.disk.step(), "nothing is under way that it could wait for");
    }
}

fn idle(storage: &Storage) {
    for _ in 0..SWEEPS {
        alone(storage, storage.disk.summed().sweep()).expect("swept");
    }
}

#[test]
fn many_overwrite_and_sync_in_one_zone_with_idle_time_between() {
    for seed in 0..25 {
        let (storage, random) = (storage(), SeededRandom::new(seed));
        let pool_page = |ino| storage.meta.extents(inode(ino)).expect("extents")[0].pool_page.0;
        assert!((1..=WRITERS).all(|ino| pool_page(ino) < 256), "they are in one zone");
        storage.disk.set_mode(SimMode::Deferred);
        for round in 1..5u8 {
            let writers = 1..=WRITERS - random.next_u64() % 6;
            let calls =
                writers.clone().map(|ino| Box::pin(put_and_sync(&storage, ino, 0, round)) as _).collect();
            assert!(together(&storage, calls, &random).iter().all(Result::is_ok));
            if random.next_u64().is_multiple_of(2) {
                idle(&storage);
            }
            // Then a page of the second zone is written, which needs a mark of its own.
            alone(&storage, put_and_sync(&storage, LARGE, LARGE_PAGES - 1, round)).expect("synced");
            assert_eq!(storage.disk.peek(pool_page(1)), version(1, round), "seed {seed} round {round}");
        }
        storage.disk.crash(&random);
        storage.disk.set_mode(SimMode::AtOnce);
        let next = storage.restart(storage.meta.killed());
        let bytes = next.read(&next.file(LARGE), (LARGE_PAGES - 1) * PAGE_SIZE as u64, PAGE_SIZE);
        assert_eq!(bytes, Ok(version(LARGE, 4)), "seed {seed}");
        assert_eq!(next.read(&next.file(1), 0, PAGE_SIZE), Ok(version(1, 4)), "seed {seed}");
    }
}

/// A write-back is given up after each number of disk steps. The next sync then succeeds only if all bytes are durable.
#[test]
fn what_a_write_back_took_goes_back_wherever_it_is_given_up() {
    let mut given_up = 0;
    for steps in 0.. {
        let storage = storage();
        block_on(put(&storage, 1, 0, 1)).expect("writes");
        // One page is overwritten, the other is fresh.
        block_on(put(&storage, 1, 1, 1)).expect("writes");
        storage.disk.set_mode(SimMode::Deferred);
        let all = steps % 2 == 1;
        let was_done = {
            let files = [storage.file(1)];
            let mut call: Pin<Box<dyn Future<Output = _>>> = match all {
                true => Box::pin(write_back_all(&storage.files, &storage.disk)),
                false => Box::pin(write_back(&storage.files, &storage.disk, &files, true)),
            };
            let mut done = block_on(poll_once(&mut call)).is_some();
            for _ in 0..steps / 2 {
                storage.disk.step();
                done = done || block_on(poll_once(&mut call)).is_some();
                if done {
                    break;
                }
            }
            done
        };
        let file = storage.file(1);
        assert_eq!(file.is_clean(), was_done, "after {steps} steps: what was taken is with the file again");
        // The disk completes the requests of the write-back that was given up.
        while storage.disk.step() {}
        storage.disk.set_mode(SimMode::AtOnce);
        if was_done && all {
            assert!(given_up > 5, "{given_up}");
            return;
        }
        given_up += usize::from(!was_done);
        let synced = match all {
            // This one finds the file in the list of changed files.
            true => block_on(write_back_all(&storage.files, &storage.disk)),
            false => block_on(write_back(&storage.files, &storage.disk, &[file], true)),
        };
        storage.disk.crash(&SeededRandom::new(steps));
        let next = storage.restart(storage.meta.killed());
        for page in 0..2 {
            let found = next.read(&next.file(1), page * PAGE_SIZE as u64, PAGE_SIZE);
            if synced.is_ok() {
                assert_eq!(found, Ok(version(1, 1)), "after {steps} steps");
            }
        }
    }
}
