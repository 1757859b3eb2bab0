//! The requests that are under way on one queue of a queue pair, by the numbers that the RNIC knows them by.
//!
//! Numbers count from 0 through all requests of the queue, so a number is also its request's place in a ring. The ring has room for as many as may be
//! under way at once; whoever posts looks for room before ([`UnderWay::room`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// See the module.
pub(super) struct UnderWay<T> {
    /// The numbers of those under way: from `first` on, before `next`.
    pub(super) first: u64,
    next: u64,
    /// A power of two of places.
    ring: Box<[T]>,
    /// Number of completions that the user has not polled yet.
    pub(super) unpolled: Arc<AtomicU32>,
}

impl<T: Copy> UnderWay<T> {
    /// Of a queue with at most `most` requests under way. `blank` fills places that nothing was posted to.
    pub(super) fn new(most: u32, blank: T) -> Self {
        let places = (most.max(1) as usize).next_power_of_two();
        Self { first: 0, next: 0, ring: vec![blank; places].into(), unpolled: Arc::default() }
    }

    /// The number of the next request.
    #[inline]
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    #[inline]
    pub(super) fn len(&self) -> usize {
        (self.next - self.first) as usize
    }

    /// Free places, of `depth`: a request keeps its own until its completion is polled.
    #[inline]
    pub(super) fn room(&self, depth: u32) -> usize {
        let taken = self.len() + self.unpolled.load(Ordering::Acquire) as usize;
        (depth as usize).saturating_sub(taken)
    }

    #[inline]
    fn place(&self, number: u64) -> usize {
        number as usize & (self.ring.len() - 1)
    }

    /// Adds the next request, for which there is room.
    #[inline]
    pub(super) fn push(&mut self, request: T) {
        debug_assert!(self.len() < self.ring.len(), "whoever posts has looked for room");
        let place = self.place(self.next);
        self.ring[place] = request;
        self.next += 1;
    }

    /// Removes the request with this number and all before it; returns the former, and the count of completions that nobody has polled.
    #[inline(always)]
    pub(super) fn take(&mut self, number: u64) -> Option<(&T, &Arc<AtomicU32>)> {
        if !(self.first..self.next).contains(&number) {
            return None;
        }
        self.first = number + 1;
        Some((&self.ring[self.place(number)], &self.unpolled))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take<T: Copy>(under_way: &mut UnderWay<T>, number: u64) -> Option<T> {
        under_way.take(number).map(|(request, _)| *request)
    }

    #[test]
    fn a_completion_ends_what_was_posted_before_it() {
        let mut under_way = UnderWay::new(4, "");
        for name in ["a", "b", "c", "d"] {
            under_way.push(name);
        }
        assert_eq!((under_way.next(), under_way.len(), under_way.room(4)), (4, 4, 0));
        assert_eq!(take(&mut under_way, 1), Some("b"));
        assert_eq!(take(&mut under_way, 0), None, "it is over");
        assert_eq!(take(&mut under_way, 4), None, "nobody posted that");
        assert_eq!(take(&mut under_way, u64::MAX), None, "nor that");
        assert_eq!(take(&mut under_way, 2), Some("c"));
        assert_eq!((take(&mut under_way, 3), under_way.next()), (Some("d"), 4));
    }

    #[test]
    fn places_are_used_again_and_numbers_are_not() {
        // Five: the ring has eight places.
        let mut under_way = UnderWay::new(5, 0);
        for number in 0..100 {
            assert_eq!(under_way.next(), number);
            under_way.push(number);
            if number >= 4 {
                assert_eq!((under_way.len(), under_way.room(5)), (5, 0));
                assert_eq!(take(&mut under_way, number - 4), Some(number - 4));
            }
        }
    }
}
