//! What operations cost that does not hang on the machine's mood: syncs and bytes of the disks, context switches of the two
//! programs, RPCs. Counted before and behind a run; what somebody else did meanwhile is in the disks' figures, too.
//!
//! The disks tell of themselves (`/proc/diskstats`, Documentation/admin-guide/iostats.rst: field 7 is sectors written, field 16
//! flushes). Of a cuttlefs mount `cuttlefs status` names the processes and their counts; of other directories there is
//! nothing to ask, and their figures are of the disks only.

use anyhow::Context as _;
use serde::Serialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Bytes of a sector in the kernel's figures, whatever the disk's is.
const SECTOR_BYTES: u64 = 512;

/// What one operation cost, on the average of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(super) struct Costs {
    /// Cache flushes of all disks of this machine.
    pub(super) syncs: f64,
    /// Bytes they wrote.
    pub(super) disk_bytes: f64,
    /// Context switches of the server and of the mount.
    pub(super) switches: Option<[f64; 2]>,
    /// Requests of the mount to its server.
    pub(super) rpcs: Option<f64>,
}

/// Counts at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Counts {
    syncs: u64,
    disk_bytes: u64,
    switches: Option<[u64; 2]>,
    rpcs: Option<u64>,
}

/// Whom to count for a directory.
#[derive(Debug)]
pub(super) struct Counted {
    /// The mount it is in, if that is one of cuttlefs and its processes are on this machine.
    mount: Option<Mount>,
}

#[derive(Debug)]
struct Mount {
    directory: PathBuf,
    /// The server's and the mount's.
    processes: [u64; 2],
}

impl Counted {
    /// Finds out who serves a directory.
    pub(super) fn of(directory: &Path) -> Self {
        let mount = status(directory).and_then(|status| {
            let process = |value: &Value| value["pid"].as_u64();
            let processes = [process(&status)?, process(&status["mount"])?];
            // A server on another machine has a number there, which may be anybody's here.
            let is_server = comm(processes[0]).is_some_and(|name| name.starts_with("cuttlefsd"));
            is_server.then(|| Mount { directory: directory.to_owned(), processes })
        });
        Self { mount }
    }

    /// Nobody but the disks.
    #[cfg(test)]
    pub(super) fn nobody() -> Self {
        Self { mount: None }
    }

    /// Counts now.
    ///
    /// # Errors
    /// The kernel's figures cannot be read.
    pub(super) fn now(&self) -> anyhow::Result<Counts> {
        let text = std::fs::read_to_string("/proc/diskstats").context("cannot read /proc/diskstats")?;
        let (syncs, disk_bytes) = disks(&text, &is_whole_disk);
        let Some(mount) = &self.mount else {
            return Ok(Counts { syncs, disk_bytes, ..Counts::default() });
        };
        let rpcs = status(&mount.directory).and_then(|status| status["mount"]["rpc_requests"].as_u64());
        let [server, client] = mount.processes.map(switches);
        let switches = server.zip(client).map(|(server, client)| [server, client]);
        Ok(Counts { syncs, disk_bytes, switches, rpcs })
    }
}

impl Counts {
    /// What each of so many operations cost since `before`.
    pub(super) fn since(&self, before: &Self, operations: u64) -> Costs {
        let each = |now: u64, then: u64| now.saturating_sub(then) as f64 / operations.max(1) as f64;
        Costs {
            syncs: each(self.syncs, before.syncs),
            disk_bytes: each(self.disk_bytes, before.disk_bytes),
            switches: self
                .switches
                .zip(before.switches)
                .map(|(now, then)| [each(now[0], then[0]), each(now[1], then[1])]),
            rpcs: self.rpcs.zip(before.rpcs).map(|(now, then)| each(now, then)),
        }
    }
}

/// What `cuttlefs status` says of a directory; nothing if it is in no mount of cuttlefs.
fn status(directory: &Path) -> Option<Value> {
    let program = std::env::current_exe().ok()?;
    let mut command = Command::new(program);
    command.args(["status", "--json"]).arg(directory).stderr(Stdio::null());
    serde_json::from_slice(&command.output().ok()?.stdout).ok()
}

fn comm(process: u64) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{process}/comm")).ok()
}

/// Context switches of all threads that a process has now.
fn switches(process: u64) -> Option<u64> {
    let mut sum = 0;
    for task in std::fs::read_dir(format!("/proc/{process}/task")).ok()? {
        // A thread may end meanwhile.
        if let Ok(text) = std::fs::read_to_string(task.ok()?.path().join("status")) {
            sum += switches_in(&text);
        }
    }
    Some(sum)
}

/// Voluntary and other switches in a thread's `status` (proc_pid_status(5)).
fn switches_in(status: &str) -> u64 {
    status
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(name, _)| name.ends_with("voluntary_ctxt_switches"))
        .filter_map(|(_, count)| count.trim().parse::<u64>().ok())
        .sum()
}

/// Whether a device is a disk of its own: what a partition or a loop device writes a disk writes, too.
fn is_whole_disk(name: &str) -> bool {
    Path::new("/sys/block").join(name.replace('/', "!")).join("device").exists()
}

/// Flushes and bytes written, of all disks together.
fn disks(diskstats: &str, is_disk: &dyn Fn(&str) -> bool) -> (u64, u64) {
    let mut sum = (0, 0);
    for line in diskstats.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let count = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok()).unwrap_or(0);
        if fields.get(2).is_some_and(|name| is_disk(name)) {
            sum.0 += count(18);
            sum.1 += count(9) * SECTOR_BYTES;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_disks_say_is_summed() {
        let text = "   7       0 loop0 9 9 9 9 9 9 99 9 0 9 9 0 0 0 0 99 9
 254       0 vda 1 2 3 4 5 6 100 8 0 10 11 12 13 14 15 70 17
 254       1 vda1 1 2 3 4 5 6 100 8 0 10 11 12 13 14 15 7 17
   8       0 sda 1 2 3 4 5 6 11 8 0 10 11 12 13 14 15 2 17
   8      16 old 1 2 3 4 5 6 1 8 0 10 11
";
        let is_disk = |name: &str| ["vda", "sda", "old"].contains(&name);
        assert_eq!(disks(text, &is_disk), (72, 112 * 512));
    }

    #[test]
    fn switches_of_both_kinds_count() {
        let text = "Name:\tx\nvoluntary_ctxt_switches:\t150\nnonvoluntary_ctxt_switches:\t545\nThreads:\t1\n";
        assert_eq!(switches_in(text), 695);
        assert!(switches(u64::from(std::process::id())).is_some_and(|count| count > 0));
        assert_eq!(switches(u64::MAX), None);
    }

    #[test]
    fn costs_are_of_one_operation() {
        let before = Counts { syncs: 10, disk_bytes: 4096, switches: Some([5, 7]), rpcs: Some(100) };
        let now = Counts { syncs: 30, disk_bytes: 12288, switches: Some([15, 7]), rpcs: Some(120) };
        let costs = now.since(&before, 20);
        assert_eq!((costs.syncs, costs.disk_bytes), (1.0, 409.6));
        assert_eq!((costs.switches, costs.rpcs), (Some([0.5, 0.0]), Some(1.0)));
        assert_eq!(now.since(&Counts { rpcs: None, ..before }, 20).rpcs, None);
    }
}
