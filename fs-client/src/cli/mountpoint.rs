//! The check of a mount point. An error says the reason and the next step.

use super::made::Made;
use super::run_state::RunState;
use super::unmount::detach;
use crate::deadline::within;
use crate::fuse::MountTable;
use anyhow::{Context, anyhow, bail};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a file system may take to answer about a path. One that takes longer has no process behind it, or one that hangs.
const LOOK_LIMIT: Duration = Duration::from_secs(5);

/// Makes a mount point, unless something is there already. `prepare` checks what that is: it may be a mount that is dead or hangs.
pub(super) fn make(path: &Path) -> anyhow::Result<Made> {
    let table = MountTable::read()?;
    let is_cuttlefs = |place: PathBuf| table.containing(&place).is_some_and(|entry| entry.is_cuttlefs());
    if table.resolve(path).is_ok_and(|place| table.at(&place).is_some() || is_cuttlefs(place)) {
        return Ok(Made::nothing());
    }
    if path.symlink_metadata().is_ok() {
        return Ok(Made::nothing());
    }
    Made::directory(path).context("name another directory to mount at")
}

/// Resolves and checks a mount point. First unmounts a cuttlefs mount there whose process has died.
pub(super) fn prepare(path: &Path, nonempty: bool) -> anyhow::Result<PathBuf> {
    let missing = || format!("there is no {}; make it with: mkdir -p {}", path.display(), path.display());
    let table = MountTable::read()?;
    let mountpoint = table.resolve(path).with_context(missing)?;
    let mounted = table.at(&mountpoint).filter(|entry| entry.mountpoint != Path::new("/"));
    if let Some(entry) = mounted {
        if entry.is_cuttlefs() {
            if serves(&mountpoint)? {
                return Err(already_mounted(&mountpoint)?);
            }
            tracing::warn!(mountpoint = %mountpoint.display(), "taking away a mount whose process has died");
            detach(&mountpoint)?;
            // There may be another mount below it.
            return prepare(path, nonempty);
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
    match look(&mountpoint, |place| std::fs::metadata(place))? {
        Err(error) if error.kind() == ErrorKind::NotFound => bail!("{}", missing()),
        Err(error) => return Err(error).with_context(|| format!("cannot use {}", mountpoint.display())),
        Ok(found) if !found.is_dir() => {
            bail!("{} is not a directory; mount at one", mountpoint.display())
        }
        Ok(_) => {}
    }
    let first =
        look(&mountpoint, |place| Ok::<_, std::io::Error>(std::fs::read_dir(place)?.next().is_some()))?;
    let has_entries = first.with_context(|| format!("cannot list {}", mountpoint.display()))?;
    if has_entries && !nonempty {
        bail!(
            "{} is not empty, and a mount would hide what is in it; mount at an empty directory, or say -o nonempty",
            mountpoint.display()
        );
    }
    Ok(mountpoint)
}

/// Whether a process serves a cuttlefs mount. If the mount's state is written down, the mount need not be accessed, which would hang while its server
/// is away. The state of another user's mount is not known here.
fn serves(mountpoint: &Path) -> anyhow::Result<bool> {
    if let Some(state) = RunState::load(mountpoint)? {
        return Ok(state.mount.find()?.is_some());
    }
    let answer = look(mountpoint, |place| std::fs::metadata(place))?;
    let dead = [libc::ENOTCONN, libc::ECONNABORTED];
    Ok(!answer.is_err_and(|error| error.raw_os_error().is_some_and(|number| dead.contains(&number))))
}

/// Runs `work` on a path, with a time limit for a file system that does not answer.
fn look<T: Send + 'static>(
    place: &Path,
    work: impl FnOnce(&Path) -> std::io::Result<T> + Send + 'static,
) -> anyhow::Result<std::io::Result<T>> {
    let owned = place.to_owned();
    within(LOOK_LIMIT, move || work(&owned))?.with_context(|| {
        let place = place.display();
        format!(
            "the file system at {place} does not answer: who serves it is away or hangs; end it with: cuttlefs umount -f {place}, \
             or, if it is another file system's: umount -l {place}"
        )
    })
}

fn already_mounted(mountpoint: &Path) -> anyhow::Result<anyhow::Error> {
    let place = mountpoint.display();
    Ok(match RunState::load(mountpoint)? {
        Some(RunState { pool: Some(pool), .. }) => anyhow!(
            "{} is up at {place} already; see `cuttlefs status {place}`, and end it with: cuttlefs down {place}",
            pool.display()
        ),
        _ => anyhow!(
            "cuttlefs is mounted at {place} already; see `cuttlefs status {place}`, and unmount it with: cuttlefs umount {place}"
        ),
    })
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
        make(&dir.path().join("a/b")).expect("made with its parents").keep();
        assert!(dir.path().join("a/b").is_dir());
        drop(make(&dir.path().join("a/b")).expect("there already"));
        assert!(dir.path().join("a/b").is_dir());
    }
}
