//! The memory that this process may have: the machine's, or as much of it as its control groups (cgroup v1 or v2) allow.
//!
//! Frames fill up in the course of reads and writes, so a server with more frames than there is memory runs well for a while
//! and is then killed by the kernel, in the midst of its work. Such a start is refused instead.
//!
//! # Failure
//! A limit that cannot be read does not count: `/proc` or `/sys` may be missing.

use anyhow::ensure;
use cuttlefs_common::size::ByteSize;
use std::path::Path;

/// A server should leave an eighth of the memory to its own other needs and to other programs. If it leaves less, it warns.
const LEFT_SHARE: u64 = 8;

/// A bound on the memory, and the words that say where it comes from.
#[derive(Debug, PartialEq, Eq)]
struct Bound {
    bytes: u64,
    whose: String,
}

/// The memory of this process, as far as known.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct MachineMemory {
    /// The lowest bound.
    bound: Option<Bound>,
    /// The bytes that the kernel estimates to be available now.
    available: Option<u64>,
}

impl MachineMemory {
    /// Reads the figures of this process.
    pub(super) fn read() -> Self {
        Self::below(Path::new("/"))
    }

    /// Reads the figures from `/proc` and `/sys` below `root`.
    fn below(root: &Path) -> Self {
        let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
        let figures = read("proc/meminfo");
        let figure = |name: &str| {
            let line = figures.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
        };
        let machine = figure("MemTotal").map(|bytes| Bound { bytes, whose: "this machine has".to_owned() });
        let groups = read("proc/self/cgroup");
        let limits = groups.lines().filter_map(group_of).flat_map(|(hierarchy, group, file)| {
            // Each group along the path has its own limit.
            Path::new(group).ancestors().filter_map(move |group| {
                let file = Path::new(hierarchy).join(group).join(file);
                let bytes = std::fs::read_to_string(root.join(&file)).ok()?.trim().parse().ok()?;
                Some(Bound { bytes, whose: format!("the control group allows (/{})", file.display()) })
            })
        });
        let bound = machine.into_iter().chain(limits).min_by_key(|bound| bound.bytes);
        Self { bound, available: figure("MemAvailable") }
    }

    /// Checks whether a server may have `memory` bytes. Returns a warning if these are most of the memory.
    ///
    /// # Errors
    /// If `memory` is more than the memory that this process may have.
    pub(super) fn admit(&self, option: &str, memory: u64) -> anyhow::Result<Option<String>> {
        let Some(Bound { bytes, whose }) = &self.bound else { return Ok(None) };
        let asked = ByteSize(memory);
        ensure!(
            memory <= *bytes,
            "{option} {asked} is more than there is: {whose} {}; give less, such as {}",
            ByteSize(*bytes),
            ByteSize((bytes / 2).next_multiple_of(1 << 20))
        );
        if memory > bytes - bytes / LEFT_SHARE {
            return Ok(Some(format!(
                "{option} {asked} is nearly all there is ({whose} {}); the kernel may end the server when it is used",
                ByteSize(*bytes)
            )));
        }
        let lacking = self.available.filter(|available| memory > *available);
        Ok(lacking.map(|available| {
            format!(
                "{option} {asked} is more than is free now ({}); other programs have the rest",
                ByteSize(available)
            )
        }))
    }
}

/// The hierarchy, the group in it, and the file of its limit, of a line of `/proc/self/cgroup` (`ID:CONTROLLERS:/PATH`, cgroups(7)) that is about
/// memory. Version 2 has one hierarchy, whose ID is 0, and names no controllers.
fn group_of(line: &str) -> Option<(&'static str, &str, &'static str)> {
    let (id, rest) = line.split_once(':')?;
    let (controllers, group) = rest.split_once(":/")?;
    if id == "0" && controllers.is_empty() {
        return Some(("sys/fs/cgroup", group, "memory.max"));
    }
    let has_memory = controllers.split(',').any(|controller| controller == "memory");
    has_memory.then_some(("sys/fs/cgroup/memory", group, "memory.limit_in_bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// A machine with 8 GiB, and control groups with these limits along the path.
    fn machine(limits: &[(&str, &str)]) -> MachineMemory {
        let root = tempfile::tempdir().expect("directory");
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            std::fs::write(path, text).expect("written");
        };
        write("proc/meminfo", "MemTotal:        8388608 kB\nMemFree: 1 kB\nMemAvailable:    4194304 kB\n");
        write("proc/self/cgroup", "0::/system.slice/cuttlefsd.service\n");
        limits.iter().for_each(|(group, limit)| write(&format!("sys/fs/cgroup/{group}memory.max"), limit));
        MachineMemory::below(root.path())
    }

    #[test]
    fn more_than_there_is_is_refused() {
        let plain = machine(&[("system.slice/", "max\n")]);
        let refused = plain.admit("--memory", 9 * GIB).expect_err("too much").to_string();
        assert!(refused.contains("--memory 9G") && refused.contains("this machine has 8G"), "{refused}");
        assert!(refused.contains("such as 4G"), "{refused}");
        assert!(plain.admit("--memory", 8 * GIB).expect("just").expect("a warning").contains("nearly all"));
        assert!(
            plain.admit("--memory", 5 * GIB).expect("enough").expect("a warning").contains("free now (4G)")
        );
        assert_eq!(plain.admit("--memory", 4 * GIB).expect("enough"), None);
    }

    #[test]
    fn the_narrowest_control_group_counts() {
        let groups = [("system.slice/", "1073741824\n"), ("system.slice/cuttlefsd.service/", "2147483648\n")];
        let refused = machine(&groups).admit("--memory", 2 * GIB).expect_err("too much").to_string();
        assert!(refused.contains("allows (/sys/fs/cgroup/system.slice/memory.max) 1G"), "{refused}");
    }

    #[test]
    fn groups_of_both_versions_are_found() {
        let v1 = ("sys/fs/cgroup/memory", "user/one", "memory.limit_in_bytes");
        assert_eq!(group_of("4:memory:/user/one"), Some(v1));
        assert_eq!(group_of("4:cpu,memory:/user/one"), Some(v1));
        assert_eq!(group_of("0::/user/one"), Some(("sys/fs/cgroup", "user/one", "memory.max")));
        for other in ["9:name=systemd:/memory", "1:cpu:/", "3:cpuset:/memory:/a", "0:", "memory", ""] {
            assert_eq!(group_of(other), None, "{other}");
        }
    }

    #[test]
    fn what_is_not_known_bounds_nothing() {
        let nothing = MachineMemory::below(Path::new("/nowhere"));
        assert_eq!(nothing.admit("--memory", u64::MAX).expect("not known"), None);
        assert!(MachineMemory::read().bound.is_some_and(|bound| bound.bytes > 0), "of this machine");
    }
}
