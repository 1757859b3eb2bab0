//! A whole world in one thread: one server (in-memory store, simulated disk) and clients over the simulated link.
//! Everything follows from one seed.
//!
//! What the server does to its world is counted (`Life`: disk, metadata, messages), so that it can be told to die
//! with any of these, also while it starts (`World::crash_after`). What is left is what a killed process or a lost
//! power supply leaves. Whoever waits for it meanwhile finds the next server.

#![allow(dead_code, reason = "each test binary uses its part")]

pub mod contents;
pub mod kinds;
pub mod waiter;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::session::{Session, SessionOptions, UNSYNCED_BYTES_LEAST};
use cuttlefs_common::life::{End, Event, Life};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::sim::{self, Cut, SimNetwork, Translation};
use cuttlefs_common::rdma::{Device, Endpoint};
use cuttlefs_common::rpc::{Request, Sampling};
use cuttlefs_common::world::{Clock, ManualClock, Random, SeededRandom};
use cuttlefs_server::files::WRITE_BACK_INTERVAL;
use cuttlefs_server::meta::{Caller, Format, HashKey, MemoryStore, Meta, StoreLie};
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::ScrubOptions;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::{SimDisk, SimMode, SumLayout};
use cuttlefs_server::rights::ExportRule;
use cuttlefs_server::serve::ServeOptions;
use cuttlefs_server::serve::one_thread::OneThreadServer;
use cuttlefs_server::server::Server;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::{Arc, Weak};
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
    /// Every answer is durable.
    pub durable_answers: bool,
    /// Time passes while requests run.
    pub restless: bool,
    /// What copies of unsynced changes take at most, of each client.
    pub unsynced_bytes: usize,
    /// What is wrong with it.
    pub lie: Option<Lie>,
}

impl WorldConfig {
    /// A small world with nothing wrong.
    pub const fn new(seed: u64, translation: Translation, pool_pages: u64, frames: u64) -> Self {
        let (deferred, durable_answers, restless, lie) = (false, false, false, None);
        let unsynced_bytes = UNSYNCED_BYTES_LEAST;
        Self {
            seed,
            translation,
            pool_pages,
            frames,
            deferred,
            durable_answers,
            restless,
            unsynced_bytes,
            lie,
        }
    }
}

/// What clients' copies take at most: in some worlds so little that they wait for room all the time.
pub fn unsynced_bytes(seed: u64) -> usize {
    if (seed / 4).is_multiple_of(3) { 16 << 10 } else { UNSYNCED_BYTES_LEAST }
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

/// A crash that is to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crash {
    /// With which event.
    pub end: End,
    /// Of the machine, and not of the process only.
    pub power: bool,
}

/// A part of a server that says a thing is durable which is not: what the checks must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// The data disk's syncs do nothing.
    DiskSync,
    /// A store's.
    Store(StoreLie),
}

/// One step in so many does the disk's work first, where it is late.
const DISK_FIRST_ONE_IN: u64 = 3;
/// In restless worlds time moves with one step in so many, by `LEAP_MS` at most: timers fire in the midst of requests.
const LEAP_ONE_IN: u64 = 40;
const LEAP_MS: u64 = 400;

/// Steps of a world while clients wait. The longest walks in good weather have some 6,000; where one message in six is lost,
/// ten times as many and more.
const MOST_STEPS: u64 = 2_000_000;
/// What happens in the midst of a client's call.
struct Meanwhile {
    /// When the server is so.
    is_time: Box<dyn Fn(&Server) -> bool>,
    act: Box<Act>,
}

/// It is given what lets time pass. Says whether the server dies behind it.
type Act = dyn FnOnce(&dyn Fn(Duration)) -> Option<Death>;

/// Tries to mount.
const CONNECT_TRIES: usize = 20;

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
    server: RefCell<Option<OneThreadServer>>,
    export: RefCell<ExportRule>,
    /// The server dies with the next cut, and another one starts.
    dies_at_cut: Cell<Option<Death>>,
    has_died: Cell<bool>,
    life: Life,
    /// How it ends when its life does.
    power: Cell<bool>,
    /// When the next one ends, counted from its start.
    next_crash: Cell<Option<Crash>>,
    /// The world ends with the next crash.
    ends: Cell<bool>,
    /// Time stands where nothing moves.
    time_is_held: Cell<bool>,
    /// Steps while clients wait.
    steps: Cell<u64>,
    /// What servers died with, for people.
    deaths: RefCell<Vec<(u64, Event, bool)>>,
    /// Clients that come back to a new server by themselves, as those with a thread of their own do.
    bystanders: RefCell<Vec<Weak<Session>>>,
    /// Which of them somebody calls.
    speaking: Cell<usize>,
    /// The epoch of the server that the others have come back to last.
    came_back_to: Cell<Option<u64>>,
    coming_back: Cell<bool>,
    /// What comes first is in front.
    meanwhile: RefCell<VecDeque<Meanwhile>>,
    /// What happens when the next server has followed a dead one, before anybody who waited for that one asks it.
    behind_death: RefCell<Option<Box<dyn FnOnce()>>>,
}

/// What unwinds out of clients' calls when everything lost power, clients included.
#[derive(Debug)]
pub struct TheEnd;

/// Where the server listens.
pub fn endpoint() -> Endpoint {
    "shm:///sim".parse().expect("an endpoint")
}

impl World {
    /// A formatted pool and a server on it.
    pub fn new(config: WorldConfig) -> Self {
        let clock = Arc::new(ManualClock::default());
        let random = Arc::new(SeededRandom::new(config.seed));
        let life = Life::default();
        let store_lie = match config.lie {
            Some(Lie::Store(lie)) => Some(lie),
            _ => None,
        };
        let store = MemoryStore::of(life.clone());
        let mut key = [0; 16];
        random.fill(&mut key);
        let root = Caller::default();
        let format = Format { uuid: [7; 16], hash_key: HashKey(key), root, root_mode: 0o755 };
        Meta::format(&store, clock.as_ref(), &format).expect("format");
        let nowhere = Arc::new(SharedMemory::new("no-frames", 4096).expect("memory"));
        let layout = SumLayout::new([config.pool_pages]);
        let disk = SimDisk::seeded(layout.all_pages(), nowhere, config.seed);
        disk.format(&layout);
        disk.set_life(life.clone());
        disk.set_mode(if config.deferred { SimMode::Deferred } else { SimMode::AtOnce });
        let store = Arc::new(store.lying(store_lie));
        if config.lie == Some(Lie::DiskSync) {
            disk.lie();
        }
        let network = SimNetwork::new(config.translation);
        network.set_server_life(life.clone());
        let inner = Rc::new(Inner {
            config,
            network,
            clock,
            random,
            store: RefCell::new(store),
            disk,
            server: RefCell::default(),
            export: RefCell::default(),
            dies_at_cut: Cell::default(),
            has_died: Cell::new(false),
            life,
            power: Cell::new(false),
            next_crash: Cell::default(),
            ends: Cell::new(false),
            time_is_held: Cell::new(false),
            steps: Cell::new(0),
            deaths: RefCell::default(),
            bystanders: RefCell::default(),
            speaking: Cell::new(0),
            came_back_to: Cell::default(),
            coming_back: Cell::new(false),
            meanwhile: RefCell::default(),
            behind_death: RefCell::default(),
        });
        inner.start();
        let world = Self { inner };
        world.set_pump();
        world
    }

    fn set_pump(&self) {
        self.inner.coming_back.set(false);
        self.inner.set_pump();
    }

    /// While one of these clients waits for the end of a grace period, the others come back for their files.
    pub fn set_bystanders<'c>(&self, clients: impl IntoIterator<Item = &'c RemoteVolume>) {
        *self.inner.bystanders.borrow_mut() =
            clients.into_iter().map(|client| Arc::downgrade(client.session())).collect();
    }

    /// From now on it is this one of them that is called.
    pub fn speaks(&self, index: usize) {
        self.inner.speaking.set(index);
    }

    /// Starts the server, again if it was stopped or killed.
    pub fn start(&self) {
        self.inner.start();
    }

    /// What the next server exports.
    pub fn set_export(&self, export: ExportRule) {
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
        self.kill_after(cut, 0, death);
    }

    /// Does this in the midst of the call that is under way when the server is so; what was said before comes first.
    pub fn meanwhile(
        &self,
        is_time: impl Fn(&Server) -> bool + 'static,
        act: impl FnOnce(&dyn Fn(Duration)) -> Option<Death> + 'static,
    ) {
        let meanwhile = Meanwhile { is_time: Box::new(is_time), act: Box::new(act) };
        self.inner.meanwhile.borrow_mut().push_back(meanwhile);
    }

    /// Whether all of that was done.
    pub fn has_acted(&self) -> bool {
        self.inner.meanwhile.borrow().is_empty()
    }

    /// The same, after `pass` more of this kind got through.
    pub fn kill_after(&self, cut: Cut, pass: u32, death: Death) {
        self.inner.network.cut_after(cut, pass);
        self.inner.dies_at_cut.set(Some(death));
    }

    /// When the server dies while a client waits for it, and the next one has started, `others` do this; then that client asks
    /// again. They are clients that wait for nothing.
    pub fn behind_death(&self, others: impl FnOnce() + 'static) {
        *self.inner.behind_death.borrow_mut() = Some(Box::new(others));
    }

    /// The server dies with an event to come; the one that starts then with a later one, if `again` says so.
    pub fn crash_after(&self, crash: Crash, again: Option<Crash>) {
        self.inner.life.end(Some(crash.end));
        self.inner.power.set(crash.power);
        self.inner.next_crash.set(again);
    }

    /// Everything loses power with an event to come, clients included: their calls unwind with `TheEnd`.
    pub fn end_after(&self, end: End) {
        self.crash_after(Crash { end, power: true }, None);
        self.inner.ends.set(true);
    }

    /// A server on what the end left, or on what it would leave now.
    pub fn begin_again(&self) {
        if self.inner.ends.take() {
            self.calm();
            self.inner.lose_power();
        }
        self.set_pump();
        self.inner.start();
    }

    /// No crash that was to come comes.
    pub fn calm(&self) {
        self.inner.life.end(None);
        self.inner.next_crash.set(None);
    }

    /// A crash that is to come waits until it is not held any more.
    pub fn hold_crash(&self, held: bool) {
        self.inner.life.spare(held);
    }

    /// Time does not jump to the next timer although nothing else moves: there are clients that have not looked yet.
    pub fn hold_time(&self, held: bool) {
        self.inner.time_is_held.set(held);
    }

    /// Whether a crash is to come.
    pub fn will_crash(&self) -> bool {
        self.inner.life.will_end()
    }

    /// Events so far and their digest, and what servers died with.
    pub fn events(&self) -> (u64, u64, Vec<(u64, Event, bool)>) {
        let (events, digest) = self.inner.life.events();
        (events, digest, self.inner.deaths.borrow().clone())
    }

    /// How many servers died.
    pub fn deaths(&self) -> usize {
        self.inner.deaths.borrow().len()
    }

    /// The metadata as it is stored.
    pub fn store(&self) -> Arc<MemoryStore> {
        self.inner.store.borrow().clone()
    }

    /// The data disk.
    pub fn disk(&self) -> &SimDisk {
        &self.inner.disk
    }

    /// What a read of a pool page would give.
    pub fn peek(&self, page: u64) -> Vec<u8> {
        self.inner.disk.peek(page)
    }

    /// Whether every answer is durable.
    pub fn answers_are_durable(&self) -> bool {
        self.inner.config.durable_answers
    }

    /// Whether a kill is to come.
    pub fn will_die(&self) -> bool {
        self.inner.dies_at_cut.get().is_some()
    }

    /// Whether a server was killed since this was asked last.
    pub fn has_died(&self) -> bool {
        self.inner.has_died.take()
    }

    /// The same, without forgetting it.
    pub fn is_new(&self) -> bool {
        self.inner.has_died.get()
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
        let connect = || {
            let options = SessionOptions {
                endpoint: endpoint(),
                label: "world".into(),
                subtree: Vec::new(),
                lanes: 2,
                unsynced_bytes: self.inner.config.unsynced_bytes,
                clock: self.inner.clock.clone(),
                initiator_translates: false,
                background: false,
            };
            Session::connect(self.inner.network.device(), options, self.inner.random.as_ref())
        };
        // A mount that cannot connect fails; in bad weather who mounts tries again.
        let session = (1..CONNECT_TRIES).find_map(|_| connect().ok());
        let session = session.unwrap_or_else(|| connect().expect("connect"));
        // Whoever waits in vain is found by its steps.
        session.set_answer_patience(Duration::from_millis(u64::MAX));
        RemoteVolume::new(session)
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
        if std::thread::panicking() {
            let (events, _, deaths) = self.events();
            println!(
                "at event {events}, step {}; servers died at (event, with, power): {deaths:?}",
                self.inner.steps.get()
            );
        }
        sim::clear_pump();
    }
}

impl Inner {
    fn set_pump(self: &Rc<Self>) {
        let pumped = self.clone();
        sim::set_pump(move || pumped.step());
    }

    /// Does what is to be done in the midst of a call, if it is time.
    fn act_meanwhile(self: &Rc<Self>) {
        let is_time = self.meanwhile.borrow().front().is_some_and(|meanwhile| {
            self.server.borrow().as_ref().is_some_and(|server| (meanwhile.is_time)(server.server()))
        });
        let next = if is_time { self.meanwhile.borrow_mut().pop_front() } else { None };
        let Some(meanwhile) = next else { return };
        // As for those who come back: the pump is taken out while it runs this.
        self.set_pump();
        if let Some(death) = (meanwhile.act)(&|time| self.pass(time)) {
            self.dies_at_cut.set(Some(death));
        }
    }

    /// Nothing moves and a grace period lasts: clients that nobody calls come back, once to each server.
    fn others_come_back(self: &Rc<Self>) -> bool {
        let new = self.server.borrow().as_ref().and_then(|server| {
            let server = server.server();
            let is_new = self.came_back_to.get() != Some(server.about.epoch);
            (is_new && server.sessions.is_grace_period()).then_some(server.about.epoch)
        });
        let Some(epoch) = new.filter(|_| !self.coming_back.get()) else { return false };
        self.came_back_to.set(Some(epoch));
        self.coming_back.set(true);
        // The pump is taken out while it runs this; they need one of their own.
        self.set_pump();
        let sessions = self.bystanders.borrow().clone();
        let others = sessions.iter().enumerate().filter(|(index, _)| *index != self.speaking.get());
        for session in others.filter_map(|(_, session)| session.upgrade()) {
            session.call(&session.own_caller(), || Request::Heartbeat, |_| Ok(())).expect("heartbeat");
        }
        self.coming_back.set(false);
        true
    }

    /// Others are faster than whoever waits for the dead server.
    fn others_go_ahead(self: &Rc<Self>) {
        let others = self.behind_death.borrow_mut().take();
        if let Some(others) = others {
            // As in `others_come_back`.
            self.set_pump();
            others();
        }
    }

    /// Starts a server; one that dies meanwhile is followed by the next.
    fn start(&self) {
        loop {
            self.life.begin();
            if let Some(crash) = self.next_crash.take() {
                self.life.end(Some(crash.end));
                self.power.set(crash.power);
            }
            let started = self.try_start();
            if !self.life.is_over() {
                *self.server.borrow_mut() = Some(started.expect("start"));
                return;
            }
            drop(started);
            self.leave();
        }
    }

    fn try_start(&self) -> Result<OneThreadServer, String> {
        let meta = Meta::open(self.store.borrow().clone(), self.clock.clone());
        let meta = Arc::new(meta.map_err(|error| error.to_string())?);
        let device: Arc<dyn Device> = self.network.device();
        let options = ServeOptions {
            memory_bytes: self.config.frames * 4096,
            listen: vec![endpoint()],
            workers: 1,
            lease: LEASE,
            exports: vec![self.export.borrow().clone()],
            policy: RegionPolicy::default(),
            hotspots: Hotspots::Pages,
            sampling: Sampling { unit_pages: 256, period_ms: 1000 },
            scrub: ScrubOptions::default(),
            // One block: sums are read again and again.
            sum_cache_bytes: 4096,
            durable_answers: self.config.durable_answers,
            trust_clients: self.config.translation == Translation::InitiatorByReads,
        };
        let server = OneThreadServer::start(
            meta,
            self.config.pool_pages,
            |frames| Rc::new(self.disk.attach(frames)),
            &device,
            self.clock.clone(),
            self.random.clone(),
            options,
            &|| !self.life.is_over() && self.disk.step(),
        );
        let server = server.map_err(|error| error.to_string())?;
        if !self.config.restless {
            server.commit_at_once();
        }
        Ok(server)
    }

    /// The server is gone, and its life with it: what is left of what it did.
    fn leave(&self) {
        drop(self.server.borrow_mut().take());
        if let Some(event) = self.life.last_event() {
            self.deaths.borrow_mut().push((self.life.events().0, event, self.power.get()));
        }
        self.life.begin();
        if self.power.get() { self.lose_what_is_unsynced() } else { self.lose_what_is_under_way() }
    }

    fn kill(&self) {
        drop(self.server.borrow_mut().take());
        self.lose_what_is_under_way();
    }

    fn lose_power(&self) {
        drop(self.server.borrow_mut().take());
        self.lose_what_is_unsynced();
    }

    fn lose_what_is_under_way(&self) {
        let random = self.random.as_ref();
        self.disk.kill(random);
        let mut store = self.store.borrow_mut();
        let left = store.killed(random);
        *store = Arc::new(left);
    }

    fn lose_what_is_unsynced(&self) {
        let random = self.random.as_ref();
        self.disk.crash(random);
        let mut store = self.store.borrow_mut();
        let left = store.lost_power(random);
        *store = Arc::new(left);
    }

    fn pass(&self, time: Duration) {
        let until = self.clock.monotonic() + time;
        while self.clock.monotonic() < until {
            self.clock.advance(Duration::from_millis(100));
            while self.bury() || self.move_on() {}
        }
    }

    /// What follows the end of a life.
    fn bury(&self) -> bool {
        let over = self.life.is_over();
        if over {
            self.leave();
            if self.ends.take() {
                std::panic::resume_unwind(Box::new(TheEnd));
            }
            self.has_died.set(true);
            self.start();
        }
        over
    }

    /// Something of the server's or the disk's, if there is anything to do.
    fn move_on(&self) -> bool {
        let server = self.server.borrow();
        let Some(server) = server.as_ref() else { return false };
        let first = self.config.deferred && self.random.next_u64().is_multiple_of(DISK_FIRST_ONE_IN);
        (first && self.disk.step()) || server.step() || self.disk.step()
    }

    fn step(self: &Rc<Self>) -> bool {
        self.steps.set(self.steps.get() + 1);
        assert!(self.steps.get() < MOST_STEPS, "somebody waits for ever");
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
            self.others_go_ahead();
            return true;
        }
        if self.bury() {
            self.others_go_ahead();
            return true;
        }
        if self.config.restless && self.random.next_u64().is_multiple_of(LEAP_ONE_IN) {
            self.clock.advance(Duration::from_millis(self.random.next_u64() % LEAP_MS));
        }
        if self.move_on() {
            // Before anybody hears of what the server did.
            self.act_meanwhile();
            return true;
        }
        if self.others_come_back() {
            return true;
        }
        if self.time_is_held.get() {
            return false;
        }
        // Nothing moves: time does.
        let server = self.server.borrow();
        let Some(server) = server.as_ref() else { return false };
        if let Some(deadline) = server.next_deadline() {
            self.clock.advance(deadline.saturating_sub(self.clock.monotonic()) + Duration::from_nanos(1));
            return true;
        }
        false
    }
}
