//! Region keys: tokens for ranges of open files, which a client may hand to any process that can connect to the server (FileMR section 3: a filekey
//! that proves the permissions of its holder).
//!
//! | offset | bytes | field  | meaning |
//! |-------:|------:|--------|---------|
//! | 0      | 4     | magic  | `CFRK` |
//! | 4      | 1     | version | 1 |
//! | 5      | 1     | rights | 1: reading, 2: writing; at least one |
//! | 6      | 2     | reserved | zero |
//! | 8      | 16    | pool   | the pool's UUID |
//! | 24     | 16    | client | the binder's id, which opens nothing |
//! | 40     | 8     | number | the binding's number: random, never used twice |
//! | 48     | 8     | offset | where the range begins in the file |
//! | 56     | 8     | len    | its length; not 0 |
//! | 64     | 8     | expiry | milliseconds of Unix time after which the key is worth nothing; 0: it has no such time |
//! | 72     | 16    | mac    | under the pool's secret, over all of the above and the inode |
//!
//! Little-endian. As text: 176 lower-case hexadecimal digits. The inode is under the MAC and not in the key, because clients that are confined to a
//! directory do not learn the numbers of inodes.
//!
//! To parse a key proves nothing: the server checks the MAC, and that the binding is still there. Who has the key has its rights, so it is no less a
//! secret than the file's bytes. Its `Debug` form leaves out the MAC.

use crate::ids::{ClientId, MAX_FILE_SIZE};
use crate::rpc::Rights;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;
use zerocopy::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a region key.
pub const REGION_KEY_LEN: usize = 88;
const MAGIC: [u8; 4] = *b"CFRK";
const VERSION: u8 = 1;
const READ: u8 = 1;
const WRITE: u8 = 2;
/// Bytes before the MAC, which it covers.
const SIGNED_LEN: usize = 72;

/// Why bytes or a text are no region key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionKeyError {
    /// It is longer or shorter.
    #[error("a region key has {REGION_KEY_LEN} bytes ({} hexadecimal digits), this one is longer or shorter; copy all of it", 2 * REGION_KEY_LEN)]
    Length,
    /// The text has other characters than hexadecimal digits.
    #[error("a region key is written in the digits 0-9 and a-f only")]
    Digit,
    /// It begins otherwise.
    #[error("this is no region key")]
    Magic,
    /// Another version.
    #[error("the region key has version {0}, this side knows {VERSION}; run the same release on both")]
    Version(u8),
    /// A field has a value that no key has.
    #[error("field `{0}` of the region key has an impossible value")]
    Field(&'static str),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Raw {
    magic: [u8; 4],
    version: u8,
    rights: u8,
    reserved: U16,
    pool: [u8; 16],
    client: [u8; 16],
    number: U64,
    offset: U64,
    len: U64,
    expiry_ms: U64,
    mac: [u8; 16],
}
const _: () = assert!(size_of::<Raw>() == REGION_KEY_LEN);
const _: () = assert!(std::mem::offset_of!(Raw, mac) == SIGNED_LEN);

/// A key of a bound range of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct RegionKey {
    /// The UUID of the pool.
    pub pool: [u8; 16],
    /// The client that bound the range.
    pub client: ClientId,
    /// The number of the binding.
    pub number: u64,
    /// Where the range begins.
    pub offset: u64,
    /// Its length: at least 1, and no more than to the largest offset of files.
    pub len: u64,
    /// What the key permits: at least one of both.
    pub rights: Rights,
    /// Milliseconds of Unix time at which it expires.
    pub expiry_ms: Option<u64>,
    /// Made by the server.
    pub mac: [u8; 16],
}

impl RegionKey {
    /// The first offset behind the range.
    pub const fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> [u8; REGION_KEY_LEN] {
        let Rights { read, write } = self.rights;
        let raw = Raw {
            magic: MAGIC,
            version: VERSION,
            rights: if read { READ } else { 0 } | if write { WRITE } else { 0 },
            reserved: 0.into(),
            pool: self.pool,
            client: self.client.0.to_le_bytes(),
            number: self.number.into(),
            offset: self.offset.into(),
            len: self.len.into(),
            expiry_ms: self.expiry_ms.unwrap_or(0).into(),
            mac: self.mac,
        };
        zerocopy::transmute!(raw)
    }

    /// The bytes that the MAC covers, beside the inode.
    pub fn signed_bytes(&self) -> [u8; SIGNED_LEN] {
        let mut signed = [0; SIGNED_LEN];
        signed.copy_from_slice(&self.to_bytes()[..SIGNED_LEN]);
        signed
    }

    /// Parses a key. A key has one encoding.
    ///
    /// # Errors
    /// [`RegionKeyError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, RegionKeyError> {
        let raw = Raw::ref_from_bytes(bytes).map_err(|_| RegionKeyError::Length)?;
        if raw.magic != MAGIC {
            return Err(RegionKeyError::Magic);
        }
        if raw.version != VERSION {
            return Err(RegionKeyError::Version(raw.version));
        }
        if raw.reserved.get() != 0 {
            return Err(RegionKeyError::Field("reserved"));
        }
        if raw.rights == 0 || raw.rights & !(READ | WRITE) != 0 {
            return Err(RegionKeyError::Field("rights"));
        }
        let (offset, len) = (raw.offset.get(), raw.len.get());
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > MAX_FILE_SIZE) {
            return Err(RegionKeyError::Field("len"));
        }
        Ok(Self {
            pool: raw.pool,
            client: ClientId(u128::from_le_bytes(raw.client)),
            number: raw.number.get(),
            offset,
            len,
            rights: Rights { read: raw.rights & READ != 0, write: raw.rights & WRITE != 0 },
            expiry_ms: Some(raw.expiry_ms.get()).filter(|at| *at != 0),
            mac: raw.mac,
        })
    }
}

impl fmt::Debug for RegionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionKey")
            .field("client", &self.client)
            .field("number", &self.number)
            .field("offset", &self.offset)
            .field("len", &self.len)
            .field("rights", &self.rights)
            .field("expiry_ms", &self.expiry_ms)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for RegionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_bytes().iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for RegionKey {
    type Err = RegionKeyError;

    fn from_str(text: &str) -> Result<Self, RegionKeyError> {
        let digit = |digit: u8| match digit {
            b'0'..=b'9' => Ok(digit - b'0'),
            b'a'..=b'f' => Ok(digit - b'a' + 10),
            _ => Err(RegionKeyError::Digit),
        };
        let mut bytes = [0; REGION_KEY_LEN];
        if text.len() != 2 * REGION_KEY_LEN {
            return Err(RegionKeyError::Length);
        }
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = digit(digits[0])? << 4 | digit(digits[1])?;
        }
        Self::parse(&bytes)
    }
}

impl Serialize for RegionKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.to_bytes())
    }
}

impl<'de> Deserialize<'de> for RegionKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes: &'de [u8] = serde_bytes::deserialize(deserializer)?;
        Self::parse(bytes).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: RegionKey = RegionKey {
        pool: [0xaa; 16],
        client: ClientId(0x0102),
        number: 0x0304,
        offset: 0x1000,
        len: 0x2000,
        rights: Rights { read: true, write: true },
        expiry_ms: Some(5),
        mac: [0xbb; 16],
    };

    #[test]
    fn golden_bytes() {
        let mut golden = Vec::new();
        golden.extend_from_slice(b"CFRK\x01\x03\x00\x00");
        golden.extend_from_slice(&[0xaa; 16]);
        golden.extend_from_slice(&[2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        golden.extend_from_slice(&[4, 3, 0, 0, 0, 0, 0, 0]);
        golden.extend_from_slice(&[0, 0x10, 0, 0, 0, 0, 0, 0]);
        golden.extend_from_slice(&[0, 0x20, 0, 0, 0, 0, 0, 0]);
        golden.extend_from_slice(&[5, 0, 0, 0, 0, 0, 0, 0]);
        golden.extend_from_slice(&[0xbb; 16]);
        assert_eq!(KEY.to_bytes(), *golden);
        assert_eq!(KEY.signed_bytes(), golden[..72]);
        assert_eq!(RegionKey::parse(&golden), Ok(KEY));
        let text = KEY.to_string();
        assert!(text.starts_with("4346524b01030000aaaa") && text.len() == 176, "{text}");
        assert_eq!(text.parse(), Ok(KEY));
        assert!(!format!("{KEY:?}").contains("bb"), "a log does not have the MAC");
    }

    #[test]
    fn what_no_server_makes_is_refused() {
        let with = |at: usize, value: u8| {
            let mut bytes = KEY.to_bytes();
            bytes[at] = value;
            RegionKey::parse(&bytes)
        };
        assert_eq!(with(0, b'X'), Err(RegionKeyError::Magic));
        assert_eq!(with(4, 2), Err(RegionKeyError::Version(2)));
        assert_eq!(with(5, 0), Err(RegionKeyError::Field("rights")));
        assert_eq!(with(5, 4), Err(RegionKeyError::Field("rights")));
        assert_eq!(with(6, 1), Err(RegionKeyError::Field("reserved")));
        assert_eq!(with(55, 0xff), Err(RegionKeyError::Field("len")), "behind the end of all files");
        assert_eq!(with(63, 0xff), Err(RegionKeyError::Field("len")), "around the end of all numbers");
        assert_eq!(with(57, 0), Err(RegionKeyError::Field("len")));
        let bytes = KEY.to_bytes();
        assert_eq!(RegionKey::parse(&bytes[1..]), Err(RegionKeyError::Length));
        assert_eq!("4346".parse::<RegionKey>(), Err(RegionKeyError::Length));
        assert_eq!("é".repeat(88).parse::<RegionKey>(), Err(RegionKeyError::Digit));
        assert_eq!(KEY.to_string().to_uppercase().parse::<RegionKey>(), Err(RegionKeyError::Digit));
    }
}
