//! One server with several RNICs. Registered memory, names of queue pairs and completions belong to one RNIC; files, sessions and heat belong to the
//! server. Two software RNICs stand for two providers: both number their queue pairs from the same start, and neither knows the other's keys.

mod host_name;
mod running;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Handle, Volume};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{Device, Devices, Endpoint};
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::rights::ExportRule;
use cuttlefs_server::serve::RunningServer;
use host_name::HostName;
use running::serving::{self, Serve};
use running::{CALLER, READ_WRITE, figure, read, until};
use std::sync::{Arc, Barrier};

/// Frames for everything that the tests write.
const FRAMES: u64 = 4096;
/// More than fits a message: the server READs it for a write and WRITEs it for a read, through its bounce buffers.
const PIECE: usize = 200_000;
const PIECES: u64 = 8;

/// A server with two RNICs, each of which listens on two links.
struct TwoRnics {
    running: RunningServer,
    /// The endpoints: tcp and shm of the first RNIC, then of the second.
    links: [Endpoint; 4],
    _directory: tempfile::TempDir,
}

impl TwoRnics {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("directory");
        let dir = directory.path().join("pool");
        serving::make_pool(&FormatOptions { dir, size: 32 << 20, ..FormatOptions::default() }, [5; 16]);
        let tcp = |host: &str| Endpoint::Tcp { host: host.to_owned(), port: 0 };
        let shm = |name: &str| Endpoint::Shm(directory.path().join(name));
        let listen = [vec![tcp("127.0.0.1"), shm("one")], vec![tcp("127.0.0.2"), shm("two")]];
        let device = |listen: &Vec<Endpoint>| -> (Arc<dyn Device>, Vec<Endpoint>) {
            (SoftDevice::new(SoftOptions::default()), listen.clone())
        };
        let devices = Devices::new(listen.iter().map(device).collect()).expect("devices");
        let with = Serve {
            frames: FRAMES,
            listen: listen.concat(),
            policy: RegionPolicy::default(),
            hotspots: Hotspots::Pages,
            durable_answers: false,
        };
        let exports = vec![ExportRule::default()];
        let running =
            serving::serve_with(devices, exports, &directory.path().join("pool"), with).expect("start");
        let links = running.endpoints().try_into().expect("four links");
        Self { running, links, _directory: directory }
    }

    /// A client for each link, and for each RNIC one more that reads the server's tables with that RNIC's keys.
    fn clients(&self) -> Vec<RemoteVolume> {
        let [tcp, shm, other_tcp, other_shm] = &self.links;
        let mut clients: Vec<_> =
            [tcp, other_tcp, shm, other_shm].map(|link| serving::connect(link, "mapped", 3, true)).into();
        clients.extend([tcp, other_tcp].map(|link| serving::connect_reading_tables(link, 3, true)));
        clients
    }
}

fn bytes_of(who: usize, piece: u64) -> Vec<u8> {
    (0..PIECE).map(|at| (at * 7 + who * 31 + piece as usize * 101) as u8).collect()
}

fn write_all(who: usize, volume: &RemoteVolume) -> InodeNo {
    let name = format!("file-{who}");
    let made = volume.create(&CALLER, InodeNo::ROOT, name.as_bytes(), 0o644, true, READ_WRITE);
    let (attr, opened) = made.expect("create");
    for piece in 0..PIECES {
        let offset = piece * PIECE as u64;
        volume.write(&CALLER, opened.handle, offset, &bytes_of(who, piece)).expect("write");
    }
    volume.fsync(&CALLER, opened.handle, false).expect("fsync");
    attr.ino
}

fn open(volume: &RemoteVolume, ino: InodeNo) -> Handle {
    volume.open(&CALLER, ino, READ_WRITE).expect("open").handle
}

fn check_all(whose: usize, volume: &RemoteVolume, handle: Handle) {
    for piece in 0..PIECES {
        let got = read(volume, handle, piece * PIECE as u64, PIECE as u32).expect("read");
        assert!(got == bytes_of(whose, piece), "piece {piece} of the file of {whose}");
    }
}

#[test]
fn clients_by_different_rnics_see_each_others_files() {
    let site = TwoRnics::new();
    let clients = site.clients();
    let inodes: Vec<InodeNo> = std::thread::scope(|scope| {
        let writing: Vec<_> = clients
            .iter()
            .enumerate()
            .map(|(who, volume)| scope.spawn(move || write_all(who, volume)))
            .collect();
        writing.into_iter().map(|writer| writer.join().expect("a writer")).collect()
    });
    std::thread::scope(|scope| {
        for volume in &clients {
            let inodes = &inodes;
            scope.spawn(move || {
                for (whose, ino) in inodes.iter().enumerate() {
                    check_all(whose, volume, open(volume, *ino));
                }
            });
        }
    });
    // Each RNIC counts one-sided reads of its own connections, by its own keys.
    let counted = || site.running.server().files.pages().figures().counts.counted;
    for (who, volume) in clients.iter().enumerate() {
        let handle = open(volume, inodes[who]);
        let (counted_before, reads) = (counted(), figure(volume, "onesided_reads"));
        until("the server hears of one-sided reads by each RNIC", || {
            check_all(who, volume, handle);
            counted() > counted_before + 500
        });
        assert!(figure(volume, "onesided_reads") > reads, "client {who} reads one-sidedly");
    }
    clients.iter().for_each(Volume::shut_down);
    assert_eq!(site.running.server().files.pages().figures().leaked_frames, 0);
    site.running.stop();
}

#[test]
fn a_connection_that_breaks_by_one_rnic_harms_none_by_the_other() {
    let site = TwoRnics::new();
    let clients = site.clients();
    let inodes: Vec<_> = clients.iter().enumerate().map(|(who, volume)| write_all(who, volume)).collect();
    let connections = &site.running.server().admission.connections;
    for round in 0..20 {
        // All connections of one RNIC.
        let broken = connections.all();
        broken.iter().filter(|connection| connection.rnic().0 == round % 2).for_each(|one| one.close());
        for (who, volume) in clients.iter().enumerate() {
            let whose = (who + round) % inodes.len();
            check_all(whose, volume, open(volume, inodes[whose]));
        }
    }
    until("who broke has come back by his own RNIC", || {
        (0..2).all(|rnic| connections.all().iter().filter(|one| one.rnic().0 == rnic).count() >= 3)
    });
    clients.iter().for_each(Volume::shut_down);
    site.running.stop();
}

#[test]
fn a_host_name_that_leads_to_both_rnics_mixes_no_keys() {
    const LANES: usize = 4;
    let site = TwoRnics::new();
    let [tcp, _, other_tcp, _] = site.links.clone();
    let name = Arc::new(HostName::new([tcp.clone(), other_tcp]));
    let volume = serving::connect_reading_tables_by(name, &tcp, LANES, false);
    let handle = open(&volume, write_all(0, &volume));
    let all_have_read = Barrier::new(LANES + 1);
    std::thread::scope(|scope| {
        for _ in 0..LANES {
            // Each thread has a lane of its own, so every second one reads by the other RNIC.
            scope.spawn(|| {
                check_all(0, &volume, handle);
                all_have_read.wait();
                all_have_read.wait();
                check_all(0, &volume, handle);
            });
        }
        // Every lane is connected now.
        all_have_read.wait();
        let reads = figure(&volume, "onesided_reads");
        all_have_read.wait();
        until("every lane reads one-sidedly", || {
            figure(&volume, "onesided_reads") >= reads + LANES as u64 * PIECES
        });
    });
    let connections = site.running.server().admission.connections.all();
    for rnic in 0..2 {
        assert!(connections.iter().any(|connection| connection.rnic().0 == rnic), "RNIC {rnic} is used");
    }
    assert_eq!(figure(&volume, "reconnects"), 0, "a key of the other RNIC breaks the connection");
    volume.shut_down();
    site.running.stop();
}
