//! Operations on the model: the answer that an operation must have if it happens now, and its effect.

use super::super::model::{Clients, GID, Model, Node, Time};
use super::super::step::How;
use super::op::{Answer, Op, Places, RDEV, TARGET, bytes_of, node_of, value_of};
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE_U64};
use cuttlefs_common::rpc::{Allocate, XattrMode};
use cuttlefs_common::status::Status;

/// Does `op` of `client` on `model`. Returns `false` if `answer` cannot be its answer.
///
/// `died`: whether a server died meanwhile. Then an open may be answered with a later state of the file, so its word about cached pages is not
/// checked.
pub fn fits(
    model: &mut Model,
    (client, op): (usize, &Op),
    places: &Places,
    answer: &Answer,
    died: bool,
) -> bool {
    match answer {
        Answer::Done(real) => {
            let expected = match expected_done(model, client, op, places) {
                Some(expected) => expected,
                None => return false,
            };
            *real == expected
        }
        Answer::Found(real) => found(model, op, places, *real),
        Answer::Opened(real) => match (op, real) {
            (Op::Create { at, exclusive, how }, real) => {
                let expected =
                    create(model, places.entry(*at), *exclusive, real.ok().and_then(|real| real.0));
                match (expected, real) {
                    (Ok(None), _) => false,
                    (Ok(Some(ino)), Ok((real, _, change))) => {
                        *real == Some(ino)
                            && open(model, client, ino, How { truncate: false, ..*how }, (*change, died))
                    }
                    (expected, real) => expected.err() == real.err(),
                }
            }
            (Op::CreateNameless { parent, how }, real) => {
                let parent = places.ino(*parent);
                match (model.directory(parent).map(|_| ()), real) {
                    (Ok(()), Ok((Some(ino), _, change))) if !model.made.contains(ino) => {
                        model.add_nameless(parent, *ino, FileKind::File, 0o640);
                        open(model, client, *ino, *how, (*change, died))
                    }
                    (Ok(()), _) => false,
                    (expected, real) => expected.err() == real.err(),
                }
            }
            (Op::Open { ino, how }, real) => {
                let ino = places.ino(*ino);
                let expected = model.node(ino).and_then(|node| match node.kind {
                    FileKind::File => Ok(()),
                    FileKind::Directory => Err(Status::IsDirectory),
                    _ => Err(Status::Invalid),
                });
                match (expected, real) {
                    (Ok(()), Ok((_, _, change))) => open(model, client, ino, *how, (*change, died)),
                    (expected, real) => expected.err() == real.err(),
                }
            }
            _ => unreachable!("opens nothing: {op:?}"),
        },
        Answer::Attr(real) => {
            let Op::GetAttr { ino } = op else { unreachable!("asks for no attributes: {op:?}") };
            let ino = places.ino(*ino);
            match (model.node(ino), real) {
                (Ok(node), Ok(attr)) => {
                    let (kind, mode, gid, size) = (node.kind, node.mode, node.gid, node.size());
                    let allocated_bytes = node.contents.pages.len() as u64 * PAGE_SIZE_U64;
                    (attr.kind, attr.mode, attr.gid, attr.size) == (kind, mode, gid, size)
                        && attr.nlink == model.nlink(ino)
                        && attr.allocated_bytes == allocated_bytes
                }
                (expected, real) => expected.err() == real.err(),
            }
        }
        Answer::Entries(real) => {
            let Op::List { ino } = op else { unreachable!("lists nothing: {op:?}") };
            let expected = match model.node(places.ino(*ino)) {
                Ok(node) if node.kind == FileKind::Directory => Ok(&node.entries),
                Ok(_) => Err(Status::NotDirectory),
                Err(status) => Err(status),
            };
            real.as_ref().map_err(|status| *status) == expected
        }
        Answer::Bytes(real) => {
            let real = real.as_deref().map_err(|status| *status);
            match *op {
                Op::GetXattr { ino, name: index } => {
                    let name = super::super::walk::name(index);
                    let expected = model.node(places.ino(ino)).and_then(|node| {
                        node.xattrs.get(&name).map(Vec::as_slice).ok_or(Status::NoAttribute)
                    });
                    real == expected
                }
                Op::Read { handle, page } => {
                    let open = places.open(client, handle).expect("it was asked with it");
                    let node = &model.nodes[&open.ino];
                    let there = node.contents.read(page * PAGE_SIZE_U64, PAGE_SIZE_U64);
                    real == if open.how.read { Ok(there) } else { Err(Status::Denied) }
                }
                _ => unreachable!("reads nothing: {op:?}"),
            }
        }
        Answer::Count(real) => *real == expected_count(model, client, op, places),
    }
}

fn found(model: &mut Model, op: &Op, places: &Places, real: Result<InodeNo, Status>) -> bool {
    match *op {
        Op::Lookup { at } => {
            let (parent, name) = places.entry(at);
            real == model.existing(parent, &name)
        }
        Op::Link { ino, at } => {
            let (ino, (parent, name)) = (places.ino(ino), places.entry(at));
            real == model.link(ino, parent, &name).map(|()| ino)
        }
        Op::Make { at, kind } => {
            let (parent, name) = places.entry(at);
            match (model.place(parent, &name), real) {
                (Ok(None), Ok(ino)) if !model.made.contains(&ino) => {
                    let node = model.add(parent, &name, ino, kind, node_of(kind).1);
                    match kind {
                        FileKind::Symlink => node.target = TARGET.to_vec(),
                        FileKind::CharDevice => node.rdev = RDEV,
                        _ => {}
                    }
                    true
                }
                (Ok(None), _) => false,
                (Ok(Some(_)), real) => real == Err(Status::Exists),
                (Err(status), real) => real == Err(status),
            }
        }
        _ => unreachable!("finds nothing: {op:?}"),
    }
}

/// The inode that is opened: an existing one, or `new`, which is added to the model if the name is free. `Ok(None)`: the answer cannot be right.
fn create(
    model: &mut Model,
    (parent, name): (InodeNo, Vec<u8>),
    exclusive: bool,
    new: Option<InodeNo>,
) -> Result<Option<InodeNo>, Status> {
    match model.place(parent, &name)? {
        Some(_) if exclusive => Err(Status::Exists),
        Some(ino) => match model.nodes[&ino].kind {
            FileKind::File => Ok(Some(ino)),
            FileKind::Directory => Err(Status::IsDirectory),
            _ => Err(Status::Exists),
        },
        None => Ok(new.filter(|new| !model.made.contains(new)).inspect(|new| {
            model.add(parent, &name, *new, FileKind::File, 0o640);
        })),
    }
}

/// Adds an open file. Returns `false` if the change counter does not tell the client that another client has changed the file. After a death it is not
/// compared.
fn open(model: &mut Model, client: usize, ino: InodeNo, how: How, (change, died): (u64, bool)) -> bool {
    if how.truncate {
        model.node_mut(ino).contents.truncate(0);
        model.contents_changed(ino, client);
    }
    let node = model.node_mut(ino);
    node.opens += 1;
    node.more.opened(client, change) || died
}

/// The expected answer of an operation that only tells whether it was done. `None`: this operation has another kind of answer.
fn expected_done(model: &mut Model, client: usize, op: &Op, places: &Places) -> Option<Result<(), Status>> {
    let now = model.now;
    Some(match *op {
        Op::Unlink { at } => {
            let (parent, name) = places.entry(at);
            model.remove(parent, &name, false)
        }
        Op::Rmdir { at } => {
            let (parent, name) = places.entry(at);
            model.remove(parent, &name, true)
        }
        Op::Rename { from, to, mode } => {
            let (from, to) = (places.entry(from), places.entry(to));
            model.rename((from.0, &from.1), (to.0, &to.1), mode)
        }
        Op::SetAttr { ino, mode, gid } => changing(model, places.ino(ino), |node| {
            if mode.is_none() && gid.is_none() {
                return Ok(());
            }
            node.ctime = Time::NotBefore(now);
            if let Some(gid) = gid {
                node.chown_drops_set_ids(GID);
                node.gid = gid;
            }
            node.mode = mode.unwrap_or(node.mode);
            Ok(())
        }),
        Op::SetXattr { ino, name: index, salt, mode } => changing(model, places.ino(ino), |node| {
            let name = super::super::walk::name(index);
            match (mode, node.xattrs.contains_key(&name)) {
                (XattrMode::Create, true) => return Err(Status::Exists),
                (XattrMode::Replace, false) => return Err(Status::NoAttribute),
                _ => {}
            }
            node.xattrs.insert(name, value_of(salt));
            node.ctime = Time::NotBefore(now);
            Ok(())
        }),
        Op::RemoveXattr { ino, name: index } => changing(model, places.ino(ino), |node| {
            node.xattrs.remove(&super::super::walk::name(index)).ok_or(Status::NoAttribute)?;
            node.ctime = Time::NotBefore(now);
            Ok(())
        }),
        Op::Truncate { ino, size } => {
            let ino = places.ino(ino);
            let kind = model.node(ino).map(|node| node.kind);
            kind.and_then(|kind| match kind {
                FileKind::File => {
                    model.node_mut(ino).contents.truncate(size);
                    model.contents_changed(ino, client);
                    Ok(())
                }
                FileKind::Directory => Err(Status::IsDirectory),
                _ => Err(Status::Invalid),
            })
        }
        Op::Allocate { handle, offset, len, how } => {
            let open = places.open(client, handle)?;
            if open.how.write {
                allocate(model, client, open.ino, (offset, len), how);
                Ok(())
            } else {
                Err(Status::Denied)
            }
        }
        Op::Fsync { handle } => {
            model.node_mut(places.open(client, handle)?.ino).more.unsynced_by = Default::default();
            Ok(())
        }
        _ => return None,
    })
}

fn changing(
    model: &mut Model,
    ino: InodeNo,
    change: impl FnOnce(&mut Node) -> Result<(), Status>,
) -> Result<(), Status> {
    model.node(ino)?;
    change(model.node_mut(ino))
}

fn allocate(model: &mut Model, client: usize, ino: InodeNo, (offset, len): (u64, u64), how: Allocate) {
    let node = model.node_mut(ino);
    let (size, mtime, ctime) = (node.size(), node.mtime, node.ctime);
    let stale_for = node.more.stale_for;
    node.contents.allocate(offset, len, how);
    model.contents_changed(ino, client);
    let node = model.node_mut(ino);
    if matches!(how, Allocate::Reserve { .. }) && size == node.size() {
        // Only space was taken: no byte and no time changes, and no cached page becomes stale.
        (node.mtime, node.ctime, node.more.stale_for) = (mtime, ctime, stale_for);
    }
}

fn expected_count(model: &mut Model, client: usize, op: &Op, places: &Places) -> Result<u64, Status> {
    match *op {
        Op::Write { handle, offset, len, salt } => {
            let open = places.open(client, handle).expect("it was asked with it");
            if !open.how.write {
                return Err(Status::Denied);
            }
            let node = model.node_mut(open.ino);
            let offset = if open.how.append { node.size() } else { offset };
            node.contents.write(offset, &bytes_of(salt, len));
            model.contents_changed(open.ino, client);
            Ok(len)
        }
        Op::Copy { from, from_offset, to, to_offset, len } => {
            let open = |index| places.open(client, index).expect("it was asked with it");
            let (from, to) = (open(from), open(to));
            let bytes = model.nodes[&from.ino].contents.read(from_offset, len).to_vec();
            let copied = bytes.len() as u64;
            let overlaps = from_offset < to_offset + copied && to_offset < from_offset + copied;
            if !from.how.read || !to.how.write {
                return Err(Status::Denied);
            }
            if from.ino == to.ino && overlaps {
                return Err(Status::Invalid);
            }
            if copied > 0 {
                model.node_mut(to.ino).contents.write(to_offset, &bytes);
                model.contents_changed(to.ino, client);
            }
            Ok(copied)
        }
        _ => unreachable!("counts nothing: {op:?}"),
    }
}
