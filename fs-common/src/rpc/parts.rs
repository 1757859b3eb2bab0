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

/// What leads to a file that is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpenBy {
    /// Its number: also if no name leads to it any more.
    Number,
    /// A name that somebody remembers. He must not get what others have removed, or moved: `Stale` if it has lost a name since.
    Name {
        /// The file's change counter when the name was looked up; 0: that is not known.
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

/// Where the bytes of a read go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sink {
    /// Into the reply.
    Inline,
    /// Into the client's memory, by RDMA WRITE before the reply is sent. Only pages of the fetch's set are
    /// touched, each at its place in the request.
    Push(RemoteBuffer),
}

/// What `fallocate` does.
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

/// A change of contents that a server answered, which may have been killed before it was durable. It is restored whole, as it was
/// asked for: no state of the file comes back that it never had. In a message `B` is a [`Payload`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Restored<B> {
    /// These bytes were written.
    Bytes {
        /// Where.
        offset: u64,
        /// At least one.
        bytes: B,
    },
    /// The file was made to end here: whatever had been behind it was cut off.
    End(u64),
    /// fallocate(2).
    Allocate {
        /// File offset.
        offset: u64,
        /// Bytes.
        len: u64,
        /// What was done.
        how: Allocate,
    },
}

impl<B> Restored<B> {
    /// The same with its bytes in another form.
    pub fn map<C>(self, form: impl FnOnce(B) -> C) -> Restored<C> {
        match self {
            Self::Bytes { offset, bytes } => Restored::Bytes { offset, bytes: form(bytes) },
            Self::End(size) => Restored::End(size),
            Self::Allocate { offset, len, how } => Restored::Allocate { offset, len, how },
        }
    }
}

/// What to seek for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SeekFor {
    /// The next byte that is data.
    Data,
    /// The next byte of a hole; the end of the file counts as one.
    Hole,
}

/// Which durability a sync asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SyncScope {
    /// Contents and all attributes of one inode; of a directory, its entries.
    Inode(InodeNo),
    /// Contents of one inode and the attributes needed to read them.
    InodeContents(InodeNo),
    /// Everything.
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

/// What a new inode is to be.
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
        /// Which.
        kind: FileKind,
        /// Device number.
        rdev: u32,
    },
}

/// Proves to a later life of the server that a client has opened a file with these rights. Only the server makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OpenTicket(pub u64);

/// An open file a client reclaims after the server restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reclaim {
    /// The inode.
    pub ino: InodeNo,
    /// As it was opened.
    pub rights: Rights,
    /// What `Opened` gave for it. Without, it is opened anew, if it may be.
    pub ticket: Option<OpenTicket>,
}

/// A request that its client has no answer to, and asks again after the server restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unanswered {
    /// Where it comes.
    pub slot: SlotIndex,
    /// Its number.
    pub seq: u64,
}

/// A lock a client reclaims after the server restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReclaimLock {
    /// The file.
    pub ino: InodeNo,
    /// As it was granted.
    pub lock: Lock,
}

/// How a wait for a lock ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettledLock {
    /// Which.
    pub wait: WaitId,
    /// The lock is held, or why it is not.
    pub result: Result<(), Status>,
}

/// A lock that is in somebody's way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockingLock {
    /// Which bytes.
    pub range: LockRange,
    /// How.
    pub mode: LockMode,
    /// The process that holds it, on whatever machine that runs.
    pub pid: u32,
}

/// What stands in the way of a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TestedLock {
    /// Nothing.
    Free,
    /// This lock.
    Blocked(BlockingLock),
    /// Not known before all clients of the server before this one have reclaimed their locks: ask again.
    Unknown,
}
