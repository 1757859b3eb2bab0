//! The wire status: the closed set of outcomes an RPC can have.
//!
//! It is not errno, since each operating system has its own. The FUSE side of the client maps each status to one errno, in one table
//! (`fs-client/src/fuse/errno.rs`).

use serde::{Deserialize, Serialize};

/// Outcome of an RPC. The number is the wire format; numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, thiserror::Error)]
#[repr(u32)]
pub enum Status {
    /// The name, the inode, or the inode of an attribute does not exist.
    #[error("no such file or directory")]
    NotFound = 1,
    /// The name is taken.
    #[error("already exists")]
    Exists = 2,
    /// A path component is not a directory.
    #[error("not a directory")]
    NotDirectory = 3,
    /// The operation does not apply to directories.
    #[error("is a directory")]
    IsDirectory = 4,
    /// The directory still has entries.
    #[error("directory not empty")]
    NotEmpty = 5,
    /// An argument is out of its domain.
    #[error("invalid argument")]
    Invalid = 6,
    /// The pool, the inode space or a directory is full.
    #[error("no space left in the pool")]
    NoSpace = 7,
    /// An offset or length beyond 2^63 - 1.
    #[error("file too large")]
    TooLarge = 8,
    /// A name longer than 255 bytes, or a symlink target longer than 4095.
    #[error("name too long")]
    NameTooLong = 9,
    /// The caller may not do this (export rules, filekey rights).
    #[error("permission denied")]
    Denied = 10,
    /// The operation is not permitted on such an object at all.
    #[error("operation not permitted")]
    NotPermitted = 11,
    /// The export is read-only.
    #[error("read-only export")]
    ReadOnly = 12,
    /// The inode number or filekey is not known (any more).
    #[error("stale handle")]
    Stale = 13,
    /// Too many hard links.
    #[error("too many links")]
    TooManyLinks = 14,
    /// No such extended attribute.
    #[error("no such attribute")]
    NoAttribute = 15,
    /// A bound was reached: open files, sessions, queue.
    #[error("a bound of the server is reached; `cuttlefs status` of it shows its bounds")]
    Busy = 16,
    /// The device failed; never returned for bytes that could be served.
    #[error("I/O error")]
    Io = 17,
    /// The message could not be understood.
    #[error("malformed message")]
    Malformed = 18,
    /// The server does not do this.
    #[error("not supported")]
    Unsupported = 19,
    /// `SEEK_DATA`/`SEEK_HOLE` past the end.
    #[error("no such offset")]
    NoSuchOffset = 20,
    /// The session is unknown: attach again and reclaim.
    #[error("session expired")]
    SessionExpired = 21,
    /// The request's sequence number is neither the slot's last nor its next.
    #[error("request out of sequence")]
    BadSequence = 22,
    /// The attribute value does not fit.
    #[error("value too large")]
    ValueTooLarge = 23,
    /// Another holder's lock blocks this one.
    #[error("locked by somebody else")]
    Locked = 24,
    /// Waiting for the lock would never end.
    #[error("waiting for the lock would be a deadlock")]
    Deadlock = 25,
    /// No more locks: this client's bound or the server's is reached.
    #[error("no more locks")]
    NoLocks = 26,
    /// The wait for the lock was ended by its client.
    #[error("the wait for the lock was given up")]
    Cancelled = 27,
}

impl Status {
    /// Every status, in wire order; tests and tables walk it.
    pub const ALL: [Status; 27] = [
        Status::NotFound,
        Status::Exists,
        Status::NotDirectory,
        Status::IsDirectory,
        Status::NotEmpty,
        Status::Invalid,
        Status::NoSpace,
        Status::TooLarge,
        Status::NameTooLong,
        Status::Denied,
        Status::NotPermitted,
        Status::ReadOnly,
        Status::Stale,
        Status::TooManyLinks,
        Status::NoAttribute,
        Status::Busy,
        Status::Io,
        Status::Malformed,
        Status::Unsupported,
        Status::NoSuchOffset,
        Status::SessionExpired,
        Status::BadSequence,
        Status::ValueTooLarge,
        Status::Locked,
        Status::Deadlock,
        Status::NoLocks,
        Status::Cancelled,
    ];

    /// The wire number; 0 stands for success and is no `Status`.
    pub const fn code(self) -> u32 {
        self as u32
    }

    /// Parses a wire number; `None` for 0 and for numbers of a newer peer.
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.code() == code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip_and_are_dense() {
        for (index, status) in Status::ALL.into_iter().enumerate() {
            assert_eq!(status.code() as usize, index + 1);
            assert_eq!(Status::from_code(status.code()), Some(status));
        }
        assert_eq!(Status::from_code(0), None);
        assert_eq!(Status::from_code(28), None);
    }
}
