//! Walks in one thread over the simulated link, from one seed: addresses translated by the target or by the initiator, disks that work at once or
//! late, cut connections, power losses. Some walks also have bad weather: messages that are late, come twice, or are lost with their connections.

use super::inside;
use super::reached::Reached;
use super::site::Site;
use super::step::{Step, step};
use super::walk::walk;
use super::world::{Crash, Death, World, WorldConfig, unsynced_bytes};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::Volume;
use cuttlefs_common::attr::Timestamp;
use cuttlefs_common::rdma::sim::{Cut, Translation};
use cuttlefs_common::world::Clock;
use cuttlefs_server::pages::window::WindowKind;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::cell::Cell;
use std::time::Duration;

/// One call of so many looks around before.
const LOOK_ONE_IN: u32 = 5;

pub struct Simulated {
    // Dropped before the world, which their calls need.
    clients: Vec<RemoteVolume>,
    pub world: World,
    pool_pages: u64,
    pub dies_unsynced: bool,
    restless: bool,
    /// Counts calls of clients that READ the server's tables: some of them look around, as their control threads would.
    looks: Option<Cell<u32>>,
}

impl Simulated {
    /// A site of two clients, where everything is synced before a server dies.
    fn new(config: WorldConfig) -> Self {
        Self::with_clients(config, 2, false)
    }

    pub fn with_clients(config: WorldConfig, clients: usize, dies_unsynced: bool) -> Self {
        let world = World::new(config);
        let clients: Vec<_> = (0..clients).map(|_| world.client()).collect();
        let looks = (config.translation == Translation::InitiatorByReads).then(Cell::default);
        let (pool_pages, restless) = (config.pool_pages, config.restless);
        let site = Self { clients, world, pool_pages, dies_unsynced, restless, looks };
        site.set_bystanders(|_| true);
        site
    }

    /// Sets the clients that come back to a new server without being called.
    pub fn set_bystanders(&self, is_one: impl Fn(usize) -> bool) {
        // No client is being called.
        self.world.speaks(usize::MAX);
        let ones = self.clients.iter().enumerate().filter(|(client, _)| is_one(*client));
        self.world.set_bystanders(ones.map(|(_, client)| client));
    }

    /// Whether a server has died since the last call of `has_died`, which this does not reset.
    pub fn is_new(&self) -> bool {
        self.world.is_new()
    }

    /// Drops the clients, without a word to the server, and returns the world.
    pub fn leave_world(self) -> World {
        self.world
    }
}

impl Site for Simulated {
    fn clients(&self) -> usize {
        self.clients.len()
    }

    fn client(&self, index: usize) -> &RemoteVolume {
        self.world.speaks(index);
        let client = &self.clients[index];
        if let Some(looks) = &self.looks {
            looks.set(looks.get() + 1);
            if looks.get().is_multiple_of(LOOK_ONE_IN) {
                client.look_around();
            }
        }
        client
    }

    fn remount(&mut self, index: usize) -> bool {
        let heard = self.world.network().is_faultless();
        if heard {
            self.clients[index].shut_down();
            self.clients[index] = self.world.client();
            self.set_bystanders(|_| true);
        }
        heard
    }

    fn now(&self) -> Timestamp {
        self.world.clock().now()
    }

    fn pass(&self, time: Duration) {
        self.world.pass(time);
    }

    fn restart(&mut self) {
        self.world.lose_power();
        self.world.start();
    }

    fn answers_are_durable(&self) -> bool {
        self.world.answers_are_durable()
    }

    fn dies_unsynced(&self) -> bool {
        self.dies_unsynced
    }

    fn writes_again(&self) -> bool {
        self.restless && !self.answers_are_durable()
    }

    fn crash_after(&self, crash: Crash, again: Option<Crash>) {
        self.world.crash_after(crash, again);
    }

    fn calm(&self) {
        self.world.calm();
    }

    fn hold_crash(&self, held: bool) {
        self.world.hold_crash(held);
    }

    fn kill_at(&self, cut: Cut, death: Death) {
        self.world.kill_at(cut, death);
    }

    fn has_died(&self) -> bool {
        self.world.has_died()
    }

    fn cut(&self, cut: Cut, pass: u32) {
        // A pending cut would replace the pending kill, and the server would die later, with unsynced writes.
        if !self.world.will_die() {
            self.world.network().cut_after(cut, pass);
        }
    }

    fn pool_pages(&self) -> u64 {
        self.pool_pages
    }

    fn check_inside(&self) {
        inside::check(&self.world, self.pool_pages);
    }
}

fn config() -> impl Strategy<Value = WorldConfig> {
    let translation = prop_oneof![Just(Translation::Target), Just(Translation::Initiator)];
    (
        any::<u64>(),
        translation,
        prop_oneof![3 => 24u64..64, 1 => 64u64..512],
        8u64..64,
        (any::<bool>(), prop::bool::weighted(0.25)),
    )
        .prop_map(|(seed, translation, pool_pages, frames, (deferred, durable_answers))| WorldConfig {
            deferred,
            durable_answers,
            unsynced_bytes: unsynced_bytes(seed),
            ..WorldConfig::new(seed, translation, pool_pages, frames)
        })
}

/// Clients that READ pages in their frames.
fn by_reads() -> impl Strategy<Value = WorldConfig> {
    config().prop_map(|config| WorldConfig { translation: Translation::InitiatorByReads, ..config })
}

/// Clients that READ pages in a window which the RNIC follows.
fn windowed() -> impl Strategy<Value = WorldConfig> {
    let (translation, page_window) = (Translation::InitiatorByReads, WindowKind::Odp);
    config().prop_map(move |config| WorldConfig { translation, page_window, ..config })
}

/// Runs one case.
fn run(config: WorldConfig, steps: &[(usize, Step)]) -> Reached {
    walk(Simulated::new(config), steps)
}

/// What each of twenty cases, always the same ones, comes across.
fn twenty(config: impl Strategy<Value = WorldConfig>) -> impl Iterator<Item = Reached> {
    let mut runner = TestRunner::deterministic();
    let strategy = (config, prop::collection::vec(step(), 100..120));
    (0..20).map(move |_| {
        let (config, steps) = strategy.new_tree(&mut runner).expect("a case").current();
        run(config, &steps)
    })
}

#[test]
fn the_walks_come_across_what_they_are_for() {
    let mut all = Reached::default();
    for reached in twenty(config()) {
        all.refused_for_space += reached.refused_for_space;
        all.moved_pages += reached.moved_pages;
        all.magic_hits += reached.magic_hits;
        all.onesided_reads += reached.onesided_reads;
        all.reconnects += reached.reconnects;
    }
    println!("{all:?}");
    assert!(all.refused_for_space >= 8, "{all:?}");
    assert!(all.moved_pages >= 20, "{all:?}");
    assert!(all.magic_hits >= 200, "{all:?}");
    assert!(all.onesided_reads >= 200, "{all:?}");
    assert!(all.reconnects >= 20, "{all:?}");
}

#[test]
fn walks_with_a_window_read_pages_there() {
    let window_pages: u64 = twenty(windowed()).map(|reached| reached.window_pages).sum();
    println!("{window_pages} pages");
    assert!(window_pages >= 100, "{window_pages}");
}

proptest! {
    #![proptest_config(super::cases(300))]

    #[test]
    fn reads_of_tables_behave_as_the_model(
        config in by_reads(),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        run(config, &steps);
    }

    #[test]
    fn a_window_of_pages_behaves_as_the_model(
        config in windowed(),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        run(config, &steps);
    }

    #[test]
    fn bad_weather_behaves_as_the_model(
        config in config(),
        one_in in 3u64..60,
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let site = Simulated::new(config);
        site.world.network().set_weather(config.seed, one_in);
        walk(site, &steps);
    }
}

proptest! {
    #![proptest_config(super::cases(1500))]

    #[test]
    fn the_simulated_world_behaves_as_the_model(
        config in config(),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        run(config, &steps);
    }
}
