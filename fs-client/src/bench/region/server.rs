//! The server under test: `cuttlefsd serve` with the flags of a policy, on a scratch pool, as a child of ours.
//!
//! It listens where the load connects and nowhere else, and is out of the terminal's reach: Ctrl-C is for us, who
//! stop it by its own process id. If we are killed it stops by itself, for its standard input is a pipe of ours. Policies whose data the page cache holds run in a memory cgroup.

use super::cgroup::MemoryCgroup;
use super::policy::Policy;
use super::pool::{ScratchPool, tail};
use super::volume;
use crate::bench::link::Link;
use crate::cli::{Backend as _, Network, Trust, server_binary};
use crate::file::volume::Volume;
use anyhow::{Context as _, bail, ensure};
use cuttlefs_common::rdma::Endpoint;
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Memory of a server's own beside its data, under a cgroup's limit: measured with an empty pool, `cuttlefsd serve
/// --region rpc` has 1.4 MiB of anonymous memory and 0.2 MiB of page tables; sockets and the metadata's cache come on top.
/// More would be more page cache for the data, and flatter what is page-cached.
const OWN_BYTES: u64 = 16 << 20;
/// Its bounce buffers, each worker's.
const BOUNCE_BYTES_PER_WORKER: u64 = 8 << 20;
/// Page tables and the page cache's own tables take about 1/400 of what is mapped and cached.
const TABLES_SHARE: u64 = 256;
/// How long a server may take to answer.
const START_LIMIT: Duration = Duration::from_secs(120);
/// How long it may take to write back and end.
const STOP_LIMIT: Duration = Duration::from_secs(120);
/// Pause between looks at a server that starts or stops.
const ASK_AGAIN: Duration = Duration::from_millis(20);
/// Bytes of a log shown with an error.
const LOG_TAIL_BYTES: u64 = 2048;

/// How to serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ServerOptions {
    pub(super) policy: Policy,
    pub(super) link: Link,
    /// DRAM for data.
    pub(super) memory_bytes: u64,
    /// Threads for RPCs; `None` is the server's default.
    pub(super) workers: Option<usize>,
}

/// What a server counts, as far as it is used here.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct PageCounts {
    pub(super) fetch_hits: u64,
    pub(super) fetch_misses: u64,
    pub(super) promoted: u64,
    pub(super) evicted: u64,
    pub(super) written_back: u64,
    pub(super) direct_writes: u64,
    pub(super) read_modify_writes: u64,
}

#[derive(Deserialize)]
struct Status {
    pid: u32,
    #[serde(default)]
    pages: PageCounts,
    #[serde(default)]
    nic: NicCounts,
}

/// What the NIC engine answered.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct NicCounts {
    /// READs answered with the magic pattern in some page: they travel again, by RPC.
    pub(super) magic_reads: u64,
}

/// What a server has done so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) pages: PageCounts,
    pub(super) nic: NicCounts,
    /// Bytes its process had the disks read (proc_pid_io(5)): also what page faults read.
    pub(super) disk_read_bytes: u64,
    /// Bytes its process had the disks write.
    pub(super) disk_write_bytes: u64,
}

/// A server that runs until it is stopped or dropped.
#[derive(Debug)]
pub(super) struct RegionServer {
    child: Child,
    stopped: bool,
    endpoint: Endpoint,
    socket: Option<PathBuf>,
    log: PathBuf,
    /// Behind the child in drop's order, because a cgroup with a process in it cannot be removed.
    cgroup: Option<MemoryCgroup>,
}

impl RegionServer {
    /// Starts a server and waits until it answers.
    ///
    /// # Errors
    /// Says what it says, or that there is no memory cgroup where one is needed.
    pub(super) fn start(pool: &ScratchPool, options: &ServerOptions) -> anyhow::Result<Self> {
        let binary = server_binary()?;
        let cgroup = if options.policy.page_cached() {
            pool.drop_page_cache()?;
            Some(MemoryCgroup::new(options.memory_bytes + own_bytes(options.workers, pool.pool_bytes()))?)
        } else {
            None
        };
        let socket = std::env::temp_dir().join(format!("cuttlefs-bench.{}.sock", std::process::id()));
        let (endpoint, socket) = match options.link {
            Link::Tcp => (Endpoint::Tcp { host: Ipv4Addr::LOCALHOST.to_string(), port: free_port()? }, None),
            Link::Unix => (Endpoint::Unix(socket.clone()), Some(socket)),
            Link::Shm => (Endpoint::Shm(socket.clone()), Some(socket)),
        };
        let log = pool.directory().join("cuttlefsd.log");
        let open_log = || {
            let opened = std::fs::OpenOptions::new().create(true).append(true).open(&log);
            opened.with_context(|| format!("cannot write {}", log.display()))
        };
        let mut command = match &cgroup {
            Some(cgroup) => cgroup.command(&binary),
            None => Command::new(&binary),
        };
        command.arg("serve").arg("--pool").arg(pool.directory()).args(["--listen", &endpoint.to_string()]);
        command.args(options.policy.server_flags()).args(["--memory", &options.memory_bytes.to_string()]);
        if let Some(workers) = options.workers {
            command.args(["--workers", &workers.to_string()]);
        }
        if options.link == Link::Tcp {
            // What is measured is the RNIC. The pool is a scratch one, and listens on this machine only.
            command.arg("--insecure");
        }
        let child = command
            .arg("--until-stdin-ends")
            // Held open, and never written to, as long as the child is ours.
            .stdin(Stdio::piped())
            .stdout(open_log()?)
            .stderr(open_log()?)
            .process_group(0)
            .spawn()
            .context("cannot start cuttlefsd")?;
        let mut server = Self { child, stopped: false, endpoint, socket, log, cgroup };
        server.wait_until_it_answers().with_context(|| format!("serving as {}", options.policy.label()))?;
        Ok(server)
    }

    fn wait_until_it_answers(&mut self) -> anyhow::Result<()> {
        let started = Instant::now();
        loop {
            super::interrupt::check()?;
            let refusal = match self.status() {
                Ok(status) if status.pid == self.child.id() => return Ok(()),
                Ok(_) => bail!("another cuttlefsd answers at {}", self.endpoint),
                Err(error) => error,
            };
            if let Some(status) = self.child.try_wait().context("cannot wait for cuttlefsd")? {
                self.stopped = true;
                bail!("cuttlefsd ended while it started ({status}): {}", tail(&self.log, LOG_TAIL_BYTES));
            }
            ensure!(
                started.elapsed() < START_LIMIT,
                "cuttlefsd does not answer after {} s ({refusal:#}): {}",
                START_LIMIT.as_secs(),
                tail(&self.log, LOG_TAIL_BYTES)
            );
            std::thread::sleep(ASK_AGAIN);
        }
    }

    fn status(&self) -> anyhow::Result<Status> {
        let text = Network.server_status(&self.endpoint, &Trust::default())?;
        serde_json::from_str(&text).context("the server's status is not as expected")
    }

    /// Where it listens.
    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// A session with it.
    ///
    /// # Errors
    /// If it does not answer.
    pub(super) fn connect(&self, threads: usize) -> anyhow::Result<Arc<dyn Volume>> {
        volume::connect(&self.endpoint, threads)
    }

    /// What it has done so far.
    ///
    /// # Errors
    /// If it does not answer.
    pub(super) fn counts(&self) -> anyhow::Result<Counts> {
        let Status { pages, nic, .. } = self.status()?;
        let path = format!("/proc/{}/io", self.child.id());
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let (disk_read_bytes, disk_write_bytes) = disk_bytes(&text);
        Ok(Counts { pages, nic, disk_read_bytes, disk_write_bytes })
    }

    /// Bytes charged to its cgroup, if it has one.
    pub(super) fn charged_bytes(&self) -> Option<u64> {
        self.cgroup.as_ref()?.used_bytes()
    }

    /// Stops it: everything is written back when this returns.
    ///
    /// # Errors
    /// If it does not end, or not well.
    pub(super) fn stop(mut self) -> anyhow::Result<()> {
        self.end()
    }

    fn end(&mut self) -> anyhow::Result<()> {
        if std::mem::replace(&mut self.stopped, true) {
            return Ok(());
        }
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("no process id")?;
        // Our child that has not been waited for: the number is nobody else's.
        kill_process(pid, Signal::TERM).context("cannot stop cuttlefsd")?;
        let asked = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().context("cannot wait for cuttlefsd")? {
                break status;
            }
            if asked.elapsed() > STOP_LIMIT {
                self.child.kill().context("cannot kill cuttlefsd")?;
                let _ = self.child.wait();
                bail!("cuttlefsd did not end within {} s and was killed", STOP_LIMIT.as_secs());
            }
            std::thread::sleep(ASK_AGAIN);
        };
        ensure!(status.success(), "cuttlefsd ended badly ({status}): {}", tail(&self.log, LOG_TAIL_BYTES));
        Ok(())
    }
}

impl Drop for RegionServer {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            cuttlefs_common::tell!("cuttlefs: {error:#}");
        }
        if let Some(socket) = &self.socket {
            // The server removes it itself if it ends well.
            let _ = std::fs::remove_file(socket);
        }
    }
}

/// What a page-cached server's cgroup may use beyond the data's share.
pub(super) fn own_bytes(workers: Option<usize>, pool_bytes: u64) -> u64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // The server's own choice where nothing was asked for.
    let workers = workers.unwrap_or((cores / 2).clamp(1, 8)) as u64;
    OWN_BYTES + workers * BOUNCE_BYTES_PER_WORKER + pool_bytes / TABLES_SHARE
}

/// A port nobody listens on. Somebody may take it before the server does; then that server's start fails.
fn free_port() -> anyhow::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot find a free port")?;
    Ok(listener.local_addr().context("cannot find a free port")?.port())
}

/// Bytes read from and written to disks, out of a process's io file.
fn disk_bytes(io: &str) -> (u64, u64) {
    let field = |name: &str| {
        io.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(": ")?.parse().ok())
            .unwrap_or_default()
    };
    (field("read_bytes"), field("write_bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_bytes_of_a_process() {
        let io = "rchar: 5\nwchar: 6\nsyscr: 1\nsyscw: 1\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 7\n";
        assert_eq!(disk_bytes(io), (4096, 8192));
        assert_eq!(disk_bytes(""), (0, 0));
    }

    #[test]
    fn a_status_without_page_counts_is_one() {
        let status: Status = serde_json::from_str(r#"{"pid": 5, "version": "x"}"#).expect("parses");
        assert_eq!((status.pid, status.pages.fetch_misses), (5, 0));
    }
}
