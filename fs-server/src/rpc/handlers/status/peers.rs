//! What clients hold and wait for.

use crate::files::NEWER_MAX;
use crate::locks::{LOCKS_PER_CLIENT, WAITS_PER_CLIENT};
use crate::meta::LEVELS_MAX;
use crate::rpc::bounce::{BUFFERS_OF_PEER, BUFFERS_PER_WORKER};
use crate::rpc::connection::RECEIVES;
use crate::rpc::turns::{MOST_RUNNING, PEER_RUNNING};
use crate::server::Server;
use crate::shares::{LOCKS_MAX, Resource};
use serde_json::{Map, Value, json};
use std::sync::atomic::Ordering::Relaxed;

/// Sessions listed; the rest are only counted, so that the answer fits one message.
const MAX_LISTED: usize = 64;

pub(super) fn part(server: &Server) -> Value {
    let workers = server.about.workers;
    let counters = &server.counters;
    let locks = server.locks.figures();
    json!({
        "sessions": sessions(server),
        "byte_requests": {
            "running": counters.turns.running(),
            "running_bound": workers * MOST_RUNNING,
            "waiting": counters.turns.waiting(),
            "waiting_bound": Resource::Connections.bound().all * RECEIVES,
            "running_bound_per_peer": workers * PEER_RUNNING,
        },
        "far_moves": {
            "running": counters.climbs.running(),
            "running_bound": workers,
            "waiting": counters.climbs.waiting(),
            "waiting_bound": Resource::Connections.bound().all * RECEIVES,
            "levels_bound": LEVELS_MAX,
        },
        "bounce_buffers": {
            "used": counters.bounce.running(),
            "bound": workers * BUFFERS_PER_WORKER,
            "bound_per_peer": workers * BUFFERS_OF_PEER,
            "waiting": counters.bounce.waiting(),
        },
        "locks": {
            "held": locks.held,
            "bound": LOCKS_MAX,
            "bound_per_client": LOCKS_PER_CLIENT,
            "waiting": locks.waiting,
            "waiting_bound_per_client": WAITS_PER_CLIENT,
        },
        "restoring": { "noted": server.files.newer.noted(), "bound": NEWER_MAX },
        "connections": connections(server),
        "shares": shares(server),
    })
}

fn sessions(server: &Server) -> Value {
    let sessions = server.sessions.list();
    let listed: Vec<Value> = sessions
        .iter()
        .take(MAX_LISTED)
        .map(|session| json!({ "label": session.label(), "connections": session.connections() }))
        .collect();
    json!({ "count": sessions.len(), "bound": Resource::Sessions.bound().all, "listed": listed })
}

fn connections(server: &Server) -> Value {
    let nic = server.rnics.figures();
    json!({
        "count": server.admission.connections.len(),
        "bound": Resource::Connections.bound().all,
        "refused": server.counters.refused.load(Relaxed) + nic.refused,
        "receives_ran_dry": server.counters.receives_ran_dry.load(Relaxed),
        "timed_out": server.counters.timed_out.load(Relaxed),
        "unheard_strangers": nic.unheard_strangers,
        "unheard_known": nic.unheard_known,
        "unheard_bound_of_each_per_endpoint": nic.unheard_bound,
        "knocks": nic.knocks,
        "knocks_bound": nic.knocks_bound,
        "per_second_per_peer": nic.arrivals_per_second,
        "burst_per_peer": nic.arrivals_burst,
        "delayed": nic.arrivals_delayed,
        "turned_away": nic.arrivals_turned_away,
    })
}

/// The peers' use of bounded resources.
fn shares(server: &Server) -> Value {
    let each = Resource::ALL.map(|resource| {
        let bound = resource.bound();
        let figures = json!({
            "used": server.admission.shares.used(resource),
            "bound": bound.all,
            "share": bound.share,
            "reserve": bound.reserve,
            "largest": server.admission.shares.largest(resource),
        });
        (resource.name().to_owned(), figures)
    });
    let mut shares: Map<String, Value> = each.into_iter().collect();
    shares.insert("peers".to_owned(), json!(server.admission.shares.peers()));
    Value::Object(shares)
}
