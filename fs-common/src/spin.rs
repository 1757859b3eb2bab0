//! How long an idle thread of a server (a worker, the NIC engine) spins before it sleeps.
//!
//! A sleep and a wake-up cost 5 to 20 microseconds of both sides' time on a virtual machine. Spinning for as long
//! as that costs is at worst twice as expensive as knowing the future; spinning at all is a waste when nothing
//! comes for long. So the budget grows when waits turn out short and shrinks to nothing when they turn out long,
//! as the halt polling of KVM does. A thread without load therefore does not spin, and a machine with two cores is
//! not burnt by idle polling.

use std::time::Duration;

/// The most a thread spins: what a sleep and a wake-up cost.
const MOST_SPIN: Duration = Duration::from_micros(20);
/// The first step from not spinning at all.
const LEAST_SPIN: Duration = Duration::from_micros(2);
/// A wait shorter than this was worth spinning for: with a little more budget the next may be caught.
const SHORT_WAIT: Duration = Duration::from_micros(60);

const _: () = assert!(LEAST_SPIN.as_nanos() < MOST_SPIN.as_nanos());
const _: () = assert!(MOST_SPIN.as_nanos() < SHORT_WAIT.as_nanos());

/// The adaptive budget.
#[derive(Debug)]
pub struct SpinBudget {
    spin: Duration,
}

impl Default for SpinBudget {
    fn default() -> Self {
        Self::new()
    }
}

impl SpinBudget {
    /// A small budget.
    pub fn new() -> Self {
        Self { spin: LEAST_SPIN }
    }

    /// How long to spin now.
    pub fn spin(&self) -> Duration {
        self.spin
    }

    /// Spinning found nothing, and the wait was so long in all.
    pub fn waited(&mut self, idle: Duration) {
        if idle < SHORT_WAIT {
            self.spin = (self.spin * 2).clamp(LEAST_SPIN, MOST_SPIN);
        } else {
            self.spin /= 2;
            if self.spin < LEAST_SPIN {
                self.spin = Duration::ZERO;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_waits_end_spinning_and_short_ones_bring_it_back() {
        let mut budget = SpinBudget::new();
        for _ in 0..10 {
            budget.waited(Duration::from_micros(30));
        }
        assert_eq!(budget.spin(), MOST_SPIN);
        for _ in 0..5 {
            budget.waited(Duration::from_millis(1));
        }
        assert_eq!(budget.spin(), Duration::ZERO);
        budget.waited(Duration::from_micros(59));
        assert_eq!(budget.spin(), LEAST_SPIN);
    }
}
