//! The choice of a lane for a thread's request.

use super::lane::Lane;
use super::{Attach, FsError, LaneGuard, Link, interrupt};
use cuttlefs_common::ids::SlotIndex;
use parking_lot::Mutex;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How often a request that waits for a lane checks whether its caller was interrupted.
const LANE_SLICE: Duration = Duration::from_millis(100);

impl<'s, S: Attach> LaneGuard<'s, S> {
    /// Borrows the calling thread's preferred lane if it is free, else any lane. Every request of a caller gets its lane here. A thread that has a
    /// lane must not borrow another one.
    ///
    /// # Errors
    /// `Interrupted` if the caller does not wait any more.
    pub(crate) fn borrow(session: &'s S) -> Result<Self, FsError> {
        thread_local! {
            static PREFERRED: std::cell::Cell<Option<usize>> = const { std::cell::Cell::new(None) };
        }
        let link = session.link();
        let lanes = link.caller_lanes();
        let preferred = PREFERRED.with(|cell| {
            cell.get().unwrap_or_else(|| {
                let lane = link.next_lane.fetch_add(1, Ordering::Relaxed) as usize;
                cell.set(Some(lane));
                lane
            })
        }) % lanes.len();
        for step in 0..lanes.len() {
            if let Some(lane) = lanes[(preferred + step) % lanes.len()].try_lock() {
                return Ok(Self::new(session, lane));
            }
        }
        loop {
            if let Some(lane) = lanes[preferred].try_lock_for(LANE_SLICE) {
                return Ok(Self::new(session, lane));
            }
            if interrupt::is_interrupted() {
                return Err(FsError::Interrupted);
            }
        }
    }

    /// One of the lanes that are not lent to callers.
    pub(crate) fn own(session: &'s S, index: usize) -> Self {
        let link = session.link();
        Self::new(session, link.lanes[link.callers + index].lock())
    }

    /// A free lane whose connection stands, as far as this side knows.
    pub(crate) fn connected(session: &'s S) -> Option<Self> {
        let free = session.link().lanes.iter().filter_map(|lane| lane.try_lock());
        free.filter(|lane| lane.is_connected()).map(|lane| Self::new(session, lane)).next()
    }
}

impl Link {
    /// The lanes that are lent to callers.
    fn caller_lanes(&self) -> &[Mutex<Lane>] {
        &self.lanes[..self.callers]
    }

    /// The number of all lanes, and of those that are lent to callers.
    pub(crate) fn lane_counts(&self) -> (usize, usize) {
        (self.lanes.len(), self.callers)
    }

    /// Whether another lane has a connection that stands. The connection of a borrowed lane counts as standing until its borrower finds that it does
    /// not.
    pub(super) fn others_stand(&self, slot: SlotIndex) -> bool {
        let lanes = (0..).map(SlotIndex).zip(self.lanes.iter().zip(&self.standing));
        let mut others = lanes.filter(|(other, _)| *other != slot);
        others.any(|(_, (lane, standing))| match lane.try_lock() {
            Some(mut lane) => lane.still_stands(),
            None => standing.load(Ordering::Relaxed),
        })
    }

    /// Whether callers' lanes were used since the last call.
    pub(crate) fn take_used(&self) -> bool {
        // Each lane must be asked, to reset its flag. A borrowed lane is in use.
        let take =
            |used: bool, lane: &Mutex<Lane>| lane.try_lock().is_none_or(|mut lane| lane.take_used()) | used;
        self.caller_lanes().iter().fold(false, take)
    }

    /// Gives back the memory of callers' lanes that are free.
    pub(crate) fn give_memory_back(&self) {
        for lane in self.caller_lanes() {
            if let Some(lane) = lane.try_lock() {
                lane.give_memory_back();
            }
        }
    }
}
