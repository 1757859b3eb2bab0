//! The closed set of requests and replies.
//!
//! The order of enum variants and struct fields is the wire format (golden bytes below lock it). Requests borrow
//! their names and data from the receive buffer. Limits a peer must keep are constants here; the server checks
//! them in `fs-server/src/rpc/admit.rs` before anything is done.
//!
//! `Request` is also what the redo log will hold: a mutation is replayed by handing the same value to the same
//! `apply` (DESIGN section 5).

use super::early::EarlyOffer;
use super::session_secret::SessionSecret;
use crate::attr::{Attr, FileKind, SetAttr};
use crate::ids::{FileKey, FilePage, FileSlot, InodeNo, NAME_MAX, Rkey, SlotIndex};
use crate::locks::{Lock, LockMode, LockOwner, LockRange, LockSpace, WaitId};
use crate::region::{Extent, MagicPattern, PageSet};
use crate::status::Status;
use serde::{Deserialize, Serialize};

/// Largest message either side sends, header included. An extended attribute's value, or the list of them, of the length that Linux
/// allows fits, with what comes with it; so do directory pages and inline data.
pub const MAX_MESSAGE_BYTES: u32 = 66 * 1024;
/// Largest payload a write carries inside its message; larger ones are pulled by RDMA READ
/// (TeRM section 4.1.2). Chosen so that one message holds a page and its header many times over, while
/// rings of receive buffers stay small.
pub const MAX_INLINE_BYTES: usize = 16 * 1024;
/// Largest read, write or copy of one request: what FUSE sends at most.
pub const MAX_TRANSFER_BYTES: u32 = 1024 * 1024;
/// Largest extended attribute value: Linux's `XATTR_SIZE_MAX`.
pub const XATTR_VALUE_MAX: usize = 64 * 1024;
/// Longest list of the names of an inode's extended attributes, each with a NUL: Linux's `XATTR_LIST_MAX`.
pub const XATTR_LIST_MAX: usize = 64 * 1024;
/// Longest extended attribute name (Linux's `XATTR_NAME_MAX`).
pub const XATTR_NAME_MAX: usize = NAME_MAX;
/// Files one request reclaims at most: the reply, with the longest encoding of each file's attributes, fits one message.
pub const RECLAIM_FILES_MAX: usize = 256;
/// Locks one request reclaims at most: they fit one message with the longest encoding of each.
pub const RECLAIM_LOCKS_MAX: usize = 1024;
/// Ends of waits for locks one reply tells at most: such a reply must be short enough to be kept for a retransmission.
pub const SETTLED_LOCKS_MAX: usize = 256;
/// How long a server holds the question for ends of waits at most: well below the time after which a client takes a
/// connection without an answer for a lost one.
pub const AWAIT_LOCKS_MAX_MS: u32 = 10_000;
/// Session slots of one client: how many requests it can have in flight.
pub const SLOTS_PER_SESSION: u16 = 64;

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
    /// Something the client has no copy of: it can only be told whether it was lost.
    NotKept,
}

impl<B> Restored<B> {
    /// The same with its bytes in another form.
    pub fn map<C>(self, form: impl FnOnce(B) -> C) -> Restored<C> {
        match self {
            Self::Bytes { offset, bytes } => Restored::Bytes { offset, bytes: form(bytes) },
            Self::End(size) => Restored::End(size),
            Self::Allocate { offset, len, how } => Restored::Allocate { offset, len, how },
            Self::NotKept => Restored::NotKept,
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
        /// What it asks again from now on, at most one request of each slot: what an earlier life of the server did of it
        /// is there until it was asked again.
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
        /// How long to hold it, at most [`AWAIT_LOCKS_MAX_MS`].
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
    /// Lets one of this client's rings go: its connection is ended and what it holds executed. Nothing that was put into it
    /// before is executed after the answer.
    LetRingGo {
        /// Which, below `RINGS_PER_CLIENT`.
        ring: u16,
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

/// What `Attach` tells a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// Changes when the server restarts.
    pub server_epoch: u64,
    /// Names the session; another number than before means that the old session is gone and that open files
    /// must be reclaimed.
    pub session: u64,
    /// Without any request for so long the session ends.
    pub lease_ms: u32,
    /// Slots the client may use.
    pub slots: u16,
    /// Inode of the directory the client sees as root.
    pub root: InodeNo,
    /// Covers what is on SSD.
    pub magic: MagicPattern,
    /// Mutations will be refused.
    pub read_only: bool,
    /// `server_epoch` of the server before this one, if it stopped with everything on its disk: nothing that one
    /// answered was lost.
    pub clean_predecessor: Option<u64>,
    /// What one-sided reads of file bytes are worth.
    pub one_sided: OneSidedReads,
    /// How accesses are to be counted; `None`: not at all.
    pub sampling: Option<Sampling>,
    /// Every mutation that is answered is durable: there is nothing a client would have to keep for a restart.
    pub durable_answers: bool,
    /// Where small writes may be put that are to be acknowledged before they are executed; `None`: nowhere.
    pub early: Option<EarlyOffer>,
}

/// What one-sided reads of file bytes are worth at a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OneSidedReads {
    /// Pages on SSD come back as the magic pattern (TeRM section 4.2).
    Magic,
    /// Every page is there: there is nothing to look for.
    Whole,
    /// There are none: all reads are RPCs.
    Off,
}

/// How a client counts accesses for the server (TeRM section 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sampling {
    /// Pages of a sample unit: a power of two, at most [`MAX_SAMPLE_UNIT_PAGES`](crate::region::MAX_SAMPLE_UNIT_PAGES).
    pub unit_pages: u32,
    /// How often the server pulls the counters.
    pub period_ms: u32,
}

/// An opened file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opened {
    /// Names the open file from now on.
    pub filekey: FileKey,
    /// Its slot in the file table; `None` when the table is full: then read by RPC.
    pub slot: Option<FileSlot>,
    /// Attributes at open.
    pub attr: Attr,
    /// To reclaim it with.
    pub ticket: OpenTicket,
}

/// One directory entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirEntry<'a> {
    /// Where to go on after this entry; stable for the entry's life.
    pub cookie: u64,
    /// Inode.
    pub ino: InodeNo,
    /// Type.
    pub kind: FileKind,
    /// Name.
    #[serde(borrow)]
    pub name: &'a [u8],
    /// Attributes, if they were asked for.
    pub attr: Option<Attr>,
}

/// A file's layout, or part of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Generation of the file's slot that this layout belongs to.
    pub generation: u64,
    /// Extents in file order from the one at or after the page asked for; gaps are holes.
    pub extents: Vec<Extent>,
    /// The layout is whole up to this page; `None`: to the end of the file.
    pub known_until: Option<FilePage>,
}

/// Space figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Space {
    /// Pages of the pool.
    pub pool_pages: u64,
    /// Pages not in use, exact.
    pub free_pages: u64,
    /// Inodes in use.
    pub inodes: u64,
    /// Inodes that the metadata's disk has room for, about; none: names, attributes and extents are refused until something
    /// is deleted.
    pub free_inodes: u64,
}

/// A successful reply; which variant belongs to which request is said beside it. Failures carry a status in the
/// header and no body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply<'a> {
    /// Unlock, CancelLock (nobody waits any more), Heartbeat, Detach, Recovered, ShareCounters, Unlink, Rmdir, Rename, Close, Sync, SetXattr, RemoveXattr.
    Done,
    /// Attach.
    Attached(Attached),
    /// Reclaim: for each file its new filekey, or `None` if it is gone.
    Reclaimed(Vec<Option<Opened>>),
    /// Lookup, GetAttr, SetAttr, Make, Link, Allocate. SetLock: it is held, and this is the file it is on.
    Attr(Attr),
    /// Open, Create.
    Opened(Opened),
    /// ReadLink, GetXattr, ListXattr (names, each ended by NUL).
    Bytes(#[serde(with = "serde_bytes")] &'a [u8]),
    /// ReadDir.
    Entries {
        /// In cookie order.
        #[serde(borrow)]
        entries: Vec<DirEntry<'a>>,
        /// Nothing follows.
        end: bool,
    },
    /// Layout.
    Layout(Layout),
    /// Fetch: how many bytes of the request precede the end of the file. With `Sink::Inline` the wanted pages'
    /// bytes follow, one after the other.
    Fetched {
        /// Bytes before the end of the file.
        valid_len: u32,
        /// Inline bytes.
        #[serde(with = "serde_bytes")]
        inline: &'a [u8],
    },
    /// Write.
    Written {
        /// Where the bytes went (for appends).
        offset: u64,
        /// Bytes written; all of them, or the request failed.
        len: u32,
        /// The file's length now.
        size: u64,
        /// The file's change counter now.
        change: u64,
    },
    /// Seek: the offset found.
    Offset(u64),
    /// CopyRange.
    Copied {
        /// Bytes copied.
        len: u64,
        /// The target's change counter now.
        change: u64,
    },
    /// StatFs.
    Space(Space),
    /// Status: JSON.
    Status(&'a str),
    /// SetLock: it has to be waited for; `AwaitLocks` tells how that ended.
    Queued,
    /// AwaitLocks: waits that have ended. CancelLock: that one had, or (none) its end is being told.
    Settled(Vec<SettledLock>),
    /// TestLock.
    Tested(TestedLock),
    /// ReclaimLocks: for each whether it is held again.
    LocksReclaimed(Vec<bool>),
    /// LetRingGo: number of the last of the ring's writes that was executed.
    RingGone {
        /// 0: none ever was.
        done: u64,
    },
    /// Restore.
    Restored {
        /// Some of it is not there and will not be: others have changed the file since that server died.
        lost: bool,
    },
}

/// Bytes that are no message body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// Not in the format.
    #[error("the message body does not parse")]
    Malformed,
    /// Bytes remain after the body.
    #[error("{0} bytes follow the message body")]
    Trailing(usize),
    /// The message does not fit its buffer.
    #[error("the message does not fit {0} bytes")]
    TooLarge(usize),
}

impl<'a> Request<'a> {
    /// Writes the body into `out` and returns its length.
    ///
    /// # Errors
    /// `TooLarge` if `out` is too short.
    pub fn encode(&self, out: &mut [u8]) -> Result<usize, BodyError> {
        encode(self, out)
    }

    /// Parses a body; all of it must be used.
    ///
    /// # Errors
    /// [`BodyError`].
    pub fn parse(body: &'a [u8]) -> Result<Self, BodyError> {
        parse(body)
    }

    /// Whether it is answered outside of the slots: it needs no session, and uses up no number.
    pub const fn needs_no_slot(&self) -> bool {
        matches!(self, Self::Attach { .. } | Self::Status)
    }
}

impl<'a> Reply<'a> {
    /// Writes the body into `out` and returns its length.
    ///
    /// # Errors
    /// `TooLarge` if `out` is too short.
    pub fn encode(&self, out: &mut [u8]) -> Result<usize, BodyError> {
        encode(self, out)
    }

    /// The body in a buffer of its own size.
    ///
    /// # Errors
    /// `TooLarge` if it is longer than a message can carry.
    pub fn encode_to_vec(&self) -> Result<Vec<u8>, BodyError> {
        self.encode_behind(Vec::new())
    }

    /// The body behind what is there already: room for the message's header.
    ///
    /// # Errors
    /// `TooLarge` if the body is longer than a message can carry.
    pub fn encode_behind(&self, mut room: Vec<u8>) -> Result<Vec<u8>, BodyError> {
        const ROOM: usize = MAX_MESSAGE_BYTES as usize - super::HEADER_LEN;
        let before = room.len();
        room.reserve(match self {
            Reply::Fetched { inline, .. } => inline.len() + FETCHED_HEAD_MAX,
            _ => 256,
        });
        let message = postcard::to_extend(self, room).map_err(|_| BodyError::TooLarge(ROOM))?;
        if message.len() - before > ROOM { Err(BodyError::TooLarge(ROOM)) } else { Ok(message) }
    }

    /// Parses a body; all of it must be used.
    ///
    /// # Errors
    /// [`BodyError`].
    pub fn parse(body: &'a [u8]) -> Result<Self, BodyError> {
        parse(body)
    }
}

/// Longest head of a `Fetched` reply: the variant and two lengths, as varints.
pub const FETCHED_HEAD_MAX: usize = 11;

/// What stands before the inline bytes of a `Fetched` reply: for who has them where they are sent from already.
#[derive(Clone, Copy, Debug)]
pub struct FetchedHead {
    bytes: [u8; FETCHED_HEAD_MAX],
    len: usize,
}

impl FetchedHead {
    /// Of a reply with `inline_len` bytes.
    pub fn new(valid_len: u32, inline_len: usize) -> Self {
        let mut bytes = [0; FETCHED_HEAD_MAX];
        let without = Reply::Fetched { valid_len, inline: &[] };
        // Its last byte is the length, 0: the one that is wanted takes its place. A `usize` is a varint as a `u32` is.
        let at = encode(&without, &mut bytes).expect("it fits the longest head") - 1;
        let inline_len = u32::try_from(inline_len).expect("a message is shorter than 4 GiB");
        let len = at + encode(&inline_len, &mut bytes[at..]).expect("it fits the longest head");
        Self { bytes, len }
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

fn encode<T: Serialize>(message: &T, out: &mut [u8]) -> Result<usize, BodyError> {
    let room = out.len();
    postcard::to_slice(message, out).map(|used| used.len()).map_err(|_| BodyError::TooLarge(room))
}

fn parse<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, BodyError> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => Err(BodyError::Trailing(rest.len())),
        Err(_) => Err(BodyError::Malformed),
    }
}
