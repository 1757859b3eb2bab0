//! Packets of the `tcp` link: a fixed header of 64 bytes and a payload.
//!
//! | offset | bytes | field    | meaning |
//! |-------:|------:|----------|---------|
//! | 0      | 4     | magic    | `CFNF` |
//! | 4      | 1     | version  | `PACKET_VERSION` |
//! | 5      | 1     | kind     | [`PacketKind`] |
//! | 6      | 2     | flags    | 1: immediate data; 2: acknowledge when done |
//! | 8      | 4     | length   | bytes of payload that follow |
//! | 12     | 4     | crc      | CRC32C of the payload |
//! | 16     | 8     | sequence | counts a side's requests from 1; a reply repeats its request's |
//! | 24     | 8     | key      | rkey or filekey |
//! | 32     | 8     | offset   | byte offset in the region or file; of a bitmap, its first page |
//! | 40     | 8     | first    | expected value, addend, or an atomic's old value; bytes a FLUSH covers; where an APPEND placed its bytes |
//! | 48     | 8     | second   | value to swap in; of a FLUSH 1: to visibility, 2: to persistence |
//! | 56     | 4     | word     | immediate data; of a Nak, the status; of a READ, the bytes it asks for |
//! | 60     | 4     | header   | CRC32C of the 60 bytes before |
//!
//! `PacketKind::uses` lists the fields of each kind; all others must be zero.
//!
//! The header has a checksum of its own because a length must be right before it is used: a reader that waits for the
//! payload of a damaged length may wait for ever. The payload's checksum is under the header's, so a payload cannot pass
//! for another packet's.

use crate::rdma::soft::queue::{MAX_MESSAGE_BYTES, MAX_TRANSFER_BYTES};
use crate::rdma::verbs::{Placement, WcStatus};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of the packet protocol. 1: the first. 2: FLUSH, messages of 68 KiB. 3: headers have a checksum of their own. 4: atomics on files, APPEND. 5: a
/// Nak for lack of space.
pub const PACKET_VERSION: u8 = 5;
/// Bytes of a header.
pub const PACKET_HEADER_LEN: usize = 64;
/// Where a header has the bytes of payload that follow, little-endian.
pub(super) const PACKET_LEN_AT: usize = 8;
/// Payload of Hello and Welcome: largest message, largest transfer (u32 each), eight bytes reserved as zero.
pub const HELLO_LEN: usize = 16;
/// Longest reason in a Refuse.
pub const MAX_REASON_LEN: usize = 256;
/// The first bytes of each packet.
pub(super) const MAGIC: [u8; 4] = *b"CFNF";
const FLAG_IMM: u16 = 1;
const FLAG_ACK: u16 = 2;
const HEADER_CRC_AT: usize = 60;

/// The kind of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum PacketKind {
    /// Client's first packet.
    Hello = 1,
    /// Server accepts.
    Welcome = 2,
    /// Server refuses; the payload says why.
    Refuse = 3,
    /// Two-sided message.
    Send = 4,
    /// One-sided write to memory; with immediate data it consumes a receive.
    Write = 5,
    /// One-sided read of memory.
    ReadMemory = 6,
    /// One-sided read of a file.
    ReadFile = 7,
    /// One-sided read of a file's page bitmap.
    ReadBitmap = 8,
    /// Compare and swap.
    CompareSwap = 9,
    /// Fetch and add.
    FetchAdd = 10,
    /// Bytes of a READ.
    ReadReply = 11,
    /// Old value of an atomic.
    AtomicReply = 12,
    /// A write was done.
    WriteAck = 13,
    /// A request was refused; the connection ends behind it.
    Nak = 14,
    /// Take a range to visibility or to persistence.
    Flush = 15,
    /// A flush was done.
    FlushAck = 16,
    /// One-sided write to a file.
    WriteFile = 17,
    /// Compare and swap in a file.
    CompareSwapFile = 18,
    /// Fetch and add in a file.
    FetchAddFile = 19,
    /// One-sided append to a file.
    Append = 20,
    /// An append was done.
    AppendReply = 21,
}

/// The fields that a kind uses.
struct Uses {
    imm: bool,
    ack: bool,
    max_payload: u32,
    key: bool,
    offset: bool,
    first: bool,
    second: bool,
    wanted: bool,
}

const NOTHING: Uses = Uses {
    imm: false,
    ack: false,
    max_payload: 0,
    key: false,
    offset: false,
    first: false,
    second: false,
    wanted: false,
};

impl PacketKind {
    fn from_number(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::Hello,
            2 => Self::Welcome,
            3 => Self::Refuse,
            4 => Self::Send,
            5 => Self::Write,
            6 => Self::ReadMemory,
            7 => Self::ReadFile,
            8 => Self::ReadBitmap,
            9 => Self::CompareSwap,
            10 => Self::FetchAdd,
            11 => Self::ReadReply,
            12 => Self::AtomicReply,
            13 => Self::WriteAck,
            14 => Self::Nak,
            15 => Self::Flush,
            16 => Self::FlushAck,
            17 => Self::WriteFile,
            18 => Self::CompareSwapFile,
            19 => Self::FetchAddFile,
            20 => Self::Append,
            21 => Self::AppendReply,
            _ => return None,
        })
    }

    /// The table of fields by kind.
    const fn uses(self) -> Uses {
        match self {
            Self::Hello | Self::Welcome => Uses { max_payload: HELLO_LEN as u32, ..NOTHING },
            Self::Refuse => Uses { max_payload: MAX_REASON_LEN as u32, ..NOTHING },
            Self::Send => Uses { imm: true, max_payload: MAX_MESSAGE_BYTES, ..NOTHING },
            Self::Write => Uses {
                imm: true,
                ack: true,
                max_payload: MAX_TRANSFER_BYTES,
                key: true,
                offset: true,
                ..NOTHING
            },
            Self::WriteFile => {
                Uses { ack: true, max_payload: MAX_TRANSFER_BYTES, key: true, offset: true, ..NOTHING }
            }
            Self::ReadMemory | Self::ReadFile | Self::ReadBitmap => {
                Uses { key: true, offset: true, wanted: true, ..NOTHING }
            }
            Self::CompareSwap | Self::CompareSwapFile | Self::Flush => {
                Uses { key: true, offset: true, first: true, second: true, ..NOTHING }
            }
            Self::FetchAdd | Self::FetchAddFile => Uses { key: true, offset: true, first: true, ..NOTHING },
            Self::Append => Uses { max_payload: MAX_TRANSFER_BYTES, key: true, ..NOTHING },
            Self::ReadReply => Uses { max_payload: MAX_TRANSFER_BYTES, ..NOTHING },
            Self::AtomicReply | Self::AppendReply => Uses { first: true, ..NOTHING },
            Self::WriteAck | Self::Nak | Self::FlushAck => NOTHING,
        }
    }

    /// Whether this is a request (and takes a sequence number), not a reply or part of the handshake.
    pub const fn is_request(self) -> bool {
        let number = self as u8;
        (number >= Self::Send as u8 && number <= Self::FetchAdd as u8)
            || matches!(
                self,
                Self::Flush | Self::WriteFile | Self::CompareSwapFile | Self::FetchAddFile | Self::Append
            )
    }
}

/// The number of a placement in a FLUSH packet.
pub const fn placement_number(placement: Placement) -> u64 {
    match placement {
        Placement::Visibility => 1,
        Placement::Persistence => 2,
    }
}

/// The placement of a number.
pub const fn placement(number: u64) -> Option<Placement> {
    match number {
        1 => Some(Placement::Visibility),
        2 => Some(Placement::Persistence),
        _ => None,
    }
}

/// A parsed packet header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketHeader {
    /// Its kind.
    pub kind: PacketKind,
    /// Immediate data.
    pub imm: Option<u32>,
    /// The sender asks for an acknowledgement.
    pub ack: bool,
    /// Bytes of payload.
    pub payload_len: u32,
    /// Number of the request.
    pub sequence: u64,
    /// rkey or filekey.
    pub key: u64,
    /// Offset in the region or file.
    pub offset: u64,
    /// Expected value, addend or old value; a FLUSH's length; an APPEND's place.
    pub first: u64,
    /// Value to swap in; a FLUSH's placement.
    pub second: u64,
    /// The status of a Nak.
    pub status: Option<WcStatus>,
    /// Bytes a READ asks for.
    pub wanted: u32,
}

/// Why bytes are no packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// Fewer bytes than a header has.
    #[error("{0} bytes are shorter than a packet header")]
    Truncated(usize),
    /// Not this protocol.
    #[error("wrong magic; the peer does not speak cuttlefs")]
    Magic,
    /// Another version.
    #[error("the peer speaks packet version {0}, this side {PACKET_VERSION}; run the same release on both")]
    Version(u8),
    /// A kind this side does not know.
    #[error("unknown packet kind {0}")]
    Kind(u8),
    /// A field the kind does not use, or an impossible value.
    #[error("packet field `{0}` has an impossible value")]
    Field(&'static str),
    /// The kind may not have as much payload, or ask for as many bytes.
    #[error("a packet with {0} bytes is oversized")]
    Oversized(u32),
    /// Its header was damaged on the way.
    #[error("the header's checksum does not match")]
    HeaderChecksum,
    /// Its payload was damaged on the way.
    #[error("the payload's checksum does not match")]
    Checksum,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    magic: [u8; 4],
    version: u8,
    kind: u8,
    flags: U16,
    length: U32,
    crc: U32,
    sequence: U64,
    key: U64,
    offset: U64,
    first: U64,
    second: U64,
    word: U32,
    header_crc: U32,
}
const _: () = assert!(size_of::<Raw>() == PACKET_HEADER_LEN);

fn status_number(status: WcStatus) -> u32 {
    match status {
        WcStatus::RemoteInvalid => 2,
        WcStatus::RemoteOperation => 3,
        WcStatus::RemoteNoSpace => 4,
        _ => 1,
    }
}

/// The checksum of a header, over all bytes before its place.
pub fn header_checksum(header: &[u8; PACKET_HEADER_LEN]) -> u32 {
    crc32c::crc32c(&header[..HEADER_CRC_AT])
}

impl PacketHeader {
    /// A packet with only a kind and a sequence number.
    pub const fn new(kind: PacketKind, sequence: u64) -> Self {
        Self {
            kind,
            imm: None,
            ack: false,
            payload_len: 0,
            sequence,
            key: 0,
            offset: 0,
            first: 0,
            second: 0,
            status: None,
            wanted: 0,
        }
    }

    /// Writes the header, with both checksums, in front of the payload that is already in `packet`.
    pub fn seal(&self, packet: &mut [u8]) {
        let (header, payload) =
            packet.split_first_chunk_mut::<PACKET_HEADER_LEN>().expect("a packet has a header");
        assert_eq!(payload.len(), self.payload_len as usize, "a packet is sealed whole");
        let flags = if self.imm.is_some() { FLAG_IMM } else { 0 } | if self.ack { FLAG_ACK } else { 0 };
        let raw = Raw {
            magic: MAGIC,
            version: PACKET_VERSION,
            kind: self.kind as u8,
            flags: flags.into(),
            length: self.payload_len.into(),
            crc: crc32c::crc32c(payload).into(),
            sequence: self.sequence.into(),
            key: self.key.into(),
            offset: self.offset.into(),
            first: self.first.into(),
            second: self.second.into(),
            word: self.imm.or(self.status.map(status_number)).unwrap_or(self.wanted).into(),
            header_crc: 0.into(),
        };
        header.copy_from_slice(raw.as_bytes());
        let crc = header_checksum(header);
        header[HEADER_CRC_AT..].copy_from_slice(&crc.to_le_bytes());
    }

    /// Parses a header, after checking its checksum. [`verify`] checks the payload's once it is there. Lengths are bounded here, so that nobody waits
    /// or makes room for a payload that will be refused.
    ///
    /// # Errors
    /// `PacketError`, for a log line.
    pub fn parse(bytes: &[u8]) -> Result<Self, PacketError> {
        let header = bytes.first_chunk::<PACKET_HEADER_LEN>().ok_or(PacketError::Truncated(bytes.len()))?;
        let raw: &Raw = zerocopy::transmute_ref!(header);
        if raw.magic != MAGIC {
            return Err(PacketError::Magic);
        }
        if raw.version != PACKET_VERSION {
            return Err(PacketError::Version(raw.version));
        }
        if raw.header_crc.get() != header_checksum(header) {
            return Err(PacketError::HeaderChecksum);
        }
        let kind = PacketKind::from_number(raw.kind).ok_or(PacketError::Kind(raw.kind))?;
        let uses = kind.uses();
        let flags = raw.flags.get();
        let allowed = if uses.imm { FLAG_IMM } else { 0 } | if uses.ack { FLAG_ACK } else { 0 };
        if flags & !allowed != 0 {
            return Err(PacketError::Field("flags"));
        }
        if raw.length.get() > uses.max_payload {
            return Err(PacketError::Oversized(raw.length.get()));
        }
        if matches!(kind, PacketKind::Hello | PacketKind::Welcome) && raw.length.get() as usize != HELLO_LEN {
            return Err(PacketError::Field("length"));
        }
        let word = raw.word.get();
        if uses.wanted && word > MAX_TRANSFER_BYTES {
            return Err(PacketError::Oversized(word));
        }
        let handshake = (kind as u8) < PacketKind::Send as u8;
        let unused = [
            ("sequence", handshake, raw.sequence.get()),
            ("key", !uses.key, raw.key.get()),
            ("offset", !uses.offset, raw.offset.get()),
            ("first", !uses.first, raw.first.get()),
            ("second", !uses.second, raw.second.get()),
            ("word", flags & FLAG_IMM == 0 && kind != PacketKind::Nak && !uses.wanted, word.into()),
        ];
        if let Some((name, ..)) = unused.iter().find(|(_, unused, value)| *unused && *value != 0) {
            return Err(PacketError::Field(name));
        }
        if kind == PacketKind::Flush {
            if raw.first.get() > u64::from(u32::MAX) {
                return Err(PacketError::Field("first"));
            }
            if placement(raw.second.get()).is_none() {
                return Err(PacketError::Field("second"));
            }
        }
        let status = match (kind, word) {
            (PacketKind::Nak, 1) => Some(WcStatus::RemoteAccess),
            (PacketKind::Nak, 2) => Some(WcStatus::RemoteInvalid),
            (PacketKind::Nak, 3) => Some(WcStatus::RemoteOperation),
            (PacketKind::Nak, 4) => Some(WcStatus::RemoteNoSpace),
            (PacketKind::Nak, _) => return Err(PacketError::Field("word")),
            _ => None,
        };
        Ok(Self {
            kind,
            imm: (flags & FLAG_IMM != 0).then_some(word),
            ack: flags & FLAG_ACK != 0,
            payload_len: raw.length.get(),
            sequence: raw.sequence.get(),
            key: raw.key.get(),
            offset: raw.offset.get(),
            first: raw.first.get(),
            second: raw.second.get(),
            status,
            wanted: if uses.wanted { word } else { 0 },
        })
    }
}

/// Checks the payload of a whole packet whose header was parsed.
///
/// # Errors
/// `PacketError::Truncated` or `PacketError::Checksum`.
pub fn verify(packet: &[u8]) -> Result<(), PacketError> {
    let (header, payload) =
        packet.split_first_chunk::<PACKET_HEADER_LEN>().ok_or(PacketError::Truncated(packet.len()))?;
    let raw: &Raw = zerocopy::transmute_ref!(header);
    if raw.crc.get() == crc32c::crc32c(payload) { Ok(()) } else { Err(PacketError::Checksum) }
}

/// A whole packet with a payload.
pub fn build(mut header: PacketHeader, payload: &[u8]) -> Vec<u8> {
    header.payload_len = payload.len() as u32;
    let mut packet = vec![0; PACKET_HEADER_LEN + payload.len()];
    packet[PACKET_HEADER_LEN..].copy_from_slice(payload);
    header.seal(&mut packet);
    packet
}

/// Payload of Hello and Welcome.
pub fn hello_payload() -> [u8; HELLO_LEN] {
    let mut payload = [0; HELLO_LEN];
    payload[..4].copy_from_slice(&MAX_MESSAGE_BYTES.to_le_bytes());
    payload[4..8].copy_from_slice(&MAX_TRANSFER_BYTES.to_le_bytes());
    payload
}

#[cfg(test)]
#[path = "packet_tests.rs"]
mod tests;
