//! Attributes, times, kinds and flags, from and to FUSE's.

use super::kernel::{self, FileAttr, FileType, INodeNo, RenameFlags, TimeOrNow, WriteFlags};
use crate::file::volume::{OpenHow, WriteHow};
use cuttlefs_common::attr::{Attr, FileKind, SetTime};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::locks::{Lock, LockMode, LockOwner, LockRange, LockSpace};
use cuttlefs_common::rpc::{Allocate, NewNode, RenameMode, SeekFor, XattrMode};

/// `st_blksize`, which stdio and `cp` take for their buffers. With a page each buffer of a `FILE` would be a FUSE request; with 64 KiB one request
/// serves sixteen pages, and a reader that seeks does not read too much.
const PREFERRED_IO_BYTES: u32 = 64 * 1024;
/// The unit of `st_blocks` (stat(2)).
const STAT_BLOCK_BYTES: u64 = 512;

/// FUSE's number for an inode: the mount's root is 1 whatever it is on the server.
///
/// Inode 1 of the server never shows under another root: it is the parent of all others, not below any.
pub(super) fn to_fuse_ino(root: InodeNo, ino: InodeNo) -> INodeNo {
    if ino == root { INodeNo::ROOT } else { INodeNo(ino.0) }
}

/// The server's number for a FUSE inode.
pub(super) fn from_fuse_ino(root: InodeNo, ino: INodeNo) -> InodeNo {
    if ino == INodeNo::ROOT { root } else { InodeNo(ino.0) }
}

pub(super) fn to_file_type(kind: FileKind) -> FileType {
    match kind {
        FileKind::File => FileType::RegularFile,
        FileKind::Directory => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::BlockDevice => FileType::BlockDevice,
        FileKind::CharDevice => FileType::CharDevice,
        FileKind::Fifo => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
    }
}

pub(super) fn to_file_attr(root: InodeNo, attr: &Attr) -> FileAttr {
    FileAttr {
        ino: to_fuse_ino(root, attr.ino),
        size: attr.size,
        blocks: attr.allocated_bytes.div_ceil(STAT_BLOCK_BYTES),
        atime: attr.atime,
        mtime: attr.mtime,
        ctime: attr.ctime,
        kind: to_file_type(attr.kind),
        perm: attr.mode & 0o7777,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: PREFERRED_IO_BYTES,
        flags: 0,
    }
}

pub(super) fn to_set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::At(time),
    }
}

/// Permission bits out of a `mode_t`.
pub(super) fn permission_bits(mode: u32) -> u16 {
    (mode & 0o7777) as u16
}

/// The node that `mknod` must make; `None` for a type that it cannot make.
pub(super) fn node_of_mode(mode: u32, rdev: u32) -> Option<NewNode<'static>> {
    Some(match mode & libc::S_IFMT {
        // mknod(2): "zero file type is equivalent to type S_IFREG".
        libc::S_IFREG | 0 => NewNode::File,
        libc::S_IFBLK => NewNode::Special { kind: FileKind::BlockDevice, rdev },
        libc::S_IFCHR => NewNode::Special { kind: FileKind::CharDevice, rdev },
        libc::S_IFIFO => NewNode::Special { kind: FileKind::Fifo, rdev: 0 },
        libc::S_IFSOCK => NewNode::Special { kind: FileKind::Socket, rdev: 0 },
        _ => return None,
    })
}

/// How an `open(2)` with these flags opens the file.
pub(super) fn open_how(flags: i32) -> OpenHow {
    let access = flags & libc::O_ACCMODE;
    OpenHow {
        // Access mode 3 asks for neither on Linux (ioctl only). To allow reads is harmless and simple.
        read: access != libc::O_WRONLY,
        write: access == libc::O_WRONLY || access == libc::O_RDWR,
        append: flags & libc::O_APPEND != 0,
        truncate: flags & libc::O_TRUNC != 0,
        // O_SYNC contains O_DSYNC's bit.
        sync: flags & libc::O_DSYNC != 0,
        told: None,
    }
}

/// How a WRITE is done. With each one the kernel sends the present flags of the descriptor: fcntl(2) changes `O_APPEND`, and `RWF_DSYNC` shows as
/// `O_DSYNC`. Pages that were changed through a mapping are written at their place in the file, and become durable with a sync; they may come with a
/// handle that appends.
pub(super) fn write_how(flags: i32, write_flags: WriteFlags) -> WriteHow {
    if write_flags.contains(WriteFlags::FUSE_WRITE_CACHE) {
        return WriteHow::default();
    }
    WriteHow { append: flags & libc::O_APPEND != 0, sync: flags & libc::O_DSYNC != 0 }
}

/// `renameat2`'s flags; `None` for unknown ones and for combinations that make no sense.
pub(super) fn rename_mode(flags: RenameFlags) -> Option<RenameMode> {
    const NO_REPLACE_WHITEOUT: u32 = libc::RENAME_NOREPLACE | libc::RENAME_WHITEOUT;
    match flags.bits() {
        0 => Some(RenameMode::Replace),
        libc::RENAME_NOREPLACE => Some(RenameMode::NoReplace),
        libc::RENAME_EXCHANGE => Some(RenameMode::Exchange),
        libc::RENAME_WHITEOUT => Some(RenameMode::Whiteout),
        NO_REPLACE_WHITEOUT => Some(RenameMode::NoReplaceWhiteout),
        _ => None,
    }
}

/// The mode of `fallocate`; `None` for modes that are not supported.
pub(super) fn allocate_mode(mode: i32) -> Option<Allocate> {
    const KEEP_SIZE: i32 = libc::FALLOC_FL_KEEP_SIZE;
    const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE;
    const ZERO_RANGE_KEEP_SIZE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
    match mode {
        0 => Some(Allocate::Reserve { keep_size: false }),
        KEEP_SIZE => Some(Allocate::Reserve { keep_size: true }),
        PUNCH_HOLE => Some(Allocate::PunchHole),
        ZERO_RANGE => Some(Allocate::ZeroRange { keep_size: false }),
        ZERO_RANGE_KEEP_SIZE => Some(Allocate::ZeroRange { keep_size: true }),
        _ => None,
    }
}

/// The whence of `lseek`; the kernel handles all others itself.
pub(super) fn seek_for(whence: i32) -> Option<SeekFor> {
    match whence {
        libc::SEEK_DATA => Some(SeekFor::Data),
        libc::SEEK_HOLE => Some(SeekFor::Hole),
        _ => None,
    }
}

/// `setxattr`'s flags; `None` for unknown ones.
pub(super) fn xattr_mode(flags: i32) -> Option<XattrMode> {
    match flags {
        0 => Some(XattrMode::Any),
        libc::XATTR_CREATE => Some(XattrMode::Create),
        libc::XATTR_REPLACE => Some(XattrMode::Replace),
        _ => None,
    }
}

/// The bytes of a lock, from the kernel's range; `None` if the range is invalid.
pub(super) fn lock_range(start: u64, end: u64) -> Option<LockRange> {
    Some(LockRange { first: start, last: end }).filter(LockRange::is_valid)
}

/// A lock that the kernel requests; `None` if it is invalid.
pub(super) fn lock(
    space: LockSpace,
    owner: kernel::LockOwner,
    start: u64,
    end: u64,
    typ: i32,
    pid: u32,
) -> Option<Lock> {
    let mode = match typ {
        libc::F_RDLCK => LockMode::Shared,
        libc::F_WRLCK => LockMode::Exclusive,
        _ => return None,
    };
    Some(Lock { space, owner: lock_owner(owner), range: lock_range(start, end)?, mode, pid })
}

/// The owner of a lock.
pub(super) fn lock_owner(owner: kernel::LockOwner) -> LockOwner {
    LockOwner(owner.0)
}

/// `l_type` of a lock.
pub(super) fn lock_type(mode: LockMode) -> i32 {
    match mode {
        LockMode::Shared => libc::F_RDLCK,
        LockMode::Exclusive => libc::F_WRLCK,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::attr::{InodeFlags, Timestamp};

    #[test]
    fn the_root_is_one_and_back() {
        let root = InodeNo(77);
        assert_eq!(to_fuse_ino(root, root), INodeNo::ROOT);
        assert_eq!(from_fuse_ino(root, INodeNo::ROOT), root);
        assert_eq!(from_fuse_ino(root, to_fuse_ino(root, InodeNo(5))), InodeNo(5));
        assert_eq!(from_fuse_ino(InodeNo::ROOT, INodeNo::ROOT), InodeNo::ROOT);
    }

    #[test]
    fn open_flags() {
        let how = open_how(libc::O_RDWR | libc::O_APPEND | libc::O_SYNC);
        assert!(how.read && how.write && how.append && how.sync && !how.truncate);
        let how = open_how(libc::O_WRONLY | libc::O_TRUNC | libc::O_DSYNC);
        assert!(!how.read && how.write && how.truncate && how.sync);
        let how = open_how(libc::O_RDONLY);
        assert!(how.read && !how.write && !how.sync);
    }

    #[test]
    fn mapped_pages_are_written_in_their_place() {
        let flags = libc::O_RDWR | libc::O_APPEND | libc::O_SYNC;
        let as_asked = WriteHow { append: true, sync: true };
        assert_eq!(write_how(flags, WriteFlags::empty()), as_asked);
        assert_eq!(write_how(flags, WriteFlags::FUSE_WRITE_KILL_SUIDGID), as_asked);
        assert_eq!(write_how(flags, WriteFlags::FUSE_WRITE_CACHE), WriteHow::default());
        assert_eq!(write_how(libc::O_WRONLY, WriteFlags::empty()), WriteHow::default());
        let durable = WriteHow { append: false, sync: true };
        assert_eq!(write_how(libc::O_WRONLY | libc::O_DSYNC, WriteFlags::empty()), durable);
    }

    #[test]
    fn modes_that_are_not_done_are_none() {
        assert_eq!(rename_mode(RenameFlags::RENAME_WHITEOUT), Some(RenameMode::Whiteout));
        assert_eq!(rename_mode(RenameFlags::RENAME_WHITEOUT | RenameFlags::RENAME_EXCHANGE), None);
        assert_eq!(rename_mode(RenameFlags::RENAME_EXCHANGE | RenameFlags::RENAME_NOREPLACE), None);
        assert_eq!(rename_mode(RenameFlags::from_bits_retain(1 << 20)), None);
        assert_eq!(rename_mode(RenameFlags::empty()), Some(RenameMode::Replace));
        // PUNCH_HOLE without KEEP_SIZE is invalid; COLLAPSE_RANGE, INSERT_RANGE and UNSHARE_RANGE are not done.
        for mode in [libc::FALLOC_FL_PUNCH_HOLE, 0x08, 0x20, 0x40, 0x10 | 0x02, -1] {
            assert_eq!(allocate_mode(mode), None, "{mode:#x}");
        }
        assert_eq!(allocate_mode(0x03), Some(Allocate::PunchHole));
        assert_eq!(allocate_mode(0x11), Some(Allocate::ZeroRange { keep_size: true }));
        assert_eq!(node_of_mode(libc::S_IFDIR, 0), None);
        assert_eq!(node_of_mode(libc::S_IFREG | 0o644, 9), Some(NewNode::File));
        assert_eq!(seek_for(libc::SEEK_SET), None);
        assert_eq!(xattr_mode(3), None);
    }

    #[test]
    fn locks_that_there_can_be() {
        let owner = kernel::LockOwner(7);
        let asked = |start, end, typ| lock(LockSpace::Ranges, owner, start, end, typ, 1);
        let whole = asked(0, i64::MAX as u64, libc::F_WRLCK).expect("a lock");
        assert_eq!((whole.range, whole.mode), (LockRange::WHOLE, LockMode::Exclusive));
        assert_eq!(asked(5, 5, libc::F_RDLCK).map(|lock| lock.mode), Some(LockMode::Shared));
        for (start, end, typ) in [
            (1, 0, libc::F_RDLCK),
            (0, u64::MAX, libc::F_RDLCK),
            (0, 1 << 63, libc::F_WRLCK),
            (0, 1, libc::F_UNLCK),
            (0, 1, 9),
            (0, 1, -1),
        ] {
            assert_eq!(asked(start, end, typ), None, "{start} {end} {typ}");
        }
    }

    #[test]
    fn blocks_are_of_512_bytes() {
        let attr = Attr {
            ino: InodeNo(9),
            kind: FileKind::File,
            mode: 0o4755,
            nlink: 1,
            uid: 1,
            gid: 2,
            rdev: 0,
            size: 5000,
            allocated_bytes: 8192,
            atime: Timestamp::default(),
            mtime: Timestamp::default(),
            ctime: Timestamp::default(),
            btime: Timestamp::default(),
            change: 0,
            flags: InodeFlags::default(),
        };
        let seen = to_file_attr(InodeNo::ROOT, &attr);
        assert_eq!((seen.blocks, seen.perm, seen.size), (16, 0o4755, 5000));
    }
}
