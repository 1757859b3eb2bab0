//! Random values from a seed.

use cuttlefs_common::world::{Random, SeededRandom};

/// A source of random values.
pub struct Dice(SeededRandom);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(SeededRandom::new(seed))
    }

    pub fn number(&self) -> u64 {
        self.0.next_u64()
    }

    /// A number below `bound`, which is not 0.
    pub fn below(&self, bound: usize) -> usize {
        (self.number() % bound as u64) as usize
    }

    pub fn chance(&self, percent: u64) -> bool {
        self.number() % 100 < percent
    }

    pub fn pick<T: Clone>(&self, from: &[T]) -> T {
        from[self.below(from.len())].clone()
    }

    pub fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.fill(&mut bytes);
        bytes
    }

    pub fn array(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        self.0.fill(&mut bytes);
        bytes
    }

    /// A number at or near a bound of some type or size, or any number.
    pub fn edge(&self) -> u64 {
        const EDGES: [u64; 16] = [
            0,
            1,
            2,
            4095,
            4096,
            4097,
            65_535,
            65_536,
            1 << 20,
            (1 << 20) + 1,
            u32::MAX as u64,
            1 << 32,
            i64::MAX as u64,
            1 << 63,
            u64::MAX - 1,
            u64::MAX,
        ];
        match self.below(4) {
            0 => self.number(),
            1 => self.pick(&EDGES).wrapping_add(self.number() % 3).wrapping_sub(1),
            _ => self.pick(&EDGES),
        }
    }

    /// In most cases an offset in a small file.
    pub fn offset(&self) -> u64 {
        if self.chance(85) { self.number() % (96 << 10) } else { self.edge() }
    }

    /// In most cases a length of some pages.
    pub fn len(&self) -> u64 {
        if self.chance(85) { 1 + self.number() % (20 << 10) } else { self.edge() }
    }
}
