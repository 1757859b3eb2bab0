//! The one place where errors are turned into errnos.

use super::kernel::Errno;
use crate::file::volume::FsError;
use cuttlefs_common::status::Status;

/// The errno that an application sees for a volume's error.
pub(super) fn of(error: &FsError) -> Errno {
    match error {
        FsError::Server(status) => of_status(*status),
        FsError::BadHandle => Errno::EBADF,
        // Not ENOTCONN: the kernel returns that when this process has died, and people act on it.
        FsError::ShutDown => Errno::ESHUTDOWN,
        FsError::Interrupted => Errno::EINTR,
        // No operation of a mount has this.
        FsError::MayBeDone => Errno::EIO,
    }
}

/// The errno that an application sees for a server's status.
pub(super) fn of_status(status: Status) -> Errno {
    match status {
        Status::NotFound => Errno::ENOENT,
        Status::Exists => Errno::EEXIST,
        Status::NotDirectory => Errno::ENOTDIR,
        Status::IsDirectory => Errno::EISDIR,
        Status::NotEmpty => Errno::ENOTEMPTY,
        Status::Invalid => Errno::EINVAL,
        Status::NoSpace => Errno::ENOSPC,
        Status::TooLarge => Errno::EFBIG,
        Status::NameTooLong => Errno::ENAMETOOLONG,
        Status::Denied => Errno::EACCES,
        Status::NotPermitted => Errno::EPERM,
        Status::ReadOnly => Errno::EROFS,
        Status::Stale => Errno::ESTALE,
        Status::TooManyLinks => Errno::EMLINK,
        Status::NoAttribute => Errno::NO_XATTR,
        // The bound that an application reaches is that of open files.
        Status::Busy => Errno::ENFILE,
        Status::Io => Errno::EIO,
        Status::Malformed | Status::BadSequence => Errno::EPROTO,
        Status::Unsupported => Errno::EOPNOTSUPP,
        Status::NoSuchOffset => Errno::ENXIO,
        // The session that held the open file is gone, and the file could not be reclaimed.
        Status::SessionExpired => Errno::ESTALE,
        // setxattr(2): "the size of name or value exceeds a filesystem-specific limit".
        Status::ValueTooLarge => Errno::ERANGE,
        // fcntl(2) and flock(2) without waiting: EAGAIN, which is EWOULDBLOCK.
        Status::Locked => Errno::EAGAIN,
        Status::Deadlock => Errno::EDEADLK,
        Status::NoLocks => Errno::ENOLCK,
        Status::Cancelled => Errno::EINTR,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table once more, by number, so that a changed line above is a failing test and not a silent change.
    const EXPECTED: [(Status, i32); 27] = [
        (Status::NotFound, libc::ENOENT),
        (Status::Exists, libc::EEXIST),
        (Status::NotDirectory, libc::ENOTDIR),
        (Status::IsDirectory, libc::EISDIR),
        (Status::NotEmpty, libc::ENOTEMPTY),
        (Status::Invalid, libc::EINVAL),
        (Status::NoSpace, libc::ENOSPC),
        (Status::TooLarge, libc::EFBIG),
        (Status::NameTooLong, libc::ENAMETOOLONG),
        (Status::Denied, libc::EACCES),
        (Status::NotPermitted, libc::EPERM),
        (Status::ReadOnly, libc::EROFS),
        (Status::Stale, libc::ESTALE),
        (Status::TooManyLinks, libc::EMLINK),
        (Status::NoAttribute, libc::ENODATA),
        (Status::Busy, libc::ENFILE),
        (Status::Io, libc::EIO),
        (Status::Malformed, libc::EPROTO),
        (Status::Unsupported, libc::EOPNOTSUPP),
        (Status::NoSuchOffset, libc::ENXIO),
        (Status::SessionExpired, libc::ESTALE),
        (Status::BadSequence, libc::EPROTO),
        (Status::ValueTooLarge, libc::ERANGE),
        (Status::Locked, libc::EAGAIN),
        (Status::Deadlock, libc::EDEADLK),
        (Status::NoLocks, libc::ENOLCK),
        (Status::Cancelled, libc::EINTR),
    ];

    #[test]
    fn every_status_has_its_errno() {
        for (status, (expected_status, errno)) in Status::ALL.into_iter().zip(EXPECTED) {
            assert_eq!(status, expected_status, "the table is in wire order");
            assert_eq!(of_status(status).code(), errno, "{status:?}");
            assert_eq!(of(&FsError::Server(status)).code(), errno, "{status:?}");
        }
        assert_eq!(of(&FsError::BadHandle).code(), libc::EBADF);
        assert_eq!(of(&FsError::ShutDown).code(), libc::ESHUTDOWN);
    }
}
