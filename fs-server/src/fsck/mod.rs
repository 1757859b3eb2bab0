//! `cuttlefsd fsck`: checks whether a pool that is not being served is whole, and with `repair` repairs it. docs/fsck.md lists each finding and its
//! repair.
//!
//! # How it works
//! 1. The pool's lock, and every data file's superblock.
//! 2. The metadata: a read-only check opens a copy of `meta/` in a scratch directory, for a store writes whenever it is
//!    opened.
//! 3. Records: `meta::Survey`, `meta::repair`.
//! 4. Pages: every page that holds bytes against its checksum, in pool order, 1 MiB at a time.
//!
//! # Invariants
//! * Without `repair` no byte of the pool changes: its files are opened for reading, the lock file's text included.
//! * Every repair is one batch, or one page's checksum.
//!
//! Memory: some 200 bytes an inode, 48 an extent, 1 bit a page, and 16 MiB.

mod pages;
mod report;

pub use report::{Finding, Report};

use crate::meta::{
    Detail, DiskOptions, DiskStore, HashKey, Meta, MetaError, Store, StoreError, Survey, image_count, paths,
    repair,
};
use crate::pool::{self, Intent, PoolDirectory, PoolError};
use cuttlefs_common::size::ByteSize;
use cuttlefs_common::world::{Clock, SystemClock};
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// What to check, and what to do.
#[derive(Clone, Debug)]
pub struct FsckOptions {
    /// The pool's directory.
    pub pool: PathBuf,
    /// Repair what can be.
    pub repair: bool,
    /// Read every page that holds bytes.
    pub checksums: bool,
    /// With `repair`: pages that rotted are served as they are from now on.
    pub accept_rotten: bool,
    /// The directory for a copy of the metadata; the system's directory for temporary files if not given.
    pub scratch: Option<PathBuf>,
}

/// Why a pool could not be checked.
#[derive(Debug, thiserror::Error)]
pub enum FsckError {
    /// The pool cannot be opened, and not because it is damaged.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// A copy of the metadata could not be made.
    #[error("cannot copy {path} to a scratch directory ({source}); name one with room by --scratch")]
    Scratch {
        /// What was copied.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The metadata cannot be read or written.
    #[error("the metadata: {0}")]
    Meta(#[from] MetaError),
    /// The data files cannot be read or written.
    #[error("the data files: {0}")]
    Data(io::Error),
}

/// A callback for progress: the stage, how much of it is done, and how much there is.
pub type Progress<'a> = &'a mut dyn FnMut(&str, u64, u64);

/// Checks a pool, and repairs it if that is asked for. `progress` gets the stage, how much of it is done, and how much there is.
///
/// # Errors
/// [`FsckError`] if the pool could not be checked. Faults of the pool are in the report.
pub fn fsck(options: &FsckOptions, progress: Progress<'_>) -> Result<Report, FsckError> {
    let mut report = Report::default();
    let intent = if options.repair { Intent::Serve } else { Intent::Look };
    let opened = match pool::open_to(&options.pool, intent) {
        Ok(opened) => opened,
        Err(error) if error.is_damage() => {
            report.find(Finding::pool("superblock", error.to_string()));
            return Ok(report);
        }
        Err(error) => return Err(error.into()),
    };
    let (store, _scratch) = match open_store(options, &opened)? {
        Ok(opened) => opened,
        Err(why) => {
            report.find(Finding::pool("store", format!("the metadata cannot be opened: {why}")));
            return Ok(report);
        }
    };
    let store: Arc<dyn Store> = Arc::new(store);
    let hash_key = match Meta::identity(&*store) {
        Ok((uuid, hash_key)) if uuid == opened.uuid().0 => hash_key,
        Ok(_) => {
            report.find(Finding::pool("store", "the metadata belongs to another pool".to_owned()));
            return Ok(report);
        }
        Err(error) => {
            report.find(Finding::pool("store", error.to_string()));
            return Ok(report);
        }
    };
    report.page_images = image_count(&*store).map_err(MetaError::from)?;
    progress("records", 0, 0);
    let survey = records(options, &opened, &*store, hash_key, &mut report)?;
    report.inodes = survey.inodes;
    report.entries = survey.entries;
    pages::check(options, &opened, &store, &survey, &mut report, progress).map_err(FsckError::Data)?;
    report.name_files(&paths(&*store, &report.files_with_bad_pages()).map_err(MetaError::from)?);
    Ok(report)
}

fn records(
    options: &FsckOptions,
    opened: &PoolDirectory,
    store: &dyn Store,
    hash_key: HashKey,
    report: &mut Report,
) -> Result<Survey, FsckError> {
    let survey = if options.repair {
        let now = SystemClock::new().now();
        let (repaired, left) = repair(store, hash_key, opened.pages(), now)?;
        repaired.iter().for_each(|problem| report.repaired(Finding::record(problem)));
        left
    } else {
        Survey::of(store, hash_key, opened.pages()).map_err(MetaError::from)?
    };
    survey.problems.iter().for_each(|problem| report.find(Finding::record(problem)));
    Ok(survey)
}

/// Prefix of a scratch directory's name, before the number of its process and what nobody can guess.
const SCRATCH_PREFIX: &str = "cuttlefs-fsck-";

/// Removes this user's scratch directories of processes that were killed.
fn remove_left(base: &Path) {
    let pid_of = |name: &str| name.strip_prefix(SCRATCH_PREFIX)?.split_once('-')?.0.parse::<u32>().ok();
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let pid = entry.file_name().to_str().and_then(pid_of);
        let is_left = pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists());
        let is_ours =
            || entry.metadata().is_ok_and(|found| found.uid() == rustix::process::geteuid().as_raw());
        if is_left && is_ours() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Makes a scratch directory, which is removed with the result. It has a new name and is this user's alone: other users may write to `base`, and the
/// copy has names and contents of files.
fn make_scratch(base: &Path) -> io::Result<TempDir> {
    fs::create_dir_all(base)?;
    remove_left(base);
    tempfile::Builder::new()
        .prefix(&format!("{SCRATCH_PREFIX}{}-", std::process::id()))
        .permissions(fs::Permissions::from_mode(0o700))
        .tempdir_in(base)
}

type Opened = Result<(DiskStore, Option<TempDir>), StoreError>;

/// Opens the store, or reports why it cannot be opened.
fn open_store(options: &FsckOptions, opened: &PoolDirectory) -> Result<Opened, FsckError> {
    let (path, scratch) = if options.repair {
        (opened.meta_dir(), None)
    } else {
        let base = options.scratch.clone().unwrap_or_else(std::env::temp_dir);
        let copied = make_scratch(&base).and_then(|scratch| {
            check_room(&opened.meta_dir(), scratch.path())?;
            copy(&opened.meta_dir(), scratch.path())?;
            Ok(scratch)
        });
        let scratch = copied.map_err(|source| FsckError::Scratch { path: opened.meta_dir(), source })?;
        (scratch.path().to_owned(), Some(scratch))
    };
    let store = DiskStore::open(&path, DiskOptions::default());
    Ok(store.map(|store| (store, scratch)))
}

/// Checks that a copy of `from` fits into the free space of the file system of `to`.
fn check_room(from: &Path, to: &Path) -> io::Result<()> {
    let needed = file_bytes(from)?;
    let room = rustix::fs::statvfs(to)?;
    let free = room.f_bavail.saturating_mul(room.f_frsize);
    if needed > free {
        let told = format!("the copy would take {}, and {} are free", ByteSize(needed), ByteSize(free));
        return Err(io::Error::new(io::ErrorKind::StorageFull, told));
    }
    Ok(())
}

/// The lengths of all files below a directory together.
fn file_bytes(directory: &Path) -> io::Result<u64> {
    let mut bytes = 0u64;
    for entry in fs::read_dir(directory)? {
        let (path, found) = entry.and_then(|entry| Ok((entry.path(), entry.metadata()?)))?;
        let more = if found.is_dir() { file_bytes(&path)? } else { found.len() };
        bytes = bytes.saturating_add(more);
    }
    Ok(bytes)
}

fn copy(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let (path, entry) = entry.map(|entry| (entry.path(), entry))?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            fs::create_dir_all(&target)?;
            copy(&path, &target)?;
        } else if entry.file_type()?.is_file() {
            fs::copy(&path, &target)?;
        } else {
            // Reading it might wait, or never end.
            let told = format!("{} is no regular file", path.display());
            return Err(io::Error::new(io::ErrorKind::InvalidData, told));
        }
    }
    Ok(())
}

impl Finding {
    /// The finding for a contradiction between records.
    fn record(problem: &crate::meta::Problem) -> Self {
        let page = match problem.detail {
            Detail::Page(page, _) => Some(page),
            _ => None,
        };
        Self {
            kind: problem.kind.name(),
            ino: problem.ino.0,
            page,
            path: None,
            what: problem.to_string(),
            repair: Some(problem.kind.repair()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_directory_is_new_and_nobody_elses() {
        let base = tempfile::tempdir().expect("dir");
        // What another user puts there, who knows the process.
        let planted = base.path().join(format!("{SCRATCH_PREFIX}{}", std::process::id()));
        fs::create_dir(&planted).expect("planted");
        let [one, two] = [(); 2].map(|()| make_scratch(base.path()).expect("made"));
        assert!(one.path() != two.path() && one.path() != planted);
        let mode = fs::metadata(one.path()).expect("there").permissions().mode();
        assert_eq!(mode & 0o7777, 0o700);
        let path = one.path().to_owned();
        drop(one);
        assert!(!path.exists() && two.path().exists() && planted.exists());
    }

    #[test]
    fn what_cannot_be_copied_is_refused_before_a_byte_is() {
        let (from, to) = (tempfile::tempdir().expect("dir"), tempfile::tempdir().expect("dir"));
        fs::create_dir(from.path().join("below")).expect("below");
        let file = fs::File::create(from.path().join("below/direct-0")).expect("a file");
        file.set_len(1 << 43).expect("sparse");
        let error = check_room(from.path(), to.path()).expect_err("no room");
        assert!(error.to_string().contains("8T"), "{error}");
        file.set_len(7).expect("short");
        check_room(from.path(), to.path()).expect("room");
        copy(from.path(), to.path()).expect("copied");
        assert_eq!(file_bytes(to.path()).expect("bytes"), 7);
        let (pipe, mode) = (from.path().join("pipe"), rustix::fs::Mode::RUSR);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).expect("a pipe");
        assert_eq!(copy(from.path(), to.path()).expect_err("refused").kind(), io::ErrorKind::InvalidData);
    }
}
