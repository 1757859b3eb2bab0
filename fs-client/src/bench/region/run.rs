//! `cuttlefs bench region`: one large file under one of the paper's figures, or under a load of one's own.

use super::campaign::{self, Results};
use super::dynamic::recovery;
use super::figures::{self, Plan, THETA};
use super::interrupt;
use super::load::Timing;
use super::pool::ScratchPool;
use super::results::Figure;
use super::settings::{CommonArgs, Settings, check_value_bytes};
use anyhow::ensure;
use clap::Args;
use cuttlefs_common::size::ByteSize;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Seconds of figure 11, half of it after the change: the paper has 120.
const DYNAMIC_SECONDS: u64 = 30;
const DYNAMIC_SECONDS_QUICK: u64 = 4;

/// Arguments of `cuttlefs bench region`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  cuttlefs bench region   4 KiB reads, everything in memory and half of it
  cuttlefs bench region --figure 8   read throughput by size, as the paper's Figure 8
  cuttlefs bench region --figure 14 --link shm --settle
  cuttlefs bench region --value-size 256,4K --read-ratio 50 --dram 20 --policy pin,term,rpc
  cuttlefs bench region --figure 15 --data /mnt/a/pool,/mnt/b/pool

Everything runs on a scratch pool in --scratch, which is removed. fio is needed for the disk's own
figures and the bound; a memory cgroup (root, or a delegated one) for odp, rpc and rpc-buffer.")]
pub struct RegionArgs {
    /// Figure of the paper to run, 8 to 15
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(8..=15))]
    figure: Option<u8>,
    /// Bytes of a value; several are measured one after the other [default: 4K, or the figure's]
    #[arg(long, value_delimiter = ',', value_name = "SIZE,...")]
    value_size: Vec<ByteSize>,
    /// Share of reads, without --figure
    #[arg(long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=100))]
    read_ratio: u32,
    /// Exponent of Zipf's law, 0 for uniform, without --figure
    #[arg(long, value_name = "THETA", default_value_t = THETA)]
    theta: f64,
    /// Files to make, or devices to format (all on them is lost), for the pool's data; several with --figure 15
    #[arg(long, value_delimiter = ',', value_name = "PATH,...")]
    data: Vec<PathBuf>,
    #[command(flatten)]
    common: CommonArgs,
}

/// Runs the benchmark, prints its tables, writes its files.
///
/// # Errors
/// Says what is missing or failing; what was made is removed in any case.
pub fn run_region(args: &RegionArgs) -> anyhow::Result<()> {
    let settings = Settings::new(&args.common)?;
    ensure!((0.0..=2.0).contains(&args.theta), "--theta must be between 0 (uniform) and 2");
    ensure!(
        args.data.len() <= 1 || args.figure == Some(15),
        "several --data are what --figure 15 compares; name one"
    );
    let sizes =
        args.value_size.iter().map(|size| check_value_bytes(size.0)).collect::<anyhow::Result<Vec<_>>>()?;
    let plan = match args.figure {
        Some(figure) => figures::plan(figure, &settings, &sizes)?,
        None => figures::plan_of_points(&settings, &sizes, 100 - args.read_ratio, args.theta),
    };
    interrupt::watch()?;
    let timing = timing(&settings, &plan);
    let mut results = Results::default();
    let devices: Vec<Option<&Path>> =
        if args.data.is_empty() { vec![None] } else { args.data.iter().map(|p| Some(p.as_path())).collect() };
    for device in &devices {
        let name = device.map_or_else(|| "scratch".to_owned(), |path| path.display().to_string());
        let cases: Vec<_> = plan
            .cases
            .iter()
            .cloned()
            .map(|case| if case.x.is_empty() { campaign::Case { x: name.clone(), ..case } } else { case })
            .collect();
        cuttlefs_common::tell!("making a pool of {} on {name}", ByteSize(settings.size_bytes));
        let pool = ScratchPool::format(&settings.args.scratch, *device, settings.size_bytes)?;
        pool.fill()?;
        let measured = campaign::run(&pool, &campaign::OneFile, &settings, &timing, &cases)?;
        results.points.extend(measured.points);
        measured.notes.into_iter().for_each(|note| results.note(note));
    }
    let change_at = plan.dynamic.then(|| timing.measure.as_secs_f64() / 2.0);
    if let Some(change_at) = change_at {
        // What was measured to compare with did not change its place in memory.
        results.points.retain(|point| !point.policy.holds_everything());
        for line in recoveries(&results, change_at) {
            results.note(line);
        }
        results.note(
            "the paper (section 6.4): TeRM falls by 6.82 % and is back in one second, ODP by 1.77 times and RPC by \
             3.03 times, back after six seconds"
                .to_owned(),
        );
    }
    let setup = setup(&settings, &plan, &devices);
    let charts = figures::charts(&plan.panels, &results.points, change_at);
    let x_label = plan.panels.first().map_or("", |panel| panel.x_label);
    Figure::new(&plan.name, &plan.title, plan.paper_figure, setup, x_label, results)
        .publish(&settings.args.out, &charts)
}

fn timing(settings: &Settings, plan: &Plan) -> Timing {
    let mut timing = settings.timing;
    if plan.dynamic {
        timing.change_hotspots = true;
        if settings.args.seconds.is_none() {
            let seconds = if settings.args.quick { DYNAMIC_SECONDS_QUICK } else { DYNAMIC_SECONDS };
            timing.measure = Duration::from_secs(seconds);
        }
    }
    timing
}

fn recoveries(results: &Results, change_at: f64) -> Vec<String> {
    let of = |point: &super::point::Point| {
        recovery(&point.timeline, change_at).map(|seen| format!("{}: {seen}", point.policy.label()))
    };
    results.points.iter().filter_map(of).collect()
}

/// What was the same for all points, in words.
fn setup(settings: &Settings, plan: &Plan, devices: &[Option<&Path>]) -> String {
    let dram = match plan.paper_figure {
        Some(14) => "DRAM as shown".to_owned(),
        _ => format!("{} % DRAM", settings.dram_percent),
    };
    let device = match devices {
        [Some(path)] => format!(", {}", path.display()),
        _ => String::new(),
    };
    let clustered = match settings.args.clustered.0 {
        0 => String::new(),
        _ => format!(", runs of {}", settings.args.clustered),
    };
    format!(
        "{} over {}, {dram}, {} client threads{clustered}{device}",
        ByteSize(settings.size_bytes),
        settings.args.link.label(),
        settings.threads,
    )
}
