//! `cuttlefs down`: ends the mount and the server that `up` started, and only these.

use super::process::{ProcessId, RunningProcess};
use super::run_state::RunState;
use super::server_process::STOP_LIMIT;
use super::unmount::{end_copies, prepare, unmount, wait_for_end};
use crate::fuse::MountTable;
use anyhow::{Context, bail};
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `down`.
#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefs down ~/cuttle
  cuttlefs down -f ~/cuttle      when the server has died and is not to be started again

Other mounts of that server stay, and wait: `cuttlefs up` serves them again.")]
pub(super) struct DownArgs {
    /// Where `up` has mounted
    mountpoint: PathBuf,
    /// Give unsynced changes up if the server has died, unmount even if files are open, and kill a server that does not stop
    #[arg(short, long)]
    force: bool,
}

pub(super) fn run(args: &DownArgs) -> anyhow::Result<()> {
    let table = MountTable::read()?;
    let mountpoint = table
        .resolve(&args.mountpoint)
        .with_context(|| format!("there is no {}", args.mountpoint.display()))?;
    let mounted = table.at(&mountpoint).filter(|entry| entry.is_cuttlefs());
    let state = RunState::load(&mountpoint)?;
    if let Some(start) = state.as_ref().filter(|state| state.starting)
        && let Some(process) = start.mount.find()?
    {
        return break_off(start, &process);
    }
    let Some(state) = state.filter(|state| state.server.is_some()) else {
        match mounted {
            Some(_) => bail!(
                "this user has not mounted {} with `cuttlefs up`; who has can end it so, and a mount of `cuttlefs mount` ends with: cuttlefs umount {}",
                mountpoint.display(),
                mountpoint.display()
            ),
            None => bail!("nothing is up at {}", mountpoint.display()),
        }
    };
    if mounted.is_some() {
        prepare(&mountpoint, Some(&state), args.force, "cuttlefs down -f")?;
        unmount(&mountpoint, args.force, "cuttlefs down -f")?;
    }
    end_copies(&mountpoint, mounted, Some(&state), args.force, "cuttlefs down -f")?;
    let mount_ended = wait_for_end(&state, args.force);
    if mount_ended.is_err() && !args.force {
        return mount_ended;
    }
    // The mount's process stops its server. This stops a server whose mount's process could not do that.
    if let Some(server) = state.server {
        stop_leftover(server, args.force)?;
    }
    state.forget();
    cuttlefs_common::say!("{} is down", mountpoint.display());
    Ok(())
}

/// Ends an `up` that has not mounted yet, and with it the server that it started.
fn break_off(start: &RunState, process: &RunningProcess) -> anyhow::Result<()> {
    process.terminate()?;
    if !process.wait(STOP_LIMIT)? {
        bail!(
            "`cuttlefs up` (process {}) has not ended after {} s; try again",
            start.mount.pid,
            STOP_LIMIT.as_secs()
        );
    }
    cuttlefs_common::say!("the start of {} was broken off; nothing is up there", start.mountpoint.display());
    Ok(())
}

/// Stops a server that is not a child of this process.
pub(super) fn stop_leftover(server: ProcessId, force: bool) -> anyhow::Result<()> {
    let Some(process) = server.find()? else {
        return Ok(());
    };
    process.terminate()?;
    if process.wait(Duration::from_secs(2))? {
        return Ok(());
    }
    cuttlefs_common::tell!("waiting for cuttlefsd (process {}) to write back and end", server.pid);
    if process.wait(STOP_LIMIT)? {
        return Ok(());
    }
    if force {
        return process.kill();
    }
    bail!(
        "cuttlefsd (process {}) has not ended after {} s; try again, or kill it with: cuttlefs down -f",
        server.pid,
        STOP_LIMIT.as_secs()
    )
}
