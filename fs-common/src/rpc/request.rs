//! The closed set of requests.
//!
//! The order of enum variants and struct fields is the wire format (the golden bytes in `fs-common/tests/rpc_messages.rs` lock
//! it). Requests borrow their names and data from the receive buffer.

use super::body::{self, BodyError};
use super::parts::{
    Allocate, NewNode, OpenBy, Payload, Reclaim, ReclaimLock, RemoteBuffer, RenameMode, Restored, Rights,
    SeekFor, Sink, SyncScope, Unanswered, XattrMode,
};
use super::session_secret::SessionSecret;
use crate::attr::SetAttr;
use crate::ids::{FileKey, FilePage, InodeNo};
use crate::locks::{Lock, LockOwner, LockRange, LockSpace, WaitId};
use crate::memory::SharedMemory;
use crate::region::PageSet;
use serde::{Deserialize, Serialize};

/// A request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request<'a> {
    /// First message on every connection: opens or joins the client's session.
    Attach {
        /// Whose: the client's id is a hash of it.
        secret: SessionSecret,
        /// For people: host name and mount point.
        label: &'a str,
        /// Directory of the export to see as root; empty: the export's root.
        subtree: &'a [u8],
    },
    /// Keeps the session alive. Any request does.
    Heartbeat,
    /// Ends the session: everything open is closed.
    Detach,
    /// Opens files again after a restart of the server; replies in the same order.
    Reclaim {
        /// What was open. A list too long for one message is sent in parts.
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
        /// What.
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
    /// Makes another name for an inode; the first one for a file that was made without, while somebody has that open.
    Link {
        /// Inode.
        ino: InodeNo,
        /// Directory of the new name.
        parent: InodeNo,
        /// The new name.
        name: &'a [u8],
    },
    /// Removes a name of something that is no directory.
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
        /// What if the target exists.
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
        /// Bytes of reply body wanted at most.
        max_bytes: u32,
        /// Whether attributes are wanted.
        plus: bool,
    },
    /// Opens a file: binds a filekey.
    Open {
        /// Inode.
        ino: InodeNo,
        /// What for.
        rights: Rights,
        /// Cut to length 0 (`O_TRUNC`).
        truncate: bool,
        /// What leads to it.
        by: OpenBy,
    },
    /// Closes files: filekeys end.
    Close {
        /// Which.
        filekeys: Vec<FileKey>,
    },
    /// Asks for the file's layout, for initiator translation.
    Layout {
        /// Open file.
        filekey: FileKey,
        /// First page of interest.
        first_page: FilePage,
        /// Extents wanted at most.
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
        /// Which of the request's pages are wanted.
        pages: PageSet,
        /// Where they go.
        sink: Sink,
    },
    /// Writes.
    Write {
        /// Open file.
        filekey: FileKey,
        /// File offset; ignored for an append.
        offset: u64,
        /// At the end of the file, wherever that is by then (`O_APPEND`).
        append: bool,
        /// The bytes.
        payload: Payload<'a>,
    },
    /// Makes durable.
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
        /// From where.
        offset: u64,
        /// What for.
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
        /// What if it exists or not.
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
    /// This client has reclaimed all it had open: nobody need be waited for on its account any more (RECLAIM_COMPLETE
    /// of RFC 8881 section 18.51).
    Recovered {
        /// What it has no answer to, and asks again from now on, at most one request of each slot. Of what an earlier life of the
        /// server did, the answers are told then, and the files that they open are open from now on.
        unanswered: Vec<Unanswered>,
    },
    /// Where this client counts its one-sided reads (`region::AccessCounters`), to be pulled over this connection.
    ShareCounters {
        /// The counters' memory.
        buffer: RemoteBuffer,
    },
    /// Asks for a lock on an open file.
    SetLock {
        /// Open file.
        filekey: FileKey,
        /// Which lock.
        lock: Lock,
        /// Names the wait, if it comes to one.
        wait: WaitId,
        /// Wait while somebody else's lock is in the way.
        blocking: bool,
    },
    /// Gives locks of an owner up. By inode: a file may be closed before its locks are given up.
    Unlock {
        /// File.
        ino: InodeNo,
        /// Which kind.
        space: LockSpace,
        /// Whose.
        owner: LockOwner,
        /// On which bytes.
        range: LockRange,
    },
    /// Asks which lock would be in the way (`F_GETLK`).
    TestLock {
        /// Open file.
        filekey: FileKey,
        /// The lock that is not asked for.
        lock: Lock,
    },
    /// Asks which of this client's waits for locks have ended. Held until one has, or the time is over.
    AwaitLocks {
        /// How long to hold it, at most [`AWAIT_LOCKS_MAX_MS`](super::AWAIT_LOCKS_MAX_MS).
        hold_ms: u32,
    },
    /// Gives a wait for a lock up.
    CancelLock {
        /// Which.
        wait: WaitId,
    },
    /// Takes locks again that were held before the server restarted.
    ReclaimLocks {
        /// A list too long for one message is sent in parts.
        locks: Vec<ReclaimLock>,
    },
    /// Makes a change again that a server before this one answered and may have lost, where nothing newer stands.
    Restore {
        /// Open file.
        filekey: FileKey,
        /// The file's change counter after that change.
        change: u64,
        /// The change.
        #[serde(borrow)]
        what: Restored<Payload<'a>>,
    },
    /// Makes a regular file without a name and opens it (`O_TMPFILE`). It goes when nobody has it open, unless `Link` gave it
    /// a name.
    CreateNameless {
        /// Directory that it is made as if in.
        parent: InodeNo,
        /// Permission bits, umask not applied: the header has it.
        mode: u16,
        /// How to open.
        rights: Rights,
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

    /// As `encode`, into memory that it is sent from: from `offset` on, at most `room` bytes.
    ///
    /// # Errors
    /// `TooLarge` if it has not enough room; what is there then is a part of it.
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

    /// What it opens a file for, if it does.
    pub const fn opens(&self) -> Option<Rights> {
        match self {
            Self::Create { rights, .. } | Self::CreateNameless { rights, .. } | Self::Open { rights, .. } => {
                Some(*rights)
            }
            _ => None,
        }
    }

    /// Whether it is answered outside of the slots: it needs no session, and uses up no number.
    pub const fn needs_no_slot(&self) -> bool {
        matches!(self, Self::Attach { .. } | Self::Status)
    }
}
