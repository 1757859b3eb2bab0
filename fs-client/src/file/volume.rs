//! The file system as the FUSE edge sees it: POSIX semantics without FUSE types and without errno.
//!
//! Every method blocks its caller until the answer is there, also while the server is away. Methods may be called from many threads at once.

pub use crate::session::{Condition, GrantedLock, LockWaiter, UnsyncedChanges};
pub use crate::transport::{Away, Caller, FsError};
use cuttlefs_common::attr::{Attr, SetAttr};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::locks::{Lock, LockOwner, LockRange, LockSpace};
use cuttlefs_common::rdma::HardwareFigures;
use cuttlefs_common::rpc::{
    Allocate, BlockingLock, DirEntry, NewNode, RenameMode, SeekFor, Space, XattrMode,
};
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// Names an open file or directory of this mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Handle(pub u64);

/// How to open a file.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenHow {
    /// For reading.
    pub read: bool,
    /// For writing.
    pub write: bool,
    /// Every write goes to the end (`O_APPEND`).
    pub append: bool,
    /// Cut to length 0 (`O_TRUNC`).
    pub truncate: bool,
    /// Every write is durable when it returns (`O_SYNC`, `O_DSYNC`).
    pub sync: bool,
    /// The change counter that the file had when its name was looked up, for an open by a name; 0 if it is not known. The open fails with `Stale` if
    /// the file has lost a name since then, or has none. `None`: an open by inode number, whatever name leads to it.
    pub told: Option<u64>,
}

impl OpenHow {
    /// Opens by inode number, for reading.
    pub const READ: Self =
        Self { read: true, write: false, append: false, truncate: false, sync: false, told: None };
    /// Opens by inode number, for reading and writing.
    pub const READ_WRITE: Self = Self { write: true, ..Self::READ };
}

/// How to write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteHow {
    /// Whether to write at the end of the file, as it is at the time of the write.
    pub append: bool,
    /// Whether the write is durable when it returns.
    pub sync: bool,
}

/// The result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Where the bytes were written.
    pub offset: u64,
    /// The number of bytes written.
    pub len: u32,
    /// The file's change counter behind the write; that of the last part, if it was written in parts.
    pub change: u64,
}

/// The result of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// The number of bytes copied; 0: nothing has changed.
    pub len: u64,
    /// The target's change counter behind the copy.
    pub change: u64,
}

/// An opened file.
#[derive(Clone, Copy, Debug)]
pub struct OpenFile {
    /// The handle of this open.
    pub handle: Handle,
    /// The file's change counter at the open: attributes and bytes with an older counter must not be used any more.
    pub change: u64,
}

/// A mounted cuttlefs volume.
pub trait Volume: Send + Sync + 'static {
    /// The inode that this mount shows as its root directory. The FUSE edge maps FUSE's inode 1 to it and back.
    fn root(&self) -> InodeNo;
    /// A number of the server whose answers come now. A server may have lost changes of the one before, and counts others by the same counters. So a
    /// counter is of the server that had this number both before the request and behind its answer.
    fn server_epoch(&self) -> u64 {
        0
    }
    /// Finds a name. `..` finds the parent of a directory.
    fn lookup(&self, caller: &Caller, parent: InodeNo, name: &[u8]) -> Result<Attr, FsError>;
    /// Reads attributes.
    fn get_attr(&self, caller: &Caller, ino: InodeNo) -> Result<Attr, FsError>;
    /// Reads the change counters of some files, at most [`CHANGES_MAX`](cuttlefs_common::rpc::CHANGES_MAX). `None`: there is no such file. Asked for the mount itself, not for a program.
    fn changes(&self, inos: &[InodeNo]) -> Result<Vec<Option<u64>>, FsError>;
    /// Changes attributes.
    fn set_attr(&self, caller: &Caller, ino: InodeNo, set: SetAttr) -> Result<Attr, FsError>;
    /// Makes a name and its inode.
    fn make(
        &self,
        caller: &Caller,
        parent: InodeNo,
        name: &[u8],
        node: NewNode<'_>,
        mode: u16,
    ) -> Result<Attr, FsError>;
    /// Makes a regular file, or opens it if it exists and `exclusive` is not set.
    fn create(
        &self,
        caller: &Caller,
        parent: InodeNo,
        name: &[u8],
        mode: u16,
        exclusive: bool,
        how: OpenHow,
    ) -> Result<(Attr, OpenFile), FsError>;
    /// Makes a regular file without a name and opens it. The file goes when it is closed, unless `link` has given it a name.
    fn create_nameless(
        &self,
        caller: &Caller,
        parent: InodeNo,
        mode: u16,
        how: OpenHow,
    ) -> Result<(Attr, OpenFile), FsError>;
    /// Makes another name for an inode, or the first.
    fn link(&self, caller: &Caller, ino: InodeNo, parent: InodeNo, name: &[u8]) -> Result<Attr, FsError>;
    /// Removes a name of an inode that is not a directory.
    fn unlink(&self, caller: &Caller, parent: InodeNo, name: &[u8]) -> Result<(), FsError>;
    /// Removes an empty directory.
    fn rmdir(&self, caller: &Caller, parent: InodeNo, name: &[u8]) -> Result<(), FsError>;
    /// Moves a name. Returns the attributes of the moved inode.
    fn rename(
        &self,
        caller: &Caller,
        parent: InodeNo,
        name: &[u8],
        new_parent: InodeNo,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<Attr, FsError>;
    /// Reads a symlink.
    fn read_link(&self, caller: &Caller, ino: InodeNo) -> Result<Vec<u8>, FsError>;
    /// Opens a file.
    fn open(&self, caller: &Caller, ino: InodeNo, how: OpenHow) -> Result<OpenFile, FsError>;
    /// Reads up to `len` bytes and hands them to `take`, which is called once. Fewer bytes mean the end of the file. The slice is in a buffer of the
    /// calling thread.
    fn read(
        &self,
        caller: &Caller,
        handle: Handle,
        offset: u64,
        len: u32,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<(), FsError>;
    /// Writes all of `bytes`, by the flags with which the file was opened.
    fn write(&self, caller: &Caller, handle: Handle, offset: u64, bytes: &[u8]) -> Result<u32, FsError>;
    /// As `write`, but by the flags in `how`: a descriptor's flags can change after the open, and mapped pages have none.
    fn write_how(
        &self,
        caller: &Caller,
        handle: Handle,
        offset: u64,
        bytes: &[u8],
        how: WriteHow,
    ) -> Result<Written, FsError>;
    /// Makes a file durable. With `contents_only`, without attributes that reading the file does not need.
    fn fsync(&self, caller: &Caller, handle: Handle, contents_only: bool) -> Result<(), FsError>;
    /// Makes a directory's entries durable.
    fn fsync_dir(&self, caller: &Caller, ino: InodeNo) -> Result<(), FsError>;
    /// For close(2), where there are locks: returns an error of earlier writes, and gives up the locks that `closer` took on the file through
    /// fcntl(2).
    fn flush(&self, _handle: Handle, _closer: LockOwner) -> Result<(), FsError> {
        Ok(())
    }
    /// Whether locks hold between mounts.
    fn has_locks(&self) -> bool {
        false
    }
    /// Requests a lock. `waiter` gets the answer, at once or when the lock is granted. Does not wait for the holders of other locks.
    fn set_lock(
        &self,
        _caller: &Caller,
        _handle: Handle,
        _lock: Lock,
        _blocking: bool,
        waiter: Arc<dyn LockWaiter>,
    ) {
        let _refused = waiter.answer(Err(FsError::Server(Status::Unsupported)));
    }
    /// Some waiters for locks may have been interrupted. Does not wait for the server.
    fn lock_waits_interrupted(&self) {}
    /// Gives up an owner's locks in a range.
    fn unlock(
        &self,
        _caller: &Caller,
        _handle: Handle,
        _space: LockSpace,
        _owner: LockOwner,
        _range: LockRange,
    ) -> Result<(), FsError> {
        Err(FsError::Server(Status::Unsupported))
    }
    /// A lock that would block this one, if there is one.
    fn test_lock(
        &self,
        _caller: &Caller,
        _handle: Handle,
        _lock: Lock,
    ) -> Result<Option<BlockingLock>, FsError> {
        Err(FsError::Server(Status::Unsupported))
    }
    /// Opens a directory: it can be read as long as it is open, even after it was removed.
    fn open_directory(&self, caller: &Caller, ino: InodeNo) -> Result<Handle, FsError>;
    /// Closes a file or a directory. Never fails. Waits for the server only to give up locks that end with the open file.
    fn release(&self, handle: Handle);
    /// Lists a directory from `cookie` on, handing entries to `take` until it returns `false` (the entry was
    /// not taken) or there are no more. Without `.` and `..`.
    fn read_dir(
        &self,
        caller: &Caller,
        ino: InodeNo,
        cookie: u64,
        plus: bool,
        take: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<(), FsError>;
    /// The figures of statfs(2).
    fn stat_fs(&self, caller: &Caller) -> Result<Space, FsError>;
    /// Reads one extended attribute.
    fn get_xattr(&self, caller: &Caller, ino: InodeNo, name: &[u8]) -> Result<Vec<u8>, FsError>;
    /// Names of extended attributes, each ended by NUL.
    fn list_xattr(&self, caller: &Caller, ino: InodeNo) -> Result<Vec<u8>, FsError>;
    /// Sets one extended attribute.
    fn set_xattr(
        &self,
        caller: &Caller,
        ino: InodeNo,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<(), FsError>;
    /// Removes one extended attribute.
    fn remove_xattr(&self, caller: &Caller, ino: InodeNo, name: &[u8]) -> Result<(), FsError>;
    /// Reserves, punches or zeroes a range. Returns the file's change counter behind that.
    fn allocate(
        &self,
        caller: &Caller,
        handle: Handle,
        offset: u64,
        len: u64,
        how: Allocate,
    ) -> Result<u64, FsError>;
    /// Finds the next data or hole.
    fn seek(&self, caller: &Caller, handle: Handle, offset: u64, seek: SeekFor) -> Result<u64, FsError>;
    /// Copies within the server; may copy fewer bytes.
    fn copy_range(
        &self,
        caller: &Caller,
        from: Handle,
        from_offset: u64,
        to: Handle,
        to_offset: u64,
        len: u64,
    ) -> Result<Copied, FsError>;
    /// The counts of this mount so far, by name, for `cuttlefs status`.
    fn figures(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
    /// The figures of this mount's RNIC, if it is hardware, for status.
    fn hardware(&self) -> Option<HardwareFigures> {
        None
    }
    /// Whether the server is away, and the changes that would be lost. Does not wait for the server.
    fn condition(&self) -> Condition {
        Condition::default()
    }
    /// Makes all changes durable at the server. Waits while the server is away.
    fn sync_all(&self) -> Result<(), FsError> {
        Ok(())
    }
    /// The mount ends: write back, close everything, end the session.
    fn shut_down(&self);
}
