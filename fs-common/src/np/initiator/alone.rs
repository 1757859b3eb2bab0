//! An access that goes alone, with nothing pending or under way: what programs post that do one thing after the other.
//!
//! It takes no slot and no place in the order while nobody needs to know of it. All of that would be written down, and struck out again, while its request
//! is not yet sent or its answer is there, so each access would take that much longer.
//!
//! | | goes alone | enters when |
//! |---|---|---|
//! | the post tells that an access is done | READ, WRITE | the post does not tell |
//! | completions tell | READ that is signaled | another request comes, or the owner is to be asked |
//!
//! Both enter also when the connection ends. The request of the second one stands in the slot that is free next, which it takes then.

use super::optimistic::read_done;
use super::order::Span;
use super::peer::NpPeer;
use super::request::{NpCompletion, NpOp, NpStatus, NpWr};
use crate::rdma::WrId;

impl NpPeer {
    /// Whether a request needs no place among others: there are none, and it is to be tried.
    #[inline]
    pub(super) fn goes_alone(&self, wr: &NpWr) -> bool {
        let may = match wr.op {
            NpOp::Read => self.tells || wr.signaled,
            NpOp::Write => self.tells,
            _ => false,
        };
        may && !self.is_alone
            && self.under_way.is_empty()
            && self.pending.is_empty()
            && self.settings.optimistic
            && !self.streak.is_one()
    }

    /// Posts it, and rings the doorbell.
    #[inline]
    pub(super) fn post_alone(&mut self, wr: &NpWr) {
        let Some(&slot) = self.free.last() else { return };
        if self.tells {
            return self.post_alone_told(slot, wr);
        }
        let Some(read) = self.access(read_done(slot), wr, true) else { return };
        let posted = self.qp.post_send(std::slice::from_ref(&read));
        // Written down while it is on its way.
        self.is_alone = true;
        self.flights[slot].wr = *wr;
        self.silent_since = None;
        if posted.is_err() {
            self.fail();
        }
    }

    #[inline(never)]
    fn post_alone_told(&mut self, slot: usize, wr: &NpWr) {
        let Some(access) = self.access(WrId(slot as u64), wr, false) else { return };
        match self.qp.post_send_known(std::slice::from_ref(&access)) {
            Ok(true) => {
                self.streak.tried(true);
                self.figures.one_sided += 1;
                if wr.signaled {
                    self.done.push(NpCompletion { id: wr.id, status: NpStatus::Success, old: 0 });
                }
            }
            posted => {
                self.free.pop();
                self.enter(slot, wr);
                self.silent_since = None;
                if posted.is_err() {
                    return self.fail();
                }
                self.checks.add(slot);
                self.check_batch();
                self.ring();
            }
        }
    }

    /// If there is one, it is one of several from here on.
    #[inline]
    pub(super) fn enter_alone(&mut self) {
        if std::mem::take(&mut self.is_alone)
            && let Some(slot) = self.free.pop()
        {
            let wr = self.flights[slot].wr;
            self.enter(slot, &wr);
        }
    }

    /// A request takes a slot, and its place in the order.
    #[inline]
    pub(super) fn enter(&mut self, slot: usize, wr: &NpWr) {
        self.under_way.add(slot, Span::of(wr));
        self.flights[slot].begin(wr, self.tells);
    }

    /// The READ whose completion came is done.
    #[inline]
    pub(super) fn finish_alone(&mut self, slot: usize) {
        self.is_alone = false;
        self.done.push(NpCompletion { id: self.flights[slot].wr.id, status: NpStatus::Success, old: 0 });
    }
}
