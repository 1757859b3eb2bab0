//! The closed set of requests.
//!
//! The order of enum variants and struct fields is the wire format (the golden bytes in `fs-common/tests/rpc_messages/` fix it). Requests borrow
//! their names and data from the receive buffer.

use super::body::{self, BodyError};
use super::parts::{
    Allocate, NewNode, OpenBy, Payload, Reclaim, ReclaimLock, RemoteBuffer, RenameMode, Restored, Rights,
    SeekFor, Sink, SyncScope, Unanswered, XattrMode,
};
use super::region_key::RegionKey;
use super::session_secret::SessionSecret;
use crate::attr::SetAttr;
use crate::ids::{FileKey, FilePage, InodeNo};
use crate::locks::{Lock, LockOwner, LockRange, LockSpace, WaitId};
use crate::memory::SharedMemory;
use crate::rdma::FileAtomic;
use crate::region::PageSet;
use serde::{Deserialize, Serialize};

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request<'a> {
    /// First message on every connection: opens or joins the client's session.
    Attach {
        /// The client's secret; the client's id is a hash of it.
        secret: SessionSecret,
        /// A text for people: host name and mount point.
        label: &'a str,
        /// Directory of the export to see as root; empty: the export's root.
        subtree: &'a [u8],
    },
    /// Keeps the session alive, as any request does.
    Heartbeat,
    /// Ends the session, which closes all its open files.
    Detach,
    /// Opens files again after a restart of the server; the reply has the same order.
    Reclaim {
        /// The files that were open. A list that is too long for one message is sent in parts.
        files: Vec<Reclaim>,
    },
    /// Finds a name.
    Lookup {
        /// Directory.
        parent: InodeNo,
        /// Name in it.
        name: &'a [u8],
    },
    /// Reads attributes.
    GetAttr {
        /// Inode.
        ino: InodeNo,
    },
    /// Changes attributes, truncation included.
    SetAttr {
        /// Inode.
        ino: InodeNo,
        /// What to change.
        set: SetAttr,
    },
    /// Makes a name and its inode.
    Make {
        /// Directory.
        parent: InodeNo,
        /// Name to make.
        name: &'a [u8],
        /// The kind of inode.
        node: NewNode<'a>,
        /// Permission bits, umask not applied: the header has it.
        mode: u16,
    },
    /// Makes a regular file and opens it; opens an existing one unless `exclusive`.
    Create {
        /// Directory.
        parent: InodeNo,
        /// Name to make.
        name: &'a [u8],
        /// Permission bits, umask not applied: the header has it.
        mode: u16,
        /// Fail if the name exists.
        exclusive: bool,
        /// How to open.
        rights: Rights,
    },
    /// Gives an inode another name; or its first name, if it was made without one and is still open.
    Link {
        /// Inode.
        ino: InodeNo,
        /// Directory of the new name.
        parent: InodeNo,
        /// The new name.
        name: &'a [u8],
    },
    /// Removes a name of an inode that is not a directory.
    Unlink {
        /// Directory.
        parent: InodeNo,
        /// Name.
        name: &'a [u8],
    },
    /// Removes an empty directory.
    Rmdir {
        /// Directory.
        parent: InodeNo,
        /// Name.
        name: &'a [u8],
    },
    /// Moves a name.
    Rename {
        /// Source directory.
        parent: InodeNo,
        /// Source name.
        name: &'a [u8],
        /// Target directory.
        new_parent: InodeNo,
        /// Target name.
        new_name: &'a [u8],
        /// What to do if the target exists.
        mode: RenameMode,
    },
    /// Reads a symlink.
    ReadLink {
        /// Inode.
        ino: InodeNo,
    },
    /// Lists a directory from a cookie on.
    ReadDir {
        /// Directory.
        ino: InodeNo,
        /// Entries after this one; 0: from the start.
        cookie: u64,
        /// Most bytes of reply body that are wanted.
        max_bytes: u32,
        /// Whether attributes are wanted.
        plus: bool,
    },
    /// Opens a file: binds a filekey.
    Open {
        /// Inode.
        ino: InodeNo,
        /// The rights to open it with.
        rights: Rights,
        /// Cut to length 0 (`O_TRUNC`).
        truncate: bool,
        /// How the client came to the file.
        by: OpenBy,
    },
    /// Closes files: filekeys end.
    Close {
        /// The files to close.
        filekeys: Vec<FileKey>,
    },
    /// Asks for the file's layout, for initiator translation.
    Layout {
        /// Open file.
        filekey: FileKey,
        /// First page of interest.
        first_page: FilePage,
        /// Most extents that are wanted.
        max_extents: u32,
    },
    /// Sparse fetch (TeRM section 4.2): reads only the pages of the set.
    Fetch {
        /// Open file.
        filekey: FileKey,
        /// File offset.
        offset: u64,
        /// Bytes.
        len: u32,
        /// The pages of the request that are wanted.
        pages: PageSet,
        /// The place for the bytes.
        sink: Sink,
    },
    /// Writes bytes to a file.
    Write {
        /// Open file.
        filekey: FileKey,
        /// File offset; ignored for an append.
        offset: u64,
        /// Write at the end that the file has when the request is executed (`O_APPEND`).
        append: bool,
        /// The bytes.
        payload: Payload<'a>,
    },
    /// Makes changes durable.
    Sync(SyncScope),
    /// Allocates, punches or zeroes.
    Allocate {
        /// Open file.
        filekey: FileKey,
        /// File offset.
        offset: u64,
        /// Bytes.
        len: u64,
        /// What to do.
        how: Allocate,
    },
    /// `SEEK_DATA`, `SEEK_HOLE`.
    Seek {
        /// Open file.
        filekey: FileKey,
        /// Offset to begin at.
        offset: u64,
        /// What to look for.
        seek: SeekFor,
    },
    /// Copies within the server.
    CopyRange {
        /// Source file.
        from: FileKey,
        /// Source offset.
        from_offset: u64,
        /// Target file.
        to: FileKey,
        /// Target offset.
        to_offset: u64,
        /// Bytes; the server may copy fewer.
        len: u64,
    },
    /// Reads one extended attribute.
    GetXattr {
        /// Inode.
        ino: InodeNo,
        /// Attribute.
        name: &'a [u8],
    },
    /// Lists extended attributes.
    ListXattr {
        /// Inode.
        ino: InodeNo,
    },
    /// Sets one extended attribute.
    SetXattr {
        /// Inode.
        ino: InodeNo,
        /// Attribute.
        name: &'a [u8],
        /// Value.
        #[serde(with = "serde_bytes")]
        value: &'a [u8],
        /// What to do if the attribute exists, or does not.
        mode: XattrMode,
    },
    /// Removes one extended attribute.
    RemoveXattr {
        /// Inode.
        ino: InodeNo,
        /// Attribute.
        name: &'a [u8],
    },
    /// Space and inode figures.
    StatFs,
    /// The server's status as JSON, for people; needs no session.
    Status,
    /// The client has reclaimed everything that it had open, so nobody need wait for it any more (RECLAIM_COMPLETE of RFC 8881 section 18.51).
    Recovered {
        /// Requests without an answer, which the client sends again from now on, at most one for each slot. If an earlier life of the server had
        /// executed one, the server then tells its answer, and the files that it opened are open from now on.
        unanswered: Vec<Unanswered>,
    },
    /// Tells where this client counts its one-sided reads (`region::AccessCounters`), so that the server can pull the counters over this connection.
    ShareCounters {
        /// The counters' memory.
        buffer: RemoteBuffer,
    },
    /// Asks for a lock on an open file.
    SetLock {
        /// Open file.
        filekey: FileKey,
        /// The lock.
        lock: Lock,
        /// Names the wait, if the request has to wait.
        wait: WaitId,
        /// Wait while another holder's lock blocks this one.
        blocking: bool,
    },
    /// Removes locks of an owner. By inode, since a file may be closed before its locks are removed.
    Unlock {
        /// File.
        ino: InodeNo,
        /// The kind of locks.
        space: LockSpace,
        /// The owner of the locks.
        owner: LockOwner,
        /// The bytes to unlock.
        range: LockRange,
    },
    /// Asks which lock would block this one (`F_GETLK`).
    TestLock {
        /// Open file.
        filekey: FileKey,
        /// The lock to test.
        lock: Lock,
    },
    /// Asks which of this client's waits for locks have ended. The server holds the request until one has ended, or the time is over.
    AwaitLocks {
        /// Longest time to hold the request, at most [`AWAIT_LOCKS_MAX_MS`](super::AWAIT_LOCKS_MAX_MS).
        hold_ms: u32,
    },
    /// Ends a wait for a lock.
    CancelLock {
        /// The wait to end.
        wait: WaitId,
    },
    /// Takes locks again that the client held before the server restarted.
    ReclaimLocks {
        /// The locks. A list that is too long for one message is sent in parts.
        locks: Vec<ReclaimLock>,
    },
    /// Repeats a change that an earlier server had answered and may have lost, wherever no newer change has been made.
    Restore {
        /// Open file.
        filekey: FileKey,
        /// The file's change counter after that change.
        change: u64,
        /// The change.
        #[serde(borrow)]
        what: Restored<Payload<'a>>,
    },
    /// Makes a regular file without a name and opens it (`O_TMPFILE`). It is deleted when nobody has it open, unless `Link` gave it a name.
    CreateNameless {
        /// Directory in which it would have been made.
        parent: InodeNo,
        /// Permission bits, umask not applied: the header has it.
        mode: u16,
        /// How to open.
        rights: Rights,
    },
    /// Binds a range of an open file, so that others can be given a key of it (FileMR section 3).
    Bind {
        /// Open file.
        filekey: FileKey,
        /// File offset at which the range begins.
        offset: u64,
        /// Length of the range; it may reach behind the end of the file, to [`MAX_FILE_SIZE`](crate::ids::MAX_FILE_SIZE) at most.
        len: u64,
        /// The rights that the key gives: at most those of the open.
        rights: Rights,
        /// The binding ends after this time; 0: with the open at the latest.
        lifetime_ms: u64,
    },
    /// Binds a range again that was bound when the server was killed, with its old key. Only the client that bound it can, and only until it says
    /// `Recovered`.
    BindAgain {
        /// Open file: the same file, reclaimed.
        filekey: FileKey,
        /// The key.
        key: RegionKey,
    },
    /// Ends a binding of this client, and all that was opened by its key.
    Unbind {
        /// The binding's number ([`RegionKey::number`]).
        number: u64,
    },
    /// Opens the range of a key that another process was given.
    OpenRegion {
        /// The key.
        key: RegionKey,
    },
    /// Asks for a write grant: one-sided WRITEs, atomics and APPENDs with this filekey from now on. WRITEs and atomics are for bytes of the range that
    /// the file has. The part of the range behind the end of the file is space for APPENDs.
    GrantWrite {
        /// Open file.
        filekey: FileKey,
        /// File offset at which the range begins.
        offset: u64,
        /// Length of the range.
        len: u64,
    },
    /// Returns all grants of this filekey that have bytes of the range.
    ReturnGrant {
        /// Open file.
        filekey: FileKey,
        /// File offset at which the range begins.
        offset: u64,
        /// Length of the range.
        len: u64,
    },
    /// Reads the change counters of files. Does not wait for clients that may still restore changes of theirs, unlike GetAttr.
    Changes {
        /// Inodes, at most [`CHANGES_MAX`](crate::rpc::CHANGES_MAX).
        inodes: Vec<InodeNo>,
    },
    /// Moves some pages of a file to fewer places of the pool (FileMR section 2.3): the first ones at or behind `first_page` that have a better place.
    /// The contents stay, and all that is open.
    Defragment {
        /// Open file, with the right to write.
        filekey: FileKey,
        /// The page to begin at: 0, then what the reply to the step before says.
        first_page: FilePage,
    },
    /// Does an atomic on eight bytes that the file has: what a one-sided atomic does, for clients that have no such way.
    Atomic {
        /// Open file, with the rights to read and to write.
        filekey: FileKey,
        /// File offset, a multiple of 8.
        offset: u64,
        /// What to do.
        operation: FileAtomic,
        /// Whether the change is to be durable when the reply is sent.
        durable: bool,
    },
}

impl<'a> Request<'a> {
    /// Writes the body into `out` and returns its length.
    ///
    /// # Errors
    /// `TooLarge` if `out` is too short.
    pub fn encode(&self, out: &mut [u8]) -> Result<usize, BodyError> {
        body::encode(self, out)
    }

    /// As `encode`, into registered memory: from `offset` on, at most `room` bytes.
    ///
    /// # Errors
    /// `TooLarge` if the body is longer than `room`; the memory then has a part of it.
    pub fn encode_into(&self, memory: &SharedMemory, offset: usize, room: usize) -> Result<usize, BodyError> {
        body::encode_into(self, memory, offset, room)
    }

    /// Parses a body; all of it must be used.
    ///
    /// # Errors
    /// [`BodyError`].
    pub fn parse(body: &'a [u8]) -> Result<Self, BodyError> {
        body::parse(body)
    }

    /// The rights with which it opens a file, if it opens one.
    pub const fn opens(&self) -> Option<Rights> {
        match self {
            Self::Create { rights, .. } | Self::CreateNameless { rights, .. } | Self::Open { rights, .. } => {
                Some(*rights)
            }
            _ => None,
        }
    }

    /// Whether it is answered outside of the slots: it needs no session, and takes no number.
    pub const fn needs_no_slot(&self) -> bool {
        matches!(self, Self::Attach { .. } | Self::Status)
    }
}
