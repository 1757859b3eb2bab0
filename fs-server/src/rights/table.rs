//! The table: the right that each request and each change of metadata needs. No wildcards: a new request does not compile until
//! it has a row here.
//!
//! | request | rights that a checked identity needs |
//! | --- | --- |
//! | Lookup | search on the directory, also for `..`: a session is told nothing of directories that it does not see |
//! | ReadDir | read on the directory; without search on it, names and kinds are told, and no number that leads anywhere |
//! | GetAttr, Changes, ReadLink, ListXattr | the inode's number, which it has from a Lookup (`veil`); `trusted.*` are not listed |
//! | GetXattr | `user.*`: read; `security.*`, access lists: the number; `trusted.*` there are none |
//! | Open | read, write as asked; both for a file that is opened for neither; write to cut it |
//! | Create | of a name that is there: as Open; else search and write on the directory |
//! | CreateNameless | search and write on the directory |
//! | Make | search and write on the directory; root for devices |
//! | Link | search and write on the directory; to own the inode, or read and write on a file without set-id bits |
//! | Unlink, Rmdir | search and write on the directory; if that is sticky, to own the entry or the directory |
//! | Rename | as Unlink for both names; write on a directory that gets another parent |
//! | SetAttr | mode: to own it; owner: root; chattr marks: to own it, root for immutable and append-only; group: to own it and be in the group; size: write, or to have it open for writing; times: to own it, or write if both are now |
//! | SetXattr, RemoveXattr | `user.*`: write; access lists: to own it; all else: root (`security.capability` goes with write) |
//! | Reclaim | to have opened it before, by its `OpenTicket`; else as Open |
//! | ReclaimLocks | to have the file open |
//! | SetLock | the file open; of a range, exclusive: for writing, shared: for reading |
//! | Layout, Fetch, Write, Allocate, Restore, Seek, CopyRange, one-sided reads | the rights its file was opened with |
//! | Bind, BindAgain, GrantWrite, ReturnGrant, one-sided writes | the same; Bind: at least those of the key |
//! | Atomic | read and write, which its file was opened with |
//! | Defragment | write, on a file that it has opened whole |
//! | OpenRegion | a key of a binding that is there; as Open; an export that is the pool's or the binder's directory |
//! | Close, Unbind, Unlock, TestLock, AwaitLocks, CancelLock, Recovered, Detach, ShareCounters, Heartbeat | the session they are about |
//! | Attach | a rule of the export; search on every directory of the subtree that is asked for |
//! | Sync, StatFs, Status | nothing |
//!
//! Changes are judged under the metadata's writer, in one turn with the change, so that the judged state is the changed one. All other requests are
//! judged when they come. From then on a filekey carries the rights that it was given.

use super::permission::{Judge, Need};
use crate::meta::Operation;
use cuttlefs_common::attr::{Attr, FileKind, SetAttr};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{NewNode, RenameMode, Request, Rights};
use cuttlefs_common::status::Status;

impl Judge<'_> {
    /// Checks that a file may be opened with these rights.
    ///
    /// # Errors
    /// `Denied`.
    pub fn check_rights(&self, attr: &Attr, rights: Rights) -> Result<(), Status> {
        // As open(2) with an access mode of 3. Such an open gives no access to bytes, but to locks and to the places of bytes.
        let for_neither = !rights.read && !rights.write && attr.kind != FileKind::Directory;
        if rights.read || for_neither {
            self.check(attr, Need::Read)?;
        }
        if rights.write || for_neither {
            self.check(attr, Need::Write)?;
        }
        Ok(())
    }

    /// Judges a request before it is run. `has_open`: whether the session has an inode open for writing.
    ///
    /// # Errors
    /// Why the request is refused, or what is wrong with an inode that it names.
    pub fn may_ask(&self, request: &Request<'_>, has_open: impl Fn(InodeNo) -> bool) -> Result<(), Status> {
        if !self.who.checked {
            return Ok(());
        }
        match request {
            Request::Lookup { parent, name: _ } => self.directory(*parent).map(|_| ()),
            Request::ReadDir { ino, .. } => self.check_inode(*ino, Need::Read),
            Request::GetXattr { ino, name } => self.read_xattr(*ino, name),
            Request::Open { ino, rights, truncate, by: _ } => {
                let write = rights.write || *truncate;
                self.check_rights(&self.meta.attr(*ino)?, Rights { read: rights.read, write })
            }
            // A truncation changes contents before metadata, so it is judged here.
            Request::SetAttr { ino, set: set @ SetAttr { size: Some(_), .. } } => {
                let attr = self.meta.attr(*ino)?;
                match attr.kind {
                    FileKind::File => self.changed(&attr, set, has_open(*ino)).map(|_| ()),
                    FileKind::Directory => Err(Status::IsDirectory),
                    _ => Err(Status::Invalid),
                }
            }
            // Judged by the change of metadata that each of them makes: `may_change`.
            Request::SetAttr { .. }
            | Request::Make { .. }
            | Request::Create { .. }
            | Request::CreateNameless { .. }
            | Request::Link { .. }
            | Request::Unlink { .. }
            | Request::Rmdir { .. }
            | Request::Rename { .. }
            | Request::SetXattr { .. }
            | Request::RemoveXattr { .. } => Ok(()),
            // Judged by the inode's number, which only sessions know that have looked it up.
            Request::GetAttr { .. }
            | Request::Changes { .. }
            | Request::ReadLink { .. }
            | Request::ListXattr { .. } => Ok(()),
            // Judged by the rights of their filekeys, in their handlers.
            Request::Layout { .. }
            | Request::Fetch { .. }
            | Request::Write { .. }
            | Request::Allocate { .. }
            | Request::Restore { .. }
            | Request::Seek { .. }
            | Request::CopyRange { .. }
            | Request::Defragment { .. }
            | Request::Atomic { .. }
            | Request::SetLock { .. }
            | Request::TestLock { .. } => Ok(()),
            // Judged entry by entry, in their handlers.
            Request::Attach { .. } | Request::Reclaim { .. } | Request::ReclaimLocks { .. } => Ok(()),
            // Judged by their filekeys and keys, in their handlers.
            Request::Bind { .. }
            | Request::BindAgain { .. }
            | Request::OpenRegion { .. }
            | Request::GrantWrite { .. }
            | Request::ReturnGrant { .. } => Ok(()),
            // These concern their own session.
            Request::Heartbeat
            | Request::Detach
            | Request::Recovered { .. }
            | Request::ShareCounters { .. }
            | Request::Close { .. }
            | Request::Unlock { .. }
            | Request::AwaitLocks { .. }
            | Request::CancelLock { .. }
            | Request::Unbind { .. } => Ok(()),
            Request::Sync(_) | Request::StatFs | Request::Status => Ok(()),
        }
    }

    /// Judges a change of metadata, under the metadata's writer. Returns the operation to do instead, if it is not exactly this one.
    ///
    /// # Errors
    /// Why the change is refused, or what is wrong with an inode or a name that it names.
    pub fn may_change<'o>(
        &self,
        operation: &Operation<'o>,
        has_open: impl Fn(InodeNo) -> bool,
    ) -> Result<Option<Operation<'o>>, Status> {
        match operation {
            Operation::Make { parent, name, node, mode } => {
                let directory = self.directory(*parent)?;
                if self.find(*parent, name)?.is_some() {
                    return Err(Status::Exists);
                }
                self.check(&directory, Need::ChangeEntries)?;
                if let NewNode::Special { kind, rdev } = node {
                    self.check_device(*kind, *rdev)?;
                }
                let new_mode = match node {
                    NewNode::Directory => *mode,
                    _ => self.new_mode(&directory, *mode),
                };
                let amended = Operation::Make { parent: *parent, name, node: *node, mode: new_mode };
                Ok((new_mode != *mode).then_some(amended))
            }
            Operation::Create { parent, name, mode, exclusive } => {
                let directory = self.directory(*parent)?;
                if self.find(*parent, name)?.is_some() {
                    // The file exists, so this is an open, which is judged later.
                    return Ok(None);
                }
                self.check(&directory, Need::ChangeEntries)?;
                let new_mode = self.new_mode(&directory, *mode);
                let (parent, exclusive) = (*parent, *exclusive);
                let amended = Operation::Create { parent, name, mode: new_mode, exclusive };
                Ok((new_mode != *mode).then_some(amended))
            }
            Operation::CreateNameless { parent, mode } => {
                let directory = self.directory(*parent)?;
                self.check(&directory, Need::ChangeEntries)?;
                let new_mode = self.new_mode(&directory, *mode);
                let amended = Operation::CreateNameless { parent: *parent, mode: new_mode };
                Ok((new_mode != *mode).then_some(amended))
            }
            Operation::Link { ino, parent, name } => {
                let directory = self.directory(*parent)?;
                let attr = self.meta.attr(*ino)?;
                if self.find(*parent, name)?.is_some() {
                    return Err(Status::Exists);
                }
                self.check_link(&attr)?;
                self.check(&directory, Need::ChangeEntries).map(|()| None)
            }
            Operation::Unlink { parent, name } | Operation::Rmdir { parent, name } => {
                let directory = self.directory(*parent)?;
                let entry = self.find(*parent, name)?.ok_or(Status::NotFound)?;
                self.check_removal(&directory, &entry).map(|()| None)
            }
            Operation::Rename { parent, name, new_parent, new_name, mode } => {
                self.may_rename((*parent, name), (*new_parent, new_name), *mode).map(|()| None)
            }
            Operation::SetAttr { ino, set, commit } => {
                let changed = self.changed(&self.meta.attr(*ino)?, set, has_open(*ino))?;
                let amended = || Operation::SetAttr { ino: *ino, set: changed, commit: commit.clone() };
                Ok((changed != *set).then(amended))
            }
            Operation::SetXattr { ino, name, .. } => self.change_xattr(*ino, name, false).map(|()| None),
            Operation::RemoveXattr { ino, name } => self.change_xattr(*ino, name, true).map(|()| None),
            // Only the server itself does these.
            Operation::CommitData { .. }
            | Operation::DropPrivileges { .. }
            | Operation::ReapOrphan { .. }
            | Operation::PutClient { .. }
            | Operation::EndSession { .. }
            | Operation::RemoveClient { .. } => Ok(None),
        }
    }

    fn may_rename(
        &self,
        (parent, name): (InodeNo, &[u8]),
        (new_parent, new_name): (InodeNo, &[u8]),
        mode: RenameMode,
    ) -> Result<(), Status> {
        let (from, to) = (self.directory(parent)?, self.directory(new_parent)?);
        let source = self.find(parent, name)?.ok_or(Status::NotFound)?;
        let target = self.find(new_parent, new_name)?;
        match (&target, mode) {
            (Some(_), RenameMode::NoReplace | RenameMode::NoReplaceWhiteout) => return Err(Status::Exists),
            (None, RenameMode::Exchange) => return Err(Status::NotFound),
            // Both names are of one inode, so the rename does nothing.
            (Some(target), _) if target.ino == source.ino => return Ok(()),
            _ => {}
        }
        self.check_removal(&from, &source)?;
        match &target {
            Some(target) => self.check_removal(&to, target)?,
            None => self.check(&to, Need::ChangeEntries)?,
        }
        // A directory that gets another parent has its `..` changed.
        let moved = |entry: &Attr| {
            let moves = parent != new_parent && entry.kind == FileKind::Directory;
            if moves { self.check(entry, Need::Write) } else { Ok(()) }
        };
        moved(&source)?;
        match target.filter(|_| mode == RenameMode::Exchange) {
            Some(target) => moved(&target),
            None => Ok(()),
        }
    }
}
