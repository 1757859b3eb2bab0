//! Walks with file regions: bindings, redeemed keys, write grants, one-sided writes, appends and atomics of three sessions on one file, beside requests,
//! truncates, evictions, reuse of pages, moves, messages that are lost, a session that vanishes, times that end, and a server that dies at any event.
//!
//! | session | has the file |
//! | --- | --- |
//! | 0 | open, and binds it |
//! | 1 | open; it vanishes now and then, grants and all |
//! | 2 | by a key |
//!
//! # What must be there
//! While the server lives, the bytes that the model has. After its death each byte is one that was there since it was last synced, or was last written by
//! an answered request; so is the length. What was appended before the place of an answered request is there: no zeros stand for a lost append. A loss is
//! told: whoever wrote a lost byte one-sidedly gets `BytesLost` from the next sync (docs/native.md).

mod model;
mod side;
mod steps;
mod walk;

use super::seeds::{self, Ran};
use super::world::{Lie, WorldConfig};
use cuttlefs_common::rdma::sim::Translation;
use cuttlefs_server::meta::StoreLie;
use proptest::prelude::*;
use steps::{Step, step};
use walk::{Counts, Walk};

/// The number of seeds.
const SEEDS: u64 = 600;
const PAGE: usize = 4096;
/// No operation reaches past this offset.
const SPAN: usize = 6 * PAGE;
/// Frames of the server: a quarter of them, which is for grants, is less than all three may ask for.
const FRAMES: u64 = 64;
const CHURN_PAGES: usize = 2 * FRAMES as usize;
/// The session that has the file by a key.
const KEYED: usize = 2;

#[derive(Clone, Debug)]
struct Case {
    config: WorldConfig,
    steps: Vec<(usize, Step)>,
}

fn case(seed: u64) -> impl Strategy<Value = Case> {
    case_with(seed, None)
}

fn case_with(seed: u64, lie: Option<Lie>) -> impl Strategy<Value = Case> {
    let steps = prop::collection::vec(step(), 5..70);
    (any::<bool>(), any::<bool>(), steps).prop_map(move |(deferred, durable_answers, steps)| {
        let small = WorldConfig::new(seed, Translation::Target, 2048, FRAMES);
        Case { config: WorldConfig { deferred, durable_answers, lie, ..small }, steps }
    })
}

fn walked(case: &Case) -> (Ran, Counts) {
    let mut walk = Walk::new(case.config);
    for (index, step) in &case.steps {
        if walk.step(*index, step) {
            walk.survive();
        }
        walk.check();
    }
    walk.world.calm();
    (Ran::of(&walk.world), walk.counts)
}

fn run(case: &Case) -> Ran {
    walked(case).0
}

#[test]
fn regions_are_as_the_model_has_them() {
    seeds::seeds("granted::regions_are_as_the_model_has_them", SEEDS, case, run);
}

#[test]
fn a_seed_does_the_same_each_time() {
    seeds::does_the_same(case, run);
}

#[test]
fn a_store_that_forgets_contents_is_found() {
    let lie = Lie::Store(StoreLie::Images);
    seeds::finds((lie, "granted"), |seed, lies| case_with(seed, lies.then_some(lie)), run);
}

#[test]
fn the_walks_come_across_what_they_are_for() {
    let mut all = Counts::default();
    for seed in 0..90 {
        let counts = seeds::run_alone(&seeds::of_seed(&case(seed), seed), |case| walked(case).1);
        all.atomics += counts.atomics;
        all.appends += counts.appends;
        all.writes += counts.writes;
        all.in_doubt += counts.in_doubt;
        all.losses += counts.losses;
        all.ended += counts.ended;
        all.moved += counts.moved;
        all.behind += counts.behind;
    }
    println!("{all:?}");
    let Counts { atomics, appends, writes, in_doubt, losses, ended, moved, behind } = all;
    assert!(atomics.min(appends).min(writes) >= 40 && in_doubt.min(losses).min(ended) >= 3, "{all:?}");
    assert!(moved.min(behind) >= 20, "{all:?}");
}
