//! A real server in this process: a formatted pool, a server with threads on it, and native clients.

#![allow(dead_code, reason = "each test binary uses its part")]

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::session::{Session, SessionOptions, UNSYNCED_BYTES_LEAST};
use cuttlefs_common::persist::LogDeviceKind;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{
    CompletionQueue, ConnectOptions, Device as _, Endpoint, HELLO_WAIT, ProtectionDomain, QpConfig,
    QueuePair, RdmaError,
};
use cuttlefs_common::redo::LogId;
use cuttlefs_common::rpc::durable::Kind;
use cuttlefs_common::rpc::{EARLY_RING_DEPTH, Sampling};
use cuttlefs_common::world::{Random, SystemClock, SystemRandom};
use cuttlefs_server::early::{EarlyChoice, RingDevice, RingOptions};
use cuttlefs_server::log::{FileLog, MIN_CAPACITY, RING_OFFSET};
use cuttlefs_server::meta::{Caller, DiskOptions, DiskStore, Format, HashKey, Meta};
use cuttlefs_server::pool::{self, FormatOptions};
use cuttlefs_server::region::Hotspots;
use cuttlefs_server::region::policy::RegionPolicy;
use cuttlefs_server::rights::ExportRule;
use cuttlefs_server::serve::{LogParts, Parts, RunningServer, ServeOptions, StartError};
use cuttlefs_server::tier::ScrubOptions;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// What servers differ in.
pub struct Serve {
    pub frames: u64,
    pub listen: Vec<Endpoint>,
    pub policy: RegionPolicy,
    pub hotspots: Hotspots,
    /// Every answered mutation is durable.
    pub durable_answers: bool,
    /// What small writes may be acknowledged through, if anything.
    pub rings: Option<Rings>,
}

/// Rings that are offered.
#[derive(Clone, Copy, Debug)]
pub struct Rings {
    pub kind: Kind,
    pub device: LogDeviceKind,
    /// How long who connects for one may take to say hello.
    pub hello_wait: Duration,
}

impl Rings {
    pub fn new(kind: Kind, device: LogDeviceKind) -> Self {
        Self { kind, device, hello_wait: HELLO_WAIT }
    }
}

/// Places for rings that nobody else can have: who took them says nothing.
pub struct TakenRings {
    pub taken: Vec<Arc<dyn QueuePair>>,
    door: Endpoint,
    pd: Arc<dyn ProtectionDomain>,
    cq: Arc<dyn CompletionQueue>,
    _device: Arc<SoftDevice>,
}

impl TakenRings {
    /// None yet of those behind `door`.
    pub fn none(door: Endpoint) -> Self {
        let device = SoftDevice::new(SoftOptions::default());
        let (pd, cq) = (device.alloc_pd(), device.create_cq(4096).expect("a queue"));
        Self { taken: Vec::new(), door, pd, cq, _device: device }
    }

    /// Takes places until there are no more.
    pub fn take_all(&mut self) {
        loop {
            let (send_cq, recv_cq) = (self.cq.clone(), self.cq.clone());
            let qp = QpConfig { send_cq, recv_cq, send_depth: 4, recv_depth: 4 };
            let options = ConnectOptions { qp, receives: Vec::new(), timeout: Duration::from_secs(30) };
            match self.pd.connect(&self.door, options) {
                Ok(connected) => self.taken.push(connected.qp),
                Err(RdmaError::Refused { reason, .. }) => {
                    assert!(reason.contains("as many"), "{reason}");
                    return;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// They are free again.
    pub fn let_go(&mut self) {
        self.taken.drain(..).for_each(|qp| qp.close());
    }
}

impl Drop for TakenRings {
    fn drop(&mut self) {
        self.let_go();
    }
}

/// Where a pool's rings are.
pub fn rings_of(directory: &Path) -> PathBuf {
    directory.join("rings")
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

/// The NIC's thread lets go of a stopped server a moment later.
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

/// The pool's redo log, made if there is none.
fn redo_log(directory: &Path) -> LogParts {
    if let Some(found) = LogParts::found(directory, true).expect("the log can be read") {
        return found;
    }
    let bytes = RING_OFFSET + MIN_CAPACITY;
    FileLog::make(directory, bytes, LogId(SystemRandom.next_u64())).expect("make the log");
    LogParts::found(directory, true).expect("the log can be read").expect("it was made")
}

/// Serves the pool in a directory.
pub fn serve(directory: &Path, serve: Serve) -> Result<RunningServer, StartError> {
    serve_by(vec![ExportRule::default()], directory, serve)
}

/// The same by these rules.
pub fn serve_by(
    exports: Vec<ExportRule>,
    directory: &Path,
    serve: Serve,
) -> Result<RunningServer, StartError> {
    let opened = pool::open(directory).expect("open");
    let store = open_store(&opened.meta_dir());
    let meta = Meta::open(Arc::new(store), Arc::new(SystemClock::new())).expect("open metadata");
    let parts = Parts {
        log: serve.durable_answers.then(|| redo_log(directory)),
        // Always looked for: what they hold is done, whatever is offered from now on.
        rings: Some(RingOptions {
            directory: rings_of(directory),
            device: RingDevice::Kind(serve.rings.map_or(LogDeviceKind::PmemEmulated, |rings| rings.device)),
            early: serve.rings.map_or(EarlyChoice::Off, |rings| EarlyChoice::Kind(rings.kind)),
            hello_wait: serve.rings.map_or(HELLO_WAIT, |rings| rings.hello_wait),
        }),
        ..Parts::new(Arc::new(meta), opened.data_files().clone())
    };
    let options = ServeOptions {
        workers: 2,
        exports,
        policy: serve.policy,
        hotspots: serve.hotspots,
        sampling: Sampling { unit_pages: 16, period_ms: 50 },
        scrub: ScrubOptions { rate_bytes: 64 << 20, interval: Duration::from_secs(1) },
        ..ServeOptions::new(serve.frames * 4096, serve.listen)
    };
    RunningServer::start(parts, options)
}

/// A client. `background`: it has its control thread, which shares counters and pulls bitmaps.
pub fn connect(endpoint: &Endpoint, label: &str, lanes: usize, background: bool) -> RemoteVolume {
    connect_with(endpoint, label, lanes, background, true)
}

/// As `connect`; `early_writes`: small ones may be acknowledged before they are executed.
pub fn connect_with(
    endpoint: &Endpoint,
    label: &str,
    lanes: usize,
    background: bool,
    early_writes: bool,
) -> RemoteVolume {
    let options = SessionOptions { lanes, early_writes, background, ..options(endpoint, label) };
    let device = SoftDevice::new(SoftOptions::default());
    RemoteVolume::new(Session::connect(device, options, &SystemRandom).expect("connect"))
}

/// A client that a server may refuse.
pub fn try_connect(endpoint: &Endpoint) -> Result<RemoteVolume, RdmaError> {
    let device = SoftDevice::new(SoftOptions::default());
    Session::connect(device, options(endpoint, "refused"), &SystemRandom).map(RemoteVolume::new)
}

fn options(endpoint: &Endpoint, label: &str) -> SessionOptions {
    SessionOptions {
        endpoint: endpoint.clone(),
        label: label.into(),
        subtree: Vec::new(),
        lanes: 1,
        early_writes: false,
        ring_depth: EARLY_RING_DEPTH,
        unsynced_bytes: UNSYNCED_BYTES_LEAST,
        clock: Arc::new(SystemClock::new()),
        background: false,
    }
}
