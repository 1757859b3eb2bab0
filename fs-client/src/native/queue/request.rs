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
    /// Writes a range of a buffer at the end of the file. Under a write grant, `MayBeDone` if the connection breaks.
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
    /// As [`File::compare_swap`].
    CompareSwap {
        /// The file, open for reading and writing.
        file: &'q File,
        /// The place of the word in the file, a multiple of 8.
        offset: u64,
        /// The word that must be there.
        expect: u64,
        /// The word to store.
        swap: u64,
    },
    /// As [`File::fetch_add`].
    FetchAdd {
        /// The file, open for reading and writing.
        file: &'q File,
        /// The place of the word in the file, a multiple of 8.
        offset: u64,
        /// What to add.
        add: u64,
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
        let (file, offset, buffer, at, len, is_write) = match *self {
            Self::Read { file, offset, buffer, at, len } => (file, Some(offset), buffer, at, len, false),
            Self::Write { file, offset, buffer, at, len } => (file, Some(offset), buffer, at, len, true),
            Self::Append { file, buffer, at, len } => (file, None, buffer, at, len, true),
            Self::CompareSwap { file, offset, .. } | Self::FetchAdd { file, offset, .. } => {
                return file.check_atomic(offset);
            }
            Self::Sync { .. } => return Ok(()),
        };
        if len > BYTES_MAX {
            return Err(NativeError::TooLong { max: BYTES_MAX });
        }
        buffer.check(at, len)?;
        file.check(is_write)?;
        offset.map_or(Ok(()), |offset| file.opened().check_range(offset, len))
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
    /// An atomic was done; this was there before. A compare-swap has swapped if it is what was expected.
    Old(u64),
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
