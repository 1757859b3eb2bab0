//! The kinds of worlds in which tests of lost messages run.

use super::{World, WorldConfig};
use cuttlefs_common::rdma::sim::Translation;

/// The configuration of a small world.
pub const CONFIG: WorldConfig = WorldConfig::new(1, Translation::Target, 1024, 64);

/// Runs `test` in a world of each kind: every translation, a disk that does its work at once or late, answers durable or not.
pub fn each_kind(test: impl Fn(&World)) {
    for translation in Translation::ALL {
        for (deferred, durable_answers) in [(false, false), (true, false), (false, true), (true, true)] {
            let config = WorldConfig { translation, frames: 16, deferred, durable_answers, ..CONFIG };
            test(&World::new(config));
        }
    }
}
