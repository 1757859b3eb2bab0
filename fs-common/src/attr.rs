//! Inode attributes as they cross the wire: no FUSE types, no `stat` layout.

use crate::ids::InodeNo;
use serde::{Deserialize, Serialize};

/// The type of an inode. The numbers are the wire and disk format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum FileKind {
    File,
    Directory,
    Symlink,
    BlockDevice,
    CharDevice,
    Fifo,
    Socket,
}

/// A point in time: seconds and nanoseconds since the epoch; seconds may be negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Timestamp {
    /// Seconds since 1970-01-01T00:00:00Z.
    pub secs: i64,
    /// 0 ..= 999_999_999.
    pub nanos: u32,
}

/// The extended attribute that holds a file's access control list.
pub const ACCESS_ACL_XATTR: &[u8] = b"system.posix_acl_access";
/// The extended attribute that holds the access control list that new entries of a directory inherit.
pub const DEFAULT_ACL_XATTR: &[u8] = b"system.posix_acl_default";
/// The extended attribute that holds a file's capabilities.
pub const CAPABILITY_XATTR: &[u8] = b"security.capability";

/// Marks of an inode. The bits are the wire and disk format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct InodeFlags(pub u32);

impl InodeFlags {
    /// The inode never changes, its names included.
    pub const IMMUTABLE: Self = Self(1);
    /// Bytes are only added at the end, and names only added to a directory.
    pub const APPEND_ONLY: Self = Self(1 << 1);
    /// dump(8) leaves the inode out.
    pub const NO_DUMP: Self = Self(1 << 2);
    /// Reads do not change the access time.
    pub const NO_ATIME: Self = Self(1 << 3);
    /// The marks that chattr(1) sets.
    pub const SETTABLE: Self = Self(0xf);
    /// The inode has an access ACL that says more than its mode.
    pub const ACCESS_ACL: Self = Self(1 << 8);
    /// The directory has an ACL that new entries inherit.
    pub const DEFAULT_ACL: Self = Self(1 << 9);
    /// The file has capabilities.
    pub const CAPABILITY: Self = Self(1 << 10);
    const ALL: u32 = 0x70f;

    /// Whether all of these marks are set.
    pub const fn has(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }

    /// Whether any of these marks is set.
    pub const fn has_any(self, flags: Self) -> bool {
        self.0 & flags.0 != 0
    }

    /// These marks set as well (`on`), or cleared.
    #[must_use]
    pub const fn with(self, flags: Self, on: bool) -> Self {
        if on { Self(self.0 | flags.0) } else { Self(self.0 & !flags.0) }
    }

    /// Whether every bit is one of the above.
    pub const fn is_known(self) -> bool {
        self.0 & !Self::ALL == 0
    }
}

/// Everything `stat` tells about an inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attr {
    /// Inode number.
    pub ino: InodeNo,
    /// Type of the inode.
    pub kind: FileKind,
    /// Permission bits, set-id and sticky bits (`07777`).
    pub mode: u16,
    /// Number of directory entries naming the inode; for a directory 2 plus its subdirectories.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device node, as `makedev` of the kernel's `new_encode_dev`.
    pub rdev: u32,
    /// Length in bytes; of a symlink, its target's; of a directory, a multiple of a page.
    pub size: u64,
    /// Bytes of pool space held, exact.
    pub allocated_bytes: u64,
    /// Last access.
    pub atime: Timestamp,
    /// Last change of contents.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
    /// Creation.
    pub btime: Timestamp,
    /// Moves whenever contents or attributes change; tells a client whether its pages are still good.
    pub change: u64,
    /// Marks.
    pub flags: InodeFlags,
}

impl Attr {
    /// An empty file of root's that nobody has changed, for tests.
    pub fn empty_file(ino: InodeNo) -> Self {
        let never = Timestamp::default();
        Self {
            ino,
            kind: FileKind::File,
            mode: 0o644,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            size: 0,
            allocated_bytes: 0,
            atime: never,
            mtime: never,
            ctime: never,
            btime: never,
            change: 0,
            flags: InodeFlags::default(),
        }
    }

    /// Whether the inode's chattr(1) marks forbid this change. An immutable inode takes none; an append-only one takes no other length, owner, mode
    /// bits, or times than the present.
    pub const fn forbids(&self, set: &SetAttr) -> bool {
        let times = set.atime.is_some() || set.mtime.is_some() || set.ctime.is_some();
        let other_times =
            matches!(set.atime, Some(SetTime::At(_))) || matches!(set.mtime, Some(SetTime::At(_)));
        let others = set.mode.is_some() || set.uid.is_some() || set.gid.is_some() || set.size.is_some();
        (self.flags.has(InodeFlags::IMMUTABLE) && (others || times))
            || (self.flags.has(InodeFlags::APPEND_ONLY) && (others || other_times))
    }

    /// Whether a program in this file runs with more rights than its user has.
    pub const fn has_privileges(&self) -> bool {
        const SET_IDS: u16 = 0o6000;
        let may_run = matches!(self.kind, FileKind::File);
        may_run && (self.mode & SET_IDS != 0 || self.flags.has(InodeFlags::CAPABILITY))
    }
}

/// A time to set: what `utimensat` can ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SetTime {
    /// The time of the server's clock.
    Now,
    /// This time.
    At(Timestamp),
}

/// The attributes that one `setattr` changes; `None` leaves an attribute as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetAttr {
    /// New permission bits.
    pub mode: Option<u16>,
    /// New owner.
    pub uid: Option<u32>,
    /// New group.
    pub gid: Option<u32>,
    /// New length: truncates or extends with a hole.
    pub size: Option<u64>,
    /// New access time.
    pub atime: Option<SetTime>,
    /// New modification time.
    pub mtime: Option<SetTime>,
    /// New change time; only a kernel client that manages ctime itself sets it.
    pub ctime: Option<Timestamp>,
    /// New marks, of those that chattr(1) sets.
    pub flags: Option<InodeFlags>,
}
