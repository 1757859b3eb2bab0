//! A real server in this process: a formatted pool, a server with threads on it, and native clients.

#![allow(dead_code, reason = "each test binary uses its part")]

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::session::{Session, SessionOptions};
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rpc::Sampling;
use cuttlefs_common::world::{SystemClock, SystemRandom};
use cuttlefs_server::export::Export;
use cuttlefs_server::meta::{Caller, Format, HashKey, Meta, SledOptions, SledStore};
use cuttlefs_server::pool::{self, FormatOptions};
use cuttlefs_server::region::Hotspots;
use cuttlefs_server::region::policy::RegionPolicy;
use cuttlefs_server::serve::{Parts, RunningServer, ServeOptions, StartError};
use cuttlefs_server::tier::ScrubOptions;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Nobody heartbeats here.
const LEASE: Duration = Duration::from_secs(600);

/// What servers differ in.
pub struct Serve {
    pub frames: u64,
    pub listen: Vec<Endpoint>,
    pub policy: RegionPolicy,
    pub hotspots: Hotspots,
}

/// Makes a pool; returns its pages.
pub fn make_pool(options: &FormatOptions, key: [u8; 16]) -> u64 {
    let report = pool::format(options).expect("format");
    let opened = pool::open(&options.dir).expect("open");
    let store = SledStore::open(&opened.meta_dir(), SledOptions::default()).expect("store");
    let root = Caller::default();
    let format = Format { uuid: opened.uuid().0, hash_key: HashKey(key), root, root_mode: 0o755 };
    Meta::format(&store, &SystemClock::new(), &format).expect("format metadata");
    report.pages
}

/// The NIC's thread lets go of a stopped server a moment later.
fn open_store(directory: &Path) -> SledStore {
    let mut attempt = 0;
    loop {
        match SledStore::open(directory, SledOptions::default()) {
            Ok(store) => return store,
            Err(error) if attempt == 50 => panic!("{error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
        attempt += 1;
    }
}

/// Serves the pool in a directory.
pub fn serve(directory: &Path, serve: Serve) -> Result<RunningServer, StartError> {
    let opened = pool::open(directory).expect("open");
    let store = open_store(&opened.meta_dir());
    let clock = Arc::new(SystemClock::new());
    let parts = Parts {
        meta: Arc::new(Meta::open(Arc::new(store), clock.clone()).expect("open metadata")),
        data: opened.data_files().clone(),
        device: SoftDevice::new(SoftOptions::default()),
        clock,
        random: Arc::new(SystemRandom),
        log: None,
        rings: None,
    };
    let options = ServeOptions {
        memory_bytes: serve.frames * 4096,
        listen: serve.listen,
        workers: 2,
        lease: LEASE,
        export: Export::default(),
        policy: serve.policy,
        hotspots: serve.hotspots,
        sampling: Sampling { unit_pages: 16, period_ms: 50 },
        scrub: ScrubOptions { rate_bytes: 64 << 20, interval: Duration::from_secs(1) },
        sum_cache_bytes: 1 << 20,
    };
    RunningServer::start(parts, options)
}

/// A client. `background`: it has its control thread, which shares counters and pulls bitmaps.
pub fn connect(endpoint: &Endpoint, label: &str, lanes: usize, background: bool) -> RemoteVolume {
    let options = SessionOptions {
        endpoint: endpoint.clone(),
        label: label.into(),
        subtree: Vec::new(),
        lanes,
        background,
    };
    let device = SoftDevice::new(SoftOptions::default());
    RemoteVolume::new(Session::connect(device, options, &SystemRandom).expect("connect"))
}
