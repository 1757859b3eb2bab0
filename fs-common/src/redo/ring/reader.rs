//! The server's side of a ring: taking records in order, and moving the persistent head.

use super::layout::{Checkpoint, Geometry, RingError};
use crate::ids::{ClientId, LogSeq};
use crate::memory::SharedMemory;
use crate::persist::{Persistence, SyncFailed};
use crate::redo::record::{
    HEADER_LEN, LogId, MAX_DATA_BYTES, OPERATOR_LEN, Record, RecordError, RecordKind, encoded_len, parse,
};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Offsets of log and number in the header; the length of the data follows.
const LOG_AT: usize = 8;
const LSN_AT: usize = 16;
const LENGTH_AT: usize = 52;

/// A copy of a record of the ring, which the peer cannot change any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Its number.
    pub lsn: LogSeq,
    /// The kind of the data.
    pub kind: RecordKind,
    /// The client that made the request.
    pub client: ClientId,
    /// The request's slot.
    pub slot: crate::ids::SlotIndex,
    /// The request's number in its slot.
    pub seq: u64,
    /// The data.
    pub data: Vec<u8>,
    /// The position behind the record: the head moves there once the record has been executed.
    pub end: u64,
    /// Offset and length of the record in the ring's memory, including the operator word.
    pub place: (usize, usize),
}

/// A server's position in a ring.
pub struct RingReader {
    memory: Arc<SharedMemory>,
    persistence: Arc<dyn Persistence>,
    geometry: Geometry,
    checkpoint: Checkpoint,
    position: u64,
    next: LogSeq,
    bytes: Vec<u8>,
}

impl RingReader {
    pub(super) fn at(
        memory: Arc<SharedMemory>,
        persistence: Arc<dyn Persistence>,
        geometry: Geometry,
        checkpoint: Checkpoint,
    ) -> Self {
        let (position, next) = (checkpoint.position, checkpoint.lsn);
        Self { memory, persistence, geometry, checkpoint, position, next, bytes: Vec::new() }
    }

    /// Sizes of the ring.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The persistent head.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The ring's memory.
    pub fn memory(&self) -> &Arc<SharedMemory> {
        &self.memory
    }

    /// The way in which the ring becomes persistent.
    pub fn persistence(&self) -> &Arc<dyn Persistence> {
        &self.persistence
    }

    /// Number of the next record.
    pub fn next_lsn(&self) -> LogSeq {
        self.next
    }

    /// Looks for the next record; `None`: it is not there, or not complete. Wrap records are followed, not returned.
    ///
    /// # Errors
    /// [`RecordError::Version`] only: any other bytes that are no record may become one.
    pub fn poll(&mut self) -> Result<Option<Taken>, RecordError> {
        loop {
            if !self.geometry.has_room_for_wrap(self.position) {
                self.position += self.geometry.rest(self.position);
            }
            match self.look() {
                Ok((taken, end)) => {
                    self.position = end;
                    self.next = LogSeq(self.next.0 + 1);
                    if taken.kind != RecordKind::Wrap {
                        return Ok(Some(taken));
                    }
                }
                Err(RecordError::Version(version)) => return Err(RecordError::Version(version)),
                Err(RecordError::Absent | RecordError::Damaged) => return Ok(None),
            }
        }
    }

    /// As `poll`, for a record that the RNIC has announced.
    ///
    /// # Errors
    /// [`RingError::Record`] if there is none.
    pub fn take(&mut self) -> Result<Taken, RingError> {
        let lsn = self.next;
        self.poll().ok().flatten().ok_or(RingError::Record(lsn))
    }

    /// The record at the current position, and the position of the next record.
    pub(super) fn look(&mut self) -> Result<(Taken, u64), RecordError> {
        let at = self.geometry.place(self.position);
        let rest = self.geometry.rest(self.position) as usize;
        let len = self.seen_len(at, rest)?;
        self.bytes.resize(len, 0);
        self.memory.read(at, &mut self.bytes);
        let (record, parsed_len) = parse(self.checkpoint.log, self.next, &self.bytes)?;
        // The peer may have changed the bytes since they were copied. Only the copy counts.
        if parsed_len != len {
            return Err(RecordError::Damaged);
        }
        let end = match record.kind {
            RecordKind::Wrap => self.position + rest as u64,
            _ => self.position + self.geometry.taken(len),
        };
        let Record { kind, lsn, client, slot, seq, data } = record;
        let taken = Taken { lsn, kind, client, slot, seq, data: data.to_vec(), end, place: (at, len) };
        Ok((taken, end))
    }

    /// The length of the record that seems to be here, from its header and its operator word. Cheap if there is none.
    fn seen_len(&self, at: usize, rest: usize) -> Result<usize, RecordError> {
        if rest < encoded_len(0) {
            return Err(RecordError::Absent);
        }
        let word = |offset: usize| self.memory.atomic_u64(at + offset).load(Ordering::Acquire);
        if u64::from_le(word(LOG_AT)) != self.checkpoint.log.0 || u64::from_le(word(LSN_AT)) != self.next.0 {
            return Err(RecordError::Absent);
        }
        let mut length = [0; 4];
        self.memory.read(at + LENGTH_AT, &mut length);
        let data_len = u32::from_le_bytes(length) as usize;
        if data_len > MAX_DATA_BYTES {
            return Err(RecordError::Absent);
        }
        let len = encoded_len(data_len);
        if len > rest || len > self.geometry.most() {
            return Err(RecordError::Absent);
        }
        // Pairs with the store of the last word: a reader that finds it right also finds the bytes stored before it.
        let _operator = word(len - OPERATOR_LEN);
        fence(Ordering::Acquire);
        Ok(len)
    }

    /// Moves the head past executed records, and makes it persistent. The client may be told of it only then.
    ///
    /// # Errors
    /// [`SyncFailed`]: the ring takes no more records.
    pub fn checkpoint_to(&mut self, position: u64, lsn: LogSeq) -> Result<(), SyncFailed> {
        assert!(
            position >= self.checkpoint.position && position <= self.position && lsn <= self.next,
            "the head moves forward, to what was taken"
        );
        self.put(Checkpoint { position, lsn, ..self.checkpoint })
    }

    /// Writes the next checkpoint beside the newest one.
    pub(super) fn put(&mut self, checkpoint: Checkpoint) -> Result<(), SyncFailed> {
        let checkpoint = Checkpoint { generation: self.checkpoint.generation + 1, ..checkpoint };
        let place = checkpoint.place();
        self.memory.write(place, &checkpoint.encode());
        self.persistence.persist_and_wait(&self.memory, place, super::CHECKPOINT_LEN)?;
        self.checkpoint = checkpoint;
        Ok(())
    }

    /// Keeps the end of the last life that an earlier ring of the same client had.
    ///
    /// # Errors
    /// [`SyncFailed`].
    pub fn remember(&mut self, past: (LogId, LogSeq)) -> Result<(), SyncFailed> {
        self.put(Checkpoint { past, ..self.checkpoint })
    }

    /// Begins a new life: no record of the ring is valid any more.
    ///
    /// # Errors
    /// [`SyncFailed`].
    pub fn renew(&mut self, log: LogId, client: ClientId) -> Result<(), SyncFailed> {
        assert_ne!(log, self.checkpoint.log, "a new life has a new name");
        // A life without records keeps the past of the life before.
        let executed = LogSeq(self.checkpoint.lsn.0 - 1);
        let past = match executed.0 {
            0 if client == self.checkpoint.client => self.checkpoint.past,
            0 => (LogId(0), LogSeq(0)),
            _ => (self.checkpoint.log, executed),
        };
        self.put(Checkpoint { log, position: 0, lsn: LogSeq(1), client, past, ..self.checkpoint })?;
        (self.position, self.next) = (0, LogSeq(1));
        Ok(())
    }
}

const _: () = assert!(LENGTH_AT + 4 <= HEADER_LEN);
