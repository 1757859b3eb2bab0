//! Threads that each do one operation after another, and what they saw.
//!
//! Threads run through three phases that the caller moves on: warming up (nothing is counted but throughput),
//! measuring, over. Each thread has its own volume, histogram and counter; nothing is shared while it runs but the
//! phase, which is only read. What an operation is, is the caller's (`file_load`, `kv`).

use super::interrupt;
use anyhow::{Context as _, anyhow, bail};
use crossbeam::utils::CachePadded;
use hdrhistogram::Histogram;
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
    /// In nanoseconds.
    pub(super) latencies: Histogram<u64>,
    /// Of each tick that was measured.
    pub(super) timeline: Timeline,
}

impl Outcome {
    pub(super) fn operations_per_second(&self) -> f64 {
        self.operations as f64 / self.seconds.max(1e-9)
    }

    /// A quantile of the latencies.
    pub(super) fn latency_us(&self, quantile: f64) -> f64 {
        self.latencies.value_at_quantile(quantile) as f64 / 1e3
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

/// What a thread does again and again; told whether hotspots have changed.
pub(super) type Operation<'a> = Box<dyn FnMut(bool) -> anyhow::Result<()> + 'a>;

/// Runs `threads` threads, each with what `make` gives for its number; `at_phase` is called when measuring begins and
/// when it is over, to look at the server.
///
/// # Errors
/// The first of any thread; wrong data is one.
pub(super) fn run<'a>(
    threads: usize,
    timing: &Timing,
    make: &(dyn Fn(usize) -> anyhow::Result<Operation<'a>> + Sync),
    at_phase: &mut dyn FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<Outcome> {
    let stage = Stage {
        phase: AtomicU8::new(WARMING),
        changed: AtomicBool::new(false),
        done: (0..threads).map(|_| CachePadded::default()).collect(),
    };
    std::thread::scope(|scope| {
        let stage = &stage;
        let threads: Vec<_> =
            (0..threads).map(|index| scope.spawn(move || one_thread(index, make(index)?, stage))).collect();
        let conducted = conduct(stage, timing, at_phase, &|| threads.iter().any(|t| t.is_finished()));
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
        Ok(Outcome { operations, seconds, latencies, timeline })
    })
}

/// For latencies.
pub(super) fn histogram() -> anyhow::Result<Histogram<u64>> {
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
fn one_thread(index: usize, mut operation: Operation<'_>, stage: &Stage) -> anyhow::Result<Histogram<u64>> {
    let mut latencies = histogram()?;
    let mut begun = Instant::now();
    loop {
        let phase = stage.phase.load(Ordering::Relaxed);
        if phase == OVER {
            return Ok(latencies);
        }
        operation(stage.changed.load(Ordering::Relaxed))?;
        stage.done[index].fetch_add(1, Ordering::Relaxed);
        // The end of one is the beginning of the next: drawing a position is part of what an operation costs.
        let now = Instant::now();
        if phase == MEASURING {
            latencies.saturating_record((now - begun).as_nanos() as u64);
        }
        begun = now;
    }
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
