//! The reference world: a directory of a local file system, and system calls.

use super::op::{Answer, Errno, Kind, MADE_WITH, Node, Op, State, Time};
use cuttlefs_common::rpc::RenameMode;
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Gid, Mode, OFlags, RenameFlags, Timespec, Timestamps, Uid,
    XattrFlags,
};
use rustix::io::Errno as Error;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

pub struct Kernel {
    directory: TempDir,
}

fn errno(error: Error) -> Errno {
    error.raw_os_error()
}

const NOTHING: Timespec = Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT };

impl Kernel {
    /// An empty directory of root.
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        rustix::fs::chmod(directory.path(), Mode::from_raw_mode(0o755)).expect("for everybody");
        Self { directory }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.directory.path().join(path)
    }

    /// Removes everything in the directory. To be called as root.
    pub fn clear(&self) {
        for entry in std::fs::read_dir(self.directory.path()).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                std::fs::remove_dir_all(path).expect("empty");
            } else {
                std::fs::remove_file(path).expect("empty");
            }
        }
    }

    /// Makes the tree. To be called as root.
    pub fn make(&self, tree: &[Node]) {
        for node in tree {
            let path = self.at(node.path);
            let made = match node.kind {
                Kind::Directory => rustix::fs::mkdir(&path, Mode::empty()),
                Kind::Symlink => rustix::fs::symlink("f", &path),
                Kind::Fifo => rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::empty(), 0),
                Kind::File => std::fs::write(&path, b"bytes").map_err(|_| Error::IO),
            };
            made.expect(node.path);
            let (uid, gid) = (Uid::from_raw(node.uid), Gid::from_raw(node.gid));
            rustix::fs::chownat(CWD, &path, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
                .expect(node.path);
            if matches!(node.kind, Kind::File | Kind::Directory) {
                for (name, value) in MADE_WITH {
                    rustix::fs::lsetxattr(&path, *name, value.as_bytes(), XattrFlags::CREATE)
                        .expect(node.path);
                }
            }
            if node.kind != Kind::Symlink {
                rustix::fs::chmod(&path, Mode::from_raw_mode(node.mode.into())).expect(node.path);
            }
        }
    }

    /// The state of the tree. To be called as root.
    pub fn state(&self) -> State {
        let mut state = State::new();
        look(self.directory.path(), "", &mut state);
        state
    }

    /// Runs an operation as the user of the calling thread. `root` runs the part of it that root must do.
    pub fn run(&self, op: &Op, root: &dyn Fn(&mut (dyn FnMut() + Send))) -> Answer {
        let at = |path: &str| self.at(path);
        let done = |result: rustix::io::Result<()>| result.map(|()| String::new()).map_err(errno);
        let open = |path: &str, flags: OFlags, mode: u16| {
            rustix::fs::open(
                at(path),
                flags | OFlags::CLOEXEC | OFlags::NOFOLLOW,
                Mode::from_raw_mode(mode.into()),
            )
        };
        match *op {
            Op::Stat(path) => done(rustix::fs::lstat(at(path)).map(|_| ())),
            Op::Open { path, read: _, write, truncate } => {
                let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
                let cut = if truncate { OFlags::TRUNC } else { OFlags::empty() };
                done(open(path, access | cut, 0).map(|_| ()))
            }
            Op::Create { path, mode, exclusive, read: _, write } => {
                let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
                let exclusive = if exclusive { OFlags::EXCL } else { OFlags::empty() };
                let file = open(path, access | OFlags::CREATE | exclusive, mode).map_err(errno)?;
                rustix::io::pread(&file, &mut [0u8; 4][..], 0).map_err(errno)?;
                if write {
                    rustix::io::pwrite(&file, b"new", 0).map_err(errno)?;
                }
                Ok(String::new())
            }
            Op::Nameless(path, mode) => {
                let directory = path.rsplit_once('/').map_or("", |(directory, _)| directory);
                let file = open(directory, OFlags::TMPFILE | OFlags::RDWR, mode).map_err(errno)?;
                rustix::io::pwrite(&file, b"new", 0).map_err(errno)?;
                let made = format!("/proc/self/fd/{}", file.as_raw_fd());
                done(rustix::fs::linkat(CWD, made, CWD, at(path), AtFlags::SYMLINK_FOLLOW))
            }
            Op::Mkdir(path, mode) => done(rustix::fs::mkdir(at(path), Mode::from_raw_mode(mode.into()))),
            Op::Fifo(path, mode) => {
                done(rustix::fs::mknodat(CWD, at(path), FileType::Fifo, Mode::from_raw_mode(mode.into()), 0))
            }
            Op::Device { path, block, whiteout } => {
                let kind = if block { FileType::BlockDevice } else { FileType::CharacterDevice };
                let device = if whiteout { 0 } else { rustix::fs::makedev(1, 3) };
                done(rustix::fs::mknodat(CWD, at(path), kind, Mode::from_raw_mode(0o600), device))
            }
            Op::Symlink(path) => done(rustix::fs::symlink("f", at(path))),
            Op::Link(from, to) => done(rustix::fs::link(at(from), at(to))),
            Op::Unlink(path) => done(rustix::fs::unlink(at(path))),
            Op::Rmdir(path) => done(rustix::fs::rmdir(at(path))),
            Op::Rename(from, to, mode) => {
                let flags = match mode {
                    RenameMode::Replace => RenameFlags::empty(),
                    RenameMode::NoReplace => RenameFlags::NOREPLACE,
                    RenameMode::Exchange => RenameFlags::EXCHANGE,
                    RenameMode::Whiteout => RenameFlags::WHITEOUT,
                    RenameMode::NoReplaceWhiteout => RenameFlags::WHITEOUT | RenameFlags::NOREPLACE,
                };
                done(rustix::fs::renameat_with(CWD, at(from), CWD, at(to), flags))
            }
            Op::Chmod(path, mode) => done(rustix::fs::chmod(at(path), Mode::from_raw_mode(mode.into()))),
            Op::Chown(path, uid, gid) => {
                let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
                done(rustix::fs::chownat(CWD, at(path), uid, gid, AtFlags::SYMLINK_NOFOLLOW))
            }
            Op::Truncate(path) => {
                let path =
                    std::ffi::CString::new(at(path).into_os_string().into_encoded_bytes()).expect("no NUL");
                // SAFETY: a path that ends with a NUL, which is read during the call.
                let result = unsafe { libc::truncate(path.as_ptr(), 2) };
                if result == 0 { Ok(String::new()) } else { Err(last_errno()) }
            }
            Op::Times(path, atime, mtime) => {
                let time = |time| match time {
                    Time::Omit => NOTHING,
                    Time::Now => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW },
                    Time::At => Timespec { tv_sec: 1_000_000, tv_nsec: 0 },
                };
                let times = Timestamps { last_access: time(atime), last_modification: time(mtime) };
                done(rustix::fs::utimensat(CWD, at(path), &times, AtFlags::SYMLINK_NOFOLLOW))
            }
            Op::List(path) => {
                let listed = open(path, OFlags::RDONLY | OFlags::DIRECTORY, 0).and_then(rustix::fs::Dir::new);
                let mut names: Vec<String> = listed
                    .map_err(errno)?
                    .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
                    .filter(|name| name != "." && name != "..")
                    .collect();
                names.sort();
                Ok(names.join(" "))
            }
            Op::ReadLink(path) => rustix::fs::readlink(at(path), Vec::new())
                .map(|target| target.to_string_lossy().into_owned())
                .map_err(errno),
            Op::SetXattr(path, name) => {
                done(rustix::fs::lsetxattr(at(path), name, b"new", XattrFlags::empty()))
            }
            Op::GetXattr(path, name) => {
                let mut value = [0; 64];
                let len = rustix::fs::lgetxattr(at(path), name, &mut value).map_err(errno)?;
                Ok(String::from_utf8_lossy(&value[..len]).into_owned())
            }
            Op::RemoveXattr(path, name) => done(rustix::fs::lremovexattr(at(path), name)),
            Op::ListXattr(path) => xattrs(&at(path)).map(|names| names.join(" ")).map_err(errno),
            Op::Write(path) => {
                let file = open(path, OFlags::WRONLY, 0).map_err(errno)?;
                done(rustix::io::pwrite(&file, b"w", 1).map(|_| ()))
            }
            Op::Allocate(path) => {
                let file = open(path, OFlags::WRONLY, 0).map_err(errno)?;
                done(rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, 4096))
            }
            Op::Copy(from, to) => {
                let from = open(from, OFlags::RDONLY, 0).map_err(errno)?;
                let to = open(to, OFlags::WRONLY, 0).map_err(errno)?;
                let (mut at, mut there) = (0, 100);
                done(rustix::fs::copy_file_range(&from, Some(&mut at), &to, Some(&mut there), 3).map(|_| ()))
            }
            Op::CutOpen(path) => {
                let file = open(path, OFlags::WRONLY, 0).map_err(errno)?;
                root(&mut || rustix::fs::chmod(at(path), Mode::empty()).expect("root may"));
                done(rustix::fs::ftruncate(&file, 1))
            }
        }
    }
}

fn last_errno() -> Errno {
    std::io::Error::last_os_error().raw_os_error().expect("an errno")
}

fn xattrs(path: &Path) -> rustix::io::Result<Vec<String>> {
    let mut names = vec![0; 4096];
    let len = rustix::fs::llistxattr(path, &mut names)?;
    let names = names[..len].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    let mut names: Vec<String> = names.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
    names.sort();
    Ok(names)
}

fn look(directory: &Path, below: &str, state: &mut State) {
    for entry in std::fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy();
        let shown = if below.is_empty() { name.into_owned() } else { format!("{below}/{name}") };
        let stat = rustix::fs::lstat(&path).expect("it is there");
        let kind = FileType::from_raw_mode(stat.st_mode);
        let (links, size) = match kind {
            FileType::RegularFile => (stat.st_nlink as u32, stat.st_size as u64),
            _ => (0, 0),
        };
        let names = xattrs(&path).expect("root may");
        state.insert(shown.clone(), (stat.st_mode, stat.st_uid, stat.st_gid, links, size, names));
        if kind == FileType::Directory {
            look(&path, &shown, state);
        }
    }
}
