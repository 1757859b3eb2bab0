//! The watchdog: a small process beside each mount's process, that ends the mount's FUSE connection when that process has died.
//!
//! # Why
//! The kernel ends a connection when nobody has `/dev/fuse` open any more. But a thread that makes the kernel forget pages (`cache-answers`) waits in the kernel,
//! with the device open, until the requests for these pages are answered: by this same process. If the process dies meanwhile, nobody answers. The thread
//! waits for ever, the device stays open, and so all programs on the mount wait for ever, too, and cannot be killed. No signal ends such a wait, and no other
//! thread can help, since all others are dead. So another process must know of the death and write to the connection's file `abort` ([`super::connection`]).
//!
//! # How it knows
//! Its standard input is a pipe from the mount's process. The end of the pipe is the end of that process, in order or not: then it ends, too. While a thread
//! waits, the descriptors of the dead process stay open and the pipe has no end. So it also looks each second whether the process is
//! dying ([`is_dying`]). It looks, and is not told: a process that dumps core is held up by the waiting thread before the kernel tells anybody anything.
//!
//! # What it has
//! Its standard output is the file `abort`, which means this connection and no later one. It has neither the device nor the mount, the
//! terminal, a directory or the log, and uses no processor but for the looks. Its own session, and signals that are blocked, let it stay as long as the mount
//! may need it: Ctrl-C and a service manager's SIGTERM are for the mount.
//!
//! # Failure
//! * It is killed: the mount goes on without it. If both are killed at once, `cuttlefs umount -f` ends the connection.
//! * The file cannot be opened (a container without `fusectl` and without root): a warning says so, and the mount goes on without a watchdog.

use super::connection;
use crate::descriptors::keep_from_children;
use crate::fuse::MountTable;
use crate::signals::{Signals, block};
use anyhow::Context;
use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The hidden subcommand. It and its arguments are what ps(1) shows.
const COMMAND: &str = "mount-watchdog";
/// How often it looks at the mount's process.
const LOOK: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Arguments of the hidden subcommand.
#[derive(Args)]
pub(super) struct WatchdogArgs {
    /// The mount's process
    pid: u32,
    /// Where it mounts: for people who look at the list of processes
    mountpoint: PathBuf,
}

/// Starts the watchdog of a mount of this process. It ends with this process. If it cannot be started, a warning says so.
pub(super) fn start(mountpoint: &Path) {
    if let Err(error) = spawn(mountpoint) {
        tracing::warn!(
            mountpoint = %mountpoint.display(),
            "no watchdog: if this process is killed, programs may wait until `cuttlefs umount -f`: {error:#}"
        );
    }
}

fn spawn(mountpoint: &Path) -> anyhow::Result<()> {
    let table = MountTable::read()?;
    let mounted = table.at(mountpoint).context("it is not in the mount table")?;
    let abort = connection::abort_file(&mounted.device)?.context("its connection has ended")?;
    let program = std::env::current_exe().context("cannot find this program's own file")?;
    let (ends_with_us, ours) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).context("cannot make a pipe")?;
    keep_from_children();
    Command::new(program)
        .arg(COMMAND)
        .arg(std::process::id().to_string())
        .arg(mountpoint)
        .current_dir("/")
        .stdin(ends_with_us)
        .stdout(abort)
        .stderr(Stdio::null())
        .spawn()
        .context("cannot start a process")?;
    // Closed by the end of this process, and by nothing before.
    let _ = ours.into_raw_fd();
    Ok(())
}

/// The watchdog's own process.
pub(super) fn run(args: &WatchdogArgs) -> anyhow::Result<()> {
    block(Signals::SENT);
    // Fails only for a leader of a process group, which a spawned process is not.
    let _ = rustix::process::setsid();
    let (pipe, status) = (std::io::stdin(), format!("/proc/{}/status", args.pid));
    loop {
        match poll(&mut [PollFd::new(&pipe, PollFlags::IN)], Some(&LOOK)) {
            // If the status cannot be read the process is gone, and the pipe says so.
            Ok(0) if std::fs::read_to_string(&status).is_ok_and(|status| is_dying(&status)) => {
                return connection::abort(std::io::stdout().lock())
                    .with_context(|| format!("cannot end the mount at {}", args.mountpoint.display()));
            }
            Ok(0) | Err(Errno::INTR) => {}
            // Nothing is ever written to the pipe: this is its end.
            Ok(_) => return Ok(()),
            Err(error) => return Err(error).context("cannot wait for the mount's process"),
        }
    }
}

/// Whether a process with this status (proc_pid_status(5)) has been killed or dumps core, and so serves no mount any more: its first thread serves until
/// the mount has ended.
fn is_dying(status: &str) -> bool {
    let value = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim_start);
    // "Z" is a zombie, "X" is dead.
    value("State:").is_some_and(|state| state.starts_with(['Z', 'X'])) || value("CoreDumping:") == Some("1")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dying_process_is_told_from_one_that_waits() {
        let status = |state: &str, dumps: &str| {
            format!("Name:\tState:\tZ\nUmask:\t0022\nState:\t{state}\nPid:\t7\nCoreDumping:\t{dumps}\n")
        };
        for state in ["S (sleeping)", "D (disk sleep)", "R (running)", "T (stopped)", "t (tracing stop)"] {
            assert!(!is_dying(&status(state, "0")), "{state}");
            assert!(is_dying(&status(state, "1")), "{state}");
        }
        assert!(is_dying("Name:\tcuttlefs\nState:\tZ (zombie)\nPid:\t7\n"), "it has no memory any more");
        assert!(is_dying("State:\tX (dead)\n"));
        assert!(!is_dying(""));
        assert!(!is_dying(&std::fs::read_to_string("/proc/self/status").expect("proc")));
    }
}
