//! A mount loses nothing to a killed server, however fast it writes: a writer of more than the mount can keep waits for a sync, and a sync that fails
//! stops no writer for good.

mod killed;
mod serving;
mod world;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{FsError, Handle, OpenHow, Volume};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{FilePage, InodeNo};
use cuttlefs_common::rpc::Allocate;
use cuttlefs_common::status::Status;
use cuttlefs_server::pool::{IoKind, SimFault};
use killed::Site;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use world::contents::{CALLER, pattern, read};
use world::kinds::CONFIG;
use world::{World, WorldConfig};

const READ_WRITE: OpenHow = OpenHow::READ_WRITE;
const EIO: Result<(), FsError> = Err(FsError::Server(Status::Io));
const PATIENCE: Duration = Duration::from_secs(120);

/// The server of the tests, which runs in a process of its own.
#[test]
fn serving_child() {
    killed::serve_if_asked();
}

fn create(volume: &RemoteVolume, name: &str) -> (InodeNo, Handle) {
    let made = volume.create(&CALLER, InodeNo::ROOT, name.as_bytes(), 0o644, true, READ_WRITE);
    let (attr, opened) = made.expect("create");
    (attr.ino, opened.handle)
}

fn figure(volume: &RemoteVolume, name: &str) -> u64 {
    let figures = volume.figures();
    figures.into_iter().find(|(found, _)| *found == name).expect("a figure of that name").1
}

/// Four programs write `bytes_each` bytes each, file after file, without a sync. The server is killed several times meanwhile, and once after the
/// last write.
fn copied_behind_kills(scheme: &str, bytes_each: u64, file_bytes: u64) {
    const WRITERS: u64 = 4;
    const CHUNK: u64 = 256 << 10;
    let mut site = Site::new(scheme, 2 * WRITERS * bytes_each);
    let volume = site.connect();
    let written = AtomicU64::new(0);
    let name = |writer: u64, file: u64| format!("{writer}-{file}");
    let chunk = |writer: u64, at: u64| {
        pattern(CHUNK.min(file_bytes) as usize, (writer * 64 + at / CHUNK.min(file_bytes)) as u8)
    };
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (volume, written) = (&volume, &written);
            scope.spawn(move || {
                for file in 0..bytes_each / file_bytes {
                    let (_, handle) = create(volume, &name(writer, file));
                    for offset in (0..file_bytes).step_by(CHUNK.min(file_bytes) as usize) {
                        let bytes = chunk(writer, file * file_bytes + offset);
                        let len = volume.write(&CALLER, handle, offset, &bytes).expect("write");
                        assert_eq!(len as usize, bytes.len());
                        written.fetch_add(u64::from(len), Ordering::Relaxed);
                    }
                    volume.release(handle);
                }
            });
        }
        for kill in 1..=3 {
            let since = Instant::now();
            while written.load(Ordering::Relaxed) < kill * WRITERS * bytes_each / 4 {
                assert!(since.elapsed() < PATIENCE, "nobody goes on");
                std::thread::sleep(Duration::from_millis(1));
            }
            site.kill();
            site.start();
        }
    });
    // This kill comes right after the last writes.
    site.kill();
    site.start();
    for writer in 0..WRITERS {
        for file in 0..bytes_each / file_bytes {
            let name = name(writer, file);
            let ino = volume.lookup(&CALLER, InodeNo::ROOT, name.as_bytes()).expect("it is there").ino;
            let handle = volume.open(&CALLER, ino, READ_WRITE).expect("open").handle;
            for offset in (0..file_bytes).step_by(CHUNK.min(file_bytes) as usize) {
                let expected = chunk(writer, file * file_bytes + offset);
                let there = read(&volume, handle, offset, expected.len() as u32).expect("read");
                assert!(there == expected, "{scheme}: {name} at {offset}: {} bytes", there.len());
            }
            assert_eq!(volume.fsync(&CALLER, handle, false), Ok(()), "nothing is lost");
            volume.release(handle);
        }
    }
    volume.shut_down();
}

#[test]
fn a_large_copy_without_fsync_is_whole_behind_kills() {
    for scheme in ["shm", "tcp"] {
        copied_behind_kills(scheme, 64 << 20, 64 << 20);
    }
}

#[test]
fn many_small_files_without_fsync_are_whole_behind_kills() {
    copied_behind_kills("shm", 24 << 20, 16 << 10);
}

/// A world whose clients keep few unsynced bytes.
fn narrow(seed: u64) -> World {
    World::new(WorldConfig { seed, unsynced_bytes: 16 << 10, ..CONFIG })
}

#[test]
fn what_is_beyond_the_bound_waits_for_a_sync_and_is_kept() {
    for seed in 0..8 {
        let world = narrow(seed);
        let volume = world.client();
        let (_, file) = create(&volume, "f");
        let mut expected = Vec::new();
        for index in 0..60u8 {
            // The later writes are larger than the bound.
            let bytes = pattern(1 + 700 * usize::from(index), index);
            let at = (expected.len() / 2) as u64;
            volume.write(&CALLER, file, at, &bytes).expect("write");
            expected.resize(expected.len().max(at as usize + bytes.len()), 0);
            expected[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
            if index % 20 == 19 {
                world.kill();
                world.start();
            }
        }
        let there = read(&volume, file, 0, expected.len() as u32 + 1).expect("read");
        assert!(there == expected);
        assert_eq!(volume.fsync(&CALLER, file, false), Ok(()));
        assert!(figure(&volume, "unsynced_waits") > 0);
    }
}

#[test]
fn what_has_no_bytes_has_a_bound_too() {
    let world = narrow(1);
    let volume = world.client();
    let (ino, file) = create(&volume, "f");
    for round in 0..500 {
        volume
            .set_attr(&CALLER, ino, SetAttr { size: Some(10_000 + round), ..SetAttr::default() })
            .expect("cut");
        volume.allocate(&CALLER, file, round, 3, Allocate::PunchHole).expect("punch");
    }
    assert!(figure(&volume, "unsynced_waits") > 5);
    world.kill();
    world.start();
    assert_eq!(volume.get_attr(&CALLER, ino).map(|attr| attr.size), Ok(10_499));
    assert_eq!(volume.fsync(&CALLER, file, false), Ok(()));
}

#[test]
fn a_file_that_cannot_be_synced_loses_its_room_and_is_told_and_others_go_on() {
    let world = narrow(3);
    let volume = world.client();
    let (bad_ino, bad) = create(&volume, "bad");
    let (_, good) = create(&volume, "good");
    // So long that a sync writes the pages to the disk: of a shorter file it puts images into the log.
    const LEN: usize = 17 * 4096;
    volume.write(&CALLER, bad, 0, &pattern(LEN, 1)).expect("write");
    volume.fsync(&CALLER, bad, false).expect("sync");
    let pages = world.with_server(|server| {
        let extents = server.server().meta.extents(bad_ino).expect("extents");
        extents.iter().map(|extent| extent.pool_page_of(FilePage(0)).0).collect::<Vec<_>>()
    });
    let &[page] = pages.as_slice() else { panic!("one extent: {pages:?}") };
    let fault =
        SimFault { pages: page..page + 1, kind: Some(IoKind::Write), errno: libc::EIO, times: u32::MAX };
    world.disk().inject(fault);
    // This write takes all of the room, so that the other file needs some of it.
    volume.write(&CALLER, bad, 0, &pattern(LEN, 2)).expect("answered before it is on the disk");
    let mut expected = Vec::new();
    for index in 0..60 {
        let bytes = pattern(3000, index);
        volume.write(&CALLER, good, expected.len() as u64, &bytes).expect("write");
        expected.extend_from_slice(&bytes);
    }
    assert_eq!(volume.fsync(&CALLER, good, false), Ok(()), "it has lost nothing");
    assert_eq!(volume.fsync(&CALLER, bad, false), EIO, "the server says so");
    world.disk().clear_faults();
    assert_eq!(volume.fsync(&CALLER, bad, false), EIO, "what was kept of it is gone: it is told once");
    assert_eq!(volume.fsync(&CALLER, bad, false), Ok(()));
    world.kill();
    world.start();
    assert!(read(&volume, good, 0, expected.len() as u32 + 1) == Ok(expected));
    assert_eq!(volume.fsync(&CALLER, good, false), Ok(()));
}

#[test]
fn where_no_sync_succeeds_writers_go_on_and_each_file_is_told() {
    let world = narrow(5);
    let volume = world.client();
    let files = ["a", "b", "c"].map(|name| create(&volume, name).1);
    let all = SimFault { pages: 0..u64::MAX, kind: Some(IoKind::Write), errno: libc::EIO, times: u32::MAX };
    world.disk().inject(all);
    for index in 0..30u8 {
        for file in files {
            volume.write(&CALLER, file, u64::from(index) * 1000, &pattern(1000, index)).expect("write");
        }
    }
    // After a failed write the server does not know what is on its disk, so it never syncs again.
    world.disk().clear_faults();
    world.kill();
    world.start();
    for file in files {
        assert_eq!(volume.fsync(&CALLER, file, false), EIO);
        assert_eq!(volume.fsync(&CALLER, file, false), Ok(()), "it is told once");
    }
}

#[test]
fn what_is_gone_takes_no_room() {
    let world = narrow(7);
    let volume = world.client();
    for index in 0..40 {
        let name = format!("f{index}");
        let (_, file) = create(&volume, &name);
        volume.write(&CALLER, file, 0, &pattern(9000, index)).expect("write");
        volume.release(file);
        volume.unlink(&CALLER, InodeNo::ROOT, name.as_bytes()).expect("unlink");
    }
    let (_, file) = create(&volume, "stays");
    volume.write(&CALLER, file, 0, &pattern(9000, 99)).expect("write");
    assert_eq!(volume.fsync(&CALLER, file, false), Ok(()));
}

/// The next server is killed, and the one behind it is stopped before the writer has come back.
#[test]
fn a_stop_before_all_are_back_does_not_forget_the_kill_before_it() {
    let mut site = Site::new("shm", 1 << 20);
    let (writer, reader) = (site.connect_quietly(), site.connect_quietly());
    let (ino, handle) = create(&writer, "file");
    writer.write(&CALLER, handle, 0, b"old").expect("write");
    writer.fsync(&CALLER, handle, false).expect("fsync");
    writer.write(&CALLER, handle, 0, b"new").expect("write");
    writer.release(handle);
    site.kill();
    site.start();
    site.stop();
    site.start();
    std::thread::scope(|scope| {
        let found = scope.spawn(|| {
            let opened = reader.open(&CALLER, ino, READ_WRITE).expect("open");
            read(&reader, opened.handle, 0, 3).expect("read")
        });
        // Long enough for a server that does not wait.
        std::thread::sleep(Duration::from_millis(200));
        let opened = writer.open(&CALLER, ino, READ_WRITE).expect("open");
        assert_eq!(writer.fsync(&CALLER, opened.handle, false), Ok(()), "nothing is lost");
        assert_eq!(found.join().expect("no panic"), b"new");
    });
    writer.shut_down();
    reader.shut_down();
}
