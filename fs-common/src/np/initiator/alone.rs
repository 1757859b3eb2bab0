//! A READ that goes alone, with nothing pending or under way: what most programs that read one thing after the other post.
//!
//! Nothing is written down of it but the request, in the slot that is free next, and its signature is looked for as in any other READ's bytes. It takes
//! the slot, and its place in the order, when something else needs to know of it: another request, the owner that is to be asked, the end of the
//! connection. All of that would be written down while the request is not yet sent, or its answer is there, so a READ would take that much longer.

use super::order::Span;
use super::peer::NpPeer;
use super::request::{NpCompletion, NpOp, NpStatus, NpWr};

impl NpPeer {
    /// Whether a request needs no place among others: there are none, and it is to be tried.
    #[inline]
    pub(super) fn goes_alone(&self, wr: &NpWr) -> bool {
        let is_tried = self.settings.optimistic && !self.tells && !self.streak.is_one();
        let has_company = self.is_alone || !self.under_way.is_empty() || !self.pending.is_empty();
        wr.op == NpOp::Read && wr.signaled && is_tried && !has_company
    }

    /// Posts it. The doorbell is the caller's.
    #[inline]
    pub(super) fn post_alone(&mut self, wr: &NpWr) {
        let Some(&slot) = self.free.last() else { return };
        self.is_alone = true;
        self.flights[slot].wr = *wr;
        self.post_read(slot);
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
    pub(super) fn enter(&mut self, slot: usize, wr: &NpWr) {
        self.under_way.add(slot, Span::of(wr));
        self.flights[slot].begin(wr, self.tells);
    }

    /// It is done.
    #[inline]
    pub(super) fn finish_alone(&mut self, slot: usize) {
        self.is_alone = false;
        self.done.push(NpCompletion { id: self.flights[slot].wr.id, status: NpStatus::Success, old: 0 });
    }
}
