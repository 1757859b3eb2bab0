//! Names of directory entries: their keyed hash, and the cookies made of it.
//!
//! A directory's entries are kept by hash, not by name. So a lookup is one get, and a position in a listing is a number of 63 bits that stays valid
//! while names are made and removed, also over restarts. Names with the same hash share a bucket of 128 slots; an entry keeps its slot for good.
//!
//! The hash is SipHash-2-4 under a secret key drawn for each pool, so that a client cannot choose names that fill a
//! bucket. With 56 bits a directory of 10 million entries has about 700 buckets of two; 129 names in one bucket do not
//! happen.

use cuttlefs_common::status::Status;
use serde::{Deserialize, Serialize};
use siphasher::sip::SipHasher24;

/// Entries that a bucket can have: as many as the cookie's slot bits can tell apart.
pub(super) const SLOTS_PER_BUCKET: usize = 1 << SLOT_BITS;
const SLOT_BITS: u32 = 7;
const HASH_BITS: u32 = 56;
// Cookies must fit `off_t`.
const _: () = assert!(HASH_BITS + SLOT_BITS == 63);

/// The pool's secret for name hashes.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashKey(pub [u8; 16]);

impl std::fmt::Debug for HashKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HashKey(secret)")
    }
}

impl HashKey {
    /// The 56-bit hash of a name. It is never 0, so that every cookie is greater than those that the FUSE client uses for the start, `.` and `..`.
    pub fn hash(&self, name: &[u8]) -> u64 {
        (SipHasher24::new_with_key(&self.0).hash(name) >> (64 - HASH_BITS)).max(1)
    }
}

/// A position in a directory: directly behind one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cookie(u64);

impl Cookie {
    /// The cookie of an entry.
    pub const fn new(hash: u64, slot: u8) -> Self {
        Self(hash << SLOT_BITS | slot as u64)
    }

    /// The cookie as clients get it.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Parses a client's cookie. Any number below 2^63 is a position.
    ///
    /// # Errors
    /// `Invalid`.
    pub const fn parse(raw: u64) -> Result<Self, Status> {
        if raw >> (HASH_BITS + SLOT_BITS) != 0 { Err(Status::Invalid) } else { Ok(Self(raw)) }
    }

    /// The hash of the position's bucket.
    pub const fn hash(self) -> u64 {
        self.0 >> SLOT_BITS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_hash() {
        // The 56 high bits of a test vector of the SipHash paper (key 00..0f, input 00..0e: a129ca6149be45e5).
        let key = HashKey(std::array::from_fn(|index| index as u8));
        let input: [u8; 15] = std::array::from_fn(|index| index as u8);
        assert_eq!(key.hash(&input), 0xa1_29ca_6149_be45);
    }

    #[test]
    fn cookies_are_offsets_past_the_reserved_ones() {
        assert_eq!(Cookie::new(1, 0).get(), 128);
        assert_eq!(Cookie::new((1 << 56) - 1, 127).get(), i64::MAX as u64);
        assert_eq!(Cookie::parse(1 << 63), Err(Status::Invalid));
        assert_eq!(Cookie::parse(5).map(Cookie::hash), Ok(0));
    }
}
