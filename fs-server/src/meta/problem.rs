//! Problems of a store's records, and the repair of each (docs/fsck.md has the reasons).

use super::record::RecordError;
use cuttlefs_common::ids::InodeNo;
use std::fmt;

/// The kind of a contradiction, in the order in which they are repaired: each kind may hide or cause later ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProblemKind {
    /// A record's key or value does not parse.
    BadRecord,
    /// There is no root directory.
    NoRoot,
    /// The next inode number would be one that is in use.
    NextIno,
    /// Records belong to an inode that does not exist.
    NoInode,
    /// An entry is not in the bucket of its name's hash.
    WrongBucket,
    /// An entry names no inode.
    Dangling,
    /// An entry has another type than its inode.
    WrongKind,
    /// A directory has a second name.
    SecondParent,
    /// A symlink has no target.
    NoTarget,
    /// An inode that is not a symlink has a target.
    StrayTarget,
    /// The pieces of an extended attribute do not make its value.
    BadXattr,
    /// An inode that is not a file has extents.
    StrayExtent,
    /// Two extents of a file have a file page in common.
    FileOverlap,
    /// An extent reaches past the pool's end.
    PastPool,
    /// Two extents have a pool page in common.
    PoolOverlap,
    /// An extent with bytes lies past the end of its file.
    PastEnd,
    /// An inode has names and cannot be reached from the root, or has no names and is no orphan.
    Unreachable,
    /// A directory's recorded parent is not the directory that has its entry.
    WrongParent,
    /// The link count is not the number of names.
    LinkCount,
    /// An inode with names has an orphan's record.
    NamedOrphan,
    /// An inode's count of pages is not that of its extents.
    Allocated,
    /// An inode's count of extended attributes is wrong.
    XattrCount,
    /// An inode's flags are not those of its attributes.
    Marks,
    /// A page without bytes has an image.
    StrayImage,
    /// The map of pages does not agree with the extents.
    PageMap,
}

/// One contradiction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The kind.
    pub kind: ProblemKind,
    /// The inode; 0 if none is known.
    pub ino: InodeNo,
    /// The key of the record in which it was found.
    pub key: Vec<u8>,
    /// A name, a page, or another detail that tells it from others of its kind and inode.
    pub detail: Detail,
}

/// The detail that tells a problem from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Detail {
    /// No further detail.
    None,
    /// Why a record does not parse.
    Record(RecordError),
    /// An entry's name.
    Name(Vec<u8>),
    /// The stored number, and the right one.
    Numbers(u64, u64),
    /// The first page that two extents have, and the inode that keeps it.
    Page(u64, InodeNo),
    /// The number of pages, and the first of them.
    Pages(u64, u64),
}

impl ProblemKind {
    /// The name in JSON and in docs/fsck.md.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BadRecord => "bad-record",
            Self::NoRoot => "no-root",
            Self::NextIno => "next-inode",
            Self::NoInode => "no-inode",
            Self::WrongBucket => "wrong-bucket",
            Self::Dangling => "dangling-entry",
            Self::WrongKind => "wrong-type",
            Self::SecondParent => "second-parent",
            Self::NoTarget => "no-target",
            Self::StrayTarget => "stray-target",
            Self::BadXattr => "bad-xattr",
            Self::StrayExtent => "stray-extent",
            Self::FileOverlap => "file-overlap",
            Self::PastPool => "past-pool",
            Self::PoolOverlap => "page-claimed-twice",
            Self::PastEnd => "past-end",
            Self::Unreachable => "unreachable",
            Self::WrongParent => "wrong-parent",
            Self::LinkCount => "link-count",
            Self::NamedOrphan => "named-orphan",
            Self::Allocated => "allocated",
            Self::XattrCount => "xattr-count",
            Self::Marks => "marks",
            Self::StrayImage => "stray-image",
            Self::PageMap => "page-map",
        }
    }

    const fn what(self) -> &'static str {
        match self {
            Self::BadRecord => "a record does not parse",
            Self::NoRoot => "there is no root directory",
            Self::NextIno => "inode numbers in use would be given out again",
            Self::NoInode => "records belong to an inode that is not there",
            Self::WrongBucket => "an entry is in the wrong bucket",
            Self::Dangling => "an entry names no inode",
            Self::WrongKind => "an entry has another type than its inode",
            Self::SecondParent => "a directory has a second name",
            Self::NoTarget => "a symlink has no target",
            Self::StrayTarget => "what is no symlink has a target",
            Self::BadXattr => "an extended attribute's pieces do not make its value",
            Self::StrayExtent => "what is no file has extents",
            Self::FileOverlap => "extents overlap in the file",
            Self::PastPool => "an extent reaches past the pool's end",
            Self::PoolOverlap => "a pool page belongs to two extents",
            Self::PastEnd => "written pages lie past the end of the file",
            Self::Unreachable => "it cannot be reached from the root",
            Self::WrongParent => "its recorded parent is another directory",
            Self::LinkCount => "the link count is wrong",
            Self::NamedOrphan => "an orphan has names",
            Self::Allocated => "allocated pages are not those of its extents",
            Self::XattrCount => "extended attributes are counted wrong",
            Self::Marks => "its marks do not say which lists and capabilities it has",
            Self::StrayImage => "there is an image of a page that holds no bytes",
            Self::PageMap => "the record of free pages is not what the extents say",
        }
    }

    /// The effect of the repair.
    pub const fn repair(self) -> &'static str {
        match self {
            Self::BadRecord | Self::StrayTarget | Self::StrayExtent | Self::NoInode | Self::StrayImage => {
                "removes the record"
            }
            Self::NoRoot => "makes a root directory",
            Self::NextIno => "moves the next number behind them",
            Self::WrongBucket | Self::Dangling | Self::SecondParent => "removes the entry",
            Self::WrongKind => "corrects the entry's type",
            Self::NoTarget => "removes the symlink",
            Self::BadXattr => "removes the attribute",
            Self::FileOverlap | Self::PoolOverlap => {
                "takes the pages from the later claim, which has a hole there then"
            }
            Self::PastPool => "cuts the extent off; the file has a hole there",
            Self::PastEnd => "cuts the extent off at the end of the file",
            Self::Unreachable => "moves it to /lost+found; without names and bytes, marks it to be freed",
            Self::WrongParent | Self::LinkCount | Self::Allocated | Self::XattrCount => "corrects the number",
            Self::Marks => "corrects the marks",
            Self::PageMap => "makes it anew from the extents",
            Self::NamedOrphan => "removes the orphan's record",
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "inode {}: {}", self.ino, self.kind.what())?;
        match &self.detail {
            Detail::None => Ok(()),
            Detail::Record(error) => write!(f, ": {}: {error}", self.key.escape_ascii()),
            Detail::Name(name) => write!(f, ": `{}`", name.escape_ascii()),
            Detail::Numbers(found, expected) => write!(f, ": {found}, not {expected}"),
            Detail::Pages(pages, first) => write!(f, ": {pages} pages, the first is {first}"),
            Detail::Page(page, keeper) => write!(f, ": page {page}, which inode {keeper} keeps"),
        }
    }
}
