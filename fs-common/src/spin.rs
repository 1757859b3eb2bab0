//! How long a thread that waits spins before it sleeps.
//!
//! A sleep and a wake-up cost 5 to 50 microseconds on a virtual machine, whose halted cores the hypervisor has to
//! start again. Spinning for as long as that costs is at worst twice as expensive as knowing the future; spinning at
//! all is a waste when nothing comes for long. So the budget grows when waits turn out short and shrinks to nothing
//! when they turn out long, as the halt polling of KVM does. A thread without load therefore does not spin, and a
//! machine with two cores is not burnt by idle polling.
//!
//! A spinning thread calls `pause` in its loop, which gives the core away: on two cores the thread that is waited for is often the
//! next one on this very core, and would otherwise queue behind the spinning thread (measured: four times the creates a second).
//!
//! But a core that is given away can be gone for milliseconds: the kernel puts a thread that yields behind the time slices of all
//! other threads. Unlike a sleeper, the thread is not woken when the event comes that it waits for. So after a pause that took
//! long there is no further one for fifty times as long. Spinning is for cores that no other thread wants, and where they are
//! wanted it costs a fiftieth of the time at most.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The most a thread spins: what a sleep and a wake-up cost.
const MOST_SPIN: Duration = Duration::from_micros(60);
/// The first step from not spinning at all.
const LEAST_SPIN: Duration = Duration::from_micros(2);
/// A wait shorter than this was worth spinning for: with a little more budget the next may be caught.
const SHORT_WAIT: Duration = Duration::from_micros(200);
/// A pause longer than this gave the core to somebody who is not waited for: what hands work over to another thread runs for
/// some tens of microseconds.
const LONG_PAUSE: Duration = Duration::from_micros(200);
/// For how many times as long nobody spins then.
const REST_FACTOR: u32 = 50;

const _: () = assert!(LEAST_SPIN.as_nanos() < MOST_SPIN.as_nanos());
const _: () = assert!(MOST_SPIN.as_nanos() < SHORT_WAIT.as_nanos());

/// One turn of a spinning loop: whoever else is ready on this core goes first.
pub fn pause() {
    std::thread::yield_now();
}

/// The adaptive budget. Threads that share one steer it together; relaxed, for it is a guess.
#[derive(Debug)]
pub struct SpinBudget {
    made: Instant,
    spin_ns: AtomicU64,
    /// Since `made`: nobody spins before.
    rests_until_ns: AtomicU64,
}

impl Default for SpinBudget {
    fn default() -> Self {
        Self::new()
    }
}

impl SpinBudget {
    /// A small budget.
    pub fn new() -> Self {
        let spin_ns = AtomicU64::new(LEAST_SPIN.as_nanos() as u64);
        Self { made: Instant::now(), spin_ns, rests_until_ns: AtomicU64::new(0) }
    }

    fn since_made_ns(&self, time: Instant) -> u64 {
        time.saturating_duration_since(self.made).as_nanos() as u64
    }

    /// How long to spin in all, as of now.
    pub fn spin(&self, now: Instant) -> Duration {
        if self.since_made_ns(now) < self.rests_until_ns.load(Ordering::Relaxed) {
            return Duration::ZERO;
        }
        Duration::from_nanos(self.spin_ns.load(Ordering::Relaxed))
    }

    /// One turn of a spinning loop: whoever else is ready on this core goes first. After one that took long the budget is none.
    pub fn pause(&self) {
        let began = Instant::now();
        pause();
        self.paused(began, began.elapsed());
    }

    fn paused(&self, began: Instant, took: Duration) {
        if took > LONG_PAUSE {
            let rests_until_ns = self.since_made_ns(began + took + REST_FACTOR * took);
            self.rests_until_ns.fetch_max(rests_until_ns, Ordering::Relaxed);
        }
    }

    /// Spinning found nothing, and the wait was so long in all.
    pub fn waited(&self, idle: Duration) {
        let spin = Duration::from_nanos(self.spin_ns.load(Ordering::Relaxed));
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
        let (budget, now) = (SpinBudget::new(), Instant::now());
        for _ in 0..10 {
            budget.waited(Duration::from_micros(30));
        }
        assert_eq!(budget.spin(now), MOST_SPIN);
        for _ in 0..6 {
            budget.waited(Duration::from_millis(1));
        }
        assert_eq!(budget.spin(now), Duration::ZERO);
        budget.waited(SHORT_WAIT - Duration::from_micros(1));
        assert_eq!(budget.spin(now), LEAST_SPIN);
    }

    #[test]
    fn who_lost_the_core_in_a_pause_does_not_spin_for_long() {
        let (budget, began) = (SpinBudget::new(), Instant::now());
        budget.paused(began, LONG_PAUSE);
        assert_eq!(budget.spin(began + LONG_PAUSE), LEAST_SPIN, "somebody handed work over");
        let lost = Duration::from_millis(3);
        budget.paused(began, lost);
        let back = began + lost + lost * REST_FACTOR;
        // What came meanwhile came soon, and that is no reason.
        budget.waited(Duration::from_micros(30));
        assert_eq!(budget.spin(began + lost), Duration::ZERO);
        assert_eq!(budget.spin(back - Duration::from_micros(1)), Duration::ZERO);
        assert_eq!(budget.spin(back), 2 * LEAST_SPIN);
    }
}
