//! Is this a place to mount at? If not, why, and what to do.

use super::run_state::RunState;
use super::unmount::detach;
use crate::fuse::{MountTable, resolve_mountpoint};
use anyhow::{Context, anyhow, bail};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Resolves and checks a mount point. A mount of ours whose process has died is taken away first.
pub(super) fn prepare(path: &Path, nonempty: bool) -> anyhow::Result<PathBuf> {
    let mountpoint = resolve_mountpoint(path).with_context(|| {
        format!("there is no {}; make it with: mkdir -p {}", path.display(), path.display())
    })?;
    let table = MountTable::read().context("cannot read /proc/self/mountinfo")?;
    let mounted = table.at(&mountpoint).filter(|entry| entry.mountpoint != Path::new("/"));
    if mounted.is_some_and(|entry| entry.is_cuttlefs())
        && RunState::load(&mountpoint)?
            .is_some_and(|state| state.mount.find().is_ok_and(|found| found.is_some()))
    {
        // Known without looking into it, which hangs while its server is away.
        return Err(already_mounted(&mountpoint));
    }
    match std::fs::metadata(&mountpoint) {
        Err(error)
            if error.raw_os_error() == Some(libc::ENOTCONN) && mounted.is_some_and(|m| m.is_cuttlefs()) =>
        {
            tracing::warn!(mountpoint = %mountpoint.display(), "taking away a mount whose process has died");
            detach(&mountpoint)?;
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("there is no {}; make it with: mkdir -p {}", path.display(), path.display());
        }
        Err(error) => {
            return Err(error).with_context(|| format!("cannot use {}", mountpoint.display()));
        }
        Ok(found) if !found.is_dir() => {
            bail!("{} is not a directory; mount at one", mountpoint.display())
        }
        Ok(_) => {
            if let Some(entry) = mounted {
                if entry.is_cuttlefs() {
                    return Err(already_mounted(&mountpoint));
                }
                if !nonempty {
                    bail!(
                        "{} ({}) is mounted at {}; mount elsewhere, or over it with -o nonempty",
                        entry.source,
                        entry.fs_type,
                        mountpoint.display()
                    );
                }
            }
        }
    }
    let has_entries = std::fs::read_dir(&mountpoint)
        .with_context(|| format!("cannot list {}", mountpoint.display()))?
        .next()
        .is_some();
    if has_entries && !nonempty {
        bail!(
            "{} is not empty, and a mount would hide what is in it; mount at an empty directory, or say -o nonempty",
            mountpoint.display()
        );
    }
    Ok(mountpoint)
}

fn already_mounted(mountpoint: &Path) -> anyhow::Error {
    let place = mountpoint.display();
    anyhow!("cuttlefs is mounted at {place} already; unmount it with: cuttlefs umount {place}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(path: &Path) -> String {
        format!("{:#}", prepare(path, false).expect_err("refused"))
    }

    #[test]
    fn refusals_say_what_to_do() {
        let dir = tempfile::tempdir().expect("temporary directory");
        assert!(prepare(dir.path(), false).is_ok());
        let missing = dir.path().join("none");
        assert!(refusal(&missing).contains(&format!("mkdir -p {}", missing.display())));
        assert!(refusal(&missing.join("deeper")).contains("mkdir -p"));
        std::fs::write(dir.path().join("f"), b"").expect("write");
        assert!(refusal(&dir.path().join("f")).contains("not a directory"));
        assert!(refusal(dir.path()).contains("-o nonempty"));
        assert!(prepare(dir.path(), true).is_ok());
        assert!(refusal(Path::new("/proc")).contains("is mounted at /proc"));
    }
}
