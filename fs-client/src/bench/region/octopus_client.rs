//! One client process of `bench octopus`, and those who start it.
//!
//! A client connects, opens its file, prints `ready` and waits for a line on its standard input, so that all begin at
//! once. It warms up, measures, and prints what it saw as one line of JSON. If its parent is gone, its input ends and
//! so does it.

use super::file_load::{FileLoad, Load};
use super::interrupt;
use super::load::{self, Outcome, Timing, histogram};
use super::volume;
use anyhow::{Context as _, bail, ensure};
use clap::Args;
use cuttlefs_common::rdma::Endpoint;
use serde::{Deserialize, Serialize};
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Name of the hidden subcommand.
const SUBCOMMAND: &str = "octopus-client";
/// What a client says when its file is open.
const READY: &str = "ready";
/// How often it is looked whether to end.
const LOOK: Duration = Duration::from_millis(100);

/// Arguments of a client process.
#[derive(Args, Clone, Debug)]
pub struct OctopusClientArgs {
    #[arg(long)]
    endpoint: Endpoint,
    #[arg(long)]
    name: String,
    #[arg(long)]
    file_bytes: u64,
    #[arg(long)]
    value_bytes: u64,
    #[arg(long)]
    write_percent: u32,
    #[arg(long)]
    theta: f64,
    #[arg(long)]
    clustered_bytes: u64,
    #[arg(long)]
    seed: u64,
    #[arg(long)]
    warmup_ms: u64,
    #[arg(long)]
    measure_ms: u64,
}

/// What a client saw.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Seen {
    operations: u64,
    seconds: f64,
    /// Latencies in nanoseconds, and how often each was seen.
    latencies: Vec<(u64, u64)>,
}

/// Runs a client process.
///
/// # Errors
/// Wrong data, a failing operation.
pub fn run_octopus_client(args: &OctopusClientArgs) -> anyhow::Result<()> {
    interrupt::watch()?;
    let load = Load {
        value_bytes: args.value_bytes,
        write_percent: args.write_percent,
        theta: args.theta,
        clustered_bytes: args.clustered_bytes,
        threads: 1,
    };
    let timing = Timing {
        warmup: Duration::from_millis(args.warmup_ms),
        settle: false,
        measure: Duration::from_millis(args.measure_ms),
        change_hotspots: false,
    };
    let volume = volume::connect(&args.endpoint, 1)?;
    let file = volume::open(&volume, &args.name)?;
    let file_load = FileLoad::new(&load, args.file_bytes, Some(&args.name))?;
    cuttlefs_common::say!("{READY}");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).context("cannot read the start sign")?;
    ensure!(!line.is_empty(), "the benchmark that started this is gone");
    let outcome = load::run(1, &timing, &|_| Ok(file_load.operation(args.seed, &file)), &mut || Ok(()))?;
    volume.shut_down();
    let latencies =
        outcome.latencies.iter_recorded().map(|step| (step.value_iterated_to(), step.count_at_value()));
    let seen =
        Seen { operations: outcome.operations, seconds: outcome.seconds, latencies: latencies.collect() };
    cuttlefs_common::say!("{}", serde_json::to_string(&seen).context("cannot encode what was seen")?);
    Ok(())
}

/// Client processes. Those that still run when this is dropped are ended.
pub(super) struct Clients {
    running: Vec<(Child, BufReader<ChildStdout>)>,
}

impl Clients {
    /// Starts one for each name and waits until all have opened their files.
    ///
    /// # Errors
    /// If one does not start.
    pub(super) fn start(
        endpoint: &Endpoint,
        names: &[String],
        file_bytes: u64,
        load: &Load,
        timing: &Timing,
    ) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut clients = Self { running: Vec::new() };
        for (index, name) in names.iter().enumerate() {
            let mut child = Command::new(&program)
                .args(["bench", SUBCOMMAND])
                .args(["--endpoint", &endpoint.to_string()])
                .args(["--name", name])
                .args(["--file-bytes", &file_bytes.to_string()])
                .args(["--value-bytes", &load.value_bytes.to_string()])
                .args(["--write-percent", &load.write_percent.to_string()])
                .args(["--theta", &load.theta.to_string()])
                .args(["--clustered-bytes", &load.clustered_bytes.to_string()])
                .args(["--seed", &index.to_string()])
                .args(["--warmup-ms", &timing.warmup.as_millis().to_string()])
                .args(["--measure-ms", &timing.measure.as_millis().to_string()])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .context("cannot start a client process")?;
            let output = child.stdout.take().context("a client process has no output")?;
            clients.running.push((child, BufReader::new(output)));
        }
        for (_, output) in &mut clients.running {
            let mut line = String::new();
            output.read_line(&mut line).context("cannot hear a client process")?;
            ensure!(line.trim_end() == READY, "a client process did not start; it says why above");
        }
        Ok(clients)
    }

    /// Lets all begin, and adds up what they saw.
    ///
    /// # Errors
    /// If one fails.
    pub(super) fn run(
        mut self,
        timing: &Timing,
        at_phase: &mut dyn FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<Outcome> {
        for (child, _) in &mut self.running {
            let input = child.stdin.as_mut().context("a client process has no input")?;
            input.write_all(b"go\n").context("a client process ended early; it says why above")?;
        }
        wait(timing.warmup)?;
        at_phase()?;
        wait(timing.measure)?;
        at_phase()?;
        let mut latencies = histogram()?;
        let (mut operations, mut seconds) = (0, 0.0f64);
        for (child, output) in &mut self.running {
            let mut line = String::new();
            output.read_line(&mut line).context("cannot hear a client process")?;
            let status = child.wait().context("cannot wait for a client process")?;
            if !status.success() {
                bail!("a client process failed ({status}); it says why above");
            }
            let seen: Seen = serde_json::from_str(&line).context("a client process said nothing of use")?;
            operations += seen.operations;
            seconds = seconds.max(seen.seconds);
            for (latency, count) in seen.latencies {
                latencies.record_n(latency, count).context("latencies do not add up")?;
            }
        }
        self.running.clear();
        Ok(Outcome { operations, seconds, latencies, timeline: Vec::new() })
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        for (child, _) in &mut self.running {
            // Children of ours that nobody has waited for; one that has ended already makes kill do nothing.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn wait(time: Duration) -> anyhow::Result<()> {
    let until = Instant::now() + time;
    while Instant::now() < until {
        interrupt::check()?;
        std::thread::sleep(LOOK.min(until.saturating_duration_since(Instant::now())));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_client_saw_survives_the_pipe() {
        let seen = Seen { operations: 5, seconds: 1.5, latencies: vec![(1000, 4), (90_000, 1)] };
        let text = serde_json::to_string(&seen).expect("encodes");
        assert!(!text.contains('\n'), "it is one line");
        assert_eq!(serde_json::from_str::<Seen>(&text).expect("parses"), seen);
    }
}
