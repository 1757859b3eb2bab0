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

/// Most names an inode can have. Linux's tools expect 65000 or less of `LINK_MAX` on common file systems.
/// Subdirectories do not count against it.
pub const LINK_MAX: u32 = 65_000;
/// Extended attributes an inode can have. Their list is bounded, too (`XATTR_LIST_MAX`).
pub const XATTRS_PER_INODE_MAX: u32 = 1024;
/// Bytes of an extended attribute kept in one record.
pub(super) const XATTR_PIECE_BYTES: usize = 4096;
/// An unlinked file with at most so many extents goes in the batch that unlinks it; larger ones become orphans
/// first, so that no batch grows with a file.
pub(super) const INLINE_REAP_EXTENTS: usize = 64;
/// Extents one batch of a reap, a cut or a punch removes.
pub const REAP_BATCH_EXTENTS: usize = 1024;

/// Names a request for good: a retransmission has the same, no other request ever has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId {
    /// Whose.
    pub client: ClientId,
    /// In which slot of the client's session.
    pub slot: SlotIndex,
    /// Its number in that slot.
    pub seq: u64,
}

/// Who asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Permission bits that what is made does not get, where no default ACL says otherwise.
    pub umask: u16,
    /// A change of contents takes set-id bits and capabilities from the file.
    pub drops_privileges: bool,
    /// The request this is done for; its batch says that it was done.
    pub request: Option<RequestId>,
    /// That request opens the file for this: its answer says so.
    pub opens: Option<Rights>,
}

/// A part of a file's range table that becomes durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeUpdate {
    /// First page of the range.
    pub first: FilePage,
    /// One past its last page.
    pub end: FilePage,
    /// All extents inside the range from now on: in order, apart, not empty. Gaps are holes.
    pub extents: Vec<Extent>,
}

/// A request whose changes of contents become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoneRequest {
    /// Which request it was.
    pub request: RequestId,
    /// What it was answered.
    pub answer: Answer,
}

/// What a batch makes durable of a file's contents.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Covers {
    /// Nothing that would be known by its counter.
    #[default]
    Nothing,
    /// What had changed when its write-back began.
    Changes {
        /// Up to this one.
        until: u64,
        /// Of an earlier life of the server, restored since the last write-back: of each client the last.
        restored: Vec<ClientChange>,
    },
    /// A cut. `all`: with everything before it.
    Cut {
        /// See there.
        all: bool,
    },
}

/// The bytes of a page as a sync found them, without the zeros at their end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageImage {
    /// Which page of its file.
    pub page: FilePage,
    /// Them; a page at most.
    pub bytes: Vec<u8>,
}

/// What becomes of the images of a file's pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Images {
    /// Those of pages that the ranges leave without bytes go.
    #[default]
    Follow,
    /// These are put: their bytes need not be in their places to be durable.
    Put(Vec<PageImage>),
    /// All go: every byte of the file is in its place, durably.
    Drop,
}

/// A file's data that became durable: what the store may say from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataCommit {
    /// File.
    pub ino: InodeNo,
    /// Where its range table changed.
    pub ranges: Vec<RangeUpdate>,
    /// Its durable length.
    pub size: u64,
    /// The writes this covers, one a slot.
    pub done: Vec<DoneRequest>,
    /// The changes this covers.
    pub covers: Covers,
    /// Whether it is a step of a cut.
    pub cut: CutStep,
    /// Where bytes are that the ranges say are there.
    pub images: Images,
}

impl DataCommit {
    /// A change of the mapping that covers no write.
    pub fn of_ranges(ino: InodeNo, ranges: Vec<RangeUpdate>, size: u64) -> Self {
        let (covers, cut, images) = (Covers::Nothing, CutStep::Unchanged, Images::Follow);
        Self { ino, ranges, size, done: Vec::new(), covers, cut, images }
    }
}

/// What a batch says of a cut that takes several: a file that is cut off at a page loses what is behind it in steps, the last
/// pages first, so that no batch grows with a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CutStep {
    /// It is no step of a cut, or one in the midst of it.
    #[default]
    Unchanged,
    /// It begins: all that lies from this page on is on its way out. Until it is done, the file has no other change of its mapping.
    From(FilePage),
    /// Nothing is left of it.
    Done,
}

/// Times and counter of the inode when its data was committed. The façade fills it in from the live inode.
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
        /// What.
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
        /// Fail if the name exists.
        exclusive: bool,
    },
    /// Makes a regular file without a name: an orphan from the beginning.
    CreateNameless {
        /// Directory that it is made as if in.
        parent: InodeNo,
        /// Permission bits, umask not applied.
        mode: u16,
    },
    /// Makes another name for an inode, or for an orphan that somebody has open the first.
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
    /// Changes attributes. With a size, `commit` tells what the truncation does to the extents; without it,
    /// the records past the new end are trimmed.
    SetAttr {
        /// Inode.
        ino: InodeNo,
        /// What to change.
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
        /// What if it exists or not.
        mode: XattrMode,
    },
    /// Takes set-id bits and capabilities from a file that somebody unprivileged is about to change.
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
    /// Data of some files became durable. Files that are gone meanwhile are skipped: nothing of them is left to
    /// be made durable.
    CommitData {
        /// Which, and what.
        commits: Cow<'a, [DataCommit]>,
        /// Of each, its stamp; `None` leaves times and counter as recorded.
        stamps: Vec<Option<DataStamp>>,
    },
    /// Frees an orphan, or a part of it.
    ReapOrphan {
        /// Inode.
        ino: InodeNo,
        /// Nothing is left from this page on: what was taken away there before is not looked through again.
        below: FilePage,
    },
    /// Keeps that a client has a session: after a restart it may come back for what it had open.
    PutClient {
        /// Which.
        client: ClientId,
        /// Whose it is.
        owner: PeerKey,
    },
    /// A client's session is over and it has nothing open any more. Which of its requests were done is still kept.
    EndSession {
        /// Whose.
        client: ClientId,
    },
    /// Forgets a client and which of its requests were done: it is gone and sends none again.
    RemoveClient {
        /// Whose.
        client: ClientId,
    },
}

impl Operation<'_> {
    /// Whether it may use up a number for a new inode.
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

/// What `apply` needs to know besides metadata.
#[derive(Clone, Copy)]
pub struct ApplyContext<'a> {
    /// Time of the operation.
    pub now: Timestamp,
    /// Who asks.
    pub caller: Caller,
    /// Number for an inode that is made. It is used up if, and only if, `Outcome::created` says so.
    pub new_ino: InodeNo,
    /// Change counters go to at least this. It moves with every start of the server, so that a counter whose
    /// change was lost in a crash never stands for other contents again.
    pub change_floor: u64,
    /// Whether somebody has the inode open (or holds dirty data of it): then it is not reaped with its last name, and may
    /// get one again.
    pub is_open: &'a dyn Fn(InodeNo) -> bool,
    /// What is known of where directories lie that are far from the root.
    pub climbs: &'a Climbs,
}

impl ApplyContext<'_> {
    /// The counter after a change.
    pub(super) fn next_change(&self, change: u64) -> u64 {
        (change + 1).max(self.change_floor)
    }
}

/// What an operation did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// The inode made, found, linked or changed; for a rename, the one moved.
    pub attr: Option<Attr>,
    /// A new inode was made.
    pub created: bool,
    /// This inode lost its last name, or was made without, and is kept as an orphan: `reap` it when nobody has it open.
    pub orphaned: Option<InodeNo>,
    /// This inode was an orphan, and has a name.
    pub named: Option<InodeNo>,
    /// This inode is gone, with everything of it.
    pub reaped: Option<InodeNo>,
    /// Extents no record names any more. Their pages may be used again only after a flush (invariant 3).
    pub freed: Vec<Extent>,
    /// A reap is not finished: do it again.
    pub more: bool,
}
