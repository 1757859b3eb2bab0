//! Writes that are acknowledged before they are executed: this mount sees them at once, others when the file was closed,
//! and whatever becomes of the server each of them is there once.

#[path = "../serving/mod.rs"]
mod serving;
mod site;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Caller, FsError, Handle, OpenHow, Volume};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{InodeNo, TraceId};
use cuttlefs_common::locks::LockOwner;
use cuttlefs_common::rpc::durable::{CONNECTIONS_MAX, Kind};
use cuttlefs_common::rpc::{Allocate, RenameMode, Reply, Request, SeekFor};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Random, SeededRandom, SystemRandom};
use site::{Offer, Site};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const CALLER: Caller = Caller::new(0, 0, TraceId(1));
const ROOT: InodeNo = InodeNo::ROOT;
const READ_WRITE: OpenHow = OpenHow { read: true, write: true, append: false, truncate: false, sync: false };
const APPEND: OpenHow = OpenHow { append: true, ..READ_WRITE };
/// How long a test waits for what must come before it says that it did not.
const PATIENCE: Duration = Duration::from_secs(60);
const POOL_BYTES: u64 = 32 << 20;
const WFLUSH: Offer = Offer::Memory(Kind::WFlush);

/// The server that the other tests run in a process of its own.
#[test]
fn serving_child() {
    site::serve_if_asked();
}

fn read(volume: &RemoteVolume, handle: Handle, offset: u64, len: u32) -> Result<Vec<u8>, FsError> {
    let mut bytes = Vec::new();
    volume.read(&CALLER, handle, offset, len, &mut |got| bytes.extend_from_slice(got))?;
    Ok(bytes)
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index as u64 * 31 + seed * 7 + (index as u64 >> 9)) as u8).collect()
}

fn figure(volume: &RemoteVolume, name: &str) -> u64 {
    let figures = volume.figures();
    figures.into_iter().find(|(found, _)| *found == name).expect("a figure of that name").1
}

/// The server's, over a lane of the session: answered outside of its slot, which stays as it is.
fn status(volume: &RemoteVolume) -> serde_json::Value {
    let caller = volume.session().own_caller();
    let text = volume.session().call(
        &caller,
        || Request::Status,
        |reply| match reply {
            Reply::Status(text) => Ok(text.to_owned()),
            _ => Err(FsError::Server(Status::Malformed)),
        },
    );
    serde_json::from_str(&text.expect("status")).expect("JSON")
}

fn create(volume: &RemoteVolume, name: &[u8], how: OpenHow) -> (InodeNo, Handle) {
    let (attr, opened) = volume.create(&CALLER, ROOT, name, 0o644, true, how).expect("create");
    (attr.ino, opened.handle)
}

fn close(volume: &RemoteVolume, handle: Handle) {
    volume.flush(handle, LockOwner(1)).expect("flush");
    volume.release(handle);
}

/// Each operation that can see a file, right behind an early write.
fn every_operation_sees(volume: &RemoteVolume) {
    let (ino, file) = create(volume, b"f", READ_WRITE);
    let mut expected = Vec::new();
    let mut round = 0;
    // A write of another length each time, at the end and over what is there.
    let mut write = |expected: &mut Vec<u8>| {
        round += 1;
        let (at, bytes) = (expected.len() / 3 * 2, pattern(round, 3000 + 977 * round as usize % 9000));
        assert_eq!(volume.write(&CALLER, file, at as u64, &bytes), Ok(bytes.len() as u32));
        expected.resize(expected.len().max(at + bytes.len()), 0);
        expected[at..at + bytes.len()].copy_from_slice(&bytes);
    };
    for _ in 0..4 {
        write(&mut expected);
        assert!(read(volume, file, 0, 1 << 20) == Ok(expected.clone()), "read");
        write(&mut expected);
        let size = expected.len() as u64;
        assert_eq!(volume.get_attr(&CALLER, ino).map(|attr| attr.size), Ok(size), "getattr");
        write(&mut expected);
        let size = expected.len() as u64;
        assert_eq!(volume.lookup(&CALLER, ROOT, b"f").map(|attr| attr.size), Ok(size), "lookup");
        write(&mut expected);
        let mut listed = None;
        let take = &mut |entry: &cuttlefs_common::rpc::DirEntry<'_>| {
            listed = entry.attr.map(|attr| attr.size);
            true
        };
        volume.read_dir(&CALLER, ROOT, 0, true, take).expect("list");
        assert_eq!(listed, Some(expected.len() as u64), "readdirplus");
        write(&mut expected);
        let opened = volume.open(&CALLER, ino, READ_WRITE).expect("open");
        assert!(read(volume, opened.handle, 0, 1 << 20) == Ok(expected.clone()), "another handle");
        volume.release(opened.handle);
        write(&mut expected);
        // The ordinary way, over what is not executed yet.
        let large = pattern(expected.len() as u64, 40_000);
        assert_eq!(volume.write(&CALLER, file, 100, &large), Ok(40_000));
        expected.resize(expected.len().max(40_100), 0);
        expected[100..40_100].copy_from_slice(&large);
        write(&mut expected);
        let cut = expected.len() - 1234;
        let set = SetAttr { size: Some(cut as u64), ..SetAttr::default() };
        assert_eq!(volume.set_attr(&CALLER, ino, set).map(|attr| attr.size), Ok(cut as u64));
        expected.truncate(cut);
        write(&mut expected);
        volume.allocate(&CALLER, file, 500, 5000, Allocate::PunchHole).expect("punch");
        expected[500..5500].fill(0);
        write(&mut expected);
        let end = expected.len() as u64;
        assert_eq!(volume.seek(&CALLER, file, end - 1, SeekFor::Hole), Ok(end), "seek");
        assert!(read(volume, file, 0, 1 << 20) == Ok(expected.clone()), "read at last");
    }
    write(&mut expected);
    let (_, copy) = create(volume, b"copy", READ_WRITE);
    assert_eq!(volume.write(&CALLER, copy, 0, b"to be written over"), Ok(18));
    assert_eq!(volume.copy_range(&CALLER, file, 0, copy, 0, 4096), Ok(4096));
    assert!(read(volume, copy, 0, 1 << 20) == Ok(expected[..4096].to_vec()), "copy");
    volume.rename(&CALLER, ROOT, b"copy", ROOT, b"f", RenameMode::Replace).expect("rename");
    assert_eq!(volume.get_attr(&CALLER, ino).map(|attr| attr.nlink), Ok(0));
    assert!(read(volume, file, 0, 1 << 20) == Ok(expected), "without a name");
    close(volume, file);
    close(volume, copy);
    volume.unlink(&CALLER, ROOT, b"f").expect("unlink");
}

#[test]
fn a_mount_sees_its_own_writes() {
    for scheme in ["shm", "tcp", "unix"] {
        for kind in Kind::ALL {
            // Over shared memory a message is where it belongs once the target has polled: no SFlush of its own there.
            if kind == Kind::SFlush && scheme == "shm" {
                continue;
            }
            for offer in [Offer::Memory(kind), Offer::File(kind)] {
                let site = Site::new(scheme, POOL_BYTES, offer);
                let volume = site.connect();
                every_operation_sees(&volume);
                assert!(figure(&volume, "early_writes") > 20, "{scheme} {offer:?}: {:?}", volume.figures());
                volume.shut_down();
                let since = Instant::now();
                while !site.ring_files().is_empty() {
                    assert!(since.elapsed() < PATIENCE, "rings are left of a client that said good-bye");
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
        }
    }
}

#[test]
fn who_is_not_offered_or_does_not_want_it_waits_for_each_write() {
    let site = Site::new("shm", POOL_BYTES, Offer::Nothing);
    let volume = site.connect();
    assert!(!volume.flushes());
    every_operation_sees(&volume);
    assert_eq!((figure(&volume, "early_writes"), figure(&volume, "early_ordinary")), (0, 0));
    let site = Site::new("shm", POOL_BYTES, WFLUSH);
    let volume = site.connect_without_early_writes();
    assert!(!volume.flushes());
    every_operation_sees(&volume);
    assert_eq!((figure(&volume, "early_writes"), figure(&volume, "early_ordinary")), (0, 0));
}

/// O_SYNC: what is acknowledged early is durable, and needs no sync.
#[test]
fn a_synchronous_write_that_is_early_costs_no_request() {
    let mut site = Site::new("shm", POOL_BYTES, WFLUSH);
    let volume = site.connect();
    let (_, file) = create(&volume, b"f", OpenHow { sync: true, ..READ_WRITE });
    let requests = figure(&volume, "rpc_requests");
    for at in 0..50u64 {
        assert_eq!(volume.write(&CALLER, file, at * 100, &pattern(at, 100)), Ok(100));
    }
    let (requests, early) = (figure(&volume, "rpc_requests") - requests, figure(&volume, "early_writes"));
    // Heartbeats may come between.
    assert!(early == 50 && requests < 10, "{requests} requests, {early} early writes");
    site.kill();
    site.start(Offer::Nothing);
    for at in 0..50u64 {
        assert!(read(&volume, file, at * 100, 100) == Ok(pattern(at, 100)), "{at}");
    }
}

#[test]
fn others_see_what_was_closed() {
    for scheme in ["shm", "tcp"] {
        let site = Site::new(scheme, POOL_BYTES, WFLUSH);
        let (writer, reader) = (site.connect(), site.connect());
        assert!(writer.flushes());
        let (ino, file) = create(&writer, b"f", READ_WRITE);
        close(&writer, file);
        let mut expected = vec![0; 20_000];
        for round in 0..300u64 {
            let opened = writer.open(&CALLER, ino, READ_WRITE).expect("open").handle;
            for part in 0..3 {
                let at = (round * 7919 + part * 5003) as usize % 15_000;
                let bytes = pattern(round * 3 + part, 1 + (round as usize * 131) % 4000);
                assert_eq!(writer.write(&CALLER, opened, at as u64, &bytes), Ok(bytes.len() as u32));
                expected[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            close(&writer, opened);
            let opened = reader.open(&CALLER, ino, READ_WRITE).expect("open").handle;
            let mut got = read(&reader, opened, 0, 20_000).expect("read");
            got.resize(20_000, 0);
            assert!(got == expected, "{scheme} round {round}");
            reader.release(opened);
        }
        assert!(figure(&writer, "early_writes") > 800, "{:?}", writer.figures());
    }
}

/// What one writer does until it is told to stop: numbered records, each written once, in two files: appended to one, put
/// at their places in the other. Returns how many were acknowledged.
fn write_records(volume: &RemoteVolume, name: &str, stop: &AtomicBool) -> u64 {
    let (_, log) = create(volume, format!("{name}.log").as_bytes(), APPEND);
    let (_, places) = create(volume, format!("{name}.places").as_bytes(), READ_WRITE);
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        let record = record(name, number);
        assert_eq!(volume.write(&CALLER, log, 0, &record), Ok(record.len() as u32), "{name} {number}");
        let at = number * record.len() as u64;
        assert_eq!(volume.write(&CALLER, places, at, &record), Ok(record.len() as u32), "{name} {number}");
        number += 1;
        if number % 100 == 0 {
            volume.fsync(&CALLER, log, true).expect("fsync");
        }
    }
    close(volume, log);
    close(volume, places);
    number
}

fn record(name: &str, number: u64) -> Vec<u8> {
    let mut record = format!("{name} {number} ").into_bytes();
    record.resize(199, b'.');
    record.push(b'\n');
    record
}

fn check_records(volume: &RemoteVolume, name: &str, count: u64) {
    for file in ["log", "places"] {
        let name_of = format!("{name}.{file}");
        let ino = volume.lookup(&CALLER, ROOT, name_of.as_bytes()).expect("lookup").ino;
        let handle = volume.open(&CALLER, ino, READ_WRITE).expect("open").handle;
        for number in 0..count {
            let expected = record(name, number);
            let got = read(volume, handle, number * expected.len() as u64, expected.len() as u32);
            assert!(got == Ok(expected), "{name_of}, record {number} of {count}: {got:?}");
        }
        let end = count * record(name, 0).len() as u64;
        assert_eq!(volume.get_attr(&CALLER, ino).map(|attr| attr.size), Ok(end), "{name_of}: each once");
        volume.release(handle);
    }
}

/// Writers in threads of two mounts while `disturb` runs; then all they wrote is there once.
fn undisturbed(mut site: Site, disturb: impl FnOnce(&mut Site)) {
    let clients = [site.connect(), site.connect()];
    let stop = AtomicBool::new(false);
    let counts = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4)
            .map(|index| {
                let (volume, stop) = (&clients[index % 2], &stop);
                scope.spawn(move || write_records(volume, &format!("writer{index}"), stop))
            })
            .collect();
        disturb(&mut site);
        stop.store(true, Ordering::Relaxed);
        writers.into_iter().map(|writer| writer.join().expect("no writer saw an error")).collect::<Vec<_>>()
    });
    println!("{counts:?} records");
    let fresh = site.connect();
    for (index, count) in counts.iter().enumerate() {
        assert!(*count > 0, "writer{index} got nothing done");
        check_records(&fresh, &format!("writer{index}"), *count);
    }
    let early: u64 = clients.iter().map(|volume| figure(volume, "early_writes")).sum();
    assert!(early > 0, "nothing was written early");
    // Once more, with no cache and no client that could help.
    clients.iter().for_each(RemoteVolume::shut_down);
    fresh.shut_down();
    site.kill();
    site.start(Offer::Nothing);
    let fresh = site.connect();
    for (index, count) in counts.iter().enumerate() {
        check_records(&fresh, &format!("writer{index}"), *count);
    }
}

/// Kills the server several times, each time after some records, and starts it again as `offers` says in turn.
fn kill_again_and_again(site: &mut Site, offers: &[Offer]) {
    let mut seed = [0; 8];
    SystemRandom.fill(&mut seed);
    let seed = u64::from_le_bytes(seed);
    println!("seed {seed}");
    let random = SeededRandom::new(seed);
    for offer in offers {
        std::thread::sleep(Duration::from_millis(20 + random.next_u64() % 200));
        site.kill();
        std::thread::sleep(Duration::from_millis(random.next_u64() % 50));
        site.start(*offer);
    }
    std::thread::sleep(Duration::from_millis(100));
}

#[test]
fn a_killed_server_loses_and_doubles_nothing() {
    for (scheme, offer) in [
        ("shm", WFLUSH),
        ("tcp", WFLUSH),
        ("tcp", Offer::Memory(Kind::SRFlush)),
        ("shm", Offer::File(Kind::WRFlush)),
        ("tcp", Offer::File(Kind::SFlush)),
    ] {
        println!("{scheme} {offer:?}");
        undisturbed(Site::new(scheme, POOL_BYTES, offer), |site| kill_again_and_again(site, &[offer; 5]));
    }
}

/// Rings that are withdrawn, and offered in another way. Of a write at the end that is in flight then nobody can tell
/// whether it was done, so there are none.
#[test]
fn a_server_may_offer_something_else_or_nothing_after_a_restart() {
    let offers =
        [Offer::Nothing, WFLUSH, Offer::Memory(Kind::SRFlush), Offer::Nothing, WFLUSH, Offer::Nothing];
    for scheme in ["shm", "tcp"] {
        let mut site = Site::new(scheme, POOL_BYTES, WFLUSH);
        let volume = site.connect();
        let stop = AtomicBool::new(false);
        let count = std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let (_, places) = create(&volume, b"places", READ_WRITE);
                let mut number = 0;
                while !stop.load(Ordering::Relaxed) {
                    let record = record("places", number);
                    let at = number * record.len() as u64;
                    assert_eq!(volume.write(&CALLER, places, at, &record), Ok(record.len() as u32));
                    number += 1;
                }
                close(&volume, places);
                number
            });
            kill_again_and_again(&mut site, &offers);
            stop.store(true, Ordering::Relaxed);
            writer.join().expect("the writer saw no error")
        });
        assert!(figure(&volume, "early_writes") > 0 && figure(&volume, "early_ordinary") > 0);
        let fresh = site.connect();
        let ino = fresh.lookup(&CALLER, ROOT, b"places").expect("lookup").ino;
        let handle = fresh.open(&CALLER, ino, READ_WRITE).expect("open").handle;
        for number in 0..count {
            let expected = record("places", number);
            let got = read(&fresh, handle, number * expected.len() as u64, expected.len() as u32);
            assert!(got == Ok(expected), "record {number} of {count}: {got:?}");
        }
    }
}

#[test]
fn a_clean_restart_is_a_wait() {
    undisturbed(Site::new("shm", POOL_BYTES, WFLUSH), |site| {
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(50));
            site.stop();
            site.start(WFLUSH);
        }
        std::thread::sleep(Duration::from_millis(50));
    });
}

/// A file system that fills up: who is told that there is no space is told by the write.
#[test]
fn an_acknowledged_write_has_its_space() {
    for scheme in ["shm", "tcp"] {
        // Some pages more than four rings are kept.
        let site = Site::new(scheme, 8 << 20, WFLUSH);
        let volume = site.connect();
        let (_, file) = create(&volume, b"f", READ_WRITE);
        let (mut end, since) = (0u64, Instant::now());
        loop {
            match volume.write(&CALLER, file, end, &pattern(end, 4096)) {
                Ok(len) => end += u64::from(len),
                Err(FsError::Server(Status::NoSpace)) => break,
                Err(error) => panic!("{error}"),
            }
            assert!(since.elapsed() < PATIENCE, "it does not fill up");
        }
        assert!(figure(&volume, "early_writes") > 0, "{:?}", volume.figures());
        assert_eq!(volume.fsync(&CALLER, file, false), Ok(()), "what was acknowledged was done");
        for at in (0..end).step_by(4096) {
            assert!(read(&volume, file, at, 4096) == Ok(pattern(at, 4096)), "{at} of {end}");
        }
        // Space that comes back is there for everybody.
        let (_, other) = create(&volume, b"other", READ_WRITE);
        close(&volume, file);
        volume.unlink(&CALLER, ROOT, b"f").expect("unlink");
        let before = figure(&volume, "early_writes");
        let since = Instant::now();
        for number in 0u64.. {
            match volume.write(&CALLER, other, number % 8 * 4096, &pattern(number, 4096)) {
                Ok(_) | Err(FsError::Server(Status::NoSpace)) => {}
                Err(error) => panic!("{error}"),
            }
            if figure(&volume, "early_writes") > before {
                break;
            }
            assert!(since.elapsed() < PATIENCE, "no early writes any more: {:?}", volume.figures());
        }
        close(&volume, other);
    }
}

/// A device that fails under an acknowledged write: nobody is shown the file without it, by any way to its bytes.
#[test]
fn nobody_reads_a_file_without_what_it_owes() {
    for scheme in ["shm", "tcp"] {
        let mut site = Site::new(scheme, POOL_BYTES, WFLUSH);
        let writer = site.connect();
        let (ino, file) = create(&writer, b"f", READ_WRITE);
        for at in [0, 32_768] {
            assert_eq!(writer.write(&CALLER, file, at, &[b'.'; 32_768]), Ok(32_768));
        }
        close(&writer, file);
        writer.shut_down();
        site.stop();
        site.start(WFLUSH);
        let (writer, reader) = (site.connect(), site.connect());
        let opened = reader.open(&CALLER, ino, READ_WRITE).expect("open").handle;
        // It comes to memory when the server gets to it; from then on it is read one-sidedly.
        let since = Instant::now();
        loop {
            let fetches = figure(&reader, "sparse_fetches");
            assert_eq!(read(&reader, opened, 32_768, 4096), Ok(vec![b'.'; 4096]));
            if figure(&reader, "sparse_fetches") == fetches {
                break;
            }
            assert!(since.elapsed() < PATIENCE, "{scheme}: never one-sidedly");
        }
        let whole = site.cut_data();
        let file = writer.open(&CALLER, ino, READ_WRITE).expect("open").handle;
        assert_eq!(writer.write(&CALLER, file, 100, b"owed"), Ok(4), "acknowledged");
        assert_eq!(writer.flush(file, LockOwner(1)), Err(FsError::Server(Status::Io)), "who wrote is told");
        for volume in [&writer, &reader] {
            let opened = volume.open(&CALLER, ino, READ_WRITE).map(|opened| opened.handle);
            assert_eq!(opened, Err(FsError::Server(Status::Io)), "{scheme}");
        }
        for at in [0, 32_768] {
            assert_eq!(read(&reader, opened, at, 4096), Err(FsError::Server(Status::Io)), "{scheme}, {at}");
        }
        let written = reader.write(&CALLER, opened, 32_768, &[b'!'; 20_000]);
        assert_eq!(written, Err(FsError::Server(Status::Io)), "{scheme}");
        site.kill();
        site.mend_data(&whole);
        site.start(WFLUSH);
        let found = read(&reader, opened, 0, 65_536).expect("read");
        assert!(found[..100] == [b'.'; 100] && &found[100..104] == b"owed", "{scheme}");
        assert!(found[104..].iter().all(|byte| *byte == b'.') && found.len() == 65_536, "{scheme}");
        assert_eq!(writer.write(&CALLER, file, 100, b"paid"), Ok(4), "the handle is good again");
        // A close does not count.
        let told = [(); 2].map(|()| writer.fsync(&CALLER, file, false));
        assert_eq!(told, [Err(FsError::Server(Status::Io)), Ok(())], "{scheme}");
        close(&writer, file);
        assert_eq!(read(&reader, opened, 100, 4), Ok(b"paid".to_vec()));
    }
}

/// As many rings as a server takes, and one mount more: it works, without early writes, until there is a place.
#[test]
fn who_finds_no_place_for_a_ring_writes_the_ordinary_way() {
    // Who takes the places says nothing, and keeps them.
    let mut site = Site::with_hello_wait("unix", POOL_BYTES, WFLUSH, Duration::from_secs(3600));
    let volume = site.connect();
    let (_, file) = create(&volume, b"f", READ_WRITE);
    let write = |at: u64| assert_eq!(volume.write(&CALLER, file, at * 100, &pattern(at, 100)), Ok(100));
    let others = site.take_all_rings();
    assert_eq!(others.taken.len(), CONNECTIONS_MAX);
    assert_eq!(status(&volume)["early"]["rings_bound"], CONNECTIONS_MAX);
    (0..5).for_each(write);
    assert_eq!((figure(&volume, "early_writes"), figure(&volume, "early_ordinary")), (0, 5));
    drop(others);
    let since = Instant::now();
    while figure(&volume, "early_writes") == 0 {
        write(5);
        assert!(since.elapsed() < PATIENCE, "no place, though the others are gone");
        std::thread::sleep(Duration::from_millis(50));
    }
    // It had a ring with a server that was killed, and finds no place with the next: what was in it is done.
    write(6);
    site.kill();
    site.start(WFLUSH);
    let others = site.take_all_rings();
    (7..10).for_each(write);
    for at in 0..10 {
        assert!(read(&volume, file, at * 100, 100) == Ok(pattern(at, 100)), "{at}");
    }
    assert_eq!(volume.fsync(&CALLER, file, false), Ok(()));
    drop(others);
}

/// All places are taken by peers that never say hello: an honest mount waits for them no longer than for anybody's hello.
#[test]
fn who_says_nothing_keeps_no_place_for_a_ring() {
    let site = Site::new("unix", POOL_BYTES, WFLUSH);
    let volume = site.connect();
    let (_, file) = create(&volume, b"f", READ_WRITE);
    let mute = site.take_all_rings();
    assert!(mute.taken.len() >= CONNECTIONS_MAX);
    let since = Instant::now();
    while figure(&volume, "early_writes") == 0 {
        assert_eq!(volume.write(&CALLER, file, 0, b"small"), Ok(5));
        assert!(since.elapsed() < PATIENCE, "no place: {}", status(&volume)["early"]);
        std::thread::sleep(Duration::from_millis(20));
    }
    while status(&volume)["early"]["rings_silent"] != mute.taken.len() {
        assert!(since.elapsed() < PATIENCE, "{}", status(&volume)["early"]);
        std::thread::sleep(Duration::from_millis(20));
    }
    close(&volume, file);
    drop(mute);
}

/// A request that needs no slot uses up no number of its lane's: what follows over the same lane is answered.
#[test]
fn status_is_asked_over_any_lane() {
    let site = Site::new("unix", POOL_BYTES, Offer::Nothing);
    let volume = serving::connect(site.endpoint(), "one lane", 1, false);
    for round in 0..3 {
        assert_eq!(status(&volume)["pid"], site.pid());
        assert_eq!(volume.get_attr(&CALLER, ROOT).map(|attr| attr.ino), Ok(ROOT), "round {round}");
    }
    assert_eq!(figure(&volume, "reconnects"), 0);
}
