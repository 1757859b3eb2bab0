//! Processes that we started, found again.
//!
//! A process id alone may belong to another process by now; with the start time of the process it is unique. Signals go
//! through a pidfd that is checked after it is opened, so that no process can take the place of the intended one.

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Identifies a process for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProcessId {
    /// The process id.
    pub pid: i32,
    /// When it started, in clock ticks since boot (proc_pid_stat(5), field 22).
    pub start_ticks: u64,
}

/// A process that runs, or that ran when this was made.
pub(super) struct RunningProcess {
    pidfd: OwnedFd,
}

impl ProcessId {
    /// The process that has this number now.
    pub(super) fn of(pid: u32) -> anyhow::Result<Self> {
        let pid = i32::try_from(pid).context("a process id beyond 2^31")?;
        Ok(Self { pid, start_ticks: start_ticks(pid)? })
    }

    /// This process.
    pub(super) fn own() -> anyhow::Result<Self> {
        Self::of(std::process::id())
    }

    /// The process, if it still runs.
    pub(super) fn find(self) -> anyhow::Result<Option<RunningProcess>> {
        let Some(pid) = Pid::from_raw(self.pid) else {
            return Ok(None);
        };
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(Errno::SRCH) => return Ok(None),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot open process {}", self.pid));
            }
        };
        // A pidfd always names the same process. So if the number belongs to the right process now, the pidfd names the right process.
        let is_it = start_ticks(self.pid).is_ok_and(|ticks| ticks == self.start_ticks);
        let process = RunningProcess { pidfd };
        Ok((is_it && !process.wait(Duration::ZERO)?).then_some(process))
    }
}

impl RunningProcess {
    /// Asks the process to end (SIGTERM).
    pub(super) fn terminate(&self) -> anyhow::Result<()> {
        self.signal(Signal::TERM)
    }

    /// Ends the process without asking (SIGKILL).
    pub(super) fn kill(&self) -> anyhow::Result<()> {
        self.signal(Signal::KILL)
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        match pidfd_send_signal(&self.pidfd, signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error).context("cannot signal the process"),
        }
    }

    /// Waits for its end; `false` if it still runs after `limit`.
    pub(super) fn wait(&self, limit: Duration) -> anyhow::Result<bool> {
        let limit = Timespec::try_from(limit).context("a time limit beyond 2^63 seconds")?;
        loop {
            // A pidfd is readable once the process has ended.
            match poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&limit)) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error).context("cannot wait for the process"),
            }
        }
    }
}

fn start_ticks(pid: i32) -> anyhow::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .with_context(|| format!("process {pid} does not run"))?;
    parse_start_ticks(&stat).with_context(|| format!("/proc/{pid}/stat is not as expected"))
}

/// Field 22; the name in field 2 may hold spaces and parentheses, so fields are counted from its last `)`.
fn parse_start_ticks(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_parentheses_do_not_confuse() {
        let stat = "7 (a) b (c)) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4242 9 9";
        assert_eq!(parse_start_ticks(stat), Some(4242));
        assert_eq!(parse_start_ticks("7 (a"), None);
    }

    #[test]
    fn finds_itself_and_not_an_impostor() {
        let own = ProcessId::own().expect("own");
        assert!(own.find().expect("find").is_some());
        let impostor = ProcessId { start_ticks: own.start_ticks + 1, ..own };
        assert!(impostor.find().expect("find").is_none());
    }

    #[test]
    fn ends_a_child() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("sleep");
        let id = ProcessId::of(child.id()).expect("id");
        let running = id.find().expect("find").expect("runs");
        assert!(!running.wait(Duration::from_millis(10)).expect("wait"));
        running.terminate().expect("terminate");
        assert!(running.wait(Duration::from_secs(10)).expect("wait"));
        assert!(id.find().expect("find").is_none(), "a zombie does not run");
        child.wait().expect("reap");
        running.kill().expect("signalling the dead is no error");
    }
}
