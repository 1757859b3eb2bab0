//! Formatting: making a pool.
//!
//! # How it works
//! First everything is checked and nothing is changed: the lock, the directory, every data file. Directories and a lock file that this takes go again
//! if the format is refused. Then:
//!
//! | step | on disk after it | a crash here leaves |
//! | --- | --- | --- |
//! | 1 | `format-unfinished` with the new UUID | unfinished: `format` again, no force needed |
//! | 2 | `cuttlefs.toml` of an old pool removed | as above |
//! | 3 | `meta/` emptied or made | as above |
//! | 4 | data files at their length, sums and superblocks written and synced | as above |
//! | 5 | metadata made and flushed | as above |
//! | 6 | `cuttlefs.toml` renamed into place, directory synced | as above, until step 7 |
//! | 7 | `format-unfinished` removed, directory synced | a whole pool |
//!
//! A data file with the UUID in `format-unfinished` is recognized as this pool's, so a second attempt does not take it for another pool's. `open`
//! refuses a pool while `format-unfinished` exists. Only step 7 makes these files a pool. If a format is interrupted before it, the same command
//! makes the pool. (A file that needed `--force` and was not reached yet needs it again.)

use super::AlignedBuf;
use super::PoolError;
use super::data_files::DATA_START;
use super::directory::{
    DATA_FILE, LOCK_FILE, META_DIR, OpenedData, UNFINISHED_FILE, lock, open_data_file, read_head,
};
use super::error::at;
use super::signature::{HEAD_BYTES, signature_of};
use super::sums::layout::pages_that_fit;
use super::superblock::{MOST_DATA_FILES, SUPERBLOCK_BYTES, Superblock, file_bytes};
use crate::config::{CONFIG_FILE, Config, PoolConfig};
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::pool_uuid::PoolUuid;
use cuttlefs_common::size::ByteSize;
use cuttlefs_common::world::{Clock, SystemClock, SystemRandom};
use rustix::fs::FallocateFlags;
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Most pages of a pool (64 TiB). A damaged extent that reaches beyond counts as one of the last pages, so that no map grows with it.
pub const POOL_PAGES_MAX: u64 = 1 << 34;

/// Smallest data file: less space is not worth serving.
pub const LEAST_FILE_BYTES: u64 = 1 << 20;
/// Bytes of zeros that are written to a device at a time.
const ZEROS_BYTES: usize = 1 << 20;
const CONFIG_TEMPORARY: &str = "cuttlefs.toml.new";

/// What to format.
#[derive(Clone, Debug, Default)]
pub struct FormatOptions {
    /// The pool's directory, which is made if it does not exist.
    pub dir: PathBuf,
    /// Space for files in bytes, split evenly over the data *files*. Devices add all that they have. Not needed if all are devices.
    pub size: u64,
    /// Data files and block devices, relative to the current directory; if empty: `DIR/data`.
    pub data: Vec<PathBuf>,
    /// Whether to destroy an existing pool and the contents of data files.
    pub force: bool,
}

/// The result of a format.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormatReport {
    /// The pool's identity.
    pub uuid: PoolUuid,
    /// The number of its pages.
    pub pages: u64,
    /// The data files, each with its number of pages.
    pub data: Vec<(PathBuf, u64)>,
    /// Whether an old pool was destroyed.
    pub replaced: bool,
    /// Whether an earlier format had been interrupted.
    pub was_cut_off: bool,
}

/// A function that makes a new pool's metadata in a directory, durably.
pub type MakeMetadata<'a> =
    &'a dyn Fn(&Path, PoolUuid) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// What a format makes before it changes anything: missing directories, and the lock. They go again when this is dropped, if the format was refused.
struct Beginning {
    /// The directories that were missing, each before its parent.
    missing: Vec<PathBuf>,
    lock_file: PathBuf,
    /// The lock, and whether its file was not there before.
    lock: Option<(File, bool)>,
}

impl Beginning {
    fn new(dir: &Path) -> Result<Self, PoolError> {
        let absolute = std::path::absolute(dir).map_err(at("find", dir))?;
        let missing = absolute.ancestors().take_while(|path| !path.exists()).map(Path::to_owned).collect();
        let mut beginning = Self { missing, lock_file: absolute.join(LOCK_FILE), lock: None };
        beginning.make_directories(&absolute)?;
        beginning.lock = Some(lock(dir)?);
        Ok(beginning)
    }

    /// Makes the directory and its missing parents, durably.
    fn make_directories(&self, dir: &Path) -> Result<(), PoolError> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(at("make", dir))?;
        self.missing.iter().filter_map(|path| path.parent()).try_for_each(sync_directory)
    }

    /// Nothing goes any more. The lock is held as long as before.
    fn stay(&mut self) {
        self.missing.clear();
        if let Some((_, is_new)) = &mut self.lock {
            *is_new = false;
        }
    }
}

impl Drop for Beginning {
    fn drop(&mut self) {
        // Under the lock, so that nobody else has it. What somebody has put there meanwhile stays: only empty directories can go.
        if let Some((_, true)) = self.lock {
            let _ = fs::remove_file(&self.lock_file);
        }
        for dir in &self.missing {
            let _ = fs::remove_dir(dir);
        }
    }
}

/// A data file that was checked.
struct Candidate {
    path: PathBuf,
    /// Its path in `cuttlefs.toml`.
    named: PathBuf,
    /// The open file, if it exists.
    opened: Option<OpenedData>,
    pages: u64,
}

/// Makes a pool; `metadata` makes its metadata.
///
/// # Errors
/// `PoolError`, which says what to do. After a refusal nothing is changed.
pub fn format(options: &FormatOptions, metadata: MakeMetadata<'_>) -> Result<FormatReport, PoolError> {
    format_in_steps(options, metadata, &mut || Ok(()))
}

/// Like `format`; calls `step` after each step, and ends there if it returns an error.
fn format_in_steps(
    options: &FormatOptions,
    metadata: MakeMetadata<'_>,
    step: &mut dyn FnMut() -> Result<(), PoolError>,
) -> Result<FormatReport, PoolError> {
    let dir = options.dir.as_path();
    if dir.exists() && !dir.is_dir() {
        return Err(PoolError::NoDirectory(dir.to_owned()));
    }
    let mut beginning = Beginning::new(dir)?;
    let config_path = dir.join(CONFIG_FILE);
    let replaced = config_path.exists();
    let begun = unfinished_uuid(dir)?;
    if replaced && begun.is_none() && !options.force {
        return Err(PoolError::AlreadyThere { dir: dir.to_owned() });
    }
    if !replaced && begun.is_none() {
        refuse_foreign_directory(dir)?;
    }
    let was_cut_off = begun.is_some();
    if was_cut_off {
        tracing::info!(dir = %dir.display(), "an earlier format was cut off; making the pool from the beginning");
    }
    let ours = begun.flatten();
    let mut candidates = look_at_data(options, dir, ours)?;
    let pages = share_out(options, &mut candidates)?;
    check_room(&candidates)?;

    let uuid = ours.unwrap_or_else(|| PoolUuid::draw(&SystemRandom));
    if let Err(error) = write_durably(dir, UNFINISHED_FILE, UNFINISHED_FILE, uuid.to_string().as_bytes()) {
        if !was_cut_off {
            let _ = fs::remove_file(dir.join(UNFINISHED_FILE));
        }
        return Err(error);
    }
    beginning.stay();
    step()?;
    if replaced {
        fs::remove_file(&config_path).map_err(at("remove", &config_path))?;
        sync_directory(dir)?;
        step()?;
    }
    let meta = dir.join(META_DIR);
    if meta.exists() {
        fs::remove_dir_all(&meta).map_err(at("empty", &meta))?;
    }
    fs::DirBuilder::new().mode(0o700).create(&meta).map_err(at("make", &meta))?;
    step()?;
    let mut superblock = Superblock {
        pool_uuid: uuid,
        file_index: 0,
        file_count: candidates.len() as u32,
        first_page: 0,
        pages: 0,
        created_seconds: SystemClock::new().now().secs,
    };
    let mut data = Vec::new();
    for (index, candidate) in candidates.iter_mut().enumerate() {
        superblock.file_index = index as u32;
        superblock.pages = candidate.pages;
        lay_out(candidate, &superblock)?;
        step()?;
        superblock.first_page += candidate.pages;
        data.push((candidate.path.clone(), candidate.pages));
    }
    let meta = dir.join(META_DIR);
    metadata(&meta, uuid).map_err(|source| PoolError::Metadata { dir: meta, source })?;
    step()?;
    let named = candidates.iter().map(|candidate| candidate.named.clone()).collect();
    let config = Config::new(PoolConfig { uuid, size: pages * PAGE_SIZE_U64, data: named });
    write_durably(dir, CONFIG_TEMPORARY, CONFIG_FILE, config.render()?.as_bytes())?;
    step()?;
    let marker = dir.join(UNFINISHED_FILE);
    fs::remove_file(&marker).map_err(at("remove", &marker))?;
    sync_directory(dir)?;
    tracing::info!(dir = %dir.display(), %uuid, pages, "pool formatted");
    Ok(FormatReport { uuid, pages, data, replaced, was_cut_off })
}

/// The UUID of a format that was interrupted; `Some(None)` if not even the UUID was written completely.
fn unfinished_uuid(dir: &Path) -> Result<Option<Option<PoolUuid>>, PoolError> {
    let path = dir.join(UNFINISHED_FILE);
    match fs::read(&path) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            Ok(Some(text.trim().parse().ok()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(at("read", &path)(error)),
    }
}

/// Refuses to empty the `meta` of a directory that is no pool.
fn refuse_foreign_directory(dir: &Path) -> Result<(), PoolError> {
    let path = dir.join(META_DIR);
    match fs::read_dir(&path) {
        Ok(mut entries) => match entries.next() {
            Some(_) => Err(PoolError::ForeignDirectory(path)),
            None => Ok(()),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(at("list", &path)(error)),
    }
}

/// Opens every existing data file, and refuses those with other contents.
fn look_at_data(
    options: &FormatOptions,
    dir: &Path,
    ours: Option<PoolUuid>,
) -> Result<Vec<Candidate>, PoolError> {
    let count = options.data.len();
    if count > MOST_DATA_FILES as usize {
        return Err(PoolError::Size(format!("{count} data files; a pool has {MOST_DATA_FILES} at most")));
    }
    let default = [dir.join(DATA_FILE)];
    let paths = if options.data.is_empty() { &default[..] } else { &options.data[..] };
    let mut candidates: Vec<Candidate> = Vec::new();
    for path in paths {
        if path.is_dir() {
            return Err(PoolError::DataIsDirectory(path.clone()));
        }
        let absolute = std::path::absolute(path).map_err(at("find", path))?;
        // The directory must exist before anything is destroyed. The file need not.
        let path = match (absolute.parent(), absolute.file_name()) {
            (Some(parent), Some(name)) => {
                fs::canonicalize(parent).map_err(at("find the directory", parent))?.join(name)
            }
            _ => return Err(PoolError::WrongKind(absolute)),
        };
        let path = fs::canonicalize(&path).unwrap_or(path);
        if candidates.iter().any(|other| other.path == path) {
            return Err(PoolError::NamedTwice(path));
        }
        let named = match (fs::canonicalize(dir), path.file_name()) {
            (Ok(dir), Some(name)) if path.parent() == Some(&dir) => PathBuf::from(name),
            _ => path.clone(),
        };
        if named.to_str().is_none() {
            return Err(crate::config::ConfigError::NotUtf8(named).into());
        }
        let opened = match open_data_file(&path) {
            Ok(opened) => Some(opened),
            Err(PoolError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        if let Some(opened) = &opened
            && !options.force
        {
            refuse_occupied(opened, &path, ours)?;
        }
        candidates.push(Candidate { path, named, opened, pages: 0 });
    }
    Ok(candidates)
}

fn refuse_occupied(opened: &OpenedData, path: &Path, ours: Option<PoolUuid>) -> Result<(), PoolError> {
    let head = read_head(opened, path, HEAD_BYTES)?;
    let head = head.as_slice();
    let occupied = |what: String| Err(PoolError::Occupied { path: path.to_owned(), what });
    let superblock = head.first_chunk::<SUPERBLOCK_BYTES>().map(Superblock::parse);
    if let Some(Ok(superblock)) = superblock {
        if Some(superblock.pool_uuid) == ours {
            return Ok(());
        }
        return occupied(format!("data of cuttlefs pool {}", superblock.pool_uuid));
    }
    if let Some(what) = signature_of(head) {
        return occupied(what.to_owned());
    }
    // The bytes on a used device mean nothing. The bytes in a file were put there by somebody.
    if !opened.is_device && head.iter().any(|byte| *byte != 0) {
        return occupied("bytes that are not cuttlefs's".to_owned());
    }
    Ok(())
}

/// Gives each data file its number of pages. Returns the number of the pool's pages.
fn share_out(options: &FormatOptions, candidates: &mut [Candidate]) -> Result<u64, PoolError> {
    let is_device = |candidate: &Candidate| candidate.opened.as_ref().is_some_and(|opened| opened.is_device);
    let files = candidates.iter().filter(|candidate| !is_device(candidate)).count() as u64;
    let least = ByteSize(LEAST_FILE_BYTES);
    let pages_in_all = options.size.div_ceil(PAGE_SIZE_U64);
    if files > 0 && options.size / files < LEAST_FILE_BYTES {
        let (size, all) = (ByteSize(options.size), ByteSize(LEAST_FILE_BYTES * files));
        let wrong = match options.size {
            0 => "--size is missing, or 0".to_owned(),
            _ if files == 1 => format!("--size {size} is too little"),
            _ => format!("--size {size} is too little for {files} data files"),
        };
        return Err(PoolError::Size(format!(
            "{wrong}; it is the space for files, {all} at least: --size 8G, for instance"
        )));
    }
    let (mut total, mut files_seen) = (0u64, 0);
    for candidate in candidates {
        candidate.pages = match candidate.opened.as_ref().filter(|opened| opened.is_device) {
            Some(device) => {
                let usable = device.len.saturating_sub(DATA_START);
                let pages = pages_that_fit(usable / PAGE_SIZE_U64);
                if pages * PAGE_SIZE_U64 < LEAST_FILE_BYTES {
                    let path = candidate.path.display();
                    return Err(PoolError::Size(format!(
                        "{path} has less than {least}; name a larger device"
                    )));
                }
                pages
            }
            None => {
                files_seen += 1;
                // The first files get the pages that do not divide evenly.
                pages_in_all / files + u64::from(files_seen <= pages_in_all % files)
            }
        };
        total += candidate.pages;
    }
    if total > POOL_PAGES_MAX {
        let most = ByteSize(POOL_PAGES_MAX * PAGE_SIZE_U64);
        return Err(PoolError::Size(format!("a pool has at most {most}; --size or the devices have more")));
    }
    Ok(total)
}

/// Refuses files that do not fit, before anything is destroyed. Files on one file system share its free room, and each may also use the room of the
/// existing file that it replaces.
fn check_room(candidates: &[Candidate]) -> Result<(), PoolError> {
    let mut wanted: HashMap<u64, u64> = HashMap::new();
    for candidate in candidates {
        let path = candidate.path.as_path();
        let opened = candidate.opened.as_ref();
        if opened.is_some_and(|opened| opened.is_device) {
            continue;
        }
        let parent = path.parent().unwrap_or(Path::new("/"));
        let device = fs::metadata(parent).map_err(at("look at", parent))?.dev();
        let holds = match opened {
            Some(opened) => opened.file.metadata().map_err(at("look at", path))?.blocks() * 512,
            None => 0,
        };
        let needed = file_bytes(candidate.pages);
        let wanted = wanted.entry(device).or_default();
        *wanted += needed.saturating_sub(holds);
        let space =
            rustix::fs::statvfs(parent).map_err(|error| at("ask for the room of", parent)(error.into()))?;
        let free = space.f_bavail.saturating_mul(space.f_frsize);
        if *wanted > free {
            return Err(PoolError::NoRoom { path: path.to_owned(), needed, free });
        }
    }
    Ok(())
}

/// Brings a data file to its length and writes its superblock, durably.
fn lay_out(candidate: &mut Candidate, superblock: &Superblock) -> Result<(), PoolError> {
    let path = candidate.path.as_path();
    let fresh = candidate.opened.is_none();
    if fresh {
        let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        created.map_err(at("make", path))?;
        candidate.opened = Some(open_data_file(path)?);
    }
    let opened = candidate.opened.as_ref().expect("it was just opened");
    if !opened.is_device {
        let len = superblock.file_bytes();
        // Old bytes would be taken for checksums.
        let emptied = opened.file.set_len(0);
        emptied.map_err(at("empty", path))?;
        if let Err(error) = reserve(&opened.file, len) {
            let full = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EFBIG | libc::EDQUOT));
            if fresh {
                // An unfinished file would keep the little room that there was.
                let _ = fs::remove_file(path);
            }
            return Err(match full {
                true => PoolError::NoRoom { path: path.to_owned(), needed: len, free: 0 },
                false => at("extend", path)(error),
            });
        }
    }
    write_sums(opened, superblock).map_err(at("write the checksums of", path))?;
    let mut block = AlignedBuf::zeroed(DATA_START as usize);
    block.as_mut_slice()[..SUPERBLOCK_BYTES].copy_from_slice(&superblock.encode()[..]);
    opened.file.write_all_at(block.as_slice(), 0).map_err(at("write the superblock of", path))?;
    opened.file.sync_all().map_err(at("sync", path))?;
    match path.parent() {
        Some(parent) if fresh => sync_directory(parent),
        _ => Ok(()),
    }
}

/// Sets all sums to 0: no page was written yet.
fn write_sums(opened: &OpenedData, superblock: &Superblock) -> io::Result<()> {
    if opened.is_device {
        // A file needs no such writes: its sums are zeros already.
        let zeros = AlignedBuf::zeroed(ZEROS_BYTES);
        let mut offset = superblock.sums_start();
        while offset < superblock.file_bytes() {
            let len = (superblock.file_bytes() - offset).min(zeros.len() as u64);
            opened.file.write_all_at(&zeros.as_slice()[..len as usize], offset)?;
            offset += len;
        }
    }
    Ok(())
}

/// Gives the file exactly `len` bytes and reserves their blocks, so that a write to the pool never finds the file system full.
fn reserve(file: &File, len: u64) -> io::Result<()> {
    file.set_len(len)?;
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
            Ok(()) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::OPNOTSUPP) => {
                tracing::warn!("the file system below cannot reserve space; keep enough of it free");
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Writes a file under a temporary name, renames it, and makes both durable.
fn write_durably(dir: &Path, temporary: &str, name: &str, bytes: &[u8]) -> Result<(), PoolError> {
    let path = dir.join(temporary);
    let write = || {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(at("write", &path))?;
    if temporary != name {
        fs::rename(&path, dir.join(name)).map_err(at("rename", &path))?;
    }
    sync_directory(dir)
}

fn sync_directory(dir: &Path) -> Result<(), PoolError> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(at("sync", dir))
}

#[cfg(test)]
#[path = "format_tests.rs"]
mod tests;
