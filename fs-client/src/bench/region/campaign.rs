//! Runs the points of a figure: one server for each policy and share of DRAM, all loads of it one after the other.
//!
//! Everything that is compared is measured in the same run on the same pool: the loads with everything in memory
//! first, the disk alone, and then the policies; with several rounds, all of them again, in turn.
//!
//! A policy that cannot be had here (no cgroup, no NIC on the link) is left out with a note that says
//! why. Wrong data and failing loads end the run.

use super::cgroup::MemoryCgroup;
use super::disk::Disk;
use super::file_load::{self, FileLoad, Load};
use super::interrupt;
use super::load::{self, Outcome, Timing};
use super::point::{Point, disk_operations_per_value, median, twice_per_value};
use super::policy::Policy;
use super::pool::{FILE_NAME, ScratchPool};
use super::server::{RegionServer, ServerOptions, own_bytes};
use super::settings::{Preload, Settings, memory_bytes};
use super::volume;
use crate::bench::link::Link;
use crate::bench::report::Progress;
use anyhow::Context as _;
use cuttlefs_common::size::ByteSize;
use std::time::Duration;

/// Warm-up with everything in memory: there is no placement to wait for.
const PIN_WARMUP: Duration = Duration::from_secs(1);

/// A place in a figure: what is run there, by which policies.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) panel: &'static str,
    pub(super) x: String,
    pub(super) load: Load,
    pub(super) dram_percent: u32,
    pub(super) workers: Option<usize>,
    pub(super) policies: Vec<Policy>,
}

/// What is run at a place.
pub(super) trait Workload {
    /// Fills a server's memory with `bytes` of data, as far as it has them.
    ///
    /// # Errors
    /// As the server says.
    fn preload(&self, pool: &ScratchPool, server: &RegionServer, bytes: u64) -> anyhow::Result<()>;

    /// Runs a load; `at_phase` is to be called when measuring begins and when it is over.
    ///
    /// # Errors
    /// Wrong data, a failing operation, Ctrl-C.
    fn run(
        &self,
        pool: &ScratchPool,
        server: &RegionServer,
        load: &Load,
        timing: &Timing,
        at_phase: &mut dyn FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<Outcome>;
}

/// Threads on one large file.
pub(super) struct OneFile;

impl Workload for OneFile {
    fn preload(&self, pool: &ScratchPool, server: &RegionServer, bytes: u64) -> anyhow::Result<()> {
        let volume = server.connect(1)?;
        file_load::scan(&volume::open(&volume, FILE_NAME)?, bytes.min(pool.file_bytes()))?;
        volume.shut_down();
        Ok(())
    }

    fn run(
        &self,
        pool: &ScratchPool,
        server: &RegionServer,
        load: &Load,
        timing: &Timing,
        at_phase: &mut dyn FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<Outcome> {
        let volumes = volume::connect_all(server.endpoint(), load.threads)?;
        let files = volumes
            .iter()
            .map(|volume| volume::open(volume, FILE_NAME))
            .collect::<anyhow::Result<Vec<_>>>()?;
        let file_load = FileLoad::new(load, pool.file_bytes(), None)?;
        let make = |index: usize| Ok(file_load.operation(index as u64, &files[index % files.len()]));
        let outcome = load::run(load.threads, timing, &make, at_phase)?;
        for volume in &volumes {
            volume.shut_down();
        }
        Ok(outcome)
    }
}

/// What one server is started with, and what it runs.
struct Turn<'a> {
    policy: Policy,
    dram_percent: u32,
    workers: Option<usize>,
    cases: Vec<&'a Case>,
}

/// Points and what is to be known about them.
#[derive(Debug, Default)]
pub(super) struct Results {
    pub(super) points: Vec<Point>,
    pub(super) notes: Vec<String>,
}

impl Results {
    /// Says something once.
    pub(super) fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }
}

/// What this machine can do.
#[derive(Clone, Debug)]
pub(super) struct Abilities {
    cgroup: Result<(), String>,
}

impl Abilities {
    /// Looks.
    pub(super) fn look() -> Self {
        let cgroup = MemoryCgroup::new(64 << 20).map(drop).map_err(|error| format!("{error:#}"));
        Self { cgroup }
    }

    /// Why a policy cannot be had.
    pub(super) fn refusal(&self, policy: Policy, link: Link) -> Option<String> {
        let label = policy.label();
        if policy.needs_nic() && link == Link::Shm {
            return Some(format!("{label} is left out: over shm no NIC translates; use --link tcp or unix"));
        }
        match &self.cgroup {
            Err(error) if policy.page_cached() => {
                Some(format!("{label} is left out: its memory cannot be limited, {error}"))
            }
            _ => None,
        }
    }
}

/// Runs the cases on a filled pool.
///
/// # Errors
/// Wrong data, a failing load, Ctrl-C.
pub(super) fn run(
    pool: &ScratchPool,
    workload: &dyn Workload,
    settings: &Settings,
    timing: &Timing,
    cases: &[Case],
) -> anyhow::Result<Results> {
    let abilities = Abilities::look();
    let mut results = Results::default();
    let turns = turns(cases, &abilities, settings.args.link, &mut results);
    let steps: usize =
        turns.iter().map(|turn| turn.cases.len()).sum::<usize>() * settings.args.rounds as usize;
    let mut progress = Progress::new(steps + 1);
    let mut disk = Disk::new(pool);
    progress.step("the disk alone (fio)");
    for case in cases {
        interrupt::check()?;
        let Load { value_bytes, write_percent, threads, .. } = case.load;
        // Which of the two a load needs is known only afterwards; both are cheap and measured once for each size.
        disk.reads_per_second(pool, value_bytes, threads);
        if write_percent > 0 {
            disk.writes_per_second(pool, value_bytes, threads);
        }
    }
    let mut left = steps;
    for _ in 0..settings.args.rounds {
        for turn in &turns {
            let outcome = one_turn(pool, workload, settings, timing, turn, &mut |case| {
                let seconds = left as u64 * (timing.warmup + timing.measure).as_secs();
                progress.step(&format!(
                    "{} {} {}, {} % DRAM; about {} min {} s left",
                    turn.policy.label(),
                    case.panel,
                    case.x,
                    turn.dram_percent,
                    seconds / 60,
                    seconds % 60
                ));
                left = left.saturating_sub(1);
            });
            for point in outcome? {
                merge(&mut results.points, point);
            }
        }
    }
    progress.end();
    judge(&mut results.points, pool, &mut disk);
    if turns.iter().any(|turn| turn.policy.page_cached()) {
        let own = ByteSize(own_bytes(settings.args.workers, pool.pool_bytes()));
        results.note(format!(
            "ODP, RPC and RPC_buffer ran in a memory cgroup of the DRAM shown and {own} for the server itself; their \
             misses are what their process had the disk read"
        ));
    }
    if let Some(missing) = &disk.missing {
        results.note(format!("the disk's own figures and the bound are left out: {missing}"));
    }
    // Points in the order the figure has them, not in that of the servers.
    let order = |point: &Point| {
        let case = cases.iter().position(|case| case.panel == point.panel && case.x == point.x);
        let within = case.and_then(|at| cases[at].policies.iter().position(|policy| *policy == point.policy));
        (case, within)
    };
    results.points.sort_by_key(order);
    Ok(results)
}

/// Servers to start, with everything in memory first. That one runs every load, for it is what all are judged by.
fn turns<'a>(cases: &'a [Case], abilities: &Abilities, link: Link, results: &mut Results) -> Vec<Turn<'a>> {
    let mut turns: Vec<Turn<'a>> = Vec::new();
    let mut add = |policy: Policy, case: &'a Case| {
        if let Some(refusal) = abilities.refusal(policy, link) {
            return results.note(refusal);
        }
        let dram_percent = if policy.holds_everything() { 100 } else { case.dram_percent };
        let found = turns.iter_mut().find(|turn| {
            turn.policy == policy && turn.dram_percent == dram_percent && turn.workers == case.workers
        });
        match found {
            Some(turn) => turn.cases.push(case),
            None => turns.push(Turn { policy, dram_percent, workers: case.workers, cases: vec![case] }),
        }
    };
    let mut pinned: Vec<(Load, Option<usize>)> = Vec::new();
    for case in cases {
        if !pinned.contains(&(case.load, case.workers)) {
            pinned.push((case.load, case.workers));
            add(Policy::Pin, case);
        }
    }
    for case in cases {
        for &policy in case.policies.iter().filter(|policy| !policy.holds_everything()) {
            add(policy, case);
        }
    }
    turns
}

/// One server and its loads.
fn one_turn(
    pool: &ScratchPool,
    workload: &dyn Workload,
    settings: &Settings,
    timing: &Timing,
    turn: &Turn<'_>,
    step: &mut dyn FnMut(&Case),
) -> anyhow::Result<Vec<Point>> {
    let options = ServerOptions {
        policy: turn.policy,
        link: settings.args.link,
        memory_bytes: memory_bytes(pool.file_bytes(), pool.pool_bytes(), turn.dram_percent),
        workers: turn.workers,
    };
    let server = RegionServer::start(pool, &options)?;
    if settings.args.preload == Preload::Scan {
        workload
            .preload(pool, &server, options.memory_bytes)
            .with_context(|| format!("reading ahead of {}", turn.policy.label()))?;
    }
    let timing = Timing {
        warmup: if turn.policy.holds_everything() { PIN_WARMUP.min(timing.warmup) } else { timing.warmup },
        ..*timing
    };
    let mut points = Vec::new();
    for case in &turn.cases {
        step(case);
        let mut counts = Vec::new();
        let mut at_phase = || {
            counts.push(server.counts()?);
            Ok(())
        };
        let outcome = workload
            .run(pool, &server, &case.load, &timing, &mut at_phase)
            .with_context(|| format!("{}, {} {}", turn.policy.label(), case.panel, case.x))?;
        let [before, after] = counts[..] else { anyhow::bail!("the server was not asked twice") };
        let (reads, writes) = disk_operations_per_value(turn.policy, &case.load, &outcome, &before, &after);
        tracing::info!(
            policy = turn.policy.label(),
            x = case.x,
            charged = server.charged_bytes(),
            ?before,
            ?after
        );
        points.push(Point {
            panel: case.panel,
            x: case.x.clone(),
            policy: turn.policy,
            load: case.load,
            dram_percent: turn.dram_percent,
            workers: turn.workers,
            operations_per_second: outcome.operations_per_second(),
            rounds: vec![outcome.operations_per_second()],
            p50_us: outcome.latency_us(0.50),
            p99_us: outcome.latency_us(0.99),
            disk_reads_per_value: reads,
            disk_writes_per_value: writes,
            twice_per_value: twice_per_value(&outcome, &before, &after),
            pin_operations_per_second: None,
            disk_reads_per_second: None,
            disk_writes_per_second: None,
            bound_operations_per_second: None,
            timeline: if timing.change_hotspots { outcome.timeline } else { Vec::new() },
        });
    }
    server.stop()?;
    Ok(points)
}

/// Adds a round to its point. The median round's figures stay.
fn merge(points: &mut Vec<Point>, new: Point) {
    let same = |point: &&mut Point| (point.panel, &point.x, point.policy) == (new.panel, &new.x, new.policy);
    let Some(point) = points.iter_mut().find(same) else {
        return points.push(new);
    };
    let mut rounds = std::mem::take(&mut point.rounds);
    rounds.push(new.operations_per_second);
    let middle = median(&rounds);
    if new.operations_per_second == middle {
        *point = new;
    }
    // With an even number the middle may be a round whose other figures are gone; throughput is what is compared.
    point.operations_per_second = middle;
    point.rounds = rounds;
}

/// Gives every point what it is judged by, and the figure's other places the load with everything in memory.
fn judge(points: &mut Vec<Point>, pool: &ScratchPool, disk: &mut Disk) {
    let pinned: Vec<Point> = points.iter().filter(|point| point.policy.holds_everything()).cloned().collect();
    for point in points.iter_mut() {
        let pin = pinned.iter().find(|pin| pin.load == point.load && pin.workers == point.workers);
        point.pin_operations_per_second = pin.map(|pin| pin.operations_per_second);
        let Load { value_bytes, threads, .. } = point.load;
        point.disk_reads_per_second = disk.reads_per_second(pool, value_bytes, threads);
        if point.disk_writes_per_value > 0.0 {
            point.disk_writes_per_second = disk.writes_per_second(pool, value_bytes, threads);
        }
        point.judge();
    }
    // Places that share a load with another one show the same upper bound.
    let mut copies = Vec::new();
    for point in points.iter() {
        let has_pin =
            |at: &&Point| at.policy.holds_everything() && at.panel == point.panel && at.x == point.x;
        if points.iter().chain(&copies).any(|at| has_pin(&at)) {
            continue;
        }
        if let Some(pin) = pinned.iter().find(|pin| pin.load == point.load && pin.workers == point.workers) {
            copies.push(Point { panel: point.panel, x: point.x.clone(), ..pin.clone() });
        }
    }
    for mut copy in copies {
        copy.pin_operations_per_second = Some(copy.operations_per_second);
        copy.judge();
        points.push(copy);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(x: &str, dram_percent: u32, policies: &[Policy]) -> Case {
        let load = Load { value_bytes: 4096, write_percent: 0, theta: 0.99, clustered_bytes: 0, threads: 8 };
        Case { panel: "a", x: x.to_owned(), load, dram_percent, workers: None, policies: policies.to_vec() }
    }

    #[test]
    fn one_server_for_all_loads_and_memory_first() {
        let cases = [
            case("20", 20, &[Policy::Term, Policy::Rpc]),
            case("50", 50, &[Policy::Pin, Policy::Term]),
            case("50b", 50, &[Policy::Term]),
        ];
        let abilities = Abilities { cgroup: Err("no right".to_owned()) };
        let mut results = Results::default();
        let turns = turns(&cases, &abilities, Link::Tcp, &mut results);
        let got: Vec<_> =
            turns.iter().map(|turn| (turn.policy, turn.dram_percent, turn.cases.len())).collect();
        assert_eq!(got, [(Policy::Pin, 100, 1), (Policy::Term, 20, 1), (Policy::Term, 50, 2)]);
        assert!(results.notes[0].contains("RPC is left out") && results.notes[0].contains("no right"));
    }

    #[test]
    fn what_cannot_be_had_is_told_once() {
        let abilities = Abilities { cgroup: Ok(()) };
        assert_eq!(abilities.refusal(Policy::Odp, Link::Tcp), None);
        assert!(abilities.refusal(Policy::Odp, Link::Shm).is_some());
        let mut results = Results::default();
        results.note("a".to_owned());
        results.note("a".to_owned());
        assert_eq!(results.notes.len(), 1);
    }
}
