//! A change of a file's contents as the log holds it (docs/durability.md has the bytes).
//!
//! Each is absolute: doing it again is as doing it once.

use cuttlefs_common::attr::Timestamp;
use cuttlefs_common::ids::{InodeNo, LogSeq, MAX_FILE_SIZE};
use cuttlefs_common::redo::encoded_len;

/// Bytes before a write's own.
pub const OPERATION_BYTES: usize = 49;
const STAYS: u64 = u64::MAX;
const NANOS: i128 = 1_000_000_000;

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change<'a> {
    /// Bytes at a place. Without any: the file grows.
    Write {
        /// File offset.
        offset: u64,
        /// Them.
        bytes: &'a [u8],
        /// The file's length after it; `None`: it stays.
        ends: Option<u64>,
    },
    /// The file is cut and ends here.
    Length(u64),
    /// Zeros in a range, up to the end of the file.
    Zeros {
        /// File offset.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The range keeps its space.
        keep_space: bool,
    },
    /// Space for a range.
    Reserve {
        /// File offset.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// A copy, whose bytes the writes before it gave, ended here in its target, before all was copied. Changes nothing.
    Copied {
        /// File offset.
        end: u64,
    },
    /// The change that was logged before is done: when, and as which one, is what this says.
    Done,
}

/// A change, of which file, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation<'a> {
    /// The last record that was durable when this one was written.
    pub durable: LogSeq,
    /// File.
    pub ino: InodeNo,
    /// When.
    pub at: Timestamp,
    /// The inode's change counter before it: if metadata's is greater, it knows of this change. `Done` says it of the
    /// instant in which metadata took time and counter, the others of when they were put into the log, which is earlier.
    pub before: u64,
    /// What.
    pub change: Change<'a>,
}

/// Bytes a record of a change takes, for `len` bytes written.
pub const fn record_bytes(len: usize) -> u64 {
    encoded_len(OPERATION_BYTES + len) as u64
}

impl<'a> Operation<'a> {
    /// The record's data.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, place, more, bytes): (u8, u64, u64, &[u8]) = match self.change {
            Change::Write { offset, bytes, ends } => (1, offset, ends.unwrap_or(STAYS), bytes),
            Change::Length(size) => (2, size, 0, &[]),
            Change::Zeros { offset, len, keep_space } => (3 + u8::from(keep_space), offset, len, &[]),
            Change::Reserve { offset, len } => (5, offset, len, &[]),
            Change::Done => (6, 0, 0, &[]),
            Change::Copied { end } => (7, end, 0, &[]),
        };
        let nanos = i128::from(self.at.secs) * NANOS + i128::from(self.at.nanos);
        let mut out = Vec::with_capacity(OPERATION_BYTES + bytes.len());
        out.extend_from_slice(&self.durable.0.to_le_bytes());
        out.push(kind);
        out.extend_from_slice(&self.ino.0.to_le_bytes());
        // Clocks before 1678 and after 2262 are off by much more than this clips.
        out.extend_from_slice(&(nanos.clamp(i64::MIN.into(), i64::MAX.into()) as i64).to_le_bytes());
        out.extend_from_slice(&self.before.to_le_bytes());
        out.extend_from_slice(&place.to_le_bytes());
        out.extend_from_slice(&more.to_le_bytes());
        out.extend_from_slice(bytes);
        out
    }

    /// `None`: no server writes such data.
    pub fn parse(data: &'a [u8]) -> Option<Self> {
        let (number, rest) = take_u64(data)?;
        let (&kind, rest) = rest.split_first()?;
        let (ino, rest) = take_u64(rest)?;
        let (nanos, rest) = take_u64(rest)?;
        let (before, rest) = take_u64(rest)?;
        let (place, rest) = take_u64(rest)?;
        let (more, bytes) = take_u64(rest)?;
        let fits = |from: u64, len: u64| from.checked_add(len).is_some_and(|end| end <= MAX_FILE_SIZE);
        let change = match (kind, bytes) {
            (1, bytes) => {
                let len = bytes.len() as u64;
                let ends = (more != STAYS).then_some(more);
                if !fits(place, len) || ends.is_some_and(|end| end < place + len || end > MAX_FILE_SIZE) {
                    return None;
                }
                Change::Write { offset: place, bytes, ends }
            }
            (2, []) if place <= MAX_FILE_SIZE && more == 0 => Change::Length(place),
            (3 | 4, []) if fits(place, more) => {
                Change::Zeros { offset: place, len: more, keep_space: kind == 4 }
            }
            (5, []) if fits(place, more) => Change::Reserve { offset: place, len: more },
            (6, []) if place == 0 && more == 0 => Change::Done,
            (7, []) if place <= MAX_FILE_SIZE && more == 0 => Change::Copied { end: place },
            _ => return None,
        };
        let nanos = i128::from(nanos as i64);
        let at = Timestamp { secs: nanos.div_euclid(NANOS) as i64, nanos: nanos.rem_euclid(NANOS) as u32 };
        Some(Self { durable: LogSeq(number), ino: InodeNo(ino), at, before, change })
    }
}

fn take_u64(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u64::from_le_bytes(*number), rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn operation(change: Change<'_>) -> Operation<'_> {
        Operation {
            durable: LogSeq(5),
            ino: InodeNo(6),
            at: Timestamp { secs: -1, nanos: 7 },
            before: 8,
            change,
        }
    }

    #[test]
    fn golden_bytes() {
        let of = |kind: u8, place: u64, more: u64, bytes: &[u8]| {
            let mut expected = Vec::new();
            expected.extend_from_slice(&5u64.to_le_bytes());
            expected.push(kind);
            expected.extend_from_slice(&6u64.to_le_bytes());
            expected.extend_from_slice(&(-999_999_993i64).to_le_bytes());
            expected.extend_from_slice(&8u64.to_le_bytes());
            expected.extend_from_slice(&place.to_le_bytes());
            expected.extend_from_slice(&more.to_le_bytes());
            expected.extend_from_slice(bytes);
            expected
        };
        for (change, expected) in [
            (Change::Write { offset: 9, bytes: b"ab", ends: Some(11) }, of(1, 9, 11, b"ab")),
            (Change::Write { offset: 9, bytes: b"ab", ends: None }, of(1, 9, u64::MAX, b"ab")),
            (Change::Length(3), of(2, 3, 0, b"")),
            (Change::Zeros { offset: 4, len: 8, keep_space: false }, of(3, 4, 8, b"")),
            (Change::Zeros { offset: 4, len: 8, keep_space: true }, of(4, 4, 8, b"")),
            (Change::Reserve { offset: 4, len: 8 }, of(5, 4, 8, b"")),
            (Change::Done, of(6, 0, 0, b"")),
            (Change::Copied { end: 10 }, of(7, 10, 0, b"")),
        ] {
            assert_eq!(operation(change).encode(), expected);
            assert_eq!(Operation::parse(&expected), Some(operation(change)));
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for change in [
            Change::Write { offset: u64::MAX - 1, bytes: b"abc", ends: None },
            Change::Write { offset: 9, bytes: b"ab", ends: Some(10) },
            Change::Length(MAX_FILE_SIZE + 1),
            Change::Zeros { offset: 1, len: u64::MAX, keep_space: false },
            Change::Copied { end: MAX_FILE_SIZE + 1 },
        ] {
            assert_eq!(Operation::parse(&operation(change).encode()), None, "{change:?}");
        }
        assert_eq!(Operation::parse(&operation(Change::Length(3)).encode()[..48]), None);
        assert_eq!(Operation::parse(&[operation(Change::Length(3)).encode(), vec![0]].concat()), None);
    }

    proptest! {
        #[test]
        fn nothing_panics(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Some(operation) = Operation::parse(&bytes) {
                prop_assert_eq!(operation.encode(), bytes);
            }
        }
    }
}
