//! One-sided requests of `tenants`: their packets, whether the model permits them, and what they do in it.

use crate::landlord::{Held, Landlord, PAGE};
use cuttlefs_common::ids::FileKey;
use cuttlefs_common::rdma::soft::tcp::packet::{PacketHeader, PacketKind};
use cuttlefs_common::rdma::{FileAtomic, WcStatus};
use cuttlefs_common::region::{MagicPattern, divide};
use cuttlefs_common::rpc::RegionKey;

/// A one-sided request.
pub enum Act {
    Read { offset: u64, len: u64 },
    Bitmap { first_page: u64, len: u64 },
    Write { offset: u64, bytes: Vec<u8> },
    Atomic { offset: u64, operation: FileAtomic },
    Append { bytes: Vec<u8> },
}

impl Act {
    pub fn packet(&self, FileKey(key): FileKey) -> (PacketHeader, &[u8]) {
        let at = |kind, offset| PacketHeader { key, offset, ..PacketHeader::new(kind, 0) };
        match self {
            Self::Read { offset, len } => {
                (PacketHeader { wanted: *len as u32, ..at(PacketKind::ReadFile, *offset) }, &[])
            }
            Self::Bitmap { first_page, len } => {
                (PacketHeader { wanted: *len as u32, ..at(PacketKind::ReadBitmap, *first_page) }, &[])
            }
            Self::Write { offset, bytes } => {
                (PacketHeader { ack: true, ..at(PacketKind::WriteFile, *offset) }, bytes)
            }
            Self::Atomic { offset, operation: FileAtomic::FetchAdd { add } } => {
                (PacketHeader { first: *add, ..at(PacketKind::FetchAddFile, *offset) }, &[])
            }
            Self::Atomic { offset, operation: FileAtomic::CompareSwap { expect, swap } } => {
                let bare = at(PacketKind::CompareSwapFile, *offset);
                (PacketHeader { first: *expect, second: *swap, ..bare }, &[])
            }
            Self::Append { bytes } => (at(PacketKind::Append, 0), bytes),
        }
    }

    /// Whether a good key of its own permits it, with the grants that it has and a file of this length.
    pub fn is_within(&self, held: &Held, size: u64) -> bool {
        let rights = held.key.rights;
        let overwrites = |offset: u64, len: u64| {
            let end = offset.checked_add(len).filter(|end| *end <= size && held.holds(offset, *end));
            rights.write && end.is_some_and(|end| held.covers(offset, end))
        };
        match self {
            Self::Read { offset, len } => {
                rights.read && offset.checked_add(*len).is_some_and(|end| held.holds(*offset, end))
            }
            Self::Bitmap { .. } => rights.read,
            Self::Write { offset, bytes } => overwrites(*offset, bytes.len() as u64),
            Self::Atomic { offset, .. } => offset.is_multiple_of(8) && rights.read && overwrites(*offset, 8),
            Self::Append { bytes } => {
                rights.write && !held.grants.is_empty() && held.holds(size, size + bytes.len() as u64)
            }
        }
    }

    /// The status of a refusal.
    pub fn refusal(&self) -> WcStatus {
        match self {
            Self::Atomic { offset, .. } if !offset.is_multiple_of(8) => WcStatus::RemoteInvalid,
            _ => WcStatus::RemoteAccess,
        }
    }

    /// Checks the answer to a request that was done, and does it in the model.
    pub fn done(self, landlord: &mut Landlord, key: &RegionKey, header: &PacketHeader, payload: &[u8]) {
        let size = landlord.size();
        match self {
            Self::Read { offset, len } => {
                let known = &landlord.bytes[offset.min(size) as usize..(offset + len).min(size) as usize];
                check_read(&landlord.magic, offset, payload, known);
            }
            Self::Bitmap { first_page, len } => {
                assert_eq!(payload.len() as u64, len);
                for bit in (0..len * 8).filter(|bit| payload[(bit / 8) as usize] >> (bit % 8) & 1 == 1) {
                    let start = (first_page + bit) * PAGE;
                    let is_seen = key.offset < start + PAGE && start < key.end();
                    assert!(is_seen, "a key of {key:?} tells of page {}", first_page + bit);
                }
            }
            Self::Write { offset, bytes } => landlord.put(offset, &bytes),
            Self::Atomic { offset, operation } => {
                let at = offset as usize..offset as usize + 8;
                let old = u64::from_le_bytes(landlord.bytes[at].try_into().expect("eight bytes"));
                assert_eq!(header.first, old, "the word at {offset}");
                landlord.put(offset, &operation.apply(old).to_le_bytes());
            }
            Self::Append { bytes } => {
                assert_eq!(header.first, size, "an append is at the end");
                landlord.put(size, &bytes);
            }
        }
    }
}

/// Checks what a one-sided read brought: the file's bytes, and the pattern for pages that are on SSD.
fn check_read(magic: &MagicPattern, offset: u64, found: &[u8], known: &[u8]) {
    assert_eq!(found.len(), known.len(), "bytes of a read at {offset}");
    for part in divide(offset, found.len()) {
        let bytes = part.offset_in_request..part.offset_in_request + part.len;
        let is_absent = magic.covers(part.offset_in_page, &found[bytes.clone()]);
        assert!(is_absent || found[bytes.clone()] == known[bytes], "page {} has other bytes", part.page);
    }
}
