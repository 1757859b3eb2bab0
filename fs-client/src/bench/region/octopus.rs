//! `cuttlefs bench octopus`: a file system's clients, each a process with a file of its own (Figure 16).
//!
//! As Octopus does, a client looks the file up by an RPC before each access, and then moves the data. The processes are
//! this program again, under a hidden name (`octopus_client`); the pool's memory is 18 of 35 parts of the data.

use super::campaign::{self, Case, Workload};
use super::figures::{Panel, THETA, charts, size_name};
use super::file_load::{self, Load};
use super::interrupt;
use super::load::{Outcome, Timing};
use super::octopus_client::Clients;
use super::policy::Policy;
use super::pool::{ScratchPool, fill_file};
use super::results::Figure;
use super::server::RegionServer;
use super::settings::{CommonArgs, Settings};
use super::volume;
use crate::bench::chart::Kind;
use clap::Args;
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::size::ByteSize;

/// DRAM in percent of the data: 18 of 35 GB in the paper.
const DRAM_PERCENT: u32 = 18 * 100 / 35;
/// The number of the paper's figure.
const FIGURE: u8 = 16;

/// Arguments of `cuttlefs bench octopus`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  cuttlefs bench octopus
  cuttlefs bench octopus --processes 32 --size 32G --dram 51")]
pub struct OctopusArgs {
    /// Client processes, each with a file of its own
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    processes: u16,
    #[command(flatten)]
    common: CommonArgs,
}

/// Runs the benchmark, prints its table, writes its files.
///
/// # Errors
/// Says what is missing or failing; what was made is removed in any case.
pub fn run_octopus(args: &OctopusArgs) -> anyhow::Result<()> {
    let settings = Settings::new(&args.common)?;
    let dram_percent = args.common.dram.unwrap_or(DRAM_PERCENT);
    interrupt::watch()?;
    let processes = usize::from(args.processes);
    let policies = settings.policies(&[Policy::Pin, Policy::Term, Policy::Rpc, Policy::Odp]);
    let places = settings.choose(&[(0, 4096), (0, 16384), (100, 4096), (100, 16384)], &[(0, 4096)]);
    let case = |&(write_percent, bytes): &(u32, u64)| Case {
        panel: "access",
        x: format!("{} {}", if write_percent == 0 { "read" } else { "write" }, size_name(bytes)),
        load: Load { threads: processes, ..settings.load(bytes, write_percent, THETA) },
        dram_percent,
        workers: settings.args.workers,
        policies: policies.clone(),
    };
    let cases: Vec<Case> = places.iter().map(case).collect();
    cuttlefs_common::tell!("making a pool of {} with {processes} files", ByteSize(settings.size_bytes));
    let pool = ScratchPool::format(&settings.args.scratch, None, settings.size_bytes)?;
    let files =
        Files { processes, bytes: pool.file_bytes() / processes as u64 / PAGE_SIZE_U64 * PAGE_SIZE_U64 };
    pool.with_filler(|volume| {
        (0..processes).try_for_each(|index| fill_file(volume, &file_name(index), files.bytes))
    })?;
    let results = campaign::run(&pool, &files, &settings, &settings.timing, &cases)?;
    let setup = format!(
        "{processes} processes, each on {} over {}, {dram_percent} % DRAM, theta {THETA}",
        ByteSize(files.bytes),
        settings.args.link.label(),
    );
    let panel = Panel { key: "access", x_label: "operation and size", kind: Kind::Bars, logarithmic: true };
    let charts = charts(&[panel], &results.points, None);
    Figure::new("figure-16", "File system clients (Figure 16)", Some(FIGURE), setup, panel.x_label, results)
        .publish(&settings.args.out, &charts)
}

fn file_name(index: usize) -> String {
    format!("file.{index}")
}

/// Files of one size, one a process.
struct Files {
    processes: usize,
    bytes: u64,
}

impl Workload for Files {
    fn preload(&self, _: &ScratchPool, server: &RegionServer, bytes: u64) -> anyhow::Result<()> {
        let volume = server.connect(1)?;
        let each = (bytes / self.processes as u64).min(self.bytes);
        for index in 0..self.processes {
            file_load::scan(&volume::open(&volume, &file_name(index))?, each)?;
        }
        volume.shut_down();
        Ok(())
    }

    fn run(
        &self,
        _: &ScratchPool,
        server: &RegionServer,
        load: &Load,
        timing: &Timing,
        at_phase: &mut dyn FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<Outcome> {
        let names: Vec<String> = (0..self.processes).map(file_name).collect();
        let clients = Clients::start(server.endpoint(), &names, self.bytes, load, timing)?;
        clients.run(timing, at_phase)
    }
}
