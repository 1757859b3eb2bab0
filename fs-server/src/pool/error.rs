//! The reasons why a pool cannot be formatted or opened. Every message says what to do next.

use super::superblock::SuperblockError;
use crate::config::{CONFIG_FILE, ConfigError};
use cuttlefs_common::pool_uuid::PoolUuid;
use cuttlefs_common::size::ByteSize;
use std::io;
use std::path::{Path, PathBuf};

/// Why a pool cannot be formatted or opened.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The system refused an operation.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// Its file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// There is no pool in this directory.
    #[error(
        "there is no pool in {0}; name the directory of one, or make one with `cuttlefsd format --pool {0} --size 8G`"
    )]
    NoPool(PathBuf),
    /// `format` was interrupted.
    #[error("the pool in {0} was not formatted to the end; run the same `cuttlefsd format` again")]
    Unfinished(PathBuf),
    /// `format` could not make the metadata.
    #[error("cannot make the metadata in {dir}: {source}; mend that, then run `cuttlefsd format` again")]
    Metadata {
        /// The directory.
        dir: PathBuf,
        /// The error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A pool is there, and `force` was not given.
    #[error("a pool is already there: {dir} has {CONFIG_FILE}; `--force` destroys it and all files in it")]
    AlreadyThere {
        /// The directory.
        dir: PathBuf,
    },
    /// Another server or `format` has it open.
    #[error("{path} is in use by {}; stop it first", match pid { Some(pid) => format!("process {pid}"), None => "another process".to_owned() })]
    InUse {
        /// The pool's directory, or a data file.
        path: PathBuf,
        /// The other process, if it is known.
        pid: Option<u32>,
    },
    /// A device is mounted, or in use by the kernel.
    #[error("{0} is mounted or in use by the kernel; unmount it, or name another device")]
    DeviceBusy(PathBuf),
    /// A data file has other contents.
    #[error("{path} holds {what}; `--force` destroys it")]
    Occupied {
        /// The data file or device.
        path: PathBuf,
        /// The contents.
        what: String,
    },
    /// The directory `meta` of a directory that is no pool is not empty.
    #[error("{0} is not empty and belongs to no pool; name an empty directory, or remove it yourself")]
    ForeignDirectory(PathBuf),
    /// A file is where the pool's directory should be.
    #[error("{0} is a file; a pool is a directory: name another one")]
    NoDirectory(PathBuf),
    /// A directory is named as a data file.
    #[error("{} is a directory; name a file in it, such as {}", .0.display(), .0.join("data").display())]
    DataIsDirectory(PathBuf),
    /// A data file is neither a regular file nor a block device.
    #[error("{0} is neither a file nor a block device")]
    WrongKind(PathBuf),
    /// One data file is named twice.
    #[error("{0} is named twice as a data file")]
    NamedTwice(PathBuf),
    /// Sizes or the number of files are too small or too large.
    #[error("{0}")]
    Size(String),
    /// The file system has too little room for a data file.
    #[error(
        "there is no room for {path}: it takes {} at once, and its file system has {} free for it; give a smaller --size, or name \
         a file elsewhere with --data", ByteSize(*needed), ByteSize(*free)
    )]
    NoRoom {
        /// The data file.
        path: PathBuf,
        /// The length that it needs.
        needed: u64,
        /// The room that is free.
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
        /// The path where it should be.
        path: PathBuf,
    },
    /// A data file's superblock is of another release, damaged, or missing.
    #[error("{path}: {source}")]
    Superblock {
        /// The data file.
        path: PathBuf,
        /// The error in the superblock.
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
        /// The difference.
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
        /// The length that it needs.
        needed: u64,
    },
    /// The metadata directory is missing.
    #[error(
        "{0} is missing; without it the pool's files cannot be found. Restore it from a backup, or format again"
    )]
    MissingDirectory(PathBuf),
}

impl PoolError {
    /// Whether the error means that the pool is damaged, and not only that it cannot be opened here and now.
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Superblock { source, .. } => !matches!(source, SuperblockError::Version { .. }),
            Self::WrongDataFile { .. } | Self::Shrunk { .. } | Self::MissingDirectory(_) => true,
            _ => false,
        }
    }
}

/// Makes the error for a failed action on a file.
pub(super) fn at<'a>(action: &'static str, path: &'a Path) -> impl Fn(io::Error) -> PoolError + 'a {
    move |source| PoolError::Io { action, path: path.to_owned(), source }
}
