//! Reading a log after a crash: everything from its head to its end, and whether that really is the end.
//!
//! The decision table stands in docs/durability.md; `tests.rs` walks it.

use super::device::LogDevice;
use super::header::{BLOCK_BYTES, BLOCKS, Header, RING_OFFSET};
use super::operation::Operation;
use cuttlefs_common::ids::LogSeq;
use cuttlefs_common::redo::{self, LogId, Record, RecordError, RecordKind};
use std::io;

/// Longest ring that is read: all of it is in memory meanwhile.
pub const MAX_CAPACITY: u64 = 4 << 30;

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
    ring: Vec<u8>,
    /// Where in the ring each operation's record is, and its number.
    operations: Vec<(usize, LogSeq)>,
}

fn newest_header(device: &dyn LogDevice) -> Result<Header, LogError> {
    let room = device.len().saturating_sub(RING_OFFSET);
    let mut newest: Option<Header> = None;
    for block in 0..BLOCKS {
        let mut bytes = [0; super::header::HEADER_BYTES];
        if device.len() >= RING_OFFSET {
            device.read(block * BLOCK_BYTES, &mut bytes)?;
        }
        let header = Header::parse(&bytes).filter(|header| header.capacity <= room.min(MAX_CAPACITY));
        newest = newest.into_iter().chain(header).max_by_key(|header| header.turn);
    }
    newest.ok_or(LogError::NoHeader)
}

fn parse(ring: &[u8], log: LogId, lsn: LogSeq, at: usize) -> Result<(Record<'_>, usize), RecordError> {
    redo::parse(log, lsn, &ring[at..])
}

impl Contents {
    /// Reads a log.
    ///
    /// # Errors
    /// [`LogError`]: something that was acknowledged cannot be read.
    pub fn read(device: &dyn LogDevice) -> Result<Self, LogError> {
        let header = newest_header(device)?;
        let mut ring = vec![0; header.capacity as usize];
        device.read(RING_OFFSET, &mut ring)?;
        let mut operations = Vec::new();
        let (mut at, mut lsn) = (header.head as usize, header.lsn);
        // A lap is the most there can be.
        let mut left = ring.len();
        while left > 0 {
            let room = ring.len() - at;
            if room < redo::encoded_len(0) {
                (at, left) = (0, left.saturating_sub(room));
                continue;
            }
            match parse(&ring, header.log, lsn, at) {
                Ok((record, len)) => {
                    let taken = if record.kind == RecordKind::Wrap { room } else { len };
                    if record.kind == RecordKind::Operation {
                        Operation::parse(record.data).ok_or(LogError::Damaged(lsn.0))?;
                        operations.push((at, lsn));
                    }
                    at = (at + taken) % ring.len();
                    left = left.saturating_sub(taken);
                    lsn = LogSeq(lsn.0 + 1);
                }
                Err(RecordError::Version(version)) => return Err(LogError::Version(version)),
                Err(RecordError::Absent | RecordError::Damaged) => {
                    check_end(&ring, header.log, lsn)?;
                    break;
                }
            }
        }
        Ok(Self { header, ring, operations })
    }

    /// How many operations there are.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// The operations with their records, in order.
    pub fn operations(&self) -> impl Iterator<Item = (Record<'_>, Operation<'_>)> {
        self.operations.iter().map(|&(at, lsn)| {
            let (record, _) = parse(&self.ring, self.header.log, lsn, at).expect("it was parsed before");
            (record, Operation::parse(record.data).expect("it was parsed before"))
        })
    }
}

/// Nothing is at the place of record `end`. It is the end of the log unless a record behind it says that `end` was
/// durable: records of one sync may be there in any combination, those of an earlier one are all there.
fn check_end(ring: &[u8], log: LogId, end: LogSeq) -> Result<(), LogError> {
    // The cheap look first: where the log's number would be in a header.
    let marks = ring.as_chunks::<{ redo::ALIGNMENT }>().0.iter().enumerate();
    for (index, _) in marks.filter(|(_, word)| u64::from_le_bytes(**word) == log.0) {
        let Some(at) =
            (index * redo::ALIGNMENT).checked_sub(8).filter(|at| at + redo::HEADER_LEN <= ring.len())
        else {
            continue;
        };
        let lsn = LogSeq(u64::from_le_bytes(ring[at + 16..at + 24].try_into().expect("eight bytes")));
        if lsn <= end {
            continue;
        }
        if let Ok((record, _)) = parse(ring, log, lsn, at)
            && let Some(operation) = Operation::parse(record.data)
            && operation.durable >= end
        {
            return Err(LogError::Damaged(end.0));
        }
    }
    Ok(())
}
