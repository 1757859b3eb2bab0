//! Bits that rot on the disk below a real server: a read of that page is an error, the scrub and fsck find the page, and no read returns wrong bytes.

mod serving;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Caller, FsError, Handle, OpenHow, Volume};
use cuttlefs_common::ids::{FilePage, InodeNo, PoolPage, TraceId};
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Random, SeededRandom};
use cuttlefs_server::fsck::{FsckError, FsckOptions, Report, fsck};
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::{Exposure, PolicyName, RegionPolicy};
use cuttlefs_server::pool::{DATA_START, FormatOptions};
use cuttlefs_server::serve::RunningServer;
use serving::Serve;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

const CALLER: Caller = Caller::new(0, 0, TraceId(1));
const READ_WRITE: OpenHow = OpenHow::READ_WRITE;
const PAGE: usize = 4096;
const PAGES: usize = 100;

fn serve(directory: &Path, policy: RegionPolicy) -> (RunningServer, RemoteVolume) {
    let listen: Endpoint = "tcp://127.0.0.1:0".parse().expect("an endpoint");
    let with =
        Serve { frames: 24, listen: vec![listen], policy, hotspots: Hotspots::Pages, durable_answers: false };
    let running = serving::serve(&directory.join("pool"), with).expect("serves");
    let volume = serving::connect(&running.endpoints()[0], "checksums", 2, false);
    (running, volume)
}

fn read(volume: &RemoteVolume, handle: Handle, page: usize, pages: usize) -> Result<Vec<u8>, FsError> {
    let mut bytes = Vec::new();
    volume.read(&CALLER, handle, (page * PAGE) as u64, (pages * PAGE) as u32, &mut |got| {
        bytes.extend_from_slice(got);
    })?;
    Ok(bytes)
}

/// Runs fsck. Tries again for a while: the NIC's thread holds a stopped server's files for a moment longer.
fn check(directory: &Path, repair: bool) -> Report {
    let options = FsckOptions {
        pool: directory.join("pool"),
        repair,
        checksums: true,
        accept_rotten: repair,
        scratch: Some(directory.to_owned()),
    };
    for _ in 0..100 {
        match fsck(&options, &mut |_, _, _| {}) {
            Err(FsckError::Pool(_)) => std::thread::sleep(Duration::from_millis(50)),
            done => return done.expect("checked"),
        }
    }
    panic!("the pool stays in use");
}

/// Flips a random bit of a page in the pool's data file.
fn rot(pool: &Path, page: PoolPage, random: &SeededRandom) {
    let data = std::fs::OpenOptions::new().read(true).write(true).open(pool.join("data")).expect("open");
    let at = DATA_START + page.byte_offset() + random.next_u64() % PAGE as u64;
    let mut byte = [0];
    data.read_exact_at(&mut byte, at).expect("read");
    data.write_all_at(&[byte[0] ^ (1 << (random.next_u64() % 8))], at).expect("write");
    data.sync_all().expect("sync");
}

#[test]
fn a_rotten_page_is_an_error_and_its_neighbours_are_not() {
    for (seed, name) in
        (0..).zip([PolicyName::Term, PolicyName::RpcDirect, PolicyName::RpcBuffer, PolicyName::Rpc])
    {
        let policy = RegionPolicy::of(name);
        println!("{policy}, seed {seed}");
        let random = SeededRandom::new(seed);
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
        let dir = directory.path().join("pool");
        serving::make_pool(
            &FormatOptions { dir: dir.clone(), size: 4 << 20, ..FormatOptions::default() },
            [3; 16],
        );
        let (running, volume) = serve(directory.path(), policy);
        let (attr, file) =
            volume.create(&CALLER, InodeNo::ROOT, b"file", 0o644, true, READ_WRITE).expect("create");
        let bytes: Vec<u8> = (0..PAGES * PAGE).map(|at| (at / 77) as u8 ^ seed as u8).collect();
        volume.write(&CALLER, file.handle, 0, &bytes).expect("write");
        // Write again after a sync, so that pages are overwritten in place, which is what marks are for.
        volume.fsync(&CALLER, file.handle, false).expect("fsync");
        volume.write(&CALLER, file.handle, 0, &bytes).expect("write");
        volume.release(file.handle);
        volume.shut_down();
        running.stop();
        assert_eq!(
            check(directory.path(), false).lines().last().map(String::as_str),
            Some("clean"),
            "{policy}"
        );

        let (running, volume) = serve(directory.path(), policy);
        let bad = random.next_u64() as usize % PAGES;
        let extents = running.server().meta.extents(attr.ino).expect("extents");
        let extent = extents.iter().find(|extent| extent.covers(FilePage(bad as u64))).expect("mapped");
        let pool_page = extent.pool_page_of(FilePage(bad as u64));
        volume.shut_down();
        running.stop();
        rot(&dir, pool_page, &random);

        let report = check(directory.path(), false);
        assert_eq!((report.exit_code(), report.left.len()), (4, 1), "{policy}: {report:?}");
        assert_eq!((report.left[0].ino, report.left[0].page), (attr.ino.0, Some(bad as u64)));

        let (running, volume) = serve(directory.path(), policy);
        let file = volume.open(&CALLER, attr.ino, READ_WRITE).expect("open").handle;
        for page in 0..PAGES {
            match read(&volume, file, page, 1) {
                Ok(got) => {
                    assert_ne!(page, bad, "{policy}: rotten bytes");
                    assert_eq!(got, bytes[page * PAGE..(page + 1) * PAGE], "{policy}, page {page}");
                }
                Err(error) => {
                    assert_eq!(page, bad, "{policy}: {error}");
                    assert!(matches!(error, FsError::Server(Status::Io)), "{error}");
                }
            }
        }
        let from = bad.saturating_sub(5);
        assert!(read(&volume, file, from, 10.min(PAGES - from)).is_err(), "{policy}: a range with it");
        // A part of the rotten page can be neither changed nor read, but the whole page can be written.
        assert!(volume.write(&CALLER, file, (bad * PAGE) as u64 + 5, b"part").is_err(), "{policy}");
        let counts = running.server().files.pages().figures().counts;
        assert!(counts.rotten_pages >= 2, "{policy}: {counts:?}");
        // The scrub of this server begins a second after its start.
        let found = (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(50));
            running.server().integrity.scrub.lock().last.is_some_and(|pass| pass.rotten == 1)
        });
        assert!(found, "{policy}: {:?}", running.server().integrity.scrub.lock());
        let whole = bytes[bad * PAGE..(bad + 1) * PAGE].to_vec();
        volume.write(&CALLER, file, (bad * PAGE) as u64, &whole).expect("whole pages can be written");
        volume.fsync(&CALLER, file, false).expect("fsync");
        assert_eq!(read(&volume, file, bad, 1).expect("healed"), whole, "{policy}");
        assert!(policy.exposure != Exposure::Pinned);
        volume.shut_down();
        running.stop();
        assert_eq!(check(directory.path(), false).exit_code(), 0, "{policy}");
    }
}

#[test]
fn what_the_scrub_found_is_known_after_a_restart() {
    let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let dir = directory.path().join("pool");
    let format = FormatOptions { dir, size: 4 << 20, ..FormatOptions::default() };
    serving::make_pool(&format, [3; 16]);
    let figures = |running: &RunningServer| *running.server().integrity.scrub.lock();
    let (running, volume) = serve(directory.path(), RegionPolicy::default());
    // The scrub begins a second after the start.
    let is_done = (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(50));
        figures(&running).last.is_some()
    });
    assert!(is_done, "{:?}", figures(&running));
    let before = figures(&running).last_ended_secs;
    volume.shut_down();
    running.stop();
    let (running, volume) = serve(directory.path(), RegionPolicy::default());
    let after = figures(&running);
    assert!(after.last.is_some() && after.last_ended_secs >= before, "{after:?}");
    volume.shut_down();
    running.stop();
}
