//! The closed set of operations on metadata.

use super::answer::Answer;
use super::climbs::Climbs;
use super::written::ClientChange;
use cuttlefs_common::attr::{Attr, SetAttr, Timestamp};
use cuttlefs_common::ids::{ClientId, FilePage, InodeNo, SlotIndex};
use cuttlefs_common::rdma::PeerKey;
use cuttlefs_common::region::Extent;
use cuttlefs_common::rpc::{NewNode, RenameMode, Rights, XattrMode};
use std::borrow::Cow;

/// Most names of an inode. Tools on Linux expect a `LINK_MAX` of at most 65000 on common file systems. Subdirectories do not count.
pub const LINK_MAX: u32 = 65_000;
/// Most extended attributes of an inode. Their list is bounded, too (`XATTR_LIST_MAX`).
pub const XATTRS_PER_INODE_MAX: u32 = 1024;
/// Bytes of an extended attribute in one record.
pub(super) const XATTR_PIECE_BYTES: usize = 4096;
/// An unlinked file with at most so many extents is removed in the batch that unlinks it. Larger ones become orphans first, so that the size of a
/// batch does not depend on the size of a file.
pub(super) const INLINE_REAP_EXTENTS: usize = 64;
/// Extents that one batch of a reap, a cut or a punch removes.
pub const REAP_BATCH_EXTENTS: usize = 1024;

/// The identity of a request, for good: a retransmission has the same, and no other request ever has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId {
    /// The client.
    pub client: ClientId,
    /// The slot of the client's session.
    pub slot: SlotIndex,
    /// The sequence number in that slot.
    pub seq: u64,
}

/// The caller of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// The user id.
    pub uid: u32,
    /// The group id.
    pub gid: u32,
    /// Permission bits that new inodes do not get, unless a default ACL applies.
    pub umask: u16,
    /// Whether a change of contents takes set-id bits and capabilities from the file.
    pub drops_privileges: bool,
    /// The request of the operation; its batch notes that it was done.
    pub request: Option<RequestId>,
    /// The rights with which that request opens the file, for its answer.
    pub opens: Option<Rights>,
}

/// A part of a file's range table that becomes durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeUpdate {
    /// First page of the range.
    pub first: FilePage,
    /// The page behind its last page.
    pub end: FilePage,
    /// All extents in the range from now on: in order, without overlaps, none empty. Gaps are holes.
    pub extents: Vec<Extent>,
}

/// A request whose changes of contents become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoneRequest {
    /// The request.
    pub request: RequestId,
    /// Its answer.
    pub answer: Answer,
}

/// The changes of a file's contents that a batch makes durable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Covers {
    /// No changes that have a counter.
    #[default]
    Nothing,
    /// The changes that were made before its write-back began.
    Changes {
        /// All changes up to this counter.
        until: u64,
        /// Changes of an earlier life of the server that were restored since the last write-back: the last one of each client.
        restored: Vec<ClientChange>,
    },
    /// A cut. `all`: and all changes before it.
    Cut {
        /// Whether all changes before it are covered as well.
        all: bool,
    },
}

/// The bytes of a page at a sync, without the zeros at their end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageImage {
    /// The file page.
    pub page: FilePage,
    /// The bytes; at most a page.
    pub bytes: Vec<u8>,
}

/// The change of the images of a file's pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Images {
    /// Images of pages that the ranges leave without bytes are removed.
    #[default]
    Follow,
    /// These images are put: the bytes are durable without being in their places.
    Put(Vec<PageImage>),
    /// All images are removed: every byte of the file is in its place, durably.
    Drop,
}

/// A file's data that became durable, and that the store may record now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataCommit {
    /// The file.
    pub ino: InodeNo,
    /// The changed parts of its range table.
    pub ranges: Vec<RangeUpdate>,
    /// Its durable length.
    pub size: u64,
    /// The requests that this covers: at most one for each slot.
    pub done: Vec<DoneRequest>,
    /// The changes of contents that this covers.
    pub covers: Covers,
    /// Whether this is a step of a cut.
    pub cut: CutStep,
    /// The change of the file's images.
    pub images: Images,
}

impl DataCommit {
    /// A change of the mapping that covers no write.
    pub fn of_ranges(ino: InodeNo, ranges: Vec<RangeUpdate>, size: u64) -> Self {
        let (covers, cut, images) = (Covers::Nothing, CutStep::Unchanged, Images::Follow);
        Self { ino, ranges, size, done: Vec::new(), covers, cut, images }
    }
}

/// The part of a batch in a cut that takes several. A file that is cut off at a page loses the pages behind it in steps, the last pages first, so
/// that the size of a batch does not depend on the size of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CutStep {
    /// No step of a cut, or one in the middle.
    #[default]
    Unchanged,
    /// The first step: all pages from this one on are being removed. Until the cut is finished, the file's mapping has no other change.
    From(FilePage),
    /// The last step.
    Done,
}

/// Times and change counter of the inode when its data was committed. The façade fills it in from the live inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataStamp {
    /// Last change of contents.
    pub mtime: Timestamp,
    /// Last change of the inode.
    pub ctime: Timestamp,
    /// Change counter.
    pub change: u64,
}

/// An operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation<'a> {
    /// Makes a name and its inode.
    Make {
        /// Directory.
        parent: InodeNo,
        /// Name to make.
        name: &'a [u8],
        /// The kind of inode.
        node: NewNode<'a>,
        /// Permission bits, umask not applied.
        mode: u16,
    },
    /// Makes a regular file, or finds it.
    Create {
        /// Directory.
        parent: InodeNo,
        /// Name to make.
        name: &'a [u8],
        /// Permission bits, umask not applied.
        mode: u16,
        /// Whether to fail if the name exists.
        exclusive: bool,
    },
    /// Makes a regular file without a name, which is an orphan from the beginning.
    CreateNameless {
        /// The directory in which it would be, for its owner and lists.
        parent: InodeNo,
        /// Permission bits, umask not applied.
        mode: u16,
    },
    /// Makes another name for an inode, or the first one for an orphan that is open.
    Link {
        /// Inode.
        ino: InodeNo,
        /// Directory of the new name.
        parent: InodeNo,
        /// The new name.
        name: &'a [u8],
    },
    /// Removes the name of an inode that is not a directory.
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
    /// Changes attributes. With a size, `commit` is the change of the extents by the truncation. Without `commit`, the records past the new end are
    /// trimmed.
    SetAttr {
        /// Inode.
        ino: InodeNo,
        /// The changes.
        set: SetAttr,
        /// The truncation, prepared by the file's region.
        commit: Option<Box<DataCommit>>,
    },
    /// Sets an extended attribute.
    SetXattr {
        /// Inode.
        ino: InodeNo,
        /// Attribute.
        name: &'a [u8],
        /// Value.
        value: &'a [u8],
        /// What to do if it exists, or does not.
        mode: XattrMode,
    },
    /// Takes set-id bits and capabilities from a file that an unprivileged caller is about to change.
    DropPrivileges {
        /// Inode.
        ino: InodeNo,
    },
    /// Removes an extended attribute.
    RemoveXattr {
        /// Inode.
        ino: InodeNo,
        /// Attribute.
        name: &'a [u8],
    },
    /// Commits data of files that became durable. Files that are gone are skipped, because nothing of them has to be durable.
    CommitData {
        /// The data of each file.
        commits: Cow<'a, [DataCommit]>,
        /// The stamp of each; `None` leaves times and counter as they are.
        stamps: Vec<Option<DataStamp>>,
    },
    /// Frees an orphan, or a part of it.
    ReapOrphan {
        /// Inode.
        ino: InodeNo,
        /// From this page on nothing is left. The records that were removed there are not read again.
        below: FilePage,
    },
    /// Keeps that a client has a session: after a restart it may reclaim what it had open.
    PutClient {
        /// The client.
        client: ClientId,
        /// The client's peer.
        owner: PeerKey,
    },
    /// Keeps that a client has no session and nothing open any more. The answers to its requests are still kept.
    EndSession {
        /// The client.
        client: ClientId,
    },
    /// Forgets a client and the answers to its requests: it is gone and sends none again.
    RemoveClient {
        /// The client.
        client: ClientId,
    },
}

impl Operation<'_> {
    /// Whether it may use an inode number.
    pub fn makes_inode(&self) -> bool {
        match self {
            Self::Make { .. } | Self::Create { .. } | Self::CreateNameless { .. } => true,
            Self::Rename { mode, .. } => {
                matches!(mode, RenameMode::Whiteout | RenameMode::NoReplaceWhiteout)
            }
            _ => false,
        }
    }
}

/// The knowledge that `apply` needs besides metadata.
#[derive(Clone, Copy)]
pub struct ApplyContext<'a> {
    /// Time of the operation.
    pub now: Timestamp,
    /// The caller.
    pub caller: Caller,
    /// The number for a new inode. It is used if, and only if, `Outcome::created` says so.
    pub new_ino: InodeNo,
    /// The least value of a new change counter. It is higher at every start of the server, so that a counter whose change was lost in a crash never
    /// stands for other contents again.
    pub change_floor: u64,
    /// Whether the inode is open (or has dirty data). Then it is not removed with its last name, and may get a name again.
    pub is_open: &'a dyn Fn(InodeNo) -> bool,
    /// The known paths of directories that are far from the root.
    pub climbs: &'a Climbs,
}

impl ApplyContext<'_> {
    /// The change counter after a change.
    pub(super) fn next_change(&self, change: u64) -> u64 {
        (change + 1).max(self.change_floor)
    }
}

/// The result of an operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The inode that was made, found, linked or changed; for a rename, the one that was moved.
    pub attr: Option<Attr>,
    /// Whether a new inode was made.
    pub created: bool,
    /// The inode that lost its last name, or was made without one, and is kept as an orphan. Call `reap` when it is not open.
    pub orphaned: Option<InodeNo>,
    /// The inode that was an orphan and has a name now.
    pub named: Option<InodeNo>,
    /// The inode that was removed, with all of its records.
    pub reaped: Option<InodeNo>,
    /// Extents that no record has any more. Their pages may be used again only after a flush (invariant 3).
    pub freed: Vec<Extent>,
    /// Whether a reap is not finished and must be called again.
    pub more: bool,
}
