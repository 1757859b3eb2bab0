//! Numbers, flags and structures of `linux/fuse.h`. Names are the kernel's.

use bitflags::bitflags;
use cuttlefs_common::attr::Timestamp;

/// The version of the protocol that is spoken here.
pub(super) const MAJOR: u32 = 7;
pub(super) const MINOR: u32 = 40;
/// The oldest minor version that is accepted. `max_pages` and the 64 bits of flags in INIT are newer, and negotiated.
pub(super) const MINOR_OLDEST: u32 = 31;

/// `fuse_in_header`, at the front of each message from the kernel.
pub(super) const IN_HEADER_LEN: usize = 40;
/// `fuse_out_header`, at the front of each answer.
pub(super) const OUT_HEADER_LEN: usize = 16;
/// The room for a message beside the bytes of a write. The kernel requires at least 8 KiB for the whole message.
pub(super) const MESSAGE_HEAD_LEN: usize = 8192;

pub(super) mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const TMPFILE: u32 = 51;
}

/// `fuse_notify_code`.
pub(super) const NOTIFY_INVAL_INODE: i32 = 2;

/// `getattr_flags`: the handle is set.
pub(super) const GETATTR_FH: u32 = 1;
/// `fsync_flags`: contents only.
pub(super) const FSYNC_FDATASYNC: u32 = 1;
/// `lk_flags`: flock(2).
pub(super) const LK_FLOCK: u32 = 1;
/// `read_flags`: an owner is set, which is for system calls that read past the page cache.
pub(super) const READ_LOCKOWNER: u32 = 1 << 1;

/// `valid` of `fuse_setattr_in`.
pub(super) mod fattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
    pub const CTIME: u32 = 1 << 10;
    pub const KILL_SUIDGID: u32 = 1 << 11;
}

bitflags! {
    /// Features that kernel and file system agree on (`FUSE_INIT`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct InitFlags: u64 {
        /// Several READs of a file at once.
        const FUSE_ASYNC_READ = 1 << 0;
        /// The file system keeps the locks of fcntl(2).
        const FUSE_POSIX_LOCKS = 1 << 1;
        /// Lookups of `.` and `..`, for file handles.
        const FUSE_EXPORT_SUPPORT = 1 << 4;
        /// Writes larger than a page.
        const FUSE_BIG_WRITES = 1 << 5;
        /// The umask is not applied by the kernel.
        const FUSE_DONT_MASK = 1 << 6;
        /// The file system keeps the locks of flock(2).
        const FUSE_FLOCK_LOCKS = 1 << 10;
        /// Pages are dropped when the file's time has changed.
        const FUSE_AUTO_INVAL_DATA = 1 << 12;
        /// Listings bring attributes.
        const FUSE_DO_READDIRPLUS = 1 << 13;
        /// READDIRPLUS only where the kernel expects to need the attributes.
        const FUSE_READDIRPLUS_AUTO = 1 << 14;
        /// Asynchronous direct IO.
        const FUSE_ASYNC_DIO = 1 << 15;
        /// Lookups in one directory at once.
        const FUSE_PARALLEL_DIROPS = 1 << 18;
        /// ACLs are kept by the file system and checked by the kernel.
        const FUSE_POSIX_ACL = 1 << 20;
        /// `max_pages` is set.
        const FUSE_MAX_PAGES = 1 << 22;
        /// Targets of symlinks are kept.
        const FUSE_CACHE_SYMLINKS = 1 << 23;
        /// The file system takes set-id bits and capabilities.
        const FUSE_HANDLE_KILLPRIV_V2 = 1 << 28;
        /// SETXATTR has more fields.
        const FUSE_SETXATTR_EXT = 1 << 29;
        /// There are 64 bits of flags.
        const FUSE_INIT_EXT = 1 << 30;
        /// Files open past the page cache can be mapped.
        const FUSE_DIRECT_IO_ALLOW_MMAP = 1 << 36;
        const _ = !0;
    }

    /// How the kernel uses an open file.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct FopenFlags: u32 {
        /// Past the page cache.
        const FOPEN_DIRECT_IO = 1 << 0;
        /// Cached pages are still good.
        const FOPEN_KEEP_CACHE = 1 << 1;
        /// Several direct writes at once.
        const FOPEN_PARALLEL_DIRECT_WRITES = 1 << 6;
    }

    /// Flags of a WRITE.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct WriteFlags: u32 {
        /// The kernel writes cached pages back; user and handle are guesses.
        const FUSE_WRITE_CACHE = 1 << 0;
        /// An owner is set, which is for system calls that write past the page cache.
        const FUSE_WRITE_LOCKOWNER = 1 << 1;
        /// The file must lose its set-id bits.
        const FUSE_WRITE_KILL_SUIDGID = 1 << 2;
        const _ = !0;
    }

    /// The flags of renameat2(2).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct RenameFlags: u32 {
        /// Does not replace another file.
        const RENAME_NOREPLACE = 1;
        /// Exchanges the two files.
        const RENAME_EXCHANGE = 2;
        /// Leaves a whiteout (a device node) in place of the file.
        const RENAME_WHITEOUT = 4;
        const _ = !0;
    }

    /// The flags of copy_file_range(2): none yet.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct CopyFileRangeFlags: u64 {
        const _ = !0;
    }

    /// Flags of an IOCTL.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct IoctlFlags: u32 {
        const _ = !0;
    }
}

/// An inode, as FUSE names it; the root is 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct INodeNo(pub u64);

impl INodeNo {
    /// The root of the mount.
    pub const ROOT: Self = Self(1);
}

/// The file system's number for an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileHandle(pub u64);

/// Distinguishes the lives of an inode number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation(pub u64);

/// The owner of a lock: a number that the kernel makes up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockOwner(pub u64);

/// The two kinds of locks, which do not see each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// flock(2).
    Flock,
    /// fcntl(2).
    Posix,
}

/// The flags of open(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFlags(pub i32);

/// The number of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId(pub u64);

/// An errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(i32);

macro_rules! errnos {
    ($($name:ident)+) => {
        #[allow(missing_docs)]
        impl Errno {
            $(pub const $name: Self = Self(libc::$name);)+
        }
    };
}

errnos! {
    EACCES EAGAIN EBADF EDEADLK EEXIST EFBIG EINTR EINVAL EIO EISDIR EMLINK ENAMETOOLONG ENFILE ENOENT ENOLCK ENOSPC
    ENOSYS ENOTDIR ENOTEMPTY ENOTTY ENXIO EOPNOTSUPP EOVERFLOW EPERM EPROTO ERANGE EROFS ESHUTDOWN ESTALE EXDEV E2BIG
    ETXTBSY EDQUOT
}

impl Errno {
    /// There is no such extended attribute.
    pub const NO_XATTR: Self = Self(libc::ENODATA);

    /// The number of this errno.
    pub fn code(self) -> i32 {
        self.0
    }
}

/// The type of an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileType {
    /// A fifo.
    NamedPipe,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A directory.
    Directory,
    /// A regular file.
    RegularFile,
    /// A symlink.
    Symlink,
    /// A socket.
    Socket,
}

impl FileType {
    /// The type's bits in `st_mode`; a directory entry has them shifted down by 12.
    pub(super) fn mode_bits(self) -> u32 {
        match self {
            Self::NamedPipe => libc::S_IFIFO,
            Self::CharDevice => libc::S_IFCHR,
            Self::BlockDevice => libc::S_IFBLK,
            Self::Directory => libc::S_IFDIR,
            Self::RegularFile => libc::S_IFREG,
            Self::Symlink => libc::S_IFLNK,
            Self::Socket => libc::S_IFSOCK,
        }
    }
}

/// `fuse_attr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct FileAttr {
    pub ino: INodeNo,
    pub size: u64,
    pub blocks: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub kind: FileType,
    pub perm: u16,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    pub blksize: u32,
    pub flags: u32,
}

impl FileAttr {
    /// The attributes of no file. With inode number 0 an entry means that the name does not exist, for the entry's lifetime.
    pub const NONE: Self = Self {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: Timestamp { secs: 0, nanos: 0 },
        mtime: Timestamp { secs: 0, nanos: 0 },
        ctime: Timestamp { secs: 0, nanos: 0 },
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 0,
        flags: 0,
    };
}

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeOrNow {
    /// This time.
    SpecificTime(Timestamp),
    /// The time at which it is set.
    Now,
}
