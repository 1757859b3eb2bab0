//! What the keys of a server's windows open, and to whom: frames and tables, which trusted clients READ (docs/security.md). Over tcp, where the software
//! RNIC checks the keys, and, where there is one (scripts/vm/rdma-test.sh), over a real one.

mod raw_peer;
mod running;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Handle, Volume};
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE_U64, Rkey};
use cuttlefs_common::rdma::{Endpoint, Remote, RemoteRange, SendOp, WcStatus};
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::serve::RunningServer;
use raw_peer::Peer;
use running::serving::{self, Serve};
use running::{CALLER, READ_WRITE, read};
use std::path::{Path, PathBuf};

const BYTES: [u8; 100] = [0x5e; 100];

/// A server, and a client that keeps the rules and has a file.
struct Site {
    running: RunningServer,
    endpoint: Endpoint,
    honest: RemoteVolume,
    handle: Handle,
}

impl Site {
    fn new(pool: &Path, listen: &Endpoint, trust: bool) -> Self {
        let with = Serve {
            frames: 256,
            listen: vec![listen.clone()],
            policy: RegionPolicy::default(),
            hotspots: Hotspots::Pages,
            durable_answers: false,
        };
        let running = serving::serve_trusting(pool, with, trust).expect("start");
        let endpoint = running.endpoints().remove(0);
        let honest = serving::connect(&endpoint, "honest", 2, false);
        let name = format!("trust-{trust}");
        let made = honest.create(&CALLER, InodeNo::ROOT, name.as_bytes(), 0o644, true, READ_WRITE);
        let handle = made.expect("create").1.handle;
        assert_eq!(honest.write(&CALLER, handle, 0, &BYTES), Ok(BYTES.len() as u32));
        Self { running, endpoint, honest, handle }
    }

    /// A peer that has attached, and the windows that it is told.
    fn peer(&self) -> (Peer, Option<[RemoteRange; 3]>) {
        let device = serving::device_to(&self.endpoint);
        let (peer, attached) = Peer::attached(device.as_ref(), &self.endpoint, 7);
        (peer, attached.windows)
    }

    /// Makes a peer try a request that must be refused: its connection ends, and nothing has changed.
    fn refuses(&self, what: &str, op: SendOp) {
        let (peer, _) = self.peer();
        let status = peer.tries(op, 8);
        let is_refused =
            matches!(status, WcStatus::RemoteAccess | WcStatus::RemoteInvalid | WcStatus::RemoteOperation);
        assert!(is_refused, "{what}: {status:?}");
        peer.wait_for_end();
        assert_eq!(read(&self.honest, self.handle, 0, BYTES.len() as u32), Ok(BYTES.to_vec()), "{what}");
    }

    fn stop(self) {
        self.honest.shut_down();
        self.running.stop();
    }
}

fn pool_in(directory: &Path) -> PathBuf {
    let pool = directory.join("pool");
    let format = FormatOptions { dir: pool.clone(), size: 16 << 20, ..FormatOptions::default() };
    serving::make_pool(&format, [4; 16]);
    pool
}

/// With `--trust-clients` the windows may be READ, as far as they reach. They are never changed.
fn the_keys_of_a_server_that_trusts_are_good_for_reading_only(listen: &Endpoint) {
    let directory = tempfile::tempdir().expect("directory");
    let site = Site::new(&pool_in(directory.path()), listen, true);
    let (peer, windows) = site.peer();
    let windows = windows.expect("it is trusted");
    for (name, window) in ["frames", "residency", "files"].iter().zip(windows) {
        assert_eq!(peer.tries(SendOp::Read(window.at(0)), 8), WcStatus::Success, "{name}");
        site.refuses(&format!("WRITE to {name}"), SendOp::Write(window.at(0)));
        // A region consists of whole pages.
        let end = window.len.next_multiple_of(PAGE_SIZE_U64);
        site.refuses(&format!("READ across the end of {name}"), SendOp::Read(window.at(end - 4)));
    }
    let begin = windows[0].at(0);
    site.refuses("swap in frames", SendOp::CompareSwap { remote: begin, expect: 0, swap: 1 });
    site.refuses("add to frames", SendOp::FetchAdd { remote: begin, add: 1 });
    assert_eq!(peer.tries(SendOp::Read(begin), 8), WcStatus::Success);
    drop(peer);
    site.stop();
}

/// The server is started again without `--trust-clients`: no windows are told, and the keys of before, and those near the peer's own,
/// open nothing.
fn the_keys_of_a_server_that_trusted_open_nothing_at_the_next_one_that_does_not(listen: &Endpoint) {
    let directory = tempfile::tempdir().expect("directory");
    let pool = pool_in(directory.path());
    let site = Site::new(&pool, listen, true);
    let (peer, windows) = site.peer();
    let windows = windows.expect("it is trusted");
    assert_eq!(peer.tries(SendOp::Read(windows[0].at(0)), 8), WcStatus::Success);
    drop(peer);
    site.stop();

    let site = Site::new(&pool, listen, false);
    let (peer, told) = site.peer();
    assert_eq!(told, None);
    let Rkey(own) = peer.mr.rkey();
    drop(peer);
    let mut keys: Vec<u32> = windows.iter().map(|window| window.rkey.0).collect();
    // RNICs count regions up in the upper 24 bits.
    keys.extend([own, own.wrapping_sub(0x100), own.wrapping_add(0x100)]);
    for key in keys {
        let place = Remote::Memory { rkey: Rkey(key), offset: windows[0].first_address };
        site.refuses(&format!("READ by key {key:#x}"), SendOp::Read(place));
    }
    site.stop();
}

macro_rules! over_both {
    ($($name:ident),* $(,)?) => {
        mod tcp {
            use super::Endpoint;

            fn listen() -> Endpoint { "tcp://127.0.0.1:0".parse().expect("an endpoint") }

            $(#[test] fn $name() { super::$name(&listen()) })*
        }

        mod rdma {
            use super::serving;

            $(#[test] #[ignore = "wants an RNIC"] fn $name() { super::$name(&serving::rdma_endpoint()) })*
        }
    };
}

over_both!(
    the_keys_of_a_server_that_trusts_are_good_for_reading_only,
    the_keys_of_a_server_that_trusted_open_nothing_at_the_next_one_that_does_not,
);
