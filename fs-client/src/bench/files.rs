//! Small files and names, through plain system calls: one thread a job, each in a directory of its own.
//!
//! A row's preparation (emptying caches) is not timed. Rows come in the order of `items::ITEMS`: what `Create`
//! makes, `Stat*`, `ReadDirectory` and `Rename` look at and `Unlink` removes. The slowest thread's end is the end.

use super::items::Sample;
use super::site::Site;
use anyhow::{Context as _, bail, ensure};
use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Longer than attributes and names are cached by default (one second), for when caches cannot be dropped.
const CACHE_LIFE: Duration = Duration::from_millis(1200);

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileWork {
    WriteSmall,
    ReadSmall,
    Create,
    StatCold,
    StatWarm,
    ReadDirectory,
    Rename,
    Unlink,
}

/// How much of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct FileParameters {
    /// Threads.
    pub(super) jobs: u32,
    /// Small files of each thread.
    pub(super) small_files: u32,
    /// Bytes of each.
    pub(super) small_bytes: usize,
    /// Empty files of each thread.
    pub(super) names: u32,
}

/// Does it once, all threads at once.
///
/// # Errors
/// The first error of any thread.
pub(super) fn run(work: FileWork, site: &Site, parameters: &FileParameters) -> anyhow::Result<Sample> {
    let directories = (0..parameters.jobs)
        .map(|job| site.directory(&format!("{}.{job}", if work.is_small() { "small" } else { "names" })))
        .collect::<anyhow::Result<Vec<_>>>()?;
    match work {
        FileWork::ReadSmall | FileWork::StatCold | FileWork::ReadDirectory => forget(),
        FileWork::StatWarm => {
            for directory in &directories {
                stat_all(directory, parameters.names)?;
            }
        }
        _ => {}
    }
    let started = Instant::now();
    let (operations, bytes) = std::thread::scope(|scope| {
        let threads: Vec<_> = directories
            .iter()
            .map(|directory| scope.spawn(|| one_job(work, directory, parameters)))
            .collect();
        let mut total = (0u64, 0u64);
        for thread in threads {
            let (operations, bytes) = match thread.join() {
                Ok(done) => done?,
                Err(_) => bail!("a benchmark thread ended abnormally"),
            };
            total.0 += operations;
            total.1 += bytes;
        }
        anyhow::Ok(total)
    })?;
    let seconds = started.elapsed().as_secs_f64().max(1e-9);
    ensure!(operations > 0, "nothing was done");
    Ok(Sample {
        operations_per_second: operations as f64 / seconds,
        bytes_per_second: bytes as f64 / seconds,
        mean_latency_us: seconds * 1e6 * f64::from(parameters.jobs) / operations as f64,
        p99_latency_us: None,
    })
}

impl FileWork {
    fn is_small(self) -> bool {
        matches!(self, Self::WriteSmall | Self::ReadSmall)
    }
}

/// Operations and bytes done.
fn one_job(work: FileWork, directory: &Path, parameters: &FileParameters) -> anyhow::Result<(u64, u64)> {
    let small_total = u64::from(parameters.small_files) * parameters.small_bytes as u64;
    match work {
        FileWork::WriteSmall => {
            let body = pattern(parameters.small_bytes);
            for index in 0..parameters.small_files {
                let path = small_path(directory, index);
                let mut file = File::create(&path).with_context(|| format!("creating {}", path.display()))?;
                file.write_all(&body).with_context(|| format!("writing {}", path.display()))?;
            }
            Ok((parameters.small_files.into(), small_total))
        }
        FileWork::ReadSmall => {
            let expected = pattern(parameters.small_bytes);
            let mut body = Vec::with_capacity(parameters.small_bytes);
            for index in 0..parameters.small_files {
                let path = small_path(directory, index);
                body.clear();
                File::open(&path)
                    .and_then(|mut file| file.read_to_end(&mut body))
                    .with_context(|| format!("reading {}", path.display()))?;
                ensure!(body == expected, "{} does not hold what was written", path.display());
            }
            Ok((parameters.small_files.into(), small_total))
        }
        FileWork::Create => {
            for index in 0..parameters.names {
                let path = name_path(directory, index);
                OpenOptions::new()
                    .write(true)
                    .create_new(true)
                    .open(&path)
                    .with_context(|| format!("creating {}", path.display()))?;
            }
            Ok((parameters.names.into(), 0))
        }
        FileWork::StatCold | FileWork::StatWarm => {
            stat_all(directory, parameters.names)?;
            Ok((parameters.names.into(), 0))
        }
        FileWork::ReadDirectory => {
            let mut entries = 0;
            for entry in
                std::fs::read_dir(directory).with_context(|| format!("listing {}", directory.display()))?
            {
                entry.with_context(|| format!("listing {}", directory.display()))?;
                entries += 1;
            }
            ensure!(
                entries == u64::from(parameters.names),
                "{} lists {entries} entries of {}",
                directory.display(),
                parameters.names
            );
            Ok((entries, 0))
        }
        FileWork::Rename => {
            for index in 0..parameters.names {
                let (from, to) = (name_path(directory, index), moved_path(directory, index));
                std::fs::rename(&from, &to).with_context(|| format!("renaming {}", from.display()))?;
            }
            Ok((parameters.names.into(), 0))
        }
        FileWork::Unlink => {
            for index in 0..parameters.names {
                let path = moved_path(directory, index);
                std::fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
            }
            Ok((parameters.names.into(), 0))
        }
    }
}

fn stat_all(directory: &Path, names: u32) -> anyhow::Result<()> {
    for index in 0..names {
        let path = name_path(directory, index);
        std::fs::symlink_metadata(&path).with_context(|| format!("stat of {}", path.display()))?;
    }
    Ok(())
}

fn small_path(directory: &Path, index: u32) -> PathBuf {
    directory.join(format!("small.{index:06}"))
}

fn name_path(directory: &Path, index: u32) -> PathBuf {
    directory.join(format!("name.{index:06}"))
}

fn moved_path(directory: &Path, index: u32) -> PathBuf {
    directory.join(format!("moved.{index:06}"))
}

/// Bytes that neither compress to nothing nor look like a hole.
fn pattern(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

/// Empties the client kernel's caches, or waits until what they hold of names and attributes is out of date.
fn forget() {
    // Dirty pages cannot be dropped, so they are written first. 3: pages, dentries and inodes.
    rustix::fs::sync();
    if std::fs::write("/proc/sys/vm/drop_caches", "3").is_err() {
        std::thread::sleep(CACHE_LIFE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::items::{ITEMS, Work};

    const PARAMETERS: FileParameters =
        FileParameters { jobs: 2, small_files: 3, small_bytes: 5000, names: 20 };

    #[test]
    fn every_row_in_order_leaves_no_name() {
        let under = tempfile::tempdir().expect("tempdir");
        let site = Site::new(under.path(), 1).expect("site");
        // Twice: a second round must find the directory as the first one did.
        for item in ITEMS.iter().chain(ITEMS) {
            if let Work::Files(work) = item.work {
                let sample =
                    run(work, &site, &PARAMETERS).unwrap_or_else(|error| panic!("{work:?}: {error:#}"));
                assert!(sample.operations_per_second > 0.0 && sample.mean_latency_us > 0.0, "{work:?}");
                assert_eq!(sample.bytes_per_second > 0.0, work.is_small(), "{work:?}");
            }
        }
        let names = site.directory("names.0").expect("names");
        assert_eq!(std::fs::read_dir(names).expect("list").count(), 0);
    }

    #[test]
    fn wrong_bytes_and_missing_names_are_errors() {
        let under = tempfile::tempdir().expect("tempdir");
        let site = Site::new(under.path(), 1).expect("site");
        run(FileWork::WriteSmall, &site, &PARAMETERS).expect("write");
        let victim = small_path(&site.directory("small.1").expect("directory"), 2);
        std::fs::write(&victim, vec![0; PARAMETERS.small_bytes]).expect("damage");
        let error = run(FileWork::ReadSmall, &site, &PARAMETERS).expect_err("damaged").to_string();
        assert!(error.contains("does not hold what was written"), "{error}");

        run(FileWork::Create, &site, &PARAMETERS).expect("create");
        std::fs::remove_file(name_path(&site.directory("names.0").expect("directory"), 7)).expect("remove");
        assert!(run(FileWork::ReadDirectory, &site, &PARAMETERS).is_err());
        assert!(run(FileWork::StatWarm, &site, &PARAMETERS).is_err());
    }
}
