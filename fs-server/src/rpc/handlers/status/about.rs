//! Who serves what to whom, and what it promises.

use crate::config::Durability;
use crate::rights::{Account, ExportRule};
use crate::rnics::{Rnic, RnicIndex};
use crate::server::Server;
use crate::session::GATHER;
use cuttlefs_common::rdma::{Endpoint, PeerIdentity};
use cuttlefs_common::rpc::PROTOCOL_VERSION;
use cuttlefs_common::rpc::durable::Kind;
use serde_json::{Value, json};

/// For this peer.
pub(super) fn part(server: &Server, peer: &PeerIdentity) -> Value {
    let about = &server.about;
    let durability = if about.durable_answers { Durability::Ack } else { Durability::Fsync };
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "rpc_protocol": PROTOCOL_VERSION,
        "pid": std::process::id(),
        "epoch": format!("{:016x}", about.epoch),
        "uptime_seconds": server.clock.monotonic().as_secs(),
        "links": about.endpoints.lock().iter().map(|(_, link)| link.to_string()).collect::<Vec<_>>(),
        "rnics": rnics(server),
        "exports": exports(server, peer),
        "durability": durability.to_string(),
        // Whether every client may read the frames, and with them every file.
        "trust_clients": about.trust_clients,
        // How a request becomes persistent: it comes by SEND (large contents are pulled), and the server flushes.
        "durable_rpc": {
            "kind": Kind::SRFlush.label(),
            "synced": if about.durable_answers { "before the answer" } else { "at fsync" },
        },
        "recovery": {
            // Clients of the server before this one that have not said `Recovered`.
            "awaited_clients": server.sessions.awaited(),
            "locks_wait": server.sessions.is_grace_period(),
            "data_waits": server.sessions.is_gathering(),
            "data_waits_bound_ms": GATHER.as_millis() as u64,
        },
    })
}

/// The rules of the export; `null` for who may not know them.
fn exports(server: &Server, peer: &PeerIdentity) -> Value {
    let exports = &server.admission.exports;
    let rules = || exports.rules(&server.meta).map(export).collect::<Vec<_>>();
    json!({ "count": exports.count(), "rules": exports.are_shown_to(peer).then(rules) })
}

fn export((rule, path, is_there): (&ExportRule, String, bool)) -> Value {
    let squash = |account: Option<Account>| account.map(|account| account.to_string());
    json!({
        "for": rule.peers.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "path": if path.is_empty() { "/" } else { &path },
        "is_there": is_there,
        "read_only": rule.read_only,
        "root_squash": squash(rule.root_squash),
        "all_squash": squash(rule.all_squash),
        // `null`: by the link.
        "speaks_for_others": rule.speaks_for_others,
    })
}

/// Each RNIC, and the endpoints at which it listens.
fn rnics(server: &Server) -> Vec<Value> {
    let links = server.about.endpoints.lock();
    let rnic = |(place, rnic): (usize, &Rnic)| {
        let own: Vec<_> = links.iter().filter(|(index, _)| *index == RnicIndex(place)).collect();
        let has_network =
            own.iter().any(|(_, link)| matches!(link, Endpoint::Tcp { .. } | Endpoint::Rdma { .. }));
        let abilities = rnic.device.capabilities();
        json!({
            "device": rnic.device.name(),
            "links": own.iter().map(|(_, link)| link.to_string()).collect::<Vec<_>>(),
            // `null`: it listens on no network.
            "network_security": has_network.then(|| rnic.device.network_security()),
            // The memory placement that it promises (IBTA memory placement extensions).
            "flush": abilities.flush.label(),
            "atomic_write": abilities.atomic_write,
            "word_last": abilities.word_last,
            "hardware": rnic.device.hardware(),
        })
    };
    server.rnics.all().iter().enumerate().map(rnic).collect()
}
