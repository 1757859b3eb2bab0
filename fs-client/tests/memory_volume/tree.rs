//! Inodes and directories of the in-memory volume.

use super::file_pages::FilePages;
use cuttlefs_client::file::volume::{Caller, FsError};
use cuttlefs_common::attr::{
    ACCESS_ACL_XATTR, Attr, CAPABILITY_XATTR, DEFAULT_ACL_XATTR, FileKind, InodeFlags, Timestamp,
};
use cuttlefs_common::ids::{InodeNo, NAME_MAX, PAGE_SIZE_U64};
use cuttlefs_common::rpc::{NewNode, RenameMode};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Clock, SystemClock};
use std::collections::{BTreeMap, HashMap};

pub fn now() -> Timestamp {
    SystemClock::new().now()
}

pub enum Body {
    File(FilePages),
    Directory(Directory),
    Symlink(Vec<u8>),
    Special,
}

/// Entries by name, and by cookie for listings that go on while the directory changes.
#[derive(Default)]
pub struct Directory {
    by_name: BTreeMap<Vec<u8>, (u64, InodeNo)>,
    by_cookie: BTreeMap<u64, Vec<u8>>,
}

pub struct Node {
    pub attr: Attr,
    pub body: Body,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub opens: u32,
    /// For a directory: its parent directory.
    parent: InodeNo,
}

impl Node {
    /// Sets the chattr marks of the attributes that the node has.
    pub fn mark(&mut self) {
        for (name, mark) in [
            (ACCESS_ACL_XATTR, InodeFlags::ACCESS_ACL),
            (DEFAULT_ACL_XATTR, InodeFlags::DEFAULT_ACL),
            (CAPABILITY_XATTR, InodeFlags::CAPABILITY),
        ] {
            self.attr.flags = self.attr.flags.with(mark, self.xattrs.contains_key(name));
        }
    }
}

pub struct Tree {
    root: InodeNo,
    nodes: HashMap<InodeNo, Node>,
    next_ino: u64,
    next_cookie: u64,
}

impl Tree {
    pub fn new(root: InodeNo) -> Self {
        let mut tree = Self { root, nodes: HashMap::new(), next_ino: root.0 + 1, next_cookie: 3 };
        tree.insert(root, root, FileKind::Directory, 0o755, (0, 0), Body::Directory(Directory::default()));
        tree
    }

    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    pub fn pages(&self) -> u64 {
        self.nodes.values().map(|node| node.attr.allocated_bytes / PAGE_SIZE_U64).sum()
    }

    pub fn node(&self, ino: InodeNo) -> Result<&Node, FsError> {
        self.nodes.get(&ino).ok_or(Status::Stale.into())
    }

    pub fn node_mut(&mut self, ino: InodeNo) -> Result<&mut Node, FsError> {
        self.nodes.get_mut(&ino).ok_or(Status::Stale.into())
    }

    pub fn file(&self, ino: InodeNo) -> Result<&FilePages, FsError> {
        match &self.node(ino)?.body {
            Body::File(pages) => Ok(pages),
            Body::Directory(_) => Err(Status::IsDirectory.into()),
            _ => Err(Status::Invalid.into()),
        }
    }

    fn directory(&self, ino: InodeNo) -> Result<&Directory, FsError> {
        match &self.node(ino)?.body {
            Body::Directory(directory) => Ok(directory),
            _ => Err(Status::NotDirectory.into()),
        }
    }

    pub fn find(&self, parent: InodeNo, name: &[u8]) -> Result<Option<InodeNo>, FsError> {
        if name.len() > NAME_MAX {
            return Err(Status::NameTooLong.into());
        }
        let directory = self.directory(parent)?;
        if name == b".." {
            return Ok(Some(self.node(parent)?.parent));
        }
        Ok(directory.by_name.get(name).map(|(_, ino)| *ino))
    }

    pub fn list(
        &self,
        ino: InodeNo,
        after: u64,
    ) -> Result<impl Iterator<Item = (u64, &[u8], InodeNo)>, FsError> {
        let directory = self.directory(ino)?;
        Ok(directory
            .by_cookie
            .range(after + 1..)
            .map(|(cookie, name)| (*cookie, name.as_slice(), directory.by_name[name].1)))
    }

    pub fn make(
        &mut self,
        caller: &Caller,
        parent: InodeNo,
        name: &[u8],
        node: NewNode<'_>,
        mode: u16,
    ) -> Result<Attr, FsError> {
        self.may_add(parent, name)?;
        let ino = self.make_inode(caller, parent, node, mode)?;
        self.add_name(parent, name, ino)?;
        Ok(self.node(ino)?.attr)
    }

    /// Makes a file without a name.
    pub fn make_nameless(&mut self, caller: &Caller, parent: InodeNo, mode: u16) -> Result<InodeNo, FsError> {
        self.directory(parent)?;
        let ino = self.make_inode(caller, parent, NewNode::File, mode)?;
        self.node_mut(ino)?.attr.nlink = 0;
        Ok(ino)
    }

    fn make_inode(
        &mut self,
        caller: &Caller,
        parent: InodeNo,
        node: NewNode<'_>,
        mode: u16,
    ) -> Result<InodeNo, FsError> {
        let above = self.node(parent)?.attr;
        let (kind, body, rdev) = match node {
            NewNode::File => (FileKind::File, Body::File(FilePages::default()), 0),
            NewNode::Directory => (FileKind::Directory, Body::Directory(Directory::default()), 0),
            NewNode::Symlink(target) => (FileKind::Symlink, Body::Symlink(target.to_vec()), 0),
            NewNode::Special { kind, rdev } => (kind, Body::Special, rdev),
        };
        // inode(7): a set-group-ID directory gives its group to new inodes in it, and the bit to new directories.
        let set_gid = above.mode & 0o2000;
        let gid = if set_gid != 0 { above.gid } else { caller.gid };
        let mode = mode & !caller.umask;
        let mode = if kind == FileKind::Directory { mode | set_gid } else { mode };
        let ino = InodeNo(self.next_ino);
        self.next_ino += 1;
        self.insert(ino, parent, kind, mode, (caller.uid, gid), body);
        self.node_mut(ino)?.attr.rdev = rdev;
        Ok(ino)
    }

    pub fn link(&mut self, ino: InodeNo, parent: InodeNo, name: &[u8]) -> Result<Attr, FsError> {
        self.may_add(parent, name)?;
        if self.node(ino)?.attr.kind == FileKind::Directory {
            return Err(Status::NotPermitted.into());
        }
        let attr = &mut self.node_mut(ino)?.attr;
        attr.nlink += 1;
        attr.ctime = now();
        self.add_name(parent, name, ino)?;
        Ok(self.node(ino)?.attr)
    }

    pub fn remove(&mut self, parent: InodeNo, name: &[u8], directory: bool) -> Result<(), FsError> {
        let ino = self.find(parent, name)?.ok_or(Status::NotFound)?;
        match (&self.node(ino)?.body, directory) {
            (Body::Directory(_), false) => return Err(Status::IsDirectory.into()),
            (Body::Directory(entries), true) if !entries.by_name.is_empty() => {
                return Err(Status::NotEmpty.into());
            }
            (Body::Directory(_), true) | (_, false) => {}
            (_, true) => return Err(Status::NotDirectory.into()),
        }
        self.remove_name(parent, name)?;
        self.drop_link(ino)
    }

    pub fn rename(
        &mut self,
        caller: &Caller,
        parent: InodeNo,
        name: &[u8],
        new_parent: InodeNo,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<(), FsError> {
        let ino = self.find(parent, name)?.ok_or(Status::NotFound)?;
        let target = self.find(new_parent, new_name)?;
        let is_directory = self.node(ino)?.attr.kind == FileKind::Directory;
        if is_directory && self.is_below(new_parent, ino)? {
            return Err(Status::Invalid.into());
        }
        match (target, mode) {
            (Some(_), RenameMode::NoReplace | RenameMode::NoReplaceWhiteout) => {
                return Err(Status::Exists.into());
            }
            (None, RenameMode::Exchange) => return Err(Status::NotFound.into()),
            (Some(target), _) if target == ino => return Ok(()),
            (Some(target), RenameMode::Exchange) => {
                let target_is_directory = self.node(target)?.attr.kind == FileKind::Directory;
                if target_is_directory && self.is_below(parent, target)? {
                    return Err(Status::Invalid.into());
                }
                self.remove_name(parent, name)?;
                self.remove_name(new_parent, new_name)?;
                self.add_name(parent, name, target)?;
                self.node_mut(target)?.attr.ctime = now();
            }
            (Some(target), RenameMode::Replace | RenameMode::Whiteout) => {
                match (&self.node(target)?.body, is_directory) {
                    (Body::Directory(entries), true) if !entries.by_name.is_empty() => {
                        return Err(Status::NotEmpty.into());
                    }
                    (Body::Directory(_), false) => return Err(Status::IsDirectory.into()),
                    (Body::Directory(_), true) | (_, false) => {}
                    (_, true) => return Err(Status::NotDirectory.into()),
                }
                self.remove_name(new_parent, new_name)?;
                self.drop_link(target)?;
                self.remove_name(parent, name)?;
            }
            (None, _) => self.remove_name(parent, name)?,
        }
        if matches!(mode, RenameMode::Whiteout | RenameMode::NoReplaceWhiteout) {
            let whiteout = NewNode::Special { kind: FileKind::CharDevice, rdev: 0 };
            self.make(caller, parent, name, whiteout, 0)?;
        }
        self.add_name(new_parent, new_name, ino)?;
        self.node_mut(ino)?.attr.ctime = now();
        Ok(())
    }

    pub fn close(&mut self, ino: InodeNo) {
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.opens -= 1;
            self.forget_if_gone(ino);
        }
    }

    fn is_below(&self, mut ino: InodeNo, above: InodeNo) -> Result<bool, FsError> {
        while ino != above {
            if ino == self.root {
                return Ok(false);
            }
            ino = self.node(ino)?.parent;
        }
        Ok(true)
    }

    fn may_add(&self, parent: InodeNo, name: &[u8]) -> Result<(), FsError> {
        match self.find(parent, name)? {
            Some(_) => Err(Status::Exists.into()),
            // A removed directory that is still open takes no new names.
            None if self.node(parent)?.attr.nlink == 0 => Err(Status::NotFound.into()),
            None => Ok(()),
        }
    }

    fn insert(
        &mut self,
        ino: InodeNo,
        parent: InodeNo,
        kind: FileKind,
        mode: u16,
        owner: (u32, u32),
        body: Body,
    ) {
        let time = now();
        let size = match &body {
            Body::Symlink(target) => target.len() as u64,
            Body::Directory(_) => PAGE_SIZE_U64,
            _ => 0,
        };
        let attr = Attr {
            ino,
            kind,
            mode,
            nlink: if kind == FileKind::Directory { 2 } else { 1 },
            uid: owner.0,
            gid: owner.1,
            rdev: 0,
            size,
            allocated_bytes: 0,
            atime: time,
            mtime: time,
            ctime: time,
            btime: time,
            change: 1,
            flags: InodeFlags::default(),
        };
        self.nodes.insert(ino, Node { attr, body, xattrs: BTreeMap::new(), opens: 0, parent });
    }

    fn add_name(&mut self, parent: InodeNo, name: &[u8], ino: InodeNo) -> Result<(), FsError> {
        let is_directory = self.node(ino)?.attr.kind == FileKind::Directory;
        if is_directory {
            self.node_mut(ino)?.parent = parent;
        }
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        self.change_directory(parent, |directory, attr| {
            directory.by_name.insert(name.to_vec(), (cookie, ino));
            directory.by_cookie.insert(cookie, name.to_vec());
            attr.nlink += u32::from(is_directory);
        })
    }

    fn remove_name(&mut self, parent: InodeNo, name: &[u8]) -> Result<(), FsError> {
        let ino = self.find(parent, name)?.ok_or(Status::NotFound)?;
        let is_directory = self.node(ino)?.attr.kind == FileKind::Directory;
        self.change_directory(parent, |directory, attr| {
            if let Some((cookie, _)) = directory.by_name.remove(name) {
                directory.by_cookie.remove(&cookie);
            }
            attr.nlink -= u32::from(is_directory);
        })
    }

    fn change_directory(
        &mut self,
        ino: InodeNo,
        change: impl FnOnce(&mut Directory, &mut Attr),
    ) -> Result<(), FsError> {
        let node = self.node_mut(ino)?;
        let Body::Directory(directory) = &mut node.body else {
            return Err(Status::NotDirectory.into());
        };
        change(directory, &mut node.attr);
        node.attr.mtime = now();
        node.attr.ctime = node.attr.mtime;
        node.attr.change += 1;
        Ok(())
    }

    fn drop_link(&mut self, ino: InodeNo) -> Result<(), FsError> {
        let attr = &mut self.node_mut(ino)?.attr;
        attr.nlink = if attr.kind == FileKind::Directory { 0 } else { attr.nlink - 1 };
        attr.ctime = now();
        self.forget_if_gone(ino);
        Ok(())
    }

    fn forget_if_gone(&mut self, ino: InodeNo) {
        if self.nodes.get(&ino).is_some_and(|node| node.attr.nlink == 0 && node.opens == 0) {
            self.nodes.remove(&ino);
        }
    }
}
