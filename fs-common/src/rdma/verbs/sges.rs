//! The local ranges of a work request.

use super::request::{RecvWr, SendWr, Sge};

/// The most local ranges that a work request can name: a header, a payload, its padding, and one to spare. Each costs every request its place here, also
/// one that does not use it; an RNIC may take fewer ([`super::Capabilities::max_sges`]).
pub const SGES_MAX: usize = 4;

/// The local ranges of a work request, in the order in which their bytes are sent or filled. Ranges without bytes are left out: they name no memory, and
/// their keys are not looked at. One range is `Sge::into`.
#[derive(Clone, Copy)]
pub struct SgeList {
    /// Of no meaning behind `count`.
    sges: [Sge; SGES_MAX],
    count: u32,
    /// Bytes of all ranges together. (Four lengths of 32 bits cannot overflow this.)
    len: u64,
}

/// More ranges than a work request can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{asked} local ranges are more than the {SGES_MAX} that a work request can name; split it")]
pub struct TooManySges {
    /// Ranges with bytes.
    pub asked: usize,
}

impl SgeList {
    /// No bytes at all.
    pub const EMPTY: Self = Self { sges: [Sge::EMPTY; SGES_MAX], count: 0, len: 0 };

    /// These ranges, in this order.
    ///
    /// # Errors
    /// More than [`SGES_MAX`] of them have bytes.
    pub fn of(ranges: &[Sge]) -> Result<Self, TooManySges> {
        let mut list = Self::EMPTY;
        for range in ranges.iter().filter(|range| range.len > 0) {
            let Some(place) = list.sges.get_mut(list.count as usize) else {
                let asked = ranges.iter().filter(|range| range.len > 0).count();
                return Err(TooManySges { asked });
            };
            *place = *range;
            list.count += 1;
            list.len += u64::from(range.len);
        }
        Ok(list)
    }

    /// The ranges.
    #[inline]
    pub fn as_slice(&self) -> &[Sge] {
        &self.sges[..self.count as usize]
    }

    /// Number of ranges.
    #[inline]
    pub const fn count(&self) -> u32 {
        self.count
    }

    /// Bytes of all ranges together.
    #[inline]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are no bytes.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// One range, or none: what nearly all requests have.
impl From<Sge> for SgeList {
    #[inline]
    fn from(range: Sge) -> Self {
        Self {
            sges: [range, Sge::EMPTY, Sge::EMPTY, Sge::EMPTY],
            count: u32::from(range.len > 0),
            len: range.len.into(),
        }
    }
}

impl PartialEq for SgeList {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for SgeList {}

impl std::fmt::Debug for SgeList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.as_slice()).finish()
    }
}

/// A work request with local ranges.
pub(in crate::rdma) trait HasRanges {
    fn ranges(&self) -> &SgeList;
}

impl HasRanges for SendWr {
    fn ranges(&self) -> &SgeList {
        &self.local
    }
}

impl HasRanges for RecvWr {
    fn ranges(&self) -> &SgeList {
        &self.local
    }
}

/// How many requests stand before the first that names more ranges than `most`.
pub(in crate::rdma) fn count_within<R: HasRanges>(requests: &[R], most: u32) -> usize {
    requests.iter().position(|request| request.ranges().count() > most).unwrap_or(requests.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Lkey;

    fn range(key: u32, len: u32) -> Sge {
        Sge { lkey: Lkey(key), offset: u64::from(key) * 100, len }
    }

    #[test]
    fn ranges_keep_their_order_and_those_without_bytes_are_left_out() {
        let list = SgeList::of(&[range(1, 0), range(2, 5), range(3, 0), range(4, 7)]).expect("two");
        assert_eq!(list.as_slice(), [range(2, 5), range(4, 7)]);
        assert_eq!((list.count(), list.len(), list.is_empty()), (2, 12, false));
        assert_eq!(SgeList::from(range(2, 5)), SgeList::of(&[range(2, 5)]).expect("one"));
        for empty in [SgeList::from(range(7, 0)), SgeList::of(&[]).expect("none")] {
            assert_eq!((empty, empty.len()), (SgeList::EMPTY, 0));
        }
    }

    #[test]
    fn one_too_many_is_refused_and_lengths_do_not_overflow() {
        let longest = range(1, u32::MAX);
        let mut ranges = vec![longest; SGES_MAX];
        ranges.insert(2, range(9, 0));
        assert_eq!(SgeList::of(&ranges).expect("they fit").len(), 4 * u64::from(u32::MAX));
        ranges.push(longest);
        assert_eq!(SgeList::of(&ranges), Err(TooManySges { asked: SGES_MAX + 1 }));
    }
}
