//! The closed set of replies.
//!
//! The order of enum variants and struct fields is the wire format, as for requests. Replies borrow their names and data.

use super::body::{self, BodyError};
use super::limits::MAX_MESSAGE_BYTES;
use super::parts::{OpenTicket, SettledLock, TestedLock};
use super::region_key::RegionKey;
use crate::attr::{Attr, FileKind};
use crate::ids::{FileKey, FilePage, FileSlot, InodeNo};
use crate::pool_uuid::PoolUuid;
use crate::rdma::RemoteRange;
use crate::region::{Extent, MagicPattern};
use serde::{Deserialize, Serialize};

/// The reply to `Attach`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// Changes when the server restarts.
    pub server_epoch: u64,
    /// The pool that it serves: a client of another one must not go on with this server.
    pub pool: PoolUuid,
    /// Names the session. Another number than before means that the old session is gone, and that open files must be reclaimed.
    pub session: u64,
    /// The session ends after this time without any request.
    pub lease_ms: u32,
    /// Slots the client may use.
    pub slots: u16,
    /// Inode of the directory the client sees as root.
    pub root: InodeNo,
    /// The pattern that stands for pages on SSD.
    pub magic: MagicPattern,
    /// Changes will be refused.
    pub read_only: bool,
    /// `server_epoch` of the server before this one, if that stopped with everything on its disk: none of its answered changes was lost.
    pub clean_predecessor: Option<u64>,
    /// How one-sided reads of file bytes work.
    pub one_sided: OneSidedReads,
    /// How accesses are to be counted; `None`: they are not counted.
    pub sampling: Option<Sampling>,
    /// Every answered change is durable, so a client need not keep anything for a restart.
    pub durable_answers: bool,
    /// The server's tables, in `WindowId::ALL` order, for a client that is trusted with them and has a link that maps nothing: it may READ these
    /// regions as a whole.
    pub windows: Option<[RemoteRange; 3]>,
    /// A window in which pool page N is at N pages: its frame, or the magic page. Who is told of it READs bytes of pages there, whole pages, and not
    /// in the frames.
    pub page_window: Option<RemoteRange>,
}

/// How one-sided reads of file bytes work at a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OneSidedReads {
    /// Pages on SSD come back as the magic pattern (TeRM section 4.2).
    Magic,
    /// Every page is in memory, so nothing has to be detected.
    Whole,
    /// There are no one-sided reads: all reads are RPCs.
    Off,
}

/// How a client counts accesses for the server (TeRM section 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sampling {
    /// Pages of a sample unit: a power of two, at most [`MAX_SAMPLE_UNIT_PAGES`](crate::region::MAX_SAMPLE_UNIT_PAGES).
    pub unit_pages: u32,
    /// Interval at which the server pulls the counters.
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
    /// The ticket to reclaim it with.
    pub ticket: OpenTicket,
}

/// One directory entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirEntry<'a> {
    /// The place to go on after this entry; constant as long as the entry exists.
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
    /// The layout is complete up to this page; `None`: to the end of the file.
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
    /// Inodes for which the metadata's disk has room, about; 0: names, attributes and extents are refused until something is deleted.
    pub free_inodes: u64,
}

/// A successful reply; each variant lists its requests. A failure has a status in the header, and no body.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply<'a> {
    /// Unlock, CancelLock (nobody waits any more), Heartbeat, Detach, Recovered, ShareCounters, Unlink, Rmdir, Rename, Close, Sync, SetXattr,
    /// RemoveXattr, Unbind, ReturnGrant.
    Done,
    /// Attach.
    Attached(Attached),
    /// Reclaim: for each file its new filekey, or `None` if it is gone.
    Reclaimed(Vec<Option<Opened>>),
    /// Lookup, GetAttr, SetAttr, Make, Link, Allocate, GrantWrite. SetLock: the lock is held; these are the attributes of its file.
    Attr(Attr),
    /// Open, Create. OpenRegion, with a ticket that reclaims nothing: a region is opened again by its key.
    Opened(Opened),
    /// ReadLink, GetXattr, ListXattr (names, each ended by NUL).
    Bytes(#[serde(with = "serde_bytes")] &'a [u8]),
    /// ReadDir.
    Entries {
        /// In cookie order.
        #[serde(borrow)]
        entries: Vec<DirEntry<'a>>,
        /// There are no further entries.
        end: bool,
    },
    /// Layout.
    Layout(Layout),
    /// Fetch: how many bytes of the request precede the end of the file. With `Sink::Inline` the wanted pages' bytes follow, one page after the
    /// other.
    Fetched {
        /// Bytes before the end of the file.
        valid_len: u32,
        /// Inline bytes.
        #[serde(with = "serde_bytes")]
        inline: &'a [u8],
    },
    /// Write.
    Written {
        /// File offset of the bytes (for appends).
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
    /// SetLock: the request waits; `AwaitLocks` tells how the wait ends.
    Queued,
    /// AwaitLocks: waits that have ended. CancelLock: the wait had ended; if the list is empty, `AwaitLocks` is just telling its end.
    Settled(Vec<SettledLock>),
    /// TestLock.
    Tested(TestedLock),
    /// ReclaimLocks: for each lock whether it is held again.
    LocksReclaimed(Vec<bool>),
    /// Restore.
    Restored {
        /// A part of the change is lost for good: others have changed the file since that server died.
        lost: bool,
    },
    /// Bind, BindAgain.
    Bound(RegionKey),
    /// Changes: for each inode its change counter; `None`: there is no such inode.
    Changes(Vec<Option<u64>>),
    /// Defragment.
    Moved {
        /// Pages that were moved.
        pages: u64,
        /// The page at which the next step begins; `None`: that was the last one.
        next: Option<FilePage>,
    },
    /// Atomic: the word that was there before.
    Old(u64),
}

impl<'a> Reply<'a> {
    /// Writes the body into `out` and returns its length.
    ///
    /// # Errors
    /// `TooLarge` if `out` is too short.
    pub fn encode(&self, out: &mut [u8]) -> Result<usize, BodyError> {
        body::encode(self, out)
    }

    /// The body in a buffer of its own size.
    ///
    /// # Errors
    /// `TooLarge` if it is longer than a message can carry.
    pub fn encode_to_vec(&self) -> Result<Vec<u8>, BodyError> {
        self.encode_behind(Vec::new())
    }

    /// Appends the body to `room`, which already has room for the message's header.
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
        body::parse(body)
    }
}

/// Longest head of a `Fetched` reply: the variant and two lengths, as varints.
pub const FETCHED_HEAD_MAX: usize = 11;

/// The bytes before the inline bytes of a `Fetched` reply, for a server whose inline bytes are already in the memory that is sent.
#[derive(Clone, Copy, Debug)]
pub struct FetchedHead {
    bytes: [u8; FETCHED_HEAD_MAX],
    len: usize,
}

impl FetchedHead {
    /// The head of a reply with `inline_len` bytes.
    pub fn new(valid_len: u32, inline_len: usize) -> Self {
        let mut bytes = [0; FETCHED_HEAD_MAX];
        let without = Reply::Fetched { valid_len, inline: &[] };
        // The last byte is the length 0; the right length replaces it. A `usize` has the same varint as a `u32`.
        let at = body::encode(&without, &mut bytes).expect("it fits the longest head") - 1;
        let inline_len = u32::try_from(inline_len).expect("a message is shorter than 4 GiB");
        let len = at + body::encode(&inline_len, &mut bytes[at..]).expect("it fits the longest head");
        Self { bytes, len }
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}
