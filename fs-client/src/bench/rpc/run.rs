//! `cuttlefs bench rpc`.

use super::figures;
use super::results;
use super::site::LogOn;
use super::system::System;
use crate::bench::link::Link;
use crate::bench::region::watch_interrupts;
use clap::Args;
use cuttlefs_common::persist::cache_lines;
use std::path::PathBuf;

/// Arguments of `cuttlefs bench rpc`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  cuttlefs bench rpc   writes whose processing takes 100 us, by object size
  cuttlefs bench rpc --figure 8a   throughput under heavy load, as the paper's Figure 8(a)
  cuttlefs bench rpc --figure 12 --link shm   a receiver that fails again and again
  cuttlefs bench rpc --system wflush,farm,darpc --rounds 5

Receiver and senders run in this process. The object store, and the log unless it is a DAX file or a
synced file, is EMULATED persistent memory: a file, written back by cache lines, which survives a
killed process and no power failure.")]
pub struct RpcArgs {
    /// Figure of the paper to run: 8a, 8b, 9, 11, 12, 13, 17, 18 or 19
    #[arg(long, value_name = "N")]
    pub(super) figure: Option<String>,
    /// What to compare [default: all, or the figure's]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "SYSTEM,...")]
    pub(super) system: Vec<System>,
    /// What carries the RPCs
    #[arg(long, value_enum, default_value_t = Link::Tcp)]
    pub(super) link: Link,
    /// What durable RPCs are logged on
    #[arg(long, value_enum, default_value_t = LogOn::PmemEmulated)]
    pub(super) log: LogOn,
    /// Directory for logs and objects, which is removed afterwards; a DAX mount for --log pmem
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub(super) scratch: PathBuf,
    /// Objects in the store (the paper: 50000)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=1_000_000))]
    pub(super) objects: Option<u32>,
    /// Receiver threads that execute requests of 100 us [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(super) executors: Option<u16>,
    /// Requests a receiver has taken and not executed, beyond which it slows a durable sender down
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub(super) slow_beyond: usize,
    /// Seconds of each point [default: 0.4; 0.2 with --quick]
    #[arg(long, value_name = "S")]
    pub(super) seconds: Option<f64>,
    /// Times everything is run, in turn; medians are shown [default: 2; 1 with --quick]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(super) rounds: Option<u32>,
    /// Of the random keys
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(super) seed: u64,
    /// Fewer points, less time: to see that it works
    #[arg(long)]
    pub(super) quick: bool,
    /// Directory for NAME.json, NAME.svg and NAME.png
    #[arg(long, value_name = "DIR", default_value = "./bench-results")]
    pub(super) out: PathBuf,
    #[arg(skip)]
    pub(super) threads: Option<usize>,
}

impl RpcArgs {
    pub(super) fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(if self.quick { 0.2 } else { 0.4 }).clamp(0.01, 3600.0)
    }

    pub(super) fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 2 })
    }
}

/// Runs the benchmark, prints its tables, writes its files.
///
/// # Errors
/// Says what is missing or failing; what was made is removed in any case.
pub fn run_rpc(args: &RpcArgs) -> anyhow::Result<()> {
    let args = RpcArgs { threads: args.executors.map(usize::from), ..args.clone() };
    watch_interrupts()?;
    let plan = figures::plan(&args)?;
    let points = figures::run(&plan, &args)?;
    let log = match args.log {
        LogOn::Pmem => "log on pmem (DAX)",
        LogOn::PmemEmulated => "log on EMULATED pmem",
        LogOn::File => "log on a synced file",
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let setup = format!(
        "{}, {log}, objects on EMULATED pmem ({}), {cores} cores, {} s a point, {} rounds",
        args.link.label(),
        cache_lines::instruction().label(),
        args.seconds(),
        args.rounds(),
    );
    results::publish(&plan, args.figure.as_deref().unwrap_or(""), &setup, &points, &args.out)
}
