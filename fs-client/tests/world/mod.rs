//! A whole world in one thread: one server (in-memory store, simulated disk) and clients over the simulated link. Everything follows from one seed.
//!
//! `Life` counts what the server does to its world (disk, metadata, messages), so the server can be told to die at any of these events, also while it
//! starts (`World::crash_after`). Afterwards the store and the disk hold what a killed process or a power loss leaves. A client that waits for the
//! dead server finds the next one.

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
use cuttlefs_server::pages::window::WindowKind;
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
    /// Whether the disk does its work late and in any order.
    pub deferred: bool,
    /// Whether every answer is durable.
    pub durable_answers: bool,
    /// What clients that READ the tables read pages from.
    pub page_window: WindowKind,
    /// Whether time passes while requests run.
    pub restless: bool,
    /// The bound of each client's copies of unsynced changes.
    pub unsynced_bytes: usize,
    /// A fault in the server that the checks must find.
    pub lie: Option<Lie>,
}

impl WorldConfig {
    /// A small world without a fault.
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
            page_window: WindowKind::Pinned,
            restless,
            unsynced_bytes,
            lie,
        }
    }
}

/// The bound of a client's copies: in a third of the worlds so low that clients wait for room all the time.
pub fn unsynced_bytes(seed: u64) -> usize {
    if (seed / 4).is_multiple_of(3) { 16 << 10 } else { UNSYNCED_BYTES_LEAST }
}

/// How a server dies at a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Death {
    /// At once.
    Sudden,
    /// After it has written back its last changes.
    WrittenBack,
    /// At once, by a power loss of the machine.
    PowerLost,
}

/// A crash that is scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crash {
    /// The event at which the server dies.
    pub end: End,
    /// Whether the machine loses power, or only the process dies.
    pub power: bool,
}

/// A part of the server that falsely says that something is durable. The checks must find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    /// The data disk's syncs do nothing.
    DiskSync,
    /// A sync of the metadata's store.
    Store(StoreLie),
}

/// In worlds whose disk works late, the disk goes before the other parts in one step of this many.
const DISK_FIRST_ONE_IN: u64 = 3;
/// In restless worlds time moves in one step of this many, by `LEAP_MS` at most, so that timers fire in the midst of requests.
const LEAP_ONE_IN: u64 = 40;
const LEAP_MS: u64 = 400;

/// The most steps of a world while clients wait. The longest walks take some 6,000 steps; where one message in six is lost, ten times as many and
/// more.
const MOST_STEPS: u64 = 2_000_000;
/// An action in the midst of a client's call.
struct Meanwhile {
    /// When to act, by the state of the server.
    is_time: Box<dyn Fn(&Server) -> bool>,
    act: Box<Act>,
}

/// The action. It is given a function that lets time pass, and says whether the server dies after it, and how.
type Act = dyn FnOnce(&dyn Fn(Duration)) -> Option<Death>;

/// How often a client tries to connect.
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
    /// The server dies at the next cut in this way, and another one starts.
    dies_at_cut: Cell<Option<Death>>,
    has_died: Cell<bool>,
    life: Life,
    /// Whether the server's end is a power loss.
    power: Cell<bool>,
    /// The crash of the next server, counted from its start.
    next_crash: Cell<Option<Crash>>,
    /// Whether the world ends with the next crash.
    ends: Cell<bool>,
    /// Whether time stands still while nothing else moves.
    time_is_held: Cell<bool>,
    /// Steps so far while clients wait.
    steps: Cell<u64>,
    /// The deaths of servers, for the output of a failed test: number of the event, its kind, whether power was lost.
    deaths: RefCell<Vec<(u64, Event, bool)>>,
    /// Clients that come back to a new server without a call, as clients with a control thread do.
    bystanders: RefCell<Vec<Weak<Session>>>,
    /// The index in `bystanders` of the client that is called.
    speaking: Cell<usize>,
    /// The epoch of the last server that the bystanders came back to.
    came_back_to: Cell<Option<u64>>,
    coming_back: Cell<bool>,
    /// Actions to come, the next one in front.
    meanwhile: RefCell<VecDeque<Meanwhile>>,
    /// Runs when a new server has followed a dead one, before the client that waited for the dead one asks again.
    behind_death: RefCell<Option<Box<dyn FnOnce()>>>,
}

/// The payload with which clients' calls unwind when everything lost power, clients included.
#[derive(Debug)]
pub struct TheEnd;

/// Where the server listens.
pub fn endpoint() -> Endpoint {
    "shm:///sim".parse().expect("an endpoint")
}

impl World {
    /// Formats a pool and starts a server on it.
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

    /// Sets the bystanders: while one of these clients waits for the end of a grace period, the others come back for their files.
    pub fn set_bystanders<'c>(&self, clients: impl IntoIterator<Item = &'c RemoteVolume>) {
        *self.inner.bystanders.borrow_mut() =
            clients.into_iter().map(|client| Arc::downgrade(client.session())).collect();
    }

    /// From now on the client with this index among the bystanders is the one that is called.
    pub fn speaks(&self, index: usize) {
        self.inner.speaking.set(index);
    }

    /// Starts the server, for the first time or after a stop or a kill.
    pub fn start(&self) {
        self.inner.start();
    }

    /// Sets the export rule of the next server.
    pub fn set_export(&self, export: ExportRule) {
        *self.inner.export.borrow_mut() = export;
    }

    /// Kills the server at this instant.
    pub fn kill(&self) {
        self.inner.kill();
    }

    /// Simulates a power loss: ends the server, and keeps a random part of what was not synced.
    pub fn lose_power(&self) {
        self.inner.lose_power();
    }

    /// Kills the server when the next message of this kind is lost, and starts another. No client hears what the server did for that message.
    pub fn kill_at(&self, cut: Cut, death: Death) {
        self.kill_after(cut, 0, death);
    }

    /// Runs `act` in the midst of the call that is under way when `is_time` first holds of the server. Actions run in the order of these calls.
    pub fn meanwhile(
        &self,
        is_time: impl Fn(&Server) -> bool + 'static,
        act: impl FnOnce(&dyn Fn(Duration)) -> Option<Death> + 'static,
    ) {
        let meanwhile = Meanwhile { is_time: Box::new(is_time), act: Box::new(act) };
        self.inner.meanwhile.borrow_mut().push_back(meanwhile);
    }

    /// Whether every action given to `meanwhile` was run.
    pub fn has_acted(&self) -> bool {
        self.inner.meanwhile.borrow().is_empty()
    }

    /// As `kill_at`, but `pass` messages of this kind get through first.
    pub fn kill_after(&self, cut: Cut, pass: u32, death: Death) {
        self.inner.network.cut_after(cut, pass);
        self.inner.dies_at_cut.set(Some(death));
    }

    /// Runs `others` after the next death of the server during a client's call, once a new server has started and before that client asks again.
    /// `others` must use clients that wait for nothing.
    pub fn behind_death(&self, others: impl FnOnce() + 'static) {
        *self.inner.behind_death.borrow_mut() = Some(Box::new(others));
    }

    /// The server dies at a later event, `crash`. The server after it dies too, at the event `again`, if that is given.
    pub fn crash_after(&self, crash: Crash, again: Option<Crash>) {
        self.inner.life.end(Some(crash.end));
        self.inner.power.set(crash.power);
        self.inner.next_crash.set(again);
    }

    /// Everything loses power at a later event, clients included: their calls unwind with `TheEnd`.
    pub fn end_after(&self, end: End) {
        self.crash_after(Crash { end, power: true }, None);
        self.inner.ends.set(true);
    }

    /// Starts a server on what the end left. If no end came yet, what a power loss would leave now.
    pub fn begin_again(&self) {
        if self.inner.ends.take() {
            self.calm();
            self.inner.lose_power();
        }
        self.set_pump();
        self.inner.start();
    }

    /// Cancels all scheduled crashes.
    pub fn calm(&self) {
        self.inner.life.end(None);
        self.inner.next_crash.set(None);
    }

    /// Holds a scheduled crash back until this is called with `false`.
    pub fn hold_crash(&self, held: bool) {
        self.inner.life.spare(held);
    }

    /// Keeps time from jumping to the next timer when nothing else moves, because some clients have not looked yet.
    pub fn hold_time(&self, held: bool) {
        self.inner.time_is_held.set(held);
    }

    /// Whether a crash is scheduled.
    pub fn will_crash(&self) -> bool {
        self.inner.life.will_end()
    }

    /// The number of events so far, their digest, and the deaths of servers.
    pub fn events(&self) -> (u64, u64, Vec<(u64, Event, bool)>) {
        let (events, digest) = self.inner.life.events();
        (events, digest, self.inner.deaths.borrow().clone())
    }

    /// The number of servers that died.
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

    /// The bytes that a read of a pool page would return.
    pub fn peek(&self, page: u64) -> Vec<u8> {
        self.inner.disk.peek(page)
    }

    /// Whether every answer is durable.
    pub fn answers_are_durable(&self) -> bool {
        self.inner.config.durable_answers
    }

    /// Whether a kill at a cut is scheduled.
    pub fn will_die(&self) -> bool {
        self.inner.dies_at_cut.get().is_some()
    }

    /// Whether a server was killed since the last call of this function.
    pub fn has_died(&self) -> bool {
        self.inner.has_died.take()
    }

    /// As `has_died`, without resetting it.
    pub fn is_new(&self) -> bool {
        self.inner.has_died.get()
    }

    /// The simulated network, to cut its connections.
    pub fn network(&self) -> &Arc<SimNetwork> {
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
                pool: None,
                subtree: Vec::new(),
                lanes: 2,
                unsynced_bytes: self.inner.config.unsynced_bytes,
                clock: self.inner.clock.clone(),
                initiator_translates: false,
                background: false,
            };
            Session::connect(self.inner.network.device(), options, self.inner.random.as_ref())
        };
        // A mount does not try again, and fails if it cannot connect. Where connections are lost, the one who mounts tries again.
        let session = (1..CONNECT_TRIES).find_map(|_| connect().ok());
        let session = session.unwrap_or_else(|| connect().expect("connect"));
        // A client never gives up by time: `MOST_STEPS` finds those that wait in vain.
        session.set_answer_patience(Duration::from_millis(u64::MAX));
        RemoteVolume::new(session).expect("threads")
    }

    /// Looks at the server.
    pub fn with_server<T>(&self, look: impl FnOnce(&OneThreadServer) -> T) -> T {
        look(self.inner.server.borrow().as_ref().expect("a running server"))
    }

    /// Lets time pass, and runs what happens in that time.
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

    /// Runs the next action of `meanwhile` if its time has come.
    fn act_meanwhile(self: &Rc<Self>) {
        let is_time = self.meanwhile.borrow().front().is_some_and(|meanwhile| {
            self.server.borrow().as_ref().is_some_and(|server| (meanwhile.is_time)(server.server()))
        });
        let next = if is_time { self.meanwhile.borrow_mut().pop_front() } else { None };
        let Some(meanwhile) = next else { return };
        // This runs inside the pump, which is taken out meanwhile; the action needs one, as in `others_come_back`.
        self.set_pump();
        if let Some(death) = (meanwhile.act)(&|time| self.pass(time)) {
            self.dies_at_cut.set(Some(death));
        }
    }

    /// Called when nothing moves. In a grace period the clients that are not being called come back, once to each server.
    fn others_come_back(self: &Rc<Self>) -> bool {
        let new = self.server.borrow().as_ref().and_then(|server| {
            let server = server.server();
            let is_new = self.came_back_to.get() != Some(server.about.epoch);
            (is_new && server.sessions.is_grace_period()).then_some(server.about.epoch)
        });
        let Some(epoch) = new.filter(|_| !self.coming_back.get()) else { return false };
        self.came_back_to.set(Some(epoch));
        self.coming_back.set(true);
        // This runs inside the pump, which is taken out meanwhile; the calls below need one.
        self.set_pump();
        let sessions = self.bystanders.borrow().clone();
        let others = sessions.iter().enumerate().filter(|(index, _)| *index != self.speaking.get());
        for session in others.filter_map(|(_, session)| session.upgrade()) {
            session.call(&session.own_caller(), || Request::Heartbeat, |_| Ok(())).expect("heartbeat");
        }
        self.coming_back.set(false);
        true
    }

    /// Runs `behind_death`: other clients reach the new server before the client that waited for the dead one.
    fn others_go_ahead(self: &Rc<Self>) {
        let others = self.behind_death.borrow_mut().take();
        if let Some(others) = others {
            // The pump is taken out, as in `others_come_back`.
            self.set_pump();
            others();
        }
    }

    /// Starts a server. If it dies in its start, starts the next.
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
            // One block, so that checksums are read again and again.
            sum_cache_bytes: 4096,
            durable_answers: self.config.durable_answers,
            trust_clients: self.config.translation == Translation::InitiatorByReads,
            page_window: self.config.page_window,
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

    /// Ends the server after its life is over, and keeps of its work what a kill or a power loss leaves.
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

    /// If the server's life is over, ends it and starts the next; says whether it was over. Unwinds if the world ends.
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

    /// Does one step of the server or the disk. Returns false if there is nothing to do.
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
                // No client runs meanwhile, so no client asks the dying server again.
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
            // Before a client hears of what the server did.
            self.act_meanwhile();
            return true;
        }
        if self.others_come_back() {
            return true;
        }
        if self.time_is_held.get() {
            return false;
        }
        // Nothing else moves, so time jumps to the next timer.
        let server = self.server.borrow();
        let Some(server) = server.as_ref() else { return false };
        if let Some(deadline) = server.next_deadline() {
            self.clock.advance(deadline.saturating_sub(self.clock.monotonic()) + Duration::from_nanos(1));
            return true;
        }
        false
    }
}
