//! Early acknowledgement on the wire: small writes that are safe in a ring before the server has executed them.
//!
//! A server whose answers are durable may offer rings at attach (`Attached::early`). A mount then posts small writes of
//! regular files as durable requests (`rpc::durable`) and goes on once they are persistent; the answer comes later.
//! docs/durable-rpc.md has the rules, this file the numbers and bytes both sides share.
//!
//! Body of a request; the bytes to be written follow:
//!
//! | offset | bytes | field    | meaning |
//! |-------:|------:|----------|---------|
//! | 0      | 16    | client   | the client's own id, not the ring's |
//! | 16     | 8     | ino      | a regular file |
//! | 24     | 8     | offset   | all ones: at the end of the file, wherever that is by then |
//! | 32     | 2     | ring     | which of the client's rings: `ring_of(ino)` |
//! | 34     | 6     | reserved | zero |
//!
//! Answer: offset, size of the file, its change counter, 8 bytes each. Its status is 0, else a `Status::code`; the body
//! is empty then.
//!
//! # Invariants
//! * A file's early writes go to one ring, and a ring's records are executed in order. So the last number a ring has
//!   executed says which of its records were.

use super::durable::{Kind, Settings};
use super::{MAX_INLINE_BYTES, SLOTS_PER_SESSION};
use crate::ids::{ClientId, InodeNo, MAX_FILE_SIZE, PAGE_SIZE, SlotIndex};
use crate::rdma::Endpoint;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::Duration;
use zerocopy::little_endian::{U16, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Largest write that is acknowledged early; what a message carries inline.
pub const EARLY_WRITE_MAX: usize = MAX_INLINE_BYTES;
/// Rings of one client. A ring is executed one record after the other, so this is how many files of a client are
/// written to at a time.
pub const RINGS_PER_CLIENT: u16 = 4;
/// Bytes before those to be written.
pub const EARLY_HEADER_LEN: usize = 40;
/// Bytes of an answer.
pub const EARLY_ANSWER_LEN: usize = 24;
/// Early writes of one ring that were posted and not answered. The server keeps space for so many.
pub const EARLY_UNANSWERED_MAX: usize = 64;
/// Of the largest early writes, how many a ring has room for.
pub const EARLY_RING_DEPTH: usize = 64;
/// Pool pages one early write takes at most: it may begin and end within a page.
pub const EARLY_WRITE_PAGES_MAX: u64 = (EARLY_WRITE_MAX / PAGE_SIZE + 1) as u64;
/// How long a write waits for room in its ring before it goes the ordinary way.
const PATIENCE: Duration = Duration::from_secs(2);
/// An offset no write can have: the end of the file.
const AT_END: u64 = u64::MAX;
const _: () = assert!(MAX_FILE_SIZE < AT_END);

/// The slot under which a ring's requests are remembered: behind those of the session.
pub const fn ring_slot(ring: u16) -> SlotIndex {
    SlotIndex(SLOTS_PER_SESSION + ring)
}

/// The ring a file's early writes go to.
pub fn ring_of(ino: InodeNo) -> u16 {
    (ino.0 % u64::from(RINGS_PER_CLIENT)) as u16
}

/// Who a ring belongs to, as far as the durable connection and the ring's file are concerned.
pub fn ring_client(client: ClientId, ring: u16) -> ClientId {
    ClientId(client.0.wrapping_add(1 + u128::from(ring)))
}

/// How both sides make a ring.
pub fn early_settings(kind: Kind) -> Settings {
    Settings {
        answers: EARLY_UNANSWERED_MAX,
        depth: EARLY_RING_DEPTH,
        patience: PATIENCE,
        ..Settings::new(kind, EARLY_HEADER_LEN + EARLY_WRITE_MAX, EARLY_ANSWER_LEN)
    }
}

/// What a server offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EarlyOffer {
    /// How requests become persistent over this link.
    pub kind: Kind,
    /// Where rings are.
    pub door: EarlyDoor,
}

/// Where a server's rings are reached, as seen from the endpoint of the connection that was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EarlyDoor {
    /// `tcp`: the same host, this port.
    Port(u16),
    /// `unix`, `shm`: the same path with `.rings` behind it.
    Beside,
}

impl EarlyDoor {
    /// The endpoint it means; `None` if it does not fit the link.
    pub fn endpoint(&self, of: &Endpoint) -> Option<Endpoint> {
        let beside = |path: &Path| {
            let mut name = path.as_os_str().to_owned();
            name.push(".rings");
            name.into()
        };
        match (self, of) {
            (Self::Port(port), Endpoint::Tcp { host, .. }) => {
                Some(Endpoint::Tcp { host: host.clone(), port: *port })
            }
            (Self::Beside, Endpoint::Unix(path)) => Some(Endpoint::Unix(beside(path))),
            (Self::Beside, Endpoint::Shm(path)) => Some(Endpoint::Shm(beside(path))),
            _ => None,
        }
    }
}

/// Why bytes are no early write, or no answer to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EarlyError {
    /// Shorter than its header, or than an answer.
    #[error("{0} bytes are too few")]
    Truncated(usize),
    /// More than may be written early.
    #[error("{0} bytes are too many")]
    TooLong(usize),
    /// An impossible value.
    #[error("field `{0}` has an impossible value")]
    Field(&'static str),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawWrite {
    client: U128,
    ino: U64,
    offset: U64,
    ring: U16,
    reserved: [u8; 6],
}
const _: () = assert!(size_of::<RawWrite>() == EARLY_HEADER_LEN);

/// A write that is acknowledged before it is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlyWrite<'a> {
    /// Whose.
    pub client: ClientId,
    /// In which of its rings.
    pub ring: u16,
    /// The file.
    pub ino: InodeNo,
    /// Where; `None`: at the end.
    pub at: Option<u64>,
    /// The bytes.
    pub bytes: &'a [u8],
}

impl<'a> EarlyWrite<'a> {
    /// Appends its bytes to `out`.
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        let raw = RawWrite {
            client: self.client.0.into(),
            ino: self.ino.0.into(),
            offset: self.at.unwrap_or(AT_END).into(),
            ring: self.ring.into(),
            reserved: [0; 6],
        };
        out.extend_from_slice(raw.as_bytes());
        out.extend_from_slice(self.bytes);
    }

    /// Parses a request's body.
    ///
    /// # Errors
    /// [`EarlyError`]. What parses is within every bound, and in the ring its file belongs to.
    pub fn parse(body: &'a [u8]) -> Result<Self, EarlyError> {
        let (raw, bytes) = RawWrite::ref_from_prefix(body).map_err(|_| EarlyError::Truncated(body.len()))?;
        if bytes.len() > EARLY_WRITE_MAX {
            return Err(EarlyError::TooLong(bytes.len()));
        }
        if bytes.is_empty() {
            return Err(EarlyError::Field("bytes"));
        }
        if raw.reserved != [0; 6] {
            return Err(EarlyError::Field("reserved"));
        }
        let ino = InodeNo(raw.ino.get());
        if raw.ring.get() != ring_of(ino) {
            return Err(EarlyError::Field("ring"));
        }
        let at = Some(raw.offset.get()).filter(|offset| *offset != AT_END);
        if at.is_some_and(|offset| offset > MAX_FILE_SIZE - bytes.len() as u64) {
            return Err(EarlyError::Field("offset"));
        }
        Ok(Self { client: ClientId(raw.client.get()), ring: raw.ring.get(), ino, at, bytes })
    }
}

/// What an executed early write is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlyWritten {
    /// Where the bytes went.
    pub offset: u64,
    /// The file's length now.
    pub size: u64,
    /// The file's change counter now.
    pub change: u64,
}

impl EarlyWritten {
    /// Its bytes.
    pub fn encode(&self) -> [u8; EARLY_ANSWER_LEN] {
        let mut bytes = [0; EARLY_ANSWER_LEN];
        bytes[..8].copy_from_slice(&self.offset.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.size.to_le_bytes());
        bytes[16..].copy_from_slice(&self.change.to_le_bytes());
        bytes
    }

    /// Parses an answer's body.
    ///
    /// # Errors
    /// [`EarlyError`].
    pub fn parse(body: &[u8]) -> Result<Self, EarlyError> {
        let words = <&[u8; EARLY_ANSWER_LEN]>::try_from(body).map_err(|_| match body.len() {
            len if len < EARLY_ANSWER_LEN => EarlyError::Truncated(len),
            len => EarlyError::TooLong(len),
        })?;
        let word = |at: usize| u64::from_le_bytes(words[at..at + 8].try_into().expect("8 bytes"));
        Ok(Self { offset: word(0), size: word(8), change: word(16) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WRITE: EarlyWrite<'static> = EarlyWrite {
        client: ClientId(0x0102),
        ring: 3,
        ino: InodeNo(0x0207),
        at: Some(0x0304),
        bytes: b"xy",
    };

    #[test]
    fn golden_bytes() {
        let mut expected = vec![0; EARLY_HEADER_LEN];
        expected[..2].copy_from_slice(&[2, 1]); // client
        expected[16..18].copy_from_slice(&[7, 2]); // ino
        expected[24..26].copy_from_slice(&[4, 3]); // offset
        expected[32] = 3; // ring
        expected.extend_from_slice(b"xy");
        let mut bytes = Vec::new();
        WRITE.encode_into(&mut bytes);
        assert_eq!(bytes, expected);
        assert_eq!(EarlyWrite::parse(&bytes), Ok(WRITE));
        expected[24..32].fill(0xff);
        assert_eq!(EarlyWrite::parse(&expected), Ok(EarlyWrite { at: None, ..WRITE }));
        let written = EarlyWritten { offset: 0x0102, size: 0x0304, change: 5 };
        let mut expected = [0; EARLY_ANSWER_LEN];
        (expected[0], expected[1], expected[8], expected[9], expected[16]) = (2, 1, 4, 3, 5);
        assert_eq!(written.encode(), expected);
        assert_eq!(EarlyWritten::parse(&expected), Ok(written));
    }

    #[test]
    fn each_damage_has_its_error() {
        let damaged = |at: usize, byte: u8| {
            let mut bytes = Vec::new();
            WRITE.encode_into(&mut bytes);
            bytes[at] = byte;
            EarlyWrite::parse(&bytes).map(|_| ()).expect_err("damaged")
        };
        assert_eq!(damaged(16, 8), EarlyError::Field("ring"), "another file's ring");
        assert_eq!(damaged(33, 1), EarlyError::Field("ring"));
        assert_eq!(damaged(39, 1), EarlyError::Field("reserved"));
        assert_eq!(damaged(31, 0x80), EarlyError::Field("offset"), "past the largest file");
        let mut bytes = Vec::new();
        WRITE.encode_into(&mut bytes);
        assert_eq!(EarlyWrite::parse(&bytes[..39]), Err(EarlyError::Truncated(39)));
        assert_eq!(EarlyWrite::parse(&bytes[..40]), Err(EarlyError::Field("bytes")));
        bytes.resize(EARLY_HEADER_LEN + EARLY_WRITE_MAX + 1, 0);
        assert_eq!(EarlyWrite::parse(&bytes), Err(EarlyError::TooLong(EARLY_WRITE_MAX + 1)));
        let last = EarlyWrite { at: Some(MAX_FILE_SIZE - 2), ..WRITE };
        let mut bytes = Vec::new();
        last.encode_into(&mut bytes);
        assert_eq!(EarlyWrite::parse(&bytes), Ok(last));
        assert_eq!(EarlyWritten::parse(&[0; 23]), Err(EarlyError::Truncated(23)));
        assert_eq!(EarlyWritten::parse(&[0; 25]), Err(EarlyError::TooLong(25)));
    }

    #[test]
    fn rings_have_slots_names_and_doors_of_their_own() {
        assert_eq!(ring_slot(0), SlotIndex(SLOTS_PER_SESSION));
        assert_eq!(ring_client(ClientId(u128::MAX), 0), ClientId(0));
        assert_eq!(ring_of(InodeNo(7)), 3);
        let at = |text: &str| text.parse::<Endpoint>().expect(text);
        assert_eq!(EarlyDoor::Port(9).endpoint(&at("tcp://[::1]:80")), Some(at("tcp://[::1]:9")));
        assert_eq!(EarlyDoor::Beside.endpoint(&at("unix:///a.sock")), Some(at("unix:///a.sock.rings")));
        assert_eq!(EarlyDoor::Beside.endpoint(&at("shm:///a.sock")), Some(at("shm:///a.sock.rings")));
        assert_eq!(EarlyDoor::Beside.endpoint(&at("tcp://box")), None);
        assert_eq!(EarlyDoor::Port(9).endpoint(&at("shm:///a.sock")), None);
        for kind in Kind::ALL {
            early_settings(kind).geometry().expect("a ring of both sides' settings can be made");
        }
    }

    proptest! {
        #[test]
        fn nothing_panics_and_what_parses_encodes_the_same(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Ok(write) = EarlyWrite::parse(&bytes) {
                let mut again = Vec::new();
                write.encode_into(&mut again);
                prop_assert_eq!(again, bytes);
            }
        }
    }
}
