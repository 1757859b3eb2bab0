//! Single behaviours worth a name: errors, budgets, and the effects of one operation on the next.

use super::harness::{Storage, stamped};
use super::harness::{allocate_range, punch_hole, write};
use super::records::inode;
use crate::files::FileRegion;
use crate::files::seek::PIECES_A_STEP;
use crate::files::steps::STEP_PIECES;
use crate::files::write_back::write_back;
use crate::files::{WriteAt, copy_range, fetch, reap, run_write_back, seek, truncate, write_back_all};
use crate::pages::run_eviction;
use crate::pages::{Sink, Source};
use crate::pool::disk::{Disk, IoKind, LocalFuture};
use crate::pool::simdisk::{SimFault, SimMode};
use crate::timer::Timer;
use cuttlefs_common::ids::{FilePage, InodeNo, MAX_FILE_SIZE, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{FileRead, FileTarget, RegionOwner, WcStatus};
use cuttlefs_common::region::PageSet;
use cuttlefs_common::rpc::{Allocate, MAX_TRANSFER_BYTES, Rights, SeekFor};
use cuttlefs_common::status::Status;
use futures_lite::future::{block_on, poll_once, yield_now};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const INO: InodeNo = inode(1);
const PAGE: u64 = PAGE_SIZE_U64;

fn storage(pool_pages: u64, frames: u64) -> Storage {
    let storage = Storage::new(pool_pages, frames);
    storage.meta.create(INO);
    storage.meta.create(inode(2));
    storage
}

fn put(storage: &Storage, ino: u64, offset: u64, len: usize) -> Result<(), Status> {
    let bytes = stamped(ino, offset, len);
    let at = WriteAt::Offset(offset);
    block_on(write(&storage.files, &storage.disk, &storage.file(ino), at, Source::Bytes(&bytes))).map(|_| ())
}

fn set_size(storage: &Storage, ino: u64, size: u64) -> Result<(), Status> {
    let commit = |commit| {
        storage.meta.commit_data(&[commit])?;
        storage.meta.attr(inode(ino))
    };
    block_on(truncate(&storage.files, &storage.disk, &storage.file(ino), size, commit)).map(|_| ())
}

fn fail(storage: &Storage, kind: IoKind, times: u32) {
    storage.disk.inject(SimFault { pages: 0..storage.pool_pages, kind: Some(kind), errno: 5, times });
}

fn evict_all(storage: &Storage) {
    block_on(storage.pages.evict(&storage.disk, u32::MAX));
}

#[test]
fn a_read_error_is_an_error_and_only_for_that_range() {
    let storage = storage(16, 8);
    put(&storage, 1, 0, 2 * PAGE_SIZE).expect("writes");
    evict_all(&storage);
    let first = storage.file(1).layout(FilePage(0), 1).extents[0].pool_page.0;
    storage.disk.inject(SimFault { pages: first..first + 1, kind: Some(IoKind::Read), errno: 5, times: 100 });
    assert_eq!(storage.read(&storage.file(1), 0, PAGE_SIZE), Err(Status::Io));
    assert_eq!(storage.read(&storage.file(1), PAGE, PAGE_SIZE), Ok(stamped(1, PAGE, PAGE_SIZE)));
    assert_eq!(storage.files.pages.figures().counts.read_errors, 1);
    storage.disk.clear_faults();
    assert_eq!(storage.read(&storage.file(1), 0, PAGE_SIZE), Ok(stamped(1, 0, PAGE_SIZE)));
    storage.check();
}

#[test]
fn a_partial_write_that_cannot_read_its_page_changes_nothing() {
    for frames in [8, 4] {
        let storage = storage(16, frames);
        put(&storage, 1, 0, PAGE_SIZE).expect("writes");
        evict_all(&storage);
        if frames == 4 {
            // The other file takes the only frame, so that the write goes past the frames.
            put(&storage, 2, 0, 10).expect("writes");
        }
        fail(&storage, IoKind::Read, 1);
        assert_eq!(put(&storage, 1, 100, 10), Err(Status::Io));
        assert_eq!(storage.read(&storage.file(1), 0, PAGE_SIZE), Ok(stamped(1, 0, PAGE_SIZE)));
        assert_eq!(put(&storage, 1, 100, 10), Ok(()));
        storage.check();
    }
}

#[test]
fn a_failed_direct_write_gives_its_new_pages_back() {
    let storage = storage(16, 4);
    put(&storage, 2, 0, 10).expect("takes the only frame");
    block_on(write_back_all(&storage.files, &storage.disk)).expect("clean, or the writer would clean it");
    let before = storage.files.space().figures();
    fail(&storage, IoKind::Write, 1);
    assert_eq!(put(&storage, 1, 0, 3 * PAGE_SIZE), Err(Status::Io));
    assert_eq!(storage.files.space().figures(), before);
    assert_eq!(storage.file(1).size(), 0);
    storage.check();
    put(&storage, 1, 0, 3 * PAGE_SIZE).expect("writes now");
    assert_eq!(storage.read(&storage.file(1), 0, 3 * PAGE_SIZE), Ok(stamped(1, 0, 3 * PAGE_SIZE)));
}

#[test]
fn a_failed_write_over_reserved_space_leaves_zeros() {
    let storage = storage(16, 4);
    put(&storage, 2, 0, 10).expect("takes the only frame");
    block_on(write_back_all(&storage.files, &storage.disk)).expect("clean, or the writer would clean it");
    let file = storage.file(1);
    let how = Allocate::Reserve { keep_size: false };
    block_on(allocate_range(&storage.files, &storage.disk, &file, 0, 3 * PAGE, how)).expect("reserved");
    fail(&storage, IoKind::Write, 1);
    assert_eq!(put(&storage, 1, 0, 3 * PAGE_SIZE), Err(Status::Io));
    assert_eq!(storage.read(&file, 0, 3 * PAGE_SIZE), Ok(vec![0; 3 * PAGE_SIZE]));
    storage.check();
}

#[test]
fn a_sync_of_everything_waits_for_one_that_is_under_way() {
    let storage = storage(16, 8);
    put(&storage, 1, 0, PAGE_SIZE).expect("writes");
    storage.disk.set_mode(SimMode::Deferred);
    let mut first = pin!(write_back_all(&storage.files, &storage.disk));
    assert!(block_on(poll_once(first.as_mut())).is_none(), "its disk is late");
    // The list of changed files is empty by now, and nothing is durable yet.
    let mut second = pin!(write_back_all(&storage.files, &storage.disk));
    assert!(block_on(poll_once(second.as_mut())).is_none(), "the first one's file is not on disk");
    while block_on(poll_once(first.as_mut())).is_none() {
        assert!(storage.disk.step());
    }
    assert_eq!(block_on(poll_once(second.as_mut())), Some(Ok(())));
}

#[test]
fn a_page_that_cannot_be_written_back_stays_and_fsync_says_so() {
    let storage = storage(16, 8);
    put(&storage, 1, 0, PAGE_SIZE).expect("writes");
    put(&storage, 2, 0, PAGE_SIZE).expect("writes");
    let page = storage.file(1).layout(FilePage(0), 1).extents[0].pool_page.0;
    storage.disk.inject(SimFault { pages: page..page + 1, kind: Some(IoKind::Write), errno: 5, times: 2 });
    let files = [storage.file(1), storage.file(2)];
    assert_eq!(block_on(write_back(&storage.files, &storage.disk, &files, true)), Err(Status::Io));
    // The other file of the same write-back is durable.
    assert!(!files[0].is_clean() && files[1].is_clean());
    assert_eq!(storage.meta.extents(INO), Ok(vec![]));
    assert_eq!(storage.meta.extents(inode(2)).map(|extents| extents.len()), Ok(1));
    assert_eq!(storage.read(&files[0], 0, PAGE_SIZE), Ok(stamped(1, 0, PAGE_SIZE)));
    assert_eq!(block_on(write_back(&storage.files, &storage.disk, &files, true)), Ok(()));
    assert!(files[0].is_clean());
    storage.check();
}

#[test]
fn a_failed_sync_is_final() {
    let storage = storage(16, 8);
    put(&storage, 1, 0, PAGE_SIZE).expect("writes");
    storage.disk.fail_next_sync(5);
    for _ in 0..2 {
        assert_eq!(
            block_on(write_back(&storage.files, &storage.disk, &[storage.file(1)], true)),
            Err(Status::Io)
        );
    }
    assert_eq!(storage.meta.extents(INO), Ok(vec![]));
    assert_eq!(storage.read(&storage.file(1), 0, PAGE_SIZE), Ok(stamped(1, 0, PAGE_SIZE)));
}

#[test]
fn a_failed_batch_changes_nothing() {
    let storage = storage(16, 8);
    put(&storage, 1, 0, 3 * PAGE_SIZE).expect("writes");
    let before = storage.files.space().figures();
    storage.meta.fail_batches(true);
    let file = storage.file(1);
    let (files, disk) = (&*storage.files, &storage.disk);
    assert_eq!(set_size(&storage, 1, 10), Err(Status::Io));
    assert_eq!(block_on(punch_hole(files, disk, &file, 0, PAGE)), Err(Status::Io));
    let how = Allocate::Reserve { keep_size: false };
    assert_eq!(block_on(allocate_range(files, disk, &file, 0, 8 * PAGE, how)), Err(Status::Io));
    assert_eq!(block_on(reap(files, INO, || Err(Status::Io))), Err(Status::Io));
    assert_eq!(block_on(write_back(files, disk, std::slice::from_ref(&file), true)), Err(Status::Io));
    assert_eq!(storage.files.space().figures(), before);
    assert_eq!(storage.read(&file, 0, 4 * PAGE_SIZE), Ok(stamped(1, 0, 3 * PAGE_SIZE)));
    storage.meta.fail_batches(false);
    storage.check();
    block_on(write_back(files, disk, &[file], true)).expect("durable now");
    assert_eq!(storage.meta.extents(INO).map(|extents| extents[0].len_pages), Ok(3));
}

#[test]
fn arguments_out_of_their_domain() {
    let storage = storage(16, 8);
    let file = storage.file(1);
    let (files, disk) = (&*storage.files, &storage.disk);
    let long = vec![1; MAX_TRANSFER_BYTES as usize + 1];
    let at =
        |offset, bytes| block_on(write(files, disk, &file, WriteAt::Offset(offset), Source::Bytes(bytes)));
    assert_eq!(at(0, &long).map(|_| ()), Err(Status::Invalid));
    assert_eq!(at(MAX_FILE_SIZE, &long[..1]).map(|_| ()), Err(Status::TooLarge));
    assert_eq!(at(u64::MAX, &long[..1]).map(|_| ()), Err(Status::TooLarge));
    assert!(at(MAX_FILE_SIZE - 1, &long[..1]).is_ok());
    assert_eq!(file.size(), MAX_FILE_SIZE);
    assert_eq!(
        block_on(write(files, disk, &file, WriteAt::End, Source::Bytes(&[1]))).map(|_| ()),
        Err(Status::TooLarge)
    );
    assert_eq!(storage.read(&file, MAX_FILE_SIZE - 1, 1), Ok(vec![1]));
    assert_eq!(storage.read(&file, MAX_FILE_SIZE, 1), Err(Status::TooLarge));
    assert_eq!(set_size(&storage, 1, MAX_FILE_SIZE + 1), Err(Status::TooLarge));
    assert_eq!(block_on(punch_hole(files, disk, &file, 0, 0)).map(|_| ()), Err(Status::Invalid));
    assert!(block_on(punch_hole(files, disk, &file, 0, MAX_FILE_SIZE)).is_ok());
    assert_eq!(file.allocated_pages(), 0);
    let copy = |from, to, len| {
        block_on(copy_range(files, disk, (&file, from), (&file, to), len, None)).map(|copied| copied.len)
    };
    assert_eq!(copy(0, 10, 11), Err(Status::Invalid));
    assert_eq!(copy(u64::MAX, 0, u64::MAX), Ok(0));
    let mut short = [0; 10];
    let all = PageSet::all(1);
    assert_eq!(
        block_on(fetch(files, disk, &file, 0, 11, &all, Sink::Bytes(&mut short))),
        Err(Status::Invalid)
    );
    storage.check();
}

#[test]
fn only_wanted_pages_are_touched_in_a_sparse_fetch() {
    let storage = storage(16, 8);
    put(&storage, 1, 0, 4 * PAGE_SIZE).expect("writes");
    let memory = SharedMemory::new("sink", 5 * PAGE_SIZE).expect("memory");
    memory.fill(0, 5 * PAGE_SIZE, 0xEE);
    let mut pages = PageSet::none(5);
    pages.insert(1);
    pages.insert(4);
    let sink = Sink::Memory { memory: &memory, offset: 7 };
    let len = 4 * PAGE_SIZE + 1;
    let file = storage.file(1);
    let valid = block_on(fetch(&storage.files, &storage.disk, &file, 10, len, &pages, sink)).expect("reads");
    assert_eq!(valid as usize, 4 * PAGE_SIZE - 10);
    let mut out = vec![0; 5 * PAGE_SIZE];
    memory.read(0, &mut out);
    let (from, to) = (7 + PAGE_SIZE - 10, 7 + 2 * PAGE_SIZE - 10);
    assert!(out[..from].iter().all(|byte| *byte == 0xEE));
    assert_eq!(out[from..to], stamped(1, PAGE, PAGE_SIZE));
    let last = 7 + 4 * PAGE_SIZE - 10;
    assert!(out[to..last].iter().all(|byte| *byte == 0xEE));
    assert!(out[last..7 + len].iter().all(|byte| *byte == 0), "past the end of the file");
    assert!(out[7 + len..].iter().all(|byte| *byte == 0xEE));
}

#[test]
fn a_fetch_goes_to_the_disk_in_one_batch_and_promotes_into_free_frames() {
    let storage = storage(32, 8);
    put(&storage, 1, 0, 8 * PAGE_SIZE).expect("writes");
    evict_all(&storage);
    let before = storage.disk.counters();
    assert_eq!(storage.read(&storage.file(1), 0, 8 * PAGE_SIZE), Ok(stamped(1, 0, 8 * PAGE_SIZE)));
    let after = storage.disk.counters();
    assert_eq!(after.pages_read - before.pages_read, 8);
    // Neighbouring pages are one IO: one for the pages that got the five frames, one for the rest.
    assert_eq!(after.reads - before.reads, 2);
    assert_eq!(storage.files.pages.figures().counts.promoted, 5);
    assert_eq!(storage.files.pages.figures().free_frames, 0);
    storage.check();
}

#[test]
fn filekeys_guard_what_the_nic_engine_reads() {
    let storage = storage(16, 8);
    put(&storage, 1, 0, 100).expect("writes");
    let (me, other) = (RegionOwner(1), RegionOwner(2));
    let files = &storage.files;
    let readable = files.open(me, INO, Rights { read: true, write: false }).expect("opens").filekey;
    let writable = files.open(me, INO, Rights { read: false, write: true }).expect("opens").filekey;
    let mut out = [0; 200];
    assert_eq!(files.read_file(me, readable, 0, &mut out), Ok(FileRead::Done(100)));
    assert_eq!(files.read_file(me, readable, 100, &mut out), Ok(FileRead::Done(0)));
    assert_eq!(files.read_file(me, readable, u64::MAX, &mut out), Ok(FileRead::Done(0)));
    assert_eq!(files.read_file_faulting(me, readable, u64::MAX - 1, &mut out), Ok(0));
    assert_eq!(files.read_bitmap(me, readable, u64::MAX - 7, &mut out), Ok(()));
    // The same holds for a file whose contents are closed.
    files.close_contents(INO);
    assert_eq!(files.read_file(me, readable, u64::MAX - 100, &mut out), Ok(FileRead::Done(0)));
    assert_eq!(files.read_file(other, readable, 0, &mut out), Err(WcStatus::RemoteAccess));
    assert_eq!(files.read_file(other, readable, u64::MAX, &mut out), Err(WcStatus::RemoteAccess));
    assert_eq!(files.read_file(me, writable, 0, &mut out), Err(WcStatus::RemoteAccess));
    assert_eq!(files.read_bitmap(other, readable, 0, &mut out), Err(WcStatus::RemoteAccess));
    assert_eq!(files.read_file(me, 12345.into(), 0, &mut out), Err(WcStatus::RemoteAccess));
    assert!(!files.close(me, writable).expect("closes")[0].last);
    let closed = files.revoke(me);
    assert_eq!(closed.len(), 1);
    assert!(closed[0].last && closed[0].ino == INO);
    assert_eq!(files.read_file(me, readable, 0, &mut out), Err(WcStatus::RemoteAccess));
}

/// While clients restore what the server before has answered, the engine tells of no hole and no end.
#[test]
fn what_may_be_restored_is_read_by_requests() {
    let storage = storage(16, 8);
    put(&storage, 1, 0, 100).expect("writes");
    let (me, files) = (RegionOwner(1), &storage.files);
    let readable = files.open(me, INO, Rights { read: true, write: false }).expect("opens").filekey;
    let gathering = Arc::new(AtomicBool::new(true));
    files.read_by_requests_while(gathering.clone());
    for offset in [0, 50, 100, 4096, 40_000] {
        let mut out = [0; 200];
        assert_eq!(files.read_file(me, readable, offset, &mut out), Ok(FileRead::Done(200)), "at {offset}");
        let in_page = (offset % PAGE_SIZE_U64) as usize;
        assert!(files.pages.magic().covers(in_page, &out[..(PAGE_SIZE - in_page).min(200)]), "at {offset}");
    }
    gathering.store(false, Ordering::Relaxed);
    let mut out = [0; 200];
    assert_eq!(files.read_file(me, readable, 0, &mut out), Ok(FileRead::Done(100)));
    assert_eq!(files.read_file(me, readable, 4096, &mut out), Ok(FileRead::Done(0)));
}

#[test]
fn an_open_file_is_not_reaped_and_a_reaped_one_is_stale() {
    let storage = storage(16, 8);
    put(&storage, 1, 0, 3 * PAGE_SIZE).expect("writes");
    let files = &*storage.files;
    let opened = files.open(RegionOwner(1), INO, Rights { read: true, write: true }).expect("opens");
    let gone = || storage.meta.remove(INO).map(|_| false);
    assert_eq!(block_on(reap(files, INO, gone)), Err(Status::Busy));
    assert!(files.close(RegionOwner(1), opened.filekey).expect("closes")[0].last);
    assert_eq!(block_on(reap(files, INO, gone)), Ok(3));
    let at = WriteAt::End;
    let late = block_on(write(files, &storage.disk, &opened.file, at, Source::Bytes(&[1])));
    assert_eq!(late.map(|_| ()), Err(Status::Stale));
    assert_eq!(storage.read(&opened.file, 0, 1), Err(Status::Stale));
    assert_eq!(files.file(INO).map(|_| ()), Err(Status::Stale));
    assert_eq!(files.space().figures().quarantined, 3);
    block_on(write_back_all(files, &storage.disk)).expect("flushes");
    assert_eq!(files.space().figures().free, 16);
    storage.check();
}

#[test]
fn freed_space_is_found_again_when_it_is_needed_and_not_before() {
    let storage = storage(4, 8);
    put(&storage, 1, 0, 4 * PAGE_SIZE).expect("fills the pool");
    assert_eq!(put(&storage, 2, 0, 1), Err(Status::NoSpace));
    set_size(&storage, 1, PAGE).expect("cuts");
    assert_eq!(storage.files.space().figures().quarantined, 3);
    put(&storage, 2, 0, 3 * PAGE_SIZE).expect("takes what was freed");
    assert_eq!(storage.files.space().figures().quarantined, 0);
    assert_eq!(put(&storage, 2, 3 * PAGE, 1), Err(Status::NoSpace));
    storage.check();
}

#[test]
fn appends_one_at_a_time_become_one_durable_extent() {
    let storage = storage(16, 8);
    let file = storage.file(1);
    for page in 0..6 {
        put(&storage, 1, page * PAGE, PAGE_SIZE).expect("writes");
        block_on(write_back(&storage.files, &storage.disk, std::slice::from_ref(&file), true))
            .expect("durable");
    }
    assert_eq!(storage.meta.extents(INO).map(|extents| extents.len()), Ok(1));
}

#[test]
fn writers_keep_half_of_the_frames_clean() {
    let storage = storage(256, 67);
    for page in 0..200 {
        put(&storage, 1, page * PAGE, PAGE_SIZE).expect("writes");
        assert!(storage.files.pages.figures().dirty_frames <= 64 / 2 + 1);
    }
    storage.check();
}

struct Ticks;

impl Timer for Ticks {
    fn sleep(&self, _: Duration) -> LocalFuture<'static, ()> {
        Box::pin(yield_now())
    }
}

#[test]
fn the_background_tasks_write_back_evict_and_stop() {
    let storage = storage(256, 67);
    let stop = AtomicBool::new(false);
    let files = &*storage.files;
    let disk: &dyn Disk = &storage.disk;
    let mut evicting = Box::pin(run_eviction(&files.pages, disk, &stop));
    let mut writing = Box::pin(run_write_back(files, disk, &Ticks, &stop));
    for page in 0..200 {
        put(&storage, 1, page * PAGE, PAGE_SIZE).expect("writes");
        assert!(block_on(poll_once(&mut evicting)).is_none());
    }
    for _ in 0..10 {
        assert!(block_on(poll_once(&mut evicting)).is_none());
        assert!(block_on(poll_once(&mut writing)).is_none());
    }
    let figures = files.pages.figures();
    assert_eq!((figures.dirty_frames, files.figures().dirty_files), (0, 0));
    assert!(figures.free_frames >= 64 / 16, "{figures:?}");
    assert_eq!(storage.meta.extents(INO).map(|extents| extents.len()), Ok(1));
    stop.store(true, Ordering::Release);
    files.pages.wake_eviction();
    block_on(evicting);
    block_on(writing);
    storage.check();
}

/// A file whose pages 1, 3, 5, ... have durable bytes, and whose other pages are holes.
fn in_pieces(storage: &Storage, pieces: u64) -> Arc<FileRegion> {
    for piece in 0..pieces {
        put(storage, 1, (2 * piece + 1) * PAGE, PAGE_SIZE).expect("writes");
    }
    block_on(write_back_all(&storage.files, &storage.disk)).expect("is durable");
    storage.file(1)
}

#[test]
fn what_is_zeroed_or_reserved_in_many_pieces_goes_in_many_batches() {
    let zero = Allocate::ZeroRange { keep_size: true };
    let reserve = Allocate::Reserve { keep_size: true };
    for (how, least) in [(zero, 10 / STEP_PIECES), (reserve, 5 / STEP_PIECES)] {
        let storage = storage(32, 16);
        let file = in_pieces(&storage, 5);
        let before = storage.meta.crash_states();
        let (files, disk) = (&*storage.files, &storage.disk);
        block_on(allocate_range(files, disk, &file, 0, 10 * PAGE, how)).expect("is done");
        assert!(storage.meta.crash_states() - before >= least, "{how:?}");
        assert_eq!(file.allocated_pages(), 10);
        for page in 0..10 {
            let bytes = if how == reserve && page % 2 == 1 {
                stamped(1, page * PAGE, PAGE_SIZE)
            } else {
                vec![0; PAGE_SIZE]
            };
            assert_eq!(storage.read(&file, page * PAGE, PAGE_SIZE), Ok(bytes), "page {page}, {how:?}");
        }
        storage.check();
    }
}

/// Once, nobody else was served while a file of 60,000 extents was cut.
#[test]
fn a_cut_or_a_punch_of_many_pieces_gives_way_behind_each_batch() {
    for cuts in [true, false] {
        let storage = storage(64, 16);
        let file = in_pieces(&storage, 11);
        let (files, disk) = (&*storage.files, &storage.disk);
        let change = async {
            if !cuts {
                return punch_hole(files, disk, &file, 0, 22 * PAGE).await;
            }
            let commit = |commit| {
                storage.meta.commit_data(&[commit])?;
                storage.meta.attr(INO)
            };
            truncate(files, disk, &file, 0, commit).await
        };
        let mut change = pin!(change);
        let extents = || storage.meta.extents(INO).expect("extents").len();
        let (mut left, mut turns) = (extents(), 0);
        assert_eq!(left, 11);
        loop {
            let result = block_on(poll_once(change.as_mut()));
            let now = extents();
            assert!(left - now <= STEP_PIECES, "{} extents went in one turn", left - now);
            (left, turns) = (now, turns + 1);
            if let Some(result) = result {
                result.expect("is done");
                break;
            }
        }
        assert_eq!(left, 0);
        assert!(turns >= 11 / STEP_PIECES, "{turns} turns");
        storage.check();
    }
}

#[test]
fn a_zeroing_that_is_cut_off_has_done_a_part_and_loses_no_space() {
    // Once the store fails, once the future is dropped.
    for fails in [true, false] {
        let storage = storage(32, 16);
        let file = in_pieces(&storage, 5);
        let (files, disk) = (&*storage.files, &storage.disk);
        let before = storage.meta.crash_states();
        {
            let how = Allocate::ZeroRange { keep_size: true };
            let mut zeroing = pin!(allocate_range(files, disk, &file, 0, 10 * PAGE, how));
            while storage.meta.crash_states() == before {
                assert!(block_on(poll_once(zeroing.as_mut())).is_none(), "it takes several steps");
            }
            storage.meta.fail_batches(fails);
            assert!(!fails || block_on(zeroing).is_err());
        }
        storage.meta.fail_batches(false);
        // One step was done: it covers one reserved page and one page that had bytes.
        assert_eq!(file.allocated_pages(), 6);
        assert_eq!(storage.read(&file, 0, 2 * PAGE_SIZE), Ok(vec![0; 2 * PAGE_SIZE]));
        assert_eq!(storage.read(&file, 3 * PAGE, PAGE_SIZE), Ok(stamped(1, 3 * PAGE, PAGE_SIZE)));
        storage.check();
        assert_eq!(files.space().figures().used, 6);
        let how = Allocate::ZeroRange { keep_size: true };
        block_on(allocate_range(files, disk, &file, 0, 10 * PAGE, how)).expect("does the rest");
        assert_eq!(storage.read(&file, 0, 10 * PAGE_SIZE), Ok(vec![0; 10 * PAGE_SIZE]));
        assert_eq!(files.space().figures().used, 10);
        storage.check();
    }
}

/// How often a future is polled until it is done, and its result.
fn polls<T>(future: impl Future<Output = T>) -> (usize, T) {
    let mut future = pin!(future);
    let mut count = 0;
    loop {
        count += 1;
        if let Some(result) = block_on(poll_once(future.as_mut())) {
            return (count, result);
        }
    }
}

/// Once, 64 searches in files of 40,000 pieces left a few percent of the time to others.
#[test]
fn a_search_in_many_pieces_gives_way_behind_each_few() {
    let storage = storage(64, 16);
    let file = storage.file(1);
    // The pages are neighbours in the file and not in the pool.
    for page in [0, 2, 4, 6, 8, 1, 3, 5, 7] {
        put(&storage, 1, page * PAGE, PAGE_SIZE).expect("writes");
    }
    let (count, found) = polls(seek(&file, 5, SeekFor::Hole));
    assert_eq!((count, found), (9_usize.div_ceil(PIECES_A_STEP), Ok(9 * PAGE)));
    let (count, found) = polls(seek(&file, 5, SeekFor::Data));
    assert_eq!((count, found), (1, Ok(5)));
}

/// Once, 64 copies of 4 MiB likewise held up others: bytes in memory are copied without waiting for anything.
#[test]
fn a_copy_gives_way_behind_each_chunk() {
    const CHUNKS: usize = 4;
    let chunk_pages = 64;
    let storage = storage(1024, 1024);
    let (from, to) = (storage.file(1), storage.file(2));
    let len = CHUNKS * chunk_pages * PAGE_SIZE;
    put(&storage, 1, 0, len).expect("writes");
    put(&storage, 2, 0, len).expect("writes");
    let copy = copy_range(&storage.files, &storage.disk, (&from, 0), (&to, 0), len as u64, None);
    let (count, copied) = polls(copy);
    assert_eq!(copied.map(|copied| copied.len), Ok(len as u64));
    assert!(count >= CHUNKS, "{count} polls");
    assert_eq!(storage.read(&to, 0, len), Ok(stamped(1, 0, len)));
}
