//! File regions over a real server: keys that are handed over, write grants, atomics and APPENDs (docs/file-regions.md).

mod keys;
mod program;
#[path = "../serving/mod.rs"]
mod serving;
mod simulated;
mod walk;
#[path = "../world/mod.rs"]
mod world;

use cuttlefs_client::file::volume::{Caller, OpenHow, Volume};
use cuttlefs_common::ids::{FileKey, PAGE_SIZE_U64, TraceId};
use cuttlefs_common::rdma::{Endpoint, WcStatus};
use cuttlefs_common::rpc::{Allocate, Payload, Request, Rights, SyncScope};
use cuttlefs_common::status::Status;
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::rights::ExportRule;
use cuttlefs_server::serve::RunningServer;
use program::{BOTH, Program};
use serving::Serve;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

const FRAMES: u64 = 1024;
const CALLER: Caller = Caller::new(0, 0, TraceId(1));

/// A server with a pool of its own.
struct Site {
    directory: PathBuf,
    _temporary: tempfile::TempDir,
    running: Option<RunningServer>,
    exports: Vec<ExportRule>,
}

impl Site {
    /// Serves at a tcp port of the system's choice, and at a Unix socket.
    fn new(exports: Vec<ExportRule>) -> Self {
        let temporary = tempfile::tempdir().expect("a directory");
        let directory = temporary.path().join("pool");
        let data = vec![temporary.path().join("data")];
        let options =
            FormatOptions { dir: directory.clone(), size: 32 << 20, data, ..FormatOptions::default() };
        serving::make_pool(&options, [3; 16]);
        let mut site = Self { directory, _temporary: temporary, running: None, exports };
        site.start();
        site
    }

    fn unix(&self) -> Endpoint {
        Endpoint::Unix(self.directory.with_file_name("socket"))
    }

    fn tcp(&self) -> Endpoint {
        let endpoints = self.running().endpoints();
        endpoints.into_iter().find(|endpoint| matches!(endpoint, Endpoint::Tcp { .. })).expect("listens")
    }

    fn running(&self) -> &RunningServer {
        self.running.as_ref().expect("it runs")
    }

    fn start(&mut self) {
        let listen = vec![Endpoint::Tcp { host: "127.0.0.1".into(), port: 0 }, self.unix()];
        let serve = Serve {
            frames: FRAMES,
            listen,
            policy: RegionPolicy::default(),
            hotspots: Hotspots::Pages,
            durable_answers: false,
        };
        let running = serving::serve_by(self.exports.clone(), &self.directory, serve).expect("serves");
        self.running = Some(running);
    }

    /// Stops the server, and starts the next one at the same socket.
    fn restart(&mut self) {
        self.running.take().expect("it runs").stop();
        self.start();
    }

    /// Requests so far, but for heartbeats.
    fn requests(&self) -> u64 {
        self.running().server().counters.rpc().map(|(_, count)| count).sum()
    }
}

fn links(site: &Site) -> [Endpoint; 2] {
    [site.tcp(), site.unix()]
}

fn counts(site: &Site) -> cuttlefs_server::pages::PageCounts {
    site.running().server().files.pages().figures().counts
}

#[test]
fn granted_ranges_are_changed_without_requests() {
    let site = Site::new(vec![ExportRule::default()]);
    for (number, endpoint) in links(&site).into_iter().enumerate() {
        let mut program = Program::start(&endpoint, 1 + number as u8);
        let opened = program.create(format!("file-{number}").as_bytes(), 0o644);
        let (ino, key) = (opened.attr.ino, opened.filekey);
        program.write(key, 0, false, &[7; 5000]).expect("written");
        let other = serving::connect(&endpoint, "mount", 2, false);
        let how = OpenHow { write: false, ..OpenHow::READ_WRITE };
        let read = || {
            let handle = other.open(&CALLER, ino, how).expect("opens").handle;
            let mut bytes = Vec::new();
            other.read(&CALLER, handle, 0, 20_000, &mut |got| bytes.extend_from_slice(got)).expect("reads");
            other.release(handle);
            bytes
        };
        assert_eq!(read(), [7; 5000]);
        let granted = program.grant(key, 0, 8 * PAGE_SIZE_U64).expect("granted");
        assert_eq!((granted.size, granted.allocated_bytes), (5000, 2 * PAGE_SIZE_U64));
        // The first change may need the metadata, which a worker loads.
        program.write_at(key, 0, b"first").expect("granted");
        let (requests, before) = (site.requests(), counts(&site));
        let mut expected = [b"first".as_slice(), &[7; 4995]].concat();
        for round in 0..50u64 {
            let bytes = [round as u8; 100];
            let at = round * 80;
            program.write_at(key, at, &bytes).expect("granted");
            expected[at as usize..][..100].copy_from_slice(&bytes);
            assert_eq!(program.append(key, &bytes).expect("granted"), expected.len() as u64);
            expected.extend_from_slice(&bytes);
        }
        let word = 4800;
        let known = u64::from_le_bytes([7; 8]);
        assert_eq!(program.add(key, word, 3), Ok(known));
        assert_eq!(program.swap(key, word, known, 0), Ok(known + 3));
        assert_eq!(program.swap(key, word, known + 3, 5), Ok(known + 3));
        assert_eq!(program.add(key, word, 0), Ok(5));
        expected[word as usize..][..8].copy_from_slice(&5u64.to_le_bytes());
        assert_eq!(program.read_at(key, 0, 20_000).expect("reads"), expected);
        assert_eq!(site.requests(), requests, "no request was needed");
        let after = counts(&site);
        assert_eq!(after.target_appends - before.target_appends, 50);
        assert_eq!(after.target_atomics - before.target_atomics, 4);
        assert_eq!(read(), expected, "an open on another mount finds it all");
        let attr = other.get_attr(&CALLER, ino).expect("attributes");
        assert!(attr.change >= granted.change + 100, "each change moved the counter");
        program.done(&Request::Sync(SyncScope::Inode(ino))).expect("durable");
        // Past the granted space, appends go on.
        let large = vec![9; 8 * 4096];
        assert_eq!(program.append(key, &large), Ok(expected.len() as u64));
        expected.extend_from_slice(&large);
        assert_eq!(program.append(key, b"end"), Ok(expected.len() as u64));
        expected.extend_from_slice(b"end");
        assert_eq!(program.read_at(key, 0, 100_000).expect("reads"), expected);
        let now = counts(&site);
        let new = (now.queue_pages - before.queue_pages) + (now.grant_faults - before.grant_faults);
        assert!(new > 0, "from the free page queue, or by a worker");
        other.shut_down();
    }
}

/// A request that puts something behind a one-sided append is answered behind a sync, unless one came between. What lies before it waits for none.
#[test]
fn requests_behind_an_append_that_may_be_lost_sync_it() {
    const TIMES: u64 = 20;
    let site = Site::new(vec![ExportRule::default()]);
    let syncs = || site.running().server().counters.syncs_for_appends.load(Ordering::Relaxed);
    let mut program = Program::start(&site.tcp(), 1);
    let mut other = Program::start(&site.unix(), 2);
    let opened = program.create(b"file", 0o644);
    let (ino, key) = (opened.attr.ino, opened.filekey);
    let theirs = other.open(ino, BOTH).expect("opens").filekey;
    program.write(key, 0, false, &[1; 100]).expect("written");
    program.grant(key, 0, 100).expect("granted");
    other.write(theirs, 0, true, &[2; 100]).expect("appended");
    other.done(&Request::Sync(SyncScope::All)).expect("durable");
    assert_eq!(syncs(), 0, "there was no one-sided append");
    // Behind an end there: an append, a write, reserved space, a length, a copy of the first bytes.
    let request = |kind: &str, end: u64| match kind {
        "append" => {
            Request::Write { filekey: theirs, offset: 0, append: true, payload: Payload::Inline(b"more") }
        }
        "write" => {
            Request::Write { filekey: theirs, offset: end, append: false, payload: Payload::Inline(b"more") }
        }
        "reserve" => {
            let how = Allocate::Reserve { keep_size: false };
            Request::Allocate { filekey: theirs, offset: 0, len: end + 10, how }
        }
        "length" => {
            let set = cuttlefs_common::attr::SetAttr { size: Some(end + 10), ..Default::default() };
            Request::SetAttr { ino, set }
        }
        _ => Request::CopyRange { from: theirs, from_offset: 0, to: theirs, to_offset: end, len: 10 },
    };
    for kind in ["append", "write", "reserve", "length", "copy"] {
        let mut counted = 0;
        for _ in 0..TIMES {
            let end = program.append(key, &[3; 100]).expect("granted") + 100;
            let before = syncs();
            other.write(theirs, 0, false, &[4; 100]).expect("written");
            assert_eq!(syncs(), before, "the write is before it");
            other.call(&request(kind, end), |_| ()).expect("done");
            // The write-back of each second may have come between.
            counted += syncs() - before;
            let before = syncs();
            other.call(&request(kind, end), |_| ()).expect("done");
            assert_eq!(syncs(), before, "{kind}: it is durable");
        }
        assert!((1..=TIMES).contains(&counted), "{kind}: {counted} syncs");
    }
}

#[test]
fn a_grant_ends_when_something_takes_its_pages() {
    let site = Site::new(vec![ExportRule::default()]);
    let mut program = Program::start(&site.tcp(), 1);
    let mut other = Program::start(&site.unix(), 2);
    let opened = program.create(b"file", 0o644);
    let (ino, key) = (opened.attr.ino, opened.filekey);
    let theirs = other.open(ino, BOTH).expect("opens").filekey;
    program.write(key, 0, false, &[1; 16_000]).expect("written");
    let punch = |len| Request::Allocate { filekey: theirs, offset: 0, len, how: Allocate::PunchHole };
    let cut = |size| {
        let set = cuttlefs_common::attr::SetAttr { size: Some(size), ..Default::default() };
        Request::SetAttr { ino, set }
    };
    for (ends, request) in [
        (true, punch(4096)),
        (true, cut(12_000)),
        (
            true,
            Request::Allocate {
                filekey: theirs,
                offset: 0,
                len: 4096,
                how: Allocate::ZeroRange { keep_size: true },
            },
        ),
        (false, cut(100_000)),
        (false, Request::Sync(SyncScope::All)),
    ] {
        program.grant(key, 0, 12_100).expect("granted");
        program.write_at(key, 100, b"granted").expect("granted");
        other.call(&request, |_| ()).expect("done");
        let again = program.write_at(key, 100, b"granted");
        assert_eq!(again, if ends { Err(WcStatus::RemoteAccess) } else { Ok(()) }, "{request:?}");
        program.done(&Request::ReturnGrant { filekey: key, offset: 0, len: 1 << 40 }).expect("returned");
        assert_eq!(program.write_at(key, 100, b"no"), Err(WcStatus::RemoteAccess));
        assert_eq!(program.append(key, b"no"), Err(WcStatus::RemoteAccess));
        assert_eq!(program.add(key, 0, 1), Err(WcStatus::RemoteAccess));
    }
    program.grant(key, 0, 4096).expect("granted");
    for offset in [4, 4092, u64::MAX - 2] {
        assert_eq!(program.add(key, offset, 1), Err(WcStatus::RemoteInvalid), "not aligned");
    }
    // Nothing of this was anything to the other one.
    assert_eq!(other.write_at(theirs, 0, b"no"), Err(WcStatus::RemoteAccess), "another's grant");
    assert_eq!(other.write_at(key, 0, b"no"), Err(WcStatus::RemoteAccess), "another's filekey");
    assert_eq!(other.write(theirs, 0, false, b"fine"), Ok(0));
    assert_eq!(program.read_at(key, 0, 4), Ok(b"fine".to_vec()));
    // A client that goes away between a grant and a sync leaves the file whole, and no grant.
    program.write_at(key, 0, b"last").expect("granted");
    program.done(&Request::Detach).expect("detached");
    let figures = site.running().server().files.figures();
    assert_eq!((figures.grants.grants, figures.grants.pages), (0, 0));
    assert_eq!(other.fetch(theirs, 0, 4), Ok(b"last".to_vec()));
}

/// An atomic tells the word that was there.
#[test]
fn who_may_only_write_reads_nothing_by_an_atomic() {
    let site = Site::new(vec![ExportRule::default()]);
    for (number, endpoint) in links(&site).into_iter().enumerate() {
        let mut program = Program::start(&endpoint, 1 + number as u8);
        let opened = program.create(format!("file-{number}").as_bytes(), 0o644);
        program.write(opened.filekey, 0, false, b"a secret").expect("written");
        let writes =
            program.open(opened.attr.ino, Rights { read: false, write: true }).expect("opens").filekey;
        program.grant(writes, 0, 4096).expect("granted");
        assert_eq!(program.add(writes, 0, 0), Err(WcStatus::RemoteAccess));
        assert_eq!(program.swap(writes, 0, 0, 0), Err(WcStatus::RemoteAccess));
        program.write_at(writes, 0, b"a change").expect("granted");
        assert_eq!(program.fetch(opened.filekey, 0, 8), Ok(b"a change".to_vec()), "nothing else changed it");
    }
}

#[test]
fn grants_are_bounded() {
    let site = Site::new(vec![ExportRule::default()]);
    let mut program = Program::start(&site.tcp(), 1);
    let key = program.create(b"file", 0o644).filekey;
    assert_eq!(program.grant(key, 0, 0), Err(Status::Invalid));
    assert_eq!(program.grant(key, u64::MAX, 2), Err(Status::TooLarge));
    assert_eq!(program.grant(FileKey(5), 0, 1), Err(Status::Stale));
    // A quarter of the frames is for grants, and an address gets half of what the others leave.
    assert_eq!(program.grant(key, 0, FRAMES / 4 * PAGE_SIZE_U64), Err(Status::Busy));
    let share = (FRAMES - 3) / 4 / 2 * PAGE_SIZE_U64;
    program.grant(key, 0, share).expect("its share");
    assert_eq!(program.grant(key, share, PAGE_SIZE_U64 * 2), Err(Status::Busy));
    program.done(&Request::ReturnGrant { filekey: key, offset: 0, len: share }).expect("returned");
    program.grant(key, share, share).expect("its share again");
}

/// A record: who wrote it, which one it is, and bytes that follow from both.
fn record(who: u32, number: u32) -> Vec<u8> {
    let len = 20 + (who * 31 + number * 17) % 900;
    let head = [who.to_le_bytes(), number.to_le_bytes(), len.to_le_bytes()].concat();
    let body = (0..len - 12).map(|index| (who * 7 + number * 3 + index) as u8);
    head.into_iter().chain(body).collect()
}

/// Ends the other threads of a test, also if it fails.
struct Stop<'s>(&'s AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn appends_of_all_kinds_are_whole_and_there_once() {
    const APPENDERS: u32 = 3;
    const RECORDS: u32 = 150;
    let site = Site::new(vec![ExportRule::default()]);
    let mut first = Program::start(&site.tcp(), 100);
    let ino = first.create(b"log", 0o644).attr.ino;
    let stop = AtomicBool::new(false);
    let (site_ref, stop_ref) = (&site, &stop);
    let placed: BTreeMap<u64, Vec<u8>> = std::thread::scope(|scope| {
        let stopping = Stop(&stop);
        let one_sided = (0..APPENDERS).map(|who| {
            scope.spawn(move || {
                let endpoint = links(site_ref)[who as usize % 2].clone();
                let mut program = Program::start(&endpoint, 1 + who as u8);
                let key = program.open(ino, BOTH).expect("opens").filekey;
                let mut placed = Vec::new();
                for number in 0..RECORDS {
                    if number % 20 == 0 {
                        let returned = Request::ReturnGrant { filekey: key, offset: 0, len: 1 << 40 };
                        program.done(&returned).expect("returned");
                        // In front of the end, as far as one can know: others append meanwhile.
                        let size = program.grant(key, 0, 1).expect("granted").size;
                        program.grant(key, size, 6 * PAGE_SIZE_U64).expect("granted");
                    }
                    let bytes = record(who, number);
                    placed.push((program.append(key, &bytes).expect("appended"), bytes));
                }
                placed
            })
        });
        let by_rpc = (APPENDERS..2 * APPENDERS).map(|who| {
            scope.spawn(move || {
                let endpoint = links(site_ref)[who as usize % 2].clone();
                let mut program = Program::start(&endpoint, 1 + who as u8);
                let key = program.open(ino, BOTH).expect("opens").filekey;
                let append = |number| {
                    let bytes = record(who, number);
                    (program.write(key, 0, true, &bytes).expect("appended"), bytes)
                };
                (0..RECORDS).map(append).collect::<Vec<_>>()
            })
        });
        let appenders: Vec<_> = one_sided.chain(by_rpc).collect();
        let syncing = scope.spawn(move || {
            let mut program = Program::start(&site_ref.tcp(), 99);
            while !stop_ref.load(Ordering::Relaxed) {
                program.done(&Request::Sync(SyncScope::All)).expect("durable");
            }
        });
        let placed = appenders.into_iter().flat_map(|one| one.join().expect("no panic")).collect();
        drop(stopping);
        syncing.join().expect("no panic");
        placed
    });
    assert_eq!(placed.len(), (2 * APPENDERS * RECORDS) as usize, "no two are at one offset");
    let key = first.open(ino, BOTH).expect("opens").filekey;
    let mut end = 0;
    for (offset, bytes) in &placed {
        assert_eq!(*offset, end, "no hole and no overlap");
        assert_eq!(&first.fetch(key, *offset, bytes.len() as u32).expect("reads"), bytes);
        end += bytes.len() as u64;
    }
    let after = counts(&site);
    assert!(after.target_appends == u64::from(APPENDERS * RECORDS), "{after:?}");
}

#[test]
fn one_word_is_added_to_by_all() {
    let site = Site::new(vec![ExportRule::default()]);
    let mut first = Program::start(&site.tcp(), 100);
    let opened = first.create(b"counter", 0o644);
    first.write(opened.filekey, 0, false, &[0; 64]).expect("written");
    let (ino, site) = (opened.attr.ino, &site);
    std::thread::scope(|scope| {
        for who in 0..3 {
            scope.spawn(move || {
                let mut program = Program::start(&links(site)[who % 2], 1 + who as u8);
                let key = program.open(ino, BOTH).expect("opens").filekey;
                program.grant(key, 0, 64).expect("granted");
                for _ in 0..200 {
                    program.add(key, 8, 1).expect("granted");
                    // The word beside it belongs to one program alone.
                    program.write_at(key, 16 + 8 * who as u64, &[who as u8 + 1; 8]).expect("granted");
                }
            });
        }
    });
    let bytes = first.read_at(opened.filekey, 0, 40).expect("reads");
    let expected = [[0; 8], 600u64.to_le_bytes(), [1; 8], [2; 8], [3; 8]].concat();
    assert_eq!(bytes, expected);
}
