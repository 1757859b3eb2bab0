//! Requests that an earlier life of the server did and could not answer.
//!
//! A client sends a request again until it is answered. Within the life of a server the slot keeps the answer; past it
//! the metadata remembers which request of a slot was done last (`SlotRecord`, in the batch of its effect). What the
//! answer said is not kept: it is told anew, of the same inode as it is now. That inode is there: since its client has come
//! back it is kept for this request (`session/`), without a name if somebody removed it.
//!
//! # Failure
//! It may be gone: freed by the server that did the request, which knew of nobody who had it open, or behind the end of the grace
//! period or of the session of a client that came back too late. Then the answer is `Stale`; what was only made, and is not
//! opened, is told to have been made; a file without a name is made once more.

use super::{Body, Call, body, done};
use crate::meta::{Placed, SlotRecord};
use cuttlefs_common::attr::{Attr, FileKind, InodeFlags};
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE_U64};
use cuttlefs_common::rpc::{NewNode, Reply, Request, Rights};
use cuttlefs_common::status::Status;

/// What to do about a request that was done before.
pub(super) enum Repeated<'a> {
    /// Answer so.
    Answer(Body),
    /// Run this instead.
    Run(Request<'a>),
}

/// Looks whether `request` was done before this server started.
///
/// # Errors
/// `Io` if the metadata cannot be read; `Stale` if the inode it was about was gone before its client came back, and the answer must tell of it.
pub(super) async fn look<'a>(call: &Call<'_>, request: Request<'a>) -> Result<Repeated<'a>, Status> {
    let meta = &call.context.server.meta;
    match call.who.request.map(|id| meta.request_done(id)).transpose()?.flatten() {
        None => Ok(Repeated::Run(request)),
        Some(record) => {
            tracing::debug!(?record, "a request that was done by the server before this one");
            again(call, request, record).await
        }
    }
}

/// What is told of an inode that was made, and removed by somebody else before its maker came back: it was made, or that one
/// could not have removed it. Were this an error, the maker's kernel would make it once more.
fn made_and_gone(call: &Call<'_>, ino: InodeNo, node: NewNode<'_>, mode: u16) -> Attr {
    let now = call.context.server.clock.now();
    let (kind, rdev, size) = match node {
        NewNode::File => (FileKind::File, 0, 0),
        NewNode::Directory => (FileKind::Directory, 0, PAGE_SIZE_U64),
        NewNode::Symlink(target) => (FileKind::Symlink, 0, target.len() as u64),
        NewNode::Special { kind, rdev } => (kind, rdev, 0),
    };
    let (uid, gid) = (call.who.uid, call.who.gid);
    Attr {
        ino,
        kind,
        mode: mode & !call.who.umask,
        nlink: 0,
        uid,
        gid,
        rdev,
        size,
        allocated_bytes: 0,
        atime: now,
        mtime: now,
        ctime: now,
        btime: now,
        change: 0,
        flags: InodeFlags::default(),
    }
}

/// A file that was made is opened for who made it.
async fn made_and_open(call: &Call<'_>, attr: &Attr, rights: Rights) -> Result<Body, Status> {
    if attr.uid != call.who.uid {
        // It was no create that left this record, or somebody owns by now what was made.
        call.judge().check_rights(attr, rights)?;
    }
    let opened = call.bind(attr, rights)?;
    body(&Reply::Opened(call.load(opened, rights).await?))
}

async fn again<'a>(
    call: &Call<'_>,
    request: Request<'a>,
    record: SlotRecord,
) -> Result<Repeated<'a>, Status> {
    let meta = &call.context.server.meta;
    let attr = || record.ino.ok_or(Status::Io).and_then(|ino| meta.attr(ino));
    let answer = match request {
        Request::Make { node, mode, .. } => match (attr(), record.ino) {
            (Err(Status::Stale), Some(ino)) => body(&Reply::Attr(made_and_gone(call, ino, node, mode))),
            (attr, _) => attr.and_then(|attr| body(&Reply::Attr(attr))),
        },
        Request::Link { .. } => attr().and_then(|attr| body(&Reply::Attr(attr))),
        Request::SetAttr { set, .. } => match attr() {
            // Growing is durable only with the next write-back, which then notes a place, and takes nobody's bytes: before,
            // it may have to be done again. Cutting is not: somebody may have written since.
            Ok(attr) if set.size.is_some_and(|size| size > attr.size) && record.placed.is_none() => {
                return Ok(Repeated::Run(request));
            }
            attr => attr.and_then(|attr| body(&Reply::Attr(attr))),
        },
        Request::Create { rights, .. } => made_and_open(call, &attr()?, rights).await,
        Request::CreateNameless { rights, .. } => match attr() {
            // It was freed, for nobody had it open. Nobody has seen it: another one is as good.
            Err(Status::Stale) => return Ok(Repeated::Run(request)),
            attr => made_and_open(call, &attr?, rights).await,
        },
        // It was cut; what has been written since stays.
        Request::Open { ino, rights, .. } => {
            return Ok(Repeated::Run(Request::Open { ino, rights, truncate: false }));
        }
        Request::Unlink { .. }
        | Request::Rmdir { .. }
        | Request::Rename { .. }
        | Request::SetXattr { .. }
        | Request::RemoveXattr { .. } => done(),
        Request::Allocate { .. } => attr().and_then(|attr| body(&Reply::Attr(attr))),
        Request::Write { .. } => match record.placed {
            Some(Placed { offset, len }) => {
                let attr = attr()?;
                // It is in what is stored, and whatever others have asked this server for came later.
                let change = meta.written(attr.ino)?.until;
                body(&Reply::Written { offset, len, size: attr.size, change })
            }
            None => return Ok(Repeated::Run(request)),
        },
        // Its last write is known: where that ends, the copy does.
        Request::CopyRange { to_offset, len, .. } => {
            let end = record.placed.map(|Placed { offset, len }| offset.saturating_add(len.into()));
            match end.and_then(|end| end.checked_sub(to_offset)) {
                Some(copied) if copied <= len => {
                    attr().and_then(|attr| body(&Reply::Copied { len: copied, change: attr.change }))
                }
                _ => return Ok(Repeated::Run(request)),
            }
        }
        // Nothing else leaves a record. A client that uses a number for two requests gets what it asks for.
        request => return Ok(Repeated::Run(request)),
    };
    Ok(Repeated::Answer(answer?))
}
