//! The parts of requests and replies. The order of variants and fields is the wire format.

use crate::attr::FileKind;
use crate::ids::{InodeNo, Rkey, SlotIndex};
use crate::locks::{Lock, LockMode, LockRange, WaitId};
use crate::status::Status;
use serde::{Deserialize, Serialize};

/// Room in the client's registered memory that the server reads from or writes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteBuffer {
    /// The client's region.
    pub rkey: Rkey,
    /// Byte offset inside it.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

/// Rights a filekey is bound with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Rights {
    /// May read.
    pub read: bool,
    /// May write, truncate and allocate.
    pub write: bool,
}

/// The way in which a client came to the file that it opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpenBy {
    /// By its number, also if it has no name any more.
    Number,
    /// By a name that the client has cached. It must not get a file that others have removed or moved since: `Stale` if the file has lost a name
    /// meanwhile.
    Name {
        /// The file's change counter when the name was looked up; 0: not known.
        told: u64,
    },
}

/// Bytes of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Payload<'a> {
    /// In the message.
    Inline(#[serde(with = "serde_bytes")] &'a [u8]),
    /// In the client's memory, to be pulled by RDMA READ.
    Pull(RemoteBuffer),
}

/// The place for the bytes of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sink {
    /// Into the reply.
    Inline,
    /// Into the client's memory, by RDMA WRITE before the reply is sent. Only pages of the fetch's set are written, each at its offset in the
    /// request.
    Push(RemoteBuffer),
}

/// The mode of an allocation, as in fallocate(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Allocate {
    /// Reserve space; extend the file unless `keep_size`.
    Reserve {
        /// Do not change the file's length.
        keep_size: bool,
    },
    /// Give the space back; reads give zeros; the length stays.
    PunchHole,
    /// Reads give zeros; space stays reserved.
    ZeroRange {
        /// Do not change the file's length.
        keep_size: bool,
    },
}

/// A change of contents that a server had answered, and that it may have lost in a kill before it was durable. It is restored as a whole, as it was
/// requested: so the file never gets contents that it never had. In a message `B` is a [`Payload`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Restored<B> {
    /// These bytes were written.
    Bytes {
        /// File offset.
        offset: u64,
        /// The bytes, at least one.
        bytes: B,
    },
    /// The file was cut to this length.
    End(u64),
    /// Space was allocated, punched or zeroed.
    Allocate {
        /// File offset.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The mode.
        how: Allocate,
    },
}

impl<B> Restored<B> {
    /// The same change, with its bytes in another form.
    pub fn map<C>(self, form: impl FnOnce(B) -> C) -> Restored<C> {
        match self {
            Self::Bytes { offset, bytes } => Restored::Bytes { offset, bytes: form(bytes) },
            Self::End(size) => Restored::End(size),
            Self::Allocate { offset, len, how } => Restored::Allocate { offset, len, how },
        }
    }
}

/// What a seek looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SeekFor {
    /// The next byte that is data.
    Data,
    /// The next byte of a hole; the end of the file counts as one.
    Hole,
}

/// The scope of a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SyncScope {
    /// Contents and all attributes of one inode; of a directory, its entries.
    Inode(InodeNo),
    /// Contents of one inode and the attributes needed to read them.
    InodeContents(InodeNo),
    /// Everything in the pool.
    All,
}

/// How `setxattr` treats an existing value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum XattrMode {
    /// Create or replace.
    Any,
    /// Fail if it exists.
    Create,
    /// Fail if it does not.
    Replace,
}

/// How `rename` treats an existing target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RenameMode {
    /// Replace it.
    Replace,
    /// Fail if it exists.
    NoReplace,
    /// Exchange the two names.
    Exchange,
    /// Replace it, and leave a character device 0:0 under the old name.
    Whiteout,
    /// Fail if it exists; leave a character device 0:0 under the old name.
    NoReplaceWhiteout,
}

/// The kind of a new inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NewNode<'a> {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symlink with this target.
    Symlink(&'a [u8]),
    /// A device, fifo or socket; `kind` is none of the above.
    Special {
        /// The file type.
        kind: FileKind,
        /// Device number.
        rdev: u32,
    },
}

/// Proves to a later life of the server that a client has opened a file with these rights. Only the server can make one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OpenTicket(pub u64);

/// An open file a client reclaims after the server restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reclaim {
    /// The inode.
    pub ino: InodeNo,
    /// The rights with which it was opened.
    pub rights: Rights,
    /// The ticket of `Opened`. Without one the file is opened anew, if the client may open it.
    pub ticket: Option<OpenTicket>,
}

/// A request without an answer, which the client sends again after the server has restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unanswered {
    /// Its slot.
    pub slot: SlotIndex,
    /// Its number in the slot.
    pub seq: u64,
}

/// A lock a client reclaims after the server restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReclaimLock {
    /// The file.
    pub ino: InodeNo,
    /// The lock, as it was granted.
    pub lock: Lock,
}

/// How a wait for a lock ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettledLock {
    /// The name of the wait.
    pub wait: WaitId,
    /// The lock is held, or why it is not.
    pub result: Result<(), Status>,
}

/// A lock that blocks another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockingLock {
    /// Its bytes.
    pub range: LockRange,
    /// Its mode.
    pub mode: LockMode,
    /// The process that holds it, on any machine.
    pub pid: u32,
}

/// The result of a test for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TestedLock {
    /// Nothing blocks the lock.
    Free,
    /// This lock blocks it.
    Blocked(BlockingLock),
    /// Not known until all clients of the server before this one have reclaimed their locks: ask again.
    Unknown,
}
