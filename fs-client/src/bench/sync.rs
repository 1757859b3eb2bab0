//! `cuttlefs bench sync`: changes that are made durable one by one, as databases and mail servers make them.
//!
//! Each row does one thing and an fsync(2), over and over, by 1, 4 and 16 threads with files of their own: a name is durable with the
//! fsync of its directory. Directories are measured in turn, round by round, and who goes first alternates; what is
//! printed is each one's median round, and beside it what an operation cost (`costs`).

use super::costs::{Costs, Counted};
use super::report::{Progress, Table, coloured};
use super::site::Site;
use anyhow::{Context as _, bail, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Arguments of `cuttlefs bench sync`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "Examples:
  cuttlefs bench sync /mnt/cuttle
  cuttlefs bench sync /mnt/cuttle --baseline /srv/local --threads 1,16 --json sync.json

Put --baseline on the disk that the server's pool is on. SYNCS and KiB are those of all disks of
this machine, and SWITCHES those of the server and of the mount, an operation.")]
pub struct BenchSyncArgs {
    /// Directory to measure
    pub mount: PathBuf,
    /// Run the same on this directory too, in turn, and print the ratio; may be given more than once
    #[arg(long, value_name = "DIR")]
    pub baseline: Vec<PathBuf>,
    /// How many do each thing at once; several are measured one after the other
    #[arg(long, short = 't', value_delimiter = ',', default_value = "1,4,16", value_name = "N,...", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub threads: Vec<u32>,
    /// Seconds of each run
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Times each is run; medians are printed
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Run only these rows
    #[arg(long, value_delimiter = ',', value_name = "ROW,...", value_enum)]
    pub only: Vec<Row>,
    /// Also write the figures to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// What is done and synced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Row {
    /// 4 KiB somewhere in a file of 16 MiB
    Overwrite,
    /// 4 KiB at the end of a file
    Append,
    /// A new file
    Create,
    /// A file's next name
    Rename,
}

impl Row {
    const ALL: [Self; 4] = [Self::Overwrite, Self::Append, Self::Create, Self::Rename];

    fn name(self) -> &'static str {
        match self {
            Self::Overwrite => "overwrite",
            Self::Append => "append",
            Self::Create => "create",
            Self::Rename => "rename",
        }
    }
}

const BLOCK: usize = 4096;
/// Blocks of the file that is overwritten.
const BLOCKS: u64 = 4096;
/// Longest latency told apart.
const SLOWEST_US: u64 = 60_000_000;

/// One round of one row by so many threads on one directory.
#[derive(Clone, Copy, Debug, Serialize)]
struct Sample {
    operations_per_second: f64,
    p50_us: u64,
    p99_us: u64,
    costs: Costs,
}

/// All rounds of one row by so many threads.
#[derive(Debug, Serialize)]
struct Line {
    row: Row,
    threads: u32,
    directory: String,
    median: Sample,
    /// Least and greatest rate of a round.
    rates: [f64; 2],
    /// Of the median rate, to that of each baseline.
    ratios: Vec<f64>,
}

/// Runs the benchmark and prints the table.
///
/// # Errors
/// Says what is missing, full or failing. The directories worked in are removed in any case.
pub fn run_sync(args: &BenchSyncArgs) -> anyhow::Result<()> {
    let most_threads = args.threads.iter().copied().max().unwrap_or(1);
    let wanted_bytes = u64::from(most_threads) * BLOCKS * BLOCK as u64 * 2;
    let mut sites = vec![Site::new(&args.mount, wanted_bytes)?];
    for baseline in &args.baseline {
        sites.push(Site::new(baseline, wanted_bytes).context("--baseline")?);
    }
    let counted: Vec<Counted> = sites.iter().map(|site| Counted::of(site.root())).collect();
    let rows = Row::ALL.into_iter().filter(|row| args.only.is_empty() || args.only.contains(row));
    let cells: Vec<(Row, u32)> =
        rows.flat_map(|row| args.threads.iter().map(move |threads| (row, *threads))).collect();
    let time = Duration::from_secs(args.seconds.into());
    let mut progress = Progress::new(cells.len() * sites.len() * args.rounds as usize);
    let mut lines = Vec::new();
    for (row, threads) in cells {
        let mut samples = vec![Vec::new(); sites.len()];
        for round in 0..args.rounds as usize {
            for turn in 0..sites.len() {
                let which = (turn + round) % sites.len();
                let site = &sites[which];
                progress.step(&format!("{}: {}, {threads} threads", site.label, row.name()));
                let sample = measure(row, threads, site, &counted[which], time)
                    .with_context(|| format!("{} on {}", row.name(), site.label))?;
                samples[which].push(sample);
            }
        }
        lines.extend(summed_up(row, threads, &sites, samples));
    }
    progress.end();
    cuttlefs_common::say!(
        "4 KiB or a name, and fsync(2); {} rounds of {} s in turn, medians",
        args.rounds,
        args.seconds
    );
    cuttlefs_common::say!("{}", table(&lines).render(coloured()).trim_end());
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&lines)? + "\n";
        std::fs::write(path, json).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// A line for each directory.
fn summed_up(row: Row, threads: u32, sites: &[Site], samples: Vec<Vec<Sample>>) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for (site, mut samples) in sites.iter().zip(samples) {
        samples.sort_by(|a, b| a.operations_per_second.total_cmp(&b.operations_per_second));
        let (Some(first), Some(last)) = (samples.first().copied(), samples.last().copied()) else {
            continue;
        };
        let median = samples[(samples.len() - 1) / 2];
        let rates = [first.operations_per_second, last.operations_per_second];
        lines.push(Line { row, threads, directory: site.label.clone(), median, rates, ratios: Vec::new() });
    }
    if let Some((this, baselines)) = lines.split_first_mut() {
        let rate = this.median.operations_per_second;
        this.ratios = baselines.iter().map(|line| rate / line.median.operations_per_second).collect();
    }
    lines
}

fn table(lines: &[Line]) -> Table {
    let mut table = Table::default();
    table.plain(&[
        "ITEM",
        "THREADS",
        "DIRECTORY",
        "OPS/S",
        "SPREAD",
        "P50",
        "P99",
        "RATIO",
        "SYNCS",
        "KiB",
        "RPCS",
        "SWITCHES",
    ]);
    let dash = || "-".to_owned();
    for line in lines {
        let Sample { operations_per_second, p50_us, p99_us, costs } = line.median;
        let ratios: Vec<String> = line.ratios.iter().map(|ratio| format!("{ratio:.2}")).collect();
        table.plain(&[
            line.row.name(),
            &line.threads.to_string(),
            &line.directory,
            &format!("{operations_per_second:.0}"),
            &format!("{:.0}-{:.0}", line.rates[0], line.rates[1]),
            &format!("{p50_us} us"),
            &format!("{p99_us} us"),
            &if ratios.is_empty() { dash() } else { ratios.join(" ") },
            &format!("{:.2}", costs.syncs),
            &format!("{:.1}", costs.disk_bytes / 1024.0),
            &costs.rpcs.map_or_else(dash, |rpcs| format!("{rpcs:.2}")),
            &costs.switches.map_or_else(dash, |[server, mount]| format!("{server:.1} {mount:.1}")),
        ]);
    }
    table
}

fn measure(row: Row, threads: u32, site: &Site, counted: &Counted, time: Duration) -> anyhow::Result<Sample> {
    let workers =
        (0..threads).map(|thread| Worker::new(row, site, thread)).collect::<anyhow::Result<Vec<_>>>()?;
    let before = counted.now()?;
    let (done, seconds) = together(workers, time)?;
    let operations = done.len();
    ensure!(operations > 0, "nothing was done");
    let costs = counted.now()?.since(&before, operations);
    Ok(Sample {
        operations_per_second: operations as f64 / seconds,
        p50_us: done.value_at_quantile(0.5),
        p99_us: done.value_at_quantile(0.99),
        costs,
    })
}

/// Microseconds of what all did, and the seconds it took.
fn together(workers: Vec<Worker>, time: Duration) -> anyhow::Result<(Histogram<u64>, f64)> {
    let is_over = AtomicBool::new(false);
    let mut all = histogram()?;
    let started = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            workers.into_iter().map(|worker| scope.spawn(|| worker.work(&is_over))).collect();
        std::thread::sleep(time);
        is_over.store(true, Ordering::Relaxed);
        for thread in threads {
            match thread.join() {
                Ok(done) => all.add(done?).context("adding up latencies")?,
                Err(_) => bail!("a benchmark thread ended abnormally"),
            }
        }
        anyhow::Ok(())
    })?;
    Ok((all, started.elapsed().as_secs_f64()))
}

fn histogram() -> anyhow::Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, SLOWEST_US, 3).context("a histogram of latencies")
}

/// One thread's files.
struct Worker {
    row: Row,
    directory: PathBuf,
    /// The directory, open.
    names: File,
    file: File,
}

impl Worker {
    /// Makes what the row works on, durably.
    fn new(row: Row, site: &Site, thread: u32) -> anyhow::Result<Self> {
        let directory = site.directory(&format!("{}.{thread}", row.name()))?;
        empty(&directory)
            .with_context(|| format!("removing what a round left in {}", directory.display()))?;
        let names = File::open(&directory).with_context(|| format!("opening {}", directory.display()))?;
        let path = directory.join("file");
        let mut file = OpenOptions::new()
            .read(true)
            .write(row != Row::Append)
            .append(row == Row::Append)
            .create(true)
            .open(&path)
            .with_context(|| format!("making {}", path.display()))?;
        if row == Row::Overwrite {
            let block = vec![0x5a; 1 << 20];
            for _ in 0..BLOCKS * BLOCK as u64 / block.len() as u64 {
                file.write_all(&block).with_context(|| format!("writing {}", path.display()))?;
            }
        }
        file.sync_all().with_context(|| format!("syncing {}", path.display()))?;
        names.sync_all().with_context(|| format!("syncing {}", directory.display()))?;
        Ok(Self { row, directory, names, file })
    }

    fn work(mut self, is_over: &AtomicBool) -> anyhow::Result<Histogram<u64>> {
        let mut latencies = histogram()?;
        let mut number = 0u64;
        while !is_over.load(Ordering::Relaxed) {
            let begun = Instant::now();
            self.once(number)
                .with_context(|| format!("{} in {}", self.row.name(), self.directory.display()))?;
            latencies.saturating_record(begun.elapsed().as_micros() as u64);
            number += 1;
        }
        Ok(latencies)
    }

    fn once(&mut self, number: u64) -> std::io::Result<()> {
        let block = [number as u8; BLOCK];
        let name = |number: u64| self.directory.join(format!("name.{number:08}"));
        match self.row {
            Row::Overwrite => {
                // Odd, so that each of the blocks is visited, and no two in a row.
                let at = number.wrapping_mul(2_654_435_761) % BLOCKS;
                self.file.write_all_at(&block, at * BLOCK as u64)?;
                self.file.sync_all()
            }
            Row::Append => {
                self.file.write_all(&block)?;
                self.file.sync_all()
            }
            Row::Create => {
                File::create_new(name(number))?;
                self.names.sync_all()
            }
            Row::Rename => {
                let from = if number == 0 { self.directory.join("file") } else { name(number - 1) };
                std::fs::rename(from, name(number))?;
                self.names.sync_all()
            }
        }
    }
}

fn empty(directory: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        std::fs::remove_file(entry?.path())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_twice_by_two_threads() {
        let under = tempfile::tempdir().expect("tempdir");
        let site = Site::new(under.path(), 1).expect("site");
        let counted = Counted::nobody();
        for row in Row::ALL.into_iter().chain(Row::ALL) {
            let sample = measure(row, 2, &site, &counted, Duration::from_millis(20)).expect("measured");
            assert!(sample.operations_per_second > 0.0 && sample.p50_us <= sample.p99_us, "{row:?}");
            assert_eq!(sample.costs.rpcs, None, "no mount of cuttlefs");
        }
        let appended = std::fs::metadata(site.root().join("append.1/file")).expect("file").len();
        assert!(appended > 0 && appended.is_multiple_of(BLOCK as u64));
        let renamed = std::fs::read_dir(site.root().join("rename.0")).expect("list").count();
        assert_eq!(renamed, 1, "it has one name at a time");
    }

    #[test]
    fn an_error_is_one() {
        let under = tempfile::tempdir().expect("tempdir");
        let site = Site::new(under.path(), 1).expect("site");
        let mut worker = Worker::new(Row::Create, &site, 0).expect("worker");
        worker.once(0).expect("once");
        assert!(worker.once(0).is_err(), "it is there");
    }

    #[test]
    fn the_median_round_and_ratios_to_baselines() {
        let under: Vec<_> = (0..3).map(|_| tempfile::tempdir().expect("tempdir")).collect();
        let sites: Vec<Site> = under.iter().map(|path| Site::new(path.path(), 1).expect("site")).collect();
        let round =
            |rate: f64| Sample { operations_per_second: rate, p50_us: 1, p99_us: 2, costs: Costs::default() };
        let samples =
            vec![vec![round(90.0), round(10.0), round(50.0)], vec![round(100.0)], vec![round(25.0)]];
        let lines = summed_up(Row::Append, 4, &sites, samples);
        assert_eq!(lines[0].ratios, [0.5, 2.0]);
        assert_eq!(lines[0].rates, [10.0, 90.0]);
        assert!(lines[1].ratios.is_empty());
        let text = table(&lines).render(false);
        assert!(text.contains("0.50 2.00") && text.contains("10-90"), "{text}");
    }
}
