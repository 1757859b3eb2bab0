//! The fixed part of RPC messages: 48 bytes in both directions.
//!
//! Request:
//!
//! | offset | bytes | field    | meaning |
//! |-------:|------:|----------|---------|
//! | 0      | 4     | magic    | `CFRQ` |
//! | 4      | 2     | version  | `PROTOCOL_VERSION` |
//! | 6      | 2     | slot     | session slot |
//! | 8      | 4     | length   | bytes of body that follow |
//! | 12     | 4     | reserved | zero |
//! | 16     | 8     | seq      | sequence number within the slot |
//! | 24     | 8     | trace    | id of the FUSE request |
//! | 32     | 4     | uid      | caller |
//! | 36     | 4     | gid      | caller's group |
//! | 40     | 2     | umask    | caller's |
//! | 42     | 2     | flags    | 1: a change of contents takes set-id bits and capabilities from the file |
//! | 44     | 4     | reserved | zero |
//!
//! Reply: magic `CFRP`, then version, slot, length as above; at 12 the status (0: success); seq and trace as
//! above; 16 reserved bytes of zero.

use crate::ids::{SlotIndex, TraceId};
use crate::status::Status;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Version of the RPC protocol. 1: the first. 5: locks. 7: no rings. 10: windows of pages. 11: file regions that are handed over, write grants.
/// 14: atomics by request.
pub const PROTOCOL_VERSION: u16 = 14;
/// Bytes of either header.
pub const HEADER_LEN: usize = 48;
const REQUEST_MAGIC: [u8; 4] = *b"CFRQ";
const REPLY_MAGIC: [u8; 4] = *b"CFRP";
/// Bit of `flags`: see `RequestHeader::drops_privileges`.
const DROPS_PRIVILEGES: u16 = 1;
/// Bits a umask can have.
const UMASK_MAX: u16 = 0o777;

/// Why bytes are no header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Fewer bytes than a header has.
    #[error("message of {0} bytes is shorter than its header")]
    Truncated(usize),
    /// Not a message of this protocol.
    #[error("wrong magic {0:02x?}")]
    Magic([u8; 4]),
    /// A peer of another version.
    #[error("peer speaks RPC version {0}, this side {PROTOCOL_VERSION}; run the same release on both")]
    Version(u16),
    /// The body is shorter or longer than the header says.
    #[error("header announces {announced} body bytes, {present} are there")]
    Length {
        /// From the header.
        announced: u32,
        /// In the message.
        present: usize,
    },
    /// Reserved bytes are not zero.
    #[error("reserved bytes are not zero")]
    Reserved,
    /// A status this side does not know.
    #[error("unknown status {0}")]
    Status(u32),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawRequest {
    magic: [u8; 4],
    version: U16,
    slot: U16,
    length: U32,
    reserved: U32,
    seq: U64,
    trace: U64,
    uid: U32,
    gid: U32,
    umask: U16,
    flags: U16,
    reserved2: U32,
}
const _: () = assert!(size_of::<RawRequest>() == HEADER_LEN);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawReply {
    magic: [u8; 4],
    version: U16,
    slot: U16,
    length: U32,
    status: U32,
    seq: U64,
    trace: U64,
    reserved: [u8; 16],
}
const _: () = assert!(size_of::<RawReply>() == HEADER_LEN);

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Session slot the request uses.
    pub slot: SlotIndex,
    /// Sequence number within the slot; a retransmission carries the same.
    pub seq: u64,
    /// Joins the logs of client and server.
    pub trace: TraceId,
    /// The calling user.
    pub uid: u32,
    /// The caller's group.
    pub gid: u32,
    /// Permission bits that a new inode does not get, unless a default ACL decides.
    pub umask: u16,
    /// A change of contents takes set-id bits and capabilities from the file, because the caller may not keep them.
    pub drops_privileges: bool,
}

impl RequestHeader {
    /// Header bytes for a body of `body_len` bytes.
    pub fn encode(&self, body_len: u32) -> [u8; HEADER_LEN] {
        let raw = RawRequest {
            magic: REQUEST_MAGIC,
            version: PROTOCOL_VERSION.into(),
            slot: self.slot.0.into(),
            length: body_len.into(),
            reserved: 0.into(),
            seq: self.seq.into(),
            trace: self.trace.0.into(),
            uid: self.uid.into(),
            gid: self.gid.into(),
            umask: self.umask.into(),
            flags: if self.drops_privileges { DROPS_PRIVILEGES } else { 0 }.into(),
            reserved2: 0.into(),
        };
        zerocopy::transmute!(raw)
    }

    /// Splits a message into header and body.
    ///
    /// # Errors
    /// [`HeaderError`] says what is wrong with the bytes.
    pub fn parse(message: &[u8]) -> Result<(Self, &[u8]), HeaderError> {
        let Ok((raw, body)) = RawRequest::ref_from_prefix(message) else {
            return Err(HeaderError::Truncated(message.len()));
        };
        check(raw.magic, REQUEST_MAGIC, raw.version.get(), raw.length.get(), body)?;
        let (umask, flags) = (raw.umask.get(), raw.flags.get());
        let unknown = umask & !UMASK_MAX != 0 || flags & !DROPS_PRIVILEGES != 0;
        if unknown || raw.reserved.get() != 0 || raw.reserved2.get() != 0 {
            return Err(HeaderError::Reserved);
        }
        let header = Self {
            slot: SlotIndex(raw.slot.get()),
            seq: raw.seq.get(),
            trace: TraceId(raw.trace.get()),
            uid: raw.uid.get(),
            gid: raw.gid.get(),
            umask,
            drops_privileges: flags & DROPS_PRIVILEGES != 0,
        };
        Ok((header, body))
    }
}

/// A reply's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyHeader {
    /// Slot of the request.
    pub slot: SlotIndex,
    /// Sequence number of the request.
    pub seq: u64,
    /// Trace id of the request.
    pub trace: TraceId,
    /// The result of the request.
    pub result: Result<(), Status>,
}

impl ReplyHeader {
    /// Header bytes for a body of `body_len` bytes.
    pub fn encode(&self, body_len: u32) -> [u8; HEADER_LEN] {
        let raw = RawReply {
            magic: REPLY_MAGIC,
            version: PROTOCOL_VERSION.into(),
            slot: self.slot.0.into(),
            length: body_len.into(),
            status: self.result.err().map_or(0, Status::code).into(),
            seq: self.seq.into(),
            trace: self.trace.0.into(),
            reserved: [0; 16],
        };
        zerocopy::transmute!(raw)
    }

    /// Splits a message into header and body.
    ///
    /// # Errors
    /// [`HeaderError`] says what is wrong with the bytes.
    pub fn parse(message: &[u8]) -> Result<(Self, &[u8]), HeaderError> {
        let Ok((raw, body)) = RawReply::ref_from_prefix(message) else {
            return Err(HeaderError::Truncated(message.len()));
        };
        check(raw.magic, REPLY_MAGIC, raw.version.get(), raw.length.get(), body)?;
        if raw.reserved != [0; 16] {
            return Err(HeaderError::Reserved);
        }
        let result = match raw.status.get() {
            0 => Ok(()),
            code => Err(Status::from_code(code).ok_or(HeaderError::Status(code))?),
        };
        let header = Self {
            slot: SlotIndex(raw.slot.get()),
            seq: raw.seq.get(),
            trace: TraceId(raw.trace.get()),
            result,
        };
        Ok((header, body))
    }
}

fn check(
    magic: [u8; 4],
    expected: [u8; 4],
    version: u16,
    length: u32,
    body: &[u8],
) -> Result<(), HeaderError> {
    if magic != expected {
        return Err(HeaderError::Magic(magic));
    }
    if version != PROTOCOL_VERSION {
        return Err(HeaderError::Version(version));
    }
    if length as usize != body.len() {
        return Err(HeaderError::Length { announced: length, present: body.len() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: RequestHeader = RequestHeader {
        slot: SlotIndex(2),
        seq: 3,
        trace: TraceId(4),
        uid: 5,
        gid: 6,
        umask: 0o722,
        drops_privileges: true,
    };

    #[test]
    fn golden_request_header() {
        let mut expected = Vec::new();
        expected.extend_from_slice(b"CFRQ");
        expected.extend_from_slice(&[14, 0, 2, 0]); // version, slot
        expected.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]); // length, reserved
        expected.extend_from_slice(&3u64.to_le_bytes()); // seq
        expected.extend_from_slice(&4u64.to_le_bytes()); // trace
        expected.extend_from_slice(&[5, 0, 0, 0, 6, 0, 0, 0]); // uid, gid
        expected.extend_from_slice(&[0xd2, 1, 1, 0]); // umask, flags
        expected.extend_from_slice(&[0; 4]); // reserved
        assert_eq!(REQUEST.encode(1).to_vec(), expected);
        expected.push(0xaa);
        assert_eq!(RequestHeader::parse(&expected), Ok((REQUEST, &[0xaau8][..])));
    }

    #[test]
    fn golden_reply_header() {
        let reply =
            ReplyHeader { slot: SlotIndex(2), seq: 3, trace: TraceId(4), result: Err(Status::Exists) };
        let mut expected = Vec::new();
        expected.extend_from_slice(b"CFRP");
        expected.extend_from_slice(&[14, 0, 2, 0, 0, 0, 0, 0]); // version, slot, length
        expected.extend_from_slice(&[2, 0, 0, 0]); // status: Exists
        expected.extend_from_slice(&3u64.to_le_bytes());
        expected.extend_from_slice(&4u64.to_le_bytes());
        expected.extend_from_slice(&[0; 16]);
        assert_eq!(reply.encode(0).to_vec(), expected);
        assert_eq!(ReplyHeader::parse(&expected), Ok((reply, &[][..])));
    }

    #[test]
    fn each_damage_has_its_error() {
        let good = REQUEST.encode(0);
        assert_eq!(RequestHeader::parse(&good[..47]), Err(HeaderError::Truncated(47)));
        let damaged = |at: usize, byte: u8| {
            let mut bytes = good;
            bytes[at] = byte;
            RequestHeader::parse(&bytes).map(|_| ()).expect_err("damaged")
        };
        assert_eq!(damaged(0, b'X'), HeaderError::Magic(*b"XFRQ"));
        assert_eq!(damaged(4, 8), HeaderError::Version(8));
        assert_eq!(damaged(8, 1), HeaderError::Length { announced: 1, present: 0 });
        assert_eq!(damaged(12, 1), HeaderError::Reserved);
        // A umask of more than permission bits, an unknown flag, and a reserved byte.
        for (at, byte) in [(41, 2), (42, 2), (43, 1), (44, 1)] {
            assert_eq!(damaged(at, byte), HeaderError::Reserved, "{byte} at {at}");
        }
    }
}
