//! Runs the real `cuttlefsd fsck` on real pools.

use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::region::{Extent, ExtentState};
use cuttlefs_common::rpc::NewNode;
use cuttlefs_common::world::SystemClock;
use cuttlefs_server::meta::{
    Caller, DataCommit, DiskOptions, DiskStore, Images, Meta, Operation, PageImage, RangeUpdate,
};
use cuttlefs_server::pool::{
    self, AlignedBuf, DATA_START, Disk, IoBuffer, IoKind, IoRequest, MemoryMarks, PageSums, SummedDisk,
    UringDisk,
};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::rc::Rc;
use std::sync::Arc;

const PAGES: u64 = 300;
const FIRST: u64 = 700;

fn cuttlefsd(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_cuttlefsd")).args(arguments).output().expect("it runs")
}

fn fsck(pool: &Path, more: &[&str]) -> (i32, Value) {
    let mut arguments = vec!["fsck", "--json", "--pool", pool.to_str().expect("a name")];
    arguments.extend(more);
    let output = cuttlefsd(&arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let json = serde_json::from_str(&text)
        .unwrap_or_else(|_| panic!("{text} {}", String::from_utf8_lossy(&output.stderr)));
    (output.status.code().expect("a code"), json)
}

fn kinds(report: &Value) -> Vec<String> {
    let findings = report["findings"].as_array().expect("findings").iter();
    findings.map(|finding| finding["kind"].as_str().expect("a kind").to_owned()).collect()
}

/// A pool with one file of `PAGES` pages, which lie at `FIRST` in the pool.
fn pool() -> (tempfile::TempDir, PathBuf) {
    let base = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let dir = base.path().join("pool");
    let made = cuttlefsd(&["format", "--pool", dir.to_str().expect("a name"), "--size", "8M"]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let opened = pool::open(&dir).expect("open");
    let frames = Arc::new(SharedMemory::new("frames", PAGE_SIZE).expect("memfd"));
    let ring = Rc::new(UringDisk::new(opened.data_files().clone(), frames.clone()).expect("io_uring"));
    let sums = Arc::new(PageSums::new(
        opened.data_files().sum_layout(),
        1 << 20,
        Vec::new(),
        [],
        Arc::new(MemoryMarks::default()),
    ));
    let disk = SummedDisk::new(ring.clone(), frames, sums);
    let mut buffer = AlignedBuf::zeroed(PAGES as usize * PAGE_SIZE);
    buffer.as_mut_slice().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 100) as u8);
    let (kind, offset) = (IoKind::Write, FIRST * PAGE_SIZE_U64);
    let request = IoRequest { kind, offset, buffer: IoBuffer::Owned(buffer) };
    let done = ring.block_on(disk.submit(vec![request])).expect("the ring works");
    done.into_iter().for_each(|done| done.result.expect("written"));
    ring.block_on(disk.finish()).expect("the ring works").expect("finished");
    let store = Arc::new(DiskStore::open(&opened.meta_dir(), DiskOptions::default()).expect("store"));
    let meta = Meta::open(store, Arc::new(SystemClock::new())).expect("metadata");
    let make = Operation::Make { parent: InodeNo::ROOT, name: b"file", node: NewNode::File, mode: 0o644 };
    let ino = meta.execute(Caller::default(), &make, &|_| false).expect("made").attr.expect("attributes").ino;
    let extent = Extent {
        file_page: FilePage(0),
        pool_page: PoolPage(FIRST),
        len_pages: PAGES,
        state: ExtentState::Written,
    };
    let range = RangeUpdate { first: FilePage(0), end: FilePage(PAGES), extents: vec![extent] };
    meta.commit_data(&[DataCommit::of_ranges(ino, vec![range], PAGES * PAGE_SIZE_U64)]).expect("committed");
    meta.close(None).expect("closed");
    (base, dir)
}

fn flip(path: &Path, at: u64) {
    let file = fs::OpenOptions::new().read(true).write(true).open(path).expect("open");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("read");
    file.write_all_at(&[byte[0] ^ 0x10], at).expect("write");
}

/// Every file of the pool, each with the checksum of its bytes.
fn snapshot(dir: &Path) -> Vec<(PathBuf, u32)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).expect("list") {
        let path = entry.expect("entry").path();
        if path.is_dir() {
            found.extend(snapshot(&path));
        } else {
            let crc = crc32c::crc32c(&fs::read(&path).expect("read"));
            found.push((path, crc));
        }
    }
    found.sort();
    found
}

#[test]
fn a_clean_pool_is_clean_and_not_a_byte_of_it_changes() {
    let (_base, dir) = pool();
    let before = snapshot(&dir);
    let (code, report) = fsck(&dir, &[]);
    assert_eq!((code, kinds(&report).len()), (0, 0), "{report}");
    assert_eq!(report["verified_pages"], PAGES);
    assert_eq!((&report["inodes"], &report["entries"]), (&Value::from(2), &Value::from(1)));
    flip(&dir.join("data"), DATA_START + (FIRST + 7) * PAGE_SIZE_U64 + 99);
    let damaged = snapshot(&dir);
    assert_ne!(before, damaged);
    assert_eq!(fsck(&dir, &[]).0, 4);
    assert_eq!(fsck(&dir, &["--no-data"]).0, 0, "nobody looked");
    assert_eq!(snapshot(&dir), damaged, "a check changes nothing");
}

#[test]
fn rotten_pages_are_told_and_stay_errors_until_they_are_accepted() {
    let (_base, dir) = pool();
    let data = dir.join("data");
    flip(&data, DATA_START + (FIRST + 7) * PAGE_SIZE_U64 + 99);
    // The checksum of another page rots, too. The checksums lie behind the pages.
    let sums = DATA_START + (8 << 20);
    flip(&data, sums + (FIRST + 200) * 4);
    for arguments in [&[][..], &["--repair"]] {
        let (code, report) = fsck(&dir, arguments);
        assert_eq!((code, kinds(&report)), (4, vec!["rotten-page".to_owned(); 2]), "{report}");
        let pages: Vec<_> =
            report["findings"].as_array().expect("list").iter().map(|f| f["page"].clone()).collect();
        assert_eq!(pages, [7, 200]);
        assert_eq!(report["findings"][0]["path"], "/file", "who restores it wants its name");
    }
    assert_eq!(fsck(&dir, &["--repair", "--accept-rotten"]).0, 1);
    assert_eq!(fsck(&dir, &[]).0, 0);
}

#[test]
fn damaged_superblocks_and_metadata_are_found() {
    let (_base, dir) = pool();
    let data = dir.join("data");
    flip(&data, 100);
    assert_eq!(fsck(&dir, &["--repair"]).0, 4, "no superblock, no pool");
    flip(&data, 100);
    assert_eq!(fsck(&dir, &[]).0, 0);
    // The file of records is zeros now, though batches were durable.
    let log = dir.join("meta/records");
    let len = fs::metadata(&log).expect("there").len() as usize;
    fs::write(&log, vec![0; len]).expect("write");
    let (code, report) = fsck(&dir, &[]);
    assert_eq!((code, kinds(&report)), (4, vec!["store".to_owned()]), "{report}");
}

#[test]
fn what_cannot_be_checked_has_a_code_of_its_own() {
    let (_base, dir) = pool();
    let name = dir.to_str().expect("a name");
    assert_eq!(cuttlefsd(&["fsck", "--pool", "/var/tmp/no-such-pool"]).status.code(), Some(8));
    assert_eq!(cuttlefsd(&["fsck", "--pool", name, "--sideways"]).status.code(), Some(16));
    assert_eq!(cuttlefsd(&["fsck", "--pool", name, "--accept-rotten"]).status.code(), Some(16));
    let held = pool::open(&dir).expect("open");
    let busy = cuttlefsd(&["fsck", "--pool", name]);
    assert_eq!(busy.status.code(), Some(8));
    let who = format!("in use by process {}", std::process::id());
    assert!(String::from_utf8_lossy(&busy.stderr).contains(&who), "{busy:?}");
    drop(held);
    let text = cuttlefsd(&["fsck", "--pool", name]);
    assert!(String::from_utf8_lossy(&text.stdout).ends_with("clean\n"), "{text:?}");
}

#[test]
fn copies_of_metadata_that_a_killed_fsck_left_are_removed_and_others_stay() {
    let (base, dir) = pool();
    let scratch = base.path().join("scratch");
    // No process has the first name's number: process numbers end at 4,194,304.
    let (left, own) = ("cuttlefs-fsck-4294967-x", format!("cuttlefs-fsck-{}-x", std::process::id()));
    for name in [left, &own, "cuttlefs-fsck-mine"] {
        fs::create_dir_all(scratch.join(name).join("below")).expect("made");
    }
    assert_eq!(fsck(&dir, &["--scratch", scratch.to_str().expect("a name")]).0, 0);
    let names = fs::read_dir(&scratch).expect("lists").map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<_> = names.map(|name| name.into_string().expect("a name")).collect();
    names.sort();
    assert_eq!(names, [own.as_str(), "cuttlefs-fsck-mine"]);
}

#[test]
fn a_page_with_an_image_is_judged_once_a_start_has_put_it_in_its_place() {
    let (base, dir) = pool();
    let name = dir.to_str().expect("a name");
    // What a crash in write-back may leave: the page is spoiled, and its image is there.
    let page = DATA_START + (FIRST + 7) * PAGE_SIZE_U64;
    flip(&dir.join("data"), page + 99);
    {
        let opened = pool::open(&dir).expect("open");
        let store = Arc::new(DiskStore::open(&opened.meta_dir(), DiskOptions::default()).expect("store"));
        let meta = Meta::open(store, Arc::new(SystemClock::new())).expect("metadata");
        let ino = meta.lookup(InodeNo::ROOT, b"file").expect("there").ino;
        let images = Images::Put(vec![PageImage { page: FilePage(7), bytes: b"as it was synced".to_vec() }]);
        let commit = DataCommit::of_ranges(ino, Vec::new(), PAGES * PAGE_SIZE_U64);
        meta.commit_data(&[DataCommit { images, ..commit }]).expect("committed");
        meta.flush().expect("flushed");
    }
    let (code, report) = fsck(&dir, &[]);
    assert_eq!((code, kinds(&report), &report["page_images"]), (0, vec![], &Value::from(1)), "{report}");
    // The image does not keep a repair from running. A start may have asked for one.
    let (code, report) = fsck(&dir, &["--repair"]);
    assert_eq!((code, kinds(&report), &report["page_images"]), (0, vec![], &Value::from(1)), "{report}");

    let socket = format!("unix://{}", base.path().join("s").display());
    let serve = ["serve", "--pool", name, "--memory", "4M", "--until-stdin-ends", "--listen", &socket];
    let mut server = Command::new(env!("CARGO_BIN_EXE_cuttlefsd"))
        .args(serve)
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it runs");
    // The server starts to serve before it looks for the end of its input, and then stops cleanly.
    drop(server.stdin.take());
    assert!(server.wait().expect("it ends").success());
    let (code, report) = fsck(&dir, &[]);
    assert_eq!((code, kinds(&report), &report["page_images"]), (0, vec![], &Value::from(0)), "{report}");
    assert_eq!(report["verified_pages"], PAGES);
    let mut found = vec![1; PAGE_SIZE];
    fs::File::open(dir.join("data")).expect("open").read_exact_at(&mut found, page).expect("read");
    let (bytes, zeros) = found.split_at(16);
    assert!(bytes == b"as it was synced" && zeros.iter().all(|byte| *byte == 0));
}
