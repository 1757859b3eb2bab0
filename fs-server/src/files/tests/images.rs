//! fsync of a few pages, by images: its cost, the state that it leaves, and the cases in which it goes another way.

use super::harness::{Storage, stamped};
use super::harness::{allocate_range, write};
use super::records::inode;
use crate::files::images::IMAGE_PAGES;
use crate::files::write_back::write_back;
use crate::files::{WriteAt, begin_sync, sync, truncate, write_back_all};
use crate::pages::Source;
use crate::pool::simdisk::SimMode;
use cuttlefs_common::ids::{PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::rpc::Allocate;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::SeededRandom;
use futures_lite::future::block_on;

const PAGE: u64 = PAGE_SIZE_U64;

fn storage(frames: u64) -> Storage {
    let storage = Storage::new(96, frames);
    storage.meta.create(inode(1));
    storage.meta.create(inode(2));
    storage
}

fn put(storage: &Storage, ino: u64, offset: u64, len: usize) {
    let bytes = stamped(ino, offset, len);
    let (file, at) = (storage.file(ino), WriteAt::Offset(offset));
    block_on(write(&storage.files, &storage.disk, &file, at, Source::Bytes(&bytes))).expect("writes");
}

fn put_bytes(storage: &Storage, offset: u64, bytes: &[u8]) {
    let (file, at) = (storage.file(1), WriteAt::Offset(offset));
    block_on(write(&storage.files, &storage.disk, &file, at, Source::Bytes(bytes))).expect("writes");
}

fn synced(storage: &Storage, ino: u64) {
    block_on(sync(&storage.files, &storage.disk, &storage.file(ino))).expect("durable");
}

/// Cuts the power: everything that was not synced is lost.
fn lose_power(storage: &Storage) -> Storage {
    storage.disk.crash(&SeededRandom::new(7));
    storage.disk.set_mode(SimMode::AtOnce);
    storage.restart(storage.meta.crash(0))
}

fn content(storage: &Storage, ino: u64) -> Vec<u8> {
    let file = storage.file(ino);
    storage.read(&file, 0, file.size() as usize).expect("readable")
}

#[test]
fn little_is_durable_without_a_write_or_a_sync_of_the_data_files() {
    let storage = storage(40);
    put(&storage, 1, 100, IMAGE_PAGES * PAGE_SIZE - 200);
    let before = storage.disk.counters();
    synced(&storage, 1);
    let after = storage.disk.counters();
    assert_eq!((after.writes, after.syncs), (before.writes, before.syncs));
    assert_eq!((storage.pages.data_syncs(), storage.meta.placed_images().len()), (0, IMAGE_PAGES));
    let expected = content(&storage, 1);
    let next = lose_power(&storage);
    assert_eq!(next.meta.placed_images(), []);
    assert!(content(&next, 1) == expected);
    next.check();
}

#[test]
fn a_sync_that_is_begun_is_durable_with_the_next_flush_and_nothing_is_left_to_who_asks() {
    let storage = storage(40);
    put(&storage, 1, 0, 3 * PAGE_SIZE);
    assert!(block_on(begin_sync(&storage.files, &storage.file(1))));
    assert_eq!((storage.pages.data_syncs(), storage.meta.placed_images().len()), (0, 3));
    // Bytes written after the sync began belong to the next sync.
    put_bytes(&storage, 0, b"later");
    storage.meta.flush().expect("flushed");
    let next = lose_power(&storage);
    assert!(content(&next, 1) == stamped(1, 0, 3 * PAGE_SIZE));
    put(&next, 1, 0, 3 * PAGE_SIZE);
    assert!(block_on(begin_sync(&next.files, &next.file(1))));
    let begun = next.meta.placed_images();
    synced(&next, 1);
    assert_eq!(next.meta.placed_images(), begun);
    // A sync of many pages is not begun ahead: the caller of fsync has to do it, and to wait.
    put(&next, 2, 0, (IMAGE_PAGES + 1) * PAGE_SIZE);
    assert!(!block_on(begin_sync(&next.files, &next.file(2))));
    assert_eq!((next.pages.data_syncs(), next.meta.placed_images()), (0, begun));
}

#[test]
fn without_its_images_a_server_would_not_have_it() {
    // The other tests here and the random walks rely on this: without the images the bytes are nowhere.
    let storage = storage(40);
    put(&storage, 1, 0, 3 * PAGE_SIZE);
    synced(&storage, 1);
    storage.disk.crash(&SeededRandom::new(7));
    storage.disk.set_mode(SimMode::AtOnce);
    let meta = storage.meta.crash(0);
    meta.forget_images();
    let next = storage.restart(meta);
    let file = next.file(1);
    assert!(next.read(&file, 0, 3 * PAGE_SIZE) != Ok(stamped(1, 0, 3 * PAGE_SIZE)));
}

#[test]
fn write_back_puts_pages_in_their_places_and_has_their_images_removed() {
    let storage = storage(40);
    put(&storage, 1, 0, 5 * PAGE_SIZE);
    put(&storage, 2, 0, PAGE_SIZE);
    synced(&storage, 1);
    synced(&storage, 2);
    assert_eq!(storage.meta.placed_images().len(), 6);
    assert!(!storage.file(1).is_clean(), "write-back is to come");
    block_on(write_back(&storage.files, &storage.disk, &[storage.file(2)], true)).expect("durable");
    assert_eq!(storage.meta.placed_images().len(), 5);
    block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
    assert_eq!((storage.meta.placed_images(), storage.files.is_written_back()), (vec![], true));
    assert!(storage.file(1).is_clean());
    let next = lose_power(&storage);
    assert!(content(&next, 1) == stamped(1, 0, 5 * PAGE_SIZE));
    next.check();
}

#[test]
fn a_sync_makes_images_of_what_is_new_only() {
    let storage = storage(60);
    for page in 0..2 * IMAGE_PAGES as u64 {
        put(&storage, 1, page * PAGE, PAGE_SIZE);
        synced(&storage, 1);
    }
    assert_eq!((storage.pages.data_syncs(), storage.meta.placed_images().len()), (0, 2 * IMAGE_PAGES));
    // A page that is written again gets another image, and the newer image is the one that counts.
    put_bytes(&storage, PAGE + 5, b"newer");
    put_bytes(&storage, 3 * PAGE, b"not synced");
    let page = content(&storage, 1)[PAGE as usize..2 * PAGE_SIZE].to_vec();
    synced(&storage, 1);
    assert_eq!((storage.pages.data_syncs(), storage.meta.placed_images().len()), (0, 2 * IMAGE_PAGES));
    put_bytes(&storage, PAGE + 5, b"later");
    let next = lose_power(&storage);
    let found = content(&next, 1);
    assert!(found[PAGE as usize..2 * PAGE_SIZE] == page[..], "as of the sync");
    assert!(found[3 * PAGE_SIZE..].starts_with(b"not synced"));
    next.check();
}

#[test]
fn much_goes_to_its_places_at_once() {
    let storage = storage(60);
    put(&storage, 1, 0, PAGE_SIZE);
    synced(&storage, 1);
    put(&storage, 1, PAGE, (IMAGE_PAGES + 1) * PAGE_SIZE);
    synced(&storage, 1);
    assert_eq!((storage.pages.data_syncs(), storage.meta.placed_images()), (1, vec![]));
    let next = lose_power(&storage);
    assert!(content(&next, 1) == stamped(1, 0, (IMAGE_PAGES + 2) * PAGE_SIZE));
}

#[test]
fn pages_that_are_not_in_frames_are_synced_where_they_are() {
    // With 4 frames some pages are written directly to SSD; with 40 frames they are evicted before the sync.
    for (frames, evicted) in [(4, 0), (40, 40)] {
        let storage = storage(frames);
        put(&storage, 1, 0, 8 * PAGE_SIZE);
        assert_eq!(block_on(storage.pages.evict(&storage.disk, evicted)) > 0, evicted > 0);
        synced(&storage, 1);
        assert_eq!((storage.pages.data_syncs(), storage.meta.placed_images()), (1, vec![]));
        let next = lose_power(&storage);
        assert!(content(&next, 1) == stamped(1, 0, 8 * PAGE_SIZE));
    }
}

#[test]
fn a_page_that_left_its_file_does_not_come_back_with_its_image() {
    let storage = storage(40);
    put(&storage, 1, 0, 8 * PAGE_SIZE);
    synced(&storage, 1);
    let (files, disk, file) = (&*storage.files, &storage.disk, storage.file(1));
    let commit = |commit| {
        storage.meta.commit_data(&[commit])?;
        storage.meta.attr(inode(1))
    };
    block_on(allocate_range(files, disk, &file, PAGE, PAGE, Allocate::PunchHole)).expect("punches");
    let zeros = Allocate::ZeroRange { keep_size: true };
    block_on(allocate_range(files, disk, &file, 2 * PAGE, PAGE, zeros)).expect("zeroes");
    block_on(truncate(files, disk, &file, 5 * PAGE + 10, commit)).expect("cuts");
    block_on(truncate(files, disk, &file, 7 * PAGE, commit)).expect("grows");
    // The punched and cut pages are given to another file.
    put(&storage, 2, 0, 3 * PAGE_SIZE);
    synced(&storage, 2);
    synced(&storage, 1);
    let (one, two) = (content(&storage, 1), content(&storage, 2));
    let next = lose_power(&storage);
    assert!(content(&next, 1) == one && content(&next, 2) == two);
    assert!(one[PAGE_SIZE..3 * PAGE_SIZE].iter().chain(&one[5 * PAGE_SIZE + 10..]).all(|byte| *byte == 0));
    next.check();
}

#[test]
fn a_batch_that_fails_leaves_all_to_the_next_sync() {
    let storage = storage(40);
    put(&storage, 1, 0, 2 * PAGE_SIZE);
    storage.meta.fail_batches(true);
    let failed = block_on(sync(&storage.files, &storage.disk, &storage.file(1)));
    assert_eq!(failed, Err(Status::Io));
    storage.meta.fail_batches(false);
    synced(&storage, 1);
    assert_eq!(storage.meta.placed_images().len(), 2);
    let next = lose_power(&storage);
    assert!(content(&next, 1) == stamped(1, 0, 2 * PAGE_SIZE));
}

#[test]
fn behind_a_failed_data_sync_nothing_is_durable_any_more() {
    let storage = storage(60);
    put(&storage, 1, 0, (IMAGE_PAGES + 1) * PAGE_SIZE);
    storage.disk.fail_next_sync(libc::EIO);
    let sync_it = |ino| block_on(sync(&storage.files, &storage.disk, &storage.file(ino)));
    assert_eq!(sync_it(1), Err(Status::Io));
    put(&storage, 2, 0, 10);
    assert_eq!(sync_it(2), Err(Status::Io), "what is on SSD is unknown");
}
