//! Shared receive queues over libibverbs.
//!
//! # How it works
//! Receives come back in any order, so each has a slot here, whose number is part of its `wr_id`. The rest of the `wr_id` says that the receive is
//! shared, and of which queue: so a completion finds its shared queue even if its queue pair is gone ([`VerbsSrq::give_back`]). A slot is free again
//! when its completion was polled.
//!
//! All receives may complete into one completion queue, so each completion queue of a queue pair that uses them promises room for all.

use super::cq::{Promise, Taken, VerbsCq};
use super::queue::RECEIVE;
use super::sys::{Pd, Srq};
use crate::ids::QpNumber;
use crate::rdma::shared_receives::SharedReceiveQueue;
use crate::rdma::verbs::{
    Completion, CompletionKind, PostError, QpState, RecvWr, WcStatus, WrId, count_within,
};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Set in the `wr_id` of a shared receive, besides [`RECEIVE`].
const SHARED: u64 = 1 << 62;
/// Position of the queue's number in the `wr_id`; the bits below are the slot's number.
const NUMBER_SHIFT: u32 = 32;
/// More numbers than there are queues at any time.
const NUMBERS: u32 = 1 << 30;

/// Posted receives by slot.
struct Slots {
    posted: Vec<Option<WrId>>,
    free: Vec<u32>,
}

/// A shared receive queue; see the module.
pub(super) struct VerbsSrq {
    raw: Arc<Srq>,
    number: u32,
    depth: u32,
    max_sges: u32,
    /// Locked while posting, so that each slot is taken once.
    slots: Mutex<Slots>,
    /// Number of completions that the user has not polled yet.
    unpolled: Arc<AtomicU32>,
    /// Relaxed: a figure.
    ran_dry: AtomicU64,
    promises: Mutex<Vec<Promise>>,
}

/// The number of the shared queue of a receive with this `wr_id`; `None`: the receive is not shared.
pub(super) fn queue_of(wr_id: u64) -> Option<u32> {
    let is_shared = wr_id & (RECEIVE | SHARED) == RECEIVE | SHARED;
    is_shared.then_some((wr_id >> NUMBER_SHIFT) as u32 % NUMBERS)
}

impl VerbsSrq {
    /// `number` distinguishes it from other shared queues of its device.
    pub(super) fn new(pd: &Arc<Pd>, number: u32, depth: u32, max_sges: u32) -> io::Result<Self> {
        Ok(Self {
            raw: Arc::new(Srq::new(pd, depth, max_sges)?),
            number: number % NUMBERS,
            depth,
            max_sges,
            slots: Mutex::new(Slots { posted: vec![None; depth as usize], free: (0..depth).rev().collect() }),
            unpolled: Arc::default(),
            ran_dry: AtomicU64::new(0),
            promises: Mutex::default(),
        })
    }

    pub(super) fn raw(&self) -> &Arc<Srq> {
        &self.raw
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// From now on its receives may complete into `queue`.
    ///
    /// # Errors
    /// The RNIC has no queue of that length.
    pub(super) fn completes_into(self: &Arc<Self>, queue: &Arc<VerbsCq>) -> io::Result<()> {
        let mut promises = self.promises.lock();
        if !promises.iter().any(|promise| promise.is_of(queue)) {
            promises.push(queue.promise(self.depth)?);
            queue.add_shared(self);
        }
        Ok(())
    }

    /// The receive with this `wr_id` has completed: adds what `completion` makes of the user's name for it.
    pub(super) fn complete(
        &self,
        wr_id: u64,
        completion: impl FnOnce(WrId) -> Completion,
        taken: &mut impl Taken,
    ) {
        let slot = wr_id as u32;
        let mut slots = self.slots.lock();
        let Some(name) = slots.posted.get_mut(slot as usize).and_then(Option::take) else { return };
        // Counted before the slot is free, so that posted receives and unpolled completions together are never more than the depth.
        taken.add(&completion(name), &self.unpolled);
        slots.free.push(slot);
        if slots.free.len() == self.depth as usize {
            self.ran_dry.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes a receive of a queue pair that is gone: its message is dropped, and its memory is free.
    pub(super) fn give_back(&self, wr_id: u64, qp: QpNumber, taken: &mut impl Taken) {
        let flushed = |wr_id| Completion {
            wr_id,
            qp,
            kind: CompletionKind::Recv,
            status: WcStatus::Flushed,
            byte_len: 0,
            imm: None,
            absent: false,
        };
        self.complete(wr_id, flushed, taken);
    }
}

impl SharedReceiveQueue for VerbsSrq {
    fn post(&self, requests: &[RecvWr]) -> Result<(), PostError> {
        let most = self.max_sges;
        let within = count_within(requests, most);
        let mut slots = self.slots.lock();
        for (posted, request) in requests[..within].iter().enumerate() {
            let unpolled = self.unpolled.load(Ordering::Acquire) as usize;
            if slots.free.len() <= unpolled {
                return Err(PostError::QueueFull { posted });
            }
            let slot = slots.free.pop().expect("more are free than wait to be polled");
            slots.posted[slot as usize] = Some(request.wr_id);
            let wr_id = RECEIVE | SHARED | u64::from(self.number) << NUMBER_SHIFT | u64::from(slot);
            if let Err(error) = self.raw.post_receive(wr_id, request.local.as_slice()) {
                tracing::error!(%error, "the RNIC refused a shared receive");
                slots.posted[slot as usize] = None;
                slots.free.push(slot);
                return Err(PostError::BadState { state: QpState::Error });
            }
        }
        if within < requests.len() { Err(PostError::TooManySges { posted: within, most }) } else { Ok(()) }
    }

    fn ran_dry(&self) -> u64 {
        self.ran_dry.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_receives_say_whose_they_are() {
        let number = NUMBERS - 1;
        let name = RECEIVE | SHARED | u64::from(number) << NUMBER_SHIFT | 7;
        assert_eq!((queue_of(name), name as u32), (Some(number), 7));
        assert_eq!(queue_of(RECEIVE | 7), None, "a queue pair's own");
        assert_eq!(queue_of(SHARED | 7), None, "a send");
    }
}
