//! Atomics by request, each rule by itself: where the page of the word is, what changes nothing, what is refused, and what a failing disk does. The walks of
//! `reference` and `crash`, and the threads of `granted_races`, have them beside all else.

use super::grants::{BOTH, INO, OWNERS, Session, grant};
use super::harness::{Storage, write};
use super::records::{Records, inode};
use crate::bits;
use crate::files::{
    FileRegion, Files, FilesConfig, Word, WordChanged, WriteAt, allocate_for, change_word, write_back_all,
};
use crate::pages::policy::{PolicyName, RegionPolicy};
use crate::pages::{Pages, PagesConfig, Source};
use crate::pool::disk::{Disk, IoKind};
use crate::pool::simdisk::{SimDisk, SimFault};
use crate::pool::space::Space;
use cuttlefs_common::ids::{FileKey, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::rdma::{FileAtomic, RegionOwner};
use cuttlefs_common::rpc::Allocate;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::SeededRandom;
use futures_lite::future::block_on;
use std::sync::Arc;

const POOL_PAGES: u64 = 32;
const WORD: u64 = 4088;

fn add(add: u64) -> FileAtomic {
    FileAtomic::FetchAdd { add }
}

fn change(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    offset: u64,
    operation: FileAtomic,
) -> Result<WordChanged, Status> {
    let may = |_, end| if end > file.size() { Err(Status::NoSuchOffset) } else { Ok(()) };
    block_on(change_word(files, disk, (file, FileKey(1)), Word { offset, operation }, &may))
}

/// A file of four pages, of which the first two have ones.
fn storage() -> (Storage, Arc<FileRegion>) {
    let storage = Storage::new(POOL_PAGES, 8);
    storage.meta.create(inode(INO));
    let file = storage.file(INO);
    let (files, disk) = (&*storage.files, &storage.disk);
    let ones = [1; 2 * PAGE_SIZE];
    block_on(write(files, disk, &file, WriteAt::Offset(0), Source::Bytes(&ones))).expect("written");
    let end = WriteAt::Offset(4 * PAGE_SIZE_U64 - 1);
    block_on(write(files, disk, &file, end, Source::Bytes(&[0]))).expect("written");
    block_on(write_back_all(files, disk)).expect("durable");
    (storage, file)
}

#[test]
fn a_word_is_changed_wherever_its_page_is_and_one_that_stays_changes_nothing() {
    let (storage, file) = storage();
    let (files, disk) = (&*storage.files, &storage.disk);
    let ones = u64::from_le_bytes([1; 8]);
    let attr = || storage.meta.attr(inode(INO)).expect("live");
    for (round, is_evicted) in [false, true].into_iter().enumerate() {
        let (before, there) = (attr(), ones + round as u64 * 5);
        if is_evicted {
            block_on(write_back_all(files, disk)).expect("durable");
            block_on(files.pages.evict(disk, u32::MAX));
        }
        for operation in [add(0), FileAtomic::CompareSwap { expect: 7, swap: 8 }] {
            let nothing = WordChanged { old: there, change: None };
            assert_eq!(change(files, disk, &file, WORD, operation), Ok(nothing));
        }
        assert_eq!((attr(), is_evicted && !file.is_clean()), (before, false), "times and pages stay");
        let changed = change(files, disk, &file, WORD, add(5)).expect("changed");
        assert_eq!(changed, WordChanged { old: there, change: Some(attr().change) });
        assert!(attr().change > before.change && attr().mtime >= before.mtime && !file.is_clean());
        assert_eq!(storage.read(&file, WORD, 8), Ok((there + 5).to_le_bytes().to_vec()));
        storage.check();
    }
    // A hole, and reserved space, have zeros. What stays zero takes no space.
    let hole = 2 * PAGE_SIZE_U64;
    let pages = file.allocated_pages();
    let swap = FileAtomic::CompareSwap { expect: 1, swap: 2 };
    assert_eq!(change(files, disk, &file, hole, swap), Ok(WordChanged { old: 0, change: None }));
    assert_eq!(file.allocated_pages(), pages);
    assert_eq!(change(files, disk, &file, hole, add(3)).expect("changed").old, 0);
    assert_eq!(change(files, disk, &file, hole, add(3)).expect("changed").old, 3);
    assert_eq!(file.allocated_pages(), pages + 1);
    let reserve = Allocate::Reserve { keep_size: false };
    block_on(allocate_for(files, disk, &file, (4 * PAGE_SIZE_U64, 100), reserve, None)).expect("reserved");
    assert_eq!(change(files, disk, &file, 4 * PAGE_SIZE_U64, add(9)).expect("changed").old, 0);
    assert_eq!(change(files, disk, &file, 4 * PAGE_SIZE_U64, add(0)).expect("read").old, 9);
    storage.check();
}

#[test]
fn what_is_refused_changes_nothing() {
    let (storage, file) = storage();
    let (files, disk) = (&*storage.files, &storage.disk);
    let before = storage.meta.attr(inode(INO));
    assert_eq!(change(files, disk, &file, 4 * PAGE_SIZE_U64, add(1)), Err(Status::NoSuchOffset));
    assert_eq!(change(files, disk, &file, u64::MAX - 7, add(1)), Err(Status::TooLarge));
    let word = Word { offset: 0, operation: add(1) };
    let asked = block_on(change_word(files, disk, (&file, FileKey(1)), word, &|_, _| Err(Status::Denied)));
    assert_eq!(asked, Err(Status::Denied));
    assert_eq!(storage.meta.attr(inode(INO)), before);
    assert!(file.is_clean());
}

#[test]
fn in_a_full_pool_a_hole_takes_what_a_grant_has_set_aside() {
    let (storage, file) = storage();
    let (files, disk) = (&*storage.files, &storage.disk);
    let session = Session::open(&storage, OWNERS[0]);
    grant(&storage, &session, 2 * PAGE_SIZE_U64, 8).expect("granted");
    storage.meta.create(inode(2));
    let filler = storage.file(2);
    let fill = |page: u64| {
        block_on(write(files, disk, &filler, WriteAt::Offset(page * PAGE_SIZE_U64), Source::Bytes(&[1])))
    };
    assert_eq!((0..).map(fill).find_map(Result::err), Some(Status::NoSpace));
    let word = Word { offset: 2 * PAGE_SIZE_U64, operation: add(4) };
    let by = |key| block_on(change_word(files, disk, (&file, key), word, &|_, _| Ok(())));
    assert_eq!(by(FileKey(1)), Err(Status::NoSpace));
    assert_eq!(by(session.opened.filekey).map(|done| done.old), Ok(0));
    assert_eq!(by(FileKey(1)).map(|done| done.old), Ok(4), "no space is needed");
    storage.check();
}

/// A server whose pages are in no frames.
fn without_frames(meta: &Records) -> (Files, SimDisk) {
    let space = Space::new(POOL_PAGES, bits::of(POOL_PAGES, meta.used())).expect("extents do not overlap");
    let policy = RegionPolicy::of(PolicyName::RpcDirect);
    let config = PagesConfig { policy, ..PagesConfig::new(POOL_PAGES, 8 * PAGE_SIZE_U64) };
    let random = Arc::new(SeededRandom::new(42));
    let pages = Arc::new(Pages::new(config, random.as_ref()).expect("memory"));
    let disk = SimDisk::new(POOL_PAGES, pages.frames().memory().clone());
    let files = Files::new(FilesConfig::default(), pages, Arc::new(space), meta.committer.clone(), random);
    (files.expect("memory"), disk)
}

#[test]
fn without_frames_a_word_is_changed_on_the_disk_and_a_failure_is_told() {
    let meta = Records::default();
    meta.create(inode(INO));
    let (files, disk) = without_frames(&meta);
    let opened = files.open(RegionOwner(1), inode(INO), BOTH).expect("opens");
    let file = &opened.file;
    block_on(write(&files, &disk, file, WriteAt::Offset(0), Source::Bytes(&[1; PAGE_SIZE])))
        .expect("written");
    block_on(write_back_all(&files, &disk)).expect("durable");
    let ones = u64::from_le_bytes([1; 8]);
    assert_eq!(change(&files, &disk, file, WORD, add(0)), Ok(WordChanged { old: ones, change: None }));
    assert!(file.is_clean(), "nothing was written");
    assert_eq!(change(&files, &disk, file, WORD, add(2)).map(|done| done.old), Ok(ones));
    assert!(!file.is_clean(), "only a data sync makes it durable");
    block_on(write_back_all(&files, &disk)).expect("durable");
    for kind in [IoKind::Read, IoKind::Write] {
        disk.inject(SimFault { pages: 0..POOL_PAGES, kind: Some(kind), errno: libc::EIO, times: 1 });
        assert_eq!(change(&files, &disk, file, WORD, add(2)), Err(Status::Io));
    }
    let old = change(&files, &disk, file, WORD, add(0)).expect("read").old;
    assert!([2, 4].contains(&(old - ones)), "{old:x}");
    let figures = files.pages.figures();
    assert_eq!((figures.free_frames, figures.counts.target_atomics), (figures.frames, 0));
}

#[test]
fn a_page_that_cannot_be_read_into_a_frame_leaves_all_as_it_was() {
    let (storage, file) = storage();
    let (files, disk) = (&*storage.files, &storage.disk);
    block_on(files.pages.evict(disk, u32::MAX));
    let before = storage.meta.attr(inode(INO));
    disk.inject(SimFault { pages: 0..POOL_PAGES, kind: Some(IoKind::Read), errno: libc::EIO, times: 1 });
    assert_eq!(change(files, disk, &file, WORD, add(1)), Err(Status::Io));
    assert_eq!(storage.meta.attr(inode(INO)), before);
    storage.check();
    assert_eq!(change(files, disk, &file, WORD, add(1)).map(|done| done.old), Ok(u64::from_le_bytes([1; 8])));
}
