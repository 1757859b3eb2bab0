//! The server's status as JSON, for `cuttlefs status`: every bounded thing with its bound.

use super::{Body, body};
use crate::config::Durability;
use crate::files::NEWER_MAX;
use crate::locks::{LOCKS_PER_CLIENT, WAITS_PER_CLIENT};
use crate::meta::{LEVELS_MAX, PassFigures};
use crate::pages::MAX_UNITS;
use crate::pages::window::WindowKind;
use crate::pool::sums::ZONE_PAGES;
use crate::rights::{Account, ExportRule};
use crate::rnics::{Rnic, RnicIndex};
use crate::rpc::bounce::{BUFFERS_OF_PEER, BUFFERS_PER_WORKER};
use crate::rpc::connection::RECEIVES;
use crate::rpc::turns::{MOST_RUNNING, PEER_RUNNING};
use crate::rpc::worker::WorkerContext;
use crate::server::Server;
use crate::session::GATHER;
use crate::shares::{LOCKS_MAX, Resource};
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::rpc::durable::Kind;
use cuttlefs_common::rpc::{HEADER_LEN, MAX_MESSAGE_BYTES, MAX_TRANSFER_BYTES, PROTOCOL_VERSION, Reply};
use cuttlefs_common::status::Status;
use serde_json::{Map, Value, json};
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

/// Sessions listed; the rest are only counted, so that the answer fits one message.
const MAX_LISTED: usize = 64;

fn pass(found: &PassFigures) -> Value {
    json!({
        "pages": found.pages,
        "rotten": found.rotten,
        "healed": found.healed,
        "unreadable": found.unreadable,
    })
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

/// Each RNIC, and the endpoints at which it listens.
fn rnics(server: &Server) -> Vec<Value> {
    let links = server.about.endpoints.lock();
    let rnic = |(place, rnic): (usize, &Rnic)| {
        let own = links.iter().filter(|(index, _)| *index == RnicIndex(place));
        let abilities = rnic.device.capabilities();
        json!({
            "device": rnic.device.name(),
            "links": own.map(|(_, link)| link.to_string()).collect::<Vec<_>>(),
            "network_security": rnic.device.network_security(),
            // The memory placement that it promises (IBTA memory placement extensions).
            "flush": abilities.flush.label(),
            "atomic_write": abilities.atomic_write,
            "word_last": abilities.word_last,
            "hardware": rnic.device.hardware(),
        })
    };
    server.rnics.all().iter().enumerate().map(rnic).collect()
}

/// What trusted clients READ bytes of pages from; `null` if none is trusted.
fn page_window(server: &Server) -> Value {
    if !server.about.trust_clients {
        return Value::Null;
    }
    match &server.page_window {
        Some(window) => json!({
            "kind": window.kind().to_string(),
            "shown_pages": window.shown(),
            "shown_pages_bound": window.room(),
            "is_lost": !server.files.pages().shows_window(),
        }),
        None => json!({ "kind": WindowKind::Pinned.to_string() }),
    }
}

/// Figures as of about now.
pub(crate) fn status(context: &Rc<WorkerContext>) -> Result<Body, Status> {
    let server = &context.server;
    let files = server.files.figures();
    let pages = server.files.pages().figures();
    let space = server.files.space_figures();
    let sessions = server.sessions.list();
    let listed: Vec<Value> = sessions
        .iter()
        .take(MAX_LISTED)
        .map(|session| {
            json!({
                "label": session.label(),
                "connections": session.connections(),
            })
        })
        .collect();
    let rpc: Map<String, Value> =
        server.counters.rpc().map(|(name, count)| (name.to_owned(), json!(count))).collect();
    let rpc_total: u64 = server.counters.rpc().map(|(_, count)| count).sum();
    let durability = if server.about.durable_answers { Durability::Ack } else { Durability::Fsync };
    let counts = pages.counts;
    let policy = server.files.pages().policy();
    let sums = server.integrity.sums.figures();
    let scrub = *server.integrity.scrub.lock();
    let locks = server.locks.figures();
    let nic = server.rnics.figures();
    let metadata = server.meta.store_figures();
    let mut status = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "rpc_protocol": PROTOCOL_VERSION,
        "pid": std::process::id(),
        "epoch": format!("{:016x}", server.about.epoch),
        "uptime_seconds": server.clock.monotonic().as_secs(),
        "links": server.about.endpoints.lock().iter().map(|(_, link)| link.to_string()).collect::<Vec<_>>(),
        "rnics": rnics(server),
        "exports": server.admission.exports.rules(&server.meta).map(export).collect::<Vec<_>>(),
        "durability": durability.to_string(),
        // Whether every client may read the frames, and with them every file.
        "trust_clients": server.about.trust_clients,
        // How a request becomes persistent: it comes by SEND (large contents are pulled), and the server flushes.
        "durable_rpc": {
            "kind": Kind::SRFlush.label(),
            "synced": if server.about.durable_answers { "before the answer" } else { "at fsync" },
        },
        "recovery": {
            // Clients of the server before this one that have not said `Recovered`.
            "awaited_clients": server.sessions.awaited(),
            "locks_wait": server.sessions.is_grace_period(),
            "data_waits": server.sessions.is_gathering(),
            "data_waits_bound_ms": GATHER.as_millis() as u64,
        },
        "sessions": { "count": sessions.len(), "bound": Resource::Sessions.bound().all, "listed": listed },
        "byte_requests": {
            "running": server.counters.turns.running(),
            "running_bound": server.about.workers * MOST_RUNNING,
            "waiting": server.counters.turns.waiting(),
            "waiting_bound": Resource::Connections.bound().all * RECEIVES,
            "running_bound_per_peer": server.about.workers * PEER_RUNNING,
        },
        "far_moves": {
            "running": server.counters.climbs.running(),
            "running_bound": server.about.workers,
            "waiting": server.counters.climbs.waiting(),
            "waiting_bound": Resource::Connections.bound().all * RECEIVES,
            "levels_bound": LEVELS_MAX,
        },
        "bounce_buffers": {
            "used": server.counters.bounce.running(),
            "bound": server.about.workers * BUFFERS_PER_WORKER,
            "bound_per_peer": server.about.workers * BUFFERS_OF_PEER,
            "waiting": server.counters.bounce.waiting(),
        },
        "locks": {
            "held": locks.held,
            "bound": LOCKS_MAX,
            "bound_per_client": LOCKS_PER_CLIENT,
            "waiting": locks.waiting,
            "waiting_bound_per_client": WAITS_PER_CLIENT,
        },
        "restoring": { "noted": server.files.newer.noted(), "bound": NEWER_MAX },
        "connections": {
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
        },
        "shares": shares(server),
        "pool": {
            "page_bytes": PAGE_SIZE_U64,
            "pages": space.pages,
            "used_pages": space.used,
            "free_pages": space.free,
            "quarantined_pages": space.quarantined,
        },
        "region": {
            "policy": policy.to_string(),
            // This time is not measured but added, which readers of the figures should know.
            "odp_hardware": policy.hardware_times,
            "odp_faults": counts.odp_faults,
            "odp_fault_bytes": counts.odp_fault_pages * PAGE_SIZE_U64,
        },
        "page_window": page_window(server),
        "hotspots": {
            "of": server.files.pages().hotspots().to_string(),
            "sample_unit_bytes": server.files.pages().unit_pages() * PAGE_SIZE_U64,
            "sample_period_ms": server.about.sampling.period_ms,
            "scored_units": server.files.pages().scored_units(),
            "bound": MAX_UNITS,
            "cold_heat": server.files.pages().cold_heat(),
            "counted": counts.counted,
        },
        "frames": {
            "bound": pages.frames,
            "bytes": u64::from(pages.frames) * PAGE_SIZE_U64,
            "free": pages.free_frames,
            "used": pages.frames - pages.free_frames,
            "dirty": pages.dirty_frames,
            "leaked": pages.leaked_frames,
        },
        "files": {
            "filekeys": files.filekeys,
            "active": files.active.regions,
            "slots_free": files.active.free_slots,
            "waiting_for_write_back": files.dirty_files,
            "inodes": server.meta.inode_count(),
            // Files that are closed until the next start, because a cut of them failed half-way.
            "closed": server.files.closed_files(),
        },
        "metadata": {
            "failures": server.meta.damage_count(),
            "disk_bytes": metadata.disk,
            "room_bytes": metadata.room,
            "reserve_bytes": metadata.reserve,
            "reserve_bound": metadata.reserve_bound,
            "since_checkpoint_bytes": metadata.since_checkpoint,
            "since_checkpoint_bound": metadata.since_checkpoint_bound,
            "cache_bound": metadata.cache_bound,
        },
        "memory": {
            "bounce_bytes": server.about.workers * BUFFERS_PER_WORKER * MAX_TRANSFER_BYTES as usize,
            "worker_threads": server.about.workers,
        },
        "pages": {
            "fetch_hits": counts.fetch_hits,
            "fetch_misses": counts.fetch_misses,
            "promoted": counts.promoted,
            "promoted_ahead": counts.promoted_ahead,
            "evicted": counts.evicted,
            "written_back": counts.written_back,
            "data_syncs": server.files.pages().data_syncs(),
            "direct_writes": counts.direct_writes,
            "read_modify_writes": counts.read_modify_writes,
            "read_errors": counts.read_errors,
            "rotten": counts.rotten_pages,
            "write_errors": counts.write_errors,
        },
        "checksums": {
            "verified": sums.verified,
            "accepted_after_crash": sums.accepted,
            "read_without": sums.unverified,
            "resummed": sums.resummed,
            "marked_zones": sums.marked_zones,
            "recovering_zones": sums.recovering_zones,
            "zone_bytes": ZONE_PAGES * PAGE_SIZE_U64,
            "mark_waits": sums.mark_waits,
            "cache_bytes": sums.blocks as u64 * PAGE_SIZE_U64,
            "cache_bound": sums.blocks_bound as u64 * PAGE_SIZE_U64,
        },
        "scrub": {
            "running": scrub.is_running,
            "position_pages": scrub.position,
            "passes": scrub.passes,
            "current": pass(&scrub.current),
            "last": scrub.last.as_ref().map(pass),
            // 0: none has ended yet.
            "last_ended": (scrub.last_ended_secs != 0).then_some(scrub.last_ended_secs),
        },
        "nic": {
            // Pages that the software RNIC of this server translated.
            "onesided_hit_pages": counts.target_hits,
            "onesided_written_pages": counts.target_writes,
            // Pages that clients counted, whichever RNIC translated them; pulled each period.
            "onesided_counted_pages": counts.counted,
            "magic_pages": counts.target_magic,
            "magic_reads": counts.target_magic_reads,
            "held_bytes": nic.held_bytes,
            "held_bound": nic.held_bound,
        },
        "rpc_requests": rpc_total,
        "sparse_fetches": rpc.get("fetch").cloned().unwrap_or_default(),
        "rpc": rpc,
        "bad_messages": server.counters.bad_messages.load(Relaxed),
        "written_bytes": server.counters.written_bytes.load(Relaxed),
        "fetched_bytes": server.counters.fetched_bytes.load(Relaxed),
        "fetched_aside": server.counters.fetched_aside.load(Relaxed),
        "syncs_ahead": server.counters.syncs_ahead.load(Relaxed),
    });
    // The macro cannot take more at once.
    status["file_regions"] = json!({
        "bound": files.bound_regions,
        "opened": files.opened_regions,
        "write_grants": files.grants.grants,
        "granted_pages": files.grants.pages,
        "granted_pages_bound": files.grants.pages_bound,
        "onesided_atomics": counts.target_atomics,
        "onesided_appends": counts.target_appends,
        // Before answers to requests that had put something behind such appends.
        "syncs_for_appends": server.counters.syncs_for_appends.load(Relaxed),
        // One-sided changes that a worker had to make.
        "grant_faults": counts.grant_faults,
        "free_page_queue": files.free_page_queue,
        "free_page_queue_bound": files.free_page_queue_bound,
        // Pages that one-sided changes took from it.
        "queue_pages": counts.queue_pages,
        "moved_pages": counts.relocated,
    });
    let mut text = status.to_string();
    if text.len() > MAX_MESSAGE_BYTES as usize - HEADER_LEN - 64 {
        // Cannot happen with MAX_LISTED sessions and bounded labels. If it does, the answer is still valid JSON.
        text = json!({ "error": "status is too large" }).to_string();
    }
    body(&Reply::Status(&text))
}
