//! Accesses that fault one behind the other: after some of them the owner is asked at once.
//!
//! An access that faults costs the optimistic try, and a request behind it. A program that goes through pages that are not there, as at their first use,
//! need not try each. The request is right in any case, whether the pages are there or not; it costs more than a try that succeeds, and time of the
//! owner's processor. So every [`TRY_EVERY`]th access of a streak is tried, and one that finds its pages ends the streak.

/// Faults in a row from which on the owner is asked at once.
const STREAK_MIN: u32 = 4;
/// The accesses of a streak of which one is tried: the owner is asked for fewer than so many in vain.
const TRY_EVERY: u32 = 8;

/// How the last tries ended.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Streak {
    faults: u32,
    asked: u32,
}

impl Streak {
    /// Whether the last tries make a streak.
    pub(super) fn is_one(self) -> bool {
        self.faults >= STREAK_MIN
    }

    /// Whether the owner is to be asked at once for the access that begins now.
    pub(super) fn asks(&mut self) -> bool {
        if !self.is_one() {
            return false;
        }
        self.asked = (self.asked + 1) % TRY_EVERY;
        self.asked != 0
    }

    /// A try found all its pages, or not.
    pub(super) fn tried(&mut self, found: bool) {
        *self = if found { Self::default() } else { Self { faults: self.faults.saturating_add(1), ..*self } };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_streak_begins_after_some_faults_and_ends_with_the_first_try_that_finds_its_pages() {
        let mut streak = Streak::default();
        for _ in 0..STREAK_MIN {
            assert!(!streak.asks());
            streak.tried(false);
        }
        for _ in 0..3 {
            assert_eq!((1..TRY_EVERY).filter(|_| streak.asks()).count() as u32, TRY_EVERY - 1);
            assert!(!streak.asks());
            streak.tried(false);
        }
        assert!(streak.asks());
        streak.tried(true);
        assert!(!streak.asks());
        (1..STREAK_MIN).for_each(|_| streak.tried(false));
        streak.tried(true);
        streak.tried(false);
        assert!(!streak.asks(), "a fault alone is no streak");
    }
}
