//! A chain of work requests made of arbitrary bytes, and messages to it. What the checker accepts touches no memory outside of its views, changes no
//! byte of its queue that is fixed, and ends.
#![no_main]

#[path = "../../fs-common/tests/chains/sandbox.rs"]
mod sandbox;

use cuttlefs_common::rdma::chain::check;
use libfuzzer_sys::fuzz_target;
use sandbox::{Outcome, run};

fuzz_target!(|bytes: &[u8]| {
    if let Outcome::Broke(what) = run(bytes, |queue| check(queue).is_ok()) {
        panic!("{what}");
    }
});
