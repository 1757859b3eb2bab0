//! A panic in any kind of thread or task ends the server at once, as a kill would; the next one has what was acknowledged.

use super::client::Client;
use super::server::Site;
use super::wait_until;
use cuttlefs_common::persist::LogDeviceKind;
use cuttlefs_common::rdma::LinkKind;
use cuttlefs_common::rpc::{Request, ring_of};
use rustix::process::Signal;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Every place of the server that `panic_ends::plant` names, but for the threads of `--region odp`.
const PLACES: [&str; 13] = [
    "worker",
    "request",
    "write-back",
    "sweep",
    "leases",
    "committer",
    "redo-log",
    "acceptor",
    "cuttlefs-nic",
    "cuttlefs-persist",
    "durable-accept",
    "durable-poll",
    "durable-settle",
];

#[test]
fn a_panic_ends_the_process_wherever_it_is() {
    if !cfg!(debug_assertions) {
        println!("NOT TESTED: panics are planted in builds with debug assertions only");
        return;
    }
    for place in PLACES {
        let site = Site::new(LinkKind::Tcp, LogDeviceKind::File);
        let now: PathBuf = site.pool().with_file_name("now");
        let mut running = site.start_with(&[("CUTTLEFS_TEST_PANIC", &format!("{place}:{}", now.display()))]);
        let mut client = Client::new(&running.endpoint);
        let (ino, filekey) = client.create("file");
        client.write(filekey, 0, b"what was acknowledged").expect("written");
        std::fs::write(&now, "").expect("a file");
        let stop = AtomicBool::new(false);
        let endpoint = running.endpoint.clone();
        let status = std::thread::scope(|scope| {
            // Until the server goes, and with it who works: whatever kind of thread it is has something to do.
            let working = scope.spawn(|| {
                let work = || {
                    for round in 0.. {
                        if stop.load(Ordering::Relaxed) {
                            return;
                        }
                        let mut other = Client::new(&endpoint);
                        let (ino, filekey) = other.create(&format!("other {round}"));
                        other.write(filekey, 0, b"bytes").expect("written");
                        let mut ring = other.ring(ring_of(ino), 0).expect("a ring");
                        let ticket = ring.write(ino, Some(0), b"early").expect("persistent");
                        ring.answer(ticket).expect("executed");
                        let _ = other.call(&Request::Heartbeat, |_| ());
                        std::thread::sleep(std::time::Duration::from_millis(20));
                    }
                };
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            });
            let mut status = None;
            wait_until(&format!("{place}: the server is still there"), || {
                status = running.ended();
                status.is_some()
            });
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
