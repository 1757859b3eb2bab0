//! The requests of a queue, and their ends.

use super::super::{Buffer, File, NativeError};
use super::BYTES_MAX;

/// A request to post. Ranges of buffers begin at `at`.
#[derive(Clone, Copy, Debug)]
pub enum Post<'q> {
    /// Reads into a range of a buffer. Fewer bytes come where the file ends.
    Read {
        /// The file, open for reading.
        file: &'q File,
        /// The place in the file.
        offset: u64,
        /// The buffer.
        buffer: &'q Buffer,
        /// The place in the buffer.
        at: usize,
        /// The number of bytes, at most 1 MiB.
        len: usize,
    },
    /// Writes a range of a buffer.
    Write {
        /// The file, open for writing.
        file: &'q File,
        /// The place in the file.
        offset: u64,
        /// The buffer.
        buffer: &'q Buffer,
        /// The place in the buffer.
        at: usize,
        /// The number of bytes, at most 1 MiB.
        len: usize,
    },
    /// Writes a range of a buffer at the end of the file.
    Append {
        /// The file, open for writing.
        file: &'q File,
        /// The buffer.
        buffer: &'q Buffer,
        /// The place in the buffer.
        at: usize,
        /// The number of bytes, at most 1 MiB.
        len: usize,
    },
    /// Makes durable what this queue's requests for the file that were posted before write, and everything that was written before.
    Sync {
        /// The file.
        file: &'q File,
    },
}

impl Post<'_> {
    /// Whether it can be done at all.
    pub(super) fn check(&self) -> Result<(), NativeError> {
        let (file, buffer, at, len, is_write) = match *self {
            Self::Read { file, buffer, at, len, .. } => (file, buffer, at, len, false),
            Self::Write { file, buffer, at, len, .. } | Self::Append { file, buffer, at, len } => {
                (file, buffer, at, len, true)
            }
            Self::Sync { .. } => return Ok(()),
        };
        if len > BYTES_MAX {
            return Err(NativeError::TooLong { max: BYTES_MAX });
        }
        buffer.check(at, len)?;
        file.check(is_write)
    }
}

/// What a request has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// So many bytes are in the buffer.
    Read(usize),
    /// So many bytes were written.
    Written {
        /// The place in the file.
        offset: u64,
        /// The number of bytes.
        len: usize,
    },
    /// It is durable.
    Synced,
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// The poster's name for the request.
    pub token: u64,
    /// What came of it.
    pub result: Result<Done, NativeError>,
}
