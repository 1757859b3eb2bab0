//! A server in a process of its own, which can be killed, and its clients in this one.

#![allow(dead_code, reason = "each test binary uses its part")]

use super::serving::{self, Rings, Serve, TakenRings};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_common::persist::LogDeviceKind;
use cuttlefs_common::rdma::{Endpoint, HELLO_WAIT};
use cuttlefs_common::rpc::EarlyDoor;
use cuttlefs_common::rpc::durable::Kind;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::region::Hotspots;
use cuttlefs_server::region::policy::RegionPolicy;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// What tells this test's binary to be a server: the directory, then a word for the rings, then where to listen, then how
/// many milliseconds who connects for a ring may say nothing.
const CHILD: &str = "CUTTLEFS_TEST_SERVE_RINGS";
/// How long a server may take to start.
const START_WAIT: Duration = Duration::from_secs(30);

/// What early writes are offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offer {
    /// None, and answers are not durable.
    Unlogged,
    /// None.
    Nothing,
    /// Rings on emulated persistent memory.
    Memory(Kind),
    /// Rings on a synced file.
    File(Kind),
}

impl Offer {
    fn rings(self, hello_wait: Duration) -> Option<Rings> {
        let (kind, device) = match self {
            Self::Unlogged | Self::Nothing => return None,
            Self::Memory(kind) => (kind, LogDeviceKind::PmemEmulated),
            Self::File(kind) => (kind, LogDeviceKind::File),
        };
        Some(Rings { kind, device, hello_wait })
    }

    fn word(self) -> String {
        match self {
            Self::Unlogged => "unlogged".to_owned(),
            Self::Nothing => "none".to_owned(),
            Self::Memory(kind) => format!("memory {}", kind.label()),
            Self::File(kind) => format!("file {}", kind.label()),
        }
    }

    fn from_word(word: &str) -> Self {
        let kind = |label: &str| Kind::ALL.into_iter().find(|kind| kind.label() == label).expect("a kind");
        match word.split_once(' ') {
            None if word == "unlogged" => Self::Unlogged,
            None => Self::Nothing,
            Some(("memory", label)) => Self::Memory(kind(label)),
            Some((_, label)) => Self::File(kind(label)),
        }
    }
}

/// A pool, and the process that serves it.
pub struct Site {
    directory: TempDir,
    child: Option<Child>,
    endpoint: Endpoint,
    hello_wait: Duration,
}

impl Site {
    /// A pool of this size, served over `shm` or `tcp`.
    pub fn new(scheme: &str, pool_bytes: u64, offer: Offer) -> Self {
        Self::with_hello_wait(scheme, pool_bytes, offer, HELLO_WAIT)
    }

    /// The same; who connects for a ring may say nothing for so long.
    pub fn with_hello_wait(scheme: &str, pool_bytes: u64, offer: Offer, hello_wait: Duration) -> Self {
        let directory = tempfile::tempdir().expect("directory");
        let dir = directory.path().join("pool");
        serving::make_pool(&FormatOptions { dir, size: pool_bytes, ..FormatOptions::default() }, [3; 16]);
        let endpoint = match scheme {
            "tcp" => "tcp://127.0.0.1:0".to_owned(),
            scheme => format!("{scheme}://{}", directory.path().join("socket").display()),
        };
        let endpoint = endpoint.parse().expect("an endpoint");
        let mut site = Self { directory, child: None, endpoint, hello_wait };
        site.start(offer);
        site
    }

    /// Starts the server.
    pub fn start(&mut self, offer: Offer) {
        let ready = self.directory.path().join("ready");
        let _ = std::fs::remove_file(&ready);
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.directory.path().join("server.log"))
            .expect("a log");
        let (directory, hello_ms) = (self.directory.path().display(), self.hello_wait.as_millis());
        let asked = format!("{directory}\n{}\n{}\n{hello_ms}", offer.word(), self.endpoint);
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

    /// Where the server is.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The server's process.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("it runs").id()
    }

    /// What the servers said.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("server.log")).unwrap_or_default()
    }

    /// Files of rings that are there.
    pub fn ring_files(&self) -> Vec<PathBuf> {
        let rings = serving::rings_of(&self.directory.path().join("pool"));
        let Ok(entries) = std::fs::read_dir(rings) else { return Vec::new() };
        entries.map(|entry| entry.expect("entry").path()).collect()
    }

    /// Takes places for rings until there are no more, and holds them.
    pub fn take_all_rings(&self) -> TakenRings {
        let door = EarlyDoor::Beside.endpoint(&self.endpoint).expect("a path");
        let mut rings = TakenRings::none(door);
        rings.take_all();
        rings
    }

    fn data(&self) -> PathBuf {
        self.directory.path().join("pool/data")
    }

    /// The device fails under what is on it by now: cut off behind what the pool needs to go on. Gives what was there.
    pub fn cut_data(&self) -> Vec<u8> {
        let whole = std::fs::read(self.data()).expect("read");
        let file = std::fs::OpenOptions::new().write(true).open(self.data()).expect("opened");
        file.set_len(64 * 1024).expect("cut");
        whole
    }

    /// It is well again; what was written since stays.
    pub fn mend_data(&self, whole: &[u8]) {
        let mut mended = std::fs::read(self.data()).expect("read");
        mended.resize(whole.len(), 0);
        for (page, before) in mended.chunks_mut(4096).zip(whole.chunks(4096)) {
            if page.iter().all(|byte| *byte == 0) {
                page.copy_from_slice(before);
            }
        }
        std::fs::write(self.data(), mended).expect("mended");
    }

    /// Kills the server.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("it runs");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    /// Stops the server cleanly.
    pub fn stop(&mut self) {
        let mut child = self.child.take().expect("it runs");
        drop(child.stdin.take());
        let status = child.wait().expect("wait");
        assert!(status.success(), "{status}: {}", self.log());
    }

    /// A client with its threads.
    pub fn connect(&self) -> RemoteVolume {
        serving::connect(&self.endpoint, "early", 4, true)
    }

    /// As a mount with `-o early=off`.
    pub fn connect_without_early_writes(&self) -> RemoteVolume {
        serving::connect_with(&self.endpoint, "late", 4, true, false)
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

/// The server, in a process of its own: serves until its standard input ends. Does nothing unless it is asked to.
pub fn serve_if_asked() {
    let Ok(asked) = std::env::var(CHILD) else { return };
    let mut words = asked.splitn(4, '\n');
    let mut next = || words.next().expect("a word");
    let (directory, offer, endpoint) = (Path::new(next()), Offer::from_word(next()), next());
    let hello_ms = next().parse().expect("a number");
    let with = Serve {
        frames: 64,
        listen: vec![endpoint.parse().expect("an endpoint")],
        policy: RegionPolicy::default(),
        hotspots: Hotspots::Pages,
        durable_answers: offer != Offer::Unlogged,
        rings: offer.rings(Duration::from_millis(hello_ms)),
    };
    let running = serving::serve(&directory.join("pool"), with).expect("start");
    let ready = directory.join("ready.new");
    std::fs::write(&ready, format!("{}\n", running.endpoints()[0])).expect("say so");
    std::fs::rename(&ready, directory.join("ready")).expect("say so");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    running.stop();
}
