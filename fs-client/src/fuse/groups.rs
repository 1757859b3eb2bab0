//! The groups of a process, of which FUSE reports only one.

use super::kernel::Request;
use std::io;

/// Whether the caller of a request may leave the set-group-id bit on a file of this group, as in chmod(2): if it is in the group, or privileged. A
/// process that cannot be read has no further groups.
pub(super) fn may_set_group_id(request: &Request, gid: u32) -> bool {
    is_privileged(request)
        || request.gid() == gid
        || of_process(request.pid()).is_ok_and(|groups| groups.contains(&gid))
}

/// Whether the caller may do so for any group.
pub(super) fn is_privileged(request: &Request) -> bool {
    const ROOT_USER: u32 = 0;
    request.uid() == ROOT_USER
}

/// The supplementary groups of a process.
fn of_process(pid: u32) -> io::Result<Vec<u32>> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or_default();
    Ok(line.split_whitespace().filter_map(|group| group.parse().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_in_its_groups() {
        let mut groups: Vec<u32> = rustix::process::getgroups()
            .expect("getgroups")
            .into_iter()
            .map(|group| group.as_raw())
            .collect();
        let mut read = of_process(std::process::id()).expect("status");
        groups.sort_unstable();
        read.sort_unstable();
        assert_eq!(read, groups);
    }
}
