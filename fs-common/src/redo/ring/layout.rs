//! The ring's bytes: identity and checkpoints, and the places of positions.

use crate::ids::{ClientId, LogSeq};
use crate::memory::SharedMemory;
use crate::persist::{Persistence, SyncFailed};
use crate::redo::record::{ALIGNMENT, LogId, OPERATOR_LEN, encoded_len};
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Offset of the two checkpoints. They are adjacent, so that one READ gets both.
pub const CHECKPOINTS_AT: usize = 128;
/// Bytes from one checkpoint to the next.
pub const CHECKPOINT_LEN: usize = 128;
/// Offset of the records.
pub const RECORDS_AT: usize = 4096;
/// Smallest ring: room for two of the shortest records.
const LEAST_CAPACITY: u64 = 4096;
/// Largest ring: positions and lengths of FLUSHes must fit a work request.
const MOST_CAPACITY: u64 = 1 << 30;

const MAGIC: [u8; 4] = *b"CFRG";
const RING_VERSION: u16 = 1;

/// Why a ring cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// No ring was ever made here.
    #[error("there is no ring here")]
    Absent,
    /// Another version.
    #[error("the ring has version {0}, this server knows {RING_VERSION}")]
    Version(u16),
    /// The identity, or both checkpoints, are damaged.
    #[error("the ring's {0} is damaged; what it holds cannot be recovered")]
    Damaged(&'static str),
    /// Sizes that a ring cannot have.
    #[error("a ring of {capacity} bytes in steps of {stride} cannot be")]
    Geometry {
        /// Bytes of records.
        capacity: u64,
        /// Least number of bytes from the beginning of a record to that of the next.
        stride: u64,
    },
    /// The record is longer than half of the ring, or than its slot.
    #[error("a record of {len} bytes does not fit a ring that takes {most}")]
    TooLong {
        /// Bytes of the record.
        len: usize,
        /// Bytes that a record may have.
        most: usize,
    },
    /// The peer named an impossible head.
    #[error("the peer's head is {0}, which cannot be")]
    Head(u64),
    /// A record that the peer announced is not there.
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

    /// A ring in which each record follows the one before directly.
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

    /// Least number of bytes from the beginning of a record to that of the next.
    pub fn stride(self) -> u64 {
        self.stride
    }

    /// Whether each record has a slot.
    pub fn is_slots(self) -> bool {
        self.stride > ALIGNMENT as u64
    }

    /// Bytes of the ring's memory.
    pub fn memory_len(self) -> usize {
        RECORDS_AT + self.capacity as usize
    }

    /// Longest record: two of them fit, so an empty ring has room for one wherever its tail is.
    pub fn most(self) -> usize {
        if self.is_slots() { self.stride as usize } else { self.capacity as usize / 2 }
    }

    /// The offset of a position in the memory.
    pub fn place(self, position: u64) -> usize {
        RECORDS_AT + (position % self.capacity) as usize
    }

    /// Bytes from a position to the end of the ring.
    pub fn rest(self, position: u64) -> u64 {
        self.capacity - position % self.capacity
    }

    /// Bytes of the ring that a record of this length takes.
    pub fn taken(self, len: usize) -> u64 {
        (len as u64).next_multiple_of(self.stride)
    }

    /// Whether an empty record fits before the end. If not, the end is skipped without a `Wrap` record.
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
/// Bytes of the identity's first word, which is zero if there is no ring. A crash cannot leave a part of a word.
const FIRST_WORD_LEN: usize = 8;

/// Makes the ring none, whatever follows the identity's first word.
pub(super) fn end_identity(memory: &SharedMemory, persistence: &dyn Persistence) -> Result<(), SyncFailed> {
    memory.fill(0, FIRST_WORD_LEN, 0);
    persistence.persist_and_wait(memory, 0, FIRST_WORD_LEN)
}

/// Writes the identity. Its first word, which makes it valid, is written once the rest is persistent.
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

/// Reads the identity, and checks that the memory is as long as the ring that it describes.
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

/// The persistent state of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Counts checkpoints.
    pub generation: u64,
    /// The life of the ring.
    pub log: LogId,
    /// Everything before this position has been executed.
    pub position: u64,
    /// The record that begins there.
    pub lsn: LogSeq,
    /// The client whose ring it is.
    pub client: ClientId,
    /// The last life before that had records, and the last of those records that was executed.
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

    /// Parses a checkpoint; `None` if it is not valid.
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

    /// The valid one of two checkpoints; of two valid ones the newer.
    pub fn latest(bytes: &[u8]) -> Option<Self> {
        let both = bytes.chunks_exact(CHECKPOINT_LEN).take(2).filter_map(Self::parse);
        both.max_by_key(|checkpoint| checkpoint.generation)
    }

    /// The offset at which it is written: never over the newest valid checkpoint.
    pub(super) fn place(&self) -> usize {
        CHECKPOINTS_AT + if self.generation.is_multiple_of(2) { CHECKPOINT_LEN } else { 0 }
    }

    /// The newest valid checkpoint of a ring.
    pub(super) fn read(memory: &SharedMemory) -> Option<Self> {
        let mut bytes = [0; 2 * CHECKPOINT_LEN];
        memory.read(CHECKPOINTS_AT, &mut bytes);
        Self::latest(&bytes)
    }
}

const _: () = assert!(CHECKPOINTS_AT + 2 * CHECKPOINT_LEN <= RECORDS_AT);
const _: () = assert!(OPERATOR_LEN == ALIGNMENT);
