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

/// Where the header names log and number, and the length of the data.
const LOG_AT: usize = 8;
const LSN_AT: usize = 16;
const LENGTH_AT: usize = 52;

/// A record taken from a ring: a copy, which nobody can change any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// Its number.
    pub lsn: LogSeq,
    /// What the data is.
    pub kind: RecordKind,
    /// Whose request it is of.
    pub client: ClientId,
    /// The request's slot.
    pub slot: crate::ids::SlotIndex,
    /// The request's number in it.
    pub seq: u64,
    /// The data.
    pub data: Vec<u8>,
    /// The position behind it: where the head goes once it has been executed.
    pub end: u64,
    /// Where it stands in the ring's memory, the operator word included.
    pub place: (usize, usize),
}

/// Where a server is in a ring.
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

    /// Sizes.
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

    /// What makes it persistent.
    pub fn persistence(&self) -> &Arc<dyn Persistence> {
        &self.persistence
    }

    /// Number of the next record.
    pub fn next_lsn(&self) -> LogSeq {
        self.next
    }

    /// Looks for the next record; `None`: it is not there, or not whole. Wrap records are followed, not returned.
    ///
    /// # Errors
    /// [`RecordError::Version`] only: anything else that is no record may be one in a moment.
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

    /// As `poll`, for a record the RNIC has said is there.
    ///
    /// # Errors
    /// [`RingError::Record`] if it is not.
    pub fn take(&mut self) -> Result<Taken, RingError> {
        let lsn = self.next;
        self.poll().ok().flatten().ok_or(RingError::Record(lsn))
    }

    /// The record at the position, and where the next one is.
    pub(super) fn look(&mut self) -> Result<(Taken, u64), RecordError> {
        let at = self.geometry.place(self.position);
        let rest = self.geometry.rest(self.position) as usize;
        let len = self.seen_len(at, rest)?;
        self.bytes.resize(len, 0);
        self.memory.read(at, &mut self.bytes);
        let (record, parsed_len) = parse(self.checkpoint.log, self.next, &self.bytes)?;
        // The peer can change its bytes between the two looks; the copy is what counts.
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

    /// How long the record is that seems to be here, by its header and its operator word. Cheap where none is.
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
        // Pairs with the store of the last word: who sees it right sees what was stored before it.
        let _operator = word(len - OPERATOR_LEN);
        fence(Ordering::Acquire);
        Ok(len)
    }

    /// Moves the head past what has been executed and makes that persistent. Only then may the client be told.
    ///
    /// # Errors
    /// [`SyncFailed`]: the ring takes nothing more.
    pub fn checkpoint_to(&mut self, position: u64, lsn: LogSeq) -> Result<(), SyncFailed> {
        assert!(
            position >= self.checkpoint.position && position <= self.position && lsn <= self.next,
            "the head moves forward, to what was taken"
        );
        self.put(Checkpoint { position, lsn, ..self.checkpoint })
    }

    /// Writes the next checkpoint beside the one that counts.
    pub(super) fn put(&mut self, checkpoint: Checkpoint) -> Result<(), SyncFailed> {
        let checkpoint = Checkpoint { generation: self.checkpoint.generation + 1, ..checkpoint };
        let place = checkpoint.place();
        self.memory.write(place, &checkpoint.encode());
        self.persistence.persist_and_wait(&self.memory, place, super::CHECKPOINT_LEN)?;
        self.checkpoint = checkpoint;
        Ok(())
    }

    /// Keeps what an earlier ring of the same client knew of its last life.
    ///
    /// # Errors
    /// [`SyncFailed`].
    pub fn remember(&mut self, past: (LogId, LogSeq)) -> Result<(), SyncFailed> {
        self.put(Checkpoint { past, ..self.checkpoint })
    }

    /// Begins a new life: nothing in the ring is valid any more.
    ///
    /// # Errors
    /// [`SyncFailed`].
    pub fn renew(&mut self, log: LogId, client: ClientId) -> Result<(), SyncFailed> {
        assert_ne!(log, self.checkpoint.log, "a new life has a new name");
        // A life without records says nothing of what came before it.
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
