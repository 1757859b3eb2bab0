//! Each fault of a tcp link by itself: every request takes effect once, and no client sees an error.

mod chaos;
mod serving;

use chaos::{BadLink, Fault};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Caller, OpenHow, Volume};
use cuttlefs_common::ids::{InodeNo, TraceId};
use cuttlefs_common::rpc::{NewNode, RenameMode};
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::serve::RunningServer;
use serving::Serve;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tempfile::TempDir;

const CALLER: Caller = Caller::new(0, 0, TraceId(1));
const ROOT: InodeNo = InodeNo::ROOT;
const APPEND: OpenHow = OpenHow { append: true, ..OpenHow::READ_WRITE };

/// A server, a client, and a link between them that has no faults at first.
struct Site {
    volume: RemoteVolume,
    link: BadLink,
    running: Option<RunningServer>,
    _directory: TempDir,
}

impl Site {
    fn new(seed: u64) -> Self {
        let directory = tempfile::tempdir().expect("directory");
        let dir = directory.path().join("pool");
        let format = FormatOptions { dir: dir.clone(), size: 16 << 20, ..FormatOptions::default() };
        serving::make_pool(&format, [3; 16]);
        let with = Serve {
            frames: 64,
            listen: vec!["tcp://127.0.0.1:0".parse().expect("an endpoint")],
            policy: RegionPolicy::default(),
            hotspots: Hotspots::Pages,
            durable_answers: false,
        };
        let running = serving::serve(&dir, with).expect("start");
        let link = BadLink::to(&running.endpoints()[0], seed);
        let volume = serving::connect(&link.endpoint(), "bad link", 2, false);
        Self { volume, link, running: Some(running), _directory: directory }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        self.link.set_faults(0);
        self.volume.shut_down();
        if let Some(running) = self.running.take() {
            running.stop();
        }
    }
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len).map(|index| (index as u64 * 31 + seed * 7 + (index as u64 >> 9)) as u8).collect()
}

/// Makes every kind of change, `rounds` times. A second run of any change would fail, or would show in the file.
fn work(volume: &RemoteVolume, rounds: u64) {
    let (attr, file) = volume.create(&CALLER, ROOT, b"log", 0o644, true, APPEND).expect("create");
    let mut expected = Vec::new();
    for round in 0..rounds {
        // A short write goes inline; the server pulls a long one.
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

/// The link does not cut the connection, and the client's patience lasts longer than the test. So the test ends only if damage is noticed by
/// checksums, in the header before its length is used.
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
