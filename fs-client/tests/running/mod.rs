//! A server with threads on a pool in a temporary directory, and its clients. The server listens on tcp and shared memory, or on an RNIC.

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
use cuttlefs_server::pages::window::WindowKind;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::serve::RunningServer;
use serving::Serve;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub const CALLER: Caller = Caller::new(0, 0, TraceId(1));
pub const READ_WRITE: OpenHow = OpenHow::READ_WRITE;
pub const READ: OpenHow = OpenHow { write: false, ..READ_WRITE };
/// How long a test waits for something that must happen before it fails.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Sizes of a server.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub pool_bytes: u64,
    pub frames: u64,
    pub hotspots: Hotspots,
    /// What clients that READ the tables read pages from.
    pub window: WindowKind,
}

/// A running server, its pool and its endpoints.
pub struct Site {
    sizes: Sizes,
    running: Option<RunningServer>,
    /// The network's endpoint, then the one of shared memory if the server listens there.
    listen: Vec<Endpoint>,
    // Dropped after the server, which uses it.
    directory: TempDir,
}

impl Site {
    /// Formats a pool and serves it over tcp and shared memory.
    pub fn new(sizes: Sizes) -> Self {
        Self::over(sizes, "tcp://127.0.0.1:0".parse().expect("an endpoint"), true)
    }

    /// Formats a pool and serves it over `network`, and with `mapped` over shared memory too.
    pub fn over(sizes: Sizes, network: Endpoint, mapped: bool) -> Self {
        let directory = tempfile::tempdir().expect("directory");
        let dir = directory.path().join("pool");
        let options = FormatOptions { dir, size: sizes.pool_bytes, ..FormatOptions::default() };
        serving::make_pool(&options, [3; 16]);
        let shm = format!("shm://{}", directory.path().join("socket").display());
        let mut listen = vec![network];
        if mapped {
            listen.push(shm.parse().expect("an endpoint"));
        }
        let mut site = Self { sizes, running: None, listen, directory };
        site.start();
        site
    }

    fn start(&mut self) {
        let with = Serve {
            frames: self.sizes.frames,
            listen: self.listen.clone(),
            policy: RegionPolicy::default(),
            hotspots: self.sizes.hotspots,
            durable_answers: false,
        };
        let running = serving::serve_windowed(&self.directory.path().join("pool"), with, self.sizes.window)
            .expect("start");
        self.listen[0] = running.endpoints().remove(0);
        self.running = Some(running);
    }

    /// Stops the server cleanly and starts the next one.
    pub fn restart(&mut self) {
        self.running.take().expect("it runs").stop();
        self.start();
    }

    /// The network's endpoint.
    pub fn network(&self) -> &Endpoint {
        &self.listen[0]
    }

    /// The server's regions.
    pub fn files(&self) -> &Files {
        &self.running.as_ref().expect("it runs").server().files
    }

    /// Checks what must hold of a server while no request runs: no frame is leaked, no metadata is damaged.
    pub fn check(&self) {
        assert_eq!(self.files().pages().figures().leaked_frames, 0);
        assert_eq!(self.running.as_ref().expect("it runs").server().meta.damage_count(), 0);
    }

    /// A client. `link` is `shm`; or `tables`, for a client that reads the server's tables to translate, as over RDMA hardware; any other name means
    /// the network. With `background` the client has its control thread, which shares counters and pulls bitmaps.
    pub fn connect(&self, link: &str, lanes: usize, background: bool) -> RemoteVolume {
        match link {
            "shm" => serving::connect(&self.listen[1], link, lanes, background),
            "tables" => serving::connect_reading_tables(&self.listen[0], lanes, background),
            _ => serving::connect(&self.listen[0], link, lanes, background),
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

/// Waits until `holds` returns true. Panics after `PATIENCE`.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
