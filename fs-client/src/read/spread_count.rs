//! A count that many threads add to with every read.
//!
//! One atomic would be a line that all cores fetch from each other: on two cores a tenth of the time of a one-sided
//! read. So it is spread: each thread adds to a line of its own, or one it shares with few. Relaxed: a figure.

use crossbeam::utils::CachePadded;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Lines of a count: as many as threads that read at once on machines of today's size, more or less.
const LINES: usize = 16;

/// Given to the next thread that adds.
static NEXT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static LINE: usize = NEXT.fetch_add(1, Ordering::Relaxed) % LINES;
}

/// A spread count.
#[derive(Debug, Default)]
pub(crate) struct SpreadCount([CachePadded<AtomicU64>; LINES]);

impl SpreadCount {
    /// Adds to it.
    pub(super) fn add(&self, count: u64) {
        self.0[LINE.with(|line| *line)].fetch_add(count, Ordering::Relaxed);
    }

    /// What it is at about this moment.
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
