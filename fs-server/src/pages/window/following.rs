//! A window follows the residency table: changes are collected, and many are pointed with one call.
//!
//! # How it works
//! A page that gets a frame is shown some time after its entry names the frame. Until then the window shows magic, which is never wrong. A page that
//! loses its frame is hidden some time after its entry has moved. Until then the *frame* waits here, and not on the free list. So the window shows
//! the page as it was, and the moved entry tells the initiator not to accept that. The waiting changes are pointed when a request finds no free
//! frame, and after an eviction.
//!
//! # Invariants
//! * A frame that a window shows for a page is owned by that page, or waits here (invariant 1 of pages).
//! * A page that waits to be hidden is hidden before it gets another frame. Otherwise its old bytes would be READ under its new entry.
//! * A frame that goes from one page to another is shown for the first until the window is settled, which is under the locks of both.
//!
//! # Failure
//! A window that is lost is closed: then it shows nothing, and no frame waits any more. That is logged once, and the server goes on with pinned
//! frames.

use super::{PageWindow, Pointed};
use crate::pages::frames::Frames;
use cuttlefs_common::ids::{FrameIndex, PoolPage};
use parking_lot::Mutex;
use std::sync::Arc;

/// Changes of one call: enough that many pages share a flush of the IOTLB, or a call; and so few that the frames that wait are not missed.
const BATCH: usize = 64;

/// A window, with the changes that it does not show yet.
#[derive(Debug)]
pub(in crate::pages) struct Following {
    window: Box<dyn PageWindow>,
    frames: Arc<Frames>,
    waiting: Mutex<Waiting>,
}

#[derive(Debug, Default)]
struct Waiting {
    /// The changes, in order.
    changes: Vec<Pointed>,
    /// The pages among these that are to be hidden, with the frames that are free after that.
    leaving: Vec<(PoolPage, FrameIndex)>,
    is_lost: bool,
}

impl Following {
    pub(in crate::pages) fn new(window: Box<dyn PageWindow>, frames: Arc<Frames>) -> Self {
        Self { window, frames, waiting: Mutex::new(Waiting::default()) }
    }

    /// Whether the window is lost.
    pub(in crate::pages) fn is_lost(&self) -> bool {
        self.waiting.lock().is_lost
    }

    /// Called before a page's entry names a frame. Like all functions here that name a page, under the page's block lock.
    pub(in crate::pages) fn before_publish(&self, page: PoolPage) {
        let mut waiting = self.waiting.lock();
        if waiting.leaving.iter().any(|(leaving, _)| *leaving == page) {
            self.point(&mut waiting);
        }
    }

    /// Called after a page's entry names this frame.
    pub(in crate::pages) fn show(&self, page: PoolPage, frame: FrameIndex) {
        self.push(Pointed { page, frame: Some(frame) }, None);
    }

    /// Called after a page's entry has stopped naming this frame. The frame is free once the window does not show it.
    pub(in crate::pages) fn hide(&self, page: PoolPage, frame: FrameIndex) {
        self.push(Pointed { page, frame: None }, Some(frame));
    }

    /// Called after a page's entry has stopped naming this frame and another page's entry names it. The caller settles before it releases the locks of
    /// the pages, so that the first gets no other frame while the window shows this one.
    pub(in crate::pages) fn hand_over(&self, from: PoolPage, to: PoolPage, frame: FrameIndex) {
        let mut waiting = self.waiting.lock();
        if !waiting.is_lost {
            waiting
                .changes
                .extend([Pointed { page: from, frame: None }, Pointed { page: to, frame: Some(frame) }]);
        }
    }

    /// Points all waiting changes.
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
