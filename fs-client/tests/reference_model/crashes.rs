//! Crashes at any event. A server, its clients, disk, metadata, network and clock run in one thread from one seed. The server dies at any event that
//! it causes in these: in the midst of requests, of write-backs, or of its own recovery, by a kill or a power loss. Afterwards the file system is
//! compared with the model, and the server with the design's invariants (`inside`).
//!
//! | walk | what goes on after a crash | what must be there |
//! | --- | --- | --- |
//! | `ack` | everything | the effect of each answered request, once |
//! | `kills` | everything; before a power loss all is synced | the same, except for the step during which the power was lost |
//! | `loss` | nothing: clients lose power, too | everything synced, and a prefix of the rest (`loss`) |
//!
//! A run depends on its seed only: the same seed gives the same events in the same order (`seeds`). With `CUTTLEFS_SIM_LOG=1` the messages of server
//! and clients are printed.

use super::loss::lose;
use super::seeds::{self, Ran, of_seed};
use super::simulated::Simulated;
use super::step::{How, Step, end, step_among_crashes};
use super::walk::Walk;
use super::world::{Lie, WorldConfig, unsynced_bytes};
use cuttlefs_common::life::{End, Event};
use cuttlefs_common::rdma::sim::Translation;
use cuttlefs_server::meta::StoreLie;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// The number of seeds of each walk.
const SEEDS: u64 = 700;
/// The number of steps of a walk.
const STEPS: std::ops::Range<usize> = 5..50;

/// The walks of the table above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Ack,
    Kills,
    Loss,
}

impl Kind {
    fn test(self) -> &'static str {
        match self {
            Self::Ack => "crashes::every_answer_survives_any_crash",
            Self::Kills => "crashes::nobody_sees_a_server_die",
            Self::Loss => "crashes::a_lost_machine_leaves_a_prefix",
        }
    }
}

/// Everything that a run depends on.
#[derive(Clone, Debug)]
struct Case {
    kind: Kind,
    config: WorldConfig,
    clients: usize,
    /// One message of this many has a fault.
    weather: Option<u64>,
    steps: Vec<(usize, Step)>,
    /// For `Loss`: how many of the steps come before everything is synced, and the event at which the power is lost.
    before: usize,
    end: End,
}

fn case(kind: Kind, seed: u64, lie: Option<Lie>) -> impl Strategy<Value = Case> {
    let translation = prop_oneof![Just(Translation::Target), Just(Translation::Initiator)];
    // Where a server dies with unsynced changes, another client may have taken the space that a client needs to make its changes again. So these
    // pools are large.
    let pool_pages = match kind {
        Kind::Ack => (24u64..512).boxed(),
        Kind::Kills | Kind::Loss => Just(2048u64).boxed(),
    };
    let weather = prop::option::weighted(0.25, 4u64..60);
    let durable_answers = kind == Kind::Ack;
    let steps = prop::collection::vec(step_among_crashes(4, durable_answers), STEPS);
    let last = (0usize..20, end());
    (translation, pool_pages, 8u64..64, any::<bool>(), 2usize..=4, weather, steps, last).prop_map(
        move |(translation, pool_pages, frames, deferred, clients, weather, steps, (before, end))| {
            let small = WorldConfig::new(seed, translation, pool_pages, frames);
            let unsynced_bytes = unsynced_bytes(seed);
            let config =
                WorldConfig { deferred, durable_answers, restless: true, lie, unsynced_bytes, ..small };
            Case { kind, config, clients, weather, steps, before, end }
        },
    )
}

fn run(case: &Case) -> Ran {
    let dies_unsynced = case.kind != Kind::Ack;
    let site = Simulated::with_clients(case.config, case.clients, dies_unsynced);
    if let Some(one_in) = case.weather {
        site.world.network().set_weather(case.config.seed, one_in);
    }
    let steps: Vec<_> =
        case.steps.iter().map(|(client, step)| (client % case.clients, step.clone())).collect();
    let mut walk = Walk::new(site);
    // Most steps need a file, so make some.
    let how = How { read: true, write: true, append: false, truncate: false, sync: false };
    for name in 0..3 {
        let create = Step::Create { parent: 0, name, exclusive: true, how };
        walk.run(name % case.clients, &create);
        walk.run((name + 1) % case.clients, &Step::Open { ino: name + 1, how });
    }
    if case.kind == Kind::Loss {
        let (before, rest) = steps.split_at(case.before.min(steps.len() / 2));
        walk.go(before, usize::MAX);
        return Ran::of(&lose(walk, rest, case.end));
    }
    walk.go(&steps, 12);
    let reached = walk.end();
    Ran { reached, ..Ran::of(&walk.site.world) }
}

/// Runs seeds until one fails.
fn seeds(kind: Kind) {
    seeds::seeds(kind.test(), SEEDS, |seed| case(kind, seed, None), run);
}

#[test]
fn every_answer_survives_any_crash() {
    seeds(Kind::Ack);
}

#[test]
fn nobody_sees_a_server_die() {
    seeds(Kind::Kills);
}

#[test]
fn a_lost_machine_leaves_a_prefix() {
    seeds(Kind::Loss);
}

#[test]
fn a_seed_does_the_same_each_time() {
    for kind in [Kind::Ack, Kind::Kills, Kind::Loss] {
        seeds::does_the_same(|seed| case(kind, seed, None), run);
    }
}

#[test]
fn servers_die_with_everything_they_do() {
    let mut by_event: BTreeMap<(Event, bool), u64> = BTreeMap::new();
    for kind in [Kind::Ack, Kind::Kills, Kind::Loss] {
        for seed in 0..120 {
            for (_, event, power) in run(&of_seed(&case(kind, seed, None), seed)).deaths {
                *by_event.entry((event, power)).or_default() += 1;
            }
        }
    }
    println!("{by_event:#?}");
    for event in Event::ALL {
        for power in [false, true] {
            assert!(by_event.contains_key(&(event, power)), "none died with {event:?}, power {power}");
        }
    }
}

/// Checks that one of the first seeds finds the lie, and that the same seed passes without it.
fn finds(kind: Kind, lie: Lie) {
    seeds::finds((lie, kind), |seed, lies| case(kind, seed, lies.then_some(lie)), run);
}

#[test]
fn an_answer_before_the_log_is_durable_is_found() {
    finds(Kind::Ack, Lie::Store(StoreLie::Flush));
}

#[test]
fn a_sync_that_does_not_flush_names_is_found() {
    finds(Kind::Loss, Lie::Store(StoreLie::Flush));
}

#[test]
fn a_data_sync_that_does_nothing_is_found() {
    finds(Kind::Loss, Lie::DiskSync);
    finds(Kind::Ack, Lie::DiskSync);
}

#[test]
fn a_store_that_forgets_contents_is_found() {
    finds(Kind::Ack, Lie::Store(StoreLie::Images));
    finds(Kind::Loss, Lie::Store(StoreLie::Images));
    finds(Kind::Kills, Lie::Store(StoreLie::Images));
}

#[test]
fn batches_that_do_not_say_what_was_done_are_found() {
    finds(Kind::Kills, Lie::Store(StoreLie::Slots));
    finds(Kind::Ack, Lie::Store(StoreLie::Slots));
}

/// These walks have one request at a time, so at most one request was done and not answered, and this lie does not show. The walks of `together` find
/// it.
#[test]
fn what_other_clients_requests_were_done_nobody_asks_here() {
    for kind in [Kind::Kills, Kind::Ack] {
        for seed in 0..60 {
            run(&of_seed(&case(kind, seed, Some(Lie::Store(StoreLie::OtherSlots))), seed));
        }
    }
}
