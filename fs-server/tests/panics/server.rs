//! Runs the real `cuttlefsd` on a pool of its own.

use super::started::until_it_serves;
use cuttlefs_common::cluster_key::ClusterKey;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::world::SeededRandom;
use rustix::process::{Pid, Signal, kill_process};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

/// The cluster key of the servers here and of their clients.
pub fn key() -> ClusterKey {
    ClusterKey::generate("panics", &SeededRandom::new(5)).expect("a key")
}

/// The directory of a pool and of its server.
pub struct Site {
    base: tempfile::TempDir,
}

impl Site {
    pub fn new() -> Self {
        let base = tempfile::Builder::new().prefix("panics").tempdir_in("/var/tmp").expect("a directory");
        let site = Self { base };
        key().create_file(&site.base.path().join("key")).expect("a key file");
        let made = site.cuttlefsd(&["format", "--size", "8M"]).output().expect("it runs");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        site
    }

    pub fn pool(&self) -> PathBuf {
        self.base.path().join("pool")
    }

    /// The command with its first argument and the pool.
    fn cuttlefsd(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cuttlefsd"));
        command.arg(arguments[0]).arg("--pool").arg(self.pool()).args(&arguments[1..]);
        command
    }

    fn serve(&self) -> Command {
        let mut command = self.cuttlefsd(&["serve", "--durability", "ack", "--memory", "4M"]);
        command.arg("--key").arg(self.base.path().join("key"));
        command.args(["--listen", "tcp://127.0.0.1:0"]).stderr(Stdio::piped());
        command
    }

    /// Starts a server and waits until it serves.
    pub fn start(&self) -> Running {
        self.start_with(&[])
    }

    /// Starts a server with these environment variables and waits until it serves.
    pub fn start_with(&self, environment: &[(&str, &str)]) -> Running {
        let mut child = self.serve().envs(environment.iter().copied()).spawn().expect("it runs");
        let (endpoint, _log) = until_it_serves(&mut child);
        Running { child: Some(child), endpoint }
    }
}

/// A running server; killed when dropped.
pub struct Running {
    child: Option<Child>,
    pub endpoint: Endpoint,
}

impl Running {
    fn signal(&self, signal: Signal) {
        let pid = self.child.as_ref().expect("it runs").id();
        kill_process(Pid::from_raw(pid as i32).expect("a pid"), signal).expect("signalled");
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        let status = self.child.as_mut().expect("it runs").try_wait().expect("it is ours");
        if status.is_some() {
            self.child = None;
        }
        status
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
            // The test failed and left the server running.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
