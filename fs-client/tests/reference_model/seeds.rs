//! Runs of seeds: a case follows from a seed, and a run from its case. By default the first seeds are run, so that a test that passed passes again
//! with the same code. `CUTTLEFS_SIM_SEEDS` sets the number of seeds, which begin at a random one that is printed. `CUTTLEFS_SIM_SEED` sets the first
//! seed (and the number to one, if it is not set). For a failing seed the line that runs it again is printed, and then a smaller case is looked for.

use super::reached::Reached;
use super::world::World;
use cuttlefs_common::life::Event;
use cuttlefs_common::world::{Random, SeededRandom, SystemRandom};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestError, TestRng, TestRunner};
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// How many smaller cases are tried after a failure.
const SHRINKS: u32 = 300;
/// Each lie must be found within this many seeds: some show in one seed of a thousand.
const LIE_SEEDS: u64 = 4000;

/// The summary of a run. Two runs of one seed must be equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ran {
    pub events: u64,
    pub digest: u64,
    pub deaths: Vec<(u64, Event, bool)>,
    pub reached: Reached,
}

impl Ran {
    /// The summary of what happened in a world.
    pub fn of(world: &World) -> Self {
        let (events, digest, deaths) = world.events();
        Self { events, digest, deaths, reached: Reached::default() }
    }
}

/// The proptest runner of a seed.
fn runner(seed: u64) -> TestRunner {
    let mut bytes = [0; 32];
    SeededRandom::new(seed).fill(&mut bytes);
    let config =
        ProptestConfig { max_shrink_iters: SHRINKS, failure_persistence: None, ..ProptestConfig::default() };
    TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes))
}

/// The case of a seed.
pub fn of_seed<C>(strategy: &impl Strategy<Value = C>, seed: u64) -> C {
    strategy.new_tree(&mut runner(seed)).expect("a case").current()
}

/// Runs a case in a thread of its own, so that no thread-local state of an earlier case is left.
pub fn run_alone<C: Sync, R: Send>(case: &C, run: fn(&C) -> R) -> R {
    let ran = std::thread::scope(|scope| scope.spawn(|| run(case)).join());
    ran.unwrap_or_else(|payload| resume_unwind(payload))
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

/// Runs seeds until one fails. `test` is the name of the test, to print with a failure.
pub fn seeds<C, S>(test: &str, count: u64, case: impl Fn(u64) -> S, run: fn(&C) -> Ran)
where
    C: Clone + Debug + Sync,
    S: Strategy<Value = C>,
{
    if std::env::var_os("CUTTLEFS_SIM_LOG").is_some() {
        tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).init();
    }
    let (first, count) = match (number("CUTTLEFS_SIM_SEED"), number("CUTTLEFS_SIM_SEEDS")) {
        (Some(first), count) => (first, count.unwrap_or(1)),
        (None, Some(count)) => (SystemRandom.next_u64() >> 24, count),
        (None, None) => (0, count),
    };
    println!("seeds {first} to {}", first + count - 1);
    let mut deaths = 0;
    for seed in first..first + count {
        let strategy = case(seed);
        match catch_unwind(AssertUnwindSafe(|| run_alone(&of_seed(&strategy, seed), run))) {
            Ok(ran) => deaths += ran.deaths.len(),
            Err(_) => fail(test, seed, &strategy, run),
        }
    }
    println!("{count} seeds, {deaths} deaths");
}

/// Prints the failing seed, looks for a smaller case, and panics with it.
fn fail<C>(test: &str, seed: u64, strategy: &impl Strategy<Value = C>, run: fn(&C) -> Ran) -> !
where
    C: Clone + Debug + Sync,
{
    let again = format!(
        "CUTTLEFS_SIM_SEED={seed} cargo nextest run -p cuttlefs-client --test reference_model --no-capture {test}"
    );
    eprintln!("\nseed {seed} failed; again:\n    {again}\nmaking it smaller ...");
    let mut runner = runner(seed);
    let tree = strategy.new_tree(&mut runner).expect("a case");
    let smaller = runner.run_one(tree, |case| {
        run_alone(&case, run);
        Ok(())
    });
    match smaller {
        Err(TestError::Fail(reason, case)) => panic!("seed {seed}: {reason}\n{case:#?}\nagain: {again}"),
        other => panic!(
            "seed {seed} failed, and not when it ran again ({other:?}): something is not from the seed"
        ),
    }
}

/// Checks that each of the first seeds has the same run when it runs again.
pub fn does_the_same<C: Sync, S: Strategy<Value = C>>(case: impl Fn(u64) -> S, run: fn(&C) -> Ran) {
    for seed in 0..12 {
        let case = of_seed(&case(seed), seed);
        assert_eq!(run_alone(&case, run), run_alone(&case, run), "seed {seed}");
    }
}

/// Checks that one of the first seeds fails with the lie, `case(seed, true)`, and that the same seed passes without it.
pub fn finds<C: Sync, S: Strategy<Value = C>>(
    what: impl Debug,
    case: impl Fn(u64, bool) -> S,
    run: fn(&C) -> Ran,
) {
    let fails = |seed: &u64| {
        let case = of_seed(&case(*seed, true), *seed);
        catch_unwind(AssertUnwindSafe(|| run_alone(&case, run))).is_err()
    };
    let found = (0..LIE_SEEDS).find(fails);
    println!("{what:?}: seed {found:?}");
    let seed = found.unwrap_or_else(|| panic!("the first seeds say nothing of {what:?}"));
    run_alone(&of_seed(&case(seed, false), seed), run);
}
