//! A count that many threads add to with every read.
//!
//! With a single atomic all cores would fetch the same cache line from each other, which took a tenth of the time of a one-sided read on two cores.
//! So the count is spread: each thread adds to a line of its own, or to one that it shares with few others. Relaxed: it is only a figure.

use crossbeam::utils::CachePadded;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The number of cache lines of a count: about as many as threads that read at once on today's machines.
const LINES: usize = 16;

/// The line for the next thread that adds.
static NEXT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static LINE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % LINES;
}

/// A count that is spread over several cache lines.
#[derive(Debug, Default)]
pub(crate) struct SpreadCount([CachePadded<AtomicU64>; LINES]);

impl SpreadCount {
    /// Adds to the count.
    pub(super) fn add(&self, count: u64) {
        self.0[LINE.with(|line| *line)].fetch_add(count, Ordering::Relaxed);
    }

    /// The approximate count at this moment.
    pub(crate) fn get(&self) -> u64 {
        self.0.iter().map(|line| line.load(Ordering::Relaxed)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_whoever_adds() {
        let count = SpreadCount::default();
        std::thread::scope(|scope| {
            for thread in 0..2 * LINES as u64 {
                let count = &count;
                scope.spawn(move || (0..1000).for_each(|_| count.add(thread)));
            }
        });
        let threads = 2 * LINES as u64;
        assert_eq!(count.get(), 1000 * threads * (threads - 1) / 2);
    }
}
