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

use super::request::{NpOp, NpOrder};

/// A request under way, as far as order goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) op: NpOp,
    pub(super) order: NpOrder,
}

impl Span {
    fn overlaps(self, other: Self) -> bool {
        self.offset < other.offset + u64::from(other.len) && other.offset < self.offset + u64::from(self.len)
    }
}

/// Whether `next` may begin while these are under way.
pub(super) fn may_begin(next: Span, strict: bool, mut under_way: impl Iterator<Item = Span>) -> bool {
    under_way.all(|other| {
        !(strict || next.order.before || other.order.after)
            && !((next.op.changes() || other.op.changes()) && next.overlaps(other))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(op: NpOp, offset: u64, order: NpOrder) -> Span {
        Span { offset, len: 8, op, order }
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
                            may_begin(span(second, second_at, second_order), strict, under_way.into_iter())
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
        assert!(may_begin(span(NpOp::Write, 0, NpOrder::STRICT), true, std::iter::empty()));
    }
}
