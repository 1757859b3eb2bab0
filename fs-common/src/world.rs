//! Clock and randomness as narrow traits, so that a whole cluster can run in one thread from one seed.

use crate::attr::Timestamp;
use parking_lot::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A source of time.
pub trait Clock: Send + Sync {
    /// Wall-clock time, for timestamps.
    fn now(&self) -> Timestamp;
    /// Time since some fixed point, never going back, for leases and time-outs.
    fn monotonic(&self) -> Duration;
}

/// A source of random numbers.
pub trait Random: Send + Sync {
    /// Fills the buffer.
    fn fill(&self, out: &mut [u8]);

    /// A random `u64`.
    fn next_u64(&self) -> u64 {
        let mut bytes = [0; 8];
        self.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }
}

/// The machine's clock.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// Starts counting monotonic time now.
    pub fn new() -> Self {
        Self { start: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Timestamp {
        match SystemTime::now().duration_since(UNIX_EPOCH) {
            Ok(since) => Timestamp { secs: since.as_secs() as i64, nanos: since.subsec_nanos() },
            // The operator has set the clock before 1970; nothing relies on such timestamps.
            Err(_) => Timestamp::default(),
        }
    }

    fn monotonic(&self) -> Duration {
        self.start.elapsed()
    }
}

/// The kernel's random numbers: unpredictable, for filekeys and the magic pattern.
#[derive(Debug, Default)]
pub struct SystemRandom;

impl Random for SystemRandom {
    fn fill(&self, out: &mut [u8]) {
        // getrandom(2) cannot fail after boot on a kernel that has it; without it nothing here may run.
        getrandom::fill(out).expect("the kernel gives random numbers");
    }
}

/// A clock that moves only when told to, for tests and simulation.
#[derive(Debug, Default)]
pub struct ManualClock {
    now: Mutex<Duration>,
}

impl ManualClock {
    /// Moves time on.
    pub fn advance(&self, by: Duration) {
        *self.now.lock() += by;
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        let now = *self.now.lock();
        // A fixed day, so that timestamps look like timestamps.
        Timestamp { secs: 1_700_000_000 + now.as_secs() as i64, nanos: now.subsec_nanos() }
    }

    fn monotonic(&self) -> Duration {
        *self.now.lock()
    }
}

/// Random numbers from a seed (splitmix64), for tests and simulation. Not for secrets.
#[derive(Debug)]
pub struct SeededRandom {
    state: Mutex<u64>,
}

impl SeededRandom {
    /// The sequence of this seed.
    pub fn new(seed: u64) -> Self {
        Self { state: Mutex::new(seed) }
    }
}

impl Random for SeededRandom {
    fn fill(&self, out: &mut [u8]) {
        let mut state = self.state.lock();
        for chunk in out.chunks_mut(8) {
            *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = *state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^= z >> 31;
            chunk.copy_from_slice(&z.to_le_bytes()[..chunk.len()]);
        }
    }
}
