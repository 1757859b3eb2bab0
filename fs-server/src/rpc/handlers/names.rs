//! Requests about names and attributes: they go to metadata, one batch each.

use super::{Body, Call, body, done};
use crate::export::Need;
use crate::meta::{Operation, Outcome};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{DirEntry, MAX_MESSAGE_BYTES, NewNode, RenameMode, Reply, XattrMode};
use cuttlefs_common::status::Status;

/// Bytes a directory entry takes in a reply besides its name: varints of cookie, inode and type, and with
/// attributes those too; an upper bound.
const ENTRY_BYTES: usize = 32;
const ENTRY_PLUS_BYTES: usize = 192;
/// Room for entries in one reply: a message less its header and the vector's length.
const MAX_ENTRIES_BYTES: usize = MAX_MESSAGE_BYTES as usize - 1024;

fn attr_reply(outcome: &Outcome) -> Result<Body, Status> {
    match outcome.attr {
        Some(attr) => body(&Reply::Attr(attr)),
        None => Err(Status::Io),
    }
}

impl Call<'_> {
    /// A squashed caller must be allowed to change the directory's entries.
    fn check_directory(&self, parent: InodeNo) -> Result<(), Status> {
        if self.who.squashed {
            self.who.check(&self.context.server.meta.attr(parent)?, Need::ChangeEntries)?;
        }
        Ok(())
    }

    /// A squashed caller must be allowed to remove this entry.
    fn check_removal(&self, parent: InodeNo, name: &[u8]) -> Result<(), Status> {
        if self.who.squashed {
            let meta = &self.context.server.meta;
            let directory = meta.attr(parent)?;
            self.who.check(&directory, Need::ChangeEntries)?;
            self.who.check_sticky(&directory, &meta.lookup(parent, name)?)?;
        }
        Ok(())
    }

    fn check_inode(&self, ino: InodeNo, need: Need) -> Result<(), Status> {
        if self.who.squashed {
            self.who.check(&self.context.server.meta.attr(ino)?, need)?;
        }
        Ok(())
    }

    pub(super) fn execute(&self, operation: &Operation<'_>) -> Result<Outcome, Status> {
        self.context.server.execute(&self.who, operation)
    }
}

pub(super) fn lookup(call: &Call<'_>, parent: InodeNo, name: &[u8]) -> Result<Body, Status> {
    call.check_inode(parent, Need::Search)?;
    body(&Reply::Attr(call.context.server.meta.lookup(parent, name)?))
}

pub(super) fn get_attr(call: &Call<'_>, ino: InodeNo) -> Result<Body, Status> {
    body(&Reply::Attr(call.context.server.meta.attr(ino)?))
}

pub(super) async fn set_attr(call: &Call<'_>, ino: InodeNo, set: &SetAttr) -> Result<Body, Status> {
    let server = &call.context.server;
    if call.who.squashed {
        call.who.check_change(&server.meta.attr(ino)?, set)?;
    }
    let attr = match set.size {
        Some(size) => server.truncate(call.context.disk.as_ref(), &call.who, ino, size, set).await?,
        None => server.set_attr(&call.who, ino, set, None)?,
    };
    body(&Reply::Attr(attr))
}

pub(super) fn make(
    call: &Call<'_>,
    parent: InodeNo,
    name: &[u8],
    node: NewNode<'_>,
    mode: u16,
) -> Result<Body, Status> {
    call.check_directory(parent)?;
    if let NewNode::Special { kind, .. } = node {
        call.who.check_kind(kind)?;
    }
    attr_reply(&call.execute(&Operation::Make { parent, name, node, mode })?)
}

pub(super) fn link(call: &Call<'_>, ino: InodeNo, parent: InodeNo, name: &[u8]) -> Result<Body, Status> {
    call.check_directory(parent)?;
    attr_reply(&call.execute(&Operation::Link { ino, parent, name })?)
}

pub(super) async fn unlink(call: &Call<'_>, parent: InodeNo, name: &[u8]) -> Result<Body, Status> {
    call.check_removal(parent, name)?;
    let outcome = call.execute(&Operation::Unlink { parent, name })?;
    call.context.server.settle(outcome).await;
    done()
}

pub(super) async fn rmdir(call: &Call<'_>, parent: InodeNo, name: &[u8]) -> Result<Body, Status> {
    call.check_removal(parent, name)?;
    let outcome = call.execute(&Operation::Rmdir { parent, name })?;
    call.context.server.settle(outcome).await;
    done()
}

pub(super) async fn rename(
    call: &Call<'_>,
    (parent, name): (InodeNo, &[u8]),
    (new_parent, new_name): (InodeNo, &[u8]),
    mode: RenameMode,
) -> Result<Body, Status> {
    call.check_removal(parent, name)?;
    match call.check_removal(new_parent, new_name) {
        // Nothing is there to be replaced.
        Err(Status::NotFound) => call.check_directory(new_parent)?,
        other => other?,
    }
    let operation = Operation::Rename { parent, name, new_parent, new_name, mode };
    let outcome = call.execute(&operation)?;
    call.context.server.settle(outcome).await;
    done()
}

pub(super) fn read_link(call: &Call<'_>, ino: InodeNo) -> Result<Body, Status> {
    body(&Reply::Bytes(&call.context.server.meta.read_link(ino)?))
}

pub(super) fn read_dir(
    call: &Call<'_>,
    ino: InodeNo,
    cookie: u64,
    max_bytes: u32,
    plus: bool,
) -> Result<Body, Status> {
    call.check_inode(ino, Need::Read)?;
    let room = (max_bytes as usize).min(MAX_ENTRIES_BYTES);
    let each = if plus { ENTRY_PLUS_BYTES } else { ENTRY_BYTES };
    let mut found = Vec::new();
    let mut used = 0;
    let end = call.context.server.meta.read_dir(ino, cookie, plus, &mut |entry| {
        used += each + entry.name.len();
        // The first entry always fits, or a client that asks for little would never get on.
        if used > room && !found.is_empty() {
            return false;
        }
        found.push((entry.name.to_vec(), DirEntry { name: &[], ..*entry }));
        true
    })?;
    let entries = found.iter().map(|(name, entry)| DirEntry { name, ..entry.clone() }).collect();
    body(&Reply::Entries { entries, end })
}

pub(super) fn get_xattr(call: &Call<'_>, ino: InodeNo, name: &[u8]) -> Result<Body, Status> {
    body(&Reply::Bytes(&call.context.server.meta.xattr(ino, name)?))
}

pub(super) fn list_xattr(call: &Call<'_>, ino: InodeNo) -> Result<Body, Status> {
    body(&Reply::Bytes(&call.context.server.meta.xattr_names(ino)?))
}

pub(super) fn set_xattr(
    call: &Call<'_>,
    ino: InodeNo,
    name: &[u8],
    value: &[u8],
    mode: XattrMode,
) -> Result<Body, Status> {
    call.check_inode(ino, Need::Write)?;
    call.execute(&Operation::SetXattr { ino, name, value, mode })?;
    done()
}

pub(super) fn remove_xattr(call: &Call<'_>, ino: InodeNo, name: &[u8]) -> Result<Body, Status> {
    call.check_inode(ino, Need::Write)?;
    call.execute(&Operation::RemoveXattr { ino, name })?;
    done()
}
