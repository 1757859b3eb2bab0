//! Errors below the façade: an answer, or damage. The façade logs and counts damage, once, and answers `Status::Io`.

use super::record::RecordError;
use super::store::StoreError;
use cuttlefs_common::status::Status;

/// Why an operation was not done.
#[derive(Debug, thiserror::Error)]
pub enum MetaError {
    /// The file system says no; nothing is wrong with it.
    #[error(transparent)]
    Refused(#[from] Status),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A record is not what it must be.
    #[error("metadata record {}: {source}", key.escape_ascii())]
    Record {
        /// Its key.
        key: Vec<u8>,
        /// What is wrong.
        source: RecordError,
    },
    /// Records contradict each other.
    #[error("metadata is inconsistent: {what} (inode {ino})")]
    Inconsistent {
        /// What is wrong.
        what: &'static str,
        /// Where.
        ino: u64,
    },
    /// The store is of a format this server does not know.
    #[error("metadata format {found} is not {expected}; use the server version that wrote it")]
    Format {
        /// In the superblock.
        found: u32,
        /// Known here.
        expected: u32,
    },
    /// There is no superblock: never formatted, or not a metadata store.
    #[error("the metadata store holds no superblock; format the pool first")]
    NotFormatted,
    /// There is one already.
    #[error("the metadata store is formatted already")]
    AlreadyFormatted,
}

impl MetaError {
    /// For `map_err` on a record's parse.
    pub(super) fn record(key: &[u8]) -> impl FnOnce(RecordError) -> Self + '_ {
        |source| Self::Record { key: key.to_vec(), source }
    }
}
