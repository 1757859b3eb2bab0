//! The magic pattern and byte detection (TeRM section 4.2).
//!
//! Pages that are not resident are served from the magic frame, which repeats a pattern that is drawn at random at each server start, so that no
//! client can make data that always collides. Detection looks at every byte that was read: a part of a page is missing exactly if all its bytes are
//! those of the pattern at its place. A false positive costs one RPC, and no wrong result.

use crate::ids::PAGE_SIZE;
use serde::{Deserialize, Serialize};

/// Bytes after which the pattern repeats. It divides the page, so a place in a page fixes the pattern byte.
pub const PATTERN_LEN: usize = 32;
const _: () = assert!(PAGE_SIZE.is_multiple_of(PATTERN_LEN));

/// The pattern that covers the magic frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MagicPattern([u8; PATTERN_LEN]);

impl MagicPattern {
    /// A pattern from random bytes.
    pub const fn new(bytes: [u8; PATTERN_LEN]) -> Self {
        Self(bytes)
    }

    /// The bytes that it repeats.
    pub const fn bytes(&self) -> [u8; PATTERN_LEN] {
        self.0
    }

    /// Writes the pattern from `offset_in_page` on (any offset; it repeats).
    pub fn fill(&self, offset_in_page: usize, out: &mut [u8]) {
        for (index, byte) in out.iter_mut().enumerate() {
            *byte = self.0[(offset_in_page + index) % PATTERN_LEN];
        }
    }

    /// One repetition of the pattern from `offset_in_page` on.
    fn rotated(&self, offset_in_page: usize) -> [u8; PATTERN_LEN] {
        let mut twice = [0u8; 2 * PATTERN_LEN];
        twice[..PATTERN_LEN].copy_from_slice(&self.0);
        twice[PATTERN_LEN..].copy_from_slice(&self.0);
        std::array::from_fn(|index| twice[offset_in_page % PATTERN_LEN + index])
    }

    /// The bytes of a page's eight-byte word, by its number in the page.
    pub fn word(&self, number: usize) -> [u8; 8] {
        let (words, _) = self.0.as_chunks();
        words[number % words.len()]
    }

    /// Whether every byte of `part`, which starts at `offset_in_page`, is that of the pattern. False for an empty part.
    pub fn covers(&self, offset_in_page: usize, part: &[u8]) -> bool {
        // Nearly all data differs from the pattern in its first bytes, so usually one comparison is enough.
        let rotated = self.rotated(offset_in_page);
        !part.is_empty() && part.chunks(PATTERN_LEN).all(|chunk| chunk == &rotated[..chunk.len()])
    }

    /// Whether somewhere in a page a whole pattern lies at its place: then a part of the page may be from the magic page.
    pub fn is_in(&self, page: &[u8]) -> bool {
        page.chunks_exact(PATTERN_LEN).any(|chunk| chunk == self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_was_filled_is_detected_and_one_changed_byte_is_not(
            seed in any::<[u8; PATTERN_LEN]>(),
            offset in 0usize..PAGE_SIZE,
            len in 1usize..PAGE_SIZE,
            flip in any::<prop::sample::Index>(),
            bit in 0u8..8,
        ) {
            let pattern = MagicPattern::new(seed);
            let mut part = vec![0u8; len];
            pattern.fill(offset, &mut part);
            prop_assert!(pattern.covers(offset, &part));
            let word = offset.next_multiple_of(8);
            if let Some(bytes) = part.get(word - offset..word - offset + 8) {
                prop_assert_eq!(&pattern.word(word % PAGE_SIZE / 8), bytes);
            }
            part[flip.index(len)] ^= 1 << bit;
            prop_assert!(!pattern.covers(offset, &part));
        }
    }

    #[test]
    fn one_pattern_at_its_place_is_found_in_a_page() {
        let pattern = MagicPattern::new(std::array::from_fn(|at| at as u8 + 1));
        let mut page = vec![0; PAGE_SIZE];
        assert!(!pattern.is_in(&page));
        pattern.fill(0, &mut page[100..100 + PATTERN_LEN]);
        assert!(!pattern.is_in(&page), "it is not where the magic page has one");
        let last = PAGE_SIZE - PATTERN_LEN;
        pattern.fill(last, &mut page[last..]);
        assert!(pattern.is_in(&page));
    }

    #[test]
    fn nothing_read_is_nothing_missing() {
        assert!(!MagicPattern::new([0; PATTERN_LEN]).covers(0, &[]));
    }
}
