//! Moves of a file's pages: what stays, what each failure leaves, and a power loss at each moment of one.

use super::grants::{BOTH, OWNERS};
use super::harness::{Storage, allocate_range, defragment_all, stamped, write};
use super::records::inode;
use crate::files::{
    Grantee, WriteAt, defragment, grant_write, release_space, sync, truncate, write_back_all,
};
use crate::pages::Source;
use crate::pool::disk::IoKind;
use crate::pool::simdisk::{SimFault, SimMode};
use cuttlefs_common::ids::{FilePage, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::rdma::{FileRead, FileTarget, FileWrite, PeerKey};
use cuttlefs_common::rpc::Allocate;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::SeededRandom;
use futures_lite::future::{block_on, poll_once};
use std::pin::pin;

const POOL_PAGES: u64 = 64;
const FRAMES: u64 = 43;
const PAGES: u64 = 10;
const LEN: usize = PAGES as usize * PAGE_SIZE;

fn put(storage: &Storage, ino: u64, page: u64, pages: u64) {
    let (offset, len) = (page * PAGE_SIZE_U64, pages as usize * PAGE_SIZE);
    let bytes = stamped(ino, offset, len);
    let (file, at) = (storage.file(ino), WriteAt::Offset(offset));
    block_on(write(&storage.files, &storage.disk, &file, at, Source::Bytes(&bytes))).expect("writes");
}

/// Two files that were written in turns, so that no two pages of a file are neighbours in the pool. The first one is in frames as far as they go.
fn scattered() -> Storage {
    let storage = Storage::new(POOL_PAGES, FRAMES);
    (1..=2).for_each(|ino| storage.meta.create(inode(ino)));
    for page in 0..PAGES {
        put(&storage, 2, page, 1);
        put(&storage, 1, page, 1);
    }
    block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
    assert_eq!(storage.breaks(&storage.file(1)), PAGES as usize - 1);
    storage
}

fn all_is_there(storage: &Storage) {
    for ino in storage.meta.files().into_iter().filter(|ino| *ino <= 2) {
        assert!(
            storage.read(&storage.file(ino), 0, LEN).expect("reads") == stamped(ino, 0, LEN),
            "file {ino}"
        );
    }
    storage.check();
}

fn move_all(storage: &Storage) -> Result<u64, Status> {
    block_on(defragment_all(&storage.files, &storage.disk, &storage.file(1)))
}

fn resident(storage: &Storage) -> Vec<bool> {
    let file = storage.file(1);
    let state = file.state();
    let pool = |page| state.table.get(FilePage(page)).expect("mapped").0;
    (0..PAGES).map(|page| storage.pages.residency.load(pool(page)).is_resident()).collect()
}

#[test]
fn pages_move_and_all_else_stays() {
    let storage = scattered();
    block_on(storage.pages.evict(&storage.disk, 13));
    let (attr, layout) = (storage.meta.attr(inode(1)), storage.file(1).layout(FilePage(0), 100));
    let (frames, free) = (resident(&storage), storage.files.space().figures().free);
    assert!(frames.contains(&true) && frames.contains(&false), "{frames:?}");
    assert_eq!(move_all(&storage), Ok(PAGES));
    let file = storage.file(1);
    let moved = file.layout(FilePage(0), 100);
    assert_eq!((moved.extents.len(), layout.extents.len()), (1, PAGES as usize));
    assert_ne!(moved.generation, layout.generation);
    assert_eq!(storage.meta.attr(inode(1)), attr, "times and counters are as they were");
    assert_eq!(resident(&storage), frames, "what was in frames still is");
    assert!(file.is_clean());
    all_is_there(&storage);
    block_on(release_space(&storage.files)).expect("flushed");
    assert_eq!(storage.files.space().figures().free, free);
    assert_eq!(move_all(&storage), Ok(0), "there is nothing left to be moved");
    drop(file);
    let next = storage.restart(storage.meta.killed());
    assert_eq!((next.breaks(&next.file(1)), next.files.space().figures().free), (0, free));
    all_is_there(&next);
}

#[test]
fn what_is_written_meanwhile_moves_along() {
    let storage = scattered();
    let file = storage.file(1);
    let step =
        |first| block_on(defragment(&storage.files, &storage.disk, &file, FilePage(first))).expect("moved");
    let first = step(0);
    assert_eq!((first.pages, first.next), (4, Some(FilePage(4))));
    // Dirty pages, images, a hole, and a longer file.
    put(&storage, 1, 5, 1);
    block_on(sync(&storage.files, &storage.disk, &file)).expect("durable");
    assert!(file.dirty.lock().values().any(|page| page.has_image));
    put(&storage, 1, 5, 2);
    let (offset, len) = (7 * PAGE_SIZE_U64, PAGE_SIZE_U64);
    block_on(allocate_range(&storage.files, &storage.disk, &file, offset, len, Allocate::PunchHole))
        .expect("a hole");
    put(&storage, 1, PAGES, 1);
    let (mut next, mut pages) = (first.next, first.pages);
    while let Some(at) = next {
        let moved = step(at.0);
        (next, pages) = (moved.next, pages + moved.pages);
    }
    assert_eq!(storage.breaks(&file), 0);
    assert!(pages > 4, "{pages}");
    put(&storage, 1, 7, 1);
    assert_eq!(storage.read(&file, 0, LEN + PAGE_SIZE).expect("reads"), stamped(1, 0, LEN + PAGE_SIZE));
    all_is_there(&storage);
    block_on(sync(&storage.files, &storage.disk, &file)).expect("durable");
    drop(file);
    let next = storage.restart(storage.meta.crash(0));
    all_is_there(&next);
}

#[test]
fn reserved_pages_move_without_bytes() {
    let storage = scattered();
    let file = storage.file(1);
    let zero = Allocate::ZeroRange { keep_size: true };
    let (files, disk) = (&storage.files, &storage.disk);
    block_on(allocate_range(files, disk, &file, 2 * PAGE_SIZE_U64, 3 * PAGE_SIZE_U64, zero)).expect("zeroed");
    let written = disk.counters().pages_written;
    assert_eq!(move_all(&storage), Ok(PAGES));
    assert_eq!((storage.breaks(&file), file.allocated_pages()), (0, PAGES));
    assert!(disk.counters().pages_written - written < 2 * PAGES);
    let mut known = stamped(1, 0, LEN);
    known[2 * PAGE_SIZE..5 * PAGE_SIZE].fill(0);
    assert!(storage.read(&file, 0, LEN).expect("reads") == known);
    assert_eq!(file.layout(FilePage(0), 100).extents.len(), 3, "the reserved part is still that");
    storage.check();
}

#[test]
fn grants_and_keys_stay() {
    let storage = scattered();
    let (files, owner) = (&storage.files, OWNERS[0]);
    let opened = files.open(owner, inode(1), BOTH).expect("opens");
    let grantee = Grantee { owner, filekey: opened.filekey };
    let (offset, len) = (3 * PAGE_SIZE_U64, 9 * PAGE_SIZE_U64);
    let pages = files.grants.take(&PeerKey::User(0), true, 9).expect("a share");
    block_on(grant_write(files, &storage.disk, &opened.file, grantee, (offset, len), pages))
        .expect("granted");
    let engine = |at, bytes: &[u8]| files.write_file(owner, opened.filekey, at, bytes);
    assert_eq!(engine(offset, b"before"), Ok(FileWrite::Done));
    assert_eq!(move_all(&storage), Ok(PAGES));
    assert_eq!(engine(offset + 3, b"ORE"), Ok(FileWrite::Done), "the pages are pinned where they are now");
    let mut bytes = [0; 6];
    assert_eq!(files.read_file(owner, opened.filekey, offset, &mut bytes), Ok(FileRead::Done(6)));
    assert_eq!(&bytes, b"befORE");
    assert_eq!(block_on(storage.pages.evict(&storage.disk, FRAMES as u32)) + 7, 20, "seven are pinned");
    storage.check();
    block_on(write_back_all(files, &storage.disk)).expect("durable");
    files.close(owner, opened.filekey).expect("closes");
    storage.check();
}

#[test]
fn a_step_that_fails_leaves_all_as_it_was() {
    let storage = scattered();
    let (files, disk) = (&storage.files, &storage.disk);
    let figures = files.space().figures();
    let layout = storage.file(1).layout(FilePage(0), 100);
    let fault = |kind| SimFault { pages: 0..POOL_PAGES, kind: Some(kind), errno: libc::EIO, times: 1 };
    for kind in [IoKind::Read, IoKind::Write] {
        disk.inject(fault(kind));
        assert_eq!(move_all(&storage), Err(Status::Io), "{kind:?}");
        disk.clear_faults();
        assert_eq!(files.space().figures(), figures, "{kind:?}");
    }
    storage.meta.fail_batches(true);
    assert_eq!(move_all(&storage), Err(Status::Io));
    storage.meta.fail_batches(false);
    let now = files.space().figures();
    assert_eq!(
        (now.free, now.quarantined),
        (figures.free - 4, 4),
        "nobody knows whether the batch is in the log"
    );
    assert_eq!(storage.file(1).layout(FilePage(0), 100), layout);
    all_is_there(&storage);
    block_on(release_space(files)).expect("flushed");
    assert_eq!(move_all(&storage), Ok(PAGES));
    all_is_there(&storage);
    block_on(release_space(files)).expect("flushed");
    assert_eq!(files.space().figures(), figures);
    put(&storage, 2, 3, 1);
    disk.fail_next_sync(libc::EIO);
    let of_other = block_on(defragment_all(files, disk, &storage.file(2)));
    assert_eq!(of_other, Err(Status::Io), "a failed sync is final");
    storage.check();
}

#[test]
fn a_rotten_page_is_not_moved() {
    let storage = scattered();
    let rotten = storage.file(1).state().table.get(FilePage(2)).expect("mapped").0;
    storage.disk.poke(rotten.0, &[7; PAGE_SIZE]);
    let free = storage.files.space().figures().free;
    assert_eq!(move_all(&storage), Err(Status::Io));
    assert_eq!(storage.files.space().figures().free, free);
    assert_eq!(storage.pages.figures().counts.rotten_pages, 1);
    all_is_there(&storage);
}

#[test]
fn a_pool_that_is_nearly_full_is_left_alone() {
    let storage = scattered();
    let (files, disk) = (&storage.files, &storage.disk);
    storage.meta.create(inode(3));
    let fill = |pages: u64| {
        let (file, how) = (storage.file(3), Allocate::Reserve { keep_size: true });
        block_on(allocate_range(files, disk, &file, 0, pages * PAGE_SIZE_U64, how)).expect("reserved");
    };
    // Room for the file, and none to spare: steps are smaller, and wait for the pages of those before.
    fill(POOL_PAGES - 3 * PAGES);
    let syncs = disk.counters().syncs;
    assert_eq!(move_all(&storage), Ok(PAGES));
    assert!(disk.counters().syncs - syncs >= 3);
    all_is_there(&storage);
    block_on(release_space(files)).expect("flushed");
    assert_eq!(files.space().figures().free, PAGES);
    fill(POOL_PAGES - 2 * PAGES - 5);
    let breaks = storage.breaks(&storage.file(2));
    assert_eq!(block_on(defragment_all(files, disk, &storage.file(2))), Err(Status::NoSpace));
    assert_eq!((storage.breaks(&storage.file(2)), files.space().figures().free), (breaks, 5));
    all_is_there(&storage);
}

#[test]
fn a_file_that_is_gone_or_closed_is_not_moved() {
    let storage = scattered();
    let (files, file) = (&storage.files, storage.file(1));
    let step = |first| block_on(defragment(files, &storage.disk, &file, FilePage(first)));
    assert_eq!(step(u64::MAX).map(|moved| moved.next), Ok(None), "behind any file");
    let commit = |commit| {
        storage.meta.commit_data(&[commit])?;
        storage.meta.attr(inode(1))
    };
    block_on(truncate(files, &storage.disk, &file, 0, commit)).expect("cut");
    assert_eq!(step(0).map(|moved| moved.pages), Ok(0));
    files.close_contents(inode(1));
    assert_eq!(step(0), Err(Status::Io));
}

/// Every state that a power loss may leave, at each step of the disk.
#[test]
fn a_power_loss_at_any_moment_loses_nothing() {
    let (mut ended, mut places) = (false, std::collections::BTreeSet::new());
    for steps in 0.. {
        let states = {
            let storage = scattered();
            run(&storage, steps);
            storage.meta.crash_states()
        };
        for keep in 0..states {
            let storage = scattered();
            let free = storage.files.space().figures().free;
            // A page that was synced and not written since is in its place.
            ended = run(&storage, steps);
            storage.disk.crash(&SeededRandom::new(steps ^ keep as u64));
            storage.disk.set_mode(SimMode::AtOnce);
            let next = storage.restart(storage.meta.crash(keep));
            all_is_there(&next);
            assert_eq!(next.files.space().figures().free, free, "no page is lost, {steps} {keep}");
            places.insert(next.breaks(&next.file(1)));
            assert!(block_on(defragment_all(&next.files, &next.disk, &next.file(1))).is_ok());
            assert_eq!(next.breaks(&next.file(1)), 0);
            all_is_there(&next);
        }
        if ended {
            break;
        }
    }
    // Before the first step's batch, behind each one's, and behind the last.
    assert!(places.len() >= 3, "{places:?}");
}

/// Moves the file's pages until the disk has done so many steps. Returns whether all of it was done.
fn run(storage: &Storage, steps: u64) -> bool {
    storage.disk.set_mode(SimMode::Deferred);
    let file = storage.file(1);
    let mut moves = pin!(defragment_all(&storage.files, &storage.disk, &file));
    for _ in 0..=steps {
        for _ in 0..64 {
            if let Some(moved) = block_on(poll_once(&mut moves)) {
                assert_eq!(moved, Ok(PAGES));
                return true;
            }
        }
        storage.disk.step();
    }
    false
}
