//! The ring's bytes: identity and checkpoints, and the places of positions.

use crate::ids::{ClientId, LogSeq};
use crate::memory::SharedMemory;
use crate::persist::{Persistence, SyncFailed};
use crate::redo::record::{ALIGNMENT, LogId, OPERATOR_LEN, encoded_len};
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Where the two checkpoints are; one behind the other, so that one READ gets both.
pub const CHECKPOINTS_AT: usize = 128;
/// Bytes from one checkpoint to the next.
pub const CHECKPOINT_LEN: usize = 128;
/// Where records begin.
pub const RECORDS_AT: usize = 4096;
/// Least ring: two of the shortest records.
const LEAST_CAPACITY: u64 = 4096;
/// Most: positions and flush lengths stay within what a queue pair names.
const MOST_CAPACITY: u64 = 1 << 30;

const MAGIC: [u8; 4] = *b"CFRG";
const RING_VERSION: u16 = 1;

/// Why there is no ring to be had here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// No ring was ever made here.
    #[error("there is no ring here")]
    Absent,
    /// Another version.
    #[error("the ring has version {0}, this server knows {RING_VERSION}")]
    Version(u16),
    /// Identity or both checkpoints are not what was written.
    #[error("the ring's {0} is damaged; what it holds cannot be recovered")]
    Damaged(&'static str),
    /// Sizes that cannot be.
    #[error("a ring of {capacity} bytes in steps of {stride} cannot be")]
    Geometry {
        /// Bytes of records.
        capacity: u64,
        /// Bytes from one beginning to the next at least.
        stride: u64,
    },
    /// The record is longer than half of the ring, or than its slot.
    #[error("a record of {len} bytes does not fit a ring that takes {most}")]
    TooLong {
        /// What it takes.
        len: usize,
        /// What may be.
        most: usize,
    },
    /// What the peer says of the ring cannot be.
    #[error("the peer's head is {0}, which cannot be")]
    Head(u64),
    /// A record that was announced is not one.
    #[error("record {0} was announced and is none")]
    Record(LogSeq),
}

/// Sizes of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    capacity: u64,
    stride: u64,
}

impl Geometry {
    /// A ring of `capacity` bytes whose records begin at multiples of `stride`.
    ///
    /// # Errors
    /// [`RingError::Geometry`].
    pub fn new(capacity: u64, stride: u64) -> Result<Self, RingError> {
        let aligned = ALIGNMENT as u64;
        let possible = (LEAST_CAPACITY..=MOST_CAPACITY).contains(&capacity)
            && stride >= aligned
            && stride.is_multiple_of(aligned)
            && capacity.is_multiple_of(stride)
            && (stride == aligned || stride >= encoded_len(0) as u64)
            && stride <= capacity / 2;
        if possible { Ok(Self { capacity, stride }) } else { Err(RingError::Geometry { capacity, stride }) }
    }

    /// A ring of records one behind the other.
    ///
    /// # Errors
    /// As `new`.
    pub fn stream(capacity: u64) -> Result<Self, RingError> {
        Self::new(capacity, ALIGNMENT as u64)
    }

    /// A ring of slots.
    ///
    /// # Errors
    /// As `new`.
    pub fn slots(slot_len: u64, slots: u64) -> Result<Self, RingError> {
        Self::new(slot_len.saturating_mul(slots), slot_len)
    }

    /// Bytes of records.
    pub fn capacity(self) -> u64 {
        self.capacity
    }

    /// Bytes from one beginning to the next at least.
    pub fn stride(self) -> u64 {
        self.stride
    }

    /// Whether each record has a slot.
    pub fn is_slots(self) -> bool {
        self.stride > ALIGNMENT as u64
    }

    /// Bytes of memory.
    pub fn memory_len(self) -> usize {
        RECORDS_AT + self.capacity as usize
    }

    /// Longest record: two of them fit, so that an empty ring takes one wherever its tail is.
    pub fn most(self) -> usize {
        if self.is_slots() { self.stride as usize } else { self.capacity as usize / 2 }
    }

    /// Where a position is, in the memory.
    pub fn place(self, position: u64) -> usize {
        RECORDS_AT + (position % self.capacity) as usize
    }

    /// Bytes from a position to the end of the ring.
    pub fn rest(self, position: u64) -> u64 {
        self.capacity - position % self.capacity
    }

    /// Bytes a record takes.
    pub fn taken(self, len: usize) -> u64 {
        (len as u64).next_multiple_of(self.stride)
    }

    /// Whether a record of nothing fits before the end: if not, the end is left out without saying so.
    pub fn has_room_for_wrap(self, position: u64) -> bool {
        self.rest(position) >= encoded_len(0) as u64
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawIdentity {
    magic: [u8; 4],
    version: U16,
    reserved: U16,
    capacity: U64,
    stride: U64,
    crc: U32,
}
const IDENTITY_LEN: usize = 28;
const _: () = assert!(size_of::<RawIdentity>() == IDENTITY_LEN);
const IDENTITY_CRC_AT: usize = 24;
/// The identity's first word: zero says that there is no ring. Memory never keeps a part of it.
const FIRST_WORD_LEN: usize = 8;

/// There is no ring any more, whatever stands behind the first word.
pub(super) fn end_identity(memory: &SharedMemory, persistence: &dyn Persistence) -> Result<(), SyncFailed> {
    memory.fill(0, FIRST_WORD_LEN, 0);
    persistence.persist_and_wait(memory, 0, FIRST_WORD_LEN)
}

/// Writes the identity, the word that says that it is one when all else of it is there to stay.
pub(super) fn put_identity(
    memory: &SharedMemory,
    persistence: &dyn Persistence,
    geometry: Geometry,
) -> Result<(), SyncFailed> {
    let mut raw = RawIdentity {
        magic: MAGIC,
        version: RING_VERSION.into(),
        reserved: 0.into(),
        capacity: geometry.capacity.into(),
        stride: geometry.stride.into(),
        crc: 0.into(),
    };
    raw.crc = crc32c::crc32c(&raw.as_bytes()[..IDENTITY_CRC_AT]).into();
    let (word, rest) = raw.as_bytes().split_at(FIRST_WORD_LEN);
    memory.write(FIRST_WORD_LEN, rest);
    persistence.persist_and_wait(memory, FIRST_WORD_LEN, rest.len())?;
    memory.write(0, word);
    persistence.persist_and_wait(memory, 0, FIRST_WORD_LEN)
}

/// Reads the identity; the memory holds what it says.
pub(super) fn identity(memory: &SharedMemory) -> Result<Geometry, RingError> {
    if !memory.contains(0, RECORDS_AT as u64) {
        return Err(RingError::Absent);
    }
    let mut bytes = [0; IDENTITY_LEN];
    memory.read(0, &mut bytes);
    let Ok(raw) = RawIdentity::ref_from_bytes(&bytes) else { return Err(RingError::Absent) };
    if raw.magic != MAGIC {
        return Err(if bytes[..FIRST_WORD_LEN] == [0; FIRST_WORD_LEN] {
            RingError::Absent
        } else {
            RingError::Damaged("identity")
        });
    }
    if raw.version.get() != RING_VERSION {
        return Err(RingError::Version(raw.version.get()));
    }
    if raw.crc.get() != crc32c::crc32c(&bytes[..IDENTITY_CRC_AT]) || raw.reserved.get() != 0 {
        return Err(RingError::Damaged("identity"));
    }
    let geometry = Geometry::new(raw.capacity.get(), raw.stride.get())?;
    if !memory.contains(0, geometry.memory_len() as u64) {
        return Err(RingError::Damaged("length"));
    }
    Ok(geometry)
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawCheckpoint {
    generation: U64,
    log: U64,
    position: U64,
    lsn: U64,
    client: U128,
    past_log: U64,
    past_lsn: U64,
    crc: U32,
    reserved: U32,
    unused: [u8; 56],
}
const _: () = assert!(size_of::<RawCheckpoint>() == CHECKPOINT_LEN);
const CHECKPOINT_CRC_AT: usize = 64;

/// Where a ring stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Counts checkpoints.
    pub generation: u64,
    /// Which life.
    pub log: LogId,
    /// Everything before this position has been executed.
    pub position: u64,
    /// The record that begins there.
    pub lsn: LogSeq,
    /// Whose ring it is.
    pub client: ClientId,
    /// The life before that had records, and the last of them that was executed.
    pub past: (LogId, LogSeq),
}

impl Checkpoint {
    /// Its bytes.
    pub fn encode(&self) -> [u8; CHECKPOINT_LEN] {
        let mut raw = RawCheckpoint::new_zeroed();
        raw.generation = self.generation.into();
        raw.log = self.log.0.into();
        raw.position = self.position.into();
        raw.lsn = self.lsn.0.into();
        raw.client = self.client.0.into();
        raw.past_log = self.past.0.0.into();
        raw.past_lsn = self.past.1.0.into();
        raw.crc = crc32c::crc32c(&raw.as_bytes()[..CHECKPOINT_CRC_AT]).into();
        zerocopy::transmute!(raw)
    }

    /// A checkpoint, if that is one.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (raw, _) = RawCheckpoint::ref_from_prefix(bytes).ok()?;
        let good = raw.generation.get() != 0
            && raw.crc.get() == crc32c::crc32c(&bytes[..CHECKPOINT_CRC_AT])
            && raw.reserved.get() == 0
            && raw.unused == [0; 56];
        good.then_some(Self {
            generation: raw.generation.get(),
            log: LogId(raw.log.get()),
            position: raw.position.get(),
            lsn: LogSeq(raw.lsn.get()),
            client: ClientId(raw.client.get()),
            past: (LogId(raw.past_log.get()), LogSeq(raw.past_lsn.get())),
        })
    }

    /// The one of the two that counts.
    pub fn latest(bytes: &[u8]) -> Option<Self> {
        let both = bytes.chunks_exact(CHECKPOINT_LEN).take(2).filter_map(Self::parse);
        both.max_by_key(|checkpoint| checkpoint.generation)
    }

    /// Where it is written: not over the one that counts until this one does.
    pub(super) fn place(&self) -> usize {
        CHECKPOINTS_AT + if self.generation.is_multiple_of(2) { CHECKPOINT_LEN } else { 0 }
    }

    /// The one that counts in a ring.
    pub(super) fn read(memory: &SharedMemory) -> Option<Self> {
        let mut bytes = [0; 2 * CHECKPOINT_LEN];
        memory.read(CHECKPOINTS_AT, &mut bytes);
        Self::latest(&bytes)
    }
}

const _: () = assert!(CHECKPOINTS_AT + 2 * CHECKPOINT_LEN <= RECORDS_AT);
const _: () = assert!(OPERATOR_LEN == ALIGNMENT);
