//! The memory that the two peers of a shared-memory connection share, and the message rings in it.
//!
//! ```text
//! 0      client's words: +0 tail, +64 head, +128 waits for space, +192 closed
//! 256    server's words: the same
//! 4096   client's region directory: one u32 an entry, the rkey while the region is alive
//! 8192   server's region directory
//! 12288  ring client -> server
//! +RING_LEN  ring server -> client
//! ```
//! A side writes its own words and directory and only reads the other's. `tail` counts the bytes a side has put
//! into the ring it produces, `head` those it has taken from the ring it consumes; both only grow.
//!
//! A record is a 16-byte header and the message, padded to 16 bytes; it may wrap around the ring's end.
//!
//! | offset | bytes | field    | meaning |
//! |-------:|------:|----------|---------|
//! | 0      | 4     | length   | bytes of the message |
//! | 4      | 4     | flags    | 1: immediate data is there; 2: no message, a WRITE's immediate; 4: a FLUSH for the target to do; 8: the answer to one |
//! | 8      | 4     | imm      | immediate data |
//! | 12     | 4     | magic    | `CFRR` |
//!
//! # Ordering
//! `tail` and `head` are stored with release and loaded with acquire: a consumer that sees a record's bytes counted
//! sees the bytes, and a producer that sees space freed may overwrite it.
//!
//! # Trust
//! Each side keeps its own counters privately and takes only the peer's from memory. Whatever their values, a header is
//! copied out once, checked, and the copy is used; bytes may be garbage, but no index leaves the ring.

use super::flush::FLUSH_LEN;
use crate::memory::SharedMemory;
use crate::rdma::soft::queue::{MAX_MESSAGE_BYTES, MAX_TRANSFER_BYTES};
use crate::rdma::soft::region::{Held, Piece};
use std::sync::atomic::{AtomicU64, Ordering};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of one ring: three of the largest messages, so that one can be consumed while the next is produced.
pub(super) const RING_LEN: usize = 256 * 1024;
/// Regions of one side that are reachable at a time.
pub(super) const DIRECTORY_LEN: usize = 1024;
/// Bytes of a record's header.
pub const RECORD_HEADER_LEN: usize = 16;
/// Bytes of the whole connection memory.
pub(super) const MEMORY_LEN: usize = RINGS_AT + 2 * RING_LEN;

const SIDE_WORDS_LEN: usize = 256;
const DIRECTORIES_AT: usize = 4096;
const RINGS_AT: usize = DIRECTORIES_AT + 2 * DIRECTORY_LEN * 4;
const MAGIC: [u8; 4] = *b"CFRR";
const FLAG_IMM: u32 = 1;
const FLAG_WRITE: u32 = 2;
const FLAG_FLUSH: u32 = 4;
const FLAG_FLUSHED: u32 = 8;
const _: () = assert!(RING_LEN.is_power_of_two());
const _: () = assert!(RECORD_HEADER_LEN + MAX_MESSAGE_BYTES as usize <= RING_LEN);
const _: () = assert!(DIRECTORY_LEN * 4 == 4096);

/// What a ring record stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordOf {
    /// A message.
    Message,
    /// The immediate of a WRITE, without a message.
    Write,
    /// A FLUSH that the target has to do.
    Flush,
    /// The answer to a FLUSH.
    Flushed,
}

/// A parsed header of a ring record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// Bytes of the message; for a WRITE's immediate, bytes that the WRITE stored elsewhere.
    pub len: u32,
    /// Immediate data.
    pub imm: Option<u32>,
    /// What the record stands for.
    pub of: RecordOf,
}

/// Why a ring is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The peer's counter is impossible.
    #[error("a ring counter is {0} bytes off")]
    Counter(u64),
    /// A record is longer than the bytes that were produced.
    #[error("a ring record of {0} bytes is cut short")]
    Truncated(u64),
    /// A header field is impossible.
    #[error("ring record field `{0}` has an impossible value")]
    Field(&'static str),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawRecord {
    len: U32,
    flags: U32,
    imm: U32,
    magic: [u8; 4],
}
const _: () = assert!(size_of::<RawRecord>() == RECORD_HEADER_LEN);

impl RecordHeader {
    /// The header's bytes.
    pub fn encode(&self) -> [u8; RECORD_HEADER_LEN] {
        let flags = if self.imm.is_some() { FLAG_IMM } else { 0 }
            | match self.of {
                RecordOf::Message => 0,
                RecordOf::Write => FLAG_WRITE,
                RecordOf::Flush => FLAG_FLUSH,
                RecordOf::Flushed => FLAG_FLUSHED,
            };
        let raw = RawRecord {
            len: self.len.into(),
            flags: flags.into(),
            imm: self.imm.unwrap_or(0).into(),
            magic: MAGIC,
        };
        zerocopy::transmute!(raw)
    }

    /// Parses a header copied out of a ring.
    ///
    /// # Errors
    /// `RingError`, for a log line.
    pub fn parse(bytes: &[u8]) -> Result<Self, RingError> {
        let (raw, _) =
            RawRecord::read_from_prefix(bytes).map_err(|_| RingError::Truncated(bytes.len() as u64))?;
        let (len, flags, imm) = (raw.len.get(), raw.flags.get(), raw.imm.get());
        if raw.magic != MAGIC {
            return Err(RingError::Field("magic"));
        }
        let of = match (flags & !FLAG_IMM, flags & FLAG_IMM != 0) {
            (0, _) => RecordOf::Message,
            (FLAG_WRITE, true) => RecordOf::Write,
            (FLAG_FLUSH, false) => RecordOf::Flush,
            (FLAG_FLUSHED, false) => RecordOf::Flushed,
            _ => return Err(RingError::Field("flags")),
        };
        if flags & FLAG_IMM == 0 && imm != 0 {
            return Err(RingError::Field("imm"));
        }
        let fits = match of {
            RecordOf::Message => len <= MAX_MESSAGE_BYTES,
            RecordOf::Write => len <= MAX_TRANSFER_BYTES,
            RecordOf::Flush | RecordOf::Flushed => len as usize == FLUSH_LEN,
        };
        if !fits {
            return Err(RingError::Field("length"));
        }
        Ok(Self { len, imm: (flags & FLAG_IMM != 0).then_some(imm), of })
    }

    /// Bytes of message that follow in the ring.
    fn body_len(&self) -> usize {
        if self.of == RecordOf::Write { 0 } else { self.len as usize }
    }

    /// Bytes that the record takes in the ring.
    fn record_len(&self) -> u64 {
        (RECORD_HEADER_LEN + self.body_len()).next_multiple_of(16) as u64
    }
}

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Client,
    Server,
}

impl Side {
    pub(super) const fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }

    const fn words_at(self) -> usize {
        self as usize * SIDE_WORDS_LEN
    }

    const fn ring_at(self) -> usize {
        RINGS_AT + self as usize * RING_LEN
    }

    pub(super) const fn directory_at(self, index: usize) -> usize {
        DIRECTORIES_AT + self as usize * DIRECTORY_LEN * 4 + index * 4
    }
}

fn word(memory: &SharedMemory, side: Side, index: usize) -> &AtomicU64 {
    memory.atomic_u64(side.words_at() + index * 64)
}

/// Bytes put into the ring `side` produces.
pub(super) fn tail(memory: &SharedMemory, side: Side) -> &AtomicU64 {
    word(memory, side, 0)
}

/// Bytes taken by `side` from the ring it consumes.
pub(super) fn head(memory: &SharedMemory, side: Side) -> &AtomicU64 {
    word(memory, side, 1)
}

/// Not zero while `side` waits for space in the ring that it produces.
pub(super) fn waits(memory: &SharedMemory, side: Side) -> &AtomicU64 {
    word(memory, side, 2)
}

/// Not zero once `side` has closed; set after its last record.
pub(super) fn closed(memory: &SharedMemory, side: Side) -> &AtomicU64 {
    word(memory, side, 3)
}

/// The bytes behind a record's header.
#[derive(Clone, Copy)]
pub(super) enum Body<'a> {
    Empty,
    /// One string of bytes.
    Held(&'a Held<'a>),
    Bytes(&'a [u8]),
}

/// Cuts `len` bytes from `start` on in a ring into parts that lie in one piece, and do not wrap: the piece, and the part's offset in the memory of
/// the piece, in the ring, and its length.
fn each_part(
    held: &Held<'_>,
    start: usize,
    len: usize,
    mut part: impl FnMut(&Piece<'_>, usize, usize, usize),
) {
    let (mut at, mut left) = (start, len);
    for piece in held.pieces() {
        let taken = piece.len.min(left);
        let first = taken.min(RING_LEN - at);
        part(piece, piece.offset, at, first);
        part(piece, piece.offset + first, 0, taken - first);
        at = (at + taken) % RING_LEN;
        left -= taken;
    }
}

/// Puts one record into the ring that `side` produces, whose private tail is `own_tail`. `None`: no space.
pub(super) fn produce(
    memory: &SharedMemory,
    side: Side,
    own_tail: &mut u64,
    header: &RecordHeader,
    body: Body<'_>,
) -> Result<Option<()>, RingError> {
    let peer_head = head(memory, side.other()).load(Ordering::Acquire);
    let used = own_tail.wrapping_sub(peer_head);
    if used > RING_LEN as u64 {
        return Err(RingError::Counter(used));
    }
    if RING_LEN as u64 - used < header.record_len() {
        return Ok(None);
    }
    let at = (*own_tail % RING_LEN as u64) as usize;
    // Records are multiples of 16 bytes, so a header never wraps.
    memory.write(side.ring_at() + at, &header.encode());
    let start = (at + RECORD_HEADER_LEN) % RING_LEN;
    match body {
        Body::Empty => {}
        Body::Held(held) => each_part(held, start, header.body_len(), |piece, from, at, len| {
            piece.memory.copy_to(from, memory, side.ring_at() + at, len);
        }),
        Body::Bytes(bytes) => {
            let first = header.body_len().min(RING_LEN - start);
            memory.write(side.ring_at() + start, &bytes[..first]);
            memory.write(side.ring_at(), &bytes[first..header.body_len()]);
        }
    }
    *own_tail += header.record_len();
    tail(memory, side).store(*own_tail, Ordering::Release);
    Ok(Some(()))
}

/// The next record for `side`, whose private head is `own_head`; `None`: the ring is empty.
pub(super) fn peek(
    memory: &SharedMemory,
    side: Side,
    own_head: u64,
) -> Result<Option<RecordHeader>, RingError> {
    let produced = tail(memory, side.other()).load(Ordering::Acquire).wrapping_sub(own_head);
    if produced == 0 {
        return Ok(None);
    }
    if produced > RING_LEN as u64 || !produced.is_multiple_of(16) {
        return Err(RingError::Counter(produced));
    }
    let mut bytes = [0; RECORD_HEADER_LEN];
    memory.read(side.other().ring_at() + (own_head % RING_LEN as u64) as usize, &mut bytes);
    let header = RecordHeader::parse(&bytes)?;
    if header.record_len() > produced {
        return Err(RingError::Truncated(header.record_len()));
    }
    Ok(Some(header))
}

/// Copies the body of the flush record at `own_head` out of the ring.
pub(super) fn flush_body(memory: &SharedMemory, side: Side, own_head: u64) -> [u8; FLUSH_LEN] {
    let ring_at = side.other().ring_at();
    let start = (own_head as usize + RECORD_HEADER_LEN) % RING_LEN;
    let first = FLUSH_LEN.min(RING_LEN - start);
    let mut bytes = [0; FLUSH_LEN];
    memory.read(ring_at + start, &mut bytes[..first]);
    memory.read(ring_at, &mut bytes[first..]);
    bytes
}

/// Copies the message of the record at `own_head` to the target, as far as it goes, then frees its space.
pub(super) fn consume(
    memory: &SharedMemory,
    side: Side,
    own_head: &mut u64,
    header: &RecordHeader,
    target: Option<&Held<'_>>,
) {
    if let Some(target) = target {
        let ring_at = side.other().ring_at();
        let start = (*own_head as usize + RECORD_HEADER_LEN) % RING_LEN;
        each_part(target, start, header.body_len(), |piece, to, at, len| {
            memory.copy_to(ring_at + at, piece.memory, to, len);
        });
    }
    *own_head += header.record_len();
    head(memory, side).store(*own_head, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn golden_record() {
        let header = RecordHeader { len: 0x0102, imm: Some(0x0a0b_0c0d), of: RecordOf::Message };
        let bytes = [2, 1, 0, 0, 1, 0, 0, 0, 0x0d, 0x0c, 0x0b, 0x0a, b'C', b'F', b'R', b'R'];
        assert_eq!(header.encode(), bytes);
        assert_eq!(RecordHeader::parse(&bytes), Ok(header));
        for (of, flag) in [(RecordOf::Flush, 4), (RecordOf::Flushed, 8)] {
            let header = RecordHeader { len: 32, imm: None, of };
            let bytes = [32, 0, 0, 0, flag, 0, 0, 0, 0, 0, 0, 0, b'C', b'F', b'R', b'R'];
            assert_eq!(header.encode(), bytes);
            assert_eq!(RecordHeader::parse(&bytes), Ok(header));
            let mut short = bytes;
            short[0] = 31;
            assert_eq!(RecordHeader::parse(&short), Err(RingError::Field("length")));
        }
    }

    #[test]
    fn no_record_announces_more_than_there_can_be() {
        for (of, imm, most) in [
            (RecordOf::Message, None, MAX_MESSAGE_BYTES),
            (RecordOf::Message, Some(1), MAX_MESSAGE_BYTES),
            (RecordOf::Write, Some(1), MAX_TRANSFER_BYTES),
        ] {
            let parsed = |len| RecordHeader::parse(&RecordHeader { len, imm, of }.encode());
            assert_eq!(parsed(most), Ok(RecordHeader { len: most, imm, of }));
            for len in [most + 1, u32::MAX] {
                assert_eq!(parsed(len), Err(RingError::Field("length")), "{of:?}");
            }
        }
    }

    #[test]
    fn records_wrap_and_come_back_in_order() {
        let memory = SharedMemory::new("ring", MEMORY_LEN).expect("memory");
        let source = SharedMemory::new("source", 65536).expect("memory");
        let target = SharedMemory::new("target", 65536).expect("memory");
        let (mut own_tail, mut own_head) = (0, 0);
        for round in 0..200u32 {
            let len = (round * 7919) % 60_000 + 1;
            let bytes: Vec<u8> = (0..len).map(|index| (index + round) as u8).collect();
            source.write(0, &bytes);
            let header = RecordHeader { len, imm: None, of: RecordOf::Message };
            // In one piece, or gathered and scattered by different cuts.
            let len = len as usize;
            let cut =
                |memory, at: usize| Held::of(memory, &[(0, at.min(len)), (at.min(len), len - at.min(len))]);
            let (from, to) = match round % 2 {
                0 => (Held::of(&source, &[(0, len)]), Held::of(&target, &[(0, 65536)])),
                _ => (cut(&source, round as usize * 131), cut(&target, round as usize * 7)),
            };
            let body = Body::Held(&from);
            assert_eq!(produce(&memory, Side::Client, &mut own_tail, &header, body), Ok(Some(())));
            assert_eq!(peek(&memory, Side::Server, own_head), Ok(Some(header)));
            target.fill(0, 65536, 0);
            consume(&memory, Side::Server, &mut own_head, &header, Some(&to));
            let mut out = vec![0; len];
            target.read(0, &mut out);
            assert!(out == bytes, "round {round}");
            assert_eq!(peek(&memory, Side::Server, own_head), Ok(None));
        }
    }

    #[test]
    fn a_full_ring_takes_nothing_more() {
        let memory = SharedMemory::new("ring", MEMORY_LEN).expect("memory");
        let header = RecordHeader { len: 16, imm: None, of: RecordOf::Message };
        let mut own_tail = 0;
        for _ in 0..RING_LEN / 32 {
            assert_eq!(produce(&memory, Side::Server, &mut own_tail, &header, Body::Empty), Ok(Some(())));
        }
        assert_eq!(produce(&memory, Side::Server, &mut own_tail, &header, Body::Empty), Ok(None));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let _ = RecordHeader::parse(&bytes);
        }

        #[test]
        fn hostile_counters_and_records_never_leave_the_ring(
            peer_tail in prop_oneof![any::<u64>(), 0u64..300_000],
            own_head in (0u64..1 << 30).prop_map(|head| head * 16),
            len in any::<u32>(), flags in 0u32..17, delta in 0u64..20_000,
        ) {
            let memory = SharedMemory::new("ring", MEMORY_LEN).expect("memory");
            let target = SharedMemory::new("target", 65536).expect("memory");
            let raw = RawRecord { len: len.into(), flags: flags.into(), imm: 0.into(), magic: MAGIC };
            let at = Side::Client.ring_at() + (own_head % RING_LEN as u64) as usize;
            memory.write(at, raw.as_bytes());
            for hostile in [peer_tail, own_head.wrapping_add(delta * 16)] {
                tail(&memory, Side::Client).store(hostile, Ordering::Release);
                let mut own_head = own_head;
                if let Ok(Some(header)) = peek(&memory, Side::Server, own_head) {
                    let pieces = Held::of(&target, &[(100, 50), (1000, 60_000)]);
                    consume(&memory, Side::Server, &mut own_head, &header, Some(&pieces));
                }
            }
        }
    }
}
