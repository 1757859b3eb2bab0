//! A real server in this process: a formatted pool, a server with threads on it, and native clients.

#![allow(dead_code, reason = "each test binary uses its part")]

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::session::{Session, SessionOptions, UNSYNCED_BYTES_LEAST};
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions, TcpSecurity};
use cuttlefs_common::rdma::{Device, Devices, Endpoint, RdmaError, open_to_connect, open_to_listen};
use cuttlefs_common::rpc::Sampling;
use cuttlefs_common::world::{SystemClock, SystemRandom};
use cuttlefs_server::meta::{Caller, DiskOptions, DiskStore, Format, HashKey, Meta};
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::ScrubOptions;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pages::window::WindowKind;
use cuttlefs_server::pool::{self, FormatOptions};
use cuttlefs_server::rights::ExportRule;
use cuttlefs_server::serve::{Parts, RunningServer, ServeOptions, StartError};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The settings in which the tests' servers differ.
pub struct Serve {
    pub frames: u64,
    pub listen: Vec<Endpoint>,
    pub policy: RegionPolicy,
    pub hotspots: Hotspots,
    /// Every answered mutation is durable.
    pub durable_answers: bool,
}

/// The endpoint of an RNIC's interface, for tests that run over one.
pub fn rdma_endpoint() -> Endpoint {
    let host = std::env::var("CUTTLEFS_RDMA_ADDRESS")
        .expect("CUTTLEFS_RDMA_ADDRESS says which RNIC: an address of its interface");
    Endpoint::Rdma { host, port: 0, via: None }
}

/// An RNIC cannot listen for this machine alone, so a server on one must say that it admits everybody.
fn rnic_options(endpoint: &Endpoint) -> SoftOptions {
    let tcp = match endpoint {
        Endpoint::Rdma { .. } => TcpSecurity::Insecure,
        _ => TcpSecurity::Loopback,
    };
    SoftOptions { tcp, ..SoftOptions::default() }
}

/// An RNIC that can connect there.
pub fn device_to(endpoint: &Endpoint) -> Arc<dyn Device> {
    open_to_connect(endpoint, rnic_options(endpoint)).expect("an RNIC")
}

/// Makes a pool; returns its pages.
pub fn make_pool(options: &FormatOptions, key: [u8; 16]) -> u64 {
    let report = pool::format(options, &|dir, uuid| {
        let store = DiskStore::open(dir, DiskOptions::default())?;
        let root = Caller::default();
        let format = Format { uuid: uuid.0, hash_key: HashKey(key), root, root_mode: 0o755 };
        Ok(Meta::format(&store, &SystemClock::new(), &format)?)
    })
    .expect("format");
    report.pages
}

/// Opens the store. Tries again for a while: the NIC's thread holds the store for a moment after a server has stopped.
fn open_store(directory: &Path) -> DiskStore {
    let mut attempt = 0;
    loop {
        match DiskStore::open(directory, DiskOptions::default()) {
            Ok(store) => return store,
            Err(error) if attempt == 50 => panic!("{error}"),
            Err(_) => std::thread::sleep(Duration::from_millis(100)),
        }
        attempt += 1;
    }
}

/// Serves the pool in a directory.
pub fn serve(directory: &Path, serve: Serve) -> Result<RunningServer, StartError> {
    serve_by(vec![ExportRule::default()], directory, serve)
}

/// Serves the pool with a window of pages for clients that READ the tables.
pub fn serve_windowed(
    directory: &Path,
    serve: Serve,
    window: WindowKind,
) -> Result<RunningServer, StartError> {
    start(2, devices(&serve), vec![ExportRule::default()], directory, serve, window, true)
}

/// Serves the pool, and lets clients read its tables or not.
pub fn serve_trusting(directory: &Path, serve: Serve, trust: bool) -> Result<RunningServer, StartError> {
    let exports = vec![ExportRule::default()];
    start(2, devices(&serve), exports, directory, serve, WindowKind::Pinned, trust)
}

/// Serves the pool by these export rules.
pub fn serve_by(
    exports: Vec<ExportRule>,
    directory: &Path,
    serve: Serve,
) -> Result<RunningServer, StartError> {
    serve_with(devices(&serve), exports, directory, serve)
}

fn devices(serve: &Serve) -> Devices {
    match &serve.listen[..] {
        [first @ Endpoint::Rdma { .. }, ..] => {
            open_to_listen(&serve.listen, rnic_options(first)).expect("an RNIC")
        }
        _ => {
            let device: Arc<dyn Device> = SoftDevice::new(SoftOptions::default());
            device.into()
        }
    }
}

/// Serves the pool by these export rules and with these devices.
pub fn serve_with(
    devices: Devices,
    exports: Vec<ExportRule>,
    directory: &Path,
    serve: Serve,
) -> Result<RunningServer, StartError> {
    serve_with_workers(2, devices, exports, directory, serve)
}

/// The same with so many workers.
pub fn serve_with_workers(
    workers: usize,
    devices: Devices,
    exports: Vec<ExportRule>,
    directory: &Path,
    serve: Serve,
) -> Result<RunningServer, StartError> {
    start(workers, devices, exports, directory, serve, WindowKind::Pinned, true)
}

fn start(
    workers: usize,
    devices: Devices,
    exports: Vec<ExportRule>,
    directory: &Path,
    serve: Serve,
    page_window: WindowKind,
    trust_clients: bool,
) -> Result<RunningServer, StartError> {
    let opened = pool::open(directory).expect("open");
    let store = open_store(&opened.meta_dir());
    let meta = Meta::open(Arc::new(store), Arc::new(SystemClock::new())).expect("open metadata");
    let parts = Parts { devices, ..Parts::new(Arc::new(meta), opened.data_files().clone()) };
    let options = ServeOptions {
        workers,
        exports,
        policy: serve.policy,
        hotspots: serve.hotspots,
        sampling: Sampling { unit_pages: 16, period_ms: 50 },
        scrub: ScrubOptions { rate_bytes: 64 << 20, interval: Duration::from_secs(1) },
        durable_answers: serve.durable_answers,
        // Trusted clients may read the tables: those that are told to do, the others do not need them.
        trust_clients,
        page_window,
        ..ServeOptions::new(serve.frames * 4096, serve.listen)
    };
    RunningServer::start(parts, options)
}

/// A client. With `background` it has its control thread, which shares counters and pulls bitmaps.
pub fn connect(endpoint: &Endpoint, label: &str, lanes: usize, background: bool) -> RemoteVolume {
    connect_by(device_to(endpoint), endpoint, label, lanes, background)
}

/// The same by this RNIC.
pub fn connect_by(
    device: Arc<dyn Device>,
    endpoint: &Endpoint,
    label: &str,
    lanes: usize,
    background: bool,
) -> RemoteVolume {
    let options = SessionOptions { lanes, background, ..options(endpoint, label) };
    RemoteVolume::new(Session::connect(device, options, &SystemRandom).expect("connect")).expect("threads")
}

/// A client that reads the server's tables, over a link that maps no memory. `background` is as in `connect`.
pub fn connect_reading_tables(endpoint: &Endpoint, lanes: usize, background: bool) -> RemoteVolume {
    let device = SoftDevice::new(SoftOptions::default());
    connect_reading_tables_by(device, endpoint, lanes, background)
}

/// The same by this RNIC.
pub fn connect_reading_tables_by(
    device: Arc<dyn Device>,
    endpoint: &Endpoint,
    lanes: usize,
    background: bool,
) -> RemoteVolume {
    let options =
        SessionOptions { lanes, background, initiator_translates: true, ..options(endpoint, "tables") };
    RemoteVolume::new(Session::connect(device, options, &SystemRandom).expect("connect")).expect("threads")
}

/// A client whose session the server may refuse.
pub fn try_connect(endpoint: &Endpoint) -> Result<RemoteVolume, RdmaError> {
    let device = SoftDevice::new(SoftOptions::default());
    Session::connect(device, options(endpoint, "refused"), &SystemRandom)
        .map(|session| RemoteVolume::new(session).expect("threads"))
}

fn options(endpoint: &Endpoint, label: &str) -> SessionOptions {
    SessionOptions {
        endpoint: endpoint.clone(),
        label: label.into(),
        pool: None,
        subtree: Vec::new(),
        lanes: 1,
        unsynced_bytes: UNSYNCED_BYTES_LEAST,
        clock: Arc::new(SystemClock::new()),
        initiator_translates: false,
        background: false,
    }
}
