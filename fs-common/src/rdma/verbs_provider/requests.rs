//! The requests of a queue pair, as completions find them.
//!
//! Completion queues hold these, and not their queue pairs, which hold the completion queues: a completion needs no more than what was posted, and
//! finding that takes no count of references. Of a queue pair that is gone, completions are nobody's ([`Requests::is_gone`]).

use super::cq::Taken;
use super::queue::{RECEIVE, VerbsQp};
use super::shared_receives::VerbsSrq;
use super::sys::{self, Lists, Wc};
use super::under_way::UnderWay;
use crate::ids::QpNumber;
use crate::rdma::verbs::{Completion, CompletionKind, WcStatus, WrId};
use parking_lot::Mutex;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

/// What the user is told of a send.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Tells {
    /// Its result.
    End,
    /// Its failure only.
    Failure,
    /// Nothing: it is not the user's.
    Nothing,
}

/// A send that is under way.
#[derive(Clone, Copy)]
pub(super) struct Sending {
    /// Of its success.
    completion: Completion,
    tells: Tells,
}

impl Sending {
    /// A check of the peer.
    pub(super) const CHECK: Self = Self {
        completion: completed(QpNumber(0), WrId(0), CompletionKind::Write, WcStatus::Success, 0),
        tells: Tells::Nothing,
    };
}

/// `len` is of no meaning if the request failed.
#[inline]
const fn completed(
    qp: QpNumber,
    wr_id: WrId,
    kind: CompletionKind,
    status: WcStatus,
    len: u32,
) -> Completion {
    let byte_len = if matches!(status, WcStatus::Success) { len } else { 0 };
    Completion { wr_id, qp, kind, status, byte_len, imm: None, absent: false }
}

/// The sends of a queue pair.
pub(super) struct Sends {
    pub(super) under_way: UnderWay<Sending>,
    /// Free places of the user when they were counted last, less those that were taken since: so many are free, if not more.
    free: usize,
    /// Requests posted since the last one that was signaled.
    pub(super) silent: u32,
    /// The number of the last check of the peer. It is still under way unless all requests under way are newer.
    pub(super) probe: Option<u64>,
    /// For who posts.
    pub(super) lists: Lists,
}

impl Sends {
    /// Of a queue with `depth` places for the user; the check of the peer has one more.
    pub(super) fn new(depth: u32) -> Self {
        let under_way = UnderWay::new(depth.saturating_add(1), Sending::CHECK);
        Self { under_way, free: 0, silent: 0, probe: None, lists: Lists::default() }
    }

    /// How many of `wanted` requests there are free places for, of the user's `depth`.
    #[inline]
    pub(super) fn room_for(&mut self, wanted: usize, depth: u32) -> usize {
        if wanted > self.free {
            self.free = self.room(depth);
        }
        wanted.min(self.free)
    }

    /// Free places of the user, of `depth`.
    #[inline(never)]
    fn room(&self, depth: u32) -> usize {
        let is_probing = self.probe.is_some_and(|number| number >= self.under_way.first);
        self.under_way.room(depth + u32::from(is_probing))
    }

    /// Adds a request of the user, for which there is room.
    #[inline]
    pub(super) fn push(&mut self, request: Sending) {
        self.free -= 1;
        self.under_way.push(request);
    }

    /// Whether a request is under way whose end comes as a completion. Requests that are not signaled stay in the list when they are done.
    pub(super) fn is_watched(&self) -> bool {
        self.under_way.len() > self.silent as usize
    }
}

/// See the module.
pub(super) struct Requests {
    pub(super) number: QpNumber,
    pub(super) qp: Weak<VerbsQp>,
    /// Whether the queue pair is gone.
    pub(super) is_gone: AtomicBool,
    /// The shared queue of its receives; `None`: it has receives of its own.
    pub(super) shared: Option<Weak<VerbsSrq>>,
    /// Locked while posting, so that numbers are posted in order.
    pub(super) sends: Mutex<Sends>,
    pub(super) receives: Mutex<UnderWay<WrId>>,
}

impl Requests {
    #[inline]
    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// A send of this queue pair, as it is under way.
    #[inline]
    pub(super) fn sending(&self, wr_id: WrId, kind: CompletionKind, len: u32, tells: Tells) -> Sending {
        Sending { completion: completed(self.number, wr_id, kind, WcStatus::Success, len), tells }
    }

    /// Takes a completion of this queue pair from the RNIC; completions for the user are added to `taken`.
    #[inline(always)]
    pub(super) fn complete(&self, wc: &Wc, status: WcStatus, taken: &mut impl Taken) {
        if wc.wr_id() & RECEIVE != 0 {
            return self.complete_receive(wc, status, taken);
        }
        let mut sends = self.sends.lock();
        let Some((Sending { completion, tells }, unpolled)) = sends.under_way.take(wc.wr_id()) else {
            return;
        };
        if status == WcStatus::Success {
            if *tells == Tells::End {
                taken.add(completion, unpolled);
            }
        } else if *tells != Tells::Nothing {
            taken.add(&Completion { status, byte_len: 0, ..*completion }, unpolled);
        }
    }

    /// As `complete`, of a request that failed, which breaks the queue pair.
    #[cold]
    #[inline(never)]
    pub(super) fn complete_failed(&self, wc: &Wc, taken: &mut impl Taken) {
        self.complete(wc, failure_of(wc.status(), wc.wr_id() & RECEIVE != 0), taken);
        if let Some(qp) = self.qp.upgrade() {
            qp.fail();
        }
    }

    #[inline(never)]
    fn complete_receive(&self, wc: &Wc, status: WcStatus, taken: &mut impl Taken) {
        let (imm, has_imm, len) = match status {
            WcStatus::Success => (wc.imm(), wc.is_write_imm(), wc.byte_len()),
            // What else a failed completion has is of no meaning.
            _ => (None, false, 0),
        };
        let kind = if imm.is_some() || has_imm { CompletionKind::RecvWithImm } else { CompletionKind::Recv };
        let received = |wr_id| Completion { imm, ..completed(self.number, wr_id, kind, status, len) };
        if let Some(shared) = &self.shared {
            if let Some(shared) = shared.upgrade() {
                shared.complete(wc.wr_id(), received, taken);
            }
            return;
        }
        let mut receives = self.receives.lock();
        if let Some((wr_id, unpolled)) = receives.take(wc.wr_id() & !RECEIVE) {
            taken.add(&received(*wr_id), unpolled);
        }
    }
}

fn failure_of(status: u32, is_receive: bool) -> WcStatus {
    use sys::status as s;
    match status {
        // rdma_rxe's status for a message that is longer than its receive (6.12, `rxe_resp.c`: a malformed request).
        s::IBV_WC_LOC_QP_OP_ERR if is_receive => WcStatus::LocalLength,
        s::IBV_WC_LOC_LEN_ERR => WcStatus::LocalLength,
        s::IBV_WC_LOC_PROT_ERR
        | s::IBV_WC_LOC_QP_OP_ERR
        | s::IBV_WC_LOC_ACCESS_ERR
        | s::IBV_WC_MW_BIND_ERR => WcStatus::LocalProtection,
        s::IBV_WC_REM_ACCESS_ERR => WcStatus::RemoteAccess,
        s::IBV_WC_REM_INV_REQ_ERR => WcStatus::RemoteInvalid,
        s::IBV_WC_REM_OP_ERR | s::IBV_WC_REM_ABORT_ERR => WcStatus::RemoteOperation,
        s::IBV_WC_WR_FLUSH_ERR => WcStatus::Flushed,
        // The peer, or the path to it, is gone.
        _ => WcStatus::Disconnected,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sending(tells: Tells) -> Sending {
        Sending { tells, ..Sending::CHECK }
    }

    #[test]
    fn a_look_for_the_peer_takes_none_of_the_users_places() {
        let mut sends = Sends::new(2);
        for round in 0..3 {
            assert_eq!(sends.room_for(2, 2), 2, "round {round}");
            sends.probe = Some(sends.under_way.next());
            sends.under_way.push(Sending::CHECK);
            assert_eq!(sends.room_for(2, 2), 2);
            for _ in 0..2 {
                sends.push(sending(Tells::End));
            }
            assert_eq!(sends.room_for(2, 2), 0);
            let last = sends.under_way.next() - 1;
            sends.under_way.take(last - 2).expect("the look");
            assert_eq!(sends.room_for(2, 2), 0);
            // Both are done: an unsignaled request ends with the one behind it.
            sends.under_way.take(last).expect("the last");
        }
    }

    #[test]
    fn requests_that_nobody_hears_of_do_not_keep_from_a_look_for_the_peer() {
        let mut sends = Sends::new(4);
        assert!(!sends.is_watched());
        // Two that are not signaled: done or not, they stay.
        for _ in 0..2 {
            sends.under_way.push(sending(Tells::Failure));
        }
        sends.silent = 2;
        assert!(!sends.is_watched());
        // The look itself, and one behind it.
        let look = sends.under_way.next();
        sends.under_way.push(Sending::CHECK);
        sends.silent = 0;
        assert!(sends.is_watched());
        sends.under_way.push(sending(Tells::Failure));
        sends.silent = 1;
        assert!(sends.is_watched());
        sends.under_way.take(look).expect("it is done");
        assert!(!sends.is_watched());
    }
}
