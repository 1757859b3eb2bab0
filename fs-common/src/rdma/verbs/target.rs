//! What a target exports: its windows, and files that its NIC engine reads and writes.

use super::request::{Remote, WcStatus};
use crate::ids::{FileKey, Rkey};
use serde::{Deserialize, Serialize};

/// The session whose rights the one-sided file requests of a connection need; 0: no session, all are refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RegionOwner(pub u64);

/// A window that the target exports, as a whole, to initiators that translate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum WindowId {
    /// The frames (magic frame first).
    Frames = 1,
    /// The residency table.
    Residency = 2,
    /// The file table.
    FileTable = 3,
}

impl WindowId {
    /// All windows, in handshake order.
    pub const ALL: [WindowId; 3] = [WindowId::Frames, WindowId::Residency, WindowId::FileTable];
}

/// What the NIC engine achieved of a file read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileRead {
    /// The read is done: this number of bytes precedes the end of the file.
    Done(usize),
    /// A page must be brought into memory first. The queue pair stalls while `read_file_faulting` does it.
    Faults,
}

/// What the NIC engine achieved of a file write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileWrite {
    /// The file has the bytes.
    Done,
    /// The write has to wait first. The queue pair stalls while `write_file_faulting` does it.
    Faults,
}

/// An atomic operation on eight bytes of a file, which are a little-endian number. The order of variants and fields is the wire format of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileAtomic {
    /// Stores `swap` if `expect` is there.
    CompareSwap {
        /// The value to compare with.
        expect: u64,
        /// The value to store.
        swap: u64,
    },
    /// Adds to the value; it wraps around.
    FetchAdd {
        /// The value to add.
        add: u64,
    },
}

impl FileAtomic {
    /// The value that is there afterwards, if `old` was there before.
    pub const fn apply(self, old: u64) -> u64 {
        match self {
            Self::CompareSwap { expect, swap } if old == expect => swap,
            Self::CompareSwap { .. } => old,
            Self::FetchAdd { add } => old.wrapping_add(add),
        }
    }
}

/// What the NIC engine achieved of an atomic operation on a file, or of an append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileValue {
    /// It is done; this was the value before, or is the offset of the appended bytes.
    Done(u64),
    /// It has to wait first. The queue pair stalls while `atomic_file_faulting` or `append_file_faulting` does it.
    Faults,
}

/// The target's side of target translation: the NIC engine reads and changes files without an RPC worker.
pub trait FileTarget: Send + Sync {
    /// Fills `out` with the file's bytes from `offset` on: holes and unwritten ranges as zeros, pages that are not resident (or change all the time)
    /// as the magic pattern. A target that faults instead leaves `out` alone. Never blocks on disk, network or a lock held across one.
    ///
    /// # Errors
    /// `WcStatus::RemoteAccess` if `filekey` is unknown, of another owner, or without the right to read; `RemoteInvalid` if this target reads no
    /// files; `RemoteOperation` if the bytes cannot be read in this way now.
    fn read_file(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<FileRead, WcStatus>;

    /// Does a read for which `read_file` returned `Faults`. May block on a disk: never called on the NIC engine's thread. Returns how many bytes
    /// precede the end of the file.
    ///
    /// # Errors
    /// As `read_file`.
    fn read_file_faulting(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        out: &mut [u8],
    ) -> Result<usize, WcStatus> {
        let _ = (owner, filekey, offset, out);
        Err(WcStatus::RemoteInvalid)
    }

    /// Overwrites bytes that the file has; its length stays. Never blocks on disk, network or a lock held across one. By default a target refuses such
    /// writes, and all other changes of files.
    ///
    /// # Errors
    /// `WcStatus::RemoteAccess` if `filekey` is unknown, of another owner, or may not be written there, or if the file ends before; `RemoteInvalid`
    /// if this target takes no writes to files; `RemoteNoSpace` if there is no space for the bytes. With these nothing was changed. `RemoteOperation` if
    /// the write cannot be done in this way now.
    fn write_file(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        bytes: &[u8],
    ) -> Result<FileWrite, WcStatus> {
        let _ = (owner, filekey, offset, bytes);
        Err(WcStatus::RemoteInvalid)
    }

    /// Does a write for which `write_file` returned `Faults`. May block: never called on the NIC engine's thread.
    ///
    /// # Errors
    /// As `write_file`.
    fn write_file_faulting(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), WcStatus> {
        let _ = (owner, filekey, offset, bytes);
        Err(WcStatus::RemoteInvalid)
    }

    /// Does an atomic operation on the eight bytes at `offset`, a multiple of 8. Never blocks, like `write_file`.
    ///
    /// # Errors
    /// As `write_file`.
    fn atomic_file(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        operation: FileAtomic,
    ) -> Result<FileValue, WcStatus> {
        let _ = (owner, filekey, offset, operation);
        Err(WcStatus::RemoteInvalid)
    }

    /// Does an atomic operation for which `atomic_file` returned `Faults`, and returns the value before. May block: never called on the NIC engine's
    /// thread.
    ///
    /// # Errors
    /// As `write_file`.
    fn atomic_file_faulting(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        offset: u64,
        operation: FileAtomic,
    ) -> Result<u64, WcStatus> {
        let _ = (owner, filekey, offset, operation);
        Err(WcStatus::RemoteInvalid)
    }

    /// Places the bytes at the end of the file, together, and makes it longer. Never blocks, like `write_file`.
    ///
    /// # Errors
    /// As `write_file`.
    fn append_file(&self, owner: RegionOwner, filekey: FileKey, bytes: &[u8]) -> Result<FileValue, WcStatus> {
        let _ = (owner, filekey, bytes);
        Err(WcStatus::RemoteInvalid)
    }

    /// Does an append for which `append_file` returned `Faults`, and returns the offset of the bytes. May block: never called on the NIC engine's
    /// thread.
    ///
    /// # Errors
    /// As `write_file`.
    fn append_file_faulting(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        bytes: &[u8],
    ) -> Result<u64, WcStatus> {
        let _ = (owner, filekey, bytes);
        Err(WcStatus::RemoteInvalid)
    }

    /// Fills `out` with the page bitmap from `first_page` on; see [`Remote::Bitmap`]. Pages past the end are clear.
    ///
    /// # Errors
    /// As `read_file`; `RemoteInvalid` if this target has no bitmaps.
    fn read_bitmap(
        &self,
        owner: RegionOwner,
        filekey: FileKey,
        first_page: u64,
        out: &mut [u8],
    ) -> Result<(), WcStatus> {
        let _ = (owner, filekey, first_page, out);
        Err(WcStatus::RemoteInvalid)
    }
}

/// A window that is not mapped: initiators READ it. Bytes read there are untrusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteRange {
    /// Key of the region that is the whole window.
    pub rkey: Rkey,
    /// The address of the window's first byte ([`super::MemoryRegion::first_address`]).
    pub first_address: u64,
    /// Length of the window in bytes.
    pub len: u64,
}

impl RemoteRange {
    /// Whether `[offset, offset + len)` lies inside.
    pub fn contains(self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }

    /// The place at an offset in the window. What a broken peer says may wrap around; its RNIC then refuses the request.
    pub fn at(self, offset: u64) -> Remote {
        Remote::Memory { rkey: self.rkey, offset: self.first_address.wrapping_add(offset) }
    }
}
