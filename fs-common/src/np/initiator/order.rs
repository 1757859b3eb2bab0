//! Which requests may be under way together (NP-RDMA section 3.3).
//!
//! | the next request | waits for |
//! |---|---|
//! | any, behind one with order-after that is under way | that one |
//! | with order-before, or all where the peer is strict | all that are under way |
//! | of a range that overlaps with one under way, and one of the two changes the region | that one |
//! | another | nobody |
//!
//! A request that waits makes all behind it wait.

use super::request::{NpOrder, NpWr};

/// A request, as far as order goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    offset: u64,
    len: u32,
    changes: bool,
    order: NpOrder,
}

impl Span {
    pub(super) fn of(wr: &NpWr) -> Self {
        Self { offset: wr.offset, len: wr.len, changes: wr.op.changes(), order: wr.order }
    }

    fn overlaps(self, other: Self) -> bool {
        self.offset < other.offset + u64::from(other.len) && other.offset < self.offset + u64::from(self.len)
    }
}

/// The requests under way, by their slots.
pub(super) struct UnderWay {
    spans: Vec<(usize, Span)>,
    /// Where a slot's request is in `spans`.
    places: Vec<usize>,
    /// Of these, those that change the region, and those with order-after.
    changing: usize,
    last: usize,
}

impl UnderWay {
    pub(super) fn new(slots: usize) -> Self {
        Self { spans: Vec::with_capacity(slots), places: vec![0; slots], changing: 0, last: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Whether `next` may begin now.
    pub(super) fn may_begin(&self, next: Span, strict: bool) -> bool {
        if self.spans.is_empty() {
            return true;
        }
        if strict || next.order.before || self.last > 0 {
            return false;
        }
        // READs do not wait for READs, however many there are.
        if !next.changes && self.changing == 0 {
            return true;
        }
        !self.spans.iter().any(|(_, other)| (next.changes || other.changes) && next.overlaps(*other))
    }

    pub(super) fn add(&mut self, slot: usize, span: Span) {
        self.places[slot] = self.spans.len();
        self.changing += usize::from(span.changes);
        self.last += usize::from(span.order.after);
        self.spans.push((slot, span));
    }

    /// A request that was added is done.
    pub(super) fn remove(&mut self, slot: usize) {
        let at = self.places[slot];
        let (_, span) = self.spans.swap_remove(at);
        self.changing -= usize::from(span.changes);
        self.last -= usize::from(span.order.after);
        if let Some((moved, _)) = self.spans.get(at) {
            self.places[*moved] = at;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::np::initiator::request::NpOp;
    use proptest::prelude::*;

    fn span(op: NpOp, offset: u64, order: NpOrder) -> Span {
        Span { offset, len: 8, changes: op.changes(), order }
    }

    fn may_begin(next: Span, strict: bool, under_way: &[Span]) -> bool {
        let mut all = UnderWay::new(under_way.len());
        under_way.iter().enumerate().for_each(|(slot, span)| all.add(slot, *span));
        all.may_begin(next, strict)
    }

    #[test]
    fn the_table() {
        let (before, after) =
            (NpOrder { before: true, after: false }, NpOrder { before: false, after: true });
        let relaxed = NpOrder::RELAXED;
        let ops = [NpOp::Read, NpOp::Write, NpOp::FetchAdd(1), NpOp::CompareSwap { expect: 0, swap: 1 }];
        for first in ops {
            for second in ops {
                for (distance, overlaps) in [(0, true), (7, true), (8, false), (100, false)] {
                    for (first_at, second_at) in [(200, 200 + distance), (200 + distance, 200)] {
                        let may = |first_order, second_order, strict| {
                            let under_way = [span(first, first_at, first_order)];
                            may_begin(span(second, second_at, second_order), strict, &under_way)
                        };
                        let free = !overlaps || first == NpOp::Read && second == NpOp::Read;
                        assert_eq!(may(relaxed, relaxed, false), free, "{first:?} {second:?} {distance}");
                        assert_eq!(may(before, relaxed, false), free);
                        assert_eq!(may(relaxed, after, false), free);
                        assert!(!may(after, relaxed, false) && !may(relaxed, before, false));
                        assert!(!may(relaxed, relaxed, true));
                    }
                }
            }
        }
        assert!(may_begin(span(NpOp::Write, 0, NpOrder::STRICT), true, &[]));
    }

    proptest! {
        #[test]
        fn what_is_done_is_waited_for_no_more(
            steps in prop::collection::vec((0usize..8, 0u64..40, any::<bool>(), 0u8..6), 1..80),
        ) {
            let mut all = UnderWay::new(8);
            let mut model: Vec<Option<Span>> = vec![None; 8];
            for (slot, offset, changes, order) in steps {
                let next = Span { offset, len: 8, changes, order: NpOrder { before: order == 0, after: order == 1 } };
                let wanted = model.iter().flatten().all(|other| {
                    !next.order.before && !other.order.after && !((next.changes || other.changes) && next.overlaps(*other))
                });
                prop_assert_eq!(all.may_begin(next, false), wanted);
                match model[slot].take() {
                    Some(_) => all.remove(slot),
                    None => {
                        all.add(slot, next);
                        model[slot] = Some(next);
                    }
                }
                prop_assert_eq!(all.is_empty(), model.iter().all(Option::is_none));
            }
        }
    }
}
