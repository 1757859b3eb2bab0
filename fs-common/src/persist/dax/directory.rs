//! The directory of a device of persistent memory: what its lines say, and how they are written so that a crash leaves no doubt.
//!
//! ```text
//! line 0         header: magic CFDX, version 1, bytes of a unit, units, CRC32C
//! line 1..=1024  name (16 bytes), generation, first unit, units, CRC32C of what stands before; zeros: none
//! ```
//!
//! An entry is a cache line of eight words, of which the memory keeps each whole or not at all. The last one has the CRC. It is written when
//! the others are persistent, and cleared before them:
//!
//! | the last word | the CRC | the line |
//! | --- | --- | --- |
//! | zero | | none, or the rest of one that was being written or cleared: nobody has heard of it |
//! | not zero | right | an entry |
//! | not zero | wrong, or it names units that are not there | was an entry, and is damaged |

use crate::memory::SharedMemory;
use crate::persist::cache_lines;
use std::sync::atomic::Ordering;
use zerocopy::little_endian::{U32, U64, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

const MAGIC: [u8; 4] = *b"CFDX";
const VERSION: u32 = 1;
pub(super) const LINE_LEN: usize = 64;
const _: () = assert!(LINE_LEN == cache_lines::LINE_LEN);
/// Where the last word begins.
const LAST: usize = LINE_LEN - 8;
/// Logs of a device.
pub(super) const ENTRIES: usize = 1024;
pub(super) const DIRECTORY_LEN: usize = (1 + ENTRIES) * LINE_LEN;

pub(super) type Line = [u8; LINE_LEN];

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    version: U32,
    unit: U64,
    units: U64,
    reserved: [u8; 36],
    crc: U32,
}
const _: () = assert!(size_of::<RawHeader>() == LINE_LEN);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawEntry {
    name: U128,
    generation: U64,
    first: U64,
    units: U64,
    reserved: [u8; 20],
    crc: U32,
}
const _: () = assert!(size_of::<RawEntry>() == LINE_LEN);

/// The checksum of a line: of what stands before it.
fn crc_of(line: &Line) -> u32 {
    crc32c::crc32c(&line[..LINE_LEN - 4])
}

/// The header of a device of so many units of so many bytes.
pub(super) fn header(unit: u64, units: u64) -> Line {
    let mut raw = RawHeader::new_zeroed();
    (raw.magic, raw.version) = (MAGIC, VERSION.into());
    (raw.unit, raw.units) = (unit.into(), units.into());
    raw.crc = crc_of(zerocopy::transmute_ref!(&raw)).into();
    zerocopy::transmute!(raw)
}

/// Where a log is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Its line.
    pub(super) index: usize,
    pub(super) generation: u64,
    pub(super) first: u64,
    pub(super) units: u64,
}

impl Entry {
    pub(super) fn encode(self, name: u128) -> Line {
        let mut raw = RawEntry::new_zeroed();
        raw.name = name.into();
        raw.generation = self.generation.into();
        raw.first = self.first.into();
        raw.units = self.units.into();
        raw.crc = crc_of(zerocopy::transmute_ref!(&raw)).into();
        zerocopy::transmute!(raw)
    }

    /// An entry of this line that names units of the device.
    fn parse(line: &Line, index: usize, units_of_device: u64) -> Option<(u128, Self)> {
        let raw: &RawEntry = zerocopy::transmute_ref!(line);
        let entry =
            Self { index, generation: raw.generation.get(), first: raw.first.get(), units: raw.units.get() };
        let end = entry.first.checked_add(entry.units)?;
        let fits = entry.first > 0 && entry.units > 0 && end <= units_of_device;
        (raw.crc.get() == crc_of(line) && fits).then_some((raw.name.get(), entry))
    }
}

/// What a line is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    Nothing,
    /// Was being written or cleared.
    Unfinished,
    Entry(u128, Entry),
    /// A log may lie somewhere, and nothing says where.
    Damaged,
}

/// The first unit of a device.
#[derive(Debug)]
pub(super) struct Directory(pub(super) SharedMemory);

impl Directory {
    /// The bytes of a line.
    pub(super) fn line(&self, index: usize) -> Line {
        let mut line = [0; LINE_LEN];
        self.0.read(index * LINE_LEN, &mut line);
        line
    }

    /// What a line of the entries is, on a device of so many units.
    pub(super) fn look(&self, index: usize, units_of_device: u64) -> Found {
        let line = self.line(index);
        match Entry::parse(&line, index, units_of_device) {
            Some((name, entry)) => Found::Entry(name, entry),
            None if line == [0; LINE_LEN] => Found::Nothing,
            None if line[LAST..] == [0; LINE_LEN - LAST] => Found::Unfinished,
            None => Found::Damaged,
        }
    }

    /// Writes a line that was zeros. It is there when this returns.
    pub(super) fn put(&self, index: usize, line: &Line) {
        let at = index * LINE_LEN;
        self.0.write(at, &line[..LAST]);
        self.0.write_back(at, LAST);
        self.put_last(at, *line.last_chunk().expect("a line is longer than a word"));
    }

    /// Makes a line zeros.
    pub(super) fn clear(&self, index: usize) {
        let at = index * LINE_LEN;
        self.put_last(at, [0; 8]);
        self.0.fill(at, LAST, 0);
        self.0.write_back(at, LAST);
    }

    fn put_last(&self, at: usize, word: [u8; 8]) {
        self.0.store_u64(at + LAST, u64::from_ne_bytes(word), Ordering::Relaxed);
        self.0.write_back(at + LAST, LINE_LEN - LAST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNITS: u64 = 8;

    fn entry() -> Line {
        Entry { index: 1, generation: 3, first: 2, units: 4 }
            .encode(0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10)
    }

    fn directory(line: &Line) -> Directory {
        let directory = Directory(SharedMemory::new("directory", DIRECTORY_LEN).expect("memory"));
        directory.0.write(LINE_LEN, line);
        directory
    }

    #[test]
    fn golden_bytes() {
        let mut expected = vec![16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1];
        for word in [3u64, 2, 4] {
            expected.extend(word.to_le_bytes());
        }
        expected.resize(LINE_LEN - 4, 0);
        expected.extend(crc32c::crc32c(&expected).to_le_bytes());
        assert_eq!(entry().to_vec(), expected);
    }

    /// Of a line that is being written or cleared, the memory has any words, but the last one only beside all others.
    #[test]
    fn a_line_that_was_not_finished_is_no_damage() {
        for kept in 0..1u32 << 7 {
            let mut line = [0; LINE_LEN];
            for word in (0..7).filter(|word| kept & 1 << word != 0) {
                line[word * 8..word * 8 + 8].copy_from_slice(&entry()[word * 8..word * 8 + 8]);
            }
            let found = directory(&line).look(1, UNITS);
            let expected = if line == [0; LINE_LEN] { Found::Nothing } else { Found::Unfinished };
            assert_eq!(found, expected, "words {kept:b}");
        }
    }

    #[test]
    fn any_bit_that_turned_is_damage() {
        for bit in 0..LINE_LEN * 8 {
            let mut line = entry();
            line[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(directory(&line).look(1, UNITS), Found::Damaged, "bit {bit}");
        }
        assert_eq!(directory(&entry()).look(1, UNITS - 3), Found::Damaged, "units that are not there");
    }

    #[test]
    fn what_is_put_is_there_until_it_is_cleared() {
        let directory = directory(&[0; LINE_LEN]);
        directory.put(1, &entry());
        assert_eq!(directory.line(1), entry());
        assert!(matches!(
            directory.look(1, UNITS),
            Found::Entry(_, Entry { generation: 3, first: 2, units: 4, .. })
        ));
        directory.clear(1);
        assert_eq!((directory.look(1, UNITS), directory.line(1)), (Found::Nothing, [0; LINE_LEN]));
    }
}
