//! A bit for each page of a swap space.

/// The bits, and how many are set.
#[derive(Clone, Debug)]
pub(super) struct Bits {
    words: Vec<u64>,
    set: u64,
}

impl Bits {
    pub(super) fn new(len: u64) -> Self {
        Self { words: vec![0; (len as usize).div_ceil(64)], set: 0 }
    }

    pub(super) fn get(&self, at: u64) -> bool {
        self.words.get(at as usize / 64).is_some_and(|word| word >> (at % 64) & 1 == 1)
    }

    pub(super) fn set(&mut self, at: u64) {
        if !self.get(at)
            && let Some(word) = self.words.get_mut(at as usize / 64)
        {
            *word |= 1 << (at % 64);
            self.set += 1;
        }
    }

    pub(super) fn clear(&mut self, at: u64) {
        if self.get(at) {
            self.words[at as usize / 64] &= !(1 << (at % 64));
            self.set -= 1;
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_counted_once() {
        let mut bits = Bits::new(70);
        for at in [0, 69, 69, 5] {
            bits.set(at);
        }
        bits.set(1000);
        assert_eq!((bits.count(), bits.get(69), bits.get(1), bits.get(1000)), (3, true, false, false));
        bits.clear(69);
        bits.clear(69);
        bits.clear(1000);
        assert_eq!((bits.count(), bits.get(69)), (2, false));
    }
}
