//! Runs a job file of `fixtures/fio` and reads fio's JSON.
//!
//! The job files are part of the program, so that an installed binary needs no source tree. Their parameters go in
//! as environment variables, which fio itself puts into the job.

use super::items::Sample;
use anyhow::{Context as _, bail};
use serde::Deserialize;
use std::path::Path;
use std::process::{Command, Stdio};

/// Jobs of `fixtures/fio`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FioJob {
    SequentialWrite,
    SequentialRead,
    RandomWrite,
    RandomRead,
}

impl FioJob {
    fn text(self) -> &'static str {
        match self {
            Self::SequentialWrite => include_str!("../../../fixtures/fio/sequential-write.fio"),
            Self::SequentialRead => include_str!("../../../fixtures/fio/sequential-read.fio"),
            Self::RandomWrite => include_str!("../../../fixtures/fio/random-write.fio"),
            Self::RandomRead => include_str!("../../../fixtures/fio/random-read.fio"),
        }
    }

    fn writes(self) -> bool {
        matches!(self, Self::SequentialWrite | Self::RandomWrite)
    }
}

/// Parameters of a run.
#[derive(Clone, Debug)]
pub(super) struct FioParameters {
    /// Bytes of each job's file.
    pub(super) size_bytes: u64,
    /// Jobs at once.
    pub(super) jobs: u32,
    /// How long the random jobs run.
    pub(super) seconds: u32,
    /// All jobs read this file instead of one each.
    pub(super) filename: Option<String>,
}

#[derive(Deserialize)]
struct Output {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    error: i32,
    read: Direction,
    write: Direction,
}

#[derive(Deserialize)]
struct Direction {
    bw_bytes: u64,
    iops: f64,
    total_ios: u64,
    lat_ns: Latency,
    clat_ns: Percentiles,
}

#[derive(Deserialize)]
struct Latency {
    mean: f64,
}

#[derive(Deserialize)]
struct Percentiles {
    #[serde(default)]
    percentile: std::collections::BTreeMap<String, u64>,
}

/// Runs `job` with `directory` as working directory.
///
/// # Errors
/// If fio is missing, fails, or says what this does not understand.
pub(super) fn run(job: FioJob, directory: &Path, parameters: &FioParameters) -> anyhow::Result<Sample> {
    // Beside the data and not in /tmp: whatever directory can be measured can hold a small file.
    let path = directory.join(".job.fio");
    let text = match &parameters.filename {
        // One file for all jobs replaces one file each.
        Some(name) => job.text().replace("filename_format=data.$jobnum", &format!("filename={name}")),
        None => job.text().to_owned(),
    };
    // A read-only or null file system has no place for it.
    let path = match std::fs::write(&path, &text) {
        Ok(()) => path,
        Err(_) => {
            let path = std::env::temp_dir().join(format!("cuttlefs-bench.{}.fio", std::process::id()));
            std::fs::write(&path, &text).with_context(|| format!("cannot write {}", path.display()))?;
            path
        }
    };
    let output = Command::new("fio")
        .args(["--output-format=json", "--eta=never"])
        .arg(&path)
        .current_dir(directory)
        .env("BENCH_SIZE", parameters.size_bytes.to_string())
        .env("BENCH_JOBS", parameters.jobs.to_string())
        .env("BENCH_SECONDS", parameters.seconds.to_string())
        .stdin(Stdio::null())
        .output();
    // It has been read by now; a leftover would only be confusing.
    let _ = std::fs::remove_file(&path);
    let output = match output {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            bail!("fio is missing; install it (apt-get install fio) or run scripts/setup.sh --tests")
        }
        Err(error) => return Err(error).context("cannot run fio"),
    };
    if !output.status.success() {
        bail!(
            "fio failed in {} ({}): {}",
            directory.display(),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    parse(job, &String::from_utf8_lossy(&output.stdout))
}

/// Reads fio's JSON. fio may print notes before it.
pub(super) fn parse(job: FioJob, stdout: &str) -> anyhow::Result<Sample> {
    let start = stdout.find('{').context("fio printed no JSON")?;
    let output: Output = serde_json::from_str(&stdout[start..]).context("fio's JSON is not as expected")?;
    let [group] = output.jobs.as_slice() else {
        bail!("fio reported {} groups instead of one", output.jobs.len());
    };
    if group.error != 0 {
        bail!("fio reported {}", std::io::Error::from_raw_os_error(group.error));
    }
    let direction = if job.writes() { &group.write } else { &group.read };
    if direction.total_ios == 0 {
        bail!("fio did no IO");
    }
    Ok(Sample {
        operations_per_second: direction.iops,
        bytes_per_second: direction.bw_bytes as f64,
        mean_latency_us: direction.lat_ns.mean / 1e3,
        p99_latency_us: direction.clat_ns.percentile.get("99.000000").map(|&ns| ns as f64 / 1e3),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIRECTION: &str = r#"{"bw_bytes": 4096000, "iops": 1000.0, "total_ios": 2000, "lat_ns": {"mean": 25000.0},
        "clat_ns": {"percentile": {"50.000000": 20000, "99.000000": 60000}}}"#;
    const IDLE: &str =
        r#"{"bw_bytes": 0, "iops": 0.0, "total_ios": 0, "lat_ns": {"mean": 0.0}, "clat_ns": {"min": 0}}"#;

    fn output(error: i32, read: &str, write: &str) -> String {
        format!("note: before\n{{\"jobs\": [{{\"error\": {error}, \"read\": {read}, \"write\": {write}}}]}}")
    }

    #[test]
    fn figures_of_the_right_direction() {
        let sample = parse(FioJob::RandomRead, &output(0, DIRECTION, IDLE)).expect("read");
        assert_eq!(sample.operations_per_second, 1000.0);
        assert_eq!(sample.bytes_per_second, 4_096_000.0);
        assert_eq!(sample.mean_latency_us, 25.0);
        assert_eq!(sample.p99_latency_us, Some(60.0));
        assert!(parse(FioJob::RandomWrite, &output(0, DIRECTION, IDLE)).is_err(), "no write was done");
        assert!(parse(FioJob::SequentialWrite, &output(0, IDLE, DIRECTION)).is_ok());
    }

    #[test]
    fn failures_are_not_figures() {
        for text in ["", "{}", "{\"jobs\": []}", &output(5, DIRECTION, IDLE)] {
            assert!(parse(FioJob::RandomRead, text).is_err(), "{text}");
        }
    }

    #[test]
    fn job_files_take_every_parameter() {
        for job in [FioJob::SequentialWrite, FioJob::SequentialRead, FioJob::RandomWrite, FioJob::RandomRead]
        {
            assert!(job.text().contains("filename_format=data.$jobnum"), "{job:?}");
            assert!(job.text().contains("${BENCH_SIZE}") && job.text().contains("${BENCH_JOBS}"), "{job:?}");
        }
    }
}
