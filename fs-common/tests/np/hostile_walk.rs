//! Walks of `sandbox` over arbitrary bytes, the same each time. The fuzz target `np_target` looks for its own. `CUTTLEFS_NP_CASES` makes more of them.

use super::sandbox::{Counts, run};
use cuttlefs_common::world::{Random, SeededRandom};

const CASES: u64 = 600;
/// Bytes that decide a case.
const INPUT: usize = 400;

#[test]
fn hostile_peers_harm_nobody_and_learn_nothing() {
    let more = std::env::var("CUTTLEFS_NP_CASES").ok();
    let cases = more.map_or(CASES, |more| more.parse().expect("CUTTLEFS_NP_CASES is a number"));
    let mut all = Counts::default();
    for case in 0..cases {
        // Shown if the case fails.
        println!("case {case}");
        let mut input = vec![0; INPUT];
        SeededRandom::new(case).fill(&mut input);
        let counts = run(&input);
        all.done += counts.done;
        all.refused += counts.refused;
        all.ended += counts.ended;
        all.in_doubt += counts.in_doubt;
        all.one_sided += counts.one_sided;
        all.one_sided_refused += counts.one_sided_refused;
        all.honest += counts.honest;
    }
    println!("{all:?}");
    let Counts { done, refused, ended, in_doubt, one_sided, one_sided_refused, honest } = all;
    let least = [done, refused, ended, in_doubt, one_sided, one_sided_refused, honest].into_iter().min();
    assert!(least >= Some(cases / 4), "a kind of thing hardly came: {all:?}");
}
