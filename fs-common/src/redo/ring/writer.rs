//! The client's side of a ring: the place of the next record, and the room that is left.
//!
//! This module only owns numbers. The bytes are staged in the client's memory, a mirror of the ring with the same offsets. So a record stays there
//! unchanged until it is checkpointed, and can be written again to the same place.

use super::layout::{Checkpoint, Geometry, RingError};
use crate::ids::LogSeq;
use crate::memory::SharedMemory;
use crate::redo::record::{LogId, OPERATOR_LEN, Record, RecordKind, encode, encoded_len};

/// The bytes of the ring that one record takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The record's number.
    pub lsn: LogSeq,
    /// Offset of its first byte in the ring's memory.
    pub offset: usize,
    /// Its bytes, the operator word included.
    pub len: usize,
    /// Offset and length of the wrap record before it, if there is one.
    pub wrap: Option<(usize, usize)>,
}

impl Span {
    /// Offset of the operator word.
    pub fn operator_offset(&self) -> usize {
        self.offset + self.len - OPERATOR_LEN
    }
}

/// Whether a record fits now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// It fits.
    Enough,
    /// It fits once the head has reached this position.
    After(u64),
}

/// A client's position in its ring.
#[derive(Clone, Debug)]
pub struct RingWriter {
    log: LogId,
    geometry: Geometry,
    tail: u64,
    next: LogSeq,
    /// The newest persistent head that the server has told.
    head: u64,
    head_lsn: LogSeq,
}

impl RingWriter {
    /// A writer at the beginning of a life of the ring.
    pub fn new(geometry: Geometry, log: LogId) -> Self {
        Self { log, geometry, tail: 0, next: LogSeq(1), head: 0, head_lsn: LogSeq(1) }
    }

    /// Number of the next record.
    pub fn next(&self) -> LogSeq {
        self.next
    }

    /// The life of the ring.
    pub fn log(&self) -> LogId {
        self.log
    }

    /// Sizes of the ring.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Number of the record at the head: those before it have been executed.
    pub fn head_lsn(&self) -> LogSeq {
        self.head_lsn
    }

    /// Bytes between head and tail.
    pub fn used(&self) -> u64 {
        self.tail - self.head
    }

    /// Bytes that a record takes, including those that are skipped before it, and whether it wraps to the beginning.
    fn needed(&self, len: usize) -> (u64, bool) {
        let taken = self.geometry.taken(len);
        let rest = self.geometry.rest(self.tail);
        // If the tail is at the beginning, the rest is the whole ring, and records are at most half of it.
        if taken <= rest { (taken, false) } else { (rest + taken, true) }
    }

    /// Whether a record with this much data fits now.
    ///
    /// # Errors
    /// [`RingError::TooLong`] if it never fits.
    pub fn room(&self, data_len: usize) -> Result<Room, RingError> {
        let len = encoded_len(data_len);
        if len > self.geometry.most() {
            return Err(RingError::TooLong { len, most: self.geometry.most() });
        }
        let (needed, _) = self.needed(len);
        let used = self.used();
        if used + needed <= self.geometry.capacity() {
            return Ok(Room::Enough);
        }
        Ok(Room::After(self.tail + needed - self.geometry.capacity()))
    }

    /// Puts the next record into the mirror; `record.lsn` is not used. The caller has checked the room.
    pub fn put(&mut self, mirror: &SharedMemory, record: &Record<'_>, scratch: &mut Vec<u8>) -> Span {
        let (needed, wraps) = self.needed(encoded_len(record.data.len()));
        assert!(self.used() + needed <= self.geometry.capacity(), "a record is put where there is room");
        let mut wrap = None;
        if wraps {
            if self.geometry.has_room_for_wrap(self.tail) {
                let nothing = Record { kind: RecordKind::Wrap, data: &[], ..*record };
                let len = self.put_here(mirror, &nothing, scratch);
                wrap = Some((self.geometry.place(self.tail), len));
            }
            self.tail += self.geometry.rest(self.tail);
        }
        let lsn = self.next;
        let offset = self.geometry.place(self.tail);
        let len = self.put_here(mirror, record, scratch);
        self.tail += self.geometry.taken(len);
        Span { lsn, offset, len, wrap }
    }

    fn put_here(&mut self, mirror: &SharedMemory, record: &Record<'_>, scratch: &mut Vec<u8>) -> usize {
        scratch.clear();
        encode(self.log, &Record { lsn: self.next, ..*record }, scratch);
        mirror.write(self.geometry.place(self.tail), scratch);
        self.next = LogSeq(self.next.0 + 1);
        scratch.len()
    }

    /// Notes a head that the server has told. The head never goes back: an older one changes nothing.
    ///
    /// # Errors
    /// [`RingError::Head`] if it lies beyond the tail.
    pub fn heard(&mut self, position: u64, lsn: LogSeq) -> Result<(), RingError> {
        if position > self.tail || lsn > self.next {
            return Err(RingError::Head(position));
        }
        if position > self.head {
            self.head = position;
        }
        self.head_lsn = self.head_lsn.max(lsn);
        Ok(())
    }

    /// The same for a checkpoint that was READ; one of another life changes nothing.
    ///
    /// # Errors
    /// As `heard`.
    pub fn read_head(&mut self, checkpoint: &Checkpoint) -> Result<(), RingError> {
        if checkpoint.log == self.log { self.heard(checkpoint.position, checkpoint.lsn) } else { Ok(()) }
    }
}
