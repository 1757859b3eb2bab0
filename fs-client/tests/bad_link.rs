//! Each fault of a tcp link by itself: everything happens once, and nobody sees an error. The same of the link to the rings
//! through which small writes are acknowledged before they are executed.

mod chaos;
mod serving;

use chaos::{BadLink, Fault};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Caller, Handle, OpenHow, Volume};
use cuttlefs_common::ids::{InodeNo, TraceId};
use cuttlefs_common::persist::LogDeviceKind;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rpc::durable::{CONNECTIONS_OF_PEER, Kind};
use cuttlefs_common::rpc::{NewNode, RenameMode};
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::region::Hotspots;
use cuttlefs_server::region::policy::RegionPolicy;
use cuttlefs_server::serve::RunningServer;
use serving::{Rings, Serve, TakenRings};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const CALLER: Caller = Caller::new(0, 0, TraceId(1));
const ROOT: InodeNo = InodeNo::ROOT;
const APPEND: OpenHow = OpenHow { read: true, write: true, append: true, truncate: false, sync: false };

/// How long a test waits for what must come before it says that it did not.
const PATIENCE: Duration = Duration::from_secs(60);

/// Sites of this process so far.
static SITES: AtomicU32 = AtomicU32::new(0);

/// A server, a client, and a link between them that is good until told otherwise.
struct Site {
    volume: RemoteVolume,
    link: BadLink,
    /// Between the client and its rings.
    rings: Option<BadLink>,
    running: Option<RunningServer>,
    _directory: TempDir,
}

impl Site {
    fn new(seed: u64) -> Self {
        Self::with_rings(seed, None)
    }

    fn with_rings(seed: u64, rings: Option<Rings>) -> Self {
        let directory = tempfile::tempdir().expect("directory");
        let dir = directory.path().join("pool");
        let format = FormatOptions { dir: dir.clone(), size: 16 << 20, ..FormatOptions::default() };
        serving::make_pool(&format, [3; 16]);
        let with = Serve {
            frames: 64,
            listen: vec!["tcp://127.0.0.1:0".parse().expect("an endpoint")],
            policy: RegionPolicy::default(),
            hotspots: Hotspots::Pages,
            durable_answers: rings.is_some(),
            rings,
        };
        let running = serving::serve(&dir, with).expect("start");
        // The rings are where the client reaches the server, at a port of the server's: another address of this host, which
        // no other test uses.
        let pid = std::process::id();
        let site = SITES.fetch_add(1, Relaxed);
        let host = format!("127.{}.{}.{}", 100 + site, pid >> 8 & 255, pid & 255);
        let link = BadLink::between(&format!("{host}:0"), &running.endpoints()[0], seed);
        let rings = running.ring_endpoints().first().map(|door| {
            let Endpoint::Tcp { port, .. } = door else { panic!("{door} is not tcp") };
            BadLink::between(&format!("{host}:{port}"), door, seed + 1000)
        });
        let volume = serving::connect(&link.endpoint(), "bad link", 2, false);
        Self { volume, link, rings, running: Some(running), _directory: directory }
    }
}

/// A site whose rings' places stay with who takes them.
fn site_of_taken_rings(seed: u64) -> (Site, TakenRings) {
    let rings = Rings::new(Kind::WFlush, LogDeviceKind::PmemEmulated);
    let site = Site::with_rings(seed, Some(Rings { hello_wait: Duration::from_secs(3600), ..rings }));
    let door = site.running.as_ref().expect("it runs").ring_endpoints().remove(0);
    (site, TakenRings::none(door))
}

fn figure(volume: &RemoteVolume, name: &str) -> u64 {
    volume.figures().into_iter().find(|(found, _)| *found == name).expect("a figure of that name").1
}

fn read_all(volume: &RemoteVolume, handle: Handle, len: usize) -> Vec<u8> {
    let mut read = Vec::new();
    volume.read(&CALLER, handle, 0, len as u32 + 1, &mut |got| read.extend_from_slice(got)).expect("read");
    read
}

/// The link to a ring breaks, the server lives, and somebody else has the ring's place when its mount comes back.
#[test]
fn who_lost_a_rings_place_writes_the_ordinary_way() {
    let (site, mut others) = site_of_taken_rings(1);
    let (volume, rings) = (&site.volume, site.rings.as_ref().expect("rings are offered"));
    let (attr, opened) = volume.create(&CALLER, ROOT, b"log", 0o644, true, APPEND).expect("create");
    let mut expected = Vec::new();
    let mut write = |len: usize| {
        let bytes = pattern(expected.len() as u64, len);
        assert_eq!(volume.write(&CALLER, opened.handle, 0, &bytes), Ok(len as u32));
        expected.extend_from_slice(&bytes);
    };
    for round in 0..3 {
        let (before, since) = (figure(volume, "early_writes"), Instant::now());
        while figure(volume, "early_writes") == before {
            write(100);
            assert!(since.elapsed() < PATIENCE, "round {round}: no early writes");
            std::thread::sleep(Duration::from_millis(20));
        }
        // Nobody waits for these: they may be in the ring when it breaks.
        (0..20).for_each(|part| write(1000 + part));
        let since = Instant::now();
        rings.cut();
        while others.taken.len() < CONNECTIONS_OF_PEER {
            others.take_all();
            assert!(since.elapsed() < PATIENCE, "the server keeps the broken ring's place");
        }
        let before = figure(volume, "early_ordinary");
        (0..5).for_each(|part| write(2000 + part));
        assert_eq!(figure(volume, "early_ordinary"), before + 5, "there was no place");
        others.let_go();
    }
    assert!(read_all(volume, opened.handle, expected.len()) == expected, "in order, and each once");
    assert_eq!(volume.get_attr(&CALLER, attr.ino).map(|attr| attr.size), Ok(expected.len() as u64));
    assert_eq!(volume.fsync(&CALLER, opened.handle, false), Ok(()));
    volume.release(opened.handle);
}

/// The same while writes are on their way, by several writers at their ends of files and over what is there.
#[test]
fn rings_that_lose_their_places_again_and_again_lose_and_double_nothing() {
    const RECORD: usize = 200;
    let (site, mut others) = site_of_taken_rings(2);
    let (volume, rings) = (&site.volume, site.rings.as_ref().expect("rings are offered"));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for name in [b"a", b"b"] {
            let stop = &stop;
            scope.spawn(move || {
                let (_, log) = volume.create(&CALLER, ROOT, name, 0o644, true, APPEND).expect("create");
                let (_, last) = volume
                    .create(&CALLER, ROOT, &[name[0], b'.'], 0o644, true, OpenHow { append: false, ..APPEND })
                    .expect("create");
                let mut expected = Vec::new();
                let mut number = 0;
                while !stop.load(Relaxed) {
                    let record = pattern(number, RECORD);
                    assert_eq!(volume.write(&CALLER, log.handle, 0, &record), Ok(RECORD as u32));
                    // Over the one before: an older write that comes late would be seen.
                    assert_eq!(volume.write(&CALLER, last.handle, 0, &record), Ok(RECORD as u32));
                    expected.extend_from_slice(&record);
                    number += 1;
                    if number % 50 == 0 {
                        assert!(read_all(volume, last.handle, RECORD) == record, "record {number}");
                    }
                }
                assert!(number > 0, "nothing was written");
                assert!(read_all(volume, last.handle, RECORD) == pattern(number - 1, RECORD));
                for (index, expected) in expected.chunks(512 * RECORD).enumerate() {
                    let mut read = Vec::new();
                    let at = (index * 512 * RECORD) as u64;
                    let take = &mut |got: &[u8]| read.extend_from_slice(got);
                    volume.read(&CALLER, log.handle, at, expected.len() as u32, take).expect("read");
                    assert!(read == expected, "from byte {at} of {number} records");
                }
                let size = volume.lookup(&CALLER, ROOT, name).map(|attr| attr.size);
                assert_eq!(size, Ok(number * RECORD as u64), "each once");
                assert_eq!(volume.fsync(&CALLER, log.handle, false), Ok(()));
                assert_eq!(volume.fsync(&CALLER, last.handle, false), Ok(()));
                volume.release(log.handle);
                volume.release(last.handle);
            });
        }
        for round in 0..4 {
            let (before, since) = (figure(volume, "early_writes"), Instant::now());
            while figure(volume, "early_writes") == before {
                assert!(since.elapsed() < PATIENCE, "round {round}: no early writes");
                std::thread::sleep(Duration::from_millis(5));
            }
            rings.cut();
            // A writer may be faster with the place it had.
            others.take_all();
            let (before, since) = (figure(volume, "early_ordinary"), Instant::now());
            while figure(volume, "early_ordinary") == before {
                assert!(since.elapsed() < PATIENCE, "round {round}: nobody lost a place");
                rings.cut();
                others.take_all();
            }
            others.let_go();
        }
        stop.store(true, Relaxed);
    });
    println!("{:?}", volume.figures());
}

impl Drop for Site {
    fn drop(&mut self) {
        self.link.set_faults(0);
        self.rings.iter().for_each(|rings| rings.set_faults(0));
        self.volume.shut_down();
        if let Some(running) = self.running.take() {
            running.stop();
        }
    }
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index as u64 * 31 + seed * 7 + (index as u64 >> 9)) as u8).collect()
}

/// Every kind of change, whose second run would say that the first was there; `rounds` of them.
fn work(volume: &RemoteVolume, rounds: u64) {
    let (attr, file) = volume.create(&CALLER, ROOT, b"log", 0o644, true, APPEND).expect("create");
    let mut expected = Vec::new();
    for round in 0..rounds {
        // Inline, and large enough to be pulled.
        for len in [10, 40_000] {
            let bytes = pattern(round + len as u64, len);
            assert_eq!(volume.write(&CALLER, file.handle, 0, &bytes), Ok(len as u32));
            expected.extend_from_slice(&bytes);
        }
        volume.make(&CALLER, ROOT, b"made", NewNode::Directory, 0o755).expect("mkdir");
        volume.link(&CALLER, attr.ino, ROOT, b"link").expect("link");
        volume.rename(&CALLER, ROOT, b"link", ROOT, b"moved", RenameMode::NoReplace).expect("rename");
        volume.unlink(&CALLER, ROOT, b"moved").expect("unlink");
        volume.rmdir(&CALLER, ROOT, b"made").expect("rmdir");
        let mut read = Vec::new();
        let take = &mut |got: &[u8]| read.extend_from_slice(got);
        volume.read(&CALLER, file.handle, 0, expected.len() as u32 + 1, take).expect("read");
        assert!(read == expected, "round {round}: {} bytes, {} written", read.len(), expected.len());
    }
    volume.fsync(&CALLER, file.handle, false).expect("fsync");
    assert_eq!(volume.get_attr(&CALLER, attr.ino).map(|attr| attr.size), Ok(expected.len() as u64));
    volume.release(file.handle);
}

#[test]
fn each_fault_by_itself() {
    for fault in Fault::ALL {
        let site = Site::new(fault as u64 + 1);
        site.link.set_only(fault);
        site.link.set_faults(20);
        work(&site.volume, 10);
        let figures = site.link.figures();
        println!("{fault:?}: {figures:?}");
        assert!(figures.faults[fault as usize].load(Relaxed) > 0, "{fault:?} did not happen");
    }
}

/// Nobody cuts the connection, and nobody's patience ends: the test ends because the checksums are looked at, the header's
/// before its length is believed.
#[test]
fn damage_is_noticed_at_once() {
    for fault in [Fault::Corrupt, Fault::CorruptHeader] {
        let site = Site::new(fault as u64 + 100);
        site.volume.session().set_answer_patience(Duration::from_secs(24 * 3600));
        site.link.leave_damaged();
        site.link.set_only(fault);
        site.link.set_faults(20);
        work(&site.volume, 20);
        let figures = site.link.figures();
        println!("{fault:?}: {figures:?}");
        assert!(figures.faults[fault as usize].load(Relaxed) > 0, "{fault:?} did not happen");
    }
}

#[test]
fn each_fault_of_the_way_to_the_rings() {
    for kind in [Kind::WFlush, Kind::SRFlush] {
        for fault in Fault::ALL {
            let site =
                Site::with_rings(fault as u64 + 1, Some(Rings::new(kind, LogDeviceKind::PmemEmulated)));
            let rings = site.rings.as_ref().expect("rings are offered");
            site.volume.session().set_answer_patience(Duration::from_secs(1));
            let made = site.volume.create(&CALLER, ROOT, b"early", 0o644, true, APPEND);
            let (attr, file) = made.expect("create");
            let mut expected = Vec::new();
            for round in 0..60u64 {
                let bytes = pattern(round, 1 + (round as usize * 37) % 6000);
                assert_eq!(site.volume.write(&CALLER, file.handle, 0, &bytes), Ok(bytes.len() as u32));
                expected.extend_from_slice(&bytes);
                // A ring that cannot be connected at the first attempt is left alone for a while.
                rings.set_only(fault);
                rings.set_faults(20);
            }
            assert_eq!(site.volume.fsync(&CALLER, file.handle, false), Ok(()));
            assert_eq!(
                site.volume.get_attr(&CALLER, attr.ino).map(|attr| attr.size),
                Ok(expected.len() as u64)
            );
            let mut read = Vec::new();
            let take = &mut |got: &[u8]| read.extend_from_slice(got);
            site.volume.read(&CALLER, file.handle, 0, expected.len() as u32 + 1, take).expect("read");
            assert!(read == expected, "{kind:?} {fault:?}: {} bytes, {} written", read.len(), expected.len());
            let figures = rings.figures();
            println!("{kind:?} {fault:?}: {figures:?} {:?}", site.volume.figures());
            assert!(figures.faults[fault as usize].load(Relaxed) > 0, "{fault:?} did not happen");
            let early = site.volume.figures().into_iter().find(|(name, _)| *name == "early_writes");
            assert!(early.is_some_and(|(_, count)| count > 30), "{early:?}");
            site.volume.release(file.handle);
        }
    }
}

#[test]
fn a_connection_that_stands_and_carries_nothing_is_given_up() {
    let site = Site::new(1);
    let volume = &site.volume;
    let (_, file) = volume.create(&CALLER, ROOT, b"log", 0o644, true, APPEND).expect("create");
    volume.session().set_answer_patience(Duration::from_millis(300));
    for _ in 0..3 {
        site.link.swallow();
        assert_eq!(volume.write(&CALLER, file.handle, 0, b"once"), Ok(4));
    }
    let mut read = Vec::new();
    let take = &mut |got: &[u8]| read.extend_from_slice(got);
    volume.read(&CALLER, file.handle, 0, 100, take).expect("read");
    assert_eq!(read, b"onceonceonce");
    volume.release(file.handle);
}
