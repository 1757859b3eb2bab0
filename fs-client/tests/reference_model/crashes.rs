//! Crashes at any event. A server, its clients, disk, redo log, metadata, network and clock run in one thread from one seed;
//! the server dies with any of the things it does to these, in the midst of requests, of write-backs, of its recovery; killed,
//! or with the power. Then the model has the say, and the design's invariants (`inside`).
//!
//! | walk | what goes on behind a crash | what must be there |
//! | --- | --- | --- |
//! | `ack` | everything | everything that was answered, once |
//! | `kills` | everything; before a power loss all is synced | the same, but for what power takes of the step under way |
//! | `loss` | nobody: clients lose power, too | what was synced, and a prefix of the rest (`loss`) |
//!
//! A seed is all there is to a run: the same one does the same, event for event. The seeds of a test run follow each other from
//! one that is drawn and printed. `CUTTLEFS_SIM_SEEDS` says how many, `CUTTLEFS_SIM_SEED` from which on (one, if no number
//! is given). A failing one is printed with the line that runs it again, then made smaller. `CUTTLEFS_SIM_LOG=1` shows what
//! server and clients log.

use super::loss::lose;
use super::simulated::Simulated;
use super::step::{How, Step, end, step_among_crashes};
use super::walk::Walk;
use super::world::{Lie, World, WorldConfig};
use cuttlefs_common::life::{End, Event};
use cuttlefs_common::rdma::sim::Translation;
use cuttlefs_common::world::{Random, SeededRandom, SystemRandom};
use cuttlefs_server::meta::StoreLie;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestError, TestRng, TestRunner};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Seeds of each walk.
const SEEDS: u64 = 700;
/// Steps of a walk.
const STEPS: std::ops::Range<usize> = 5..50;
/// Tries to make a failing case smaller.
const SHRINKS: u32 = 300;
/// Seeds within which each lie must be found.
const LIE_SEEDS: u64 = 400;

/// Which walk.
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

/// A run.
#[derive(Clone, Debug)]
struct Case {
    kind: Kind,
    config: WorldConfig,
    clients: usize,
    /// One in so many messages has a fault.
    weather: Option<u64>,
    steps: Vec<(usize, Step)>,
    /// Of a loss: how many of the steps come before, and with which event it comes.
    before: usize,
    end: End,
}

/// What a run was.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Ran {
    events: u64,
    digest: u64,
    deaths: Vec<(u64, Event, bool)>,
}

fn case(kind: Kind, seed: u64, lie: Option<Lie>) -> impl Strategy<Value = Case> {
    let translation = prop_oneof![Just(Translation::Target), Just(Translation::Initiator)];
    // Where a server dies with something unsynced, space that a client needs for it may be another's by then.
    let pool_pages = match kind {
        Kind::Ack => (24u64..512).boxed(),
        Kind::Kills | Kind::Loss => Just(2048u64).boxed(),
    };
    let weather = prop::option::weighted(0.25, 4u64..60);
    let log = kind == Kind::Ack;
    let steps = prop::collection::vec(step_among_crashes(4, log), STEPS);
    let loss = (0usize..20, end(log));
    (translation, pool_pages, 8u64..64, any::<bool>(), 2usize..=4, weather, steps, loss).prop_map(
        move |(translation, pool_pages, frames, deferred, clients, weather, steps, (before, end))| {
            let small = WorldConfig::new(seed, translation, pool_pages, frames);
            let config = WorldConfig { deferred, log, restless: true, lie, ..small };
            Case { kind, config, clients, weather, steps, before, end }
        },
    )
}

fn runner(seed: u64) -> TestRunner {
    let mut bytes = [0; 32];
    SeededRandom::new(seed).fill(&mut bytes);
    let config =
        ProptestConfig { max_shrink_iters: SHRINKS, failure_persistence: None, ..ProptestConfig::default() };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
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
    // Without files most steps are about nothing.
    let how = How { read: true, write: true, append: false, truncate: false, sync: false };
    for name in 0..3 {
        let create = Step::Create { parent: 0, name, exclusive: true, how };
        walk.run(name % case.clients, &create);
        walk.run((name + 1) % case.clients, &Step::Open { ino: name + 1, how });
    }
    if case.kind == Kind::Loss {
        let (before, rest) = steps.split_at(case.before.min(steps.len() / 2));
        walk.go(before, usize::MAX);
        return ran(&lose(walk, rest, case.end));
    }
    walk.go(&steps, 12);
    walk.end();
    ran(&walk.site.world)
}

fn ran(world: &World) -> Ran {
    let (events, digest, deaths) = world.events();
    Ran { events, digest, deaths }
}

fn of_seed(kind: Kind, seed: u64, lie: Option<Lie>) -> Case {
    case(kind, seed, lie).new_tree(&mut runner(seed)).expect("a case").current()
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

/// Runs seeds until one fails.
fn seeds(kind: Kind) {
    if std::env::var_os("CUTTLEFS_SIM_LOG").is_some() {
        tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).init();
    }
    let first = number("CUTTLEFS_SIM_SEED");
    let count = number("CUTTLEFS_SIM_SEEDS").unwrap_or(if first.is_some() { 1 } else { SEEDS });
    let first = first.unwrap_or_else(|| SystemRandom.next_u64() >> 24);
    println!("seeds {first} to {}", first + count - 1);
    let mut deaths = 0;
    for seed in first..first + count {
        let ran = catch_unwind(AssertUnwindSafe(|| run(&of_seed(kind, seed, None))));
        match ran {
            Ok(ran) => deaths += ran.deaths.len(),
            Err(_) => fail(kind, seed),
        }
    }
    println!("{count} seeds, {deaths} deaths");
}

/// Says which seed it was, and looks for a smaller case.
fn fail(kind: Kind, seed: u64) -> ! {
    let again = format!(
        "CUTTLEFS_SIM_SEED={seed} cargo nextest run -p cuttlefs-client --test reference_model --no-capture {}",
        kind.test()
    );
    eprintln!("\nseed {seed} failed; again:\n    {again}\nmaking it smaller ...");
    let mut runner = runner(seed);
    let tree = case(kind, seed, None).new_tree(&mut runner).expect("a case");
    let smaller = runner.run_one(tree, |case| {
        run(&case);
        Ok(())
    });
    match smaller {
        Err(TestError::Fail(reason, case)) => panic!("seed {seed}: {reason}\n{case:#?}\nagain: {again}"),
        other => panic!(
            "seed {seed} failed, and not when it ran again ({other:?}): something is not from the seed"
        ),
    }
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
        for seed in 0..12 {
            let case = of_seed(kind, seed, None);
            assert_eq!(run(&case), run(&case), "{kind:?}, seed {seed}");
        }
    }
}

#[test]
fn servers_die_with_everything_they_do() {
    let mut by_event: BTreeMap<(Event, bool), u64> = BTreeMap::new();
    for kind in [Kind::Ack, Kind::Kills, Kind::Loss] {
        for seed in 0..120 {
            for (_, event, power) in run(&of_seed(kind, seed, None)).deaths {
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

/// One of the first seeds finds a lie, and finds nothing without it.
fn finds(kind: Kind, lie: Lie) {
    let found = (0..LIE_SEEDS).find(|seed| {
        let case = of_seed(kind, *seed, Some(lie));
        catch_unwind(AssertUnwindSafe(|| run(&case))).is_err()
    });
    println!("{lie:?}, {kind:?}: seed {found:?}");
    let seed = found.unwrap_or_else(|| panic!("{LIE_SEEDS} seeds say nothing of {lie:?} in {kind:?}"));
    run(&of_seed(kind, seed, None));
}

#[test]
fn an_answer_before_the_log_is_durable_is_found() {
    finds(Kind::Ack, Lie::LogSync);
}

#[test]
fn an_answer_before_the_metadata_is_durable_is_found() {
    finds(Kind::Ack, Lie::Store(StoreLie::Persist));
}

#[test]
fn a_checkpoint_before_the_flush_is_found() {
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
fn batches_that_do_not_say_what_was_done_are_found() {
    finds(Kind::Kills, Lie::Store(StoreLie::Slots));
    finds(Kind::Ack, Lie::Store(StoreLie::Slots));
}
