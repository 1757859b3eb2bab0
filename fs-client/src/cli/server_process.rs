//! The `cuttlefsd` that `up` starts: its pool, its process, its log.

use super::background::Reporter;
use super::connect::{Backend, NotThere, Trust};
use super::process::ProcessId;
use super::programs;
use super::run_state;
use crate::descriptors::keep_from_children;
use anyhow::{Context, bail};
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::rdma::{Endpoint, RdmaError};
use cuttlefs_common::regular_file;
use cuttlefs_common::size::ByteSize;
use serde::Deserialize;
use signal_hook::iterator::Signals;
use std::fs::OpenOptions;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The file that makes a directory a pool.
const POOL_FILE: &str = "cuttlefs.toml";
/// As much of it as the server reads.
const POOL_FILE_BYTES_MAX: u64 = 1 << 20;
/// Size of a new pool, if none is asked for.
const DEFAULT_SIZE: ByteSize = ByteSize(8 << 30);
/// How long another server may answer at the endpoint of this one.
const OTHERS_LIMIT: Duration = Duration::from_secs(5);
/// How long a server may take to write back and end.
pub(super) const STOP_LIMIT: Duration = Duration::from_secs(120);
/// How long a server that nobody uses yet may take to end before it is killed.
const BREAK_OFF_LIMIT: Duration = Duration::from_secs(10);
/// The time after which the user is told what is waited for.
const PATIENCE: Duration = Duration::from_secs(2);
/// The time after which the user is told again.
const TOLD_AGAIN: Duration = Duration::from_secs(15);
/// The pause between two questions to a server that does not answer yet.
const ASK_AGAIN: Duration = Duration::from_millis(20);
/// The most bytes of a log that an error shows.
const LOG_TAIL_BYTES: u64 = 4096;

/// A server that is a child of this process.
pub(super) struct ServerProcess {
    child: Child,
    id: ProcessId,
    endpoint: Endpoint,
    log: PathBuf,
    /// The offset in the log at which this server's part begins.
    log_start: u64,
}

/// Formats a pool unless the directory has one.
///
/// # Errors
/// The pool has another size than the one asked for, or cannot be made.
pub(super) fn format_if_needed(
    pool: &Path,
    size: Option<ByteSize>,
    reporter: &Reporter,
) -> anyhow::Result<()> {
    let file = pool.join(POOL_FILE);
    if file.exists() {
        return match size {
            Some(size) => check_size(pool, size),
            None => Ok(()),
        };
    }
    let size = size.unwrap_or(DEFAULT_SIZE);
    reporter.progress(&format!(
        "making a pool of {size} in {}; it takes that much of the disk at once (--size)",
        pool.display()
    ));
    let output = Command::new(programs::server()?)
        .arg("format")
        .arg("--pool")
        .arg(pool)
        .args(["--size", &size.0.to_string()])
        .stdin(Stdio::null())
        .output()
        .context("cannot run cuttlefsd format")?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("cannot make a pool in {}: {}", pool.display(), text.trim_end());
    }
    Ok(())
}

/// Checks that the existing pool has the size that was asked for.
pub(super) fn check_size(pool: &Path, asked: ByteSize) -> anyhow::Result<()> {
    /// The part of a `cuttlefs.toml` that is read here; the rest is only for the server.
    #[derive(Deserialize)]
    struct PoolFile {
        pool: PoolPart,
    }
    #[derive(Deserialize)]
    struct PoolPart {
        size: toml::Value,
    }
    let file = &pool.join(POOL_FILE);
    let mut text = String::new();
    let read =
        regular_file::open(file).and_then(|file| file.take(POOL_FILE_BYTES_MAX).read_to_string(&mut text));
    read.with_context(|| format!("cannot read {}", file.display()))?;
    let found: PoolFile =
        toml::from_str(&text).with_context(|| format!("{} is damaged; restore it", file.display()))?;
    let size = match found.pool.size {
        toml::Value::Integer(bytes) => u64::try_from(bytes).ok(),
        toml::Value::String(text) => text.parse().ok().map(|ByteSize(bytes)| bytes),
        _ => None,
    };
    let Some(size) = size else { bail!("{} does not say the pool's size; restore it", file.display()) };
    // A pool has whole pages.
    if size != asked.0.next_multiple_of(PAGE_SIZE_U64) {
        bail!(
            "the pool in {} has {}, and --size says {asked}; a pool keeps its size: leave --size out, or name another pool \
             with --pool",
            pool.display(),
            ByteSize(size)
        );
    }
    Ok(())
}

impl ServerProcess {
    /// Starts a server and waits until it answers. If one of `signals` comes before that, ends the server again.
    pub(super) fn start(
        backend: &dyn Backend,
        pool: &Path,
        memory: ByteSize,
        signals: &mut Signals,
        reporter: &Reporter,
    ) -> anyhow::Result<Self> {
        let endpoint = Endpoint::Shm(run_state::file(pool, "shm.sock")?);
        let unix = Endpoint::Unix(run_state::file(pool, "sock")?);
        let logs = pool.join("log");
        std::fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
        let log = logs.join("cuttlefsd.log");
        let open_log = || {
            let opened = run_state::private(OpenOptions::new().create(true).append(true), &log);
            opened.with_context(|| format!("cannot write {}", log.display()))
        };
        // A server that answers here already would be taken for ours.
        if let Ok(status) = backend.server_status(&endpoint, &Trust::default()) {
            let who = pid_in(&status).map_or_else(String::new, |pid| format!(" by process {pid}"));
            bail!(
                "{} is being served already{who}; to mount it here too: cuttlefs mount {endpoint} DIRECTORY",
                pool.display()
            );
        }
        if is_broken_off(signals, reporter) {
            bail!("broken off before cuttlefsd was started");
        }
        let log_start = log.metadata().map_or(0, |found| found.len());
        keep_from_children();
        let mut child = Command::new(programs::server()?)
            .arg("serve")
            .arg("--pool")
            .arg(pool)
            .args(["--memory", &memory.0.to_string()])
            .args(["--listen", &endpoint.to_string(), "--listen", &unix.to_string()])
            .stdin(Stdio::null())
            .stdout(open_log()?)
            .stderr(open_log()?)
            // So that Ctrl-C at the terminal reaches only this process, which unmounts first and then stops the server.
            .process_group(0)
            .spawn()
            .context("cannot start cuttlefsd; put it beside cuttlefs or in PATH, or name it in CUTTLEFSD")?;
        let id = match ProcessId::of(child.id()) {
            Ok(id) => id,
            Err(_) => {
                // The process has ended before its start time could be read.
                let status = child.wait().context("cannot wait for cuttlefsd")?;
                bail!("cuttlefsd ended at once ({status}){}", tail_text(&log, log_start));
            }
        };
        let mut server = Self { child, id, endpoint, log, log_start };
        match server.wait_until_it_answers(backend, signals, reporter) {
            Ok(()) => Ok(server),
            Err(error) => {
                server.break_off()?;
                Err(error)
            }
        }
    }

    /// Waits as long as the process runs: the time of a recovery depends on the pool, and a server that is stopped in the midst of it must begin
    /// again. A signal ends the wait, and so does an error that will not pass.
    fn wait_until_it_answers(
        &mut self,
        backend: &dyn Backend,
        signals: &mut Signals,
        reporter: &Reporter,
    ) -> anyhow::Result<()> {
        let started = Instant::now();
        let mut tell_at = PATIENCE;
        loop {
            let answer = backend.server_status(&self.endpoint, &Trust::default());
            // The log of a server that has ended says more than the error of a connection to it.
            if let Some(status) = self.child.try_wait().context("cannot wait for cuttlefsd")? {
                bail!("cuttlefsd ended while it started ({status}){}", tail_text(&self.log, self.log_start));
            }
            let not_yet = match answer {
                Ok(status) if pid_in(&status).is_none_or(|pid| pid == i64::from(self.id.pid)) => {
                    return Ok(());
                }
                Ok(_) if started.elapsed() > OTHERS_LIMIT => {
                    let tail = tail_text(&self.log, self.log_start);
                    bail!("another cuttlefsd answers at {}{tail}", self.endpoint);
                }
                Ok(_) => "another cuttlefsd answers there".to_owned(),
                Err(error) if is_not_yet(&error) => error.to_string(),
                Err(error) => return Err(error.context("the server that was started cannot be used")),
            };
            if is_broken_off(signals, reporter) {
                bail!("broken off while cuttlefsd started; it has been ended");
            }
            if started.elapsed() > tell_at {
                tell_at += TOLD_AGAIN;
                let (seconds, log) = (started.elapsed().as_secs(), self.log.display());
                reporter.progress(&format!(
                    "cuttlefsd has been starting for {seconds} s ({not_yet}); its log is {log}"
                ));
            }
            std::thread::sleep(ASK_AGAIN);
        }
    }

    /// The endpoint at which it listens.
    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The server's process.
    pub(super) fn id(&self) -> ProcessId {
        self.id
    }

    /// Ends a server whose start came to nothing. One that does not end when asked, as in the midst of a recovery, is killed: nobody has used it yet,
    /// and the next start recovers the pool.
    fn break_off(mut self) -> anyhow::Result<()> {
        if let Some(running) = self.id.find()? {
            running.terminate()?;
            if !running.wait(BREAK_OFF_LIMIT)? {
                running.kill()?;
            }
        }
        self.child.wait().context("cannot wait for cuttlefsd")?;
        Ok(())
    }

    /// Stops the server, and waits until it has ended.
    pub(super) fn stop(mut self, reporter: &Reporter) -> anyhow::Result<()> {
        if let Some(running) = self.id.find()? {
            running.terminate()?;
            if !running.wait(PATIENCE)? {
                reporter.progress("cuttlefsd is writing back");
                if !running.wait(STOP_LIMIT)? {
                    bail!(
                        "cuttlefsd (process {}) has not ended after {} s",
                        self.id.pid,
                        STOP_LIMIT.as_secs()
                    );
                }
            }
        }
        let status = self.child.wait().context("cannot wait for cuttlefsd")?;
        if !status.success() {
            tracing::warn!(%status, log = %self.log.display(), "cuttlefsd did not end cleanly");
        }
        Ok(())
    }
}

/// Whether a signal has come, or the process that started this one has gone.
fn is_broken_off(signals: &mut Signals, reporter: &Reporter) -> bool {
    signals.pending().next().is_some() || !reporter.is_awaited()
}

/// Whether an error of a server that starts may pass: there is no socket yet, nobody listens there yet, or it does not answer yet. A refusal may be
/// for clients that all come back at once.
fn is_not_yet(error: &anyhow::Error) -> bool {
    let refusal = error.downcast_ref::<RdmaError>();
    error.is::<NotThere>() || matches!(refusal, Some(RdmaError::Refused { .. } | RdmaError::Closed))
}

/// The process id in a server's status.
fn pid_in(status: &str) -> Option<i64> {
    serde_json::from_str::<serde_json::Value>(status).ok()?.get("pid")?.as_i64()
}

/// The end of a log, from `start` on, as the last part of an error.
fn tail_text(log: &Path, start: u64) -> String {
    let tail = || -> std::io::Result<String> {
        let mut file = regular_file::open(log)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(start.max(len.saturating_sub(LOG_TAIL_BYTES))))?;
        let mut bytes = Vec::new();
        file.take(LOG_TAIL_BYTES).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).trim_end().to_owned())
    };
    match tail() {
        Ok(tail) if !tail.is_empty() => format!("; the end of {} says:\n{tail}", log.display()),
        _ => format!("; its log {} is empty", log.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_configuration_is_neither_waited_for_nor_read_without_end() {
        let pool = tempfile::tempdir().expect("directory");
        let refused = || format!("{:#}", check_size(pool.path(), ByteSize(1 << 30)).expect_err("no file"));
        let file = pool.path().join(POOL_FILE);
        std::os::unix::fs::symlink("/dev/zero", &file).expect("symlink");
        assert!(refused().contains("no regular file"), "{}", refused());
        std::fs::remove_file(&file).expect("removed");
        rustix::fs::mknodat(rustix::fs::CWD, &file, rustix::fs::FileType::Fifo, 0o600.into(), 0)
            .expect("a pipe");
        assert!(refused().contains("no regular file"), "{}", refused());
    }

    #[test]
    fn only_what_may_pass_is_waited_for() {
        let endpoint = || "shm:///a".to_owned();
        let refused = RdmaError::Refused { endpoint: endpoint(), reason: "too many".to_owned() };
        let passing: [anyhow::Error; 2] =
            [NotThere("nobody listens there".to_owned()).into(), refused.into()];
        assert!(passing.iter().all(is_not_yet));
        let untrusted = RdmaError::Untrusted { endpoint: endpoint(), uid: 65534 };
        let lasting: [anyhow::Error; 2] = [untrusted.into(), anyhow::anyhow!("it is a directory")];
        assert!(!lasting.iter().any(is_not_yet));
    }
}
