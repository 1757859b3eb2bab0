//! `cuttlefs bench null`: random 4 KiB direct reads of resident data, in turn with a FUSE file system that does
//! nothing. The ratio is what cuttlefs leaves of what FUSE allows on this machine.
//!
//! The null file system is the fixture `cuttlefs-nullfs`, started here on a directory of our own and ended by
//! unmounting it, also after an error. Pairs are interleaved and who goes first alternates, so that a drifting
//! machine moves both; each ratio is that of one pair, and the median pair is printed.

use super::fio_job::{self, FioJob, FioParameters};
use super::items::Sample;
use super::report::{Progress, Table, coloured};
use super::site::Site;
use anyhow::{Context as _, bail, ensure};
use clap::Args;
use cuttlefs_common::size::ByteSize;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Arguments of `cuttlefs bench null`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  cuttlefs bench null /mnt/cuttle
  cuttlefs bench null /mnt/cuttle --jobs 1,4,8 --rounds 9 --json null.json

The data must stay resident: --size should be well below the server's --memory.")]
pub struct BenchNullArgs {
    /// Directory to measure
    pub mount: PathBuf,
    /// Bytes of the file that is read
    #[arg(long, default_value = "256M", value_name = "SIZE")]
    pub size: ByteSize,
    /// Readers at once; several are measured one after the other
    #[arg(long, short = 'p', value_delimiter = ',', default_value = "1,4", value_name = "N,...", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub jobs: Vec<u32>,
    /// Seconds of each run
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Pairs of runs
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// The null file system's binary [default: cuttlefs-nullfs beside this program]
    #[arg(long, value_name = "FILE")]
    pub nullfs: Option<PathBuf>,
    /// Fail if a median ratio is below this
    #[arg(long, value_name = "RATIO")]
    pub require: Option<f64>,
    /// Also write the figures to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// How long the null file system may take to mount or to end.
const NULLFS_TIMEOUT: Duration = Duration::from_secs(10);
/// Name of the file that is read, here and in the null file system.
const FILE: &str = "data";

/// One number of jobs, all rounds.
#[derive(Debug, serde::Serialize)]
struct Comparison {
    jobs: u32,
    /// Reads a second here, and of the null file system, of the median pair.
    this: f64,
    null: f64,
    ratio: f64,
    /// Every pair's ratio, in the order they ran.
    ratios: Vec<f64>,
    this_mean_latency_us: f64,
    null_mean_latency_us: f64,
}

/// Runs the comparison and prints it.
///
/// # Errors
/// Says what is missing or failing, or which ratio is below what was required.
pub fn run_null(args: BenchNullArgs) -> anyhow::Result<()> {
    ensure!(args.size.0 >= 1 << 20, "--size must be at least 1M");
    let site = Site::new(&args.mount, args.size.0)?;
    let mut progress = Progress::new(2 + args.jobs.len() * args.rounds as usize * 2);
    progress.step("writing the file to read");
    let fill =
        FioParameters { size_bytes: args.size.0, jobs: 1, seconds: 1, filename: Some(FILE.to_owned()) };
    fio_job::run(FioJob::SequentialWrite, site.root(), &fill)?;
    // Once through, so that what can be resident is.
    progress.step("reading it once");
    fio_job::run(FioJob::SequentialRead, site.root(), &fill)?;
    let null = NullFs::start(args.nullfs.as_deref(), args.size)?;

    let mut comparisons = Vec::new();
    for &jobs in &args.jobs {
        let parameters = FioParameters { jobs, seconds: args.seconds, ..fill.clone() };
        let mut pairs = Vec::new();
        for round in 0..args.rounds {
            let mut measure = |directory: &Path, who: &str| {
                progress.step(&format!("{jobs} jobs, round {}: {who}", round + 1));
                fio_job::run(FioJob::RandomRead, directory, &parameters)
            };
            pairs.push(if round % 2 == 0 {
                let this = measure(site.root(), &site.label)?;
                (this, measure(&null.mount, "null")?)
            } else {
                let other = measure(&null.mount, "null")?;
                (measure(site.root(), &site.label)?, other)
            });
        }
        comparisons.push(compare(jobs, &pairs).context("no pair was measured")?);
    }
    progress.end();

    let mut table = Table::default();
    table.plain(&["JOBS", "READS/S", "LATENCY", "NULL READS/S", "NULL LATENCY", "RATIO"]);
    for comparison in &comparisons {
        table.plain(&[
            &comparison.jobs.to_string(),
            &format!("{:.0}", comparison.this),
            &format!("{:.1} us", comparison.this_mean_latency_us),
            &format!("{:.0}", comparison.null),
            &format!("{:.1} us", comparison.null_mean_latency_us),
            &format!("{:.3}", comparison.ratio),
        ]);
    }
    cuttlefs_common::say!(
        "Random 4 KiB direct reads of {} resident, {} pairs of {} s in turn, median pair",
        args.size,
        args.rounds,
        args.seconds
    );
    cuttlefs_common::say!("{}", table.render(coloured()).trim_end());
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&comparisons)? + "\n";
        std::fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    if let Some(required) = args.require
        && let Some(low) = comparisons.iter().find(|comparison| comparison.ratio < required)
    {
        bail!("at {} jobs the ratio is {:.3}, below {required}", low.jobs, low.ratio);
    }
    Ok(())
}

/// The median pair by ratio, or nothing if there is no pair.
fn compare(jobs: u32, pairs: &[(Sample, Sample)]) -> Option<Comparison> {
    let ratio = |pair: &(Sample, Sample)| pair.0.operations_per_second / pair.1.operations_per_second;
    let mut sorted = pairs.to_vec();
    sorted.sort_by(|a, b| ratio(a).total_cmp(&ratio(b)));
    let median = sorted.get(sorted.len().checked_sub(1)? / 2)?;
    Some(Comparison {
        jobs,
        this: median.0.operations_per_second,
        null: median.1.operations_per_second,
        ratio: ratio(median),
        ratios: pairs.iter().map(ratio).collect(),
        this_mean_latency_us: median.0.mean_latency_us,
        null_mean_latency_us: median.1.mean_latency_us,
    })
}

/// A running null file system.
struct NullFs {
    child: Child,
    mount: PathBuf,
}

impl NullFs {
    fn start(binary: Option<&Path>, size: ByteSize) -> anyhow::Result<Self> {
        let binary = match binary {
            Some(path) => path.to_owned(),
            None => std::env::current_exe()
                .context("cannot tell where this program is; give --nullfs")?
                .with_file_name("cuttlefs-nullfs"),
        };
        ensure!(
            binary.is_file(),
            "{} is missing; build it (cargo build --release --workspace) or give --nullfs",
            binary.display()
        );
        let mount = std::env::temp_dir().join(format!("cuttlefs-null.{}", std::process::id()));
        std::fs::create_dir(&mount).with_context(|| format!("cannot make {}", mount.display()))?;
        let child = Command::new(&binary)
            .arg(&mount)
            .args(["--size", &size.0.to_string()])
            .stdin(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot run {}", binary.display()));
        let child = match child {
            Ok(child) => child,
            Err(error) => {
                let _ = std::fs::remove_dir(&mount);
                return Err(error);
            }
        };
        // From here on the end is Drop's.
        let mut null = Self { child, mount };
        let started = Instant::now();
        while !null.mount.join(FILE).exists() {
            if let Some(status) = null.child.try_wait().context("waiting for the null file system")? {
                bail!("the null file system ended while it was being mounted: {status}");
            }
            ensure!(started.elapsed() < NULLFS_TIMEOUT, "the null file system did not mount");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(null)
    }

    /// Whether the process has ended within the time it is given.
    fn ends(&mut self) -> bool {
        let started = Instant::now();
        while started.elapsed() < NULLFS_TIMEOUT {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }
}

impl Drop for NullFs {
    fn drop(&mut self) {
        // It ends when it is unmounted. umount as root, fusermount3 otherwise; the one that cannot says so, unheard.
        let unmounted = [("umount", None), ("fusermount3", Some("-u"))].iter().any(|(program, option)| {
            Command::new(program)
                .args(*option)
                .arg(&self.mount)
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|status| status.success())
        });
        if !unmounted || !self.ends() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if let Err(error) = std::fs::remove_dir(&self.mount) {
            cuttlefs_common::tell!("{} could not be removed: {error}", self.mount.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(operations_per_second: f64) -> Sample {
        Sample { operations_per_second, bytes_per_second: 0.0, mean_latency_us: 1.0, p99_latency_us: None }
    }

    #[test]
    fn ratios_are_of_pairs() {
        // The machine was half as fast in the second round: both were, so its ratio is no outlier.
        let pairs = [
            (sample(90.0), sample(100.0)),
            (sample(45.0), sample(50.0)),
            (sample(99.0), sample(100.0)),
            (sample(10.0), sample(100.0)),
            (sample(95.0), sample(100.0)),
        ];
        let comparison = compare(4, &pairs).expect("pairs");
        assert_eq!(comparison.ratio, 0.9);
        assert_eq!(comparison.ratios, [0.9, 0.9, 0.99, 0.1, 0.95]);
        assert!(compare(1, &[]).is_none());
    }

    #[test]
    fn a_missing_binary_says_how_to_get_it() {
        let error = NullFs::start(Some(Path::new("/nonexistent/nullfs")), ByteSize(1 << 20)).map(|_| ());
        let error = error.expect_err("missing").to_string();
        assert!(error.contains("cargo build --release"), "{error}");
    }
}
