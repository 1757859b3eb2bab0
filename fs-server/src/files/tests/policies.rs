//! Results of one-sided reads and writes under the policies that have no magic pattern.

use super::harness::stamped;
use super::harness::write;
use super::records::{Records, inode};
use crate::bits;
use crate::files::FilesConfig;
use crate::files::fetch;
use crate::files::write_back::{write_back, write_back_all};
use crate::files::{FileRegion, Files, Grantee, OpenedRegion, grant_write};
use crate::files::{WriteAt, load};
use crate::pages::policy::{PolicyName, RegionPolicy, Technique};
use crate::pages::{Pages, PagesConfig, Sink, Source};
use crate::pool::disk::Disk;
use crate::pool::simdisk::{SimDisk, SimFault};
use crate::pool::space::Space;
use crate::pool::{CachedDisk, CachedPool, DATA_START, DataFiles, PageSums, Reach, SumLayout};
use cuttlefs_common::attr::InodeFlags;
use cuttlefs_common::ids::{FilePage, FrameIndex, InodeNo, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::rdma::{FileRead, FileTarget, FileWrite, PeerKey, RegionOwner, WcStatus};
use cuttlefs_common::region::PageSet;
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
    served_with(policy, meta, |pages| pages.with_mapped(mapped))
}

fn served_with(policy: RegionPolicy, meta: &Records, finish: impl FnOnce(Pages) -> Pages) -> Files {
    let space = Space::new(POOL_PAGES, bits::of(POOL_PAGES, meta.used())).expect("extents do not overlap");
    let frames = POOL_PAGES + u64::from(FrameIndex::FIRST_USABLE.0);
    let config = PagesConfig { policy, ..PagesConfig::new(POOL_PAGES, frames * PAGE_SIZE_U64) };
    let random = Arc::new(SeededRandom::new(42));
    let pages = finish(Pages::new(config, random.as_ref()).expect("memory"));
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
        // The first round writes the file. The second reads it from a page cache that was emptied, if the kernel emptied it.
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
        // The engine leaves a read of a page that is being changed to a fault thread, even if all of it is in memory.
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

/// Does one-sided writes to a file that holds `stamped(1, 0, LEN)`, all of it in memory. Returns the file's bytes afterwards.
fn exposed_writes_change_what_they_may(files: &Files, opened: &OpenedRegion) -> Vec<u8> {
    let (key, file) = (opened.filekey, &opened.file);
    let write = |offset, bytes: &[u8]| files.write_file(ME, key, offset, bytes);
    let faulting = |offset, bytes: &[u8]| files.write_file_faulting(ME, key, offset, bytes);
    let mut expected = stamped(1, 0, LEN);
    let mut seen = vec![0; LEN];
    let mut put = |offset: usize, bytes: &[u8]| {
        expected[offset..offset + bytes.len()].copy_from_slice(bytes);
        assert_eq!(files.read_file(ME, key, 0, &mut seen), Ok(FileRead::Done(LEN)));
        assert_eq!(seen, expected);
    };
    // The first write may have to wait for a mark, so a fault thread does it. It has the same effect.
    assert_eq!(faulting(1, b"first"), Ok(()));
    put(1, b"first");
    let across = stamped(2, 100, 2 * PAGE_SIZE);
    assert_eq!(write(100, &across), Ok(FileWrite::Done));
    put(100, &across);
    assert_eq!(write(LEN as u64 - 4, b"last"), Ok(FileWrite::Done));
    put(LEN - 4, b"last");
    assert_eq!(write(LEN as u64, b""), Ok(FileWrite::Done));
    assert!(!file.is_clean() && files.figures().dirty_files == 1, "a write-back knows of it");
    assert_eq!(files.pages.figures().counts.target_writes, 1 + 3 + 1);

    let refused = |offset, bytes: &[u8], status| {
        assert_eq!(write(offset, bytes), Err(status));
        assert_eq!(faulting(offset, bytes), Err(status));
    };
    refused(LEN as u64 - 4, b"behind", WcStatus::RemoteAccess);
    refused(u64::MAX, b"behind", WcStatus::RemoteAccess);
    for marks in [InodeFlags::APPEND_ONLY, InodeFlags::IMMUTABLE] {
        file.note_marks(marks);
        refused(0, b"before", WcStatus::RemoteAccess);
    }
    file.note_marks(InodeFlags::default());
    for (owner, rights) in
        [(ME, Rights { read: true, write: false }), (RegionOwner(2), Rights { read: true, write: true })]
    {
        let other = files.open(owner, INO, rights).expect("opens");
        assert_eq!(files.write_file(ME, other.filekey, 0, b"no"), Err(WcStatus::RemoteAccess));
        assert_eq!(files.write_file_faulting(ME, other.filekey, 0, b"no"), Err(WcStatus::RemoteAccess));
    }
    // A write to a page that is locked, or to a file that another task has to itself, is left to a fault thread: the engine does not wait.
    let (page, _) = file.state().table.get(FilePage(0)).expect("mapped");
    let busy = block_on(files.pages.locks.lock_many([page]));
    assert_eq!(write(0, b"wait"), Ok(FileWrite::Faults));
    drop(busy);
    let alone = block_on(file.order.write());
    assert_eq!(write(0, b"wait"), Ok(FileWrite::Faults));
    drop(alone);
    put(0, b"");
    expected
}

#[test]
fn what_is_pinned_is_written_in_its_frame() {
    let meta = Records::default();
    meta.create(INO);
    let policy = RegionPolicy::of(PolicyName::Pin);
    let files = served(policy, &meta, None);
    let disk = SimDisk::new(POOL_PAGES, files.pages.frames().memory().clone());
    let opened = open(&files);
    put(&files, &disk, &opened.file);
    block_on(write_back_all(&files, &disk)).expect("writes back");
    let expected = exposed_writes_change_what_they_may(&files, &opened);
    assert_eq!(files.pages.figures().dirty_frames, 4);
    files.end_one_sided_writes();
    assert_eq!(files.write_file(ME, opened.filekey, 0, b"late"), Err(WcStatus::RemoteOperation));
    assert_eq!(files.write_file_faulting(ME, opened.filekey, 0, b"late"), Err(WcStatus::RemoteOperation));
    block_on(write_back_all(&files, &disk)).expect("writes back");

    let next = served(policy, &meta, None);
    let disk = disk.attach(next.pages.frames().memory().clone());
    let opened = open(&next);
    assert_eq!(next.write_file(ME, opened.filekey, 0, b"no frame"), Err(WcStatus::RemoteOperation));
    block_on(load(&next, &disk, &opened.file)).expect("loads");
    let mut seen = vec![0; LEN];
    assert_eq!(next.read_file(ME, opened.filekey, 0, &mut seen), Ok(FileRead::Done(LEN)));
    assert_eq!(seen, expected);
}

#[test]
fn a_mapped_page_is_written_with_its_checksum() {
    let layout = SumLayout::new([POOL_PAGES]);
    let file = tempfile::tempfile().expect("a temporary file");
    file.set_len(DATA_START + layout.all_pages() * PAGE_SIZE_U64).expect("length");
    let mut data_files = DataFiles::new();
    data_files.push(PathBuf::from("x"), file, POOL_PAGES, false);
    let meta = Records::default();
    meta.create(INO);
    let pool = CachedPool::open(&data_files, Reach::Mapped).expect("open");
    let sums = || Arc::new(PageSums::new(layout.clone(), 1 << 20, Vec::new(), [], meta.committer.clone()));
    let with_sums = |sums: Arc<PageSums>| {
        let policy = RegionPolicy::of(PolicyName::Odp);
        served_with(policy, &meta, |pages| pages.with_mapped(Some(pool.clone())).with_sums(sums))
    };
    let files = with_sums(sums());
    let disk = files.pages.mapped_disk(&pool);
    let opened = open(&files);
    put(&files, disk.as_ref(), &opened.file);
    block_on(write_back_all(&files, disk.as_ref())).expect("writes back");
    let expected = exposed_writes_change_what_they_may(&files, &opened);
    block_on(write_back_all(&files, disk.as_ref())).expect("writes back");
    assert!(opened.file.is_clean());

    // A server that reads the sums anew verifies each page that RPCs read.
    let next = with_sums(sums());
    let opened = open(&next);
    let mut seen = vec![0; LEN];
    let all = PageSet::all(6);
    let disk = next.pages.mapped_disk(&pool);
    let fetched = fetch(&next, disk.as_ref(), &opened.file, 0, LEN, &all, Sink::Bytes(&mut seen));
    block_on(fetched).expect("no page is rotten");
    assert_eq!(seen, expected);
}

#[test]
fn all_other_policies_take_one_sided_writes_under_a_grant_or_not_at_all() {
    use Technique::{Hotspot, Magic, Tiering};
    let meta = Records::default();
    meta.create(INO);
    let with =
        |techniques: &[Technique]| RegionPolicy::with(PolicyName::RpcDirect, techniques).expect("a policy");
    let (granted, never) = (WcStatus::RemoteAccess, WcStatus::RemoteInvalid);
    let all = with(&[Tiering, Hotspot, Magic]);
    for (policy, refusal) in [(RegionPolicy::default(), granted), (with(&[]), never), (all, granted)] {
        let files = served(policy, &meta, None);
        let disk = SimDisk::new(POOL_PAGES, files.pages.frames().memory().clone());
        let opened = open(&files);
        put(&files, &disk, &opened.file);
        assert_eq!(files.write_file(ME, opened.filekey, 0, b"no"), Err(refusal));
        assert_eq!(files.write_file_faulting(ME, opened.filekey, 0, b"no"), Err(refusal));
        assert_eq!(files.append_file(ME, opened.filekey, b"no"), Err(refusal));
        let pages = files.grants.take(&PeerKey::User(0), true, 1).expect("a page");
        let grantee = Grantee { owner: ME, filekey: opened.filekey };
        let grant = block_on(grant_write(&files, &disk, &opened.file, grantee, (0, 8), pages));
        assert_eq!(grant.err(), (refusal == never).then_some(Status::Unsupported));
    }
}
