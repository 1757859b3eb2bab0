//! The making of a ring, and its recovery after a crash.
//!
//! | found | meaning | action |
//! | --- | --- | --- |
//! | no identity: its first word is zero | never a ring, or its making was cut off before it could hold anything | made new |
//! | identity, no valid checkpoint | a crash while it was made, if both are zeros; else damage | made new; else refused |
//! | one checkpoint torn, one valid | a crash while the head moved | the valid one counts |
//! | a valid record at the head | it may have been acknowledged, and may not have been executed | it is executed |
//! | no record, or one of an older lap or life | the end | scanning stops |
//! | a record whose words are right and whose checksum is wrong | its flush was under way: it was not acknowledged | scanning stops |
//! | valid records behind that | not acknowledged: their flushes complete in order | never looked at, and a new life makes them invalid |

use super::layout::{Checkpoint, Geometry, RingError, end_identity, identity, put_identity};
use super::reader::{RingReader, Taken};
use crate::ids::{ClientId, LogSeq};
use crate::memory::SharedMemory;
use crate::persist::{Persistence, SyncFailed};
use crate::redo::record::{LogId, RecordError, RecordKind};
use std::sync::Arc;

/// Why a scan ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanEnd {
    /// There is no further record.
    Absent,
    /// A part of a record is there.
    Torn,
    /// The record has another version; it is refused as a whole.
    Version(u16),
}

/// The contents of a ring that was in use.
pub struct Recovered {
    /// The life of the ring.
    pub log: LogId,
    /// The client whose ring it was.
    pub client: ClientId,
    /// All records that may not have been executed, in order.
    pub records: Vec<Taken>,
    /// Why the scan ended.
    pub end: ScanEnd,
}

/// The result of opening a ring.
pub enum Recovery {
    /// A ring that holds nothing.
    Fresh(RingReader),
    /// A ring that was in use. Execute the records, checkpoint, renew.
    Found(RingReader, Recovered),
}

impl RingReader {
    /// Makes a ring in memory with any contents.
    ///
    /// # Errors
    /// [`SyncFailed`].
    pub fn make(
        memory: Arc<SharedMemory>,
        persistence: Arc<dyn Persistence>,
        geometry: Geometry,
        log: LogId,
        client: ClientId,
    ) -> Result<Self, SyncFailed> {
        assert!(memory.contains(0, geometry.memory_len() as u64), "the memory holds the ring");
        // The old identity is cleared first, so that no crash in between leaves a mixture of both.
        end_identity(&memory, &*persistence)?;
        memory.fill(0, super::RECORDS_AT, 0);
        persistence.persist_and_wait(&memory, 0, super::RECORDS_AT)?;
        put_identity(&memory, &*persistence, geometry)?;
        let none = Checkpoint {
            generation: 0,
            log,
            position: 0,
            lsn: LogSeq(1),
            client,
            past: (LogId(0), LogSeq(0)),
        };
        let mut reader = Self::at(memory, persistence, geometry, none);
        reader.put(none)?;
        Ok(reader)
    }

    /// Opens a ring, or makes one if there is none.
    ///
    /// # Errors
    /// [`RingError`] for a ring that may hold acknowledged records and cannot be read. A sync that fails is
    /// [`RingError::Damaged`] of the device.
    pub fn open(
        memory: Arc<SharedMemory>,
        persistence: Arc<dyn Persistence>,
        geometry: Geometry,
        log: LogId,
        client: ClientId,
    ) -> Result<Recovery, RingError> {
        let fresh = |memory, persistence| {
            Self::make(memory, persistence, geometry, log, client)
                .map(Recovery::Fresh)
                .map_err(|SyncFailed| RingError::Damaged("device"))
        };
        let found = match identity(&memory) {
            Ok(found) => found,
            Err(RingError::Absent) => return fresh(memory, persistence),
            Err(error) => return Err(error),
        };
        let Some(checkpoint) = Checkpoint::read(&memory) else {
            let mut bytes = [0; 2 * super::CHECKPOINT_LEN];
            memory.read(super::CHECKPOINTS_AT, &mut bytes);
            // At worst the first checkpoint is torn, since the second was never begun.
            return if bytes[super::CHECKPOINT_LEN..].iter().all(|byte| *byte == 0) {
                fresh(memory, persistence)
            } else {
                Err(RingError::Damaged("checkpoints"))
            };
        };
        let mut reader = Self::at(memory, persistence, found, checkpoint);
        let mut records = Vec::new();
        let end = loop {
            match reader.poll_or_why() {
                Ok(taken) => records.push(taken),
                Err(RecordError::Absent) => break ScanEnd::Absent,
                Err(RecordError::Damaged) => break ScanEnd::Torn,
                Err(RecordError::Version(version)) => break ScanEnd::Version(version),
            }
        };
        let recovered = Recovered { log: checkpoint.log, client: checkpoint.client, records, end };
        Ok(Recovery::Found(reader, recovered))
    }

    /// As `poll`, and returns why there is no record.
    fn poll_or_why(&mut self) -> Result<Taken, RecordError> {
        match self.poll()? {
            Some(taken) if taken.kind != RecordKind::Wrap => Ok(taken),
            _ => Err(self.look().err().unwrap_or(RecordError::Absent)),
        }
    }
}
