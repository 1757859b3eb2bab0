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
    pub(super) wr_id: WrId,
    pub(super) kind: CompletionKind,
    pub(super) len: u32,
    pub(super) tells: Tells,
}

impl Sending {
    /// A check of the peer.
    pub(super) const CHECK: Self =
        Self { wr_id: WrId(0), kind: CompletionKind::Write, len: 0, tells: Tells::Nothing };
}

/// The sends of a queue pair.
pub(super) struct Sends {
    pub(super) under_way: UnderWay<Sending>,
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
        Self { under_way, silent: 0, probe: None, lists: Lists::default() }
    }

    /// Free places of the user, of `depth`.
    #[inline]
    pub(super) fn room(&self, depth: u32) -> usize {
        let is_probing = self.probe.is_some_and(|number| number >= self.under_way.first);
        self.under_way.room(depth + u32::from(is_probing))
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

    /// Takes a completion of this queue pair from the RNIC; completions for the user are added to `taken`.
    #[inline(always)]
    pub(super) fn complete(&self, wc: Wc<'_>, taken: &mut Taken<'_>) {
        let is_receive = wc.wr_id() & RECEIVE != 0;
        let status = status_of(wc.status(), is_receive);
        if is_receive {
            return self.complete_receive(wc, status, taken);
        }
        let mut sends = self.sends.lock();
        let Some(sent) = sends.under_way.take(wc.wr_id()) else { return };
        if sent.tells == Tells::End || (sent.tells == Tells::Failure && status != WcStatus::Success) {
            let completion = self.completion(sent.wr_id, sent.kind, status, sent.len);
            taken.add(completion, &sends.under_way.unpolled);
        }
    }

    fn complete_receive(&self, wc: Wc<'_>, status: WcStatus, taken: &mut Taken<'_>) {
        let imm = wc.imm();
        let has_imm = imm.is_some() || wc.is_write_imm();
        let kind = if has_imm { CompletionKind::RecvWithImm } else { CompletionKind::Recv };
        let received = |wr_id| Completion { imm, ..self.completion(wr_id, kind, status, wc.byte_len()) };
        if let Some(shared) = &self.shared {
            if let Some(shared) = shared.upgrade() {
                shared.complete(wc.wr_id(), received, taken);
            }
            return;
        }
        let mut receives = self.receives.lock();
        if let Some(wr_id) = receives.take(wc.wr_id() & !RECEIVE) {
            taken.add(received(wr_id), &receives.unpolled);
        }
    }

    /// `len` is of no meaning if the request failed.
    #[inline]
    fn completion(&self, wr_id: WrId, kind: CompletionKind, status: WcStatus, len: u32) -> Completion {
        let byte_len = if status == WcStatus::Success { len } else { 0 };
        Completion { wr_id, qp: self.number, kind, status, byte_len, imm: None, absent: false }
    }
}

#[inline]
fn status_of(status: u32, is_receive: bool) -> WcStatus {
    if status == sys::status::IBV_WC_SUCCESS { WcStatus::Success } else { failure_of(status, is_receive) }
}

#[cold]
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
            assert_eq!(sends.room(2), 2, "round {round}");
            sends.probe = Some(sends.under_way.next());
            sends.under_way.push(Sending::CHECK);
            assert_eq!(sends.room(2), 2);
            for _ in 0..2 {
                sends.under_way.push(sending(Tells::End));
            }
            assert_eq!(sends.room(2), 0);
            let last = sends.under_way.next() - 1;
            sends.under_way.take(last - 2).expect("the look");
            assert_eq!(sends.room(2), 0);
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
