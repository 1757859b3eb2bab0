//! An open pool: its directory, lock, configuration and data files.
//!
//! ```text
//! DIR/cuttlefs.toml        the parts of the pool; its presence says that the pool is whole
//!     data                 the data file, if no others were named
//!     meta/                metadata, and the log of all that changes
//!     lock                 flock of the process that has the pool open, with its number inside
//!     format-unfinished    there while `format` runs; holds the new pool's UUID
//! ```
//!
//! # Invariants
//! * While a `PoolDirectory` exists, no other process of this release has the pool open: the lock file and every regular data file are flocked, and
//!   block devices are open with O_EXCL, which also keeps the kernel from mounting them.
//! * Every data file has been checked: it belongs to this pool, at this index, and is long enough.

use super::PoolError;
use super::aligned_buf::AlignedBuf;
use super::data_files::DataFiles;
use super::error::at;
use super::superblock::{SUPERBLOCK_BYTES, Superblock};
use crate::config::{CONFIG_FILE, Config};
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::pool_uuid::PoolUuid;
use rustix::fs::{FlockOperation, OFlags};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Name of metadata's directory.
pub const META_DIR: &str = "meta";
/// Name of the data file if no other is given.
pub const DATA_FILE: &str = "data";
/// How long to wait for the lock of a pool's directory. A process that has just ended, or a child between fork and exec, holds it for some
/// milliseconds more. A process that holds it longer really has the pool open.
const DIRECTORY_PATIENCE: Duration = Duration::from_millis(200);
/// How long the holder of the directory's lock waits for the lock of a data file, and for a device that is open elsewhere. The io_uring of a server
/// closes its files after the server's end; on a busy machine that takes a while.
const DATA_PATIENCE: Duration = Duration::from_secs(5);
const LOCK_RETRY: Duration = Duration::from_millis(10);
pub(super) const LOCK_FILE: &str = "lock";
/// A link in the place of the lock file is not followed, since the file is written to, and a pipe there is not waited for.
const LOCK_FLAGS: i32 = libc::O_NOFOLLOW | libc::O_NONBLOCK;
pub(super) const UNFINISHED_FILE: &str = "format-unfinished";

/// A pool that only this process has open.
#[derive(Debug)]
pub struct PoolDirectory {
    dir: PathBuf,
    config: Config,
    files: Arc<DataFiles>,
    created_seconds: i64,
    /// Closing it releases the lock.
    _lock: File,
}

/// Opens a pool: takes its lock, and checks every data file.
///
/// # Errors
/// `PoolError`, which says what to do.
pub fn open(dir: &Path) -> Result<PoolDirectory, PoolError> {
    open_to(dir, Intent::Serve)
}

/// The purpose of opening a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intent {
    /// To read and write.
    Serve,
    /// To read: no byte changes, not even in the lock file.
    Look,
}

/// Opens a pool for the given purpose.
///
/// # Errors
/// As `open`.
pub fn open_to(dir: &Path, intent: Intent) -> Result<PoolDirectory, PoolError> {
    let unfinished = dir.join(UNFINISHED_FILE).exists();
    let config_path = dir.join(CONFIG_FILE);
    // If the file cannot be checked for, this is an error: nobody should be told to make another pool in place of this one.
    if !config_path.try_exists().map_err(at("look at", &config_path))? && !unfinished {
        return Err(PoolError::NoPool(dir.to_owned()));
    }
    // The lock comes first, because a `format` may be changing the files.
    let lock = match intent {
        Intent::Serve => lock(dir)?.0,
        Intent::Look => lock_quietly(dir)?,
    };
    if dir.join(UNFINISHED_FILE).exists() || !config_path.exists() {
        return Err(PoolError::Unfinished(dir.to_owned()));
    }
    let config = Config::load(&config_path)?;
    let meta_dir = dir.join(META_DIR);
    if !meta_dir.is_dir() {
        return Err(PoolError::MissingDirectory(meta_dir));
    }
    let mut files = DataFiles::new();
    let mut created_seconds = 0;
    for (index, path) in config.pool.data.iter().enumerate() {
        let path = dir.join(path);
        let opened = open_data_file_to(&path, intent).map_err(|error| match error {
            PoolError::Io { source, .. } if is_missing(&source) => {
                PoolError::MissingDevice { index, path: path.clone() }
            }
            other => other,
        })?;
        let superblock = read_superblock(&opened, &path)?;
        check_place(&superblock, &config, index, files.pages(), &path)?;
        let needed = superblock.file_bytes();
        if opened.len < needed {
            return Err(PoolError::Shrunk { path, found: opened.len, needed });
        }
        created_seconds = superblock.created_seconds;
        files.push(path, opened.file, superblock.pages, opened.direct);
    }
    let files = Arc::new(files);
    Ok(PoolDirectory { dir: dir.to_owned(), config, files, created_seconds, _lock: lock })
}

impl PoolDirectory {
    /// The path of the pool's directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The contents of `cuttlefs.toml`.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The pool's identity.
    pub fn uuid(&self) -> PoolUuid {
        self.config.pool.uuid
    }

    /// When it was formatted, in seconds since the epoch.
    pub fn created_seconds(&self) -> i64 {
        self.created_seconds
    }

    /// Number of pool pages.
    pub fn pages(&self) -> u64 {
        self.files.pages()
    }

    /// The data files, for disks.
    pub fn data_files(&self) -> &Arc<DataFiles> {
        &self.files
    }

    /// The path of metadata's directory.
    pub fn meta_dir(&self) -> PathBuf {
        self.dir.join(META_DIR)
    }
}

/// An open data file.
#[derive(Debug)]
pub(super) struct OpenedData {
    pub(super) file: File,
    /// The length of the file or device in bytes.
    pub(super) len: u64,
    pub(super) direct: bool,
    pub(super) is_device: bool,
}

/// Opens a data file or device exclusively.
pub(super) fn open_data_file(path: &Path) -> Result<OpenedData, PoolError> {
    open_data_file_to(path, Intent::Serve)
}

fn open_data_file_to(path: &Path, intent: Intent) -> Result<OpenedData, PoolError> {
    let writes = intent == Intent::Serve;
    let kind = std::fs::metadata(path).map_err(at("open", path))?.file_type();
    let is_device = kind.is_block_device();
    if !is_device && !kind.is_file() {
        return Err(PoolError::WrongKind(path.to_owned()));
    }
    // Without O_CREAT, O_EXCL means that the open fails if the kernel or another process has this block device.
    let exclusive = if is_device { OFlags::EXCL } else { OFlags::empty() };
    let try_open = |flags: OFlags| {
        let mut options = OpenOptions::new();
        options.read(true).write(writes).custom_flags((flags | exclusive).bits() as i32);
        unless_busy(is_device, || options.open(path))
    };
    let (opened, direct) = match try_open(OFlags::DIRECT) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            tracing::warn!(
                path = %path.display(),
                "this file system has no direct IO; the kernel caches the pool a second time"
            );
            (try_open(OFlags::empty()), false)
        }
        other => (other, true),
    };
    let mut file = opened.map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) if is_device => PoolError::DeviceBusy(path.to_owned()),
        _ => at("open", path)(error),
    })?;
    // Also for devices, because two servers may have the same device under two names.
    if !flock(&file, path, DATA_PATIENCE)? {
        return Err(PoolError::InUse { path: path.to_owned(), pid: None });
    }
    // By seeking to the end, because the metadata of a device says that its length is zero.
    let len = file.seek(SeekFrom::End(0)).map_err(at("find the length of", path))?;
    Ok(OpenedData { file, len, direct, is_device })
}

/// Reads the first `bytes` bytes of a data file, or fewer if it is shorter.
pub(super) fn read_head(opened: &OpenedData, path: &Path, bytes: usize) -> Result<AlignedBuf, PoolError> {
    let mut buffer = AlignedBuf::zeroed(bytes);
    let mut done = 0;
    while done < buffer.len() {
        match opened.file.read_at(&mut buffer.as_mut_slice()[done..], done as u64) {
            Ok(0) => break,
            // A direct read ends inside a sector only at the end of the file.
            Ok(count) if opened.direct && count % 512 != 0 => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(at("read", path)(error)),
        }
    }
    Ok(buffer)
}

fn read_superblock(opened: &OpenedData, path: &Path) -> Result<Superblock, PoolError> {
    let head = read_head(opened, path, SUPERBLOCK_BYTES)?;
    let bytes = head.as_slice().first_chunk().expect("a buffer of one superblock");
    let parsed = Superblock::parse(bytes);
    parsed.map_err(|source| PoolError::Superblock { path: path.to_owned(), source })
}

fn check_place(
    superblock: &Superblock,
    config: &Config,
    index: usize,
    first_page: u64,
    path: &Path,
) -> Result<(), PoolError> {
    let count = config.pool.data.len();
    let wrong = |reason: String| {
        Err(PoolError::WrongDataFile { path: path.to_owned(), index, uuid: config.pool.uuid, reason })
    };
    if superblock.pool_uuid != config.pool.uuid {
        return wrong(format!("it belongs to pool {}", superblock.pool_uuid));
    }
    if superblock.file_index as usize != index {
        return wrong(format!("it is data file {}", superblock.file_index));
    }
    if superblock.file_count as usize != count {
        return wrong(format!("the pool has {} data files and {count} are named", superblock.file_count));
    }
    if superblock.first_page != first_page {
        return wrong(format!("its pages begin at {} and not at {first_page}", superblock.first_page));
    }
    let pages = first_page + superblock.pages;
    if index + 1 == count && pages * PAGE_SIZE_U64 != config.pool.size {
        return wrong(format!("the pool ends at page {pages} and pool.size says {} bytes", config.pool.size));
    }
    Ok(())
}

/// Takes the lock of a pool's directory. Returns also whether the lock file was not there before.
pub(super) fn lock(dir: &Path) -> Result<(File, bool), PoolError> {
    let path = dir.join(LOCK_FILE);
    let (file, is_new) = loop {
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600).custom_flags(LOCK_FLAGS);
        let (opened, is_new) = match options.clone().create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => (options.open(&path), false),
            made => (made, true),
        };
        let file = match opened {
            // It went between the two.
            Err(error) if !is_new && error.kind() == io::ErrorKind::NotFound => continue,
            opened => opened.map_err(at("open", &path))?,
        };
        if !flock(&file, &path, DIRECTORY_PATIENCE)? {
            return Err(in_use(dir, &file));
        }
        // A format that is refused takes the file away that it has made. Who waited for that one's lock has the lock of no file then.
        if is_at(&file, &path) {
            break (file, is_new);
        }
    };
    // The number is only for the message above: the lock is what counts, so the number may be lost or missing. It is written in place and with a
    // fixed length, so it needs space on a full disk only the first time.
    match file.write_all_at(format!("{:>15}\n", std::process::id()).as_bytes(), 0) {
        Err(error) if error.kind() != io::ErrorKind::StorageFull => Err(at("write", &path)(error)),
        _ => Ok((file, is_new)),
    }
}

/// Whether a path leads to this open file.
fn is_at(file: &File, path: &Path) -> bool {
    let of = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(open), Ok(named)) => of(open) == of(named),
        _ => false,
    }
}

/// Takes the lock of a pool's directory without changing the lock file.
fn lock_quietly(dir: &Path) -> Result<File, PoolError> {
    let path = dir.join(LOCK_FILE);
    // The format of the pool has made it.
    let file =
        OpenOptions::new().read(true).custom_flags(LOCK_FLAGS).open(&path).map_err(at("open", &path))?;
    if !flock(&file, &path, DIRECTORY_PATIENCE)? {
        return Err(in_use(dir, &file));
    }
    Ok(file)
}

/// The error for a lock that another process holds. The last process that opened the pool for writing has put its number into the file.
fn in_use(dir: &Path, lock: &File) -> PoolError {
    let mut text = String::new();
    let read = lock.take(32).read_to_string(&mut text);
    let pid = read.ok().and_then(|_| text.trim().parse().ok());
    PoolError::InUse { path: dir.to_owned(), pid }
}

/// Opens a device, and waits a moment if it is busy.
fn unless_busy(is_device: bool, open: impl Fn() -> io::Result<File>) -> io::Result<File> {
    let give_up = Instant::now() + DATA_PATIENCE;
    loop {
        match open() {
            Err(error)
                if is_device && error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < give_up =>
            {
                std::thread::sleep(LOCK_RETRY);
            }
            other => return other,
        }
    }
}

/// Takes the lock of a file. Returns whether this process has it now.
fn flock(file: &File, path: &Path, patience: Duration) -> Result<bool, PoolError> {
    let give_up = Instant::now() + patience;
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(true),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() >= give_up => return Ok(false),
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(LOCK_RETRY),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(at("lock", path)(error.into())),
        }
    }
}

/// Whether an error means that there is no such file or device.
fn is_missing(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || matches!(error.raw_os_error(), Some(libc::ENXIO | libc::ENODEV | libc::ENOMEDIUM))
}
