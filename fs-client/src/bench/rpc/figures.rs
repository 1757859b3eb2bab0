//! What each figure of the paper runs here.

use super::failure;
use super::load::{self, Mix, Outcome};
use super::run::RpcArgs;
use super::site::{RpcSite, Setup};
use super::system::System;
use super::ycsb::{self, Workload};
use crate::bench::chart::Kind as ChartKind;
use crate::bench::report::Progress;
use crate::bench::site::Site;
use anyhow::{Context as _, bail};
use serde::{Serialize, Serializer};
use std::time::Duration;

/// A heavy request's processing (section 5.2).
const HEAVY: Duration = Duration::from_micros(100);
/// Threads that execute heavy requests: they sleep most of the time. The paper makes a thread for each (section 4.2). With
/// four, the lane of the most popular object is the bottleneck of a sender that does not wait.
const HEAVY_THREADS: usize = 8;
/// Zipf's exponent.
const THETA: f64 = 0.99;
/// Operations of figure 12.
const FAILURE_OPERATIONS: u64 = 10_000;

fn label<S: Serializer>(system: &System, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(system.label())
}

/// One measurement.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Point {
    pub(super) x: String,
    #[serde(serialize_with = "label")]
    pub(super) system: System,
    pub(super) operations_per_second: f64,
    pub(super) mean_us: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) write_p99_us: f64,
    pub(super) read_p99_us: f64,
    /// Times senders were told to slow down.
    pub(super) slowed: u64,
    /// Of figure 12: how long it took in all, and what was not and was sent again.
    pub(super) seconds: f64,
    pub(super) failures: u64,
    pub(super) kept: u64,
    pub(super) resent: u64,
}

/// What is plotted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shown {
    Throughput,
    MeanLatency,
    P99Latency,
    Seconds,
}

/// What a place runs.
#[derive(Clone, Copy, Debug)]
enum Load {
    Mix { write_percent: u32, senders: usize, batch: usize },
    Ycsb(Workload),
    Failure { write_percent: u32, availability: f64 },
}

/// A place of a figure.
#[derive(Clone, Debug)]
struct Place {
    x: String,
    object_len: usize,
    heavy: bool,
    load: Load,
}

/// A figure.
pub(super) struct Plan {
    pub(super) name: String,
    pub(super) title: &'static str,
    pub(super) x_label: &'static str,
    pub(super) shown: Shown,
    pub(super) kind: ChartKind,
    places: Vec<Place>,
    systems: Vec<System>,
}

fn size_name(len: usize) -> String {
    if len >= 1024 { format!("{}K", len >> 10) } else { len.to_string() }
}

/// What to run for a figure; without one: writes under heavy load.
pub(super) fn plan(args: &RpcArgs) -> anyhow::Result<Plan> {
    let mix = |write_percent| Load::Mix { write_percent, senders: 1, batch: 1 };
    let place = |x: String, object_len, heavy, load| Place { x, object_len, heavy, load };
    let sizes = |all: &[usize], heavy, write_percent| -> Vec<Place> {
        all.iter().map(|len| place(size_name(*len), *len, heavy, mix(write_percent))).collect()
    };
    let quick = args.quick;
    let (title, x_label, shown, places): (_, _, _, Vec<Place>) = match args.figure.as_deref() {
        None => (
            "Writes under heavy load",
            "object size (bytes)",
            Shown::Throughput,
            sizes(&[32, 1024, 65536], true, 100),
        ),
        Some("8a") => (
            "Figure 8a: heavy load, half writes",
            "object size (bytes)",
            Shown::Throughput,
            sizes(&[32, 1024, 65536], true, 50),
        ),
        Some("8b") => (
            "Figure 8b: light load, half writes",
            "object size (bytes)",
            Shown::Throughput,
            sizes(&[32, 1024, 65536], false, 50),
        ),
        Some("9") => (
            "Figure 9: tail latency, half writes",
            "object size (bytes)",
            Shown::P99Latency,
            sizes(&[1024, 65536], true, 50),
        ),
        Some("11") => {
            let of =
                |workload: Workload| place(workload.label().to_owned(), 4096, false, Load::Ycsb(workload));
            ("Figure 11: YCSB, 4 KiB values", "workload", Shown::MeanLatency, Workload::ALL.map(of).to_vec())
        }
        Some("12") => {
            let at = |(availability, write_percent): (f64, u32)| {
                let x = format!("{:.0} % up, {write_percent} % writes", availability * 100.0);
                place(x, 4096, true, Load::Failure { write_percent, availability })
            };
            let all = [(0.99, 50), (0.95, 50), (0.9, 50), (0.95, 95)];
            let chosen = if quick { &all[1..3] } else { &all[..] };
            (
                "Figure 12: a receiver that fails",
                "availability",
                Shown::Seconds,
                chosen.iter().copied().map(at).collect(),
            )
        }
        Some("13") => {
            let all: &[usize] = if quick { &[64, 4096, 65536] } else { &[64, 256, 1024, 4096, 16384, 65536] };
            (
                "Figure 13: object sizes, half writes",
                "object size (bytes)",
                Shown::MeanLatency,
                sizes(all, true, 50),
            )
        }
        Some("17") => {
            let of = |senders: usize| {
                place(senders.to_string(), 1024, true, Load::Mix { write_percent: 50, senders, batch: 1 })
            };
            let all: &[usize] = if quick { &[1, 4] } else { &[1, 2, 4, 8] };
            (
                "Figure 17: senders, 1 KiB, half writes",
                "senders",
                Shown::MeanLatency,
                all.iter().copied().map(of).collect(),
            )
        }
        Some("18") => {
            let of = |percent: u32| place(format!("{percent} % writes"), 4096, true, mix(percent));
            (
                "Figure 18: access patterns, 4 KiB",
                "share of writes",
                Shown::MeanLatency,
                [5, 50, 95].map(of).to_vec(),
            )
        }
        Some("19") => {
            let of = |batch: usize| {
                place(batch.to_string(), 1024, false, Load::Mix { write_percent: 100, senders: 1, batch })
            };
            let all: &[usize] = if quick { &[1, 8] } else { &[1, 2, 4, 8, 16] };
            (
                "Figure 19: batches of 1 KiB writes",
                "requests in a batch",
                Shown::Throughput,
                all.iter().copied().map(of).collect(),
            )
        }
        Some(other) => bail!("there is no figure {other}; 8a, 8b, 9, 11, 12, 13, 17, 18 and 19 are"),
    };
    let chosen: &[System] = match (args.system.is_empty(), args.figure.as_deref()) {
        (false, _) => &args.system,
        (true, Some("12")) => &[System::Wflush, System::WRflush, System::Farm, System::Darpc],
        (true, _) => &System::ALL,
    };
    let name = args.figure.as_ref().map_or("rpc-writes".to_owned(), |figure| format!("rpc-figure-{figure}"));
    let kind = if matches!(shown, Shown::Seconds) || args.figure.as_deref() == Some("11") {
        ChartKind::Bars
    } else {
        ChartKind::Lines
    };
    Ok(Plan { name, title, x_label, shown, kind, places, systems: chosen.to_vec() })
}

/// Runs a figure: all systems in turn at a place, round by round, because a machine's speed drifts.
pub(super) fn run(plan: &Plan, args: &RpcArgs) -> anyhow::Result<Vec<Point>> {
    let objects_of = |len: usize| args.objects.unwrap_or(2000).min((256 << 20) / len as u32).max(16);
    let fits = |place: &Place, system: &System| place.object_len <= system.object_max();
    let steps: usize =
        plan.places.iter().map(|place| plan.systems.iter().filter(|s| fits(place, s)).count()).sum();
    let rounds = args.rounds();
    let mut progress = Progress::new(steps * rounds as usize);
    let scratch = Site::new(&args.scratch, 512 << 20)?;
    let mut points = Vec::new();
    let mut serial = 0;
    for place in &plan.places {
        let mut outcomes: Vec<(System, Vec<Point>)> =
            plan.systems.iter().filter(|s| fits(place, s)).map(|s| (*s, Vec::new())).collect();
        for round in 0..rounds {
            for (system, rounds) in &mut outcomes {
                progress.step(&format!("{} at {}, round {}", system.label(), place.x, round + 1));
                serial += 1;
                let objects = objects_of(place.object_len);
                let directory = scratch.root().join(serial.to_string());
                let point =
                    one(*system, place, args, objects, directory.clone(), u64::from(round) + args.seed)
                        .with_context(|| format!("{} at {}", system.label(), place.x))?;
                rounds.push(point);
                std::fs::remove_dir_all(&directory).ok();
            }
        }
        points.extend(outcomes.into_iter().filter_map(|(_, rounds)| median(rounds)));
    }
    progress.end();
    Ok(points)
}

/// The round in the middle.
fn median(mut rounds: Vec<Point>) -> Option<Point> {
    rounds.sort_by(|a, b| a.operations_per_second.total_cmp(&b.operations_per_second));
    let middle = rounds.len() / 2;
    rounds.into_iter().nth(middle)
}

fn one(
    system: System,
    place: &Place,
    args: &RpcArgs,
    objects: u32,
    directory: std::path::PathBuf,
    seed: u64,
) -> anyhow::Result<Point> {
    let batch = if let Load::Mix { batch, .. } = place.load { batch } else { 1 };
    let setup = Setup {
        link: args.link,
        log: args.log,
        objects,
        object_len: place.object_len,
        processing: if place.heavy { HEAVY } else { Duration::ZERO },
        threads: if place.heavy { args.threads.unwrap_or(HEAVY_THREADS) } else { 1 },
        batch,
        scans: matches!(place.load, Load::Ycsb(_)),
        slow_beyond: args.slow_beyond,
    };
    let mut site = RpcSite::start(system, &setup, directory)?;
    let outcome = match place.load {
        Load::Mix { write_percent, senders, batch } => {
            let mix = Mix { write_percent, theta: THETA, senders, batch, seconds: args.seconds(), seed };
            load::run(&site, objects, &mix)?
        }
        Load::Ycsb(workload) => ycsb::run(&site, objects, workload, args.seconds(), seed)?,
        Load::Failure { write_percent, availability } => {
            let operations = if args.quick { FAILURE_OPERATIONS / 2 } else { FAILURE_OPERATIONS };
            let survived = failure::run(&mut site, objects, operations, write_percent, availability, seed)?;
            let mut point = of(place, system, &Outcome::new()?);
            point.operations_per_second = operations as f64 / survived.seconds;
            point.seconds = survived.seconds;
            (point.failures, point.kept, point.resent) = (survived.failures, survived.kept, survived.resent);
            return Ok(point);
        }
    };
    Ok(of(place, system, &outcome))
}

fn of(place: &Place, system: System, outcome: &Outcome) -> Point {
    let us = |nanoseconds: u64| nanoseconds as f64 / 1e3;
    let mut all = outcome.writes.clone();
    // Same bounds: they add.
    let _ = all.add(&outcome.reads);
    Point {
        x: place.x.clone(),
        system,
        operations_per_second: outcome.operations as f64 / outcome.seconds.max(1e-9),
        mean_us: all.mean() / 1e3,
        p50_us: us(all.value_at_quantile(0.5)),
        p99_us: us(all.value_at_quantile(0.99)),
        write_p99_us: us(outcome.writes.value_at_quantile(0.99)),
        read_p99_us: us(outcome.reads.value_at_quantile(0.99)),
        slowed: outcome.slowed,
        seconds: outcome.seconds,
        failures: 0,
        kept: 0,
        resent: 0,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::bench::rpc) fn point(x: &str, system: System, rate: f64, p99_us: f64) -> Point {
        Point {
            x: x.to_owned(),
            system,
            operations_per_second: rate,
            mean_us: p99_us / 2.0,
            p50_us: p99_us / 2.0,
            p99_us,
            write_p99_us: p99_us,
            read_p99_us: p99_us,
            slowed: 0,
            seconds: 1.0,
            failures: 0,
            kept: 0,
            resent: 0,
        }
    }

    #[test]
    fn the_median_round_counts() {
        let rounds = [30.0, 10.0, 20.0].map(|rate| point("1K", System::Farm, rate, 1.0));
        assert_eq!(median(rounds.to_vec()).expect("one").operations_per_second, 20.0);
        assert!(median(Vec::new()).is_none());
    }
}
