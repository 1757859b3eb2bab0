//! Messages of sender and receiver besides records: messages of 64 bytes, answers, and the envelope of a request.
//!
//! | offset | bytes | field   | hello (1) | welcome (2) | notice (3) |
//! |-------:|------:|---------|-----------|-------------|------------|
//! | 0      | 4     | magic   | `CFDR` in all |||
//! | 4      | 2     | version | `VERSION` in all |||
//! | 6      | 2     | kind    | 1 | 2 | 3 (4: refused, zeros) |
//! | 8      | 16    | client  | who | | |
//! | 24     | 8     | first   | capacity | log | persistent up to |
//! | 32     | 8     | second  | stride | past log | head position |
//! | 40     | 8     | third   | | past number | head number |
//! | 48     | 4     | rkey    | answers | ring | |
//! | 52     | 4     | fourth  | answer slots | the ring's key to read | 1: slow down |
//! | 56     | 4     | fifth   | bytes of a slot | log device | |
//! | 60     | 4     | sixth   | RPC kind asked for | RPC kind it is to be | |
//!
//! The receiver WRITEs an answer into one of the sender's slots, with the slot's number as immediate:
//!
//! | offset | bytes | field |
//! |-------:|------:|-------|
//! | 0      | 8     | number of the request |
//! | 8      | 8     | head position |
//! | 16     | 8     | head number |
//! | 24     | 4     | status, the service's own |
//! | 28     | 4     | bytes of the body that follows |
//!
//! A request's data begins with an envelope of 8 bytes: flags (1: wants an answer, 2: changes nothing, so it need not be persistent by itself),
//! answer slot (u16 each), zeros.

use super::kind::Kind;
use crate::ids::{ClientId, LogSeq, Rkey};
use crate::persist::LogDeviceKind;
use crate::redo::LogId;
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Bytes of a message.
pub const MESSAGE_LEN: usize = 64;
/// Bytes before an answer's body.
pub const ANSWER_HEADER_LEN: usize = 32;
/// Bytes before a request's body.
pub const ENVELOPE_LEN: usize = 8;
/// Most answer slots.
pub(super) const ANSWER_SLOTS_MAX: u32 = 4096;
const MAGIC: [u8; 4] = *b"CFDR";
const VERSION: u16 = 6;
const FLAG_ANSWER: u16 = 1;
const FLAG_PASSING: u16 = 2;

/// The envelope before a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Envelope {
    /// The slot for the answer, if one is wanted.
    pub(super) answer_slot: Option<u16>,
    /// The request changes nothing, so it need not be persistent by itself.
    pub(super) passing: bool,
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// A sender wants a ring.
    Hello {
        /// The sender's client id.
        client: ClientId,
        /// Capacity of the ring that it wants.
        capacity: u64,
        /// Stride of that ring.
        stride: u64,
        /// Key of the sender's memory for answers.
        answers: Rkey,
        /// Number of answer slots.
        slots: u32,
        /// Bytes of a slot.
        slot_len: u32,
        /// The kind of RPC that it wants.
        kind: Kind,
    },
    /// The receiver gives the sender a ring.
    Welcome {
        /// Key of the ring's records.
        ring: Rkey,
        /// Key by which the whole ring can be READ.
        reading: Rkey,
        /// The kind of RPC to use: the one asked for, or the one in which the receiver flushes.
        kind: Kind,
        /// The ring's life.
        log: LogId,
        /// The life before, and the last record of it that was executed.
        past: (LogId, LogSeq),
        /// The kind of the ring's log device.
        device: LogDeviceKind,
    },
    /// The receiver refuses.
    Refused,
    /// The receiver's progress.
    Notice {
        /// Everything up to this record is persistent.
        persistent: LogSeq,
        /// The head.
        head: u64,
        /// The record at the head.
        head_lsn: LogSeq,
        /// The sender should post no more for now.
        slow: bool,
    },
}

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Too short, or not of this protocol.
    #[error("the peer does not speak durable RPC")]
    Magic,
    /// Another version.
    #[error("the peer speaks durable RPC version {0}, this side {VERSION}; run the same release on both")]
    Version(u16),
    /// An impossible value.
    #[error("message field `{0}` has an impossible value")]
    Field(&'static str),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    magic: [u8; 4],
    version: U16,
    kind: U16,
    client: U128,
    first: U64,
    second: U64,
    third: U64,
    rkey: U32,
    fourth: U32,
    fifth: U32,
    sixth: U32,
}
const _: () = assert!(size_of::<Raw>() == MESSAGE_LEN);

fn device_number(device: LogDeviceKind) -> u32 {
    match device {
        LogDeviceKind::Pmem => 1,
        LogDeviceKind::PmemEmulated => 2,
        LogDeviceKind::File => 3,
    }
}

impl Message {
    /// Its bytes.
    pub fn encode(&self) -> [u8; MESSAGE_LEN] {
        let mut raw = Raw::new_zeroed();
        raw.magic = MAGIC;
        raw.version = VERSION.into();
        match *self {
            Self::Hello { client, capacity, stride, answers, slots, slot_len, kind } => {
                raw.kind = 1.into();
                raw.client = client.0.into();
                (raw.first, raw.second) = (capacity.into(), stride.into());
                raw.rkey = answers.0.into();
                (raw.fourth, raw.fifth, raw.sixth) = (slots.into(), slot_len.into(), kind.number().into());
            }
            Self::Welcome { ring, reading, kind, log, past, device } => {
                raw.kind = 2.into();
                (raw.fourth, raw.sixth) = (reading.0.into(), kind.number().into());
                (raw.first, raw.second, raw.third) = (log.0.into(), past.0.0.into(), past.1.0.into());
                raw.rkey = ring.0.into();
                raw.fifth = device_number(device).into();
            }
            Self::Refused => raw.kind = 4.into(),
            Self::Notice { persistent, head, head_lsn, slow } => {
                raw.kind = 3.into();
                (raw.first, raw.second, raw.third) = (persistent.0.into(), head.into(), head_lsn.0.into());
                raw.fourth = u32::from(slow).into();
            }
        }
        zerocopy::transmute!(raw)
    }

    /// Parses a message. Fields that a kind does not use must be zero, so that every message has one encoding.
    ///
    /// # Errors
    /// [`MessageError`].
    pub fn parse(bytes: &[u8]) -> Result<Self, MessageError> {
        let raw = Raw::ref_from_bytes(bytes).map_err(|_| MessageError::Magic)?;
        if raw.magic != MAGIC {
            return Err(MessageError::Magic);
        }
        if raw.version.get() != VERSION {
            return Err(MessageError::Version(raw.version.get()));
        }
        let message = match (raw.kind.get(), raw.fourth.get()) {
            (1, slots) => Self::Hello {
                client: ClientId(raw.client.get()),
                capacity: raw.first.get(),
                stride: raw.second.get(),
                answers: Rkey(raw.rkey.get()),
                slots: Some(slots)
                    .filter(|slots| (1..=ANSWER_SLOTS_MAX).contains(slots))
                    .ok_or(MessageError::Field("answer slots"))?,
                slot_len: Some(raw.fifth.get())
                    .filter(|len| *len as usize >= ANSWER_HEADER_LEN && len.is_multiple_of(8))
                    .ok_or(MessageError::Field("slot bytes"))?,
                kind: Kind::from_number(raw.sixth.get()).ok_or(MessageError::Field("RPC kind"))?,
            },
            (2, reading) => Self::Welcome {
                ring: Rkey(raw.rkey.get()),
                reading: Rkey(reading),
                kind: Kind::from_number(raw.sixth.get()).ok_or(MessageError::Field("RPC kind"))?,
                log: LogId(raw.first.get()),
                past: (LogId(raw.second.get()), LogSeq(raw.third.get())),
                device: match raw.fifth.get() {
                    1 => LogDeviceKind::Pmem,
                    2 => LogDeviceKind::PmemEmulated,
                    3 => LogDeviceKind::File,
                    _ => return Err(MessageError::Field("log device")),
                },
            },
            (4, 0) => Self::Refused,
            (3, slow @ 0..=1) => Self::Notice {
                persistent: LogSeq(raw.first.get()),
                head: raw.second.get(),
                head_lsn: LogSeq(raw.third.get()),
                slow: slow == 1,
            },
            _ => return Err(MessageError::Field("kind")),
        };
        if message.encode() == bytes { Ok(message) } else { Err(MessageError::Field("reserved")) }
    }
}

/// The header before an answer's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnswerHeader {
    /// The number of the request.
    pub lsn: LogSeq,
    /// The head.
    pub head: u64,
    /// The record at the head.
    pub head_lsn: LogSeq,
    /// The service's own status.
    pub status: u32,
    /// Bytes of the body.
    pub len: u32,
}

impl AnswerHeader {
    /// Its bytes.
    pub fn encode(&self) -> [u8; ANSWER_HEADER_LEN] {
        let mut bytes = [0; ANSWER_HEADER_LEN];
        bytes[..8].copy_from_slice(&self.lsn.0.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.head.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.head_lsn.0.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.status.to_le_bytes());
        bytes[28..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// Parses a header. It may contain any value: the caller checks it against its request.
    pub fn parse(bytes: &[u8; ANSWER_HEADER_LEN]) -> Self {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let last = word(24);
        Self {
            lsn: LogSeq(word(0)),
            head: word(8),
            head_lsn: LogSeq(word(16)),
            status: last as u32,
            len: (last >> 32) as u32,
        }
    }
}

/// Writes an envelope.
pub(super) fn envelope(envelope: Envelope) -> [u8; ENVELOPE_LEN] {
    let mut bytes = [0; ENVELOPE_LEN];
    let Envelope { answer_slot, passing } = envelope;
    let flags = if passing { FLAG_PASSING } else { 0 } | if answer_slot.is_some() { FLAG_ANSWER } else { 0 };
    bytes[..2].copy_from_slice(&flags.to_le_bytes());
    bytes[2..4].copy_from_slice(&answer_slot.unwrap_or(0).to_le_bytes());
    bytes
}

/// Parses the envelope of a request; returns the body, too.
pub(super) fn open_envelope(data: &[u8]) -> Result<(Envelope, &[u8]), MessageError> {
    let (envelope, body) = data.split_first_chunk::<ENVELOPE_LEN>().ok_or(MessageError::Field("envelope"))?;
    let [flag, flag_high, slot, slot_high, rest @ ..] = *envelope;
    let slot = u16::from_le_bytes([slot, slot_high]);
    let flags = u16::from_le_bytes([flag, flag_high]);
    let answer_slot = (flags & FLAG_ANSWER != 0).then_some(slot);
    let known = flags & !(FLAG_ANSWER | FLAG_PASSING) == 0 && (answer_slot.is_some() || slot == 0);
    if !known || rest != [0; 4] {
        return Err(MessageError::Field("envelope"));
    }
    Ok((Envelope { answer_slot, passing: flags & FLAG_PASSING != 0 }, body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn golden(kind: u8, fields: &[(usize, &[u8])]) -> [u8; MESSAGE_LEN] {
        let mut bytes = [0; MESSAGE_LEN];
        bytes[..8].copy_from_slice(&[b'C', b'F', b'D', b'R', 6, 0, kind, 0]);
        for (at, value) in fields {
            bytes[*at..*at + value.len()].copy_from_slice(value);
        }
        bytes
    }

    #[test]
    fn golden_bytes() {
        let hello = Message::Hello {
            client: ClientId(0x0102),
            capacity: 0x0304,
            stride: 5,
            answers: Rkey(0x0a0b),
            slots: 6,
            slot_len: 0x0708,
            kind: Kind::WFlush,
        };
        let welcome = Message::Welcome {
            ring: Rkey(0x0a0b),
            reading: Rkey(0x0c0d),
            kind: Kind::SRFlush,
            log: LogId(0x0102),
            past: (LogId(3), LogSeq(4)),
            device: LogDeviceKind::PmemEmulated,
        };
        let notice = Message::Notice { persistent: LogSeq(1), head: 2, head_lsn: LogSeq(3), slow: true };
        let rkey: (usize, &[u8]) = (48, &[0x0b, 0x0a]);
        for (message, bytes) in [
            (
                hello,
                golden(
                    1,
                    &[(8, &[2, 1]), (24, &[4, 3]), (32, &[5]), rkey, (52, &[6]), (56, &[8, 7]), (60, &[2])],
                ),
            ),
            (
                welcome,
                golden(
                    2,
                    &[
                        (24, &[2, 1]),
                        (32, &[3]),
                        (40, &[4]),
                        rkey,
                        (52, &[0x0d, 0x0c]),
                        (56, &[2]),
                        (60, &[3]),
                    ],
                ),
            ),
            (Message::Refused, golden(4, &[])),
            (notice, golden(3, &[(24, &[1]), (32, &[2]), (40, &[3]), (52, &[1])])),
        ] {
            assert_eq!(message.encode(), bytes, "{message:?}");
            assert_eq!(Message::parse(&bytes), Ok(message));
            let mut crooked = bytes;
            // A field that this kind does not use.
            crooked[if matches!(message, Message::Hello { .. }) { 40 } else { 8 }] = 1;
            assert_eq!(Message::parse(&crooked), Err(MessageError::Field("reserved")), "{message:?}");
            crooked[4] = 9;
            assert_eq!(Message::parse(&crooked), Err(MessageError::Version(9)));
        }
        let answer = AnswerHeader { lsn: LogSeq(1), head: 2, head_lsn: LogSeq(3), status: 4, len: 0x0506 };
        let mut bytes = [0; ANSWER_HEADER_LEN];
        (bytes[0], bytes[8], bytes[16], bytes[24], bytes[28], bytes[29]) = (1, 2, 3, 4, 6, 5);
        assert_eq!(answer.encode(), bytes);
        assert_eq!(AnswerHeader::parse(&bytes), answer);
        let asks = Envelope { answer_slot: Some(0x0102), passing: false };
        let nothing = Envelope { answer_slot: None, passing: true };
        assert_eq!(envelope(asks), [1, 0, 2, 1, 0, 0, 0, 0]);
        assert_eq!(envelope(nothing), [2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(open_envelope(&[1, 0, 2, 1, 0, 0, 0, 0, 9]), Ok((asks, &[9][..])));
        assert_eq!(open_envelope(&envelope(nothing)), Ok((nothing, &[][..])));
        assert!(open_envelope(&[0, 0, 1, 0, 0, 0, 0, 0]).is_err() && open_envelope(&[0; 7]).is_err());
    }

    proptest! {
        #[test]
        fn whatever_parses_is_what_was_said(
            kind in 0u8..5, at in 8usize..MESSAGE_LEN, value in any::<u8>(), word in any::<[u8; 24]>(),
        ) {
            let bytes = golden(kind, &[(24, &word), (at, &[value])]);
            if let Ok(message) = Message::parse(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }

        #[test]
        fn nothing_panics(bytes in prop::collection::vec(any::<u8>(), 0..120)) {
            let _ = Message::parse(&bytes);
            let _ = open_envelope(&bytes);
        }
    }
}
