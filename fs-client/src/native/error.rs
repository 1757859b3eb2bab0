//! The errors of the native API. errno is not among them: the C library turns them into errnos.

use crate::reach::ReachError;
use crate::transport::FsError;
use cuttlefs_common::rdma::RdmaError;
use cuttlefs_common::status::Status;
use std::time::Duration;

/// Why a native operation failed.
#[derive(Debug, thiserror::Error)]
pub enum NativeError {
    /// The server's URL is none.
    #[error("{0}")]
    Url(String),
    /// The server cannot be reached, or refuses. A connect waits for 5 s at most for one that does not answer, whatever the deadline.
    #[error(transparent)]
    Connect(#[from] ReachError),
    /// The server's answer.
    #[error(transparent)]
    Server(Status),
    /// The open file is lost: the session ended while this program was cut off, and the file is gone, or may not be opened any more. Open it again.
    #[error(
        "the open file is lost: it could not be opened again after this program was cut off from the server; open it again"
    )]
    FileLost,
    /// The time that the caller named is over. Unless the request was still waiting for its turn it may have been done, or may be done later.
    #[error("the server has not answered within {waited:?}{}", if *.may_be_done { "; the request may be done, now or later" } else { "; nothing was done" })]
    Deadline {
        /// The time that the caller gave.
        waited: Duration,
        /// Whether the request may have been sent.
        may_be_done: bool,
    },
    /// This program has closed the session.
    #[error("the session was closed")]
    Closed,
    /// The file was not opened for this.
    #[error("the file is not open for {0}")]
    NotOpenFor(&'static str),
    /// A symlink on the way leads to a place that only a mount can know.
    #[error(
        "a symlink on the way has an absolute target, which is a place of this machine and not of the server"
    )]
    AbsoluteLink,
    /// Symlinks lead to symlinks without an end, or over more of them than a walk follows.
    #[error("more than {max} symlinks are on the way; they may lead to each other")]
    LinkLoop {
        /// The most symlinks of one walk.
        max: usize,
    },
    /// The path names the directory where paths begin, which cannot be removed or moved.
    #[error("the path names the session's root, which cannot be removed or moved")]
    IsRoot,
    /// A range past the end of a buffer.
    #[error("the range ends behind the buffer, which has {len} bytes")]
    PastBuffer {
        /// The buffer's length.
        len: usize,
    },
    /// A request of a queue is longer than requests are.
    #[error("a queue's request has at most {max} bytes; post several")]
    TooLong {
        /// The most bytes.
        max: usize,
    },
    /// The queue has as many requests under way as it is deep.
    #[error("the queue is full: {depth} requests are under way or wait to be polled")]
    QueueFull {
        /// The queue's depth.
        depth: usize,
    },
    /// Too many calls wait for the server.
    #[error("{waiting} calls wait for the server already")]
    Busy {
        /// How many wait.
        waiting: usize,
    },
    /// A depth of no queue.
    #[error("a queue is 1 to {max} deep")]
    Depth {
        /// The most.
        max: usize,
    },
    /// The region key, or the file that was opened by it, is over: the range was unbound, its time is over, or its binder has closed the file. So is a
    /// key whose binding the server does not know.
    #[error(
        "the region key is worth nothing any more: its range was unbound, its time is over, or who bound it has closed the file; ask for a new key"
    )]
    RegionEnded,
    /// The server knows the binding, and did not make this key of it, or this session may not open it.
    #[error(
        "the region key is refused: this server did not make it, or the range is of a file that this session may not open"
    )]
    KeyRefused,
    /// A range that the region key is not for.
    #[error("the region key is for bytes {start} to {end} of the file")]
    OutsideRegion {
        /// The first byte of the key's range.
        start: u64,
        /// The byte behind it.
        end: u64,
    },
    /// A grant of no length, or of too much at once.
    #[error("a write grant is of 1 to {max} bytes; ask for several")]
    GrantLength {
        /// The most bytes.
        max: u64,
    },
    /// The open file holds a write grant of a part of the range.
    #[error("this open file has a write grant of a part of the range already; drop that first")]
    GrantOverlaps,
    /// An atomic at a place that is no multiple of 8.
    #[error("an atomic is of eight bytes at a multiple of 8")]
    Unaligned,
    /// An atomic behind the end of the file.
    #[error("an atomic is of bytes that the file has; make it longer first")]
    PastEnd,
    /// The connection broke under a one-sided append or atomic, or the server was lost under an atomic by request: it may be done, and nobody can tell.
    #[error(
        "the connection or the server was lost before the answer came, so the change may be done or not; look at the file before you make it again"
    )]
    MayBeDone,
    /// Bytes that were written and not synced are lost with a killed server. Told once to each open file.
    #[error(
        "bytes of this file that were written and not synced before are lost with a killed server; write them again"
    )]
    BytesLost,
    /// The RNIC or the kernel gives no more memory, queues or descriptors.
    #[error("no memory, queue or descriptor: {0}")]
    Resources(String),
}

impl From<FsError> for NativeError {
    fn from(error: FsError) -> Self {
        match error {
            FsError::Server(Status::Stale | Status::SessionExpired) | FsError::BadHandle => Self::FileLost,
            FsError::Server(status) => Self::Server(status),
            FsError::ShutDown => Self::Closed,
            FsError::MayBeDone => Self::MayBeDone,
            // The caller gave the request up before it was sent.
            FsError::Interrupted => Self::Deadline { waited: Duration::ZERO, may_be_done: false },
        }
    }
}

impl From<RdmaError> for NativeError {
    fn from(error: RdmaError) -> Self {
        Self::Resources(error.to_string())
    }
}

impl From<std::io::Error> for NativeError {
    fn from(error: std::io::Error) -> Self {
        Self::Resources(error.to_string())
    }
}

impl NativeError {
    /// The server's status, if that is the error.
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Server(status) => Some(*status),
            _ => None,
        }
    }
}
