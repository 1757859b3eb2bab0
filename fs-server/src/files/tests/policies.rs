//! Results of one-sided reads under the policies that have no magic pattern.

use super::harness::stamped;
use super::harness::write;
use super::records::{Records, inode};
use crate::bits;
use crate::files::FilesConfig;
use crate::files::write_back::write_back;
use crate::files::{FileRegion, Files, OpenedRegion};
use crate::files::{WriteAt, load};
use crate::pages::policy::{PolicyName, RegionPolicy};
use crate::pages::{Pages, PagesConfig, Source};
use crate::pool::disk::Disk;
use crate::pool::simdisk::{SimDisk, SimFault};
use crate::pool::space::Space;
use crate::pool::{CachedDisk, CachedPool, DATA_START, DataFiles, Reach};
use cuttlefs_common::ids::{FilePage, FrameIndex, InodeNo, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::rdma::{FileRead, FileTarget, RegionOwner, WcStatus};
use cuttlefs_common::rpc::Rights;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::SeededRandom;
use futures_lite::future::block_on;
use rustix::fs::Advice;
use std::path::PathBuf;
use std::sync::Arc;

const POOL_PAGES: u64 = 64;
const INO: InodeNo = inode(1);
const ME: RegionOwner = RegionOwner(1);
const LEN: usize = 5 * PAGE_SIZE + 100;

fn served(policy: RegionPolicy, meta: &Records, mapped: Option<Arc<CachedPool>>) -> Files {
    let space = Space::new(POOL_PAGES, bits::of(POOL_PAGES, meta.used())).expect("extents do not overlap");
    let frames = POOL_PAGES + u64::from(FrameIndex::FIRST_USABLE.0);
    let config = PagesConfig { policy, ..PagesConfig::new(POOL_PAGES, frames * PAGE_SIZE_U64) };
    let random = Arc::new(SeededRandom::new(42));
    let pages = Pages::new(config, random.as_ref()).expect("memory").with_mapped(mapped);
    let (pages, space) = (Arc::new(pages), Arc::new(space));
    Files::new(FilesConfig::default(), pages, space, meta.committer.clone(), random).expect("memory")
}

fn open(files: &Files) -> OpenedRegion {
    files.open(ME, INO, Rights { read: true, write: true }).expect("opens")
}

fn put(files: &Files, disk: &dyn Disk, file: &Arc<FileRegion>) {
    let bytes = stamped(1, 0, LEN);
    let written = block_on(write(files, disk, file, WriteAt::Offset(0), Source::Bytes(&bytes)));
    assert_eq!(written.expect("writes").len as usize, LEN);
}

#[test]
fn what_is_pinned_is_never_the_pattern_and_what_is_not_is_refused() {
    let meta = Records::default();
    meta.create(INO);
    let policy = RegionPolicy::of(PolicyName::Pin);
    let writer = served(policy, &meta, None);
    let disk = SimDisk::new(POOL_PAGES, writer.pages.frames().memory().clone());
    let opened = open(&writer);
    put(&writer, &disk, &opened.file);
    let mut out = vec![0xEE; LEN + 10];
    assert_eq!(writer.read_file(ME, opened.filekey, 0, &mut out), Ok(FileRead::Done(LEN)));
    assert_eq!(out[..LEN], stamped(1, 0, LEN));
    block_on(write_back(&writer, &disk, std::slice::from_ref(&opened.file), true)).expect("writes back");

    let reader = served(policy, &meta, None);
    let disk = disk.attach(reader.pages.frames().memory().clone());
    let opened = open(&reader);
    assert_eq!(reader.read_file(ME, opened.filekey, 0, &mut out), Err(WcStatus::RemoteOperation));
    disk.inject(SimFault { pages: 0..POOL_PAGES, kind: None, errno: libc::EIO, times: 1 });
    assert_eq!(block_on(load(&reader, &disk, &opened.file)), Err(Status::Io));
    assert_eq!(block_on(load(&reader, &disk, &opened.file)), Ok(6));
    assert_eq!(block_on(load(&reader, &disk, &opened.file)), Ok(0), "once is enough");
    assert_eq!(reader.read_file(ME, opened.filekey, 0, &mut out), Ok(FileRead::Done(LEN)));
    assert_eq!(out[..LEN], stamped(1, 0, LEN));
    let counts = reader.pages.figures().counts;
    assert_eq!((counts.promoted, counts.target_magic), (6, 0));
    assert_eq!(reader.pages.figures().leaked_frames, 0);
}

#[test]
fn a_read_of_the_mapped_pool_faults_once() {
    let file = tempfile::tempfile().expect("a temporary file");
    file.set_len(DATA_START + POOL_PAGES * PAGE_SIZE_U64).expect("length");
    let plain = file.try_clone().expect("a second descriptor");
    let mut data_files = DataFiles::new();
    data_files.push(PathBuf::from("x"), file, POOL_PAGES, false);
    let meta = Records::default();
    meta.create(INO);
    for hardware in [false, true] {
        let mut policy = RegionPolicy::of(PolicyName::Odp);
        if hardware {
            policy = policy.with_hardware_times().expect("odp");
        }
        let pool = CachedPool::open(&data_files, Reach::Mapped).expect("open");
        let files = served(policy, &meta, Some(pool.clone()));
        let disk = CachedDisk::new(pool.clone());
        let opened = open(&files);
        // The first round writes, the second finds it in a page cache that was emptied, where the system lets us.
        if !hardware {
            put(&files, &disk, &opened.file);
            block_on(write_back(&files, &disk, std::slice::from_ref(&opened.file), true))
                .expect("writes back");
        }
        let (page, _) = opened.file.state().table.get(FilePage(0)).expect("mapped");
        let absent = !pool.is_cached(page.byte_offset(), LEN);
        let mut out = vec![0xEE; LEN + 10];
        let first = files.read_file(ME, opened.filekey, 0, &mut out);
        assert_eq!(first == Ok(FileRead::Faults), absent);
        assert_eq!(files.read_file_faulting(ME, opened.filekey, 0, &mut out), Ok(LEN));
        assert_eq!(out[..LEN], stamped(1, 0, LEN));
        assert!(out[LEN..].iter().all(|byte| *byte == 0));
        out.fill(0xEE);
        assert_eq!(files.read_file(ME, opened.filekey, 100, &mut out), Ok(FileRead::Done(LEN - 100)));
        assert_eq!(out[..LEN - 100], stamped(1, 0, LEN)[100..]);
        let counts = files.pages.figures().counts;
        assert_eq!((counts.odp_faults, counts.odp_fault_pages, counts.target_magic), (1, 6, 0));
        // A page that is being changed is nothing for the engine, however much of it is in memory.
        files.pages.residency.begin_direct_write(page);
        assert_eq!(files.read_file(ME, opened.filekey, 0, &mut out), Ok(FileRead::Faults));
        files.pages.residency.end_direct_write(page);
        assert_eq!(files.read_file(ME, 5.into(), 0, &mut out), Err(WcStatus::RemoteAccess));
        assert_eq!(files.read_file_faulting(ME, 5.into(), 0, &mut out), Err(WcStatus::RemoteAccess));
        drop((files, disk, pool, opened));
        rustix::fs::fadvise(&plain, 0, None, Advice::DontNeed).expect("advice");
    }
}

#[test]
fn hidden_files_are_not_read_one_sidedly() {
    let meta = Records::default();
    meta.create(INO);
    let files = served(RegionPolicy::of(PolicyName::RpcDirect), &meta, None);
    let opened = open(&files);
    assert_eq!(files.read_file(ME, opened.filekey, 0, &mut [0; 10]), Err(WcStatus::RemoteInvalid));
}
