//! Real mounts of the in-memory volume.

use super::MemoryVolume;
use cuttlefs_client::fuse::{FuseSettings, Mounted, mount};
use cuttlefs_common::ids::InodeNo;
use rustix::mount::UnmountFlags;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Not FUSE's root number, so that every test exercises the mapping of inode numbers.
pub const ROOT: InodeNo = InodeNo(1000);

/// A mount of an in-memory volume.
pub struct Mount {
    pub volume: Arc<MemoryVolume>,
    mounted: Option<Mounted>,
    pub dir: tempfile::TempDir,
}

impl Mount {
    /// Mounts a new volume; `None` where FUSE cannot be used.
    pub fn new(settings: FuseSettings) -> Option<Self> {
        let usable = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
        if !usable {
            assert!(std::env::var_os("CUTTLEFS_REQUIRE_FUSE").is_none(), "root and /dev/fuse are needed");
            eprintln!("NOT TESTED: root and /dev/fuse are needed");
            return None;
        }
        Some(Self::of(Arc::new(MemoryVolume::new(ROOT)), settings))
    }

    /// Mounts a volume, which may be mounted already.
    pub fn of(volume: Arc<MemoryVolume>, settings: FuseSettings) -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let mounted =
            mount(Arc::clone(&volume), "shm:///test.sock", dir.path(), &settings, || ()).expect("mount");
        Self { volume, mounted: Some(mounted), dir }
    }

    /// The path of a file in the mount.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The mount.
    pub fn mounted(&self) -> &Mounted {
        self.mounted.as_ref().expect("it is mounted until `end`")
    }

    /// Unmounts, and waits until everything is closed.
    pub fn end(mut self) {
        // The kernel does not wait for the answer to a close, nor does an unmount wait for closes under way.
        for _ in 0..1000 {
            if self.volume.open_handles() == 0 {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(self.volume.open_handles(), 0, "every open was released");
        rustix::mount::unmount(self.dir.path(), UnmountFlags::empty()).expect("unmount");
        let mounted = self.mounted.take().expect("mounted");
        mounted.wait().expect("a clean end");
        assert!(self.volume.is_shut_down());
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.mounted.is_some() {
            // A failed test must neither leave a mount behind nor hang on it.
            let _ = rustix::mount::unmount(self.dir.path(), UnmountFlags::DETACH | UnmountFlags::FORCE);
        }
    }
}
