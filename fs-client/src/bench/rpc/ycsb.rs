//! YCSB's six workloads, as the paper runs them: the index is with the client, so a get or a put is one RPC.

use super::load::{Caller, Outcome};
use super::site::RpcSite;
use super::store::SCAN_MAX;
use crate::bench::region::{Positions, check_interrupt};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};
use std::time::{Duration, Instant};

/// A workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Workload {
    A,
    B,
    C,
    D,
    E,
    F,
}

impl Workload {
    pub(super) const ALL: [Self; 6] = [Self::A, Self::B, Self::C, Self::D, Self::E, Self::F];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::A => "A: 50 % update",
            Self::B => "B: 5 % update",
            Self::C => "C: reads",
            Self::D => "D: 5 % insert, latest",
            Self::E => "E: 5 % insert, scans",
            Self::F => "F: 50 % read-modify-write",
        }
    }
}

/// Runs one sender; latencies of operations, a read-modify-write being one.
pub(super) fn run(
    site: &RpcSite,
    objects: u32,
    workload: Workload,
    seconds: f64,
    seed: u64,
) -> anyhow::Result<Outcome> {
    let mut caller = site.caller(0)?;
    let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
    let positions = Positions::new(objects.into(), 0.99, 1, seed)?;
    let mut outcome = Outcome::new()?;
    let mut newest = 0u32;
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs_f64(seconds) {
        check_interrupt()?;
        let before = Instant::now();
        let writes = one(&mut *caller, workload, &positions, &mut random, &mut newest, objects)?;
        let took_ns = before.elapsed().as_nanos() as u64;
        let histogram = if writes { &mut outcome.writes } else { &mut outcome.reads };
        histogram.saturating_record(took_ns);
        outcome.operations += 1;
    }
    caller.read(0, 1)?;
    outcome.seconds = start.elapsed().as_secs_f64();
    outcome.slowed = caller.slowed();
    Ok(outcome)
}

/// One operation; whether it wrote.
fn one(
    caller: &mut dyn Caller,
    workload: Workload,
    positions: &Positions,
    random: &mut Xoshiro256PlusPlus,
    newest: &mut u32,
    objects: u32,
) -> anyhow::Result<bool> {
    let key = positions.draw(random) as u32;
    let percent = random.random_range(0..100);
    let insert = |caller: &mut dyn Caller, newest: &mut u32| {
        *newest = (*newest + 1) % objects;
        caller.write(&[*newest])
    };
    let writes = match workload {
        Workload::A | Workload::F => percent < 50,
        Workload::B | Workload::D | Workload::E => percent < 5,
        Workload::C => false,
    };
    match (workload, writes) {
        (Workload::A | Workload::B, true) => caller.write(&[key])?,
        (Workload::D | Workload::E, true) => insert(caller, newest)?,
        (Workload::F, true) => {
            caller.read(key, 1)?;
            caller.write(&[key])?;
        }
        // The most recent are the most popular.
        (Workload::D, false) => caller.read((*newest + objects - key % objects) % objects, 1)?,
        (Workload::E, false) => caller.read(key, random.random_range(1..=SCAN_MAX))?,
        _ => caller.read(key, 1)?,
    }
    Ok(writes)
}
