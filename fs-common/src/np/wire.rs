//! Messages of the two-sided way (NP-RDMA section 3.2).
//!
//! Each is a head of 64 bytes, which bytes may follow. Numbers are little-endian.
//!
//! | offset | bytes | field    | hello | welcome             | read, write             | compare-swap, fetch-add | reply        |
//! |-------:|------:|----------|-------|---------------------|-------------------------|-------------------------|--------------|
//! | 0      | 4     | magic    | `CFNP` in all |||||
//! | 4      | 2     | version  | `NP_VERSION` in all |||||
//! | 6      | 1     | kind     | 1     | 2                   | 3, 4                    | 5, 6                    | 7            |
//! | 7      | 1     | status   |       |                     |                         |                         | see `Status` |
//! | 8      | 4     | tag      |       |                     | yes                     | yes                     | the request's |
//! | 12     | 4     | length   |       |                     | bytes of the access     | 8                       | bytes that follow |
//! | 16     | 8     | offset   |       | length of the region | in the region          | in the region           |              |
//! | 24     | 8     | first    |       | address of the region | address of the buffer | expected, or to add     | the old value |
//! | 32     | 8     | second   |       | address of the table |                        | to store                |              |
//! | 40     | 4     | rkey     |       | the region's        | the buffer's; 0: inline |                         |              |
//! | 44     | 4     | rkey 2   |       | the table's         |                         |                         |              |
//! | 48     | 1     | rights   |       | 1 read, 3 and write; 4 more: two-sided only |   |                         |              |
//! | 49     | 15    | reserved | zero in all |||||
//! | 64     |       |          |       | the signature, 32 bytes | inline WRITE: the bytes |                     | inline READ: the bytes |
//!
//! Fields that a kind does not use are zero, and so are the addresses and keys of a region that is two-sided only.

use crate::rdma::{PagedAccess, RemoteRange};
use crate::region::{MagicPattern, PATTERN_LEN};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Version of the messages.
pub const NP_VERSION: u16 = 1;
/// Bytes of a head (the paper's control commands have as many, section 4.1).
pub const NP_MESSAGE_LEN: usize = 64;
/// Most bytes that travel in a message: beyond that, a transfer of their own costs less (section 3.2).
pub const INLINE_MAX: usize = 1024;
/// Most bytes of one request. Longer accesses are asked for in pieces, which the target serves at the same time.
pub const PIECE_MAX: u32 = 64 << 10;
/// Requests of one peer that may be under way.
pub const RPC_DEPTH: usize = 64;
/// Bytes of a buffer for one message.
pub(super) const BUFFER_LEN: usize = NP_MESSAGE_LEN + INLINE_MAX;
const MAGIC: [u8; 4] = *b"CFNP";
/// The bit of `rights` of a region without a one-sided way.
const TWO_SIDED_ONLY: u8 = 4;

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// The initiator's first.
    Hello,
    /// The answer to it.
    Welcome(Welcome),
    /// What the optimistic way did not do.
    Request(Request),
    /// Its answer.
    Reply(Reply),
}

/// What an initiator must know of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The region.
    pub region: RemoteRange,
    /// The entries of its pages; their length follows from the region's.
    pub table_rkey: u32,
    /// Address of the first entry.
    pub table_address: u64,
    /// What its peers may do.
    pub access: PagedAccess,
    /// Whether there is a one-sided way. Where there is none, as to an RNIC that cannot look pages up, the addresses and keys are 0.
    pub one_sided: bool,
    /// What the signature page consists of.
    pub signature: MagicPattern,
}

/// An access that the target's processor is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The initiator's name for it.
    pub tag: u32,
    /// Offset in the region.
    pub offset: u64,
    /// What to do there.
    pub op: RequestOp,
}

/// What a request does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestOp {
    /// Answer with so many bytes.
    ReadInline(u32),
    /// WRITE so many bytes into the initiator's buffer, then answer.
    Read {
        /// Bytes.
        len: u32,
        /// The buffer's key.
        rkey: u32,
        /// Its address.
        address: u64,
    },
    /// Write these bytes.
    WriteInline(Vec<u8>),
    /// READ so many bytes from the initiator's buffer, and write them.
    Write {
        /// Bytes.
        len: u32,
        /// The buffer's key.
        rkey: u32,
        /// Its address.
        address: u64,
    },
    /// 64-bit compare and swap.
    CompareSwap {
        /// What must be there.
        expect: u64,
        /// What to store then.
        swap: u64,
    },
    /// 64-bit fetch and add.
    FetchAdd(u64),
}

impl RequestOp {
    /// Bytes of the region that it is about.
    pub fn len(&self) -> u64 {
        match self {
            Self::ReadInline(len) | Self::Read { len, .. } | Self::Write { len, .. } => u64::from(*len),
            Self::WriteInline(bytes) => bytes.len() as u64,
            Self::CompareSwap { .. } | Self::FetchAdd(_) => 8,
        }
    }

    /// Whether it is about no bytes; no message has such a request.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it changes the region.
    pub fn changes(&self) -> bool {
        !matches!(self, Self::ReadInline(_) | Self::Read { .. })
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Done.
    Done,
    /// The range does not lie in the region, or an atomic is not aligned.
    Range,
    /// The peer has no right to change the region.
    Rights,
    /// The device behind the region failed.
    Device,
    /// No page could leave DRAM.
    NoFrame,
}

impl Status {
    const ALL: [Self; 5] = [Self::Done, Self::Range, Self::Rights, Self::Device, Self::NoFrame];
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The request's name.
    pub tag: u32,
    /// How it ended.
    pub status: Status,
    /// What was there before an atomic.
    pub old: u64,
    /// What an inline READ found.
    pub bytes: Vec<u8>,
}

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// The length is not that of the message.
    #[error("a message of {0} bytes has the wrong length")]
    Length(usize),
    /// Not this protocol.
    #[error("wrong magic; the endpoint serves no memory region")]
    Magic,
    /// Another version.
    #[error(
        "the peer speaks version {0} of the protocol, this side {NP_VERSION}; run the same release on both"
    )]
    Version(u16),
    /// A kind this side does not know.
    #[error("unknown message kind {0}")]
    Kind(u8),
    /// A field that the kind does not use, or an impossible value.
    #[error("field `{0}` has an impossible value")]
    Field(&'static str),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    magic: [u8; 4],
    version: U16,
    kind: u8,
    status: u8,
    tag: U32,
    len: U32,
    offset: U64,
    first: U64,
    second: U64,
    rkey: U32,
    second_rkey: U32,
    rights: u8,
    reserved: [u8; 15],
}
const _: () = assert!(size_of::<Raw>() == NP_MESSAGE_LEN);

impl Message {
    /// The bytes to send.
    pub fn encode(&self) -> Vec<u8> {
        let mut raw = Raw::new_zeroed();
        raw.magic = MAGIC;
        raw.version = NP_VERSION.into();
        let mut tail: &[u8] = &[];
        let signature;
        match self {
            Self::Hello => raw.kind = 1,
            Self::Welcome(welcome) => {
                raw.kind = 2;
                raw.offset = welcome.region.len.into();
                raw.first = welcome.region.first_address.into();
                raw.second = welcome.table_address.into();
                raw.rkey = welcome.region.rkey.0.into();
                raw.second_rkey = welcome.table_rkey.into();
                raw.rights = if welcome.access == PagedAccess::Read { 1 } else { 3 }
                    | if welcome.one_sided { 0 } else { TWO_SIDED_ONLY };
                signature = welcome.signature.bytes();
                tail = &signature;
            }
            Self::Request(Request { tag, offset, op }) => {
                raw.tag = (*tag).into();
                raw.offset = (*offset).into();
                raw.len = (op.len() as u32).into();
                match op {
                    RequestOp::ReadInline(_) => raw.kind = 3,
                    RequestOp::WriteInline(bytes) => {
                        raw.kind = 4;
                        tail = bytes;
                    }
                    RequestOp::Read { rkey, address, .. } | RequestOp::Write { rkey, address, .. } => {
                        raw.kind = if op.changes() { 4 } else { 3 };
                        raw.rkey = (*rkey).into();
                        raw.first = (*address).into();
                    }
                    RequestOp::CompareSwap { expect, swap } => {
                        raw.kind = 5;
                        raw.first = (*expect).into();
                        raw.second = (*swap).into();
                    }
                    RequestOp::FetchAdd(add) => {
                        raw.kind = 6;
                        raw.first = (*add).into();
                    }
                }
            }
            Self::Reply(reply) => {
                raw.kind = 7;
                raw.status = reply.status as u8;
                raw.tag = reply.tag.into();
                raw.len = (reply.bytes.len() as u32).into();
                raw.first = reply.old.into();
                tail = &reply.bytes;
            }
        }
        let mut bytes = Vec::with_capacity(NP_MESSAGE_LEN + tail.len());
        bytes.extend_from_slice(raw.as_bytes());
        bytes.extend_from_slice(tail);
        bytes
    }

    /// Parses one message.
    ///
    /// # Errors
    /// `MessageError`, for a log line.
    pub fn parse(bytes: &[u8]) -> Result<Self, MessageError> {
        let (raw, tail) = Raw::ref_from_prefix(bytes).map_err(|_| MessageError::Length(bytes.len()))?;
        if raw.magic != MAGIC {
            return Err(MessageError::Magic);
        }
        if raw.version.get() != NP_VERSION {
            return Err(MessageError::Version(raw.version.get()));
        }
        let kind = raw.kind;
        if !(1..=7).contains(&kind) {
            return Err(MessageError::Kind(kind));
        }
        let zero = |name, is_used: bool, value: u64| {
            if !is_used && value != 0 { Err(MessageError::Field(name)) } else { Ok(()) }
        };
        let (len, rkey) = (raw.len.get(), raw.rkey.get());
        let is_access = kind == 3 || kind == 4;
        zero("status", kind == 7, raw.status.into())?;
        zero("tag", kind >= 3, raw.tag.get().into())?;
        zero("length", kind >= 3, len.into())?;
        zero("offset", (2..7).contains(&kind), raw.offset.get())?;
        zero("first", kind == 2 || kind >= 5 || is_access && rkey != 0, raw.first.get())?;
        zero("second", kind == 2 || kind == 5, raw.second.get())?;
        zero("rkey", kind == 2 || is_access, rkey.into())?;
        zero("rkey 2", kind == 2, raw.second_rkey.get().into())?;
        zero("rights", kind == 2, raw.rights.into())?;
        zero("reserved", false, raw.reserved.iter().fold(0, |all, byte| all | u64::from(*byte)))?;
        let follows = match kind {
            2 => PATTERN_LEN,
            4 if rkey == 0 => len as usize,
            7 => len as usize,
            _ => 0,
        };
        if tail.len() != follows || tail.len() > INLINE_MAX {
            return Err(MessageError::Length(bytes.len()));
        }
        let most = if rkey == 0 { INLINE_MAX as u32 } else { PIECE_MAX };
        if is_access && !(1..=most).contains(&len) || (kind == 5 || kind == 6) && len != 8 {
            return Err(MessageError::Field("length"));
        }
        let (tag, address) = (raw.tag.get(), raw.first.get());
        let request = |op| Ok(Self::Request(Request { tag, offset: raw.offset.get(), op }));
        match kind {
            1 => Ok(Self::Hello),
            2 => {
                let one_sided = raw.rights & TWO_SIDED_ONLY == 0;
                zero("first", one_sided, raw.first.get())?;
                zero("second", one_sided, raw.second.get())?;
                zero("rkey", one_sided, rkey.into())?;
                zero("rkey 2", one_sided, raw.second_rkey.get().into())?;
                let access = match raw.rights & !TWO_SIDED_ONLY {
                    1 => PagedAccess::Read,
                    3 => PagedAccess::ReadWrite,
                    _ => return Err(MessageError::Field("rights")),
                };
                let signature =
                    <[u8; PATTERN_LEN]>::try_from(tail).map_err(|_| MessageError::Length(bytes.len()))?;
                Ok(Self::Welcome(Welcome {
                    region: RemoteRange {
                        rkey: crate::ids::Rkey(rkey),
                        first_address: address,
                        len: raw.offset.get(),
                    },
                    table_rkey: raw.second_rkey.get(),
                    table_address: raw.second.get(),
                    access,
                    one_sided,
                    signature: MagicPattern::new(signature),
                }))
            }
            3 if rkey == 0 => request(RequestOp::ReadInline(len)),
            3 => request(RequestOp::Read { len, rkey, address }),
            4 if rkey == 0 => request(RequestOp::WriteInline(tail.to_vec())),
            4 => request(RequestOp::Write { len, rkey, address }),
            5 => request(RequestOp::CompareSwap { expect: address, swap: raw.second.get() }),
            6 => request(RequestOp::FetchAdd(address)),
            _ => {
                let status = Status::ALL.get(usize::from(raw.status));
                let status = *status.ok_or(MessageError::Field("status"))?;
                Ok(Self::Reply(Reply { tag, status, old: address, bytes: tail.to_vec() }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Rkey;
    use proptest::prelude::*;

    fn golden(kind: u8, fields: &[(usize, &[u8])], tail: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; NP_MESSAGE_LEN];
        bytes[..7].copy_from_slice(&[b'C', b'F', b'N', b'P', 1, 0, kind]);
        for (at, value) in fields {
            bytes[*at..*at + value.len()].copy_from_slice(value);
        }
        bytes.extend_from_slice(tail);
        bytes
    }

    fn check(message: Message, bytes: Vec<u8>) {
        assert_eq!(message.encode(), bytes, "{message:?}");
        assert_eq!(Message::parse(&bytes), Ok(message));
    }

    #[test]
    fn golden_bytes() {
        check(Message::Hello, golden(1, &[], &[]));
        let signature: [u8; PATTERN_LEN] = std::array::from_fn(|at| at as u8 + 1);
        check(
            Message::Welcome(Welcome {
                region: RemoteRange { rkey: Rkey(0x0a0b), first_address: 0x1000, len: 0x4000_0000 },
                table_rkey: 0x0c0d,
                table_address: 0x2040,
                access: PagedAccess::ReadWrite,
                one_sided: true,
                signature: MagicPattern::new(signature),
            }),
            golden(
                2,
                &[
                    (16, &[0, 0, 0, 0x40]),
                    (24, &[0, 0x10]),
                    (32, &[0x40, 0x20]),
                    (40, &[0x0b, 0x0a]),
                    (44, &[0x0d, 0x0c]),
                    (48, &[3]),
                ],
                &signature,
            ),
        );
        check(
            Message::Welcome(Welcome {
                region: RemoteRange { rkey: Rkey(0), first_address: 0, len: 0x4000_0000 },
                table_rkey: 0,
                table_address: 0,
                access: PagedAccess::Read,
                one_sided: false,
                signature: MagicPattern::new(signature),
            }),
            golden(2, &[(16, &[0, 0, 0, 0x40]), (48, &[5])], &signature),
        );
        let request = |op| Message::Request(Request { tag: 0x0102_0304, offset: 0x0506, op });
        let fixed: [(usize, &[u8]); 2] = [(8, &[4, 3, 2, 1]), (16, &[6, 5])];
        let with = |kind, more: &[(usize, &[u8])], tail: &[u8]| {
            let fields: Vec<_> = fixed.iter().chain(more).copied().collect();
            golden(kind, &fields, tail)
        };
        check(request(RequestOp::ReadInline(1024)), with(3, &[(12, &[0, 4])], &[]));
        check(
            request(RequestOp::Read { len: 0x1_0000, rkey: 7, address: 0x99 }),
            with(3, &[(12, &[0, 0, 1]), (24, &[0x99]), (40, &[7])], &[]),
        );
        check(request(RequestOp::WriteInline(vec![5, 6, 7])), with(4, &[(12, &[3])], &[5, 6, 7]));
        check(
            request(RequestOp::Write { len: 1, rkey: 7, address: 0 }),
            with(4, &[(12, &[1]), (40, &[7])], &[]),
        );
        check(
            request(RequestOp::CompareSwap { expect: 0x11, swap: 0x22 }),
            with(5, &[(12, &[8]), (24, &[0x11]), (32, &[0x22])], &[]),
        );
        check(request(RequestOp::FetchAdd(u64::MAX)), with(6, &[(12, &[8]), (24, &[0xff; 8])], &[]));
        check(
            Message::Reply(Reply { tag: 0x0102_0304, status: Status::Device, old: 9, bytes: vec![1, 2] }),
            golden(7, &[(7, &[3]), (8, &[4, 3, 2, 1]), (12, &[2]), (24, &[9])], &[1, 2]),
        );
    }

    #[test]
    fn what_no_message_has_is_refused() {
        let refused = |bytes: &[u8]| Message::parse(bytes).expect_err("refused");
        assert_eq!(refused(&golden(1, &[], &[])[..63]), MessageError::Length(63));
        assert_eq!(refused(&golden(1, &[(0, b"X")], &[])), MessageError::Magic);
        assert_eq!(refused(&golden(1, &[(4, &[9])], &[])), MessageError::Version(9));
        assert_eq!(refused(&golden(8, &[], &[])), MessageError::Kind(8));
        assert_eq!(refused(&golden(1, &[(63, &[1])], &[])), MessageError::Field("reserved"));
        assert_eq!(refused(&golden(3, &[(12, &[1, 4])], &[])), MessageError::Field("length"), "inline");
        assert_eq!(
            refused(&golden(3, &[(12, &[1, 0, 1]), (40, &[1])], &[])),
            MessageError::Field("length"),
            "a piece"
        );
        assert_eq!(refused(&golden(3, &[], &[])), MessageError::Field("length"), "nothing");
        assert_eq!(refused(&golden(4, &[(12, &[2])], &[1])), MessageError::Length(65));
        assert_eq!(refused(&golden(6, &[(12, &[4])], &[])), MessageError::Field("length"));
        assert_eq!(refused(&golden(7, &[(7, &[5])], &[])), MessageError::Field("status"));
        assert_eq!(refused(&golden(7, &[(12, &[1, 4])], &[0; 1025])), MessageError::Length(1089));
        assert_eq!(refused(&golden(2, &[(48, &[2])], &[0; 32])), MessageError::Field("rights"));
        assert_eq!(refused(&golden(2, &[(48, &[4])], &[0; 32])), MessageError::Field("rights"));
        for (at, name) in [(24, "first"), (32, "second"), (40, "rkey"), (44, "rkey 2")] {
            assert_eq!(refused(&golden(2, &[(48, &[7]), (at, &[1])], &[0; 32])), MessageError::Field(name));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(kind in 0u8..9, fields in prop::collection::vec((7usize..64, any::<u8>()), 0..6), tail in 0usize..40) {
            let fields: Vec<(usize, [u8; 1])> = fields.iter().map(|(at, value)| (*at, [*value])).collect();
            let fields: Vec<(usize, &[u8])> = fields.iter().map(|(at, value)| (*at, &value[..])).collect();
            let bytes = golden(kind, &fields, &vec![1; tail]);
            if let Ok(message) = Message::parse(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }
    }
}
