//! How long a thread that waits spins before it sleeps.
//!
//! A sleep and a wake-up cost 5 to 50 microseconds on a virtual machine, whose halted cores the hypervisor has to
//! start again. Spinning for as long as that costs is at worst twice as expensive as knowing the future; spinning at
//! all is a waste when nothing comes for long. So the budget grows when waits turn out short and shrinks to nothing
//! when they turn out long, as the halt polling of KVM does. A thread without load therefore does not spin, and a
//! machine with two cores is not burnt by idle polling.
//!
//! Whoever spins calls `pause` in its loop, which gives the core away: on two cores the thread that is waited for
//! is often the next one on this very core, and would otherwise stand behind the spinner (measured: four times the
//! creates a second).

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The most a thread spins: what a sleep and a wake-up cost.
const MOST_SPIN: Duration = Duration::from_micros(60);
/// The first step from not spinning at all.
const LEAST_SPIN: Duration = Duration::from_micros(2);
/// A wait shorter than this was worth spinning for: with a little more budget the next may be caught.
const SHORT_WAIT: Duration = Duration::from_micros(200);

const _: () = assert!(LEAST_SPIN.as_nanos() < MOST_SPIN.as_nanos());
const _: () = assert!(MOST_SPIN.as_nanos() < SHORT_WAIT.as_nanos());

/// One turn of a spinning loop: whoever else is ready on this core goes first.
pub fn pause() {
    std::thread::yield_now();
}

/// The adaptive budget. Threads that share one steer it together; relaxed, for it is a guess.
#[derive(Debug)]
pub struct SpinBudget {
    spin_ns: AtomicU64,
}

impl Default for SpinBudget {
    fn default() -> Self {
        Self::new()
    }
}

impl SpinBudget {
    /// A small budget.
    pub const fn new() -> Self {
        Self { spin_ns: AtomicU64::new(LEAST_SPIN.as_nanos() as u64) }
    }

    /// How long to spin now.
    pub fn spin(&self) -> Duration {
        Duration::from_nanos(self.spin_ns.load(Ordering::Relaxed))
    }

    /// Spinning found nothing, and the wait was so long in all.
    pub fn waited(&self, idle: Duration) {
        let spin = self.spin();
        let next = if idle < SHORT_WAIT {
            (spin * 2).clamp(LEAST_SPIN, MOST_SPIN)
        } else if spin / 2 < LEAST_SPIN {
            Duration::ZERO
        } else {
            spin / 2
        };
        self.spin_ns.store(next.as_nanos() as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_waits_end_spinning_and_short_ones_bring_it_back() {
        let budget = SpinBudget::new();
        for _ in 0..10 {
            budget.waited(Duration::from_micros(30));
        }
        assert_eq!(budget.spin(), MOST_SPIN);
        for _ in 0..6 {
            budget.waited(Duration::from_millis(1));
        }
        assert_eq!(budget.spin(), Duration::ZERO);
        budget.waited(SHORT_WAIT - Duration::from_micros(1));
        assert_eq!(budget.spin(), LEAST_SPIN);
    }
}
