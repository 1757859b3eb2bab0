//! A whole world in one thread: one server (in-memory store, simulated disk) and clients over the simulated link.
//! Everything follows from one seed.

#![allow(dead_code, reason = "each test binary uses its part")]

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::session::{Session, SessionOptions};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::sim::{self, SimNetwork, Translation};
use cuttlefs_common::rdma::{Device, Endpoint};
use cuttlefs_common::world::{Clock, ManualClock, Random, SeededRandom};
use cuttlefs_server::export::Export;
use cuttlefs_server::meta::{Caller, Format, HashKey, MemoryStore, Meta, Store};
use cuttlefs_server::pool::{SimDisk, SimMode};
use cuttlefs_server::serve::ServeOptions;
use cuttlefs_server::serve::one_thread::OneThreadServer;
use std::cell::RefCell;
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
}

/// How long a client may be silent in a world.
pub const LEASE: Duration = Duration::from_secs(30);

/// The world.
pub struct World {
    config: WorldConfig,
    network: Arc<SimNetwork>,
    clock: Arc<ManualClock>,
    random: Arc<SeededRandom>,
    store: Arc<dyn Store>,
    disk: SimDisk,
    server: Rc<RefCell<Option<OneThreadServer>>>,
}

fn endpoint() -> Endpoint {
    "shm:///sim".parse().expect("an endpoint")
}

impl World {
    /// A formatted pool and a server on it.
    pub fn new(config: WorldConfig) -> Self {
        let clock = Arc::new(ManualClock::default());
        let random = Arc::new(SeededRandom::new(config.seed));
        let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
        let mut key = [0; 16];
        random.fill(&mut key);
        let root = Caller { uid: 0, gid: 0 };
        let format = Format { uuid: [7; 16], hash_key: HashKey(key), root, root_mode: 0o755 };
        Meta::format(store.as_ref(), clock.as_ref(), &format).expect("format");
        let nowhere = Arc::new(SharedMemory::new("no-frames", 4096).expect("memory"));
        let disk = SimDisk::seeded(config.pool_pages, nowhere, config.seed);
        disk.set_mode(if config.deferred { SimMode::Deferred } else { SimMode::AtOnce });
        let world = Self {
            config,
            network: SimNetwork::new(config.translation),
            clock,
            random,
            store,
            disk,
            server: Rc::default(),
        };
        world.start();
        let (server, disk, clock) = (world.server.clone(), world.disk.clone(), world.clock.clone());
        sim::set_pump(move || step(&server, &disk, &clock));
        world
    }

    /// Starts the server, again if it was stopped or killed.
    pub fn start(&self) {
        let meta = Arc::new(Meta::open(self.store.clone(), self.clock.clone()).expect("open metadata"));
        let device: Arc<dyn Device> = self.network.device();
        let options = ServeOptions {
            memory_bytes: self.config.frames * 4096,
            listen: vec![endpoint()],
            workers: 1,
            lease: LEASE,
            export: Export::default(),
        };
        let server = OneThreadServer::start(
            meta,
            self.config.pool_pages,
            |frames| Rc::new(self.disk.attach(frames)),
            &device,
            self.clock.clone(),
            self.random.clone(),
            options,
        );
        *self.server.borrow_mut() = Some(server.expect("start"));
    }

    /// Kills the server at this instant.
    pub fn kill(&self) {
        drop(self.server.borrow_mut().take());
    }

    /// Power loss: the server and all that the disk had not synced are gone.
    pub fn lose_power(&self) {
        self.kill();
        self.disk.crash(self.random.as_ref());
    }

    /// The network between, to cut connections.
    pub fn network(&self) -> &SimNetwork {
        &self.network
    }

    /// The world's time.
    pub fn clock(&self) -> &ManualClock {
        &self.clock
    }

    /// A client with its own session.
    pub fn client(&self) -> RemoteVolume {
        let options = SessionOptions {
            endpoint: endpoint(),
            label: "world".into(),
            subtree: Vec::new(),
            lanes: 2,
            background: false,
        };
        let session = Session::connect(self.network.device(), options, self.random.as_ref());
        RemoteVolume::new(session.expect("connect"))
    }

    /// Looks at the server.
    pub fn with_server<T>(&self, look: impl FnOnce(&OneThreadServer) -> T) -> T {
        look(self.server.borrow().as_ref().expect("a running server"))
    }

    /// Lets time pass, with all that happens meanwhile.
    pub fn pass(&self, time: Duration) {
        let until = self.clock.monotonic() + time;
        while self.clock.monotonic() < until {
            self.clock.advance(Duration::from_millis(100));
            while self.server.borrow().as_ref().is_some_and(OneThreadServer::step) || self.disk.step() {}
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        sim::clear_pump();
    }
}

fn step(server: &RefCell<Option<OneThreadServer>>, disk: &SimDisk, clock: &ManualClock) -> bool {
    let server = server.borrow();
    let Some(server) = server.as_ref() else { return false };
    if server.step() || disk.step() {
        return true;
    }
    // Nothing moves: time does.
    if let Some(deadline) = server.next_deadline() {
        clock.advance(deadline.saturating_sub(clock.monotonic()) + Duration::from_nanos(1));
        return true;
    }
    false
}
