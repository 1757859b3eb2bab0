//! `cuttlefs umount`.

use super::busy;
use super::run_state::RunState;
use crate::fuse::{MountTable, resolve_mountpoint};
use anyhow::{Context, bail};
use clap::Args;
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// How long the process behind a mount may take to close and write everything once the mount is gone.
const END_LIMIT: Duration = Duration::from_secs(60);

/// Arguments of `umount`.
#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefs umount /mnt
  cuttlefs umount -f /mnt      end a mount that hangs because its server is away")]
pub(super) struct UmountArgs {
    /// Where the file system is mounted
    mountpoint: PathBuf,
    /// Break off requests that wait for the server, and unmount even if files are open
    #[arg(short, long)]
    force: bool,
}

pub(super) fn run(args: &UmountArgs) -> anyhow::Result<()> {
    let mountpoint = resolve_mountpoint(&args.mountpoint)
        .with_context(|| format!("there is no {}", args.mountpoint.display()))?;
    let state = RunState::load(&mountpoint)?;
    let table = MountTable::read().context("cannot read /proc/self/mountinfo")?;
    match table.at(&mountpoint) {
        Some(entry) if entry.is_cuttlefs() => {}
        Some(entry) => {
            bail!("what is mounted at {} is {}, not cuttlefs", mountpoint.display(), entry.fs_type)
        }
        None => bail!("nothing is mounted at {}", mountpoint.display()),
    }
    unmount(&mountpoint, args.force, "cuttlefs umount -f")?;
    if let Some(state) = state {
        wait_for_end(&state)?;
        // Its process does so itself, unless it was killed; what `up` started is `down`'s to end.
        if state.server.is_none() {
            state.forget();
        }
    }
    Ok(())
}

/// Takes a mount away. When it is busy the error says who uses it, and the command that breaks off.
pub(super) fn unmount(mountpoint: &Path, force: bool, forcing: &str) -> anyhow::Result<()> {
    match try_unmount(mountpoint, force)? {
        Unmounted::Done => Ok(()),
        Unmounted::Busy => bail!("{}", busy_text(mountpoint, forcing)),
    }
}

/// What an unmount came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unmounted {
    /// It is gone.
    Done,
    /// Someone uses it.
    Busy,
}

pub(super) fn busy_text(mountpoint: &Path, forcing: &str) -> String {
    let users =
        busy::users(mountpoint).unwrap_or_else(|| "  a process that cannot be seen from here".to_owned());
    format!(
        "{} is in use:\n{users}\nend that and try again, or break off with: {forcing} {}",
        mountpoint.display(),
        mountpoint.display()
    )
}

pub(super) fn try_unmount(mountpoint: &Path, force: bool) -> anyhow::Result<Unmounted> {
    if force {
        // First the connection, so that nobody waits for a server any more; what is open then fails.
        let _ = rustix::mount::unmount(mountpoint, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW);
        detach(mountpoint)?;
        return Ok(Unmounted::Done);
    }
    match rustix::mount::unmount(mountpoint, UnmountFlags::NOFOLLOW) {
        // EINVAL: it is no mount (any more).
        Ok(()) | Err(Errno::INVAL) => Ok(Unmounted::Done),
        Err(Errno::BUSY) => Ok(Unmounted::Busy),
        Err(Errno::PERM) => fusermount(mountpoint, &["-u"]),
        Err(error) => Err(error).with_context(|| format!("cannot unmount {}", mountpoint.display())),
    }
}

/// Takes a mount out of the tree at once; it ends when its last user does.
pub(super) fn detach(mountpoint: &Path) -> anyhow::Result<()> {
    match rustix::mount::unmount(mountpoint, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(Errno::PERM) => fusermount(mountpoint, &["-u", "-z"]).map(|_| ()),
        Err(error) => Err(error).with_context(|| format!("cannot unmount {}", mountpoint.display())),
    }
}

/// The way for those who are not root.
fn fusermount(mountpoint: &Path, arguments: &[&str]) -> anyhow::Result<Unmounted> {
    let output = Command::new("fusermount3")
        .args(arguments)
        .arg("--")
        .arg(mountpoint)
        .output()
        .context("cannot run fusermount3, which users other than root need; install the package fuse3")?;
    let text = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        Ok(Unmounted::Done)
    } else if text.contains("busy") {
        Ok(Unmounted::Busy)
    } else {
        bail!("cannot unmount {}: {}", mountpoint.display(), text.trim_end());
    }
}

/// Waits for the process behind a mount that was taken away, which writes back and ends.
pub(super) fn wait_for_end(state: &RunState) -> anyhow::Result<()> {
    let Some(process) = state.mount.find()? else {
        return Ok(());
    };
    if process.wait(Duration::from_secs(1))? {
        return Ok(());
    }
    eprintln!("unmounted; waiting for what is still being written");
    if process.wait(END_LIMIT)? {
        return Ok(());
    }
    bail!(
        "{} is unmounted, but process {} has not ended after {} s: it waits for {}. \
         It ends when the server is back; to give up on what was not written: kill {}",
        state.mountpoint.display(),
        state.mount.pid,
        END_LIMIT.as_secs(),
        state.source,
        state.mount.pid
    )
}
