//! Runs steps on the real file system and on the model, and compares each answer, and at intervals everything.

use super::model::{Clients, GID, Model, Time, UID};
use super::reached::Reached;
use super::site::Site;
use super::step::{How, Step};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Caller, FsError, Handle, OpenHow, Volume};
use cuttlefs_common::attr::{Attr, FileKind, SetAttr, SetTime, Timestamp};
use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE_U64, TraceId};
use cuttlefs_common::rpc::{Allocate, DirEntry, NewNode, XATTR_VALUE_MAX, XattrMode};
use cuttlefs_common::status::Status;
use std::collections::BTreeMap;
use std::time::Duration;

/// The number of steps between two comparisons of everything.
const COMPARE_EVERY: usize = 6;
pub const CALLER: Caller = Caller::new(UID, GID, TraceId(1));
pub const READ: How = How { read: true, write: false, append: false, truncate: false, sync: false };
const TARGET: &[u8] = b"some/where";
const RDEV: u32 = 0x105;

#[derive(Clone, Copy)]
pub struct Open {
    pub handle: Handle,
    pub client: usize,
    pub ino: InodeNo,
    pub how: How,
}

/// A walk under way.
pub struct Walk<S> {
    pub site: S,
    pub model: Model,
    pub handles: Vec<Open>,
    steps: u64,
    /// A scheduled crash must come within the next step, or is cancelled.
    crash_is_near: bool,
    reached: Reached,
}

pub fn name(index: usize) -> Vec<u8> {
    match index {
        4 => vec![b'n'; 255],
        5 => vec![b'n'; 256],
        6 => b"..".to_vec(),
        7 => Vec::new(),
        index => vec![b'a' + index as u8],
    }
}

pub fn status<T>(result: Result<T, FsError>) -> Result<T, Status> {
    result.map_err(|error| match error {
        FsError::Server(status) => status,
        other => panic!("{other}"),
    })
}

/// Opens by inode number, without a name, because names in the model are not resolved by a kernel.
pub fn open_how(how: How) -> OpenHow {
    OpenHow {
        read: how.read,
        write: how.write,
        append: how.append,
        truncate: how.truncate,
        sync: how.sync,
        told: None,
    }
}

pub fn read_all(volume: &RemoteVolume, handle: Handle, offset: u64, len: u64) -> Result<Vec<u8>, Status> {
    let mut bytes = Vec::new();
    let take = &mut |got: &[u8]| bytes.extend_from_slice(got);
    status(volume.read(&CALLER, handle, offset, len as u32, take))?;
    Ok(bytes)
}

impl<S: Site> Walk<S> {
    /// A walk that begins at an empty file system.
    pub fn new(site: S) -> Self {
        let root = status(site.client(0).get_attr(&CALLER, InodeNo::ROOT)).expect("root");
        let model = Model::new(&root, site.pool_pages(), site.now(), (UID, GID));
        let (handles, reached) = (Vec::new(), Reached::default());
        Self { site, model, handles, steps: 0, crash_is_near: false, reached }
    }

    pub fn handle(&self, index: usize) -> Option<&Open> {
        if self.handles.is_empty() { None } else { self.handles.get(index % self.handles.len()) }
    }

    fn opened(&mut self, handle: Handle, client: usize, ino: InodeNo, how: How) {
        self.model.node_mut(ino).opens += 1;
        self.handles.push(Open { handle, client, ino, how });
    }

    fn close(&mut self, index: usize) {
        let open = self.handles.remove(index);
        self.site.client(open.client).release(open.handle);
        self.model.node_mut(open.ino).opens -= 1;
        self.model.settle(open.ino);
    }

    pub fn run(&mut self, client: usize, step: &Step) {
        self.steps += 1;
        self.model.now = self.site.now();
        let crash_is_near = std::mem::take(&mut self.crash_is_near);
        let (real, expected): (Result<(), Status>, Result<(), Status>) = match *step {
            Step::Make { .. }
            | Step::Create { .. }
            | Step::CreateNameless { .. }
            | Step::Link { .. }
            | Step::Unlink { .. }
            | Step::Rmdir { .. }
            | Step::Rename { .. } => self.run_name(client, step),
            Step::Open { ino, how } => self.run_open(client, ino, how),
            Step::Release { handle } => {
                if !self.handles.is_empty() {
                    self.close(handle % self.handles.len());
                }
                (Ok(()), Ok(()))
            }
            Step::Truncate { .. }
            | Step::SetAttr { .. }
            | Step::SetXattr { .. }
            | Step::RemoveXattr { .. }
            | Step::ReadDir { .. }
            | Step::ReadLink { .. } => self.run_inode(client, step),
            Step::Remount => {
                self.remount(client);
                (Ok(()), Ok(()))
            }
            Step::Pass { ms } => {
                self.site.pass(Duration::from_millis(ms));
                (Ok(()), Ok(()))
            }
            Step::Restart => {
                self.compare();
                // All clients sync: a client makes its unsynced changes again after the restart, over what another client has written since.
                self.sync();
                self.site.restart();
                if self.site.writes_again() {
                    self.model.written_again();
                }
                self.touch();
                // A freed file whose last step was not durable is freed again in this time.
                self.site.pass(Duration::from_millis(200));
                self.compare();
                (Ok(()), Ok(()))
            }
            Step::Kill { cut, death } => {
                self.sync();
                self.site.kill_at(cut, death);
                (Ok(()), Ok(()))
            }
            Step::Cut { cut, pass } => {
                self.site.cut(cut, pass);
                (Ok(()), Ok(()))
            }
            Step::Crash { crash, again } => {
                if !self.site.answers_are_durable() && (crash.power || again.is_some_and(|again| again.power))
                {
                    self.sync();
                    self.crash_is_near = true;
                }
                self.site.crash_after(crash, again);
                (Ok(()), Ok(()))
            }
            _ => self.run_file(step),
        };
        let died = self.site.has_died();
        assert!(real == expected, "client {client}: {step:?}: {real:?}, should be {expected:?}");
        if crash_is_near {
            self.site.calm();
        }
        self.settle(died);
    }

    fn remount(&mut self, client: usize) {
        for index in (0..self.handles.len()).rev() {
            if self.handles[index].client == client {
                self.close(index);
            }
        }
        self.site.hold_crash(true);
        if self.site.remount(client) {
            self.model.nodes.values_mut().for_each(|node| node.more.stale_for[client] = false);
            // Sync, so that the client's end is durable: a server that does not know of it would wait for the client.
            self.sync_client(client);
        }
        self.site.hold_crash(false);
    }

    /// After a server has died: lets all clients come back, until no server dies meanwhile.
    pub fn settle(&mut self, mut died: bool) {
        while died {
            if self.site.writes_again() {
                self.model.written_again();
                self.model.may_be_as_seen();
            }
            // The other clients have open files to reclaim, too, and the grace period runs.
            self.touch();
            // When all are back, the server frees files that were unlinked meanwhile, also those that a power loss brought back.
            self.site.pass(Duration::from_millis(200));
            died = self.site.has_died();
        }
    }

    /// Syncs all clients, as is needed before a server dies. Does nothing where answers are durable.
    pub fn sync(&mut self) {
        if self.site.answers_are_durable() {
            return;
        }
        (0..self.site.clients()).for_each(|index| self.sync_client(index));
    }

    pub fn sync_client(&mut self, index: usize) {
        status(self.site.client(index).session().sync_all(&CALLER)).expect("sync");
        self.model.synced_by(index);
    }

    fn run_name(&mut self, client: usize, step: &Step) -> (Result<(), Status>, Result<(), Status>) {
        if let Step::Create { parent, name: index, .. } = *step
            && let Ok(Some(ino)) = self.model.place(self.model.pick(parent), &name(index))
        {
            self.hand_over(ino, client);
        }
        let volume = self.site.client(client);
        let model = &mut self.model;
        match *step {
            Step::Make { parent, name: index, kind } => {
                let (parent, name) = (model.pick(parent), name(index));
                let (node, mode) = match kind {
                    FileKind::File => (NewNode::File, 0o644),
                    FileKind::Directory => (NewNode::Directory, 0o3755),
                    FileKind::Symlink => (NewNode::Symlink(TARGET), 0o777),
                    kind => (NewNode::Special { kind, rdev: RDEV }, 0o600),
                };
                let real = status(volume.make(&CALLER, parent, &name, node, mode));
                let expected = match model.place(parent, &name) {
                    Ok(Some(_)) => Err(Status::Exists),
                    other => other.map(|_| ()),
                };
                if let (Ok(attr), Ok(())) = (&real, expected) {
                    let node = model.add(parent, &name, attr.ino, kind, mode);
                    match kind {
                        FileKind::Symlink => node.target = TARGET.to_vec(),
                        FileKind::CharDevice => node.rdev = RDEV,
                        _ => {}
                    }
                }
                (real.map(|_| ()), expected)
            }
            Step::Create { parent, name: index, exclusive, how } => {
                let (parent, name) = (model.pick(parent), name(index));
                let how = How { truncate: false, ..how };
                let real = status(volume.create(&CALLER, parent, &name, 0o640, exclusive, open_how(how)));
                let expected = model.place(parent, &name).and_then(|taken| match taken {
                    Some(_) if exclusive => Err(Status::Exists),
                    Some(ino) => match model.nodes[&ino].kind {
                        FileKind::File => Ok(()),
                        FileKind::Directory => Err(Status::IsDirectory),
                        _ => Err(Status::Exists),
                    },
                    None => Ok(()),
                });
                if let (Ok((attr, open)), Ok(())) = (&real, expected) {
                    if !model.nodes.contains_key(&attr.ino) {
                        model.add(parent, &name, attr.ino, FileKind::File, 0o640);
                    }
                    assert_eq!(model.place(parent, &name), Ok(Some(attr.ino)));
                    self.check_change(client, attr.ino, open.change);
                    self.opened(open.handle, client, attr.ino, how);
                }
                (real.map(|_| ()), expected)
            }
            Step::CreateNameless { parent, how } => {
                let parent = model.pick(parent);
                let how = How { truncate: false, ..how };
                let real = status(volume.create_nameless(&CALLER, parent, 0o640, open_how(how)));
                let expected = model.directory(parent).map(|_| ());
                if let (Ok((attr, open)), Ok(())) = (&real, expected) {
                    assert_eq!(attr.nlink, 0);
                    model.add_nameless(parent, attr.ino, FileKind::File, 0o640);
                    self.opened(open.handle, client, attr.ino, how);
                }
                (real.map(|_| ()), expected)
            }
            Step::Link { ino, parent, name: index } => {
                let (ino, parent, name) = (model.pick(ino), model.pick(parent), name(index));
                let real = status(volume.link(&CALLER, ino, parent, &name)).map(|_| ());
                (real, model.link(ino, parent, &name))
            }
            Step::Unlink { parent, name: index } => {
                let (parent, name) = (model.pick(parent), name(index));
                (status(volume.unlink(&CALLER, parent, &name)), model.remove(parent, &name, false))
            }
            Step::Rmdir { parent, name: index } => {
                let (parent, name) = (model.pick(parent), name(index));
                (status(volume.rmdir(&CALLER, parent, &name)), model.remove(parent, &name, true))
            }
            Step::Rename { parent, name: index, new_parent, new_name, mode } => {
                let (from, to) = (model.pick(parent), model.pick(new_parent));
                let (from_name, to_name) = (name(index), name(new_name));
                let real = status(volume.rename(&CALLER, from, &from_name, to, &to_name, mode).map(drop));
                (real, model.rename((from, &from_name), (to, &to_name), mode))
            }
            _ => unreachable!("not about names: {step:?}"),
        }
    }

    /// A client is told the file's change counter: it has moved if somebody else has changed the contents since the client was told last.
    pub fn check_change(&mut self, client: usize, ino: InodeNo, change: u64) {
        let is_told = self.model.node_mut(ino).more.opened(client, change);
        assert!(is_told, "inode {ino}: client {client} would keep pages somebody else has changed");
    }

    fn run_open(&mut self, client: usize, ino: usize, how: How) -> (Result<(), Status>, Result<(), Status>) {
        let ino = self.model.pick(ino);
        self.hand_over_cut(ino, client, if how.truncate { 0 } else { u64::MAX });
        let real = status(self.site.client(client).open(&CALLER, ino, open_how(how)));
        let expected = self.model.node(ino).and_then(|node| match node.kind {
            FileKind::File => Ok(()),
            FileKind::Directory => Err(Status::IsDirectory),
            _ => Err(Status::Invalid),
        });
        if let (Ok(open), Ok(())) = (&real, expected) {
            if how.truncate {
                self.model.node_mut(ino).contents.truncate(0);
                self.model.contents_changed(ino, client);
            }
            self.check_change(client, ino, open.change);
            self.opened(open.handle, client, ino, how);
        }
        (real.map(|_| ()), expected)
    }

    fn run_inode(&mut self, client: usize, step: &Step) -> (Result<(), Status>, Result<(), Status>) {
        match *step {
            Step::Truncate { ino, size } => self.hand_over_cut(self.model.pick(ino), client, size),
            Step::SetAttr { ino, .. } => self.hand_over(self.model.pick(ino), client),
            _ => {}
        }
        let volume = self.site.client(client);
        let model = &mut self.model;
        let now = model.now;
        match *step {
            Step::Truncate { ino, size } => {
                let ino = model.pick(ino);
                let set = SetAttr { size: Some(size), ..SetAttr::default() };
                let real = status(volume.set_attr(&CALLER, ino, set)).map(|attr| attr.size);
                let expected = model.node(ino).and_then(|node| match node.kind {
                    FileKind::File => Ok(size),
                    FileKind::Directory => Err(Status::IsDirectory),
                    _ => Err(Status::Invalid),
                });
                if expected.is_ok() {
                    model.node_mut(ino).contents.truncate(size);
                    model.contents_changed(ino, client);
                }
                assert_eq!(real, expected, "{step:?}");
                (Ok(()), Ok(()))
            }
            Step::SetAttr { ino, mode, gid, time } => {
                let ino = model.pick(ino);
                let time = time.map(|secs| Timestamp { secs, nanos: 999_999_999 });
                let set = SetAttr { mode, gid, mtime: time.map(SetTime::At), ..SetAttr::default() };
                let real = status(volume.set_attr(&CALLER, ino, set)).map(|_| ());
                let expected = model.node(ino).map(|_| ());
                if expected.is_ok() && set != SetAttr::default() {
                    let node = model.node_mut(ino);
                    node.ctime = Time::NotBefore(now);
                    if let Some(gid) = gid {
                        node.chown_drops_set_ids(GID);
                        node.gid = gid;
                    }
                    node.mode = mode.unwrap_or(node.mode);
                    node.mtime = time.map_or(node.mtime, Time::Exactly);
                }
                (real, expected)
            }
            Step::SetXattr { ino, name: index, len, mode } => {
                let (ino, name) = (model.pick(ino), name(index));
                let value: Vec<u8> = (0..len).map(|index| (index * 7) as u8).collect();
                let real = status(volume.set_xattr(&CALLER, ino, &name, &value, mode));
                let expected = if len > XATTR_VALUE_MAX {
                    Err(Status::ValueTooLarge)
                } else {
                    model.node(ino).and_then(|node| match (mode, node.xattrs.contains_key(&name)) {
                        (XattrMode::Create, true) => Err(Status::Exists),
                        (XattrMode::Replace, false) => Err(Status::NoAttribute),
                        _ => Ok(()),
                    })
                };
                if expected.is_ok() {
                    let node = model.node_mut(ino);
                    node.xattrs.insert(name, value);
                    node.ctime = Time::NotBefore(now);
                }
                (real, expected)
            }
            Step::RemoveXattr { ino, name: index } => {
                let (ino, name) = (model.pick(ino), name(index));
                let real = status(volume.remove_xattr(&CALLER, ino, &name));
                let expected = model.node(ino).and_then(|node| match node.xattrs.contains_key(&name) {
                    true => Ok(()),
                    false => Err(Status::NoAttribute),
                });
                if expected.is_ok() {
                    let node = model.node_mut(ino);
                    node.xattrs.remove(&name);
                    node.ctime = Time::NotBefore(now);
                }
                (real, expected)
            }
            Step::ReadDir { ino, each, plus } => {
                let ino = model.pick(ino);
                let real = list(volume, ino, each, plus);
                let expected = match model.node(ino) {
                    Ok(node) if node.kind == FileKind::Directory => Ok(node.entries.clone()),
                    Ok(_) => Err(Status::NotDirectory),
                    Err(status) => Err(status),
                };
                assert_eq!(real, expected, "{step:?}");
                (Ok(()), Ok(()))
            }
            Step::ReadLink { ino } => {
                let ino = model.pick(ino);
                let expected = match model.node(ino) {
                    Ok(node) if node.kind == FileKind::Symlink => Ok(node.target.clone()),
                    Ok(_) => Err(Status::Invalid),
                    Err(status) => Err(status),
                };
                assert_eq!(status(volume.read_link(&CALLER, ino)), expected);
                (Ok(()), Ok(()))
            }
            _ => unreachable!("not about an inode: {step:?}"),
        }
    }

    fn run_file(&mut self, step: &Step) -> (Result<(), Status>, Result<(), Status>) {
        let index = match *step {
            Step::Write { handle, .. }
            | Step::Read { handle, .. }
            | Step::Allocate { handle, .. }
            | Step::Seek { handle, .. }
            | Step::Defragment { handle, .. }
            | Step::Fsync { handle, .. } => handle,
            Step::Copy { from, .. } => from,
            _ => unreachable!("not about a handle: {step:?}"),
        };
        let Some(&Open { handle, client, ino, how }) = self.handle(index) else {
            return (Ok(()), Ok(()));
        };
        match *step {
            Step::Allocate { offset, len, .. } => self.hand_over_zeroed(ino, client, offset, offset + len),
            _ => self.hand_over(ino, client),
        }
        let volume = self.site.client(client);
        let free = self.model.free_pages();
        match *step {
            Step::Write { offset, len, .. } => {
                let salt = self.steps.wrapping_mul(37);
                let bytes: Vec<u8> = (0..len).map(|at| (salt + at / 89 + at) as u8).collect();
                let node = &self.model.nodes[&ino];
                let place = if how.append { node.size() } else { offset };
                let real = status(volume.write(&CALLER, handle, offset, &bytes)).map(u64::from);
                let expected = if !how.write {
                    Err(Status::Denied)
                } else if node.contents.missing(place, place + len) > free {
                    self.reached.refused_for_space += 1;
                    Err(Status::NoSpace)
                } else {
                    self.model.node_mut(ino).contents.write(place, &bytes);
                    self.model.contents_changed(ino, client);
                    Ok(len)
                };
                assert_eq!(real, expected, "{step:?}");
                (Ok(()), Ok(()))
            }
            Step::Read { offset, len, .. } => {
                let real = read_all(volume, handle, offset, len);
                let node = &self.model.nodes[&ino];
                let expected =
                    if how.read { Ok(node.contents.read(offset, len)) } else { Err(Status::Denied) };
                assert!(real.as_deref() == expected.as_deref(), "{step:?}: {}", differ(&real, &expected));
                (Ok(()), Ok(()))
            }
            Step::Allocate { offset, len, how: what, .. } => {
                let real = status(volume.allocate(&CALLER, handle, offset, len, what));
                let node = &self.model.nodes[&ino];
                let expected = if !how.write {
                    Err(Status::Denied)
                } else if what != Allocate::PunchHole && node.contents.missing(offset, offset + len) > free {
                    Err(Status::NoSpace)
                } else {
                    let (before, size) = (node.contents.bytes.clone(), node.size());
                    let node = self.model.node_mut(ino);
                    let (mtime, ctime) = (node.mtime, node.ctime);
                    node.contents.allocate(offset, len, what);
                    let changed = node.contents.bytes != before || node.size() != size;
                    self.model.contents_changed(ino, client);
                    let reserves = matches!(what, Allocate::Reserve { .. });
                    if reserves && size == self.model.nodes[&ino].size() {
                        // Only space was taken: no byte and no time changes.
                        let node = self.model.node_mut(ino);
                        (node.mtime, node.ctime) = (mtime, ctime);
                        for (other, stale) in node.more.stale_for.iter_mut().enumerate() {
                            *stale &= changed || other == client;
                        }
                    }
                    Ok(())
                };
                (real.map(drop), expected)
            }
            Step::Seek { offset, seek, .. } => {
                let real = status(volume.seek(&CALLER, handle, offset, seek));
                assert_eq!(real, self.model.nodes[&ino].contents.seek(offset, seek), "{step:?}");
                (Ok(()), Ok(()))
            }
            Step::Fsync { contents_only, .. } => {
                let real = status(volume.fsync(&CALLER, handle, contents_only));
                self.model.node_mut(ino).more.unsynced_by = Default::default();
                (real, Ok(()))
            }
            Step::Defragment { page, .. } => {
                let (mut next, mut real) = (Some(FilePage(page)), Ok(()));
                while let Some(first) = next.take() {
                    match status(volume.defragment(&CALLER, handle, first)) {
                        Ok(moved) => {
                            next = moved.next;
                            self.reached.moved_pages += moved.pages;
                        }
                        // There may be too little space to move in.
                        Err(Status::NoSpace) => {}
                        Err(status) => real = Err(status),
                    }
                }
                (real, if how.write { Ok(()) } else { Err(Status::Denied) })
            }
            Step::Copy { from_offset, to, to_offset, len, .. } => {
                // Both handles must be of one client.
                let to = self.handle(to).filter(|to| to.client == client);
                let Some(&Open { handle: to_handle, ino: to_ino, how: to_how, .. }) = to else {
                    return (Ok(()), Ok(()));
                };
                self.hand_over(to_ino, client);
                let volume = self.site.client(client);
                let real = volume.copy_range(&CALLER, handle, from_offset, to_handle, to_offset, len);
                let real = status(real.map(|copied| copied.len));
                let bytes = self.model.nodes[&ino].contents.read(from_offset, len).to_vec();
                let copied = bytes.len() as u64;
                let overlaps =
                    ino == to_ino && from_offset < to_offset + copied && to_offset < from_offset + copied;
                let expected = if !how.read || !to_how.write {
                    Err(Status::Denied)
                } else if overlaps {
                    Err(Status::Invalid)
                } else if copied > 0
                    && self.model.nodes[&to_ino].contents.missing(to_offset, to_offset + copied) > free
                {
                    Err(Status::NoSpace)
                } else {
                    if copied > 0 {
                        self.model.node_mut(to_ino).contents.write(to_offset, &bytes);
                        self.model.contents_changed(to_ino, client);
                    }
                    Ok(copied)
                };
                assert_eq!(real, expected, "{step:?}");
                (Ok(()), Ok(()))
            }
            _ => unreachable!("not about a handle: {step:?}"),
        }
    }

    /// Compares everything that clients can see with the model.
    pub fn compare(&mut self) {
        self.site.hold_crash(true);
        self.compare_all();
        self.site.hold_crash(false);
    }

    fn compare_all(&mut self) {
        // A server that is to die at the next request shall die now.
        self.touch();
        let died = self.site.has_died();
        self.settle(died);
        let made = self.model.made.clone();
        for (index, ino) in made.into_iter().enumerate() {
            let client = (index + self.steps as usize) % self.site.clients();
            let attr = status(self.site.client(client).get_attr(&CALLER, ino));
            if !self.model.nodes.contains_key(&ino) {
                assert_eq!(attr, Err(Status::Stale), "inode {ino}");
                continue;
            }
            let attr = attr.unwrap_or_else(|status| panic!("inode {ino}: {status}"));
            self.compare_attr(ino, &attr);
            self.compare_contents(client, ino);
        }
        let space = status(self.site.client(0).stat_fs(&CALLER)).expect("statfs");
        assert_eq!(
            (space.pool_pages, space.free_pages, space.inodes),
            (self.site.pool_pages(), self.model.free_pages(), self.model.nodes.len() as u64)
        );
        self.site.check_inside();
    }

    fn compare_attr(&mut self, ino: InodeNo, attr: &Attr) {
        let nlink = self.model.nlink(ino);
        let now = self.site.now();
        let node = self.model.node_mut(ino);
        assert_eq!(
            (
                attr.kind,
                attr.mode,
                attr.uid,
                attr.gid,
                attr.rdev,
                attr.nlink,
                attr.size,
                attr.allocated_bytes
            ),
            (
                node.kind,
                node.mode,
                node.uid,
                node.gid,
                node.rdev,
                nlink,
                node.size(),
                node.contents.pages.len() as u64 * PAGE_SIZE_U64
            ),
            "inode {ino}"
        );
        let (mtime, ctime) = (node.mtime, node.ctime);
        assert!(node.mtime.check(attr.mtime, now), "inode {ino}: mtime {:?}, not {mtime:?}", attr.mtime);
        assert!(node.ctime.check(attr.ctime, now), "inode {ino}: ctime {:?}, not {ctime:?}", attr.ctime);
    }

    fn compare_contents(&mut self, client: usize, ino: InodeNo) {
        let volume = self.site.client(client);
        let node = &self.model.nodes[&ino];
        let mut told = None;
        match node.kind {
            FileKind::File => {
                let open = status(volume.open(&CALLER, ino, open_how(READ))).expect("open");
                let bytes = read_all(volume, open.handle, 0, node.size() + 10);
                let expected: Result<&[u8], Status> = Ok(&node.contents.bytes);
                assert!(
                    bytes.as_deref() == expected.as_deref(),
                    "inode {ino}, client {client}: {}",
                    differ(&bytes, &expected)
                );
                volume.release(open.handle);
                told = Some(open.change);
            }
            FileKind::Directory => {
                assert_eq!(list(volume, ino, 1000, true).as_ref(), Ok(&node.entries));
                for (name, child) in &node.entries {
                    let found = status(volume.lookup(&CALLER, ino, name)).map(|attr| attr.ino);
                    assert_eq!(found, Ok(*child));
                }
                let missing = status(volume.lookup(&CALLER, ino, b"not there")).map(|_| ());
                assert_eq!(missing, Err(Status::NotFound));
            }
            _ => {}
        }
        let node = &self.model.nodes[&ino];
        let listed = status(volume.list_xattr(&CALLER, ino)).expect("names");
        let mut names: Vec<_> = listed.split_inclusive(|byte| *byte == 0).map(<[u8]>::to_vec).collect();
        names.sort();
        let expected: Vec<_> = node.xattrs.keys().map(|name| [name.as_slice(), b"\0"].concat()).collect();
        assert_eq!(names, expected, "inode {ino}");
        for (name, value) in &node.xattrs {
            assert!(status(volume.get_xattr(&CALLER, ino, name)).as_ref() == Ok(value), "inode {ino}");
        }
        if let Some(change) = told {
            self.check_change(client, ino, change);
        }
    }
}

/// Says where two answers to a read differ, in few words.
fn differ(real: &Result<Vec<u8>, Status>, expected: &Result<&[u8], Status>) -> String {
    match (real, expected) {
        (Ok(real), Ok(expected)) => {
            let at = real.iter().zip(*expected).position(|(a, b)| a != b);
            let around = |bytes: &[u8]| at.map(|at| bytes[at..bytes.len().min(at + 8)].to_vec());
            format!(
                "{} bytes for {}; first difference at {at:?}: {:?} for {:?}",
                real.len(),
                expected.len(),
                around(real),
                around(expected)
            )
        }
        (real, expected) => {
            format!("{:?} for {:?}", real.as_ref().map(Vec::len), expected.map(<[u8]>::len))
        }
    }
}

/// Lists a directory from cookie to cookie, `each` entries at a time.
pub fn list(
    volume: &RemoteVolume,
    ino: InodeNo,
    each: usize,
    plus: bool,
) -> Result<BTreeMap<Vec<u8>, InodeNo>, Status> {
    let mut entries = BTreeMap::new();
    let mut cookie = 0;
    loop {
        let from = cookie;
        let (mut taken, mut refused) = (0, false);
        let mut take = |entry: &DirEntry<'_>| {
            if taken == each {
                refused = true;
                return false;
            }
            taken += 1;
            assert!(entry.cookie > cookie, "cookies only grow");
            cookie = entry.cookie;
            assert_eq!(entry.attr.is_some(), plus);
            if let Some(attr) = entry.attr {
                assert_eq!((attr.ino, attr.kind), (entry.ino, entry.kind));
            }
            let twice = entries.insert(entry.name.to_vec(), entry.ino);
            assert_eq!(twice, None, "listed twice");
            true
        };
        status(volume.read_dir(&CALLER, ino, from, plus, &mut take))?;
        if !refused {
            return Ok(entries);
        }
    }
}

/// Walks `steps` on the site and on a model.
pub fn walk<S: Site>(site: S, steps: &[(usize, Step)]) -> Reached {
    let mut walk = Walk::new(site);
    walk.go(steps, COMPARE_EVERY);
    walk.end()
}

impl<S: Site> Walk<S> {
    /// Walks `steps`, and compares everything after each `compare_every` steps.
    pub fn go(&mut self, steps: &[(usize, Step)], compare_every: usize) {
        for (index, (client, step)) in steps.iter().enumerate() {
            self.run(*client, step);
            // A later step may hide what an earlier one broke.
            if index % compare_every == 0 {
                self.compare();
            }
        }
        self.compare();
    }

    /// A last restart of the server; then closes everything and compares.
    pub fn end(&mut self) -> Reached {
        self.site.calm();
        self.run(0, &Step::Restart);
        while !self.handles.is_empty() {
            self.close(0);
        }
        self.compare();
        let mut reached = self.reached;
        for index in 0..self.site.clients() {
            reached.add(&self.site.client(index).figures());
        }
        reached
    }
}
