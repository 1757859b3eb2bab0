//! Long-running commands: this process in the foreground, or itself once more, detached.
//!
//! Detached means: a new process of the same binary with the same command and `--foreground --detached`, in its own
//! session, with `/` as its directory and its log in a file. It is a fresh process and not a fork, so the threads that
//! run here do not matter. Its standard output is a pipe to us, on which it reports in lines:
//!
//! ```text
//! P text    progress, shown after a moment
//! R text    it runs; we print the text and end
//! E text    it failed; we fail with that error
//! ```
//!
//! End of file without `R` or `E` is a crash; the log says more. If we end first, the report fails and it gives up.

use super::process::{ProcessId, RunningProcess};
use super::run_state;
use crate::descriptors::keep_from_children;
use crate::threads::NO_THREAD;
use anyhow::{Context, anyhow, bail};
use cuttlefs_common::explain::explain;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use signal_hook::iterator::{Handle, Signals};
use signal_hook::low_level::emulate_default_handler;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// The hidden option that marks the detached process.
pub(super) const DETACHED_OPTION: &str = "--detached";

/// Reports the progress of a command to the one who started it.
pub(super) struct Reporter {
    /// `None`: the command runs in the foreground, and reports to the terminal.
    pipe: Option<Mutex<std::io::Stdout>>,
}

impl Reporter {
    /// A reporter for this process. If it is `detached`, as its hidden option says, it leaves the session and the working directory.
    pub(super) fn new(detached: bool) -> anyhow::Result<Self> {
        if !detached {
            return Ok(Self { pipe: None });
        }
        // Fails only for a leader of a process group, which a spawned process is not. If it fails, a closed terminal ends this process, and nothing
        // else is lost.
        if let Err(error) = rustix::process::setsid() {
            tracing::warn!(%error, "cannot leave the session");
        }
        std::env::set_current_dir("/").context("cannot change to /")?;
        Ok(Self { pipe: Some(Mutex::new(std::io::stdout())) })
    }

    /// Reports that something takes time.
    pub(super) fn progress(&self, text: &str) {
        if self.report('P', text).is_err() || self.pipe.is_none() {
            cuttlefs_common::tell!("{text}");
        }
    }

    /// Reports that the command runs. An error means that nobody waits for the report any more.
    pub(super) fn ready(&self, text: &str) -> anyhow::Result<()> {
        if self.pipe.is_none() {
            cuttlefs_common::say!("{text}");
        }
        self.report('R', text).context("the process that started this one is gone")
    }

    /// Whether the process that started this one still waits for its report.
    pub(super) fn is_awaited(&self) -> bool {
        let Some(pipe) = &self.pipe else {
            return true;
        };
        let pipe = pipe.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut ends = [PollFd::new(&*pipe, PollFlags::empty())];
        // poll(2) reports an error on a pipe that nobody reads any more.
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut ends, Some(&now)).is_err() || !ends[0].revents().contains(PollFlags::ERR)
    }

    /// Reports a failure to where it is seen. Returns the error, for the log.
    pub(super) fn failed(&self, error: anyhow::Error) -> anyhow::Error {
        let _ = self.report('E', &explain(error.as_ref()));
        error
    }

    fn report(&self, kind: char, text: &str) -> std::io::Result<()> {
        let Some(pipe) = &self.pipe else {
            return Ok(());
        };
        let mut pipe = pipe.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for line in text.lines() {
            writeln!(pipe, "{kind} {line}")?;
        }
        // An empty line ends a report, so that an error may have several lines.
        writeln!(pipe)?;
        pipe.flush()
    }
}

/// Starts this binary with `arguments`, detached, and waits for its report. Returns the text to print now that it runs. The first of `signals` until
/// then ends the background process, which reports that; the second one ends this process.
pub(super) fn run_detached(
    arguments: &[OsString],
    log: &Path,
    signals: Option<Signals>,
) -> anyhow::Result<String> {
    let binary = std::env::current_exe().context("cannot find this program's own file")?;
    let log_file = run_state::private(OpenOptions::new().create(true).append(true), log)
        .with_context(|| format!("cannot write the log {}", log.display()))?;
    keep_from_children();
    let mut child = Command::new(binary)
        .args(arguments)
        .arg(DETACHED_OPTION)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log_file)
        .spawn()
        .context("cannot start the background process")?;
    let interrupted = Arc::new(AtomicBool::new(false));
    let watch = signals.map(|signals| pass_on(signals, &child, Arc::clone(&interrupted))).transpose()?;
    let output = child.stdout.take().context("the background process has no output")?;
    let mut report = (' ', Vec::new());
    for line in BufReader::new(output).lines() {
        let line = line.context("cannot read from the background process")?;
        match line.split_at_checked(2) {
            Some((kind, text)) => {
                report.0 = kind.chars().next().unwrap_or(' ');
                report.1.push(text.to_owned());
            }
            None => {
                let (kind, text) = std::mem::replace(&mut report, (' ', Vec::new()));
                let text = text.join("\n");
                match kind {
                    'P' => cuttlefs_common::tell!("{text}"),
                    'R' => {
                        if let Some(watch) = watch {
                            watch.close();
                        }
                        if interrupted.load(Ordering::Acquire) {
                            // The signal has reached a mount that stands, and unmounts it.
                            let _ = child.wait();
                            bail!("broken off");
                        }
                        return Ok(text);
                    }
                    _ => {
                        let _ = child.wait();
                        return Err(anyhow!(text));
                    }
                }
            }
        }
    }
    let status = child.wait().context("cannot wait for the background process")?;
    if interrupted.load(Ordering::Acquire) {
        bail!("broken off before anything was started");
    }
    bail!("the background process ended unexpectedly ({status}); see {}", log.display());
}

/// Ends the background process at the first signal, and this process at the second one.
fn pass_on(mut signals: Signals, child: &Child, interrupted: Arc<AtomicBool>) -> anyhow::Result<Handle> {
    let process = ProcessId::of(child.id())?.find()?;
    let handle = signals.handle();
    let watch = move || {
        for signal in signals.forever() {
            if interrupted.swap(true, Ordering::AcqRel) {
                // Does not return for a signal that ends processes.
                let _ = emulate_default_handler(signal);
            }
            cuttlefs_common::tell!("breaking off; once more to leave at once");
            if let Some(Err(error)) = process.as_ref().map(RunningProcess::terminate) {
                cuttlefs_common::tell!("{error:#}");
            }
        }
    };
    std::thread::Builder::new().name("signals".to_owned()).spawn(watch).context(NO_THREAD)?;
    Ok(handle)
}
