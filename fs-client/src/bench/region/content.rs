//! Bytes that say where they belong: every aligned word carries a version and a check of version and offset.
//!
//! ```text
//!   63      48 47                               0
//!  +----------+----------------------------------+
//!  | version  | low 48 bits of mix(offset, version) |   little-endian, at a multiple of eight bytes
//!  +----------+----------------------------------+
//! ```
//!
//! Any word can be checked alone, whoever wrote it last and in whatever order, so readers need to know nothing of
//! writers. A load checks the first word of every page and the last word of a value, which costs next to nothing.

use super::positions::mix;
use cuttlefs_common::ids::PAGE_SIZE_U64;

/// Bytes of a word.
const WORD_BYTES: u64 = 8;
/// Bits below the version.
const CHECK_BITS: u32 = 48;
const CHECK_MASK: u64 = (1 << CHECK_BITS) - 1;

/// What a reader found that nobody wrote there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "wrong data at byte {offset} of the benchmark's file: {found:#018x} was never written there; keep the pool and \
     the server's log, this is a defect"
)]
pub(super) struct WrongWord {
    offset: u64,
    found: u64,
}

fn word(offset: u64, version: u16) -> u64 {
    let check = mix(offset ^ mix(u64::from(version) << CHECK_BITS)) & CHECK_MASK;
    u64::from(version) << CHECK_BITS | check
}

/// Fills `bytes`, which begin at `offset`, both whole words.
pub(super) fn fill(bytes: &mut [u8], offset: u64, version: u16) {
    for (index, place) in bytes.chunks_exact_mut(WORD_BYTES as usize).enumerate() {
        let at = offset + index as u64 * WORD_BYTES;
        place.copy_from_slice(&word(at, version).to_le_bytes());
    }
}

/// Checks the first word of each page in `bytes`, which begin at `offset`, and the last word.
///
/// # Errors
/// Says which word is wrong.
pub(super) fn check(bytes: &[u8], offset: u64) -> Result<(), WrongWord> {
    let end = offset + bytes.len() as u64;
    let mut at = offset;
    while at + WORD_BYTES <= end {
        check_word(bytes, offset, at)?;
        at = (at / PAGE_SIZE_U64 + 1) * PAGE_SIZE_U64;
    }
    if bytes.len() as u64 >= WORD_BYTES { check_word(bytes, offset, end - WORD_BYTES) } else { Ok(()) }
}

fn check_word(bytes: &[u8], offset: u64, at: u64) -> Result<(), WrongWord> {
    let start = (at - offset) as usize;
    let mut raw = [0; WORD_BYTES as usize];
    raw.copy_from_slice(&bytes[start..start + WORD_BYTES as usize]);
    let found = u64::from_le_bytes(raw);
    if found == word(at, (found >> CHECK_BITS) as u16) {
        Ok(())
    } else {
        Err(WrongWord { offset: at, found })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_found() {
        for (offset, len) in [(0, 64), (4096 - 64, 64), (256, 256), (8192, 16384)] {
            let mut bytes = vec![0; len];
            fill(&mut bytes, offset, 3);
            assert_eq!(check(&bytes, offset), Ok(()));
            assert!(check(&bytes, offset + 8).is_err(), "another place");
        }
    }

    #[test]
    fn a_page_of_zeros_or_of_another_place_is_found_out() {
        let mut bytes = vec![0; 16384];
        fill(&mut bytes, 0, 0);
        bytes[8192..12288].fill(0);
        assert_eq!(check(&bytes, 0), Err(WrongWord { offset: 8192, found: 0 }));
        fill(&mut bytes[8192..12288], 4096, 0);
        assert!(check(&bytes, 0).is_err());
        fill(&mut bytes[8192..12288], 8192, 9);
        assert_eq!(check(&bytes, 0), Ok(()), "versions may differ from page to page");
    }
}
