//! `cuttlefsd`, the real program, which can be stopped, frozen and killed.

use cuttlefs_common::cluster_key::ClusterKey;
use cuttlefs_common::persist::LogDeviceKind;
use cuttlefs_common::rdma::{Endpoint, LinkKind};
use cuttlefs_common::world::SeededRandom;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

/// Whoever knows it may connect.
pub fn key() -> ClusterKey {
    ClusterKey::generate("early", &SeededRandom::new(5)).expect("a key")
}

/// A pool and how it is served.
pub struct Site {
    base: tempfile::TempDir,
    pub link: LinkKind,
    pub device: LogDeviceKind,
    pub early: &'static str,
    pub ring_dir: Option<PathBuf>,
}

impl Site {
    pub fn new(link: LinkKind, device: LogDeviceKind) -> Self {
        let base = tempfile::Builder::new().prefix("early").tempdir_in("/var/tmp").expect("a directory");
        let site = Self { base, link, device, early: "wflush", ring_dir: None };
        key().create_file(&site.base.path().join("key")).expect("a key file");
        let made = site.cuttlefsd(&["format", "--size", "8M"]).output().expect("it runs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        site
    }

    pub fn pool(&self) -> PathBuf {
        self.base.path().join("pool")
    }

    pub fn rings(&self) -> Vec<PathBuf> {
        let Ok(entries) = std::fs::read_dir(self.pool().join("rings")) else { return Vec::new() };
        entries.map(|entry| entry.expect("entry").path()).collect()
    }

    /// The command with its first argument and the pool.
    pub fn cuttlefsd(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuttlefsd"));
        command.arg(arguments[0]).arg("--pool").arg(self.pool()).args(&arguments[1..]);
        command
    }

    fn endpoint(&self) -> String {
        let path = |name: &str| self.base.path().join(name).display().to_string();
        match self.link {
            LinkKind::Shm => format!("shm://{}", path("shm")),
            LinkKind::Unix => format!("unix://{}", path("unix")),
            _ => "tcp://127.0.0.1:0".to_owned(),
        }
    }

    pub fn serve(&self) -> Command {
        let mut command =
            self.cuttlefsd(&["serve", "--durability", "ack", "--log-size", "16M", "--memory", "4M"]);
        command.args(["--early", self.early, "--ring-device", self.device.label()]);
        command.arg("--key").arg(self.base.path().join("key"));
        command.args(["--listen", &self.endpoint()]).stderr(Stdio::piped());
        if let Some(ring_dir) = &self.ring_dir {
            command.arg("--ring-dir").arg(ring_dir);
        }
        command
    }

    /// Starts a server and waits until it serves.
    pub fn start(&self) -> Running {
        self.start_with(&[])
    }

    /// The same, with something in its environment.
    pub fn start_with(&self, environment: &[(&str, &str)]) -> Running {
        let mut child = self.serve().envs(environment.iter().copied()).spawn().expect("it runs");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        let mut log = String::new();
        let mut endpoint = None;
        loop {
            let Some(Ok(line)) = lines.next() else { panic!("it did not start: {log}") };
            log.push_str(&line);
            log.push('\n');
            if let Some((_, at)) = line.split_once("listening endpoint=") {
                endpoint = Some(at.trim().parse().expect("an endpoint"));
            } else if line.contains(" serving ") {
                break;
            }
        }
        // Its messages must go somewhere.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(|line| eprintln!("{line}")));
        Running { child: Some(child), endpoint: endpoint.expect("it listens"), log }
    }

    /// Starts a server and kills it a moment later, wherever it is by then.
    pub fn start_and_kill(&self, after: std::time::Duration) {
        let mut child = self.serve().stderr(Stdio::null()).spawn().expect("it runs");
        std::thread::sleep(after);
        child.kill().expect("killed");
        child.wait().expect("ended");
    }
}

/// A server that runs.
pub struct Running {
    child: Option<Child>,
    pub endpoint: Endpoint,
    /// What it said until it served.
    pub log: String,
}

impl Running {
    fn signal(&self, signal: Signal) {
        let pid = self.child.as_ref().expect("it runs").id();
        kill_process(Pid::from_raw(pid as i32).expect("a pid"), signal).expect("signalled");
    }

    /// It does nothing more; its memory is as it is.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        let pid = self.child.as_ref().expect("it runs").id();
        // Each of its threads stops by itself, and a moment later.
        let is_stopped = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.expect("a task").path().join("stat"));
            // The name before it may hold anything.
            stat.is_ok_and(|stat| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" T")))
        };
        while !std::fs::read_dir(format!("/proc/{pid}/task")).expect("its threads").all(is_stopped) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        let status = self.child.as_mut().expect("it runs").try_wait().expect("it is ours");
        if status.is_some() {
            self.child = None;
        }
        status
    }

    /// It goes on.
    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    pub fn kill(mut self) {
        let mut child = self.child.take().expect("it runs");
        child.kill().expect("killed");
        child.wait().expect("ended");
    }

    pub fn stop(mut self) {
        self.signal(Signal::TERM);
        let status = self.child.take().expect("it runs").wait().expect("ended");
        assert!(status.success(), "{status}");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // A test failed.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
