//! A panic in any kind of thread or task ends the server at once, as a kill would; the next server has all acknowledged changes.

mod client;
mod server;
#[path = "../started/mod.rs"]
mod started;

use client::Client;
use cuttlefs_common::rpc::Request;
use rustix::process::Signal;
use server::Site;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// Every place in the server at which `panic_ends::plant` can plant a panic, but for the threads of `--region odp`.
const PLACES: [&str; 8] =
    ["worker", "request", "write-back", "sweep", "leases", "committer", "acceptor", "cuttlefs-nic"];

#[test]
fn a_panic_ends_the_process_wherever_it_is() {
    if !cfg!(debug_assertions) {
        println!("NOT TESTED: panics are planted in builds with debug assertions only");
        return;
    }
    for place in PLACES {
        let site = Site::new();
        let now: PathBuf = site.pool().with_file_name("now");
        let mut running = site.start_with(&[("CUTTLEFS_TEST_PANIC", &format!("{place}:{}", now.display()))]);
        let mut client = Client::new(&running.endpoint);
        let (ino, filekey) = client.create("file");
        client.write(filekey, 0, b"what was acknowledged").expect("written");
        std::fs::write(&now, "").expect("a file");
        let stop = AtomicBool::new(false);
        let endpoint = running.endpoint.clone();
        let status = std::thread::scope(|scope| {
            // This thread gives every kind of server thread something to do, until the server's end makes its requests fail.
            let working = scope.spawn(|| {
                let work = || {
                    for round in 0.. {
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                        let mut other = Client::new(&endpoint);
                        let (_, filekey) = other.create(&format!("other {round}"));
                        other.write(filekey, 0, b"bytes").expect("written");
                        let _ = other.call(&Request::Heartbeat, |_| ());
                        // The committing thread has work only after some hundred syncs through the workers' rings, so that place gets requests
                        // without pauses.
                        if place != "committer" {
                            std::thread::sleep(Duration::from_millis(20));
                        }
                    }
                };
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            });
            let mut status = None;
            let begun = Instant::now();
            while status.is_none() {
                assert!(begun.elapsed() < PATIENCE, "{place}: the server is still there");
                std::thread::sleep(Duration::from_millis(10));
                status = running.ended();
            }
            stop.store(true, Ordering::Relaxed);
            working.join().expect("no panic gets out of it");
            status.expect("it ended")
        });
        assert_eq!(status.signal(), Some(Signal::ABORT.as_raw()), "{place}: {status}");
        let running = site.start();
        let mut client = Client::new(&running.endpoint);
        assert_eq!(client.read(ino), b"what was acknowledged", "{place}");
        running.stop();
    }
}
