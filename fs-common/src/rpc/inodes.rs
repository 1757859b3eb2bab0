//! Every inode number in a message, in one place: for a server that shows clients other numbers than its own.
//!
//! There are no wildcards below: a new kind of message does not compile until its inodes are listed here.

use super::{DirEntry, Opened, Reply, Request, SyncScope};
use crate::ids::InodeNo;

impl Request<'_> {
    /// Replaces every inode number by the one that `map` returns for it.
    pub fn map_inodes(&mut self, map: &dyn Fn(InodeNo) -> InodeNo) {
        match self {
            Request::Lookup { parent: ino, name: _ }
            | Request::Make { parent: ino, .. }
            | Request::Create { parent: ino, .. }
            | Request::CreateNameless { parent: ino, .. }
            | Request::Unlink { parent: ino, name: _ }
            | Request::Rmdir { parent: ino, name: _ }
            | Request::GetAttr { ino }
            | Request::SetAttr { ino, set: _ }
            | Request::ReadLink { ino }
            | Request::ReadDir { ino, .. }
            | Request::Open { ino, .. }
            | Request::GetXattr { ino, name: _ }
            | Request::ListXattr { ino }
            | Request::SetXattr { ino, .. }
            | Request::RemoveXattr { ino, name: _ }
            | Request::Sync(SyncScope::Inode(ino) | SyncScope::InodeContents(ino)) => *ino = map(*ino),
            Request::Link { ino, parent, name: _ } => {
                *ino = map(*ino);
                *parent = map(*parent);
            }
            Request::Rename { parent, new_parent, .. } => {
                *parent = map(*parent);
                *new_parent = map(*new_parent);
            }
            Request::Reclaim { files } => files.iter_mut().for_each(|file| file.ino = map(file.ino)),
            Request::Changes { inodes } => inodes.iter_mut().for_each(|ino| *ino = map(*ino)),
            Request::Unlock { ino, .. } => *ino = map(*ino),
            Request::ReclaimLocks { locks } => locks.iter_mut().for_each(|held| held.ino = map(held.ino)),
            Request::Attach { .. }
            | Request::Heartbeat
            | Request::Detach
            | Request::Recovered { .. }
            | Request::ShareCounters { .. }
            | Request::Close { .. }
            | Request::Layout { .. }
            | Request::Fetch { .. }
            | Request::Write { .. }
            | Request::Sync(SyncScope::All)
            | Request::Allocate { .. }
            | Request::Seek { .. }
            | Request::CopyRange { .. }
            | Request::SetLock { .. }
            | Request::TestLock { .. }
            | Request::AwaitLocks { .. }
            | Request::CancelLock { .. }
            | Request::Restore { .. }
            | Request::Bind { .. }
            | Request::BindAgain { .. }
            | Request::Unbind { .. }
            | Request::OpenRegion { .. }
            | Request::GrantWrite { .. }
            | Request::ReturnGrant { .. }
            | Request::Defragment { .. }
            | Request::Atomic { .. }
            | Request::StatFs
            | Request::Status => {}
        }
    }
}

impl Reply<'_> {
    /// Replaces every inode number by the one that `map` returns for it.
    pub fn map_inodes(&mut self, map: &dyn Fn(InodeNo) -> InodeNo) {
        match self {
            Reply::Attached(attached) => attached.root = map(attached.root),
            Reply::Reclaimed(files) => files.iter_mut().flatten().for_each(|opened| in_opened(opened, map)),
            Reply::Attr(attr) => attr.ino = map(attr.ino),
            Reply::Opened(opened) => in_opened(opened, map),
            Reply::Entries { entries, end: _ } => {
                for DirEntry { ino, attr, .. } in entries {
                    *ino = map(*ino);
                    if let Some(attr) = attr {
                        attr.ino = map(attr.ino);
                    }
                }
            }
            Reply::Done
            | Reply::Bytes(_)
            | Reply::Layout(_)
            | Reply::Fetched { .. }
            | Reply::Written { .. }
            | Reply::Offset(_)
            | Reply::Copied { .. }
            | Reply::Space(_)
            | Reply::Queued
            | Reply::Settled(_)
            | Reply::Tested(_)
            | Reply::LocksReclaimed(_)
            | Reply::Restored { .. }
            | Reply::Bound(_)
            | Reply::Changes(_)
            | Reply::Moved { .. }
            | Reply::Old(_)
            | Reply::Status(_) => {}
        }
    }
}

fn in_opened(opened: &mut Opened, map: &dyn Fn(InodeNo) -> InodeNo) {
    opened.attr.ino = map(opened.attr.ino);
}
