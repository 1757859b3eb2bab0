//! Messages on the Unix socket of a shared-memory connection; descriptors travel beside them (`SCM_RIGHTS`).
//!
//! The socket is `SOCK_SEQPACKET`, so one message is one packet. All are 80 bytes, a refusal's reason follows.
//!
//! | offset | bytes | field             | hello | welcome | refuse | announce | announce paged memory |
//! |-------:|------:|-------------------|-------|---------|--------|----------|-----------------------|
//! | 0      | 8     | magic             | `CFSHMLNK` in all |||||
//! | 8      | 2     | version           | `SHM_VERSION` in all |||||
//! | 10     | 2     | kind              | 1     | 2       | 3      | 4        | 5 |
//! | 12     | 4     | sleep page bytes  | yes   | yes     |        |          | |
//! | 16     | 4     | ring bytes        |       | yes     |        |          | |
//! | 20     | 4     | directory entries |       | yes     |        |          | |
//! | 24     | 8     | memory bytes      |       | connection |     | region   | region |
//! | 32     | 24    | window bytes      |       | each, 0: none |  |          | frames, table, and the slot of the receiver |
//! | 56     | 4     | rkey              |       |         |        | yes      | yes |
//! | 60     | 4     | directory index   |       |         |        | yes      | yes |
//! | 64     | 4     | rights            |       |         |        | 1 read, 2 write, 4 atomic, 8 flush | 1 read, 2 write |
//! | 68     | 4     | reason bytes      |       |         | yes    |          | |
//! | 72     | 4     | persistence       |       |         |        | 0 none, 1 cache lines, 2 by the target | |
//! | 76     | 4     | reserved          | zero in all |||||
//!
//! Fields that a kind does not use are zero. Descriptors of a hello: receive queue's sleep page, send queue's sleep page, doorbell. Of a welcome:
//! connection memory, the same three of the server, then the windows that it exports. Of an announcement: the region's memory, opened read-only
//! unless peers may change it.

use crate::memory::paged::{LOCAL_SLOTS, SLOTS};
use crate::rdma::soft::region::PersistenceKind;
use crate::rdma::verbs::{Access, PagedAccess};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Version of the shared-memory link. 1: the first. 2: FLUSH and persistent regions, rings of 256 KiB.
pub const SHM_VERSION: u16 = 2;
/// Bytes of a message without a reason.
pub const SHM_MESSAGE_LEN: usize = 80;
/// Longest reason of a refusal.
pub const MAX_REASON_LEN: usize = 256;
const MAGIC: [u8; 8] = *b"CFSHMLNK";

/// A message of the shared-memory link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShmMessage {
    /// The client asks to connect.
    Hello {
        /// Bytes of each sleep page.
        page_len: u32,
    },
    /// The server accepts.
    Welcome {
        /// Bytes of each sleep page.
        page_len: u32,
        /// Bytes of each ring.
        ring_len: u32,
        /// Entries of each region directory.
        directory_len: u32,
        /// Bytes of the connection's memory.
        memory_len: u64,
        /// Bytes of each window in `WindowId::ALL` order; 0: not exported.
        window_lens: [u64; 3],
    },
    /// The server refuses.
    Refuse {
        /// The reason, for people.
        reason: String,
    },
    /// Peers can access a region from now on.
    Announce {
        /// The region's key.
        rkey: u32,
        /// Its entry in the sender's directory.
        index: u32,
        /// The receiver's rights.
        access: Access,
        /// The region's length.
        memory_len: u64,
        /// How its ranges become persistent.
        persistence: PersistenceKind,
    },
    /// Peers can access memory whose pages come and go from now on.
    AnnouncePaged {
        /// The region's key.
        rkey: u32,
        /// Its entry in the sender's directory.
        index: u32,
        /// The receiver's rights.
        access: PagedAccess,
        /// The region's length.
        memory_len: u64,
        /// Bytes of its frames.
        frames_len: u64,
        /// Bytes of its table.
        table_len: u64,
        /// The receiver's slot in the table.
        slot: u32,
    },
}

/// Why bytes are no message of the shared-memory link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShmMessageError {
    /// The length is not that of the message.
    #[error("a message of {0} bytes has the wrong length")]
    Length(usize),
    /// Not this protocol.
    #[error("wrong magic; the socket is not a shm:// endpoint of cuttlefs")]
    Magic,
    /// Another version.
    #[error("the peer speaks shm link version {0}, this side {SHM_VERSION}; run the same release on both")]
    Version(u16),
    /// A kind this side does not know.
    #[error("unknown message kind {0}")]
    Kind(u16),
    /// A field that the kind does not use, or an impossible value.
    #[error("field `{0}` has an impossible value")]
    Field(&'static str),
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    magic: [u8; 8],
    version: U16,
    kind: U16,
    page_len: U32,
    ring_len: U32,
    directory_len: U32,
    memory_len: U64,
    window_lens: [U64; 3],
    rkey: U32,
    index: U32,
    rights: U32,
    reason_len: U32,
    persistence: U32,
    reserved: U32,
}
const _: () = assert!(size_of::<Raw>() == SHM_MESSAGE_LEN);

impl ShmMessage {
    /// The bytes to send.
    pub fn encode(&self) -> Vec<u8> {
        let mut raw = Raw::new_zeroed();
        raw.magic = MAGIC;
        raw.version = SHM_VERSION.into();
        let mut tail: &[u8] = &[];
        match self {
            Self::Hello { page_len } => {
                raw.kind = 1.into();
                raw.page_len = (*page_len).into();
            }
            Self::Welcome { page_len, ring_len, directory_len, memory_len, window_lens } => {
                raw.kind = 2.into();
                raw.page_len = (*page_len).into();
                raw.ring_len = (*ring_len).into();
                raw.directory_len = (*directory_len).into();
                raw.memory_len = (*memory_len).into();
                raw.window_lens = window_lens.map(U64::new);
            }
            Self::Refuse { reason } => {
                raw.kind = 3.into();
                let mut end = reason.len().min(MAX_REASON_LEN);
                while !reason.is_char_boundary(end) {
                    end -= 1;
                }
                tail = &reason.as_bytes()[..end];
                raw.reason_len = (end as u32).into();
            }
            Self::AnnouncePaged { rkey, index, access, memory_len, frames_len, table_len, slot } => {
                raw.kind = 5.into();
                raw.rkey = (*rkey).into();
                raw.index = (*index).into();
                raw.memory_len = (*memory_len).into();
                raw.window_lens = [*frames_len, *table_len, u64::from(*slot)].map(U64::new);
                raw.rights = if *access == PagedAccess::Read { 1 } else { 3 }.into();
            }
            Self::Announce { rkey, index, access, memory_len, persistence } => {
                raw.kind = 4.into();
                raw.rkey = (*rkey).into();
                raw.index = (*index).into();
                raw.memory_len = (*memory_len).into();
                raw.rights = (u32::from(access.remote_read)
                    | u32::from(access.remote_write) << 1
                    | u32::from(access.remote_atomic) << 2
                    | u32::from(access.remote_flush) << 3)
                    .into();
                raw.persistence = match persistence {
                    PersistenceKind::None => 0,
                    PersistenceKind::CacheLines => 1,
                    PersistenceKind::AtTarget => 2,
                }
                .into();
            }
        }
        let mut bytes = raw.as_bytes().to_vec();
        bytes.extend_from_slice(tail);
        bytes
    }

    /// Parses one packet.
    ///
    /// # Errors
    /// `ShmMessageError`, for a log line.
    pub fn parse(bytes: &[u8]) -> Result<Self, ShmMessageError> {
        let (raw, tail) = Raw::ref_from_prefix(bytes).map_err(|_| ShmMessageError::Length(bytes.len()))?;
        if raw.magic != MAGIC {
            return Err(ShmMessageError::Magic);
        }
        if raw.version.get() != SHM_VERSION {
            return Err(ShmMessageError::Version(raw.version.get()));
        }
        let kind = raw.kind.get();
        let zero = |name, unused: bool, value: u64| {
            if unused && value != 0 { Err(ShmMessageError::Field(name)) } else { Ok(()) }
        };
        if !(1..=5).contains(&kind) {
            return Err(ShmMessageError::Kind(kind));
        }
        zero("sleep page bytes", kind > 2, raw.page_len.get().into())?;
        zero("ring bytes", kind != 2, raw.ring_len.get().into())?;
        zero("directory entries", kind != 2, raw.directory_len.get().into())?;
        zero("memory bytes", kind == 1 || kind == 3, raw.memory_len.get())?;
        for window in raw.window_lens {
            zero("window bytes", kind != 2 && kind != 5, window.get())?;
        }
        zero("rkey", kind < 4, raw.rkey.get().into())?;
        zero("directory index", kind < 4, raw.index.get().into())?;
        zero("rights", kind < 4, raw.rights.get().into())?;
        zero("reason bytes", kind != 3, raw.reason_len.get().into())?;
        zero("persistence", kind != 4, raw.persistence.get().into())?;
        zero("reserved", true, raw.reserved.get().into())?;
        let reason_len = raw.reason_len.get() as usize;
        if reason_len > MAX_REASON_LEN || tail.len() != reason_len {
            return Err(ShmMessageError::Length(bytes.len()));
        }
        Ok(match kind {
            1 => Self::Hello { page_len: raw.page_len.get() },
            2 => Self::Welcome {
                page_len: raw.page_len.get(),
                ring_len: raw.ring_len.get(),
                directory_len: raw.directory_len.get(),
                memory_len: raw.memory_len.get(),
                window_lens: raw.window_lens.map(|len| len.get()),
            },
            5 => {
                let access = match raw.rights.get() {
                    1 => PagedAccess::Read,
                    3 => PagedAccess::ReadWrite,
                    _ => return Err(ShmMessageError::Field("rights")),
                };
                let [frames_len, table_len, slot] = raw.window_lens.map(|field| field.get());
                if raw.rkey.get() == 0 {
                    return Err(ShmMessageError::Field("rkey"));
                }
                if !(LOCAL_SLOTS as u64..SLOTS as u64).contains(&slot) {
                    return Err(ShmMessageError::Field("slot"));
                }
                Self::AnnouncePaged {
                    rkey: raw.rkey.get(),
                    index: raw.index.get(),
                    access,
                    memory_len: raw.memory_len.get(),
                    frames_len,
                    table_len,
                    slot: slot as u32,
                }
            }
            3 => Self::Refuse { reason: String::from_utf8_lossy(tail).into_owned() },
            _ => {
                let rights = raw.rights.get();
                if raw.rkey.get() == 0 || rights == 0 || rights > 15 {
                    return Err(ShmMessageError::Field(if raw.rkey.get() == 0 { "rkey" } else { "rights" }));
                }
                let access = Access {
                    local_write: false,
                    remote_read: rights & 1 != 0,
                    remote_write: rights & 2 != 0,
                    remote_atomic: rights & 4 != 0,
                    remote_flush: rights & 8 != 0,
                    own_bytes: 0,
                };
                let persistence = match raw.persistence.get() {
                    0 => PersistenceKind::None,
                    1 => PersistenceKind::CacheLines,
                    2 => PersistenceKind::AtTarget,
                    _ => return Err(ShmMessageError::Field("persistence")),
                };
                Self::Announce {
                    rkey: raw.rkey.get(),
                    index: raw.index.get(),
                    access,
                    memory_len: raw.memory_len.get(),
                    persistence,
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEAD: [u8; 10] = *b"CFSHMLNK\x02\x00";

    fn golden(kind: u8, fields: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; SHM_MESSAGE_LEN];
        bytes[..10].copy_from_slice(&HEAD);
        bytes[10] = kind;
        for (at, value) in fields {
            bytes[*at..*at + value.len()].copy_from_slice(value);
        }
        bytes
    }

    fn check(message: ShmMessage, bytes: Vec<u8>) {
        assert_eq!(message.encode(), bytes);
        assert_eq!(ShmMessage::parse(&bytes), Ok(message));
    }

    #[test]
    fn golden_bytes() {
        check(ShmMessage::Hello { page_len: 4096 }, golden(1, &[(12, &[0, 0x10])]));
        check(
            ShmMessage::Welcome {
                page_len: 4096,
                ring_len: 0x2_0000,
                directory_len: 128,
                memory_len: 0x4_3000,
                window_lens: [0x0102_0304, 0, 5],
            },
            golden(
                2,
                &[
                    (12, &[0, 0x10]),
                    (16, &[0, 0, 2]),
                    (20, &[128]),
                    (24, &[0, 0x30, 4]),
                    (32, &[4, 3, 2, 1]),
                    (48, &[5]),
                ],
            ),
        );
        let mut refuse = golden(3, &[(68, &[2])]);
        refuse.extend_from_slice(b"no");
        check(ShmMessage::Refuse { reason: "no".into() }, refuse);
        let access =
            Access { remote_read: true, remote_atomic: true, remote_flush: true, ..Access::default() };
        let persistence = PersistenceKind::AtTarget;
        check(
            ShmMessage::Announce { rkey: 0x0a0b_0c0d, index: 7, access, memory_len: 4096, persistence },
            golden(
                4,
                &[(24, &[0, 0x10]), (56, &[0x0d, 0x0c, 0x0b, 0x0a]), (60, &[7]), (64, &[13]), (72, &[2])],
            ),
        );
    }

    #[test]
    fn golden_bytes_of_paged_memory() {
        let message = ShmMessage::AnnouncePaged {
            rkey: 0x0a0b_0c0d,
            index: 7,
            access: PagedAccess::ReadWrite,
            memory_len: 0x4000,
            frames_len: 0x3000,
            table_len: 0x1020,
            slot: 9,
        };
        let fields: [(usize, &[u8]); 7] = [
            (24, &[0, 0x40]),
            (32, &[0, 0x30]),
            (40, &[0x20, 0x10]),
            (48, &[9]),
            (56, &[0x0d, 0x0c, 0x0b, 0x0a]),
            (60, &[7]),
            (64, &[3]),
        ];
        check(message, golden(5, &fields));
        let with = |at: usize, value: u8| {
            let mut bytes = golden(5, &fields);
            bytes[at] = value;
            ShmMessage::parse(&bytes)
        };
        assert_eq!(with(48, 7), Err(ShmMessageError::Field("slot")), "it is not for peers");
        assert_eq!(with(48, 64), Err(ShmMessageError::Field("slot")));
        assert_eq!(with(64, 7), Err(ShmMessageError::Field("rights")), "no atomics");
        assert_eq!(with(72, 1), Err(ShmMessageError::Field("persistence")));
    }

    #[test]
    fn unused_fields_other_versions_and_long_reasons_are_refused() {
        assert_eq!(ShmMessage::parse(&golden(1, &[(56, &[1])])), Err(ShmMessageError::Field("rkey")));
        assert_eq!(ShmMessage::parse(&golden(1, &[(72, &[1])])), Err(ShmMessageError::Field("persistence")));
        assert_eq!(ShmMessage::parse(&golden(1, &[(76, &[1])])), Err(ShmMessageError::Field("reserved")));
        assert_eq!(ShmMessage::parse(&golden(1, &[(8, &[9])])), Err(ShmMessageError::Version(9)));
        assert_eq!(ShmMessage::parse(&golden(9, &[])), Err(ShmMessageError::Kind(9)));
        assert_eq!(ShmMessage::parse(&golden(1, &[(0, b"X")])), Err(ShmMessageError::Magic));
        assert_eq!(ShmMessage::parse(&golden(3, &[(68, &[2])])), Err(ShmMessageError::Length(80)));
        assert_eq!(ShmMessage::parse(&golden(1, &[])[..79]), Err(ShmMessageError::Length(79)));
        let long = ShmMessage::Refuse { reason: "ä".repeat(300) }.encode();
        assert!(ShmMessage::parse(&long).is_ok());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = ShmMessage::parse(&bytes);
        }

        #[test]
        fn no_damaged_message_panics(at in 10usize..SHM_MESSAGE_LEN, value in any::<u8>(), kind in 0u8..7) {
            let _ = ShmMessage::parse(&golden(kind, &[(at, &[value])]));
        }
    }
}
