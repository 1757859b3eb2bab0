//! A server with threads on a pool in a temporary directory that listens on tcp and shared memory at once, and clients.

#![allow(dead_code, reason = "each test binary uses its part")]

#[path = "../serving/mod.rs"]
pub mod serving;

use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Caller, FsError, Handle, OpenHow, Volume};
use cuttlefs_common::ids::TraceId;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_server::files::Files;
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::serve::RunningServer;
use serving::Serve;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub const CALLER: Caller = Caller::new(0, 0, TraceId(1));
pub const READ_WRITE: OpenHow = OpenHow::READ_WRITE;
pub const READ: OpenHow = OpenHow { write: false, ..READ_WRITE };
/// How long a test waits for what must come before it says that it did not.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Sizes of a server.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub pool_bytes: u64,
    pub frames: u64,
    pub hotspots: Hotspots,
}

/// A running server and where it is.
pub struct Site {
    sizes: Sizes,
    running: Option<RunningServer>,
    tcp: Endpoint,
    shm: Endpoint,
    // After the server, which uses it.
    directory: TempDir,
}

impl Site {
    /// Formats a pool and serves it.
    pub fn new(sizes: Sizes) -> Self {
        let directory = tempfile::tempdir().expect("directory");
        let dir = directory.path().join("pool");
        let options = FormatOptions { dir, size: sizes.pool_bytes, ..FormatOptions::default() };
        serving::make_pool(&options, [3; 16]);
        let shm = format!("shm://{}", directory.path().join("socket").display());
        let mut site = Self {
            sizes,
            running: None,
            tcp: "tcp://127.0.0.1:0".parse().expect("an endpoint"),
            shm: shm.parse().expect("an endpoint"),
            directory,
        };
        site.start();
        site
    }

    fn start(&mut self) {
        let with = Serve {
            frames: self.sizes.frames,
            listen: vec![self.tcp.clone(), self.shm.clone()],
            policy: RegionPolicy::default(),
            hotspots: self.sizes.hotspots,
            durable_answers: false,
        };
        let running = serving::serve(&self.directory.path().join("pool"), with).expect("start");
        self.tcp = running.endpoints().remove(0);
        self.running = Some(running);
    }

    /// Stops the server cleanly and starts the next one.
    pub fn restart(&mut self) {
        self.running.take().expect("it runs").stop();
        self.start();
    }

    /// The server's regions.
    pub fn files(&self) -> &Files {
        &self.running.as_ref().expect("it runs").server().files
    }

    /// What must hold of a server that nobody is asking for anything.
    pub fn check(&self) {
        assert_eq!(self.files().pages().figures().leaked_frames, 0);
        assert_eq!(self.running.as_ref().expect("it runs").server().meta.damage_count(), 0);
    }

    /// A client over `tcp` or `shm`, or one (`tables`) over `tcp` that translates by reading the server's tables, as over RDMA hardware.
    /// `background`: it has its control thread, which shares counters and pulls bitmaps.
    pub fn connect(&self, link: &str, lanes: usize, background: bool) -> RemoteVolume {
        match link {
            "tcp" => serving::connect(&self.tcp, link, lanes, background),
            "shm" => serving::connect(&self.shm, link, lanes, background),
            "tables" => serving::connect_reading_tables(&self.tcp, lanes, background),
            _ => panic!("no link is called {link}"),
        }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            running.stop();
        }
    }
}

/// Reads from a file.
pub fn read(volume: &RemoteVolume, handle: Handle, offset: u64, len: u32) -> Result<Vec<u8>, FsError> {
    let mut bytes = Vec::new();
    volume.read(&CALLER, handle, offset, len, &mut |got| bytes.extend_from_slice(got))?;
    Ok(bytes)
}

/// One of a client's figures.
pub fn figure(volume: &RemoteVolume, name: &str) -> u64 {
    volume.figures().into_iter().find(|(found, _)| *found == name).expect("a figure of that name").1
}

/// Tries again and again; fails if it does not come true in time.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
