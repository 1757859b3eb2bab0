//! A record's key in memory. A short one, as nearly all are, is stored in place and not behind a pointer. A search in a map compares keys in place
//! then, which takes half the time.

use std::borrow::Borrow;
use std::cmp::Ordering;

/// Both variants have the same size with this. All keys but those of extended attributes are shorter.
const SHORT_BYTES: usize = 22;

/// A key, ordered by its bytes.
#[derive(Debug, Clone)]
pub(super) enum Key {
    /// The bytes, padded with zeros, and their number.
    Short([u8; SHORT_BYTES], u8),
    Long(Box<[u8]>),
}

const _: () = assert!(size_of::<Key>() == 24);

impl Key {
    pub(super) fn as_slice(&self) -> &[u8] {
        match self {
            Self::Short(bytes, len) => &bytes[..usize::from(*len)],
            Self::Long(bytes) => bytes,
        }
    }
}

impl From<&[u8]> for Key {
    fn from(key: &[u8]) -> Self {
        let mut bytes = [0; SHORT_BYTES];
        match bytes.get_mut(..key.len()) {
            Some(place) => {
                place.copy_from_slice(key);
                Self::Short(bytes, key.len() as u8)
            }
            None => Self::Long(key.into()),
        }
    }
}

impl From<Vec<u8>> for Key {
    fn from(key: Vec<u8>) -> Self {
        if key.len() > SHORT_BYTES { Self::Long(key.into()) } else { key.as_slice().into() }
    }
}

/// Two numbers that are ordered like the bytes: the first 16 bytes, and the last 8, which overlap.
fn numbers(bytes: &[u8; SHORT_BYTES]) -> (u128, u64) {
    let (first, last) = (bytes.first_chunk().expect("22 bytes"), bytes.last_chunk().expect("22 bytes"));
    (u128::from_be_bytes(*first), u64::from_be_bytes(*last))
}

impl Ord for Key {
    #[inline]
    fn cmp(&self, other: &Self) -> Ordering {
        match (self, other) {
            // A key that is a prefix of another comes first: zeros are before all other bytes, and the shorter key comes before the longer one.
            (Self::Short(one, one_len), Self::Short(another, len)) => {
                numbers(one).cmp(&numbers(another)).then_with(|| one_len.cmp(len))
            }
            _ => self.as_slice().cmp(other.as_slice()),
        }
    }
}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}

impl Eq for Key {}

impl Borrow<[u8]> for Key {
    fn borrow(&self) -> &[u8] {
        self.as_slice()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_ordered_as_their_bytes() {
        let mut all = vec![vec![], vec![0], vec![0, 0], vec![0, 1], vec![1], vec![255]];
        for len in [SHORT_BYTES - 1, SHORT_BYTES, SHORT_BYTES + 1, 300] {
            all.extend([vec![0; len], vec![7; len], [vec![7; len - 1], vec![8]].concat(), vec![255; len]]);
        }
        for one in &all {
            assert_eq!(Key::from(one.as_slice()).as_slice(), one.as_slice());
            for other in &all {
                let keys = (Key::from(one.as_slice()), Key::from(other.clone()));
                assert_eq!(keys.0.cmp(&keys.1), one.cmp(other), "{one:?} and {other:?}");
                assert_eq!(keys.0 == keys.1, one == other);
            }
        }
    }
}
