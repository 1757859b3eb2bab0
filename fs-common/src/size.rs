//! Sizes in the notation of people: `8G`, `512M`, `64K`, `2T`, powers of 1024; a plain number is bytes.

use std::str::FromStr;

/// A number of bytes, parsed from and printed for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// Why a string is no size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no size; write a number with K, M, G or T behind it, such as 8G")]
pub struct SizeError(String);

/// Largest size there is: far past any pool, and small enough for every signed offset.
const MAX_BYTES: u64 = 1 << 62;

impl FromStr for ByteSize {
    type Err = SizeError;

    fn from_str(input: &str) -> Result<Self, Self::Err> {
        let error = || SizeError(input.to_owned());
        let text = input.trim();
        let text = text.strip_suffix("iB").or(text.strip_suffix(['B', 'b'])).unwrap_or(text);
        let (digits, shift) = match text.chars().last() {
            Some('k' | 'K') => (&text[..text.len() - 1], 10),
            Some('m' | 'M') => (&text[..text.len() - 1], 20),
            Some('g' | 'G') => (&text[..text.len() - 1], 30),
            Some('t' | 'T') => (&text[..text.len() - 1], 40),
            _ => (text, 0),
        };
        if let Ok(number) = digits.parse::<u64>() {
            let bytes = number.checked_mul(1 << shift).filter(|&bytes| bytes <= MAX_BYTES);
            return bytes.map(ByteSize).ok_or_else(error);
        }
        // "1.5G": exact enough in f64 for every size that is not absurd.
        let number = digits.parse::<f64>().map_err(|_| error())?;
        let bytes = number * (1u64 << shift) as f64;
        if !(0.0..=MAX_BYTES as f64).contains(&bytes) || !digits.starts_with(|c: char| c.is_ascii_digit()) {
            return Err(error());
        }
        Ok(ByteSize(bytes as u64))
    }
}

impl std::fmt::Display for ByteSize {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut larger = None;
        for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
            if self.0 >= 1 << shift {
                let value = self.0 as f64 / (1u64 << shift) as f64;
                let text = format!("{value:.1}");
                return match larger {
                    _ if self.0.is_multiple_of(1 << shift) => write!(f, "{}{unit}", self.0 >> shift),
                    // A byte less than 1G is shown as 1G, not as 1024.0M.
                    Some(larger) if text == "1024.0" => write!(f, "1{larger}"),
                    _ => write!(f, "{text}{unit}"),
                };
            }
            larger = Some(unit);
        }
        write!(f, "{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64K", 65536),
            ("1g", 1 << 30),
            ("2TiB", 2 << 40),
            ("1.5M", 1_572_864),
        ] {
            assert_eq!(text.parse::<ByteSize>().expect(text).0, bytes, "{text}");
        }
        for text in ["", "G", "-1", "1X", "inf", "nanK", "99999999T", "1..2G", "14886589259623781748"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        assert_eq!(ByteSize(8 << 30).to_string(), "8G");
        assert_eq!(ByteSize(1536).to_string(), "1.5K");
        assert_eq!(ByteSize((1 << 30) - 1).to_string(), "1G");
        assert_eq!(ByteSize(1000 << 20).to_string(), "1000M");
        assert_eq!(ByteSize((1 << 50) - 1).to_string(), "1024.0T");
    }
}
