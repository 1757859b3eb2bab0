//! The free page queue: frames, and pages of the pool that no file has, set aside for one-sided changes (docs/file-regions.md; ODRP, sections 4.1
//! and 4.3).
//!
//! # How it works
//! As long as there are write grants, a task of the server (`run_free_pages`) keeps the queue filled: it does ahead of time what a worker would have to
//! do in an append, with all its waiting. The NIC engine takes from the queue without any wait. Pages come in the order of their places in the pool,
//! but the page behind the file's last one before any other, so that a file that is appended to stays in one piece.
//!
//! # Invariants
//! * A page of the queue is allocated in `Space`, and no mapping, no record and no log names it: a server that dies has given it back.
//! * The space counts as free: whoever finds too little gets the queue's (`give_back`), and figures of free space have it.
//!
//! # Failure
//! An empty queue is an ordinary result: the change is a fault, and a worker makes it. If the pool is full, or frames are short, the queue stays empty.

use super::Files;
use crate::pages::PrivateFrame;
use crate::pool::disk::Disk;
use crate::pool::space::{Run, Space};
use crate::sync::Mutex;
use cuttlefs_common::ids::PoolPage;
use event_listener::Event;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// One in so many frames may be in the queue.
const FRACTION: u32 = 32;
/// Most pages of the queue: four times what the largest append takes.
const PAGES_MAX: u32 = 1024;

/// The queue.
#[derive(Debug)]
pub(super) struct FreePages {
    queue: Mutex<Queue>,
    /// Notified when the queue is half empty, and when the first write grant is made or the last one ends.
    wake: Arc<Event>,
    /// Most pages, and most frames.
    bound: usize,
    space: Arc<Space>,
}

#[derive(Debug, Default)]
struct Queue {
    pages: BTreeSet<PoolPage>,
    frames: Vec<PrivateFrame>,
}

impl Queue {
    /// Whether less than half of the bound is there.
    fn is_low(&self, bound: usize) -> bool {
        self.pages.len().min(self.frames.len()) < bound.div_ceil(2)
    }
}

impl FreePages {
    /// Empty, in a server with so many frames. `wake` is notified by whoever counts write grants.
    pub(super) fn new(frames: u32, space: Arc<Space>, wake: Arc<Event>) -> Self {
        let bound = (frames / FRACTION).min(PAGES_MAX) as usize;
        Self { queue: Mutex::default(), wake, bound, space }
    }

    /// Takes a page with a frame: the page `near` if it is there.
    pub(super) fn take(&self, near: Option<PoolPage>) -> Option<(PoolPage, PrivateFrame)> {
        self.taking(|queue| {
            let near = near.filter(|near| queue.pages.contains(near));
            let page = near.or_else(|| queue.pages.first().copied())?;
            let frame = queue.frames.pop()?;
            queue.pages.remove(&page);
            Some((page, frame))
        })
    }

    /// Takes a frame, for a page that its file has already.
    pub(super) fn take_frame(&self) -> Option<PrivateFrame> {
        self.taking(|queue| queue.frames.pop())
    }

    fn taking<T>(&self, take: impl FnOnce(&mut Queue) -> Option<T>) -> Option<T> {
        let (taken, is_low) = {
            let mut queue = self.queue.lock();
            (take(&mut queue), queue.is_low(self.bound))
        };
        if is_low {
            self.wake.notify(1);
        }
        taken
    }

    /// Puts back what was taken and not used.
    pub(super) fn put_back(&self, page: Option<PoolPage>, frame: PrivateFrame) {
        let mut queue = self.queue.lock();
        queue.pages.extend(page);
        queue.frames.push(frame);
    }

    /// Gives all of it back to the pool. Returns whether there were pages.
    pub(super) fn give_back(&self) -> bool {
        let Queue { pages, frames } = std::mem::take(&mut *self.queue.lock());
        let runs: Vec<Run> = pages.iter().map(|page| Run { first: *page, len: 1 }).collect();
        self.space.give_back(&runs);
        drop(frames);
        !runs.is_empty()
    }

    /// The pages in the queue, and the most that there may be.
    pub(super) fn figures(&self) -> (usize, usize) {
        (self.queue.lock().pages.len(), self.bound)
    }

    /// The frames in the queue.
    #[cfg(test)]
    pub(super) fn frames(&self) -> usize {
        self.queue.lock().frames.len()
    }
}

/// Fills the queue if it is low and there are write grants; empties it if there are none.
pub(super) async fn fill_free_pages(files: &Files, disk: &dyn Disk) {
    let queue = &files.free_pages;
    let lacks = {
        let queue_now = queue.queue.lock();
        queue_now.is_low(queue.bound).then(|| queue.bound - queue_now.frames.len().min(queue.bound))
    };
    if let Some(frames) = lacks
        && files.has_grants()
    {
        // What is taken becomes dirty. A worker that writes cleans some frames first if too many are dirty, and so it is here.
        files.pages.relieve(disk).await;
        let spare = || files.pages.frames().free().saturating_sub(files.pages.low_water()) as usize;
        if spare() < frames {
            files.pages.evict(disk, (frames - spare()) as u32).await;
        }
        queue.add(files, files.pages.take_spare(frames.min(spare())));
    }
    // Also if the last grant ended meanwhile: nobody heard of that.
    if !files.has_grants() {
        queue.give_back();
    }
}

impl FreePages {
    /// Adds frames, and a page of the pool for each frame that has none, if there is as much space.
    fn add(&self, files: &Files, frames: Vec<PrivateFrame>) {
        let wanted = {
            let mut queue = self.queue.lock();
            queue.frames.extend(frames);
            queue.frames.len().saturating_sub(queue.pages.len())
        };
        if wanted == 0 || !files.meta.has_room() {
            return;
        }
        match files.space.allocate(wanted as u64, None) {
            Ok(runs) => {
                files.pages.note_allocated(&runs);
                let pages = runs.iter().flat_map(|run| run.first.0..run.end().0).map(PoolPage);
                self.queue.lock().pages.extend(pages);
            }
            Err(short) => tracing::debug!(%short, "the free page queue is not filled"),
        }
    }
}

/// Keeps the free page queue filled, until `stopped` is set and the queue is woken.
pub async fn run_free_pages(files: &Files, disk: &dyn Disk, stopped: &AtomicBool) {
    loop {
        // The listener is made before the check, so that no notification in between is lost.
        let wake = files.free_pages.wake.listen();
        if stopped.load(Ordering::Acquire) {
            return;
        }
        fill_free_pages(files, disk).await;
        wake.await;
    }
}
