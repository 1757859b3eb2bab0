//! Where a test mounts, and the processes behind its mount.

use crate::calling::eventually;
use cuttlefs_client::fuse::MountTable;
use std::path::{Path, PathBuf};

/// A directory with a mount point and a pool. Dropping it unmounts the mount point.
pub struct Place {
    pub dir: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        let place = Self { dir: tempfile::tempdir().expect("temporary directory") };
        std::fs::create_dir(place.mnt()).expect("mkdir");
        place
    }

    pub fn mnt(&self) -> PathBuf {
        self.dir.path().canonicalize().expect("canonical").join("mnt")
    }

    pub fn pool(&self) -> PathBuf {
        self.dir.path().join("pool")
    }

    pub fn mnt_text(&self) -> String {
        self.mnt().to_str().expect("UTF-8").to_owned()
    }

    pub fn pool_text(&self) -> String {
        self.pool().to_str().expect("UTF-8").to_owned()
    }

    /// Waits until a mount in another process has answered the kernel: before that it is in the mount table, and cannot be unmounted in order.
    pub fn wait_for_mount(&self) {
        eventually("the mount", || self.is_mounted());
        std::fs::metadata(self.mnt()).expect("the root's attributes");
    }

    pub fn is_mounted(&self) -> bool {
        MountTable::read().expect("mounts").at(&self.mnt()).is_some()
    }

    pub fn server_pid(&self) -> i32 {
        std::fs::read_to_string(self.pool().join("pid")).expect("pid").parse().expect("a number")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let flags = rustix::mount::UnmountFlags::DETACH | rustix::mount::UnmountFlags::FORCE;
        let _ = rustix::mount::unmount(self.mnt(), flags);
    }
}

/// Whether a process is gone, or all its threads are dead: the first thread may be dead long before the last one has closed the mount.
pub fn has_ended(pid: i32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.into_iter().all(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // "Z" is a zombie, "X" is dead.
        stat.rsplit_once(')').is_none_or(|(_, rest)| rest.starts_with(" Z") || rest.starts_with(" X"))
    })
}

pub fn runs(pid: i32) -> bool {
    !has_ended(pid)
}

/// Whether a thread of this name waits in the kernel, so that no signal reaches it.
pub fn waits_in_the_kernel(pid: i32, name: &str) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.into_iter().any(|thread| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        stat.contains(&format!("({name}) D "))
    })
}

/// The watchdog of a mount's process, if it runs.
pub fn watchdog_of(pid: i32) -> Option<i32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let mut children = children.split_ascii_whitespace().filter_map(|child| child.parse().ok());
    children.find(|child| {
        std::fs::read_to_string(format!("/proc/{child}/cmdline"))
            .is_ok_and(|words| words.contains(&format!("\0mount-watchdog\0{pid}\0")))
    })
}

pub fn signal(pid: i32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a process");
    rustix::process::kill_process(pid, signal).expect("signal");
}

pub fn state_in(file: &Path) -> Option<serde_json::Value> {
    serde_json::from_slice(&std::fs::read(file).ok()?).ok()
}

/// The file in which the state of a mount is written down.
pub fn state_file(mountpoint: &str) -> PathBuf {
    let states = std::fs::read_dir("/run/cuttlefs").expect("runtime directory");
    let mut paths = states.flatten().map(|entry| entry.path());
    paths
        .find(|path| {
            path.extension().is_some_and(|extension| extension == "json")
                && state_in(path).is_some_and(|state| state["mountpoint"] == mountpoint)
        })
        .expect("a state file")
}

/// The process that serves a mount.
pub fn mount_pid(mountpoint: &str) -> i32 {
    let state = state_in(&state_file(mountpoint)).expect("a state");
    state["mount"]["pid"].as_i64().expect("a number") as i32
}
