//! The pool and its metadata: space, files, checksums, the scrub.

use crate::meta::PassFigures;
use crate::pool::sums::ZONE_PAGES;
use crate::server::Server;
use cuttlefs_common::ids::PAGE_SIZE_U64;
use serde_json::{Value, json};

pub(super) fn part(server: &Server) -> Value {
    let space = server.files.space_figures();
    let files = server.files.figures();
    let metadata = server.meta.store_figures();
    let sums = server.integrity.sums.figures();
    let scrub = *server.integrity.scrub.lock();
    json!({
        "pool": {
            "page_bytes": PAGE_SIZE_U64,
            "pages": space.pages,
            "used_pages": space.used,
            "free_pages": space.free,
            "quarantined_pages": space.quarantined,
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
    })
}

fn pass(found: &PassFigures) -> Value {
    json!({
        "pages": found.pages,
        "rotten": found.rotten,
        "healed": found.healed,
        "unreadable": found.unreadable,
    })
}
