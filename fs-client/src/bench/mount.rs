//! `cuttlefs bench mount`: every row on one directory, or on two in turn.

use super::files::{self, FileParameters};
use super::fio_job::{self, FioParameters};
use super::items::{ITEMS, Item, Sample, Work, median};
use super::report::{self, Column, Header};
use super::site::Site;
use anyhow::Context as _;
use clap::Args;
use cuttlefs_common::size::ByteSize;
use std::path::PathBuf;

/// Arguments of `cuttlefs bench mount`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  cuttlefs bench mount /mnt/cuttle
  cuttlefs bench mount /mnt/cuttle --jobs 4 --size 1G --json result.json
  cuttlefs bench mount /mnt/cuttle --baseline /srv/nfs --rounds 3")]
pub struct BenchMountArgs {
    /// Directory to measure: a mount point, or any directory in it
    pub mount: PathBuf,
    /// Bytes of each job's file for sequential and random access
    #[arg(long, default_value = "256M", value_name = "SIZE")]
    pub size: ByteSize,
    /// How many do each thing at once
    #[arg(long, short = 'p', default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub jobs: u32,
    /// Seconds of each random access row
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Small files of each job
    #[arg(long, default_value_t = 200, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub small_files: u32,
    /// Bytes of a small file
    #[arg(long, default_value = "128K", value_name = "SIZE")]
    pub small_size: ByteSize,
    /// Empty files of each job, for the metadata rows
    #[arg(long, default_value_t = 5000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub names: u32,
    /// Times the whole table is run; medians are printed
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Run only these rows and what they need (keys as in the JSON)
    #[arg(long, value_delimiter = ',', value_name = "ROW,...")]
    pub only: Vec<String>,
    /// Run the same on this directory too, in turn, and print the ratio
    #[arg(long, value_name = "DIR")]
    pub baseline: Option<PathBuf>,
    /// Also write the figures to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Largest small file: larger ones are what `--size` is for, and each thread holds one in memory.
const SMALL_SIZE_MAX: u64 = 64 << 20;

/// Runs the benchmark and prints the table.
///
/// # Errors
/// Says what is missing, full or failing. The directories worked in are removed in any case.
pub fn run(args: BenchMountArgs) -> anyhow::Result<()> {
    anyhow::ensure!(args.size.0 >= 1 << 20, "--size must be at least 1M, the block of the sequential rows");
    anyhow::ensure!(
        (1..=SMALL_SIZE_MAX).contains(&args.small_size.0),
        "--small-size must be between 1 byte and {}",
        ByteSize(SMALL_SIZE_MAX)
    );
    let items = chosen(&args.only)?;
    let jobs = u64::from(args.jobs);
    let wanted_bytes = args
        .size
        .0
        .saturating_add(u64::from(args.small_files).saturating_mul(args.small_size.0))
        .saturating_mul(jobs);
    let mut sites = vec![Site::new(&args.mount, wanted_bytes)?];
    if let Some(baseline) = &args.baseline {
        sites.push(Site::new(baseline, wanted_bytes).context("--baseline")?);
    }

    let mut samples: Vec<Vec<Vec<Sample>>> = vec![vec![Vec::new(); items.len()]; sites.len()];
    let mut progress = report::Progress::new(items.len() * sites.len() * args.rounds as usize);
    for round in 0..args.rounds as usize {
        for (row, item) in items.iter().enumerate() {
            for turn in 0..sites.len() {
                // Who goes first alternates: the first of a pair must not always find the colder machine.
                let which = (turn + round) % sites.len();
                progress.step(&format!("{}: {}", sites[which].label, item.name));
                let sample = run_item(item, &sites[which], &args)
                    .with_context(|| format!("{} on {}", item.name, sites[which].label))?;
                samples[which][row].push(sample);
            }
        }
    }
    progress.end();

    let columns: Vec<Column> = sites
        .iter()
        .zip(&samples)
        .map(|(site, rows)| Column {
            label: site.label.clone(),
            samples: rows.iter().filter_map(|samples| median(samples)).collect(),
        })
        .collect();
    let header = Header {
        block_bytes: 1 << 20,
        size_bytes: args.size.0,
        small_bytes: args.small_size.0,
        small_files: args.small_files,
        names: args.names,
        jobs: args.jobs,
        seconds: args.seconds,
        rounds: args.rounds,
    };
    report::print(&header, &items, &columns);
    if let Some(path) = &args.json {
        let json = report::json(&header, &items, &columns)?;
        std::fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The rows named, with those before them that leave what they use; all if none is named.
fn chosen(only: &[String]) -> anyhow::Result<Vec<Item>> {
    for key in only {
        anyhow::ensure!(
            ITEMS.iter().any(|item| item.key == key),
            "there is no row `{key}`; the rows are {}",
            ITEMS.iter().map(|item| item.key).collect::<Vec<_>>().join(", ")
        );
    }
    let wants = |keys: &[&str]| only.iter().any(|key| keys.contains(&key.as_str()));
    Ok(ITEMS
        .iter()
        .filter(|item| {
            only.is_empty()
                || wants(&[item.key])
                || match item.key {
                    "sequential_write" => wants(&["sequential_read", "random_write", "random_read"]),
                    "small_write" => wants(&["small_read"]),
                    // Names are made, moved and removed, so that the next round finds an empty directory.
                    "create" | "rename" | "unlink" => {
                        wants(&["create", "stat_cold", "stat_warm", "read_directory", "rename", "unlink"])
                    }
                    _ => false,
                }
        })
        .copied()
        .collect())
}

fn run_item(item: &Item, site: &Site, args: &BenchMountArgs) -> anyhow::Result<Sample> {
    match item.work {
        Work::Fio(job) => {
            let parameters = FioParameters {
                size_bytes: args.size.0,
                jobs: args.jobs,
                seconds: args.seconds,
                filename: None,
            };
            fio_job::run(job, site.root(), &parameters)
        }
        Work::Files(work) => {
            let parameters = FileParameters {
                jobs: args.jobs,
                small_files: args.small_files,
                small_bytes: usize::try_from(args.small_size.0).context("--small-size")?,
                names: args.names,
            };
            files::run(work, site, &parameters)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(only: &[&str]) -> Vec<&'static str> {
        let only: Vec<_> = only.iter().map(|&key| key.to_owned()).collect();
        chosen(&only).expect("rows").iter().map(|item| item.key).collect()
    }

    #[test]
    fn rows_bring_what_they_need() {
        assert_eq!(keys(&[]).len(), ITEMS.len());
        assert_eq!(keys(&["random_read"]), ["sequential_write", "random_read"]);
        assert_eq!(keys(&["stat_cold"]), ["create", "stat_cold", "rename", "unlink"]);
        assert_eq!(keys(&["small_read"]), ["small_write", "small_read"]);
        let error = chosen(&["nonsense".to_owned()]).expect_err("no row").to_string();
        assert!(error.contains("sequential_write"), "{error}");
    }
}
