//! What one-sided reads get under the policies that have no magic pattern.

use super::harness::stamped;
use crate::bits;
use crate::pool::disk::Disk;
use crate::pool::simdisk::{SimDisk, SimFault};
use crate::pool::space::Space;
use crate::pool::{CachedDisk, CachedPool, DATA_START, DataFiles, Reach};
use crate::region::memory_meta::MemoryMeta;
use crate::region::policy::{PolicyName, RegionPolicy};
use crate::region::{FileRegion, OpenedRegion, Regions, RegionsConfig};
use crate::tier::{Source, WriteAt, load, write, write_back};
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
const INO: InodeNo = InodeNo(1);
const ME: RegionOwner = RegionOwner(1);
const LEN: usize = 5 * PAGE_SIZE + 100;

fn regions(policy: RegionPolicy, meta: &MemoryMeta, mapped: Option<Arc<CachedPool>>) -> Regions {
    let space = Space::new(POOL_PAGES, bits::of(POOL_PAGES, meta.used())).expect("extents do not overlap");
    let frames = POOL_PAGES + u64::from(FrameIndex::FIRST_USABLE.0);
    let mut config = RegionsConfig::new(POOL_PAGES, frames * PAGE_SIZE_U64);
    config.policy = policy;
    let random = Arc::new(SeededRandom::new(42));
    let regions = Regions::new(config, Arc::new(space), Arc::new(meta.clone()), random);
    regions.expect("memory").with_mapped(mapped)
}

fn open(regions: &Regions) -> OpenedRegion {
    regions.open(ME, INO, Rights { read: true, write: true }).expect("opens")
}

fn put(regions: &Regions, disk: &dyn Disk, file: &Arc<FileRegion>) {
    let bytes = stamped(1, 0, LEN);
    let written = block_on(write(regions, disk, file, WriteAt::Offset(0), Source::Bytes(&bytes)));
    assert_eq!(written.expect("writes").len as usize, LEN);
}

#[test]
fn what_is_pinned_is_never_the_pattern_and_what_is_not_is_refused() {
    let meta = MemoryMeta::default();
    meta.create(INO);
    let policy = RegionPolicy::of(PolicyName::Pin);
    let writer = regions(policy, &meta, None);
    let disk = SimDisk::new(POOL_PAGES, writer.frames().memory().clone());
    let opened = open(&writer);
    put(&writer, &disk, &opened.file);
    let mut out = vec![0xEE; LEN + 10];
    assert_eq!(writer.read_file(ME, opened.filekey, 0, &mut out), Ok(FileRead::Done(LEN)));
    assert_eq!(out[..LEN], stamped(1, 0, LEN));
    block_on(write_back(&writer, &disk, std::slice::from_ref(&opened.file), true)).expect("writes back");

    let reader = regions(policy, &meta, None);
    let disk = disk.attach(reader.frames().memory().clone());
    let opened = open(&reader);
    assert_eq!(reader.read_file(ME, opened.filekey, 0, &mut out), Err(WcStatus::RemoteOperation));
    disk.inject(SimFault { pages: 0..POOL_PAGES, kind: None, errno: libc::EIO, times: 1 });
    assert_eq!(block_on(load(&reader, &disk, &opened.file)), Err(Status::Io));
    assert_eq!(block_on(load(&reader, &disk, &opened.file)), Ok(6));
    assert_eq!(block_on(load(&reader, &disk, &opened.file)), Ok(0), "once is enough");
    assert_eq!(reader.read_file(ME, opened.filekey, 0, &mut out), Ok(FileRead::Done(LEN)));
    assert_eq!(out[..LEN], stamped(1, 0, LEN));
    let counts = reader.figures().counts;
    assert_eq!((counts.promoted, counts.target_magic), (6, 0));
    assert_eq!(reader.figures().leaked_frames, 0);
}

#[test]
fn a_read_of_the_mapped_pool_faults_once() {
    let file = tempfile::tempfile().expect("a temporary file");
    file.set_len(DATA_START + POOL_PAGES * PAGE_SIZE_U64).expect("length");
    let plain = file.try_clone().expect("a second descriptor");
    let mut files = DataFiles::new();
    files.push(PathBuf::from("x"), file, POOL_PAGES, false);
    let meta = MemoryMeta::default();
    meta.create(INO);
    for hardware in [false, true] {
        let mut policy = RegionPolicy::of(PolicyName::Odp);
        if hardware {
            policy = policy.with_hardware_times().expect("odp");
        }
        let pool = CachedPool::open(&files, Reach::Mapped).expect("open");
        let regions = regions(policy, &meta, Some(pool.clone()));
        let disk = CachedDisk::new(pool.clone());
        let opened = open(&regions);
        // The first round writes, the second finds it in a page cache that was emptied, where the system lets us.
        if !hardware {
            put(&regions, &disk, &opened.file);
            block_on(write_back(&regions, &disk, std::slice::from_ref(&opened.file), true))
                .expect("writes back");
        }
        let (page, _) = opened.file.state().table.get(FilePage(0)).expect("mapped");
        let absent = !pool.is_cached(page.byte_offset(), LEN);
        let mut out = vec![0xEE; LEN + 10];
        let first = regions.read_file(ME, opened.filekey, 0, &mut out);
        assert_eq!(first == Ok(FileRead::Faults), absent);
        assert_eq!(regions.read_file_faulting(ME, opened.filekey, 0, &mut out), Ok(LEN));
        assert_eq!(out[..LEN], stamped(1, 0, LEN));
        assert!(out[LEN..].iter().all(|byte| *byte == 0));
        out.fill(0xEE);
        assert_eq!(regions.read_file(ME, opened.filekey, 100, &mut out), Ok(FileRead::Done(LEN - 100)));
        assert_eq!(out[..LEN - 100], stamped(1, 0, LEN)[100..]);
        let counts = regions.figures().counts;
        assert_eq!((counts.odp_faults, counts.odp_fault_pages, counts.target_magic), (1, 6, 0));
        // A page that is being changed is nothing for the engine, however much of it is in memory.
        regions.residency.begin_direct_write(page);
        assert_eq!(regions.read_file(ME, opened.filekey, 0, &mut out), Ok(FileRead::Faults));
        regions.residency.end_direct_write(page);
        assert_eq!(regions.read_file(ME, 5.into(), 0, &mut out), Err(WcStatus::RemoteAccess));
        assert_eq!(regions.read_file_faulting(ME, 5.into(), 0, &mut out), Err(WcStatus::RemoteAccess));
        drop((regions, disk, pool, opened));
        rustix::fs::fadvise(&plain, 0, None, Advice::DontNeed).expect("advice");
    }
}

#[test]
fn hidden_files_are_not_read_one_sidedly() {
    let meta = MemoryMeta::default();
    meta.create(INO);
    let regions = regions(RegionPolicy::of(PolicyName::RpcDirect), &meta, None);
    let opened = open(&regions);
    assert_eq!(regions.read_file(ME, opened.filekey, 0, &mut [0; 10]), Err(WcStatus::RemoteInvalid));
}
