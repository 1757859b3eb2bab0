//! The kinds of worlds that what is lost on its way is tried in.

use super::{World, WorldConfig};
use cuttlefs_common::rdma::sim::Translation;

/// A small one.
pub const CONFIG: WorldConfig = WorldConfig::new(1, Translation::Target, 1024, 64);

/// Runs `test` in each: both translators, a disk that does its work at once or late, with durable answers and without.
pub fn each_kind(test: impl Fn(&World)) {
    for translation in Translation::ALL {
        for (deferred, durable_answers) in [(false, false), (true, false), (false, true), (true, true)] {
            let config = WorldConfig { translation, frames: 16, deferred, durable_answers, ..CONFIG };
            test(&World::new(config));
        }
    }
}
