//! The load: threads that each do one read or write after another, and what they saw.
//!
//! Threads run through three phases that the caller moves on: warming up (nothing is counted but throughput),
//! measuring, over. Each thread has its own volume, histogram and counter; nothing is shared while it runs but the
//! phase, which is only read.
//!
//! Every read is checked (`content`): a wrong byte ends the run with an error. Writes write words that can be checked.

use super::content;
use super::interrupt;
use super::positions::Positions;
use super::volume::{OpenFile, caller};
use crate::file::volume::{Caller, FsError};
use anyhow::{Context as _, anyhow, bail};
use crossbeam::utils::CachePadded;
use hdrhistogram::Histogram;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{Rng as _, SeedableRng as _};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often throughput is looked at, for timelines and to see whether it has settled.
pub(super) const TICK: Duration = Duration::from_millis(200);
/// Longest latency told apart, in nanoseconds: whatever takes longer counts as this.
const LONGEST_NS: u64 = 60_000_000_000;
/// Significant digits of latencies.
const LATENCY_DIGITS: u8 = 3;
/// Throughput has settled when the last `SETTLED_TICKS` are within this share of those before.
const SETTLED_SHARE: f64 = 0.03;
const SETTLED_TICKS: usize = 15;
/// Key of the permutation: the hotspots of the first and, after a change, of the second half.
const FIRST_KEY: u64 = 0x7e24;

/// What each thread does.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Load {
    /// Bytes of a read or write, and what its place is aligned to.
    pub(super) value_bytes: u64,
    /// Share of writes.
    pub(super) write_percent: u32,
    /// Zipf's exponent; 0 is uniform.
    pub(super) theta: f64,
    /// Bytes that keep neighbouring ranks.
    pub(super) clustered_bytes: u64,
    /// Threads at once.
    pub(super) threads: usize,
}

/// How long.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// Longest warm-up; all of it unless `settle`.
    pub(super) warmup: Duration,
    /// End warming up as soon as throughput does not change any more.
    pub(super) settle: bool,
    /// What is measured.
    pub(super) measure: Duration,
    /// Other values become hot when half of the time is over.
    pub(super) change_hotspots: bool,
}

/// Seconds since measuring began, and operations a second in the tick that ended then.
pub(super) type Timeline = Vec<(f64, f64)>;

/// What was measured.
#[derive(Clone, Debug)]
pub(super) struct Outcome {
    pub(super) operations: u64,
    pub(super) seconds: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// Of each tick that was measured.
    pub(super) timeline: Timeline,
}

impl Outcome {
    pub(super) fn operations_per_second(&self) -> f64 {
        self.operations as f64 / self.seconds.max(1e-9)
    }
}

const WARMING: u8 = 0;
const MEASURING: u8 = 1;
const OVER: u8 = 2;

/// What threads and their caller share.
struct Stage {
    /// Written by the caller, read by threads before each operation; each phase stands for itself, so relaxed.
    phase: AtomicU8,
    /// The hotspots are those of the second half. As `phase`.
    changed: AtomicBool,
    /// Operations done, by thread. Written by it alone, read by the caller; relaxed.
    done: Vec<CachePadded<AtomicU64>>,
}

impl Stage {
    fn operations(&self) -> u64 {
        self.done.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// Runs a load on the open files, thread `i` on the `i`-th modulo their number; `at_phase` is called when measuring
/// begins and when it is over, to look at the server.
///
/// # Errors
/// The first of any thread; wrong data is one.
pub(super) fn run(
    files: &[OpenFile],
    file_bytes: u64,
    load: &Load,
    timing: &Timing,
    mut at_phase: impl FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<Outcome> {
    let values = file_bytes / load.value_bytes;
    let run_values = load.clustered_bytes / load.value_bytes;
    let positions = [FIRST_KEY, FIRST_KEY + 1].map(|key| Positions::new(values, load.theta, run_values, key));
    let [first, second] = positions;
    let positions = [first?, second?];
    anyhow::ensure!(!files.is_empty(), "no file to load");
    let stage = Stage {
        phase: AtomicU8::new(WARMING),
        changed: AtomicBool::new(false),
        done: (0..load.threads).map(|_| CachePadded::default()).collect(),
    };
    std::thread::scope(|scope| {
        let (stage, positions) = (&stage, &positions);
        let threads: Vec<_> = (0..load.threads)
            .map(|index| {
                let file = &files[index % files.len()];
                scope.spawn(move || one_thread(index, file, load, positions, stage))
            })
            .collect();
        let conducted = conduct(stage, timing, &mut at_phase, &|| threads.iter().any(|t| t.is_finished()));
        stage.phase.store(OVER, Ordering::Relaxed);
        let mut latencies = histogram()?;
        for thread in threads {
            let seen = thread.join().map_err(|_| anyhow!("a load thread ended abnormally"))??;
            latencies.add(seen).context("latencies do not add up")?;
        }
        let (operations, seconds, timeline) = conducted?;
        anyhow::ensure!(
            !latencies.is_empty(),
            "no operation ended while it was measured; use more --seconds"
        );
        Ok(Outcome {
            operations,
            seconds,
            p50_us: latencies.value_at_quantile(0.50) as f64 / 1e3,
            p99_us: latencies.value_at_quantile(0.99) as f64 / 1e3,
            timeline,
        })
    })
}

fn histogram() -> anyhow::Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, LONGEST_NS, LATENCY_DIGITS).context("cannot count latencies")
}

/// Moves the phases on; gives operations, seconds and the timeline of what was measured.
fn conduct(
    stage: &Stage,
    timing: &Timing,
    at_phase: &mut dyn FnMut() -> anyhow::Result<()>,
    failed: &dyn Fn() -> bool,
) -> anyhow::Result<(u64, f64, Timeline)> {
    let check = || {
        interrupt::check()?;
        if failed() {
            // Its own error is told when it is joined.
            bail!("a load thread ended early");
        }
        Ok(())
    };
    let begun = Instant::now();
    let mut rates = Vec::new();
    let mut before = 0;
    while begun.elapsed() < timing.warmup && !(timing.settle && settled(&rates)) {
        std::thread::sleep(TICK.min(timing.warmup.saturating_sub(begun.elapsed())));
        let now = stage.operations();
        rates.push((now - before) as f64);
        before = now;
        check()?;
    }
    at_phase()?;
    stage.phase.store(MEASURING, Ordering::Relaxed);
    let begun = Instant::now();
    let first = stage.operations();
    let (mut before, mut last_tick) = (first, 0.0);
    let mut timeline = Vec::new();
    while begun.elapsed() < timing.measure {
        std::thread::sleep(TICK.min(timing.measure.saturating_sub(begun.elapsed())));
        let (now, elapsed) = (stage.operations(), begun.elapsed());
        let at = elapsed.as_secs_f64();
        timeline.push((at, (now - before) as f64 / (at - last_tick).max(1e-9)));
        (before, last_tick) = (now, at);
        if timing.change_hotspots && elapsed >= timing.measure / 2 {
            stage.changed.store(true, Ordering::Relaxed);
        }
        check()?;
    }
    let (operations, seconds) = (stage.operations() - first, begun.elapsed().as_secs_f64());
    at_phase()?;
    Ok((operations, seconds, timeline))
}

/// Whether the last ticks are as the ones before them.
fn settled(rates: &[f64]) -> bool {
    let Some(from) = rates.len().checked_sub(2 * SETTLED_TICKS) else {
        return false;
    };
    let (before, last) = rates[from..].split_at(SETTLED_TICKS);
    let (before, last): (f64, f64) = (before.iter().sum(), last.iter().sum());
    (last - before).abs() <= SETTLED_SHARE * before
}

/// One thread, until the phase is over; its latencies.
fn one_thread(
    index: usize,
    file: &OpenFile,
    load: &Load,
    positions: &[Positions; 2],
    stage: &Stage,
) -> anyhow::Result<Histogram<u64>> {
    let mut random = Xoshiro256PlusPlus::seed_from_u64(index as u64 + 1);
    let mut latencies = histogram()?;
    let caller = caller();
    let mut body = vec![0; load.value_bytes as usize];
    let mut version = 0u16;
    let mut begun = Instant::now();
    loop {
        let phase = stage.phase.load(Ordering::Relaxed);
        if phase == OVER {
            return Ok(latencies);
        }
        let which = usize::from(stage.changed.load(Ordering::Relaxed));
        let offset = positions[which].draw(&mut random) * load.value_bytes;
        // The high half, because drawing a rank has used whole numbers of the same generator.
        if (random.next_u64() >> 32) % 100 < u64::from(load.write_percent) {
            version = version.wrapping_add(1);
            content::fill(&mut body, offset, version);
            write(file, &caller, offset, &body)?;
        } else {
            read(file, &caller, offset, load.value_bytes)?;
        }
        stage.done[index].fetch_add(1, Ordering::Relaxed);
        // The end of one is the beginning of the next: drawing a position is part of what an operation costs.
        let now = Instant::now();
        if phase == MEASURING {
            latencies.saturating_record((now - begun).as_nanos() as u64);
        }
        begun = now;
    }
}

fn read(file: &OpenFile, caller: &Caller, offset: u64, value_bytes: u64) -> anyhow::Result<()> {
    let mut checked = Ok(());
    let mut got = 0;
    file.volume
        .read(caller, file.handle, offset, value_bytes as u32, &mut |bytes| {
            got = bytes.len() as u64;
            checked = content::check(bytes, offset);
        })
        .map_err(|error| failed("reading", offset, error))?;
    anyhow::ensure!(got == value_bytes, "a read at byte {offset} ended after {got} of {value_bytes} bytes");
    Ok(checked?)
}

fn write(file: &OpenFile, caller: &Caller, offset: u64, body: &[u8]) -> anyhow::Result<()> {
    let written = file
        .volume
        .write(caller, file.handle, offset, body)
        .map_err(|error| failed("writing", offset, error))?;
    anyhow::ensure!(
        written as usize == body.len(),
        "a write at byte {offset} ended after {written} of {} bytes",
        body.len()
    );
    Ok(())
}

fn failed(doing: &str, offset: u64, error: FsError) -> anyhow::Error {
    anyhow!("{doing} at byte {offset} failed: {error}; the server's log says more")
}

/// Reads the file from its start, so that memory is as full as that of a server that has run for long.
///
/// # Errors
/// As the server says; wrong data.
pub(super) fn scan(file: &OpenFile, bytes: u64) -> anyhow::Result<()> {
    use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
    let caller = caller();
    let mut offset = 0;
    while offset < bytes {
        interrupt::check()?;
        let len = u64::from(MAX_TRANSFER_BYTES).min(bytes - offset);
        read(file, &caller, offset, len)?;
        offset += len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settled_is_when_nothing_moves_any_more() {
        let rising: Vec<f64> = (0..40).map(|tick| f64::from(tick) * 100.0).collect();
        assert!(!settled(&rising));
        assert!(!settled(&[100.0; SETTLED_TICKS]));
        assert!(settled(&[100.0; 2 * SETTLED_TICKS]));
    }
}
