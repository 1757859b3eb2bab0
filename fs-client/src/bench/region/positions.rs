//! Where a load goes: values drawn by rank, ranks scattered over the file.
//!
//! A rank is drawn uniformly or by Zipf's law; a keyed permutation says which value has that rank. Ranks are
//! scattered, as in the TeRM paper (its hit ratio of 73 % at 50 % DRAM fits only hot values that are not
//! neighbours), or scattered in runs, so that a run's values have neighbouring ranks. Another key is another hotspot.
//!
//! The permutation is a Feistel network over the smallest even number of bits that holds all runs, walked until it
//! falls into the range (fewer than four steps on average): no table, whatever the number of values.

use rand::RngExt as _;
use rand::rngs::Xoshiro256PlusPlus;
use rand_distr::{Distribution as _, Zipf};

/// Enough that no input bit stays recognisable; more only costs time.
const FEISTEL_ROUNDS: u64 = 4;

/// A keyed permutation of `0..count`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Permutation {
    count: u64,
    half_bits: u32,
    key: u64,
}

impl Permutation {
    /// Of `count` numbers, at least one.
    pub(super) fn new(count: u64, key: u64) -> Self {
        let count = count.max(1);
        let bits = u64::BITS - (count - 1).leading_zeros();
        Self { count, half_bits: bits.div_ceil(2).max(1), key }
    }

    /// Where `index` goes.
    pub(super) fn apply(&self, index: u64) -> u64 {
        let mut at = index % self.count;
        loop {
            at = self.feistel(at);
            if at < self.count {
                return at;
            }
        }
    }

    fn feistel(&self, value: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (value >> self.half_bits, value & mask);
        for round in 0..FEISTEL_ROUNDS {
            let mixed = mix(right ^ self.key.wrapping_add(round << 56)) & mask;
            (left, right) = (right, left ^ mixed);
        }
        left << self.half_bits | right
    }
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
pub(super) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// How often which rank is drawn.
#[derive(Clone, Copy, Debug)]
enum Skew {
    Uniform,
    Zipf(Zipf<f64>),
}

/// Draws values' numbers.
#[derive(Clone, Copy, Debug)]
pub(in crate::bench) struct Positions {
    values: u64,
    /// Neighbours that keep neighbouring ranks.
    run_values: u64,
    skew: Skew,
    permutation: Permutation,
}

impl Positions {
    /// Of `values` values, `theta` 0 for uniform. Values behind the last whole run are never drawn.
    ///
    /// # Errors
    /// If there is nothing to draw from, or `theta` is no exponent.
    pub(in crate::bench) fn new(values: u64, theta: f64, run_values: u64, key: u64) -> anyhow::Result<Self> {
        let run_values = run_values.clamp(1, values.max(1));
        let runs = values / run_values;
        anyhow::ensure!(runs > 0, "the file holds no value of this size; use a larger --size");
        let values = runs * run_values;
        let skew = if theta == 0.0 {
            Skew::Uniform
        } else {
            let zipf = Zipf::new(values as f64, theta).map_err(|error| {
                anyhow::anyhow!("--theta {theta}: {error}; use 0 for uniform, or up to 2")
            })?;
            Skew::Zipf(zipf)
        };
        Ok(Self { values, run_values, skew, permutation: Permutation::new(runs, key) })
    }

    /// The number of the value that has this rank; 0 is the hottest.
    pub(super) fn of_rank(&self, rank: u64) -> u64 {
        self.permutation.apply(rank / self.run_values) * self.run_values + rank % self.run_values
    }

    /// Draws a value's number.
    pub(in crate::bench) fn draw(&self, random: &mut Xoshiro256PlusPlus) -> u64 {
        let rank = match &self.skew {
            Skew::Uniform => random.random_range(0..self.values),
            // Zipf's ranks start at 1 and are whole.
            Skew::Zipf(zipf) => (zipf.sample(random) as u64 - 1).min(self.values - 1),
        };
        self.of_rank(rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng as _;
    use std::collections::HashMap;

    #[test]
    fn every_number_has_one_place() {
        for count in [1, 2, 3, 17, 1000, 4096, 5001] {
            let permutation = Permutation::new(count, 7);
            let mut seen: Vec<u64> = (0..count).map(|index| permutation.apply(index)).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..count).collect::<Vec<_>>());
        }
    }

    #[test]
    fn keys_make_different_hotspots_and_neighbours_part() {
        let [one, other] = [1, 2].map(|key| Permutation::new(1 << 20, key));
        let same = (0..1000).filter(|&rank| one.apply(rank) == other.apply(rank)).count();
        assert!(same < 10, "{same}");
        let near = (0..1000).filter(|&rank| one.apply(rank).abs_diff(one.apply(rank + 1)) < 256).count();
        assert!(near < 10, "{near}");
    }

    #[test]
    fn runs_stay_together() {
        let positions = Positions::new(1003, 0.0, 10, 3).expect("positions");
        for run in 0..100 {
            let first = positions.of_rank(run * 10);
            assert_eq!(first % 10, 0);
            assert!((0..10).all(|at| positions.of_rank(run * 10 + at) == first + at));
        }
    }

    #[test]
    fn the_hottest_values_get_what_zipf_says() {
        const VALUES: u64 = 500_000;
        const DRAWS: u32 = 200_000;
        let positions = Positions::new(VALUES, 0.99, 1, 5).expect("positions");
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        let mut counts = HashMap::<u64, u32>::new();
        for _ in 0..DRAWS {
            *counts.entry(positions.draw(&mut random)).or_default() += 1;
        }
        let harmonic: f64 = (1..=VALUES).map(|rank| (rank as f64).powf(-0.99)).sum();
        for rank in [0, 1, 9] {
            let expected = f64::from(DRAWS) * ((rank + 1) as f64).powf(-0.99) / harmonic;
            let got = f64::from(counts[&positions.of_rank(rank)]);
            // Five standard deviations: the seed is fixed, so it is this or a wrong distribution.
            assert!(
                (got - expected).abs() < 5.0 * expected.sqrt(),
                "rank {rank}: {got}, expected {expected}"
            );
        }
    }

    #[test]
    fn uniform_reaches_everything() {
        let positions = Positions::new(64, 0.0, 1, 5).expect("positions");
        let mut random = Xoshiro256PlusPlus::seed_from_u64(1);
        let drawn: std::collections::HashSet<u64> = (0..2000).map(|_| positions.draw(&mut random)).collect();
        assert_eq!(drawn.len(), 64);
    }
}
