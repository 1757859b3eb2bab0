//! The server's status as JSON, for `cuttlefs status`: every bounded thing with its bound.
//!
//! Each part has the keys of one subject at the top of the status: `about` (who serves what to whom, and what it promises), `peers` (what clients hold and
//! wait for), `storage` (the pool and its metadata), `memory` (pages in frames, and who reads and changes them), `requests` (counts).

mod about;
mod memory;
mod peers;
mod requests;
mod storage;

use super::{Body, body};
use crate::rpc::connection::Connection;
use crate::rpc::worker::WorkerContext;
use crate::server::Server;
use cuttlefs_common::rpc::{HEADER_LEN, MAX_MESSAGE_BYTES, Reply};
use cuttlefs_common::status::Status;
use serde_json::{Map, Value, json};
use std::rc::Rc;

/// Figures as of about now, as the peer of a connection may know them.
pub(crate) fn status(context: &Rc<WorkerContext>, connection: &Connection) -> Result<Body, Status> {
    let server: &Server = &context.server;
    let parts = [
        about::part(server, &connection.qp().peer()),
        peers::part(server),
        storage::part(server),
        memory::part(server),
        requests::part(server),
    ];
    let mut text = together(parts).to_string();
    if text.len() > MAX_MESSAGE_BYTES as usize - HEADER_LEN - 64 {
        // Cannot happen with as few sessions as are listed and bounded labels. If it does, the answer is still valid JSON.
        text = json!({ "error": "status is too large" }).to_string();
    }
    body(&Reply::Status(&text))
}

/// One object with the keys of all parts.
fn together(parts: impl IntoIterator<Item = Value>) -> Value {
    let mut all = Map::new();
    for part in parts {
        if let Value::Object(part) = part {
            debug_assert!(part.keys().all(|key| !all.contains_key(key)), "two parts have a key");
            all.extend(part);
        }
    }
    Value::Object(all)
}
