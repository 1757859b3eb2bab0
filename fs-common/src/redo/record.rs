//! One redo record: header, data, and last the operator word that makes it valid.
//!
//! | offset | bytes | field    | meaning |
//! |-------:|------:|----------|---------|
//! | 0      | 4     | magic    | `CFRL` |
//! | 4      | 2     | version  | `RECORD_VERSION` |
//! | 6      | 2     | kind     | the kind of the data |
//! | 8      | 8     | log      | which life of which log the record belongs to |
//! | 16     | 8     | lsn      | its number in that log, from 1, without gaps |
//! | 24     | 16    | client   | the client of the request; 0: no client's |
//! | 40     | 8     | seq      | the request's number in its slot |
//! | 48     | 2     | slot     | session slot |
//! | 50     | 2     | reserved | zero |
//! | 52     | 4     | length   | bytes of data |
//! | 56     | 4     | crc      | CRC32C of header (this field zero), data |
//! | 60     | 4     | reserved | zero |
//! | 64     | n     | data     | padded with zeros to a multiple of 8 |
//! | 64 + n | 8     | operator | log, lsn and crc, mixed |
//!
//! The operator word is written by one store of 8 bytes, after all bytes before it are in their final place: if the word is right, the record is
//! complete (durable RPC section 4.2, "the data is always persisted before the RPC operator"). Where that order cannot be had, as on a disk that
//! tears and reorders sectors, the checksum proves the same.
//!
//! # Invariants
//! * Bytes of an earlier life of the log are never valid: log and lsn are in checksum and operator word.
//! * A record is at a multiple of [`ALIGNMENT`], so that its operator word never crosses a sector or a cache line.

use crate::ids::{ClientId, LogSeq, SlotIndex};
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes before the data.
pub const HEADER_LEN: usize = 64;
/// Bytes of the operator word.
pub const OPERATOR_LEN: usize = 8;
/// Records begin at multiples of this.
pub const ALIGNMENT: usize = 8;
/// Most data of one record: one transfer and its description.
pub const MAX_DATA_BYTES: usize = (1 << 20) + 4096;

const MAGIC: [u8; 4] = *b"CFRL";
const RECORD_VERSION: u16 = 1;
/// Offset of the checksum.
const CRC_AT: usize = 56;

/// One life of one log: drawn at random when a log is made or emptied as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LogId(pub u64);

/// The kind of a record's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum RecordKind {
    /// A request as a client sent it: RPC header and body.
    Request = 1,
    /// An operation on contents as the server did it.
    Operation = 2,
    /// Nothing: the next record is at the log's start.
    Wrap = 3,
}

/// Why there is no record in some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Nothing was ever written here, or only by another life of the log, or not completely.
    #[error("no record is here")]
    Absent,
    /// There is a record of this log, but its bytes are not what was written.
    #[error("the record is damaged")]
    Damaged,
    /// A log of another version.
    #[error("the log's records have version {0}, this server knows {RECORD_VERSION}")]
    Version(u16),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    magic: [u8; 4],
    version: U16,
    kind: U16,
    log: U64,
    lsn: U64,
    client: U128,
    seq: U64,
    slot: U16,
    reserved: U16,
    length: U32,
    crc: U32,
    reserved2: U32,
}
const _: () = assert!(size_of::<Raw>() == HEADER_LEN);

/// A record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<'a> {
    /// The kind of the data.
    pub kind: RecordKind,
    /// Its number.
    pub lsn: LogSeq,
    /// The client that made the request.
    pub client: ClientId,
    /// The request's slot.
    pub slot: SlotIndex,
    /// The request's number.
    pub seq: u64,
    /// The data.
    pub data: &'a [u8],
}

/// Bytes of a record with this much data.
pub const fn encoded_len(data_len: usize) -> usize {
    HEADER_LEN + data_len.next_multiple_of(ALIGNMENT) + OPERATOR_LEN
}

fn operator(log: LogId, lsn: LogSeq, crc: u32) -> u64 {
    // Never zero, since memory that was never written is zeros.
    (log.0 ^ lsn.0.rotate_left(32) ^ u64::from(crc)) | 1
}

/// Appends the record's bytes to `out`. The last [`OPERATOR_LEN`] of them make it valid.
pub fn encode(log: LogId, record: &Record<'_>, out: &mut Vec<u8>) {
    assert!(record.data.len() <= MAX_DATA_BYTES, "a record of {} bytes", record.data.len());
    let mut raw = Raw {
        magic: MAGIC,
        version: RECORD_VERSION.into(),
        kind: (record.kind as u16).into(),
        log: log.0.into(),
        lsn: record.lsn.0.into(),
        client: record.client.0.into(),
        seq: record.seq.into(),
        slot: record.slot.0.into(),
        reserved: 0.into(),
        length: (record.data.len() as u32).into(),
        crc: 0.into(),
        reserved2: 0.into(),
    };
    let crc = crc32c::crc32c_append(crc32c::crc32c(raw.as_bytes()), record.data);
    raw.crc = crc.into();
    let end = out.len() + encoded_len(record.data.len()) - OPERATOR_LEN;
    out.extend_from_slice(raw.as_bytes());
    out.extend_from_slice(record.data);
    out.resize(end, 0);
    out.extend_from_slice(&operator(log, record.lsn, crc).to_le_bytes());
}

/// The record `lsn` of `log` at the start of `bytes`, and how many bytes it takes.
///
/// # Errors
/// [`RecordError`]; `Damaged` only if the operator word shows that the whole record had been written.
pub fn parse(log: LogId, lsn: LogSeq, bytes: &[u8]) -> Result<(Record<'_>, usize), RecordError> {
    let (raw, rest) = Raw::ref_from_prefix(bytes).map_err(|_| RecordError::Absent)?;
    if raw.magic != MAGIC || raw.log.get() != log.0 || raw.lsn.get() != lsn.0 {
        return Err(RecordError::Absent);
    }
    if raw.version.get() != RECORD_VERSION {
        return Err(RecordError::Version(raw.version.get()));
    }
    let data_len = raw.length.get() as usize;
    if data_len > MAX_DATA_BYTES {
        return Err(RecordError::Absent);
    }
    let len = encoded_len(data_len);
    let word = bytes.get(len - OPERATOR_LEN..len).ok_or(RecordError::Absent)?;
    if word != operator(log, lsn, raw.crc.get()).to_le_bytes() {
        return Err(RecordError::Absent);
    }
    let data = &rest[..data_len];
    let mut header = [0; HEADER_LEN];
    header.copy_from_slice(&bytes[..HEADER_LEN]);
    header[CRC_AT..CRC_AT + 4].fill(0);
    let crc = crc32c::crc32c_append(crc32c::crc32c(&header), data);
    let kind = match raw.kind.get() {
        1 => RecordKind::Request,
        2 => RecordKind::Operation,
        3 => RecordKind::Wrap,
        _ => return Err(RecordError::Damaged),
    };
    let padding = &rest[data_len..len - HEADER_LEN - OPERATOR_LEN];
    let reserved = (raw.reserved.get(), raw.reserved2.get());
    if crc != raw.crc.get() || reserved != (0, 0) || padding.iter().any(|byte| *byte != 0) {
        return Err(RecordError::Damaged);
    }
    let record = Record {
        kind,
        lsn,
        client: ClientId(raw.client.get()),
        slot: SlotIndex(raw.slot.get()),
        seq: raw.seq.get(),
        data,
    };
    Ok((record, len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LOG: LogId = LogId(0x1122_3344_5566_7788);

    fn record(data: &[u8]) -> Record<'_> {
        Record {
            kind: RecordKind::Operation,
            lsn: LogSeq(9),
            client: ClientId(0xabcd),
            slot: SlotIndex(3),
            seq: 77,
            data,
        }
    }

    fn encoded(record: &Record<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        encode(LOG, record, &mut bytes);
        bytes
    }

    #[test]
    fn golden_bytes() {
        let bytes = encoded(&record(b"datum"));
        let mut expected = Vec::new();
        expected.extend_from_slice(b"CFRL\x01\x00\x02\x00");
        expected.extend_from_slice(&[0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        expected.extend_from_slice(&[9, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend_from_slice(&[0xcd, 0xab, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend_from_slice(&[77, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend_from_slice(&[3, 0, 0, 0, 5, 0, 0, 0]);
        expected.extend_from_slice(&GOLDEN_CRC.to_le_bytes());
        expected.extend_from_slice(&[0, 0, 0, 0]);
        expected.extend_from_slice(b"datum\0\0\0");
        let word = (0x1122_3344_5566_7788_u64 ^ (9 << 32) ^ u64::from(GOLDEN_CRC)) | 1;
        expected.extend_from_slice(&word.to_le_bytes());
        assert_eq!(bytes, expected);
        assert_eq!(bytes.len(), encoded_len(5));
    }

    // Computed by another implementation.
    const GOLDEN_CRC: u32 = 0x3a16_aef3;

    #[test]
    fn another_life_of_the_log_left_nothing() {
        let bytes = encoded(&record(b"datum"));
        assert_eq!(parse(LOG, LogSeq(9), &bytes), Ok((record(b"datum"), bytes.len())));
        assert_eq!(parse(LogId(1), LogSeq(9), &bytes), Err(RecordError::Absent));
        assert_eq!(parse(LOG, LogSeq(10), &bytes), Err(RecordError::Absent));
        assert_eq!(parse(LOG, LogSeq(9), &[0; 200]), Err(RecordError::Absent));
        let mut other = bytes.clone();
        other[4] = 2;
        assert_eq!(parse(LOG, LogSeq(9), &other), Err(RecordError::Version(2)));
    }

    proptest! {
        #[test]
        fn records_come_back(data in prop::collection::vec(any::<u8>(), 0..5000), behind in 0usize..50) {
            let record = record(&data);
            let mut bytes = encoded(&record);
            let len = bytes.len();
            prop_assert_eq!(len % ALIGNMENT, 0);
            bytes.resize(len + behind, 0xee);
            prop_assert_eq!(parse(LOG, LogSeq(9), &bytes), Ok((record, len)));
        }

        #[test]
        fn what_is_not_all_there_is_no_record(
            data in prop::collection::vec(any::<u8>(), 0..3000),
            before in any::<u8>(),
            present in prop::collection::vec(any::<bool>(), 1..9),
        ) {
            // Some sectors of the write were lost: they have their old bytes.
            let whole = encoded(&record(&data));
            let mut torn = vec![before; whole.len()];
            for (index, sector) in whole.chunks(512).enumerate() {
                if present[index % present.len()] {
                    torn[index * 512..][..sector.len()].copy_from_slice(sector);
                }
            }
            prop_assume!(torn != whole);
            prop_assert!(parse(LOG, LogSeq(9), &torn).is_err());
        }

        #[test]
        fn a_flipped_bit_is_seen(data in prop::collection::vec(any::<u8>(), 0..300), at in any::<prop::sample::Index>(), bit in 0u8..8) {
            let mut bytes = encoded(&record(&data));
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert!(parse(LOG, LogSeq(9), &bytes).is_err());
        }

        #[test]
        fn nothing_panics(bytes in prop::collection::vec(any::<u8>(), 0..300), lsn in any::<u64>()) {
            let _ = parse(LOG, LogSeq(lsn), &bytes);
        }
    }
}
