//! A mount that ends leaves no session on the server, whichever thread ends it and whatever it was used for.

mod serving;

use cuttlefs_client::file::volume::{Caller, Volume};
use cuttlefs_common::ids::{InodeNo, TraceId};
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rpc::{Reply, Request};
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use serving::Serve;
use std::time::{Duration, Instant};

const MOUNTS: usize = 60;
/// Much shorter than a lease, after which a session would end by itself.
const SOON: Duration = Duration::from_secs(10);

#[test]
fn mounts_that_end_leave_no_session_behind() {
    let directory = tempfile::tempdir().expect("directory");
    let pool = directory.path().join("pool");
    let options = FormatOptions { dir: pool.clone(), size: 1 << 20, ..FormatOptions::default() };
    serving::make_pool(&options, [7; 16]);
    let listen: Endpoint =
        format!("unix://{}", directory.path().join("socket").display()).parse().expect("an endpoint");
    let with = Serve {
        frames: 64,
        listen: vec![listen.clone()],
        policy: RegionPolicy::default(),
        hotspots: Hotspots::Pages,
        durable_answers: false,
    };
    let server = serving::serve(&pool, with).expect("start");
    let watcher = serving::connect(&listen, "watcher", 1, false);
    let sessions = || {
        let caller = watcher.session().own_caller();
        let count = |reply: Reply<'_>| match reply {
            Reply::Status(text) => {
                let status: serde_json::Value = serde_json::from_str(text).expect("JSON");
                Ok(status["sessions"]["count"].as_u64().expect("a count"))
            }
            other => panic!("{other:?}"),
        };
        watcher.session().call(&caller, || Request::Status, count).expect("status")
    };
    for mount in 0..MOUNTS {
        let volume = serving::connect(&listen, "mount", 8, true);
        let caller = Caller { trace: TraceId(1), ..volume.session().own_caller() };
        std::thread::scope(|scope| {
            // Some mounts are used, by threads that each use a lane of their own.
            for _ in 0..mount % 3 {
                scope.spawn(|| volume.get_attr(&caller, InodeNo::ROOT).expect("attributes"));
            }
        });
        // The thread that ends the mount has sent no request before.
        std::thread::scope(|scope| scope.spawn(|| volume.shut_down()).join().expect("no panic"));
        let begun = Instant::now();
        while sessions() > 1 {
            assert!(begun.elapsed() < SOON, "mount {mount} left its session behind");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    watcher.shut_down();
    server.stop();
}
