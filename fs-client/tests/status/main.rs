//! The names in `cuttlefs status --json` of a server. Programs ask for figures by name, so `keys.txt` has all of them, and a name that goes or comes is a
//! change of that file.

#[path = "../serving/mod.rs"]
mod serving;

use cuttlefs_client::file::volume::Volume;
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rpc::{Reply, Request};
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use serde_json::Value;
use serving::Serve;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);

/// The status of a server that trusts its clients or not, when its first scrub has ended.
fn status(trust: bool) -> Value {
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
    let server = serving::serve_trusting(&pool, with, trust).expect("start");
    let volume = serving::connect(&listen, "watcher", 1, false);
    let caller = volume.session().own_caller();
    let since = Instant::now();
    let status = loop {
        let parsed = |reply: Reply<'_>| match reply {
            Reply::Status(text) => Ok(serde_json::from_str::<Value>(text).expect("JSON")),
            other => panic!("{other:?}"),
        };
        let status = volume.session().call(&caller, || Request::Status, parsed).expect("status");
        if !status["scrub"]["last"].is_null() {
            break status;
        }
        assert!(since.elapsed() < LONG, "no scrub ends");
        std::thread::sleep(Duration::from_millis(20));
    };
    volume.shut_down();
    server.stop();
    status
}

/// Adds the names of what has no parts.
fn add_names(value: &Value, name: &str, names: &mut BTreeSet<String>) {
    match value {
        Value::Object(parts) if !parts.is_empty() => {
            let dot = if name.is_empty() { "" } else { "." };
            parts.iter().for_each(|(part, value)| add_names(value, &format!("{name}{dot}{part}"), names));
        }
        Value::Array(items) if !items.is_empty() => {
            items.iter().for_each(|item| add_names(item, &format!("{name}[]"), names));
        }
        _ => {
            names.insert(name.to_owned());
        }
    }
}

#[test]
fn figures_keep_their_names() {
    let expected: BTreeSet<String> = include_str!("keys.txt").lines().map(str::to_owned).collect();
    for trust in [true, false] {
        let mut status = status(trust);
        // One for each kind of request.
        assert!(status["rpc"]["attach"].as_u64().is_some_and(|count| count > 0), "{status}");
        status["rpc"] = Value::Null;
        let window = status["page_window"].take();
        match trust {
            true => assert_eq!(window["kind"], "pinned"),
            false => assert!(window.is_null(), "{window}"),
        }
        // A Unix socket is on no network, so there is nothing to protect.
        assert!(status["rnics"][0]["network_security"].is_null(), "{status}");
        let mut names = BTreeSet::new();
        add_names(&status, "", &mut names);
        let gone: Vec<_> = expected.difference(&names).collect();
        let new: Vec<_> = names.difference(&expected).collect();
        assert!(gone.is_empty() && new.is_empty(), "gone: {gone:#?}, new: {new:#?}");
    }
}
