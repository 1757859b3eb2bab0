//! Write-out of dirty frames and eviction of cold pages: frames become clean and free.
//!
//! # How it works
//! A dirty frame is written to its pool page under the page's block lock, so that its bytes do not change; neighbours in the pool are one IO.
//! Eviction goes through the frames with a clock hand and takes cold pages (`heat`) whose block locks are free. A frame becomes free after its entry
//! has moved to the magic frame. Pages of write grants stay. If a round finds too few cold pages, later rounds take warmer ones, and the last round
//! any.
//!
//! Nothing here needs a file's locks: a dirty frame may be written to SSD whichever file has the page. So a writer that meets too many dirty frames
//! can write some out itself (`relieve`) without any chance of deadlock.
//!
//! # Failure
//! A page whose write fails stays dirty in its frame; it is counted and logged, and tried again later.

use super::{Pages, add};
use crate::pool::disk::{Disk, IoBuffer, IoError, IoKind, IoRequest};
use cuttlefs_common::ids::{FrameIndex, PoolPage};
use std::sync::atomic::Ordering;

/// Most pages of one IO: 256 KiB. With more an SSD gains nothing, and other IOs wait longer.
const MAX_IO_PAGES: usize = 64;
/// Most pages of one batch. That bounds how many block locks write-out holds at once.
pub(crate) const MAX_BATCH_PAGES: usize = 256;
/// One in this number of frames may be dirty. When there are more, writers help to write back before they add more, so that the other half is left
/// for reads.
const DIRTY_FRACTION: u64 = 2;
/// How many times a writer helps to clean frames before it goes on anyway. Frames are bounded, and a write without a free frame goes directly to SSD.
const RELIEF_ROUNDS: usize = 16;
/// Frames that are cleaned in one round of help.
const RELIEF_PAGES: usize = 256;
/// Pages whose entries are moved under block locks that are held together.
const VACATE_BATCH: usize = 128;
/// The factor by which the pages of each further round may be warmer: five rounds at most after the first.
const WARMER: u8 = 4;

impl Pages {
    /// Writes frames to their pool pages. The caller holds the pages' block locks. Returns for each page whether the SSD has its bytes now.
    async fn write_frames(&self, disk: &dyn Disk, pages: &[(PoolPage, FrameIndex)]) -> Vec<bool> {
        let mut order: Vec<usize> = (0..pages.len()).collect();
        order.sort_unstable_by_key(|index| pages[*index].0);
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for index in order {
            match groups.last_mut() {
                Some(group)
                    if group.len() < MAX_IO_PAGES
                        && group.last().is_some_and(|last| pages[*last].0.0 + 1 == pages[index].0.0) =>
                {
                    group.push(index);
                }
                _ => groups.push(vec![index]),
            }
        }
        let mut written = vec![false; pages.len()];
        let mut again = Vec::new();
        for (group, result) in self.write_groups(disk, pages, groups).await {
            match result {
                Ok(()) => group.into_iter().for_each(|index| written[index] = true),
                // One bad page must not keep its neighbours, which may belong to other files, from the SSD.
                Err(_) if group.len() > 1 => again.extend(group.into_iter().map(|index| vec![index])),
                Err(error) => {
                    add(&self.counters.write_errors, 1);
                    tracing::error!(%error, "a dirty page could not be written back");
                }
            }
        }
        if !again.is_empty() {
            for (group, result) in self.write_groups(disk, pages, again).await {
                match result {
                    Ok(()) => group.into_iter().for_each(|index| written[index] = true),
                    Err(error) => {
                        add(&self.counters.write_errors, 1);
                        tracing::error!(%error, "a dirty page could not be written back");
                    }
                }
            }
        }
        add(&self.counters.written_back, written.iter().filter(|written| **written).count() as u64);
        written
    }

    /// Writes one batch, with one IO for each group of neighbours.
    async fn write_groups(
        &self,
        disk: &dyn Disk,
        pages: &[(PoolPage, FrameIndex)],
        groups: Vec<Vec<usize>>,
    ) -> Vec<(Vec<usize>, Result<(), IoError>)> {
        let batch = groups
            .iter()
            .map(|group| IoRequest {
                kind: IoKind::Write,
                offset: pages[group[0]].0.byte_offset(),
                buffer: IoBuffer::Frames(group.iter().map(|index| pages[*index].1).collect()),
            })
            .collect();
        let done = disk.submit(batch).await;
        groups.into_iter().zip(done).map(|(group, done)| (group, done.result)).collect()
    }

    /// Makes these pages clean, and waits for tasks that change them. Returns the pages that could not be written.
    pub(crate) async fn write_out(&self, disk: &dyn Disk, mut pages: Vec<PoolPage>) -> Vec<PoolPage> {
        pages.sort_unstable();
        pages.dedup();
        let mut failed = Vec::new();
        for chunk in pages.chunks(MAX_BATCH_PAGES) {
            let guards = self.locks.lock_many(chunk.iter().copied()).await;
            let dirty: Vec<_> = chunk
                .iter()
                .map(|page| (*page, self.residency.load(*page)))
                .filter(|(_, entry)| entry.is_dirty())
                .map(|(page, entry)| (page, entry.frame()))
                .collect();
            if !dirty.is_empty() {
                let written = self.write_frames(disk, &dirty).await;
                for ((page, _), written) in dirty.into_iter().zip(written) {
                    if written {
                        self.residency.mark_clean(page);
                    } else {
                        failed.push(page);
                    }
                }
            }
            drop(guards);
        }
        failed
    }

    /// Frees up to `wanted` frames, the coldest first, and returns how many. Never waits for a lock.
    pub async fn evict(&self, disk: &dyn Disk, wanted: u32) -> u32 {
        let mut limit = self.heat.cold();
        let mut freed = self.evict_round(disk, wanted, limit).await;
        // Pages that were cold at the last review may have been accessed a few times since, and still be far colder than hot ones. So the limit rises
        // in steps.
        while freed < wanted && limit < u8::MAX {
            limit = limit.saturating_mul(WARMER).saturating_add(1);
            freed += self.evict_round(disk, wanted - freed, limit).await;
        }
        freed
    }

    /// Frees up to `wanted` frames of cold pages only.
    pub(crate) async fn evict_cold(&self, disk: &dyn Disk, wanted: u32) -> u32 {
        self.evict_round(disk, wanted, self.heat.cold()).await
    }

    /// Goes once around the frames. Frees up to `wanted` frames of pages with a heat of at most `limit`.
    async fn evict_round(&self, disk: &dyn Disk, wanted: u32, limit: u8) -> u32 {
        let mut steps = self.frames().usable();
        let mut freed = 0;
        while freed < wanted {
            let mut dirty = Vec::new();
            let mut guards = Vec::new();
            while dirty.len() < MAX_IO_PAGES && freed + (dirty.len() as u32) < wanted {
                let Some((frame, page)) =
                    self.frames().next_victim(&mut steps, |page| self.heat.of(page) <= limit)
                else {
                    break;
                };
                // The page is being changed, or shares its lock with a page of this batch: it is left for another time.
                let Some(guard) = self.locks.try_lock(page) else {
                    continue;
                };
                let entry = self.residency.load(page);
                if entry.frame() != frame || entry.is_changing() || self.frames().is_pinned(frame) {
                    continue;
                }
                if entry.is_dirty() {
                    dirty.push((page, frame));
                    guards.push(guard);
                } else {
                    self.residency.vacate(page);
                    freed += 1;
                    add(&self.counters.evicted, 1);
                }
            }
            if dirty.is_empty() {
                break;
            }
            let written = self.write_frames(disk, &dirty).await;
            for ((page, _), _) in dirty.iter().zip(&written).filter(|(_, written)| **written) {
                // The page is clean now, and nobody could change it since.
                self.residency.vacate(*page);
                freed += 1;
                add(&self.counters.evicted, 1);
            }
        }
        self.residency.settle_window();
        freed
    }

    /// Moves the entries of pages that leave their file to the magic frame, and frees their frames.
    pub(crate) async fn vacate(&self, mut pages: impl Iterator<Item = PoolPage>) {
        loop {
            let batch: Vec<PoolPage> = pages.by_ref().take(VACATE_BATCH).collect();
            if batch.is_empty() {
                return;
            }
            let guards = self.locks.lock_many(batch.iter().copied()).await;
            for page in batch {
                self.residency.vacate(page);
                self.heat.set(page, 0);
            }
            self.residency.settle_window();
            drop(guards);
            // A terabyte takes seconds, so other tasks get their turn.
            futures_lite::future::yield_now().await;
        }
    }

    /// Called before a write: if too many frames are dirty, helps to clean some. It holds no lock, so it delays nobody else, and it stops after a
    /// while, so it cannot hang on a failing disk.
    pub(crate) async fn relieve(&self, disk: &dyn Disk) {
        let bound = u64::from(self.frames().usable()) / DIRTY_FRACTION;
        for _ in 0..RELIEF_ROUNDS {
            if self.residency.dirty() <= bound {
                break;
            }
            if self.clean(disk, RELIEF_PAGES).await == 0 {
                // Other tasks have these pages locked, and will be done soon.
                futures_lite::future::yield_now().await;
            }
        }
    }

    /// Makes up to `wanted` dirty frames clean, whichever files have them, and returns how many. Never waits for a lock.
    pub(crate) async fn clean(&self, disk: &dyn Disk, wanted: usize) -> usize {
        let usable = u64::from(self.frames().usable());
        let mut dirty = Vec::new();
        let mut guards = Vec::new();
        for _ in 0..usable {
            if dirty.len() >= wanted.min(MAX_BATCH_PAGES) {
                break;
            }
            let at = self.clean_hand.fetch_add(1, Ordering::Relaxed) % usable;
            let frame = FrameIndex(FrameIndex::FIRST_USABLE.0 + at as u32);
            let Some(page) = self.frames().owner(frame) else {
                continue;
            };
            let entry = self.residency.load(page);
            if entry.frame() != frame || !entry.is_dirty() {
                continue;
            }
            let Some(guard) = self.locks.try_lock(page) else {
                continue;
            };
            let entry = self.residency.load(page);
            if entry.frame() == frame && entry.is_dirty() && !entry.is_changing() {
                dirty.push((page, frame));
                guards.push(guard);
            }
        }
        if dirty.is_empty() {
            return 0;
        }
        let written = self.write_frames(disk, &dirty).await;
        let mut cleaned = 0;
        for ((page, _), _) in dirty.iter().zip(&written).filter(|(_, written)| **written) {
            self.residency.mark_clean(*page);
            cleaned += 1;
        }
        cleaned
    }
}

/// Keeps some frames free in the background, so that no request has to evict a page. Runs until `stopped` is set and `Pages::wake_eviction` was
/// called. One for each worker is possible; one is enough.
pub async fn run_eviction(pages: &Pages, disk: &dyn Disk, stopped: &std::sync::atomic::AtomicBool) {
    loop {
        // The listener is made before the check, so that no notification in between is lost.
        let low = pages.frames_low.listen();
        if stopped.load(Ordering::Acquire) {
            return;
        }
        let free = pages.frames().free();
        let mark = pages.low_water();
        if free < mark {
            // Up to twice the mark, so that the task does not wake again at once.
            if pages.evict(disk, 2 * mark - free).await > 0 {
                futures_lite::future::yield_now().await;
                continue;
            }
        }
        low.await;
    }
}

impl Pages {
    /// Wakes the eviction task, so that it checks again or ends.
    pub fn wake_eviction(&self) {
        self.frames_low.notify(usize::MAX);
    }
}
