//! The native API's file regions against a real server: keys that are handed over, write grants, one-sided changes, moves of pages, and what a kill does to
//! all of them.

mod atomics;
mod grants;
#[path = "../killed/mod.rs"]
mod killed;
mod kills;
mod moves;
mod pieces;
mod regions;
mod relay;
#[path = "../serving/mod.rs"]
mod serving;
mod space;
mod walk;

use cuttlefs_client::file::volume::{Caller, Volume};
use cuttlefs_client::native::{
    Completion, ConnectOptions, Done, File, InodeNo, NativeError, OpenOptions, Queue, Rights, Session, Status,
};
use cuttlefs_common::attr::{InodeFlags, SetAttr};
use cuttlefs_common::ids::TraceId;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::{PolicyName, RegionPolicy};
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::serve::RunningServer;
use serving::Serve;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The links whose targets translate.
const LINKS: [&str; 2] = ["unix", "tcp"];
const LONG: Duration = Duration::from_secs(60);
const PAGE: usize = 4096;
const CALLER: Caller = Caller::new(0, 0, TraceId(1));
const BOTH: Rights = Rights { read: true, write: true };
const READING: Rights = Rights { read: true, write: false };

/// The server of tests that kill it, which runs in a process of its own.
#[test]
fn serving_child() {
    killed::serve_if_asked();
}

/// A server in this process, over all links at once.
struct Server {
    running: RunningServer,
    _directory: TempDir,
}

impl Server {
    fn new(frames: u64) -> Self {
        Self::with(frames, RegionPolicy::default())
    }

    fn with(frames: u64, policy: RegionPolicy) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let dir = directory.path().join("pool");
        serving::make_pool(&FormatOptions { dir, size: 32 << 20, ..FormatOptions::default() }, [7; 16]);
        let at = |link: &str| format!("{link}://{}", directory.path().join(link).display());
        let listen = [at("shm"), at("unix"), "tcp://127.0.0.1:0".to_owned()];
        let listen = listen.iter().map(|url| url.parse().expect("an endpoint")).collect();
        let with = Serve { frames, listen, policy, hotspots: Hotspots::Pages, durable_answers: false };
        let running = serving::serve(&directory.path().join("pool"), with).expect("served");
        Self { running, _directory: directory }
    }

    fn endpoint(&self, link: &str) -> Endpoint {
        let is_it = |endpoint: &Endpoint| endpoint.to_string().starts_with(&format!("{link}://"));
        self.running.endpoints().into_iter().find(is_it).expect("it listens")
    }

    fn connect(&self, link: &str) -> Session {
        Session::connect(&self.endpoint(link).to_string(), ConnectOptions::default()).expect("a session")
    }

    /// Changes attributes, as a mount does.
    fn set_attr(&self, ino: InodeNo, set: SetAttr) {
        let volume = serving::connect(&self.endpoint("unix"), "attributes", 1, false);
        volume.set_attr(&CALLER, ino, set).expect("set");
    }

    /// Requests to the server so far, but for heartbeats.
    fn requests(&self) -> u64 {
        self.running.server().counters.rpc().map(|(_, count)| count).sum()
    }
}

fn pattern(len: usize, salt: u64) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(salt.wrapping_mul(2) + 7) >> 3) as u8).collect()
}

fn read(file: &File, offset: u64, len: usize) -> Result<Vec<u8>, NativeError> {
    let mut bytes = vec![0; len];
    let got = file.read_at(offset, &mut bytes)?;
    bytes.truncate(got);
    Ok(bytes)
}

fn status<T: std::fmt::Debug>(result: Result<T, NativeError>) -> Status {
    match result {
        Err(NativeError::Server(status)) => status,
        other => panic!("{other:?}"),
    }
}

fn has_ended<T: std::fmt::Debug>(result: Result<T, NativeError>) {
    assert!(matches!(result, Err(NativeError::RegionEnded)), "{result:?}");
}

/// The ends of everything that is under way, by token.
fn all_of(queue: &mut Queue) -> BTreeMap<u64, Result<Done, NativeError>> {
    let since = Instant::now();
    let mut ends = Vec::new();
    while queue.outstanding() > 0 {
        assert!(since.elapsed() < LONG, "nothing comes of {} requests", queue.outstanding());
        queue.wait(&mut ends, 16, LONG);
    }
    ends.into_iter().map(|Completion { token, result }| (token, result)).collect()
}

fn done(ends: &BTreeMap<u64, Result<Done, NativeError>>, token: u64) -> Done {
    *ends[&token].as_ref().unwrap_or_else(|error| panic!("request {token}: {error}"))
}

fn create(session: &Session, name: &str, contents: &[u8]) -> File {
    let file = session.open(name, OpenOptions::CREATE).expect("made");
    file.write_at(0, contents).expect("written");
    file
}
