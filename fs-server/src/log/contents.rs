//! Reading a log after a crash: everything from its head to its end, and whether that really is the end.
//!
//! After a clean stop the header says that nothing is needed, and only the headers are read. Otherwise the ring is read
//! forward from the head, a part at a time, each record once. Where no valid record is at the next place, the whole ring
//! is looked through for one that says that the missing one was durable: such a record may be anywhere, for what was
//! under way behind the missing one is bounded by the ring only.
//!
//! The decision table stands in docs/durability.md; `tests.rs` walks it.

use super::device::LogDevice;
use super::header::{BLOCK_BYTES, BLOCKS, HEADER_BYTES, Header, RING_OFFSET};
use super::net::Net;
use super::operation::Operation;
use cuttlefs_common::ids::LogSeq;
use cuttlefs_common::redo::{self, ALIGNMENT, HEADER_LEN, MAX_DATA_BYTES, Record, RecordError, RecordKind};
use std::io;

/// Longest ring there is.
pub const MAX_CAPACITY: u64 = 4 << 30;
/// Bytes of the longest record.
const MOST_RECORD_BYTES: usize = redo::encoded_len(MAX_DATA_BYTES);
/// Bytes of the ring that are read at once. Each part begins a record before the end of the one before it, so one that
/// is much longer than a record reads little twice.
const PART_BYTES: usize = 8 << 20;
const _: () = assert!(PART_BYTES > 2 * MOST_RECORD_BYTES);

/// Why a log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The device failed.
    #[error("the redo log cannot be read: {0}; check its device, then start again")]
    Device(#[from] io::Error),
    /// No header copy is whole.
    #[error(
        "the redo log has no header; changes that were acknowledged may be in it, so the server does not start. \
         Restore log/ from a copy, or move log/ away to go on without them"
    )]
    NoHeader,
    /// A record that was durable is not there any more.
    #[error(
        "record {0} of the redo log is damaged, and it held acknowledged changes; the server does not start. \
         Restore log/ from a copy, or move log/ away to go on without what it holds"
    )]
    Damaged(u64),
    /// Another release's.
    #[error(
        "the redo log has version {0}, which this release does not know; start the release that wrote it once"
    )]
    Version(u16),
}

/// What a log holds.
#[derive(Debug)]
pub struct Contents {
    /// Its newest header.
    pub header: Header,
    /// How many operations there are.
    pub records: usize,
    /// What is left to do of them.
    pub net: Net,
}

impl Contents {
    /// Reads a log.
    ///
    /// # Errors
    /// [`LogError`]: something that was acknowledged cannot be read.
    pub fn read(device: &dyn LogDevice) -> Result<Self, LogError> {
        let (mut records, mut net) = (0, Net::default());
        let header = read(device, &mut |record, operation| {
            records += 1;
            net.add(record, operation);
        })?;
        Ok(Self { header, records, net })
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.records == 0
    }
}

fn newest_header(device: &dyn LogDevice) -> Result<Header, LogError> {
    let room = device.len().saturating_sub(RING_OFFSET);
    let mut newest: Option<Header> = None;
    for block in 0..BLOCKS {
        let mut bytes = [0; HEADER_BYTES];
        if device.len() >= RING_OFFSET {
            device.read(block * BLOCK_BYTES, &mut bytes)?;
        }
        let header = Header::parse(&bytes).filter(|header| header.capacity <= room.min(MAX_CAPACITY));
        newest = newest.into_iter().chain(header).max_by_key(|header| header.turn);
    }
    newest.ok_or(LogError::NoHeader)
}

/// Shows `each` every operation from the head to the end, in order; gives the newest header.
pub(super) fn read(
    device: &dyn LogDevice,
    each: &mut dyn FnMut(&Record<'_>, &Operation<'_>),
) -> Result<Header, LogError> {
    let header = newest_header(device)?;
    if header.closed {
        return Ok(header);
    }
    let mut ring = Ring { device, capacity: header.capacity as usize, start: 0, part: Vec::new() };
    let (mut at, mut lsn) = (header.head as usize, header.lsn);
    // A lap is the most there can be.
    let mut left = ring.capacity;
    while left > 0 {
        let room = ring.capacity - at;
        if room < redo::encoded_len(0) {
            (at, left) = (0, left.saturating_sub(room));
            continue;
        }
        match redo::parse(header.log, lsn, ring.bytes(at, MOST_RECORD_BYTES)?) {
            Ok((record, len)) => {
                if record.kind == RecordKind::Operation {
                    let operation = Operation::parse(record.data).ok_or(LogError::Damaged(lsn.0))?;
                    each(&record, &operation);
                }
                let taken = if record.kind == RecordKind::Wrap { room } else { len };
                at = (at + taken) % ring.capacity;
                left = left.saturating_sub(taken);
                lsn = LogSeq(lsn.0 + 1);
            }
            Err(RecordError::Version(version)) => return Err(LogError::Version(version)),
            Err(RecordError::Absent | RecordError::Damaged) => {
                check_end(&mut ring, &header, lsn)?;
                break;
            }
        }
    }
    Ok(header)
}

/// The ring, of which one part is in memory.
struct Ring<'d> {
    device: &'d dyn LogDevice,
    capacity: usize,
    /// Where the part begins.
    start: usize,
    part: Vec<u8>,
}

impl Ring<'_> {
    /// The ring's bytes from `at` on: `wanted` of them or more, or all up to its end.
    fn bytes(&mut self, at: usize, wanted: usize) -> io::Result<&[u8]> {
        let wanted_end = self.capacity.min(at + wanted);
        if at < self.start || wanted_end > self.start + self.part.len() {
            self.part.resize(PART_BYTES.max(wanted).min(self.capacity - at), 0);
            // Nothing of it counts until it is read.
            self.start = self.capacity;
            self.device.read(RING_OFFSET + at as u64, &mut self.part)?;
            self.start = at;
        }
        Ok(&self.part[at - self.start..])
    }
}

/// Nothing is at the place of record `end`. It is the end of the log unless a record behind it says that `end` was
/// durable: records of one sync may be there in any combination, those of an earlier one are all there.
fn check_end(ring: &mut Ring<'_>, header: &Header, end: LogSeq) -> Result<(), LogError> {
    const STEP_BYTES: usize = PART_BYTES - MOST_RECORD_BYTES;
    for from in (0..ring.capacity).step_by(STEP_BYTES) {
        let bytes = ring.bytes(from, STEP_BYTES + MOST_RECORD_BYTES)?;
        for place in (0..STEP_BYTES.min(bytes.len())).step_by(ALIGNMENT) {
            let record = &bytes[place..];
            if record.len() < HEADER_LEN {
                break;
            }
            // The cheap look first: the log's number and the record's, where a header has them.
            let word = |at: usize| u64::from_le_bytes(record[at..at + 8].try_into().expect("eight bytes"));
            if word(8) != header.log.0 || word(16) <= end.0 {
                continue;
            }
            if let Ok((record, _)) = redo::parse(header.log, LogSeq(word(16)), record)
                && let Some(operation) = Operation::parse(record.data)
                && operation.durable >= end
            {
                return Err(LogError::Damaged(end.0));
            }
        }
    }
    Ok(())
}
