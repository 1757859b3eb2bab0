//! A whole world in one thread: one server (in-memory store, simulated disk) and clients over the simulated link.
//! Everything follows from one seed.

#![allow(dead_code, reason = "each test binary uses its part")]

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::session::{Session, SessionOptions};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::sim::{self, Cut, SimNetwork, Translation};
use cuttlefs_common::rdma::{Device, Endpoint};
use cuttlefs_common::redo::LogId;
use cuttlefs_common::rpc::Sampling;
use cuttlefs_common::world::{Clock, ManualClock, Random, SeededRandom};
use cuttlefs_server::export::Export;
use cuttlefs_server::log::{Contents, MIN_CAPACITY, RING_OFFSET, SimLog};
use cuttlefs_server::meta::{Caller, Format, HashKey, MemoryStore, Meta};
use cuttlefs_server::pool::{SimDisk, SimMode, SumLayout};
use cuttlefs_server::region::Hotspots;
use cuttlefs_server::region::policy::RegionPolicy;
use cuttlefs_server::serve::one_thread::OneThreadServer;
use cuttlefs_server::serve::{LogParts, ServeOptions};
use cuttlefs_server::tier::{ScrubOptions, WRITE_BACK_INTERVAL};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Sizes of a world.
#[derive(Clone, Copy, Debug)]
pub struct WorldConfig {
    pub seed: u64,
    pub translation: Translation,
    pub pool_pages: u64,
    pub frames: u64,
    /// The disk does its work late and in any order.
    pub deferred: bool,
    /// Changes are logged: every answer is durable.
    pub log: bool,
}

/// In which moment of its work a server dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// At once.
    Sudden,
    /// When it has written back what it did last.
    WrittenBack,
    /// At once, and the machine with it.
    PowerLost,
}

/// How long a client may be silent in a world.
pub const LEASE: Duration = Duration::from_secs(30);

/// The world.
pub struct World {
    inner: Rc<Inner>,
}

struct Inner {
    config: WorldConfig,
    network: Arc<SimNetwork>,
    clock: Arc<ManualClock>,
    random: Arc<SeededRandom>,
    store: RefCell<Arc<MemoryStore>>,
    disk: SimDisk,
    log: Option<SimLog>,
    server: RefCell<Option<OneThreadServer>>,
    export: RefCell<Export>,
    /// The server dies with the next cut, and another one starts.
    dies_at_cut: Cell<Option<Death>>,
    has_died: Cell<bool>,
}

fn endpoint() -> Endpoint {
    "shm:///sim".parse().expect("an endpoint")
}

impl World {
    /// A formatted pool and a server on it.
    pub fn new(config: WorldConfig) -> Self {
        let clock = Arc::new(ManualClock::default());
        let random = Arc::new(SeededRandom::new(config.seed));
        let store = Arc::new(MemoryStore::default());
        let mut key = [0; 16];
        random.fill(&mut key);
        let root = Caller::default();
        let format = Format { uuid: [7; 16], hash_key: HashKey(key), root, root_mode: 0o755 };
        Meta::format(store.as_ref(), clock.as_ref(), &format).expect("format");
        let nowhere = Arc::new(SharedMemory::new("no-frames", 4096).expect("memory"));
        let layout = SumLayout::new([config.pool_pages]);
        let disk = SimDisk::seeded(layout.all_pages(), nowhere, config.seed);
        disk.format(&layout);
        disk.set_mode(if config.deferred { SimMode::Deferred } else { SimMode::AtOnce });
        let inner = Rc::new(Inner {
            config,
            network: SimNetwork::new(config.translation),
            clock,
            random,
            store: RefCell::new(store),
            disk,
            log: config.log.then(|| SimLog::new(RING_OFFSET + MIN_CAPACITY, LogId(config.seed))),
            server: RefCell::default(),
            export: RefCell::default(),
            dies_at_cut: Cell::default(),
            has_died: Cell::new(false),
        });
        inner.start();
        let pumped = inner.clone();
        sim::set_pump(move || pumped.step());
        Self { inner }
    }

    /// Starts the server, again if it was stopped or killed.
    pub fn start(&self) {
        self.inner.start();
    }

    /// What the next server exports.
    pub fn set_export(&self, export: Export) {
        *self.inner.export.borrow_mut() = export;
    }

    /// Kills the server at this instant.
    pub fn kill(&self) {
        self.inner.kill();
    }

    /// Power loss: the server is gone, and of what was not synced any part.
    pub fn lose_power(&self) {
        self.inner.lose_power();
    }

    /// Kills the server when the next of this kind is lost, and starts it again: what it did then, nobody was told.
    pub fn kill_at(&self, cut: Cut, death: Death) {
        self.inner.network.cut_after(cut, 0);
        self.inner.dies_at_cut.set(Some(death));
    }

    /// Whether changes are logged.
    pub fn answers_are_durable(&self) -> bool {
        self.inner.log.is_some()
    }

    /// Whether a kill is to come.
    pub fn will_die(&self) -> bool {
        self.inner.dies_at_cut.get().is_some()
    }

    /// Whether a server was killed since this was asked last.
    pub fn has_died(&self) -> bool {
        self.inner.has_died.take()
    }

    /// The network between, to cut connections.
    pub fn network(&self) -> &SimNetwork {
        &self.inner.network
    }

    /// The world's time.
    pub fn clock(&self) -> &ManualClock {
        &self.inner.clock
    }

    /// A client with its own session.
    pub fn client(&self) -> RemoteVolume {
        let options = SessionOptions {
            endpoint: endpoint(),
            label: "world".into(),
            subtree: Vec::new(),
            lanes: 2,
            early_writes: true,
            background: false,
        };
        let session = Session::connect(self.inner.network.device(), options, self.inner.random.as_ref());
        RemoteVolume::new(session.expect("connect"))
    }

    /// Looks at the server.
    pub fn with_server<T>(&self, look: impl FnOnce(&OneThreadServer) -> T) -> T {
        look(self.inner.server.borrow().as_ref().expect("a running server"))
    }

    /// Lets time pass, with all that happens meanwhile.
    pub fn pass(&self, time: Duration) {
        self.inner.pass(time);
    }
}

impl Drop for World {
    fn drop(&mut self) {
        sim::clear_pump();
    }
}

impl Inner {
    fn start(&self) {
        let meta =
            Arc::new(Meta::open(self.store.borrow().clone(), self.clock.clone()).expect("open metadata"));
        let device: Arc<dyn Device> = self.network.device();
        let options = ServeOptions {
            memory_bytes: self.config.frames * 4096,
            listen: vec![endpoint()],
            workers: 1,
            lease: LEASE,
            export: self.export.borrow().clone(),
            policy: RegionPolicy::default(),
            hotspots: Hotspots::Pages,
            sampling: Sampling { unit_pages: 256, period_ms: 1000 },
            scrub: ScrubOptions::default(),
            // One block: sums are read again and again.
            sum_cache_bytes: 4096,
        };
        let server = OneThreadServer::start(
            meta,
            self.config.pool_pages,
            |frames| Rc::new(self.disk.attach(frames)),
            &device,
            self.clock.clone(),
            self.random.clone(),
            options,
            self.log.clone().map(|log| LogParts {
                held: Contents::read(&log).expect("the log can be read"),
                device: Arc::new(log),
                acknowledges: true,
            }),
            &|| self.disk.step(),
        );
        *self.server.borrow_mut() = Some(server.expect("start"));
    }

    fn kill(&self) {
        drop(self.server.borrow_mut().take());
    }

    fn lose_power(&self) {
        self.kill();
        let random = self.random.as_ref();
        self.disk.crash(random);
        if let Some(log) = &self.log {
            log.crash(random);
        }
        // The store writes its log in order: a prefix of its batches is left.
        let mut store = self.store.borrow_mut();
        let kept = random.next_u64() as usize % (store.unflushed_batches() + 1);
        let left = store.crashed(kept);
        *store = Arc::new(left);
    }

    fn pass(&self, time: Duration) {
        let until = self.clock.monotonic() + time;
        while self.clock.monotonic() < until {
            self.clock.advance(Duration::from_millis(100));
            while self.server.borrow().as_ref().is_some_and(OneThreadServer::step) || self.disk.step() {}
        }
    }

    fn step(&self) -> bool {
        if !self.network.cut_is_pending()
            && let Some(death) = self.dies_at_cut.take()
        {
            self.has_died.set(true);
            if death == Death::WrittenBack {
                // No client runs meanwhile, so nobody asks the dying server again.
                self.pass(2 * WRITE_BACK_INTERVAL);
            }
            match death {
                Death::Sudden | Death::WrittenBack => self.kill(),
                Death::PowerLost => self.lose_power(),
            }
            self.start();
            return true;
        }
        let server = self.server.borrow();
        let Some(server) = server.as_ref() else { return false };
        if server.step() || self.disk.step() {
            return true;
        }
        // Nothing moves: time does.
        if let Some(deadline) = server.next_deadline() {
            self.clock.advance(deadline.saturating_sub(self.clock.monotonic()) + Duration::from_nanos(1));
            return true;
        }
        false
    }
}
