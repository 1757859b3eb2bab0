//! Requests about names and attributes. Each is one batch of metadata.

use super::{Body, Call, PIECES_A_TURN, body, done};
use crate::meta::{LEVELS_MAX, Operation, Outcome};
use crate::rights::Need;
use cuttlefs_common::attr::{Attr, SetAttr};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{DirEntry, MAX_MESSAGE_BYTES, NewNode, RenameMode, Reply, XattrMode};
use cuttlefs_common::status::Status;

/// Upper bounds for the bytes of a directory entry in a reply besides its name: cookie, inode and type as varints, and with `PLUS` the attributes.
const ENTRY_BYTES: usize = 32;
const ENTRY_PLUS_BYTES: usize = 192;
/// Bytes for entries in one reply: a message without its header and the vector's length.
const MAX_ENTRIES_BYTES: usize = MAX_MESSAGE_BYTES as usize - 1024;

/// Climbs after which a rename gives up, because directories above keep being moved.
const CLIMBS: usize = 16;

fn attr_reply(outcome: &Outcome) -> Result<Body, Status> {
    match outcome.attr {
        Some(attr) => body(&Reply::Attr(attr)),
        None => Err(Status::Io),
    }
}

impl Call<'_> {
    pub(super) fn execute(&self, operation: &Operation<'_>) -> Result<Outcome, Status> {
        self.context.server.execute(self.asker(), operation)
    }
}

impl Call<'_> {
    /// A number that stands for an inode in a listing, and by which it cannot be reached.
    fn number_only(&self, ino: InodeNo) -> InodeNo {
        self.grant.veil.as_ref().map_or(ino, |veil| veil.number_only(ino))
    }

    /// A directory's parent. The parent of the session's root is the root itself. A directory that was moved out of the session's tree can still be
    /// reached by its number, but not its parents: the answer is `Stale`, as for one more than `LEVELS_MAX` levels deep in an export that is a part
    /// of the pool.
    async fn above(&self, directory: InodeNo) -> Result<Attr, Status> {
        let (meta, root) = (&self.context.server.meta, self.session.root());
        if directory == root {
            return meta.attr(root);
        }
        let above = meta.lookup(directory, b"..")?;
        let (mut at, mut levels) = (above.ino, 0);
        while root != InodeNo::ROOT && at != root {
            if at == InodeNo::ROOT || levels == LEVELS_MAX {
                return Err(Status::Stale);
            }
            at = meta.parent(at)?;
            levels += 1;
            if levels % PIECES_A_TURN == 0 {
                self.give_way().await;
            }
        }
        Ok(above)
    }
}

pub(super) async fn lookup(call: &Call<'_>, parent: InodeNo, name: &[u8]) -> Result<Body, Status> {
    let attr = match name {
        b".." => call.above(parent).await?,
        name => call.context.server.meta.lookup(parent, name)?,
    };
    body(&Reply::Attr(attr))
}

pub(super) fn get_attr(call: &Call<'_>, ino: InodeNo) -> Result<Body, Status> {
    body(&Reply::Attr(call.context.server.meta.attr(ino)?))
}

pub(super) fn changes(call: &Call<'_>, inodes: &[InodeNo]) -> Result<Body, Status> {
    let change = |ino: &InodeNo| call.context.server.meta.attr(*ino).ok().map(|attr| attr.change);
    body(&Reply::Changes(inodes.iter().map(change).collect()))
}

pub(super) async fn set_attr(call: &Call<'_>, ino: InodeNo, set: &SetAttr) -> Result<Body, Status> {
    let server = &call.context.server;
    if server.meta.attr(ino)?.forbids(set) {
        return Err(Status::NotPermitted);
    }
    let attr = match set.size {
        Some(size) => server.truncate(call.context.disk.as_ref(), call.asker(), ino, size, set).await?,
        None => server.set_attr(call.asker(), ino, set, None)?,
    };
    if set.flags.is_some() {
        server.files.note_flags(ino, attr.flags).await;
    }
    body(&Reply::Attr(attr))
}

pub(super) fn make(
    call: &Call<'_>,
    parent: InodeNo,
    name: &[u8],
    node: NewNode<'_>,
    mode: u16,
) -> Result<Body, Status> {
    attr_reply(&call.execute(&Operation::Make { parent, name, node, mode })?)
}

pub(super) fn link(call: &Call<'_>, ino: InodeNo, parent: InodeNo, name: &[u8]) -> Result<Body, Status> {
    attr_reply(&call.execute(&Operation::Link { ino, parent, name })?)
}

pub(super) async fn unlink(call: &Call<'_>, parent: InodeNo, name: &[u8]) -> Result<Body, Status> {
    let outcome = call.execute(&Operation::Unlink { parent, name })?;
    call.context.server.settle(outcome).await;
    done()
}

pub(super) async fn rmdir(call: &Call<'_>, parent: InodeNo, name: &[u8]) -> Result<Body, Status> {
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
    let operation = Operation::Rename { parent, name, new_parent, new_name, mode };
    let outcome = match call.execute(&operation) {
        Err(Status::Busy) => move_far(call, &operation, parent, new_parent, mode).await,
        outcome => outcome,
    }?;
    let moved = outcome.attr.ok_or(Status::Io)?;
    call.context.server.settle(outcome).await;
    body(&Reply::Attr(moved))
}

/// Moves a directory to one that is far from the root. The path to the root is climbed first: one climb at a time on a worker, and peers take turns.
async fn move_far(
    call: &Call<'_>,
    operation: &Operation<'_>,
    parent: InodeNo,
    new_parent: InodeNo,
    mode: RenameMode,
) -> Result<Outcome, Status> {
    let meta = &call.context.server.meta;
    let _turn = call.context.climbs.take(&call.claim()).await;
    for _ in 0..CLIMBS {
        let mut climbs = vec![meta.climb(new_parent)];
        // In an exchange a directory moves to the old place as well.
        climbs.extend((mode == RenameMode::Exchange).then(|| meta.climb(parent)));
        for climb in &mut climbs {
            while climb.step()? {
                call.give_way().await;
            }
        }
        match call.execute(operation) {
            // A directory above was moved meanwhile, so the path to the root is another one now.
            Err(Status::Busy) => {}
            outcome => return outcome,
        }
    }
    Err(Status::Busy)
}

pub(super) fn read_link(call: &Call<'_>, ino: InodeNo) -> Result<Body, Status> {
    body(&Reply::Bytes(&call.context.server.meta.read_link(ino)?))
}

pub(super) async fn read_dir(
    call: &Call<'_>,
    ino: InodeNo,
    mut cookie: u64,
    max_bytes: u32,
    plus: bool,
) -> Result<Body, Status> {
    // A client that may not search the directory is told names, and numbers by which nothing can be reached.
    let is_searched = call.judge().check_inode(ino, Need::Search).is_ok();
    let plus = plus && is_searched;
    let room = (max_bytes as usize).min(MAX_ENTRIES_BYTES);
    let each = if plus { ENTRY_PLUS_BYTES } else { ENTRY_BYTES };
    let mut found = Vec::new();
    let mut used = 0;
    let end = loop {
        let (before, from, mut is_full) = (found.len(), cookie, false);
        let end = call.context.server.meta.read_dir(ino, from, plus, &mut |entry| {
            if found.len() == before + PIECES_A_TURN {
                return false;
            }
            used += each + entry.name.len();
            // The first entry always fits; otherwise a client that asks for few bytes would never get on.
            is_full = used > room && !found.is_empty();
            if is_full {
                return false;
            }
            cookie = entry.cookie;
            let ino = if is_searched { entry.ino } else { call.number_only(entry.ino) };
            found.push((entry.name.to_vec(), DirEntry { name: &[], ino, ..*entry }));
            true
        })?;
        if end || is_full {
            break end;
        }
        call.give_way().await;
    };
    let entries = found.iter().map(|(name, entry)| DirEntry { name, ..entry.clone() }).collect();
    body(&Reply::Entries { entries, end })
}

pub(super) fn get_xattr(call: &Call<'_>, ino: InodeNo, name: &[u8]) -> Result<Body, Status> {
    body(&Reply::Bytes(&call.context.server.meta.xattr(ino, name)?))
}

pub(super) fn list_xattr(call: &Call<'_>, ino: InodeNo) -> Result<Body, Status> {
    let mut names = call.context.server.meta.xattr_names(ino)?;
    if call.who.checked {
        let known = names.split_inclusive(|byte| *byte == 0).filter(|name| call.judge().may_know_xattr(name));
        names = known.flatten().copied().collect();
    }
    body(&Reply::Bytes(&names))
}

pub(super) fn set_xattr(
    call: &Call<'_>,
    ino: InodeNo,
    name: &[u8],
    value: &[u8],
    mode: XattrMode,
) -> Result<Body, Status> {
    call.execute(&Operation::SetXattr { ino, name, value, mode })?;
    done()
}

pub(super) fn remove_xattr(call: &Call<'_>, ino: InodeNo, name: &[u8]) -> Result<Body, Status> {
    call.execute(&Operation::RemoveXattr { ino, name })?;
    done()
}
