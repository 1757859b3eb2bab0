//! The log file's header blocks: where the ring is and where what is still needed of it begins.
//!
//! The byte layout stands in docs/durability.md. There are two copies, written in turn, so that a write that is cut
//! leaves the other one.

use cuttlefs_common::ids::LogSeq;
use cuttlefs_common::redo::{ALIGNMENT, LogId};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of each block.
pub const BLOCK_BYTES: u64 = 4096;
/// Blocks before the ring.
pub const BLOCKS: u64 = 2;
/// Where the ring begins in the file.
pub const RING_OFFSET: u64 = BLOCK_BYTES * BLOCKS;
/// Bytes of a block that are used.
pub const HEADER_BYTES: usize = 64;

const MAGIC: [u8; 8] = *b"CFTSLOG1";
/// A clean stop: no record is behind the head. Headers of releases that did not know it have zero there.
const FLAG_CLOSED: u32 = 1;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    turn: U64,
    log: U64,
    capacity: U64,
    head: U64,
    lsn: U64,
    flags: U32,
    reserved: [u8; 8],
    crc: U32,
}
const _: () = assert!(size_of::<Raw>() == HEADER_BYTES);

/// What a header block says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The copy with the greater one counts.
    pub turn: u64,
    /// This life of the log.
    pub log: LogId,
    /// Bytes of the ring.
    pub capacity: u64,
    /// Where in the ring the first record is that is needed.
    pub head: u64,
    /// Its number.
    pub lsn: LogSeq,
    /// This life ended cleanly, and nothing of it is needed any more: the ring need not be read.
    pub closed: bool,
}

impl Header {
    /// The block's used bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut raw = Raw {
            magic: MAGIC,
            turn: self.turn.into(),
            log: self.log.0.into(),
            capacity: self.capacity.into(),
            head: self.head.into(),
            lsn: self.lsn.0.into(),
            flags: if self.closed { FLAG_CLOSED } else { 0 }.into(),
            reserved: [0; 8],
            crc: 0.into(),
        };
        raw.crc = crc32c::crc32c(&raw.as_bytes()[..HEADER_BYTES - 4]).into();
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        bytes
    }

    /// What a log has before its first life, of a device with so many bytes.
    pub fn first(log: LogId, device_bytes: u64) -> Self {
        let capacity = device_bytes.saturating_sub(RING_OFFSET) / BLOCK_BYTES * BLOCK_BYTES;
        Self { turn: 0, log, capacity, head: 0, lsn: LogSeq(1), closed: false }
    }

    /// `None`: no header is here, or not a whole one.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (raw, _) = Raw::ref_from_prefix(bytes).ok()?;
        let header = Self {
            turn: raw.turn.get(),
            log: LogId(raw.log.get()),
            capacity: raw.capacity.get(),
            head: raw.head.get(),
            lsn: LogSeq(raw.lsn.get()),
            closed: raw.flags.get() == FLAG_CLOSED,
        };
        let is_sound = raw.magic == MAGIC
            && raw.crc.get() == crc32c::crc32c(&raw.as_bytes()[..HEADER_BYTES - 4])
            && raw.flags.get() & !FLAG_CLOSED == 0
            && raw.reserved == [0; 8]
            && header.capacity.is_multiple_of(BLOCK_BYTES)
            && header.head < header.capacity
            && header.head.is_multiple_of(ALIGNMENT as u64);
        is_sound.then_some(header)
    }

    /// Where in the file this one is to be written.
    pub fn place(&self) -> u64 {
        self.turn % BLOCKS * BLOCK_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEADER: Header = Header {
        turn: 3,
        log: LogId(0x0102_0304_0506_0708),
        capacity: 1 << 26,
        head: 4104,
        lsn: LogSeq(77),
        closed: false,
    };

    #[test]
    fn golden_bytes() {
        let mut expected = Vec::new();
        expected.extend_from_slice(b"CFTSLOG1");
        for number in [3, 0x0102_0304_0506_0708, 1 << 26, 4104, 77_u64] {
            expected.extend_from_slice(&number.to_le_bytes());
        }
        expected.extend_from_slice(&[0; 12]);
        expected.extend_from_slice(&GOLDEN_CRC.to_le_bytes());
        assert_eq!(HEADER.encode().as_slice(), expected);
        assert_eq!(Header::parse(&expected), Some(HEADER));
        assert_eq!(HEADER.place(), BLOCK_BYTES);
        // After a clean stop.
        expected[48] = 1;
        let crc = crc32c::crc32c(&expected[..60]);
        expected[60..].copy_from_slice(&crc.to_le_bytes());
        let closed = Header { closed: true, ..HEADER };
        assert_eq!(closed.encode().as_slice(), expected);
        assert_eq!(Header::parse(&expected), Some(closed));
        // What no release writes.
        expected[48] = 3;
        let crc = crc32c::crc32c(&expected[..60]);
        expected[60..].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(Header::parse(&expected), None);
    }

    // Computed by another implementation.
    const GOLDEN_CRC: u32 = 0xbdff_b8fa;

    #[test]
    fn what_cannot_be_is_no_header() {
        for wrong in [
            Header { capacity: 100, ..HEADER },
            Header { head: 1 << 26, ..HEADER },
            Header { head: 4, ..HEADER },
        ] {
            assert_eq!(Header::parse(&wrong.encode()), None);
        }
        assert_eq!(Header::parse(&[0; 4096]), None);
        assert_eq!(Header::parse(&HEADER.encode()[..60]), None);
    }

    proptest! {
        #[test]
        fn a_flipped_bit_is_seen(at in 0..HEADER_BYTES, bit in 0u8..8) {
            let mut bytes = HEADER.encode();
            bytes[at] ^= 1 << bit;
            prop_assert_eq!(Header::parse(&bytes), None);
        }
    }
}
