//! A window follows the residency table: changes wait until there are some, and are pointed with one call.
//!
//! # How it works
//! A page that gets a frame is shown some time after its entry names the frame; until then the window shows magic, which is never wrong. A page that
//! loses its frame is hidden some time after its entry has moved; until then the *frame* waits here and not on the free list, so that what the window
//! shows is the page as it was, which the moved entry tells the initiator not to believe. Who finds no free frame, and who has evicted, points what waits.
//!
//! # Invariants
//! * A frame that a window shows is owned by the page that the window shows it for, or waits here (invariant 1 of pages).
//! * A page that waits to be hidden is hidden before it gets another frame: else its old bytes would be READ under its new entry.
//!
//! # Failure
//! A window that is lost is closed, whereupon nothing is shown and no frame waits any more. It is said once; the pinned frames serve on.

use super::{PageWindow, Pointed};
use crate::pages::frames::Frames;
use cuttlefs_common::ids::{FrameIndex, PoolPage};
use parking_lot::Mutex;
use std::sync::Arc;

/// Changes of one call: enough that a flush of the IOTLB, or a call, is shared by many pages; few enough that the frames that wait are not missed.
const BATCH: usize = 64;

/// A window with the changes that it has yet to show.
#[derive(Debug)]
pub(in crate::pages) struct Following {
    window: Box<dyn PageWindow>,
    frames: Arc<Frames>,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// In order.
    changes: Vec<Pointed>,
    /// Of these, pages to be hidden, with the frames that are free then.
    leaving: Vec<(PoolPage, FrameIndex)>,
    is_lost: bool,
}

impl Following {
    pub(in crate::pages) fn new(window: Box<dyn PageWindow>, frames: Arc<Frames>) -> Self {
        Self { window, frames, waiting: Mutex::new(Waiting::default()) }
    }

    /// Before a page's entry names a frame. Under its block lock, as all that names a page here.
    pub(in crate::pages) fn before_publish(&self, page: PoolPage) {
        let mut waiting = self.waiting.lock();
        if waiting.leaving.iter().any(|(leaving, _)| *leaving == page) {
            self.point(&mut waiting);
        }
    }

    /// A page's entry names this frame now.
    pub(in crate::pages) fn show(&self, page: PoolPage, frame: FrameIndex) {
        self.push(Pointed { page, frame: Some(frame) }, None);
    }

    /// A page's entry names this frame no longer. The frame is free once the window does not show it.
    pub(in crate::pages) fn hide(&self, page: PoolPage, frame: FrameIndex) {
        self.push(Pointed { page, frame: None }, Some(frame));
    }

    /// Points what waits.
    pub(in crate::pages) fn settle(&self) {
        self.point(&mut self.waiting.lock());
    }

    fn push(&self, change: Pointed, leaving: Option<FrameIndex>) {
        let mut waiting = self.waiting.lock();
        if waiting.is_lost {
            drop(waiting);
            if let Some(frame) = leaving {
                self.frames.give_back(frame);
            }
            return;
        }
        waiting.changes.push(change);
        if let Some(frame) = leaving {
            waiting.leaving.push((change.page, frame));
        }
        if waiting.changes.len() >= BATCH {
            self.point(&mut waiting);
        }
    }

    fn point(&self, waiting: &mut Waiting) {
        if waiting.changes.is_empty() {
            return;
        }
        if let Err(lost) = self.window.point(&waiting.changes) {
            self.window.close();
            waiting.is_lost = true;
            tracing::error!(%lost, "the window that shows pages to the RNIC is given up; one-sided reads go on over the pinned frames");
        }
        waiting.changes.clear();
        for (_, frame) in waiting.leaving.drain(..) {
            self.frames.give_back(frame);
        }
    }
}
