//! A running server: threads, links, start and stop.
//!
//! Start: metadata -> free space (by the map of pages) -> pages and files -> devices (protection domains, file target) -> the first worker, which
//! recovers -> the other workers -> listeners. A stop goes the other way: listeners close, running requests end, everything is written back and
//! committed, and the threads are joined.
//!
//! # Failure
//! A start that fails half-way stops everything that it has started. After a kill at any instruction the next start finds a prefix of the metadata's
//! batches; see "What is durable when" in docs/recovery.md.

mod acceptor;
mod background;
mod held_memory;
mod memory;
/// A whole server in the calling thread.
pub mod one_thread;
mod page_window;
mod recovery;
pub mod rotten;
mod shown_windows;
mod worker_thread;

use crate::bits;
use crate::committer::Committer;
use crate::counters::ServerCounters;
use crate::files::{Files, FilesConfig};
use crate::locks::Locks;
use crate::meta::{Meta, PART_PAGES, Plane};
use crate::pages::policy::{Access, Exposure, RegionPolicy};
use crate::pages::window::WindowKind;
use crate::pages::{Hotspots, Pages, PagesConfig, ScrubFigures, ScrubOptions};
use crate::pool::{CachedPool, DataFiles, PageSums, Reach, Space, SpaceError, SumLayout};
use crate::rights::{Accounts, ExportRule, Exports, RegionMacs, Tickets};
use crate::rnics::Rnics;
use crate::rpc::connections::Connections;
use crate::server::{About, Admission, Integrity, Server};
use crate::session::Sessions;
use crate::shares::Shares;
use crate::worker::{WorkerError, WorkerHandle};

use acceptor::Acceptor;
use cuttlefs_common::ids::{ClientId, PoolPage};
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{Device, Devices, Endpoint, RdmaError};
use cuttlefs_common::rpc::Sampling;
use cuttlefs_common::size::ByteSize;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Clock, Random, SystemClock, SystemRandom};
pub use page_window::NoPageWindow;
use parking_lot::{Mutex, RwLock};
use recovery::RecoveryError;
use rotten::RottenPages;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use worker_thread::WorkerThread;

/// How long a clean stop waits for running requests. A longer request is stuck on its device.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// The parts that make up a server.
pub struct Parts {
    /// The opened metadata.
    pub meta: Arc<Meta>,
    /// The opened data files.
    pub data: Arc<DataFiles>,
    /// The RNICs, and the endpoints at which each listens.
    pub devices: Devices,
    /// The clock.
    pub clock: Arc<dyn Clock>,
    /// Unpredictable numbers.
    pub random: Arc<dyn Random>,
}

impl Parts {
    /// The parts for a pool with this machine's clock and random numbers and with a software RNIC.
    pub fn new(meta: Arc<Meta>, data: Arc<DataFiles>) -> Self {
        Self {
            meta,
            data,
            devices: Devices::from(SoftDevice::new(SoftOptions::default()) as Arc<dyn Device>),
            clock: Arc::new(SystemClock::new()),
            random: Arc::new(SystemRandom),
        }
    }
}

/// How a server is run.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// DRAM budget of the frames in bytes.
    pub memory_bytes: u64,
    /// The endpoints at which it listens.
    pub listen: Vec<Endpoint>,
    /// Worker threads.
    pub workers: usize,
    /// How long a client may be silent.
    pub lease: Duration,
    /// The rules of the export. The first rule for a peer counts.
    pub exports: Vec<ExportRule>,
    /// How file regions are served.
    pub policy: RegionPolicy,
    /// The units of promotion.
    pub hotspots: Hotspots,
    /// How clients count one-sided reads.
    pub sampling: Sampling,
    /// Rate and period of the scrub.
    pub scrub: ScrubOptions,
    /// Memory for checksums in bytes.
    pub sum_cache_bytes: usize,
    /// Whether a request's changes are durable before its answer is sent.
    pub durable_answers: bool,
    /// Whether every client may READ the frames and tables, and with them every file: for clients that could read as root anyway.
    pub trust_clients: bool,
    /// What trusted clients READ bytes of pages from.
    pub page_window: WindowKind,
}

impl ServeOptions {
    /// One worker, everything exported to everybody, and a long lease: for a server within a program.
    pub fn new(memory_bytes: u64, listen: Vec<Endpoint>) -> Self {
        Self {
            memory_bytes,
            listen,
            workers: 1,
            lease: Duration::from_secs(600),
            exports: vec![ExportRule::default()],
            policy: RegionPolicy::default(),
            hotspots: Hotspots::Pages,
            sampling: Sampling { unit_pages: 256, period_ms: 1000 },
            scrub: ScrubOptions::default(),
            sum_cache_bytes: 1 << 20,
            durable_answers: false,
            trust_clients: false,
            page_window: WindowKind::Pinned,
        }
    }
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Metadata cannot be read.
    #[error("the pool's metadata cannot be read: {0}; look at the log above for the record")]
    Meta(Status),
    /// Metadata contradicts itself.
    #[error("the pool's metadata is damaged: {0}")]
    Space(#[from] SpaceError),
    /// The system refused memory, a thread or a ring.
    #[error("cannot {action}: {source}")]
    System {
        /// The action that failed.
        action: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// A link could not be set up.
    #[error(transparent)]
    Link(#[from] RdmaError),
    /// The policy keeps all of the pool in memory, and the machine has too little.
    #[error(
        "--region pin keeps all of the pool in memory, which takes {needed}; the machine has {available} to give. \
         Serve a smaller pool, or take --region term"
    )]
    PinnedPool {
        /// The bytes that the pool takes.
        needed: ByteSize,
        /// The bytes that the machine has available.
        available: ByteSize,
    },
    /// The policy lets one-sided reads fault, and a link has no NIC that takes the faults.
    #[error(
        "--region odp cannot be served over {0}: a client reads shared memory with its own CPU, and no NIC is there \
         to take a page fault; listen on tcp:// or unix:// only"
    )]
    FaultsWithoutNic(Endpoint),
    /// The window of pages that was asked for cannot be had.
    #[error(transparent)]
    PageWindow(#[from] NoPageWindow),
    /// The state that the server before left cannot be recovered.
    #[error("cannot recover what the server before this one left: {0}")]
    Recovery(#[from] RecoveryError),
    /// A worker has no ring.
    #[error("a worker could not start: {0}")]
    Worker(#[from] WorkerError),
    /// A worker ended before it served.
    #[error("a worker ended before it served; the log above says why")]
    WorkerEnded,
    /// No endpoint was given.
    #[error("no endpoint to listen on was given; give one (--listen)")]
    NoEndpoint,
}

/// Whether the server is going down, and how many requests still run.
#[derive(Debug, Default)]
pub struct Drain {
    stopping: AtomicBool,
    running: AtomicUsize,
}

impl Drain {
    /// Begins a request. `false` if the server is stopping: then the request must not run.
    pub fn begin(&self) -> bool {
        // Counted before the flag is read, so that a stop that sees zero has seen every request that will run.
        self.running.fetch_add(1, Ordering::SeqCst);
        if self.stopping.load(Ordering::SeqCst) {
            self.end();
            return false;
        }
        true
    }

    /// Ends a request.
    pub fn end(&self) {
        self.running.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether the server is going down.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }
}

/// A server that runs until `stop`.
pub struct RunningServer {
    server: Arc<Server>,
    meta: Arc<Committer>,
    workers: Vec<WorkerThread>,
    acceptors: Vec<Acceptor>,
}

impl RunningServer {
    /// Starts serving.
    ///
    /// # Errors
    /// [`StartError`], which says what to do.
    pub fn start(parts: Parts, options: ServeOptions) -> Result<Self, StartError> {
        let Parts { meta, data, devices, clock, random } = parts;
        let system = |action| move |source| StartError::System { action, source };
        let committed = Committer::start(meta.clone()).map_err(system("start the committer"))?;
        let workers = options.workers.max(1);
        let listen = options.listen.clone();
        let cached = match options.policy.access {
            Access::Tiering | Access::Direct => None,
            Access::Buffered => Some(Reach::Buffered),
            Access::Mapped => Some(Reach::Mapped),
        };
        let cached = cached.map(|reach| CachedPool::open(&data, reach)).transpose();
        let cached = cached.map_err(system("reach the data files through the page cache"))?;
        let (layout, scrub, trust) = (data.sum_layout(), options.scrub, options.trust_clients);
        let (server, forgotten) =
            build(meta, committed.clone(), layout, cached.clone(), devices, clock, random, options)?;
        let mut running = Self { server, meta: committed, workers: Vec::new(), acceptors: Vec::new() };
        let storage = Storage { data, cached };
        let started = running.start_workers(&storage, workers, scrub).and_then(|()| {
            // Recovery needed to know which of their requests were done, so they are forgotten only now.
            running.server.forget(&forgotten);
            shown_windows::show(&running.server, trust)?;
            running.listen(&listen)
        });
        match started {
            Ok(()) => Ok(running),
            Err(error) => {
                running.stop_threads();
                Err(error)
            }
        }
    }

    fn start_workers(
        &mut self,
        storage: &Storage,
        workers: usize,
        scrub: ScrubOptions,
    ) -> Result<(), StartError> {
        for index in 0..workers {
            let worker = WorkerThread::start(index, &self.server, storage, scrub)?;
            self.workers.push(worker);
        }
        Ok(())
    }

    fn listen(&mut self, listen: &[Endpoint]) -> Result<(), StartError> {
        let doors: Vec<_> = self.workers.iter().map(WorkerThread::door).collect();
        self.server.sessions.begin();
        for endpoint in listen {
            let rnic = self.server.rnics.of_endpoint(endpoint);
            let listener = self.server.rnics.get(rnic).pd.listen(endpoint)?;
            self.server.about.endpoints.lock().push((rnic, listener.endpoint()));
            let acceptor = Acceptor::start(listener, &self.server, rnic, doors.clone())
                .map_err(|source| StartError::System { action: "start an acceptor", source })?;
            self.acceptors.push(acceptor);
        }
        Ok(())
    }

    /// The endpoints at which it listens, with the ports that the system chose.
    pub fn endpoints(&self) -> Vec<Endpoint> {
        self.server.about.endpoints.lock().iter().map(|(_, endpoint)| endpoint.clone()).collect()
    }

    /// The state that its threads share.
    pub fn server(&self) -> &Arc<Server> {
        &self.server
    }

    /// Stops cleanly: all acknowledged changes are durable when this returns.
    pub fn stop(mut self) {
        self.server.drain.stopping.store(true, Ordering::SeqCst);
        for acceptor in &self.acceptors {
            acceptor.close();
        }
        self.server.locks.stop();
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        while self.server.drain.running.load(Ordering::SeqCst) > 0 {
            if Instant::now() >= deadline {
                tracing::error!("requests are stuck; stopping without them");
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.stop_threads();
    }

    fn stop_threads(&mut self) {
        for acceptor in self.acceptors.drain(..) {
            acceptor.join();
        }
        for connection in self.server.admission.connections.all() {
            connection.qp().close();
        }
        self.server.files.end_one_sided_writes();
        // The first worker writes everything back when it ends; by then the others have nothing left to do.
        for worker in self.workers.drain(..).rev() {
            worker.stop();
        }
        let scrub = self.server.integrity.scrub.lock().record();
        if let Some(Err(status)) = scrub.map(|record| self.server.meta.keep_scrub(&record)) {
            tracing::warn!(%status, "where the scrub is could not be kept");
        }
        // A stop while clients are still awaited leaves the kill before it as it was: the next server waits for them, too.
        let is_clean = self.server.files.is_written_back() && !self.server.sessions.is_gathering();
        let clean = is_clean.then_some(self.server.about.epoch);
        if let Err(status) = self.server.meta.close(clean) {
            tracing::error!(%status, "metadata could not be flushed at the end");
        }
        self.meta.stop();
    }
}

/// The ways by which workers access the pool.
#[derive(Clone)]
struct Storage {
    data: Arc<DataFiles>,
    /// The page cache, if the policy reads and writes through it and nothing else.
    cached: Option<Arc<CachedPool>>,
}

/// Builds a server without its threads and links. Also returns the clients to be forgotten once all is recovered. Gives the file target to the
/// devices.
#[allow(clippy::too_many_arguments, reason = "each is one of the things a server is made of")]
fn build(
    meta: Arc<Meta>,
    committed: Arc<Committer>,
    layout: SumLayout,
    cached: Option<Arc<CachedPool>>,
    devices: Devices,
    clock: Arc<dyn Clock>,
    random: Arc<dyn Random>,
    options: ServeOptions,
) -> Result<(Arc<Server>, Vec<ClientId>), StartError> {
    let pool_pages = layout.pages();
    let (space, written) = derive_space(&meta, pool_pages)?;
    let space = Arc::new(space);
    let marked = meta.marks().map_err(StartError::Meta)?;
    let sums = PageSums::new(layout, options.sum_cache_bytes, written, marked, committed.clone());
    let sums = Arc::new(sums);
    let faults = options.policy.exposure == Exposure::Faulting;
    if let Some(shm) = options.listen.iter().find(|endpoint| faults && matches!(endpoint, Endpoint::Shm(_))) {
        return Err(StartError::FaultsWithoutNic(shm.clone()));
    }
    let memory = memory::frame_bytes(&options.policy, options.memory_bytes, pool_pages)?;
    let config = PagesConfig {
        policy: options.policy,
        hotspots: options.hotspots,
        unit_pages: options.sampling.unit_pages,
        ..PagesConfig::new(pool_pages, memory)
    };
    let system = |action| move |source| StartError::System { action, source };
    let pages = Pages::new(config, random.as_ref())
        .map_err(system("take the memory budget (--memory)"))?
        .with_mapped(cached)
        .with_sums(sums.clone());
    let (kind, trusted) = (options.page_window, options.trust_clients);
    let window = page_window::make(kind, trusted, options.policy, &devices, pool_pages, pages.frames())?;
    let pages = match &window {
        Some(window) => pages.with_window(window.pointing()),
        None => pages,
    };
    let files = Files::new(FilesConfig::default(), Arc::new(pages), space, committed, random.clone())
        .map_err(system("take the memory of the file table"))?;
    let files = Arc::new(files);
    let rnics = Rnics::new(devices, &files)?;
    let exports = Exports::new(options.exports, &meta, Accounts::default());
    let before = meta.clients().map_err(StartError::Meta)?;
    // All that is stored of these clients is the answer to a request that was still running when they ended their sessions.
    let left = before.iter().filter(|(_, record)| record.is_none()).map(|(client, _)| *client);
    let mut forgotten: Vec<ClientId> = left.collect();
    let before = before.into_iter().filter_map(|(client, record)| Some((client, record?))).collect();
    let (sessions, too_many) = Sessions::new(clock.clone(), random.clone(), options.lease, before);
    forgotten.extend(too_many);
    if meta.clean_predecessor().is_none() {
        sessions.gather();
        files.read_by_requests_while(sessions.gathering());
    }
    let locks = Locks::new(sessions.is_grace_period());
    let tickets = Tickets::new(meta.hash_key());
    let region_macs = RegionMacs::new(meta.hash_key(), meta.uuid());
    if sessions.is_grace_period() {
        files.newer.start();
    }
    let scrub = meta.scrub().map(|record| ScrubFigures::kept(&record, pool_pages)).unwrap_or_default();
    let workers = options.workers.max(1);
    let server = Arc::new(Server {
        meta,
        files,
        sessions,
        locks,
        admission: Admission {
            exports,
            tickets,
            region_macs,
            connections: Connections::default(),
            shares: Shares::new(workers),
        },
        integrity: Integrity { sums, scrub: Mutex::new(scrub), rotten: RottenPages::default() },
        about: About {
            epoch: random.next_u64(),
            endpoints: Mutex::default(),
            workers,
            sampling: options.sampling,
            durable_answers: options.durable_answers,
            trust_clients: options.trust_clients,
        },
        page_window: window,
        rnics,
        clock,
        counters: ServerCounters::default(),
        drain: Drain::default(),
        opens_nameless: RwLock::default(),
        unfreed: AtomicBool::default(),
    });
    Ok((server, forgotten))
}

/// The free space: all pages that no extent has (invariant 3). The store's map of pages tells that without the extents. Also returns a bitmap of the
/// pages that hold bytes.
fn derive_space(meta: &Meta, pages: u64) -> Result<(Space, Vec<u64>), StartError> {
    let words = (pages.div_ceil(PART_PAGES) * PART_PAGES / 64) as usize;
    let (mut used, mut written) = (vec![0; words], vec![0; words]);
    let mut past = None;
    let contradictions = meta.pages(&mut |key, bits| {
        let word = (key.first_page() / 64) as usize;
        if word >= words {
            let run = bits::next_run(bits, 0..PART_PAGES, true);
            past = past.or(run.map(|run| (PoolPage(key.first_page() + run.start), run.end - run.start)));
            return;
        }
        let part = word..word + bits.len();
        match key.plane() {
            Plane::Named => {
                used[part.clone()].copy_from_slice(bits);
                written[part].copy_from_slice(bits);
            }
            Plane::Unwritten => {
                written[part].iter_mut().zip(bits).for_each(|(written, unwritten)| *written &= !unwritten);
            }
        }
    });
    let contradictions = contradictions.map_err(StartError::Meta)?;
    if contradictions > 0 {
        return Err(SpaceError::Contradictions(contradictions).into());
    }
    if let Some((first, len)) = past {
        return Err(SpaceError::OutOfRange { first, len, pages }.into());
    }
    Ok((Space::new(pages, used)?, written))
}

fn join(thread: JoinHandle<()>, name: &str) {
    if thread.join().is_err() {
        tracing::error!(name, "a thread panicked");
    }
}

/// The way by which other threads reach a worker.
#[derive(Clone)]
pub(crate) struct Door {
    handle: WorkerHandle,
    connections: async_channel::Sender<Arc<crate::rpc::connection::Connection>>,
    /// Its queues, one pair for each RNIC.
    queues: Vec<crate::rpc::queues::RnicQueues>,
}
