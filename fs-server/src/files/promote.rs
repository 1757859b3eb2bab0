//! Promotion of hot units ahead of requests (TeRM section 4.4): "as many units as possible within the time of a sample period", then the next period
//! with new counts.
//!
//! # How it works
//! Once a period the counts are reviewed, and the hot units are gone through, the hottest first. Each unit's pages on SSD are read into frames as one
//! batch, neighbours as one IO, so that a unit of scattered single reads costs one read. Only cold pages are evicted to make room, so a unit never
//! replaces a hotter one.
//!
//! # Failure
//! A page that cannot be read, or for which there is no room, stays on SSD and is served from there.

use super::Files;
use super::fetch::bring;
use crate::pages::Hotspots;
use crate::pool::disk::Disk;
use crate::timer::Timer;
use cuttlefs_common::ids::PoolPage;
use cuttlefs_common::world::Clock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Most pages of one batch. That bounds the IOs of promotion that are in the queue before a request's.
const MAX_BRING_PAGES: u64 = 256;

/// Reviews and promotes every `period` until `stopped`. One task for each server.
pub async fn run_promotion(
    files: &Files,
    disk: &dyn Disk,
    timer: &dyn Timer,
    clock: &dyn Clock,
    period: Duration,
    stopped: &AtomicBool,
) {
    let mut next = clock.monotonic() + period;
    while !stopped.load(Ordering::Acquire) {
        timer.sleep(next.saturating_sub(clock.monotonic())).await;
        next = clock.monotonic() + period;
        for unit in files.review().await {
            if clock.monotonic() >= next || stopped.load(Ordering::Acquire) {
                break;
            }
            let Some(file) = files.active.find(unit.ino) else {
                continue;
            };
            let end = unit.first_page + files.pages.unit_pages();
            let absent: Vec<(u64, PoolPage)> = {
                let state = file.state();
                let pieces = state.table.pieces_in(unit.first_page, end);
                pieces
                    .filter(|piece| piece.state.has_bytes())
                    .flat_map(|piece| {
                        (piece.first..piece.end())
                            .map(move |page| (page, PoolPage(piece.pool + (page - piece.first))))
                    })
                    .filter(|(_, pool)| !files.pages.is_resident(*pool))
                    .collect()
            };
            if absent.is_empty() {
                continue;
            }
            let wanted = absent.len() as u32 + files.pages.low_water();
            let short = wanted.saturating_sub(files.pages.frames().free());
            if short > 0 && files.pages.evict_cold(disk, short).await < short.min(absent.len() as u32) {
                // Only hotter pages are left in frames.
                break;
            }
            let mut at = unit.first_page;
            while at < end {
                let until = end.min(at + MAX_BRING_PAGES);
                bring(files, disk, &file, at, until).await;
                at = until;
            }
            if files.pages.hotspots() == Hotspots::Pages {
                files.pages.warm(absent.iter().map(|(_, pool)| *pool));
            }
            futures_lite::future::yield_now().await;
        }
    }
}
