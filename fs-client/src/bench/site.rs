//! The directory a benchmark works in: made under the directory given, removed when dropped.

use crate::deadline::within;
use anyhow::{Context as _, bail};
use rustix::io::Errno;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long the directory may take to answer at first.
const LOOK_LIMIT: Duration = Duration::from_secs(10);

/// A directory of our own under the one to be measured.
#[derive(Debug)]
pub(super) struct Site {
    root: PathBuf,
    /// As the person wrote it.
    pub(super) label: String,
}

impl Site {
    /// Makes the directory; `wanted_bytes` must be free there.
    ///
    /// # Errors
    /// If `directory` is none, cannot be written, or has too little space.
    pub(super) fn new(directory: &Path, wanted_bytes: u64) -> anyhow::Result<Self> {
        let label = directory.display().to_string();
        let asked = directory.to_owned();
        let look = move || (asked.is_dir(), rustix::fs::statvfs(&asked));
        let Some((is_directory, space)) = within(LOOK_LIMIT, look)? else {
            bail!(
                "{label} does not answer: its server is away, or hangs; see `cuttlefs status {label}`, and try again when it is back"
            );
        };
        if let Err(Errno::NOTCONN | Errno::CONNABORTED) = space {
            bail!(
                "the process behind the mount {label} has died; take it away with `cuttlefs umount {label}`, and mount it again"
            );
        }
        if !is_directory {
            bail!("{label} is no directory; give the mount point of a mounted file system");
        }
        let space = space.with_context(|| format!("cannot ask {label} for its space"))?;
        let free_bytes = space.f_bavail.saturating_mul(space.f_frsize);
        if free_bytes < wanted_bytes {
            bail!(
                "{label} has {} MiB free and the benchmark writes up to {} MiB; use a smaller --size",
                free_bytes >> 20,
                wanted_bytes >> 20
            );
        }
        let root = directory.join(format!("cuttlefs-bench.{}", std::process::id()));
        std::fs::create_dir(&root).with_context(|| format!("cannot make {}", root.display()))?;
        // Absolute, because fio runs with it as its working directory.
        let root = root.canonicalize().with_context(|| format!("cannot resolve {}", root.display()))?;
        Ok(Self { root, label })
    }

    /// Where to work.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// A subdirectory, made if it is not there.
    pub(super) fn directory(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.root.join(name);
        std::fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.root) {
            cuttlefs_common::tell!("{} could not be removed: {error}", self.root.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_and_removed() {
        let under = tempfile::tempdir().expect("tempdir");
        let site = Site::new(under.path(), 1).expect("site");
        let sub = site.directory("sub").expect("sub");
        std::fs::write(sub.join("file"), b"x").expect("write");
        drop(site);
        assert_eq!(std::fs::read_dir(under.path()).expect("list").count(), 0);
    }

    #[test]
    fn errors_say_what_to_do() {
        let under = tempfile::tempdir().expect("tempdir");
        let missing = Site::new(&under.path().join("no"), 1).expect_err("missing").to_string();
        assert!(missing.contains("give the mount point"), "{missing}");
        let full = Site::new(under.path(), u64::MAX).expect_err("full").to_string();
        assert!(full.contains("smaller --size"), "{full}");
    }
}
