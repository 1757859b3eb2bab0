//! A memory cgroup of our own for one server: page cache can be limited in no other way.
//!
//! It is made beside or below this process's own cgroup, in whichever hierarchy has the memory controller (version 1
//! or 2), and removed when it is dropped, which the kernel allows once the server has ended.
//!
//! The server joins before it is executed, through a shell's `exec`: what it allocates and caches is then charged to
//! it from the first byte on, and its process id stays that of the child we started.

use anyhow::{Context as _, bail};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Which interface a hierarchy has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

/// A hierarchy that can limit memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    version: Version,
    mount: PathBuf,
    /// The part of the hierarchy that is mounted there.
    root: PathBuf,
}

/// A cgroup with a limit.
#[derive(Debug)]
pub(super) struct MemoryCgroup {
    path: PathBuf,
    version: Version,
}

impl MemoryCgroup {
    /// Makes one in which `limit_bytes` can be used.
    ///
    /// # Errors
    /// Says why there can be none: no controller, or no right to use it.
    pub(super) fn new(limit_bytes: u64) -> anyhow::Result<Self> {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").context("cannot read mountinfo")?;
        let own = std::fs::read_to_string("/proc/self/cgroup").context("cannot read /proc/self/cgroup")?;
        let mut refusals = Vec::new();
        for hierarchy in hierarchies(&mounts) {
            for parent in parents(&hierarchy, &own) {
                match Self::below(&parent, hierarchy.version, limit_bytes) {
                    Ok(cgroup) => return Ok(cgroup),
                    Err(error) => refusals.push(format!("{error:#}")),
                }
            }
        }
        match refusals.first() {
            Some(refusal) => bail!(
                "no memory cgroup can be made ({refusal}); run as root, or delegate the memory controller"
            ),
            None => bail!("this system has no memory cgroups"),
        }
    }

    fn below(parent: &Path, version: Version, limit_bytes: u64) -> anyhow::Result<Self> {
        if version == Version::Two {
            let enabled = std::fs::read_to_string(parent.join("cgroup.subtree_control"))
                .with_context(|| format!("cannot read {}", parent.display()))?;
            if !enabled.split_whitespace().any(|controller| controller == "memory") {
                bail!("{} does not hand the memory controller on", parent.display());
            }
        }
        let path = parent.join(format!("cuttlefs-bench.{}", std::process::id()));
        // One that an earlier server of this process left because it was still ending.
        let _ = std::fs::remove_dir(&path);
        std::fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        let cgroup = Self { path, version };
        let write = |name: &str, value: &str| {
            std::fs::write(cgroup.path.join(name), value)
                .with_context(|| format!("cannot write {name} of {}", cgroup.path.display()))
        };
        match version {
            Version::One => write("memory.limit_in_bytes", &limit_bytes.to_string())?,
            Version::Two => {
                write("memory.max", &limit_bytes.to_string())?;
                // What is swapped out would be memory beyond the limit. Missing where there is no swap.
                let _ = write("memory.swap.max", "0");
            }
        }
        Ok(cgroup)
    }

    /// A command that runs `program` in here, as the child itself.
    pub(super) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", r#"echo $$ > "$0" && exec "$@""#])
            .arg::<OsString>(self.path.join("cgroup.procs").into())
            .arg(program);
        command
    }

    /// Bytes charged to it now.
    pub(super) fn used_bytes(&self) -> Option<u64> {
        let name = match self.version {
            Version::One => "memory.usage_in_bytes",
            Version::Two => "memory.current",
        };
        std::fs::read_to_string(self.path.join(name)).ok()?.trim().parse().ok()
    }
}

impl Drop for MemoryCgroup {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir(&self.path) {
            cuttlefs_common::tell!("{} could not be removed: {error}", self.path.display());
        }
    }
}

/// Hierarchies with the memory controller, out of a mountinfo (proc_pid_mountinfo(5)).
fn hierarchies(mountinfo: &str) -> Vec<Hierarchy> {
    mountinfo
        .lines()
        .filter_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            let mut left = left.split(' ').skip(3);
            let (root, mount) = (PathBuf::from(left.next()?), PathBuf::from(left.next()?));
            let mut right = right.split(' ');
            let (kind, options) = (right.next()?, right.nth(1)?);
            let version = match kind {
                "cgroup" if options.split(',').any(|option| option == "memory") => Version::One,
                "cgroup2" => Version::Two,
                _ => return None,
            };
            Some(Hierarchy { version, mount, root })
        })
        .collect()
}

/// Where in a hierarchy to make one: in our own cgroup and then in those above it. In version 2 a cgroup that has
/// processes cannot hand controllers on, so it is one of those above.
fn parents(hierarchy: &Hierarchy, own_cgroups: &str) -> Vec<PathBuf> {
    let own = own_cgroups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let is_it = match hierarchy.version {
            Version::One => controllers.split(',').any(|controller| controller == "memory"),
            Version::Two => controllers.is_empty(),
        };
        is_it.then(|| Path::new(path))
    });
    // A path outside of what is mounted (a container's) leaves only the mount itself.
    let inside = own.and_then(|own| own.strip_prefix(&hierarchy.root).ok()).unwrap_or(Path::new(""));
    hierarchy
        .mount
        .join(inside)
        .ancestors()
        .take_while(|path| path.starts_with(&hierarchy.mount))
        .map(Path::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 23 0:27 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
31 23 0:28 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory
32 23 0:29 /box /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn both_versions_are_found() {
        let found = hierarchies(MOUNTS);
        assert_eq!(found.len(), 2);
        assert_eq!(
            (found[0].version, found[0].mount.as_path()),
            (Version::One, Path::new("/sys/fs/cgroup/memory"))
        );
        assert_eq!((found[1].version, found[1].root.as_path()), (Version::Two, Path::new("/box")));
    }

    #[test]
    fn our_own_cgroup_comes_first_and_the_mount_last() {
        let [one, two] = &hierarchies(MOUNTS)[..] else { panic!("two hierarchies") };
        let own = "9:cpu:/x\n4:cpuset,memory:/a/b\n0::/box/user/app\n";
        let memory = Path::new("/sys/fs/cgroup/memory");
        assert_eq!(parents(one, own), [memory.join("a/b"), memory.join("a"), memory.to_owned()]);
        let unified = Path::new("/sys/fs/cgroup/unified");
        assert_eq!(parents(two, own), [unified.join("user/app"), unified.join("user"), unified.to_owned()]);
        assert_eq!(parents(two, "0::/elsewhere\n"), [unified.to_owned()]);
        assert_eq!(parents(one, ""), [memory.to_owned()]);
    }
}
