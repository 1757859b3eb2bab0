//! Pages in frames: how many, which, and who reads and changes them without a request.

use crate::pages::MAX_UNITS;
use crate::pages::window::WindowKind;
use crate::rpc::bounce::BUFFERS_PER_WORKER;
use crate::server::Server;
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use serde_json::{Value, json};
use std::sync::atomic::Ordering::Relaxed;

pub(super) fn part(server: &Server) -> Value {
    let pages = server.files.pages();
    let (figures, policy) = (pages.figures(), pages.policy());
    let counts = figures.counts;
    let nic = server.rnics.figures();
    json!({
        "region": {
            "policy": policy.to_string(),
            // This time is not measured but added, which readers of the figures should know.
            "odp_hardware": policy.hardware_times,
            "odp_faults": counts.odp_faults,
            "odp_fault_bytes": counts.odp_fault_pages * PAGE_SIZE_U64,
        },
        "page_window": page_window(server),
        "hotspots": {
            "of": pages.hotspots().to_string(),
            "sample_unit_bytes": pages.unit_pages() * PAGE_SIZE_U64,
            "sample_period_ms": server.about.sampling.period_ms,
            "scored_units": pages.scored_units(),
            "bound": MAX_UNITS,
            "cold_heat": pages.cold_heat(),
            "counted": counts.counted,
        },
        "frames": {
            "bound": figures.frames,
            "bytes": u64::from(figures.frames) * PAGE_SIZE_U64,
            "free": figures.free_frames,
            "used": figures.frames - figures.free_frames,
            "dirty": figures.dirty_frames,
            "leaked": figures.leaked_frames,
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
            "data_syncs": pages.data_syncs(),
            "direct_writes": counts.direct_writes,
            "read_modify_writes": counts.read_modify_writes,
            "read_errors": counts.read_errors,
            "rotten": counts.rotten_pages,
            "write_errors": counts.write_errors,
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
        "file_regions": file_regions(server),
    })
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

/// Ranges that were handed over or granted, and the changes there past the workers.
fn file_regions(server: &Server) -> Value {
    let files = server.files.figures();
    let counts = server.files.pages().figures().counts;
    json!({
        "bindings": files.bound_regions,
        "opened": files.opened_regions,
        "write_grants": files.grants.grants,
        // Of these, a peer has half of what others leave of a file's.
        "write_grants_of_file_bound": files.grants.of_file_bound,
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
    })
}
