//! Answers to requests that changed something. They are kept in the records of their slots, so that a retransmitted request gets the same answer from
//! a later life of the server (docs/log.md).
//!
//! # Invariants
//! * An answer is in the batch that makes its effect durable, and in no earlier one.
//! * Attributes in an answer are those of that moment, not the inode's present ones.
//!
//! Values that belong to one life of a server (filekey, file slot, ticket) are in no record: the file is opened again.

use super::operation::Operation;
use cuttlefs_common::attr::Attr;
use cuttlefs_common::rpc::Rights;
use serde::{Deserialize, Serialize};

/// An answer. The order of the variants and of their fields is the disk format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// The operation was done.
    Done,
    /// The inode's attributes.
    Attr(Attr),
    /// The same after a change of length, of which the length itself may not be durable: a server that gives the answer again restores it.
    Length(Attr),
    /// The file was opened.
    Opened {
        /// Its attributes then.
        attr: Attr,
        /// The rights with which it was opened.
        rights: Rights,
    },
    /// A write was done.
    Written {
        /// The offset of its bytes.
        offset: u64,
        /// The number of bytes.
        len: u32,
        /// The file's length after it.
        size: u64,
        /// The file's change counter after it.
        change: u64,
    },
    /// A copy was done.
    Copied {
        /// The number of bytes.
        len: u64,
        /// The target's change counter after it.
        change: u64,
    },
}

impl Answer {
    /// The answer to a request whose batch has this operation. `attr` are the attributes that the operation returns, `opens` the rights with which
    /// the request opens the file.
    pub(super) fn to(operation: &Operation<'_>, attr: Option<Attr>, opens: Option<Rights>) -> Self {
        use Operation::{Create, CreateNameless, Link, Make, Rename, SetAttr};
        match (operation, attr, opens) {
            (Create { .. } | CreateNameless { .. } | SetAttr { .. }, Some(attr), Some(rights)) => {
                Self::Opened { attr, rights }
            }
            (SetAttr { set, commit: Some(commit), .. }, Some(attr), None)
                if set.size.is_some_and(|size| size != commit.size) =>
            {
                Self::Length(attr)
            }
            (
                Make { .. }
                | Create { .. }
                | CreateNameless { .. }
                | Link { .. }
                | Rename { .. }
                | SetAttr { .. },
                Some(attr),
                None,
            ) => Self::Attr(attr),
            _ => Self::Done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::{self, SlotRecord};
    use super::*;
    use cuttlefs_common::attr::{FileKind, InodeFlags, Timestamp};
    use cuttlefs_common::ids::InodeNo;

    #[test]
    fn golden_bytes() {
        let time = |secs| Timestamp { secs, nanos: 1 };
        let attr = Attr {
            ino: InodeNo(5),
            kind: FileKind::File,
            mode: 0o644,
            nlink: 1,
            uid: 2,
            gid: 3,
            rdev: 4,
            size: 300,
            allocated_bytes: 4096,
            atime: time(6),
            mtime: time(-7),
            ctime: time(8),
            btime: time(9),
            change: 10,
            flags: InodeFlags::APPEND_ONLY,
        };
        // ino, kind, mode, nlink, uid, gid, rdev, size, allocated, times (zigzag seconds, nanoseconds), change, marks
        let attr_bytes: &[u8] =
            &[5, 0, 0xa4, 3, 1, 2, 3, 4, 0xac, 2, 0x80, 0x20, 12, 1, 13, 1, 16, 1, 18, 1, 10, 2];
        let answers: [(Answer, &[&[u8]]); 6] = [
            (Answer::Done, &[&[0]]),
            (Answer::Attr(attr), &[&[1], attr_bytes]),
            (Answer::Length(attr), &[&[2], attr_bytes]),
            (
                Answer::Opened { attr, rights: Rights { read: true, write: false } },
                &[&[3], attr_bytes, &[1, 0]],
            ),
            (Answer::Written { offset: 300, len: 9, size: 309, change: 7 }, &[&[4, 0xac, 2, 9, 0xb5, 2, 7]]),
            (Answer::Copied { len: 300, change: 7 }, &[&[5, 0xac, 2, 7]]),
        ];
        for (answer, bytes) in answers {
            // The version, and the request's sequence number.
            let bytes = [&[1, 0x80, 1], &bytes.concat()[..]].concat();
            let in_slot = SlotRecord { seq: 128, answer };
            assert_eq!(record::encode(&in_slot), bytes, "{answer:?}");
            assert_eq!(record::parse(&bytes), Ok(in_slot));
        }
    }
}
