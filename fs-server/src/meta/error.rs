//! Errors below the façade: refusals, and damage. The façade logs and counts damage once, and answers `Status::Io`.

use super::record::RecordError;
use super::store::StoreError;
use cuttlefs_common::status::Status;

/// Why an operation was not done.
#[derive(Debug, thiserror::Error)]
pub enum MetaError {
    /// The operation is not possible. Nothing is damaged.
    #[error(transparent)]
    Refused(#[from] Status),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A record does not parse.
    #[error("metadata record {}: {source}", key.escape_ascii())]
    Record {
        /// The record's key.
        key: Vec<u8>,
        /// The error.
        source: RecordError,
    },
    /// Records contradict each other.
    #[error("metadata is inconsistent: {what} (inode {ino})")]
    Inconsistent {
        /// The contradiction.
        what: &'static str,
        /// The inode.
        ino: u64,
    },
    /// The store is of an unknown format.
    #[error("metadata format {found} is not {expected}; use the server version that wrote it")]
    Format {
        /// The version in the superblock.
        found: u32,
        /// The version that this server knows.
        expected: u32,
    },
    /// There is no superblock: the store was never formatted, or is no metadata store.
    #[error("the metadata store holds no superblock; format the pool first")]
    NotFormatted,
    /// There is a superblock already.
    #[error("the metadata store is formatted already")]
    AlreadyFormatted,
}

impl MetaError {
    /// Makes the error of a record that does not parse, for `map_err`.
    pub(super) fn record(key: &[u8]) -> impl FnOnce(RecordError) -> Self + '_ {
        |source| Self::Record { key: key.to_vec(), source }
    }
}
