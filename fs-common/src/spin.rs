//! How long a thread that waits spins before it sleeps.
//!
//! A sleep and a wake-up cost 5 to 50 microseconds on a virtual machine, whose halted cores the hypervisor has to start again. Spinning for that time
//! costs at most twice as much as the best possible choice; but if nothing comes for long, all spinning is wasted. So the budget grows when waits
//! turn out short and shrinks to nothing when they turn out long, as in the halt polling of KVM. Therefore a thread without load does not spin, and
//! idle polling does not take the cores of a small machine.
//!
//! A spinning thread calls `pause` in its loop, which yields the core: on two cores the thread that is waited for is often the next one on this very
//! core, and would otherwise queue behind the spinning thread (measured: four times the creates a second).
//!
//! But a yielded core can be away for milliseconds: the kernel puts a thread that yields behind the time slices of all other threads, and, unlike a
//! sleeper, does not wake it when the awaited event comes. So after a pause that took long there is no further one for fifty times as long. Spinning
//! is for cores that no other thread wants; where other threads want them, it costs at most a fiftieth of the time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The longest spin: the cost of a sleep and a wake-up.
const MOST_SPIN: Duration = Duration::from_micros(60);
/// The first step from not spinning at all.
const LEAST_SPIN: Duration = Duration::from_micros(2);
/// A wait shorter than this was worth spinning for: a slightly larger budget may catch the next one.
const SHORT_WAIT: Duration = Duration::from_micros(200);
/// A pause longer than this gave the core to a thread that nobody waits for: a thread that passes work on runs only for some tens of microseconds.
const LONG_PAUSE: Duration = Duration::from_micros(200);
/// Time without spinning after a long pause, as a multiple of the pause.
const REST_FACTOR: u32 = 50;

const _: () = assert!(LEAST_SPIN.as_nanos() < MOST_SPIN.as_nanos());
const _: () = assert!(MOST_SPIN.as_nanos() < SHORT_WAIT.as_nanos());

/// One turn of a spinning loop: any other thread that is ready on this core goes first.
pub fn pause() {
    std::thread::yield_now();
}

/// The adaptive budget. Threads that share it adapt it together; relaxed, since it is a guess.
#[derive(Debug)]
pub struct SpinBudget {
    made: Instant,
    spin_ns: AtomicU64,
    /// End of the time without spinning, counted from `made`.
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

    /// The whole time to spin, as of now.
    pub fn spin(&self, now: Instant) -> Duration {
        if self.since_made_ns(now) < self.rests_until_ns.load(Ordering::Relaxed) {
            return Duration::ZERO;
        }
        Duration::from_nanos(self.spin_ns.load(Ordering::Relaxed))
    }

    /// One turn of a spinning loop: any other thread that is ready on this core goes first. Returns when it ended. After a turn that took long the budget
    /// is zero for a while.
    pub fn pause(&self) -> Instant {
        let began = Instant::now();
        pause();
        let ended = Instant::now();
        self.paused(began, ended - began);
        ended
    }

    fn paused(&self, began: Instant, took: Duration) {
        if took > LONG_PAUSE {
            let rests_until_ns = self.since_made_ns(began + took + REST_FACTOR * took);
            self.rests_until_ns.fetch_max(rests_until_ns, Ordering::Relaxed);
        }
    }

    /// Spinning found nothing, and the whole wait took this long.
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
        // An event that came soon does not end the time without spinning.
        budget.waited(Duration::from_micros(30));
        assert_eq!(budget.spin(began + lost), Duration::ZERO);
        assert_eq!(budget.spin(back - Duration::from_micros(1)), Duration::ZERO);
        assert_eq!(budget.spin(back), 2 * LEAST_SPIN);
    }
}
