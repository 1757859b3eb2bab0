//! What runs: one small file for each mount, in the runtime directory.
//!
//! `/run/cuttlefs` for root, `$XDG_RUNTIME_DIR/cuttlefs` or `/tmp/cuttlefs-UID` for others. It is gone after a
//! reboot, like the processes. Files are named by a hash of the mount point, because a mount point may be longer
//! than a file name, and a Unix socket's path must be shorter than 108 bytes.
//!
//! A mount point that was just unmounted may be mounted again before the process that served it has ended. So whoever
//! removes a file makes sure that it is its own, under the directory's lock (`locked`).

use super::process::ProcessId;
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What serves one mount point.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RunState {
    /// Where.
    pub mountpoint: PathBuf,
    /// The server's endpoint.
    pub source: String,
    /// The file of the key that is shown there.
    pub key: Option<PathBuf>,
    /// The process behind the mount.
    pub mount: ProcessId,
    /// The server that `up` started for it.
    pub server: Option<ProcessId>,
    /// That server's pool.
    pub pool: Option<PathBuf>,
}

impl RunState {
    /// Writes it down. A reader sees all of it or none.
    pub(super) fn save(&self) -> anyhow::Result<()> {
        let path = file(&self.mountpoint, "json")?;
        let new = path.with_extension("new");
        let text = serde_json::to_vec_pretty(self).context("cannot encode the state")?;
        locked(|| {
            fs::write(&new, text)
                .and_then(|()| fs::rename(&new, &path))
                .with_context(|| format!("cannot write {}", path.display()))
        })
    }

    /// What is written down for a mount point.
    pub(super) fn load(mountpoint: &Path) -> anyhow::Result<Option<Self>> {
        let path = file(mountpoint, "json")?;
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        };
        let state: Self = serde_json::from_slice(&text)
            .with_context(|| format!("{} is damaged; remove it if nothing runs", path.display()))?;
        // Another mount point of the same hash, however unlikely, is not ours.
        Ok((state.mountpoint == mountpoint).then_some(state))
    }

    /// Forgets it, and its log if that says nothing; what a later mount at the same place wrote down stays.
    pub(super) fn forget(&self) {
        // Nothing depends on these files being gone: a mount that is not there is noticed by whoever reads them.
        let _ = locked(|| {
            if Self::load(&self.mountpoint)?.as_ref() != Some(self) {
                return Ok(());
            }
            let path = file(&self.mountpoint, "json")?;
            fs::remove_file(&path)?;
            let log = path.with_extension("log");
            if log.metadata()?.len() == 0 {
                fs::remove_file(log)?;
            }
            Ok(())
        });
    }
}

/// Does something while no other process removes or replaces a file of the runtime directory.
pub(super) fn locked<T>(something: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let path = directory()?;
    let directory = fs::File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    // Let go when it is closed.
    rustix::fs::flock(&directory, rustix::fs::FlockOperation::LockExclusive)
        .with_context(|| format!("cannot lock {}", path.display()))?;
    something()
}

/// The file for a mount point or pool, in the runtime directory, which is made if it is missing.
pub(super) fn file(of: &Path, extension: &str) -> anyhow::Result<PathBuf> {
    Ok(directory()?.join(format!("{:016x}.{extension}", fnv1a(of.as_os_str().as_bytes()))))
}

fn directory() -> anyhow::Result<PathBuf> {
    let user = rustix::process::geteuid();
    let path = match std::env::var_os("XDG_RUNTIME_DIR") {
        _ if user.is_root() => PathBuf::from("/run/cuttlefs"),
        Some(runtime) => Path::new(&runtime).join("cuttlefs"),
        None => PathBuf::from(format!("/tmp/cuttlefs-{}", user.as_raw())),
    };
    // 0755: other users may connect to the sockets in it, which check who they are; only its owner writes.
    match fs::DirBuilder::new().mode(0o755).create(&path) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error).with_context(|| format!("cannot make {}", path.display())),
    }
    let found = fs::symlink_metadata(&path).with_context(|| format!("cannot read {}", path.display()))?;
    if !found.is_dir() || found.uid() != user.as_raw() || found.mode() & 0o022 != 0 {
        bail!("{} is not a directory that only you can write; remove it and try again", path.display());
    }
    Ok(path)
}

/// FNV-1a, 64 bit (draft-eastlake-fnv): the same in every build, which std's hashers do not promise.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_vectors() {
        assert_eq!(fnv1a(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(fnv1a(b"foobar"), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn what_is_saved_is_loaded() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let state = RunState {
            mountpoint: dir.path().to_owned(),
            source: "tcp://a:1".to_owned(),
            key: Some("/etc/key".into()),
            mount: ProcessId { pid: 1, start_ticks: 2 },
            server: None,
            pool: None,
        };
        assert_eq!(RunState::load(dir.path()).expect("load"), None);
        state.save().expect("save");
        assert_eq!(RunState::load(dir.path()).expect("load"), Some(state.clone()));
        fs::write(file(dir.path(), "json").expect("path"), b"{").expect("write");
        assert!(RunState::load(dir.path()).expect_err("damaged").to_string().contains("damaged"));
        state.save().expect("save");
        state.forget();
        assert_eq!(RunState::load(dir.path()).expect("load"), None);
    }

    #[test]
    fn a_mount_forgets_itself_and_not_the_next_one_at_its_place() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let before = RunState {
            mountpoint: dir.path().to_owned(),
            source: "tcp://a:1".to_owned(),
            key: Some("/etc/key".into()),
            mount: ProcessId { pid: 1, start_ticks: 2 },
            server: None,
            pool: None,
        };
        let after = RunState { mount: ProcessId { pid: 1, start_ticks: 3 }, ..before.clone() };
        before.save().expect("save");
        after.save().expect("save");
        before.forget();
        assert_eq!(RunState::load(dir.path()).expect("load"), Some(after.clone()));
        after.forget();
        assert_eq!(RunState::load(dir.path()).expect("load"), None);
    }
}
