//! A pool's identity: a random version-4 UUID (RFC 9562), in each superblock and in `cuttlefs.toml`.

use crate::world::Random;
use serde::{Deserialize, Serialize};
use std::str::FromStr;

/// The identity of one pool, drawn when it is formatted. Its text is the UUID's, in messages it is its 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PoolUuid(pub [u8; 16]);

/// A string that is not a UUID.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no UUID")]
pub struct UuidError(String);

impl PoolUuid {
    /// Draws a new UUID.
    pub fn draw(random: &dyn Random) -> Self {
        let mut bytes = [0; 16];
        random.fill(&mut bytes);
        // Version 4 and variant 10, RFC 9562 section 5.4.
        bytes[6] = bytes[6] & 0x0f | 0x40;
        bytes[8] = bytes[8] & 0x3f | 0x80;
        Self(bytes)
    }
}

impl std::fmt::Display for PoolUuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            if matches!(index, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for PoolUuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl FromStr for PoolUuid {
    type Err = UuidError;

    fn from_str(input: &str) -> Result<Self, Self::Err> {
        let error = || UuidError(input.to_owned());
        let hyphens = [8, 13, 18, 23];
        if input.len() != 36 || !input.is_ascii() || hyphens.iter().any(|&at| &input[at..=at] != "-") {
            return Err(error());
        }
        let digits: Vec<char> = input.chars().filter(|&c| c != '-').collect();
        let mut bytes = [0; 16];
        if digits.len() != 32 {
            return Err(error());
        }
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |index: usize| pair[index].to_digit(16).ok_or_else(error);
            *byte = (digit(0)? * 16 + digit(1)?) as u8;
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::SeededRandom;

    #[test]
    fn prints_and_parses() {
        let uuid = PoolUuid::draw(&SeededRandom::new(1));
        let text = uuid.to_string();
        assert_eq!((text.len(), &text[14..15]), (36, "4"));
        assert_eq!(text.parse(), Ok(uuid));
        assert_eq!(text.to_uppercase().parse(), Ok(uuid));
        for bad in ["", "x", &text[1..], &text.replace('-', "0"), &text.replace('4', "g"), &"ä".repeat(18)] {
            assert!(bad.parse::<PoolUuid>().is_err(), "{bad}");
        }
    }
}
