//! `cuttlefs defragment`: has the server move the pages of files to fewer runs of its pool.
//!
//! The command walks the mount by the kernel, and asks for the moves in a session of its own, with the key and the directory of the mount, and the rights
//! of the calling user. The files may be in use meanwhile.

use super::connect::Trust;
use super::run_state::RunState;
use super::{figures, key};
use crate::fuse::MountTable;
use crate::native::{ConnectOptions, Defragmented, NativeError, OpenOptions, Session, Status};
use anyhow::{Context, anyhow, bail};
use clap::Args;
use cuttlefs_common::explain::explain;
use cuttlefs_common::size::ByteSize;
use std::fs;
use std::io::{ErrorKind, IsTerminal, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes of a page.
const PAGE_BYTES: u64 = cuttlefs_common::ids::PAGE_SIZE_U64;
/// Pages between two lines of progress of one file on a terminal: 16 MiB.
const PROGRESS_PAGES: u64 = 4096;

/// Arguments of `defragment`.
#[derive(Args)]
#[command(after_help = "Examples:
  cuttlefs defragment /mnt/database
  cuttlefs defragment --verbose /mnt/logs /mnt/images/disk.img

Moves the pages of files so that they lie in fewer runs of the server's pool, which makes layouts
short and reads from the SSD long. Files may be open, locked, mapped and written meanwhile: nothing
but the places of their pages changes. Writers of a file wait for a step of 1 MiB at a time. It
wants as much free space as the part of the file has that is moved. Ctrl-C ends it between two
steps.

Prints the runs before and after of each file that was moved, and a sum; --verbose also prints files
that stay. You must be permitted to read and write the files. It fails if one could not be moved.")]
pub(super) struct DefragmentArgs {
    /// Files and folders in mounts of cuttlefs
    #[arg(required = true, value_name = "FILE|FOLDER")]
    paths: Vec<PathBuf>,
    /// Print a line for files that are in as few runs as can be, too
    #[arg(long, short)]
    verbose: bool,
    /// The key to show over tcp:// and rdma:// [default: the mount's]
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
}

pub(super) fn run(args: &DefragmentArgs) -> anyhow::Result<()> {
    let is_ended = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, is_ended.clone()).context("cannot catch signals")?;
    }
    let mut sum = Sum::default();
    for path in &args.paths {
        let mut work = Work::begin(path, args, &is_ended)?;
        let done = work.path(path, &mut sum);
        work.session.close();
        done?;
    }
    tell(&format!("{sum}\n"))?;
    match (sum.failed, is_ended.load(Ordering::Relaxed)) {
        (_, true) => bail!("ended by a signal; what was moved stays moved, and the same command goes on"),
        (0, false) => Ok(()),
        (failed, false) => bail!("{failed} files could not be moved; see above"),
    }
}

/// All files together.
#[derive(Debug, Default)]
struct Sum {
    files: u64,
    moved: u64,
    failed: u64,
    figures: Defragmented,
}

impl std::fmt::Display for Sum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Defragmented { runs_before, runs_after, moved_pages } = self.figures;
        write!(
            f,
            "{} files, {} of them moved; {} moved; {runs_after} runs, {runs_before} before",
            self.files,
            self.moved,
            ByteSize(moved_pages * PAGE_BYTES)
        )
    }
}

/// A mount whose files are moved.
struct Work<'a> {
    session: Session,
    mountpoint: PathBuf,
    /// The device number of the mount: what is mounted in it is left out.
    device: u64,
    args: &'a DefragmentArgs,
    is_ended: &'a AtomicBool,
}

impl<'a> Work<'a> {
    /// Connects to the server of the mount in which a path is.
    fn begin(path: &Path, args: &'a DefragmentArgs, is_ended: &'a AtomicBool) -> anyhow::Result<Self> {
        let missing = || format!("there is no {}", path.display());
        let table = MountTable::read()?;
        let real = table.resolve(path).with_context(missing)?;
        let entry = table.containing(&real).filter(|entry| entry.is_cuttlefs());
        let entry = entry.with_context(|| {
            format!("{} is in no mount of cuttlefs; name a file or a folder in one", path.display())
        })?;
        let mountpoint = entry.mountpoint.clone();
        let state = RunState::load(&mountpoint)?.with_context(|| {
            format!(
                "{} was mounted by another user; ask them, or whoever administers the machine, to move files there",
                mountpoint.display()
            )
        })?;
        let trust = Trust { key: key::chosen([args.key.clone(), state.trust.key])?, ..state.trust };
        let options = ConnectOptions {
            trust,
            label: format!("defragment {}", mountpoint.display()),
            pool: Some(figures::pool_of(&mountpoint)?),
            subtree: state.subtree,
            threads: 1,
            deadline: None,
        };
        let session =
            Session::connect(&entry.source, options).map_err(|error| anyhow!("{}", explain(&error)))?;
        let device = fs::symlink_metadata(&mountpoint).with_context(missing)?.dev();
        Ok(Self { session, mountpoint, device, args, is_ended })
    }

    /// Moves a file, or the files of a folder and of those in it.
    fn path(&mut self, path: &Path, sum: &mut Sum) -> anyhow::Result<()> {
        let real = fs::canonicalize(path).with_context(|| format!("cannot look up {}", path.display()))?;
        let found =
            fs::symlink_metadata(&real).with_context(|| format!("cannot look up {}", real.display()))?;
        if found.dev() != self.device {
            let (path, real, mountpoint) = (path.display(), real.display(), self.mountpoint.display());
            bail!(
                "{path} leads to {real}, which is not in the mount at {mountpoint}; name that, if it is in another mount of cuttlefs"
            );
        }
        let mut folders = Vec::new();
        self.entry(&real, sum, &mut folders)?;
        // One open folder for each level.
        while let Some((folder, entries)) = folders.last_mut() {
            if self.is_ended.load(Ordering::Relaxed) {
                break;
            }
            let entry = match entries.next() {
                None => {
                    folders.pop();
                    continue;
                }
                Some(Ok(entry)) => entry.path(),
                Some(Err(error)) => {
                    self.failed(&folder.clone(), &error, sum)?;
                    folders.pop();
                    continue;
                }
            };
            self.entry(&entry, sum, &mut folders)?;
        }
        Ok(())
    }

    /// Moves a file, or begins a folder. All other kinds have no pages.
    fn entry(
        &self,
        path: &Path,
        sum: &mut Sum,
        folders: &mut Vec<(PathBuf, fs::ReadDir)>,
    ) -> anyhow::Result<()> {
        let found = match fs::symlink_metadata(path) {
            Ok(found) => found,
            // It was removed meanwhile.
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return self.failed(path, &error, sum),
        };
        if found.dev() != self.device {
            return Ok(());
        }
        if found.is_dir() {
            match fs::read_dir(path) {
                Ok(entries) => folders.push((path.to_owned(), entries)),
                Err(error) => return self.failed(path, &error, sum),
            }
        } else if found.is_file() {
            return self.file(path, sum);
        }
        Ok(())
    }

    fn file(&self, path: &Path, sum: &mut Sum) -> anyhow::Result<()> {
        let Ok(inside) = path.strip_prefix(&self.mountpoint) else { return Ok(()) };
        let shows = std::io::stderr().is_terminal();
        let (mut told, name) = (0, path.display());
        let progress = |moved: u64| {
            if shows && moved - told >= PROGRESS_PAGES {
                told = moved;
                cuttlefs_common::tell!("{name}: {} moved so far", ByteSize(moved * PAGE_BYTES));
            }
            !self.is_ended.load(Ordering::Relaxed)
        };
        let opened = self.session.open(inside.as_os_str().as_bytes(), OpenOptions::READ_WRITE);
        let moved = match opened.and_then(|file| file.defragment(progress)) {
            // It was removed meanwhile.
            Err(NativeError::Server(Status::NotFound | Status::Stale)) => return Ok(()),
            Err(error) => return self.failed(path, &error, sum),
            Ok(moved) => moved,
        };
        sum.files += 1;
        sum.moved += u64::from(moved.moved_pages > 0);
        sum.figures.runs_before += moved.runs_before;
        sum.figures.runs_after += moved.runs_after;
        sum.figures.moved_pages += moved.moved_pages;
        if moved.moved_pages > 0 || self.args.verbose {
            let Defragmented { runs_before, runs_after, moved_pages } = moved;
            tell(&format!(
                "{name}: {runs_after} runs, {runs_before} before, {} moved\n",
                ByteSize(moved_pages * PAGE_BYTES)
            ))?;
        }
        Ok(())
    }

    fn failed(
        &self,
        path: &Path,
        error: &(dyn std::error::Error + 'static),
        sum: &mut Sum,
    ) -> anyhow::Result<()> {
        sum.failed += 1;
        cuttlefs_common::tell!("{}: {}", path.display(), advised(&explain(error)));
        Ok(())
    }
}

/// An error with what to do about it.
fn advised(error: &str) -> String {
    let advice = [
        (Status::NoSpace, "the pool has too little free space to move it: free some"),
        (Status::Denied, "you must be permitted to read and write it"),
        (Status::ReadOnly, "the export is read-only: use a mount of another one"),
        (Status::NotPermitted, "it is immutable or append-only: take the mark away with chattr(1) first"),
    ];
    let known = advice.iter().find(|(status, _)| error == status.to_string());
    known.map_or_else(|| error.to_owned(), |(_, advice)| format!("{error}; {advice}"))
}

/// Prints, but for a reader that has had enough.
fn tell(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("cannot print"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_to_do() {
        assert!(advised(&Status::NoSpace.to_string()).contains("free some"));
        assert!(advised(&Status::Denied.to_string()).contains("permitted"));
        assert_eq!(advised("something else"), "something else");
    }

    #[test]
    fn a_sum_tells_all_of_it() {
        let figures = Defragmented { runs_before: 9, runs_after: 2, moved_pages: 256 };
        let sum = Sum { files: 3, moved: 1, failed: 0, figures };
        assert_eq!(sum.to_string(), "3 files, 1 of them moved; 1M moved; 2 runs, 9 before");
    }
}
