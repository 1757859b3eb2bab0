//! Senders that do one thing after another, and how long each took.
//!
//! A sender's time ends when everything it did has been executed: the last thing it does is a read, which comes behind its
//! writes to that object, and the receiver's bound on what is taken and not executed bounds the rest. So throughput is not
//! that of filling a buffer.

use super::site::RpcSite;
use crate::bench::region::{Positions, check_interrupt};
use anyhow::anyhow;
use hdrhistogram::Histogram;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt as _, SeedableRng as _};
use std::time::{Duration, Instant};

/// Before measuring: queues, caches and spin budgets settle.
const WARM_UP: Duration = Duration::from_millis(150);

/// A sender of one system.
pub(super) trait Caller: Send {
    /// Writes objects; returns when they are persistent at the receiver.
    fn write(&mut self, keys: &[u32]) -> anyhow::Result<()>;
    /// Reads `count` objects from a key on and checks them.
    fn read(&mut self, key: u32, count: u32) -> anyhow::Result<()>;
    /// How often it was told to slow down.
    fn slowed(&self) -> u64;
}

/// What senders do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mix {
    pub(super) write_percent: u32,
    pub(super) theta: f64,
    pub(super) senders: usize,
    pub(super) batch: usize,
    pub(super) seconds: f64,
    pub(super) seed: u64,
}

/// What came of it.
pub(super) struct Outcome {
    pub(super) operations: u64,
    pub(super) seconds: f64,
    pub(super) writes: Histogram<u64>,
    pub(super) reads: Histogram<u64>,
    pub(super) slowed: u64,
}

impl Outcome {
    pub(super) fn new() -> anyhow::Result<Self> {
        // A nanosecond to a minute, three digits.
        let make = || Histogram::new_with_bounds(1, 60_000_000_000, 3).map_err(|error| anyhow!("{error}"));
        Ok(Self { operations: 0, seconds: 0.0, writes: make()?, reads: make()?, slowed: 0 })
    }

    pub(super) fn add(&mut self, other: &Self) -> anyhow::Result<()> {
        self.operations += other.operations;
        self.seconds = self.seconds.max(other.seconds);
        self.slowed += other.slowed;
        self.writes.add(&other.writes).map_err(|error| anyhow!("{error}"))?;
        self.reads.add(&other.reads).map_err(|error| anyhow!("{error}"))
    }
}

/// Runs senders against a receiver.
pub(super) fn run(site: &RpcSite, objects: u32, mix: &Mix) -> anyhow::Result<Outcome> {
    let mut callers = (0..mix.senders).map(|index| site.caller(index)).collect::<anyhow::Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        let running: Vec<_> = callers
            .iter_mut()
            .enumerate()
            .map(|(index, caller)| scope.spawn(move || one_sender(&mut **caller, objects, mix, index as u64)))
            .collect();
        let mut total = Outcome::new()?;
        for thread in running {
            total.add(&thread.join().map_err(|_| anyhow!("a sender panicked"))??)?;
        }
        Ok(total)
    })
}

fn one_sender(caller: &mut dyn Caller, objects: u32, mix: &Mix, index: u64) -> anyhow::Result<Outcome> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(mix.seed ^ index << 32);
    let positions = Positions::new(objects.into(), mix.theta, 1, mix.seed)?;
    let mut outcome = Outcome::new()?;
    let mut keys = Vec::new();
    let warm_until = Instant::now() + WARM_UP;
    let mut start: Option<Instant> = None;
    let mut key = 0;
    loop {
        let before = Instant::now();
        match start {
            None if before >= warm_until => start = Some(before),
            Some(start) if before - start >= Duration::from_secs_f64(mix.seconds) => break,
            _ => {}
        }
        check_interrupt()?;
        let writes = random.random_range(0..100) < mix.write_percent;
        key = positions.draw(&mut random) as u32;
        let count = if writes {
            keys.clear();
            keys.push(key);
            keys.extend((1..mix.batch).map(|_| positions.draw(&mut random) as u32));
            caller.write(&keys)?;
            mix.batch as u64
        } else {
            caller.read(key, 1)?;
            1
        };
        if start.is_some() {
            outcome.operations += count;
            let took_ns = before.elapsed().as_nanos() as u64;
            let histogram = if writes { &mut outcome.writes } else { &mut outcome.reads };
            histogram.saturating_record(took_ns);
        }
    }
    caller.read(key, 1)?;
    outcome.seconds = start.map_or(0.0, |start| start.elapsed().as_secs_f64());
    outcome.slowed = caller.slowed();
    Ok(outcome)
}
