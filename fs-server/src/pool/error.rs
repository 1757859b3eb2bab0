//! The reasons why a pool cannot be formatted or opened. Every message says what to do next.

use super::superblock::SuperblockError;
use super::uuid::PoolUuid;
use crate::config::{CONFIG_FILE, ConfigError};
use cuttlefs_common::size::ByteSize;
use std::io;
use std::path::{Path, PathBuf};

/// Why a pool cannot be formatted or opened.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The operating system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// Nothing was formatted there.
    #[error("there is no pool in {0}; make one with `cuttlefsd format --pool {0} --size 8G`")]
    NoPool(PathBuf),
    /// `format` was ended before it was done.
    #[error("the pool in {0} was not formatted to the end; run the same `cuttlefsd format` again")]
    Unfinished(PathBuf),
    /// `format` could not make the metadata.
    #[error("cannot make the metadata in {dir}: {source}; mend that, then run `cuttlefsd format` again")]
    Metadata {
        /// Where.
        dir: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A pool is there, and `force` was not given.
    #[error("a pool is already there: {dir} has {CONFIG_FILE}; `--force` destroys it and all files in it")]
    AlreadyThere {
        /// Where.
        dir: PathBuf,
    },
    /// Another server or `format` has it open.
    #[error("{path} is in use by {}; stop it first", match pid { Some(pid) => format!("process {pid}"), None => "another process".to_owned() })]
    InUse {
        /// The pool's directory, or a data file.
        path: PathBuf,
        /// Who, if it said so.
        pid: Option<u32>,
    },
    /// A device is mounted, or part of something else.
    #[error("{0} is mounted or in use by the kernel; unmount it, or name another device")]
    DeviceBusy(PathBuf),
    /// A data file holds something.
    #[error("{path} holds {what}; `--force` destroys it")]
    Occupied {
        /// The data file or device.
        path: PathBuf,
        /// What is there.
        what: String,
    },
    /// `meta` or `log` of a directory that is no pool hold something.
    #[error("{0} is not empty and belongs to no pool; name an empty directory, or remove it yourself")]
    ForeignDirectory(PathBuf),
    /// A data file is neither a regular file nor a block device.
    #[error("{0} is neither a file nor a block device")]
    WrongKind(PathBuf),
    /// One data file is named twice.
    #[error("{0} is named twice as a data file")]
    NamedTwice(PathBuf),
    /// Too small, too large, or too many files.
    #[error("{0}")]
    Size(String),
    /// There is not enough room for a data file.
    #[error(
        "there is no room for {path}: it takes {} at once, and its file system has {} free for it; give a smaller --size, or name \
         a file elsewhere with --data", ByteSize(*needed), ByteSize(*free)
    )]
    NoRoom {
        /// The data file.
        path: PathBuf,
        /// Its length.
        needed: u64,
        /// What is free.
        free: u64,
    },
    /// `cuttlefs.toml` cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A data file is not there.
    #[error(
        "data file {index} of the pool, {path}, is missing; attach the device, or correct pool.data in {CONFIG_FILE}"
    )]
    MissingDevice {
        /// Its index.
        index: usize,
        /// Where it should be.
        path: PathBuf,
    },
    /// A data file's superblock is of another release, damaged, or not there.
    #[error("{path}: {source}")]
    Superblock {
        /// The data file.
        path: PathBuf,
        /// What is wrong.
        source: SuperblockError,
    },
    /// A data file belongs to another pool, or to another place in this one.
    #[error("{path} is not data file {index} of pool {uuid}: {reason}; correct pool.data in {CONFIG_FILE}")]
    WrongDataFile {
        /// The data file.
        path: PathBuf,
        /// Its index in the configuration.
        index: usize,
        /// The pool's identity.
        uuid: PoolUuid,
        /// What differs.
        reason: String,
    },
    /// A data file is shorter than it was.
    #[error(
        "{path} has {found} bytes where its pool pages need {needed}; it was cut, and files in it may be lost"
    )]
    Shrunk {
        /// The data file.
        path: PathBuf,
        /// Its length.
        found: u64,
        /// What it needs.
        needed: u64,
    },
    /// The metadata or log directory is gone.
    #[error(
        "{0} is missing; without it the pool's files cannot be found. Restore it from a backup, or format again"
    )]
    MissingDirectory(PathBuf),
}

impl PoolError {
    /// Whether it says that the pool is damaged, and not that it cannot be opened here and now.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Superblock { source, .. } => !matches!(source, SuperblockError::Version { .. }),
            Self::WrongDataFile { .. } | Self::Shrunk { .. } | Self::MissingDirectory(_) => true,
            _ => false,
        }
    }
}

/// Puts what was tried and on what into an error.
pub(super) fn at<'a>(action: &'static str, path: &'a Path) -> impl Fn(io::Error) -> PoolError + 'a {
    move |source| PoolError::Io { action, path: path.to_owned(), source }
}
