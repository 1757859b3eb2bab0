//! What a descriptor of the program is, as the kernel says at this moment: so nothing that closes, duplicates or replaces descriptors has to be followed.
//!
//! Every function is one system call, which sends no request to the mount (but for [`fresh_len`]).

use libc::c_int;
use rustix::fd::BorrowedFd;
use rustix::fs::{AtFlags, FileType, OFlags, SeekFrom, Statx, StatxFlags};

/// A file of the machine, as statx(2) names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileId {
    /// The device.
    pub(crate) device: (u32, u32),
    /// The inode.
    pub(crate) ino: u64,
}

/// A regular file behind a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Regular {
    /// The file.
    pub(crate) id: FileId,
    /// Its length, as the kernel knows it without asking the mount.
    pub(crate) len: u64,
}

/// How a descriptor is open for reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    /// Its reads go past the kernel's page cache.
    pub(crate) is_direct: bool,
}

/// The descriptor for the length of one call. A number that is not open is an error of that call.
fn borrow<'f>(fd: c_int) -> Option<BorrowedFd<'f>> {
    // SAFETY: the number is not -1, which is all that the type asks for; it is not kept.
    (fd >= 0).then(|| unsafe { BorrowedFd::borrow_raw(fd) })
}

fn look(fd: c_int, flags: AtFlags, mask: StatxFlags) -> Option<Statx> {
    rustix::fs::statx(borrow(fd)?, c"", AtFlags::EMPTY_PATH | flags, mask).ok()
}

/// The regular file behind a descriptor, if that is what it is, on one of these devices.
pub(crate) fn regular(fd: c_int, is_ours: impl Fn((u32, u32)) -> bool) -> Option<Regular> {
    let mask = StatxFlags::TYPE | StatxFlags::INO | StatxFlags::SIZE;
    let found = look(fd, AtFlags::STATX_DONT_SYNC, mask)?;
    let device = (found.stx_dev_major, found.stx_dev_minor);
    let is_file = FileType::from_raw_mode(found.stx_mode.into()) == FileType::RegularFile;
    (is_ours(device) && is_file)
        .then_some(Regular { id: FileId { device, ino: found.stx_ino }, len: found.stx_size })
}

/// The file's length, for which the kernel asks the mount if it last did so some time ago, as for a read.
pub(crate) fn fresh_len(fd: c_int) -> Option<u64> {
    look(fd, AtFlags::empty(), StatxFlags::SIZE).map(|found| found.stx_size)
}

/// Has the kernel ask the mount for the file's length now. `None`: the descriptor is gone.
pub(crate) fn ask_len(fd: c_int) -> Option<u64> {
    look(fd, AtFlags::STATX_FORCE_SYNC, StatxFlags::SIZE).map(|found| found.stx_size)
}

/// How the descriptor is open.
fn flags(fd: c_int) -> Option<OFlags> {
    rustix::fs::fcntl_getfl(borrow(fd)?).ok()
}

/// How the descriptor is open for reading; `None`: it is not.
pub(crate) fn reading(fd: c_int) -> Option<Reading> {
    let flags = flags(fd)?;
    let is_open =
        !flags.contains(OFlags::PATH) && matches!(flags & OFlags::ACCMODE, OFlags::RDONLY | OFlags::RDWR);
    is_open.then_some(Reading { is_direct: flags.contains(OFlags::DIRECT) })
}

/// The arguments of cachestat(2): a range of bytes.
#[repr(C)]
struct CachestatRange {
    offset: u64,
    len: u64,
}

/// What cachestat(2) tells of a range, in pages.
#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Whether the kernel's page cache has all pages of a range that is not empty. `false` also where the kernel does not tell: before Linux 6.5, and of files
/// that the caller might not write.
pub(crate) fn is_cached(fd: c_int, at: u64, len: usize) -> bool {
    const PAGE: u64 = 4096;
    let Some(end) = at.checked_add(len as u64) else { return false };
    let (range, mut found) = (CachestatRange { offset: at, len: len as u64 }, Cachestat::default());
    // SAFETY: both structures live until the call returns and are laid out as cachestat(2) has them; it writes the second one only. A number that is not
    // open is an error of the call.
    let result = unsafe { libc::syscall(CACHESTAT, fd, &raw const range, &raw mut found, 0) };
    result == 0 && found.cached == end.div_ceil(PAGE) - at / PAGE
}

/// The number of cachestat(2), which all architectures share.
const CACHESTAT: libc::c_long = 451;

/// Whether the descriptor is open for writing.
pub(crate) fn is_writable(fd: c_int) -> bool {
    flags(fd).is_some_and(|flags| flags & OFlags::ACCMODE != OFlags::RDONLY)
}

/// Moves the offset by so many bytes, in one step whoever else moves it, and returns the new one.
pub(crate) fn move_by(fd: c_int, bytes: i64) -> Option<u64> {
    rustix::fs::seek(borrow(fd)?, SeekFrom::Current(bytes)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::fd::AsRawFd;

    #[test]
    fn descriptors_are_told_apart() {
        let mut file = tempfile_like();
        file.write_all(b"hello").expect("write");
        let fd = file.as_raw_fd();
        let found = regular(fd, |_| true).expect("a file");
        assert_eq!((found.len, fresh_len(fd)), (5, Some(5)));
        assert_eq!(regular(fd, |_| false), None);
        assert!(reading(fd) == Some(Reading { is_direct: false }) && is_writable(fd));
        assert_eq!((move_by(fd, -2), move_by(fd, 0)), (Some(3), Some(3)));
        let directory = std::fs::File::open("/").expect("open");
        assert_eq!(regular(directory.as_raw_fd(), |_| true), None);
        assert!(!is_writable(directory.as_raw_fd()));
        let (pipe, _end) = rustix::pipe::pipe().expect("pipe");
        assert_eq!(regular(pipe.as_raw_fd(), |_| true), None);
        assert_eq!(move_by(pipe.as_raw_fd(), 0), None);
        for none in [-1, c_int::MAX] {
            assert_eq!((regular(none, |_| true), reading(none)), (None, None));
        }
    }

    #[test]
    fn cached_ranges_are_told_from_others() {
        let mut file = tempfile_like();
        file.write_all(&[7; 3 * 4096 + 5]).expect("write");
        let fd = file.as_raw_fd();
        let kernel_tells = rustix::system::uname()
            .release()
            .to_string_lossy()
            .split('.')
            .take(2)
            .map(str::parse::<u32>)
            .collect::<Result<Vec<_>, _>>();
        if kernel_tells.is_ok_and(|version| version >= vec![6, 5]) {
            assert!(is_cached(fd, 0, 3 * 4096 + 5) && is_cached(fd, 4095, 2) && is_cached(fd, 3 * 4096, 5));
        }
        assert!(!is_cached(fd, 0, 5 * 4096), "it is shorter");
        assert!(!is_cached(fd, 4 * 4096, 1) && !is_cached(fd, u64::MAX, 2));
        for none in [-1, c_int::MAX] {
            assert!(!is_cached(none, 0, 1));
        }
    }

    fn tempfile_like() -> std::fs::File {
        let path = std::env::temp_dir().join(format!("cuttlefs-descriptor-{}", std::process::id()));
        let file = std::fs::File::options().read(true).write(true).create(true).truncate(true).open(&path);
        std::fs::remove_file(&path).expect("remove");
        file.expect("a file")
    }
}
