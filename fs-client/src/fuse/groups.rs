//! The groups of a process: FUSE tells one of them only.

use super::kernel::Request;
use std::io;

/// Whether who sends a request may leave the set-group-id bit on a file of this group, as chmod(2) has it: he is in the group,
/// or privileged. A process that cannot be looked at is in no further group.
pub(super) fn may_set_group_id(request: &Request, gid: u32) -> bool {
    is_privileged(request)
        || request.gid() == gid
        || of_process(request.pid()).is_ok_and(|groups| groups.contains(&gid))
}

/// Whether he may, whatever group that is.
pub(super) fn is_privileged(request: &Request) -> bool {
    const ROOT_USER: u32 = 0;
    request.uid() == ROOT_USER
}

/// The further groups of a process.
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
