//! The reference model: random operations of two to four clients on the real client and server, and on a file system of maps. Each walk compares
//! every answer, the whole tree and all bytes. In most walks pools and memory are tiny, so that space runs out and pages are evicted all the time.
//!
//! `CUTTLEFS_MODEL_CASES` sets the number of cases of each test for long runs. The walks with crashes have seeds of their own (`seeds`).

#[path = "../chaos/mod.rs"]
mod chaos;
mod crashes;
mod granted;
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

/// The configuration of a test: `CUTTLEFS_MODEL_CASES` cases, or `default` if the variable is not set.
fn cases(default: u32) -> ProptestConfig {
    let asked = std::env::var("CUTTLEFS_MODEL_CASES").ok().and_then(|cases| cases.parse().ok());
    let cases = asked.unwrap_or(default);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}
