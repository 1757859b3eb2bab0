//! A server in a child process that can be killed. Its clients are in the test's process.

#![allow(dead_code, reason = "each test binary uses its part")]

use super::serving::{self, Serve};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The variable that tells this test's binary to be a server. Its value is the directory, a newline, and the endpoint to listen on.
const CHILD: &str = "CUTTLEFS_TEST_SERVE";
/// How long a server may take to start.
const START_WAIT: Duration = Duration::from_secs(30);

/// A pool, and the process that serves it.
pub struct Site {
    directory: TempDir,
    child: Option<Child>,
    endpoint: Endpoint,
}

impl Site {
    /// A pool of this size, served over `shm` or `tcp`.
    pub fn new(scheme: &str, pool_bytes: u64) -> Self {
        let directory = tempfile::tempdir().expect("directory");
        let dir = directory.path().join("pool");
        serving::make_pool(&FormatOptions { dir, size: pool_bytes, ..FormatOptions::default() }, [3; 16]);
        let endpoint = match scheme {
            "tcp" => "tcp://127.0.0.1:0".to_owned(),
            scheme => format!("{scheme}://{}", directory.path().join("socket").display()),
        };
        let endpoint = endpoint.parse().expect("an endpoint");
        let mut site = Self { directory, child: None, endpoint };
        site.start();
        site
    }

    /// Starts the server.
    pub fn start(&mut self) {
        let ready = self.directory.path().join("ready");
        let _ = std::fs::remove_file(&ready);
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.directory.path().join("server.log"))
            .expect("a log");
        let asked = format!("{}\n{}", self.directory.path().display(), self.endpoint);
        let child = Command::new(std::env::current_exe().expect("this test's binary"))
            .args(["--exact", "serving_child", "--nocapture", "--test-threads=1"])
            .env(CHILD, asked)
            .stdin(Stdio::piped())
            .stdout(log.try_clone().expect("a log"))
            .stderr(log)
            .spawn()
            .expect("child");
        self.child = Some(child);
        let since = Instant::now();
        loop {
            if let Ok(said) = std::fs::read_to_string(&ready)
                && let Some(endpoint) = said.strip_suffix('\n')
            {
                self.endpoint = endpoint.parse().expect("an endpoint");
                return;
            }
            let ended = self.child.as_mut().expect("it was started").try_wait().expect("wait");
            assert!(ended.is_none() && since.elapsed() < START_WAIT, "{ended:?}: {}", self.log());
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// The output of all servers so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("server.log")).unwrap_or_default()
    }

    /// Kills the server.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("it runs");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    /// Has the server stand still: it does nothing until it is killed.
    pub fn freeze(&self) {
        let child = self.child.as_ref().expect("it runs");
        rustix::process::kill_process(rustix::process::Pid::from_child(child), rustix::process::Signal::STOP)
            .expect("stopped");
        // Its threads stop one by one.
        let tasks = format!("/proc/{}/task", child.id());
        let stands_still = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = task.and_then(|task| std::fs::read_to_string(task.path().join("stat")));
            // The state is behind the name, which is in brackets.
            stat.is_ok_and(|stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('T')))
        };
        let since = Instant::now();
        while !std::fs::read_dir(&tasks).expect("its threads").all(stands_still) {
            assert!(since.elapsed() < START_WAIT, "it does not stand still");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops the server, which writes everything back.
    pub fn stop(&mut self) {
        let mut child = self.child.take().expect("it runs");
        drop(child.stdin.take());
        assert!(child.wait().expect("wait").success(), "{}", self.log());
    }

    /// A client with its control thread.
    pub fn connect(&self) -> RemoteVolume {
        serving::connect(&self.endpoint, "killed", 4, true)
    }

    /// A client that comes back to a new server only when it is used.
    pub fn connect_quietly(&self) -> RemoteVolume {
        serving::connect(&self.endpoint, "quiet", 4, false)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
    }
}

/// The body of the child process: serves until its standard input ends. Does nothing unless the variable `CHILD` is set.
pub fn serve_if_asked() {
    let Ok(asked) = std::env::var(CHILD) else { return };
    let (directory, endpoint) = asked.split_once('\n').expect("two words");
    let directory = Path::new(directory);
    let with = Serve {
        frames: 64,
        listen: vec![endpoint.parse().expect("an endpoint")],
        policy: RegionPolicy::default(),
        hotspots: Hotspots::Pages,
        durable_answers: false,
    };
    let running = serving::serve(&directory.join("pool"), with).expect("start");
    let ready = directory.join("ready.new");
    std::fs::write(&ready, format!("{}\n", running.endpoints()[0])).expect("say so");
    std::fs::rename(&ready, directory.join("ready")).expect("say so");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    running.stop();
}
