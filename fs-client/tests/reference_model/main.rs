//! The reference model: random operations of two clients on the real client and server, and on a file system of maps;
//! every answer, the whole tree and all bytes compared. Pools and memory are tiny, so that space runs out and pages
//! are evicted all the time.
//!
//! `CUTTLEFS_MODEL_CASES` sets the number of cases of each test for long runs; `crashes` has seeds of its own.

#[path = "../chaos/mod.rs"]
mod chaos;
mod crashes;
mod handing;
mod inside;
mod linked;
mod loss;
mod model;
mod reached;
mod seeds;
#[path = "../serving/mod.rs"]
mod serving;
mod simulated;
mod site;
mod step;
mod together;
mod walk;
#[path = "../world/mod.rs"]
mod world;

use proptest::prelude::*;

/// Cases of one test: `default`, or what the environment says.
fn cases(default: u32) -> ProptestConfig {
    let asked = std::env::var("CUTTLEFS_MODEL_CASES").ok().and_then(|cases| cases.parse().ok());
    let cases = asked.unwrap_or(default);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}
