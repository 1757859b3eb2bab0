//! Requests, and the bytes that they moved.

use crate::server::Server;
use serde_json::{Map, Value, json};
use std::sync::atomic::Ordering::Relaxed;

pub(super) fn part(server: &Server) -> Value {
    let counters = &server.counters;
    let rpc: Map<String, Value> =
        counters.rpc().map(|(name, count)| (name.to_owned(), json!(count))).collect();
    json!({
        "rpc_requests": counters.rpc().map(|(_, count)| count).sum::<u64>(),
        "sparse_fetches": rpc.get("fetch").cloned().unwrap_or_default(),
        "rpc": rpc,
        "bad_messages": counters.bad_messages.load(Relaxed),
        "written_bytes": counters.written_bytes.load(Relaxed),
        "fetched_bytes": counters.fetched_bytes.load(Relaxed),
        "fetched_aside": counters.fetched_aside.load(Relaxed),
        "syncs_ahead": counters.syncs_ahead.load(Relaxed),
    })
}
