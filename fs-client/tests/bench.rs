//! `cuttlefs bench` as a process of its own, beside a server that goes away.

mod serving;

use cuttlefs_client::file::volume::{Caller, OpenHow, Volume};
use cuttlefs_common::ids::{InodeNo, TraceId};
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::region::Hotspots;
use cuttlefs_server::region::policy::RegionPolicy;
use serving::Serve;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const CALLER: Caller = Caller::new(0, 0, TraceId(1));
const READ_WRITE: OpenHow = OpenHow { read: true, write: true, append: false, truncate: false, sync: false };
const FILE_BYTES: usize = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// Killed if the test fails.
struct Bench(Child);

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a stream says, line by line, while the test does something else.
fn lines(stream: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (give, take) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if give.send(line).is_err() {
                return;
            }
        }
    });
    take
}

#[track_caller]
fn wait_for(said: &mpsc::Receiver<String>, what: &str) {
    let since = Instant::now();
    while !said.recv_timeout(PATIENCE.saturating_sub(since.elapsed())).expect(what).contains(what) {}
}

/// Its load waits for a server that is gone, and would do so for ever: one signal ends it.
#[test]
fn one_signal_ends_a_benchmark_whose_server_is_gone() {
    let directory = tempfile::tempdir().expect("directory");
    let pool = directory.path().join("pool");
    let format = FormatOptions { dir: pool.clone(), size: 16 << 20, ..FormatOptions::default() };
    serving::make_pool(&format, [3; 16]);
    let endpoint = format!("unix://{}", directory.path().join("socket").display());
    let with = Serve {
        frames: 64,
        listen: vec![endpoint.parse().expect("an endpoint")],
        policy: RegionPolicy::default(),
        hotspots: Hotspots::Pages,
        durable_answers: false,
        rings: None,
    };
    let running = serving::serve(&pool, with).expect("start");
    let volume = serving::connect(&running.endpoints()[0], "maker", 1, false);
    let made = volume.create(&CALLER, InodeNo::ROOT, b"f", 0o666, true, READ_WRITE).expect("create");
    assert_eq!(volume.write(&CALLER, made.1.handle, 0, &vec![0; FILE_BYTES]), Ok(FILE_BYTES as u32));
    volume.release(made.1.handle);
    volume.shut_down();
    let arguments = format!(
        "bench octopus-client --endpoint {endpoint} --name f --file-bytes {FILE_BYTES} --value-bytes 4096 \
         --write-percent 100 --theta 0.9 --clustered-bytes 4096 --seed 1 --warmup-ms 0 --measure-ms 86400000"
    );
    let child = Command::new(env!("CARGO_BIN_EXE_cuttlefs"))
        .args(arguments.split(' '))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut bench = Bench(child.expect("it starts"));
    let said = lines(bench.0.stdout.take().expect("piped"));
    let complained = lines(bench.0.stderr.take().expect("piped"));
    wait_for(&said, "ready");
    let mut stdin = bench.0.stdin.take().expect("piped");
    writeln!(stdin, "begin").expect("it listens");
    let written = || running.server().counters.written_bytes.load(std::sync::atomic::Ordering::Relaxed);
    let (before, since) = (written(), Instant::now());
    while written() == before {
        assert!(since.elapsed() < PATIENCE, "it writes nothing");
        std::thread::sleep(Duration::from_millis(10));
    }
    running.stop();
    wait_for(&complained, "server is away");
    let pid = rustix::process::Pid::from_raw(bench.0.id() as i32).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("signal");
    let since = Instant::now();
    let status = loop {
        if let Some(status) = bench.0.try_wait().expect("it is ours") {
            break status;
        }
        assert!(since.elapsed() < PATIENCE, "it waits for the server");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert_eq!(status.code(), Some(1), "{status}");
    wait_for(&complained, "cuttlefs: interrupted");
}
