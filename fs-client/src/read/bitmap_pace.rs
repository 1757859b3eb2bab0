//! How often page bitmaps are pulled: each second as in the paper (TeRM section 4.2), sooner while too many reads travel
//! twice.
//!
//! A bit is wrong from the moment its page is evicted until the next pull, and a read that relies on it finds the magic
//! pattern and goes again by RPC. The number of such reads depends on how fast pages move: with little memory and evenly
//! spread reads it was 1.4 % with a pull a second. So the period is halved while more than one read in [`TWICE_ALLOWED`]
//! goes twice, and doubled again while far fewer do. The cost of pulls is bounded: [`MAX_BYTES_PER_SECOND`].

use std::time::Duration;

/// The paper's period.
pub(super) const LONGEST: Duration = Duration::from_secs(1);
/// With a shorter period pulls cost more than the reads that they save.
const SHORTEST: Duration = Duration::from_millis(30);
/// At most one read of this many may travel twice.
const TWICE_ALLOWED: u64 = 1_000;
/// If fewer than one read of this many travels twice, the period is doubled.
const TWICE_FEW: u64 = 4 * TWICE_ALLOWED;
/// The most bytes of bitmaps that are pulled per second, except that no pull is put off for longer than `LONGEST`. The bitmap of a file of 32 GiB
/// has 1 MiB, for which the target's NIC reads eight million entries in some 30 ms.
const MAX_BYTES_PER_SECOND: u64 = 1 << 20;

const _: () = assert!(SHORTEST.as_millis() < LONGEST.as_millis());

/// The current period, and the counts at the last pull.
#[derive(Debug)]
pub(super) struct BitmapPace {
    period: Duration,
    reads: u64,
    twice: u64,
}

impl Default for BitmapPace {
    fn default() -> Self {
        Self { period: LONGEST, reads: 0, twice: 0 }
    }
}

impl BitmapPace {
    /// `bytes` of bitmaps were pulled; `reads` and `twice` are all one-sided reads so far, and those of them that found
    /// the magic pattern though the bitmap had promised bytes. Returns when to pull again.
    pub(super) fn pulled(&mut self, bytes: u64, reads: u64, twice: u64) -> Duration {
        let (new_reads, new_twice) = (reads.saturating_sub(self.reads), twice.saturating_sub(self.twice));
        (self.reads, self.twice) = (reads, twice);
        if new_twice * TWICE_ALLOWED > new_reads {
            self.period /= 2;
        } else if new_twice * TWICE_FEW < new_reads || new_reads == 0 {
            self.period *= 2;
        }
        let least = SHORTEST.max(Duration::from_millis(bytes * 1000 / MAX_BYTES_PER_SECOND));
        self.period = self.period.max(least).min(LONGEST);
        self.period
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_period_follows_the_reads_that_travel_twice() {
        let mut pace = BitmapPace::default();
        assert_eq!(pace.pulled(100, 1_000, 0), LONGEST);
        assert_eq!(pace.pulled(100, 2_000, 2), LONGEST / 2);
        assert_eq!(pace.pulled(100, 12_000, 7), LONGEST / 2, "neither many nor few");
        for round in 0..10 {
            pace.pulled(100, 13_000 + round * 1_000, 107 + round * 100);
        }
        assert_eq!(pace.pulled(100, 24_000, 2_000), SHORTEST);
        assert_eq!(
            pace.pulled(1 << 17, 25_000, 2_100),
            Duration::from_millis(125),
            "a large file is not pulled sooner"
        );
        for _ in 0..6 {
            pace.pulled(100, 25_000, 2_100);
        }
        assert_eq!(pace.pulled(100, 25_000, 2_100), LONGEST, "nothing is read");
    }
}
