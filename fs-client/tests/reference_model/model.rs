//! A POSIX file system of maps: small enough to be seen to be right.
//!
//! A file is its bytes and the set of pages it holds, each with whether it has bytes or is only reserved. Link counts
//! are counted, never kept. Times are known as "not before", until somebody looked.

use cuttlefs_common::attr::{Attr, FileKind, Timestamp};
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE_U64};
use cuttlefs_common::rpc::{Allocate, RenameMode, SeekFor};
use cuttlefs_common::status::Status;
use std::collections::BTreeMap;

/// Most clients of a walk.
pub const MOST_CLIENTS: usize = 4;
pub const UID: u32 = 1000;
pub const GID: u32 = 1000;

/// A time as the model knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    Exactly(Timestamp),
    NotBefore(Timestamp),
}

impl Time {
    /// Whether it was that, as of `now`; from now on it must stay that.
    pub fn check(&mut self, real: Timestamp, now: Timestamp) -> bool {
        let fits = match *self {
            Self::Exactly(time) => real == time,
            Self::NotBefore(time) => time <= real && real <= now,
        };
        *self = Self::Exactly(real);
        fits
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    pub kind: FileKind,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    pub mtime: Time,
    pub ctime: Time,
    pub entries: BTreeMap<Vec<u8>, InodeNo>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub target: Vec<u8>,
    pub bytes: Vec<u8>,
    /// Pages the file holds: whether they have bytes.
    pub pages: BTreeMap<u64, bool>,
    /// Handles on it.
    pub opens: usize,
    /// Clients whose kernel's pages somebody else made stale.
    pub stale_for: [bool; MOST_CLIENTS],
    /// Clients that have changed its contents since they synced.
    pub unsynced_by: [bool; MOST_CLIENTS],
}

fn pages_over(offset: u64, end: u64) -> std::ops::Range<u64> {
    offset / PAGE_SIZE_U64..end.div_ceil(PAGE_SIZE_U64)
}

impl Node {
    /// As chown(2) has it on Linux. The set-group-id bit of what its group may not run stays for who is in that group.
    pub fn chown_drops_set_ids(&mut self) {
        if self.kind != FileKind::Directory {
            let stays = self.mode & 0o010 == 0 && self.gid == GID;
            self.mode &= if stays { 0o3777 } else { 0o1777 };
        }
    }

    fn new(kind: FileKind, mode: u16, gid: u32, now: Timestamp) -> Self {
        let time = Time::NotBefore(now);
        Self {
            kind,
            mode,
            uid: UID,
            gid,
            rdev: 0,
            mtime: time,
            ctime: time,
            entries: BTreeMap::new(),
            xattrs: BTreeMap::new(),
            target: Vec::new(),
            bytes: Vec::new(),
            pages: BTreeMap::new(),
            opens: 0,
            stale_for: [false; MOST_CLIENTS],
            unsynced_by: [false; MOST_CLIENTS],
        }
    }

    pub fn touch(&mut self, now: Timestamp) {
        (self.mtime, self.ctime) = (Time::NotBefore(now), Time::NotBefore(now));
    }

    pub fn size(&self) -> u64 {
        match self.kind {
            FileKind::Directory => PAGE_SIZE_U64,
            FileKind::Symlink => self.target.len() as u64,
            _ => self.bytes.len() as u64,
        }
    }

    /// Pages a write there would have to take.
    pub fn missing(&self, offset: u64, end: u64) -> u64 {
        pages_over(offset, end).filter(|page| !self.pages.contains_key(page)).count() as u64
    }

    /// Whether it holds pages without bytes past such a length.
    pub fn reserves_past(&self, size: u64) -> bool {
        self.pages.range(size.div_ceil(PAGE_SIZE_U64)..).any(|(_, has_bytes)| !has_bytes)
    }

    /// Whether zeros in a range leave a page at its ends with bytes, all of which are zero.
    pub fn empties(&self, offset: u64, end: u64) -> bool {
        [offset, end].into_iter().filter(|edge| !edge.is_multiple_of(PAGE_SIZE_U64)).any(|edge| {
            let page = edge / PAGE_SIZE_U64;
            let start = page * PAGE_SIZE_U64;
            let mut bytes = (start..).zip(self.read(start, PAGE_SIZE_U64));
            self.pages.get(&page) == Some(&true)
                && bytes.all(|(at, byte)| *byte == 0 || (offset..end).contains(&at))
        })
    }

    fn grow(&mut self, size: u64) {
        if size > self.bytes.len() as u64 {
            self.bytes.resize(size as usize, 0);
        }
    }

    pub fn read(&self, offset: u64, len: u64) -> &[u8] {
        let size = self.bytes.len() as u64;
        &self.bytes[offset.min(size) as usize..(offset + len).min(size) as usize]
    }

    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let end = offset + bytes.len() as u64;
        self.grow(end);
        self.bytes[offset as usize..end as usize].copy_from_slice(bytes);
        self.pages.extend(pages_over(offset, end).map(|page| (page, true)));
    }

    pub fn truncate(&mut self, size: u64) {
        if size < self.bytes.len() as u64 {
            self.pages.retain(|page, _| *page < size.div_ceil(PAGE_SIZE_U64));
        }
        self.bytes.resize(size as usize, 0);
    }

    pub fn allocate(&mut self, offset: u64, len: u64, how: Allocate) {
        let (end, size) = (offset + len, self.bytes.len() as u64);
        if !matches!(how, Allocate::Reserve { .. }) && offset < size {
            self.bytes[offset as usize..end.min(size) as usize].fill(0);
        }
        match how {
            Allocate::PunchHole => {
                let past_the_end = end >= size;
                let whole_end = if past_the_end { end.div_ceil(PAGE_SIZE_U64) } else { end / PAGE_SIZE_U64 };
                let whole = offset.div_ceil(PAGE_SIZE_U64)..whole_end;
                self.pages.retain(|page, _| !whole.contains(page));
            }
            Allocate::Reserve { keep_size } | Allocate::ZeroRange { keep_size } => {
                if matches!(how, Allocate::ZeroRange { .. }) {
                    let whole = offset.div_ceil(PAGE_SIZE_U64)..end / PAGE_SIZE_U64;
                    self.pages.extend(whole.map(|page| (page, false)));
                }
                for page in pages_over(offset, end) {
                    self.pages.entry(page).or_insert(false);
                }
                if !keep_size {
                    self.grow(end);
                }
            }
        }
    }

    pub fn seek(&self, offset: u64, seek: SeekFor) -> Result<u64, Status> {
        let size = self.bytes.len() as u64;
        let mut at = offset;
        while at < size {
            let has_bytes = self.pages.get(&(at / PAGE_SIZE_U64)).copied().unwrap_or(false);
            if has_bytes == (seek == SeekFor::Data) {
                return Ok(at);
            }
            at = (at / PAGE_SIZE_U64 + 1) * PAGE_SIZE_U64;
        }
        if offset < size && seek == SeekFor::Hole { Ok(size) } else { Err(Status::NoSuchOffset) }
    }
}

/// The model.
#[derive(Clone, PartialEq)]
pub struct Model {
    pub nodes: BTreeMap<InodeNo, Node>,
    /// In the order in which they were made; the first is the root.
    pub made: Vec<InodeNo>,
    pub pool_pages: u64,
    /// Not later than the server's time when the running operation began.
    pub now: Timestamp,
}

impl Model {
    pub fn new(root: &Attr, pool_pages: u64, now: Timestamp) -> Self {
        let mut node = Node::new(FileKind::Directory, root.mode, root.gid, now);
        (node.uid, node.mtime, node.ctime) = (root.uid, Time::Exactly(root.mtime), Time::Exactly(root.ctime));
        Self { nodes: BTreeMap::from([(root.ino, node)]), made: vec![root.ino], pool_pages, now }
    }

    pub fn free_pages(&self) -> u64 {
        self.pool_pages - self.nodes.values().map(|node| node.pages.len() as u64).sum::<u64>()
    }

    /// The inode of an index; beyond those that were made, one that never was.
    pub fn pick(&self, index: usize) -> InodeNo {
        self.made.get(index).copied().unwrap_or(InodeNo(u64::MAX - index as u64))
    }

    pub fn node(&self, ino: InodeNo) -> Result<&Node, Status> {
        self.nodes.get(&ino).ok_or(Status::Stale)
    }

    pub fn node_mut(&mut self, ino: InodeNo) -> &mut Node {
        self.nodes.get_mut(&ino).expect("the model knows it")
    }

    pub fn nlink(&self, ino: InodeNo) -> u32 {
        let named = |node: &Node| node.entries.values().filter(|named| **named == ino).count() as u32;
        let names = self.nodes.values().map(named).sum::<u32>() + u32::from(ino == InodeNo::ROOT);
        let node = &self.nodes[&ino];
        if node.kind != FileKind::Directory || names == 0 {
            return names;
        }
        let is_directory = |child: &&InodeNo| self.nodes[*child].kind == FileKind::Directory;
        2 + node.entries.values().filter(is_directory).count() as u32
    }

    pub fn directory(&self, ino: InodeNo) -> Result<&Node, Status> {
        let node = self.node(ino)?;
        if node.kind == FileKind::Directory { Ok(node) } else { Err(Status::NotDirectory) }
    }

    /// Checks parent and name as every operation on a name does.
    pub fn place(&self, parent: InodeNo, name: &[u8]) -> Result<Option<InodeNo>, Status> {
        check_name(name)?;
        Ok(self.directory(parent)?.entries.get(name).copied())
    }

    pub fn existing(&self, parent: InodeNo, name: &[u8]) -> Result<InodeNo, Status> {
        self.place(parent, name)?.ok_or(Status::NotFound)
    }

    /// An inode that just came to be.
    pub fn add(
        &mut self,
        parent: InodeNo,
        name: &[u8],
        ino: InodeNo,
        kind: FileKind,
        mode: u16,
    ) -> &mut Node {
        self.add_nameless(parent, ino, kind, mode);
        self.set_entry(parent, name, ino);
        self.node_mut(ino)
    }

    pub fn add_nameless(&mut self, parent: InodeNo, ino: InodeNo, kind: FileKind, mode: u16) {
        let directory = &self.nodes[&parent];
        let inherits = directory.mode & 0o2000 != 0;
        let gid = if inherits { directory.gid } else { GID };
        let mode = match kind {
            FileKind::Directory => mode & 0o1777 | if inherits { 0o2000 } else { 0 },
            FileKind::Symlink => 0o777,
            _ => mode,
        };
        assert!(!self.made.contains(&ino), "inode numbers are never reused");
        self.nodes.insert(ino, Node::new(kind, mode, gid, self.now));
        self.made.push(ino);
    }

    fn set_entry(&mut self, parent: InodeNo, name: &[u8], ino: InodeNo) {
        let now = self.now;
        let node = self.node_mut(parent);
        node.entries.insert(name.to_vec(), ino);
        node.touch(now);
    }

    /// An inode may have lost its last name, or its last handle.
    pub fn settle(&mut self, ino: InodeNo) {
        if self.nlink(ino) == 0 && self.nodes[&ino].opens == 0 {
            self.nodes.remove(&ino);
        }
    }

    fn changed(&mut self, ino: InodeNo) {
        let now = self.now;
        self.node_mut(ino).ctime = Time::NotBefore(now);
    }

    /// The contents changed by a client's doing.
    pub fn contents_changed(&mut self, ino: InodeNo, by: usize) {
        let now = self.now;
        let node = self.node_mut(ino);
        node.touch(now);
        for (client, stale) in node.stale_for.iter_mut().enumerate() {
            *stale |= client != by;
        }
        node.unsynced_by[by] = true;
    }

    /// All that a client has changed is durable.
    pub fn synced_by(&mut self, client: usize) {
        self.nodes.values_mut().for_each(|node| node.unsynced_by[client] = false);
    }

    /// The server was replaced: files may have been written again by clients, later than they were. What time they have now
    /// is looked at anew.
    pub fn written_again(&mut self) {
        for node in self.nodes.values_mut().filter(|node| node.kind == FileKind::File) {
            for time in [&mut node.mtime, &mut node.ctime] {
                *time = Time::NotBefore(Timestamp { secs: i64::MIN, nanos: 0 });
            }
        }
    }

    /// A server was lost that forgets what was not synced, also that there was something: where that is not written again, since
    /// it was being cut off, a file is again what a client saw.
    pub fn may_be_as_seen(&mut self) {
        for node in self.nodes.values_mut().filter(|node| node.unsynced_by.contains(&true)) {
            node.stale_for = Default::default();
        }
    }

    pub fn link(&mut self, ino: InodeNo, parent: InodeNo, name: &[u8]) -> Result<(), Status> {
        let taken = self.place(parent, name)?;
        let node = self.node(ino)?;
        match taken {
            Some(_) => return Err(Status::Exists),
            None if node.kind == FileKind::Directory => return Err(Status::NotPermitted),
            // Without a name it is there because somebody has it open.
            None => {}
        }
        self.set_entry(parent, name, ino);
        self.changed(ino);
        Ok(())
    }

    pub fn remove(&mut self, parent: InodeNo, name: &[u8], directory: bool) -> Result<(), Status> {
        let ino = self.existing(parent, name)?;
        let node = &self.nodes[&ino];
        match (directory, node.kind == FileKind::Directory) {
            (false, true) => return Err(Status::IsDirectory),
            (true, false) => return Err(Status::NotDirectory),
            (true, true) if !node.entries.is_empty() => return Err(Status::NotEmpty),
            _ => {}
        }
        let now = self.now;
        let node = self.node_mut(parent);
        node.entries.remove(name);
        node.touch(now);
        self.changed(ino);
        self.settle(ino);
        Ok(())
    }

    fn is_below(&self, ino: InodeNo, ancestor: InodeNo) -> bool {
        ino == ancestor || self.nodes[&ancestor].entries.values().any(|child| self.is_below(ino, *child))
    }

    pub fn rename(
        &mut self,
        (parent, name): (InodeNo, &[u8]),
        (new_parent, new_name): (InodeNo, &[u8]),
        mode: RenameMode,
    ) -> Result<(), Status> {
        check_name(name)?;
        check_name(new_name)?;
        self.directory(parent)?;
        self.directory(new_parent)?;
        let source = self.existing(parent, name)?;
        let target = self.place(new_parent, new_name)?;
        match (mode, target) {
            (RenameMode::NoReplace, Some(_)) => return Err(Status::Exists),
            (RenameMode::Exchange, None) => return Err(Status::NotFound),
            _ => {}
        }
        if self.is_below(new_parent, source) {
            return Err(Status::Invalid);
        }
        if target == Some(source) {
            return Ok(());
        }
        let is_directory = |ino: InodeNo| self.nodes[&ino].kind == FileKind::Directory;
        if let Some(target) = target {
            match (mode, is_directory(source), is_directory(target)) {
                (RenameMode::Exchange, ..) if self.is_below(parent, target) => return Err(Status::Invalid),
                (RenameMode::Exchange, ..) => {}
                (_, true, false) => return Err(Status::NotDirectory),
                (_, false, true) => return Err(Status::IsDirectory),
                (_, true, true) if !self.nodes[&target].entries.is_empty() => return Err(Status::NotEmpty),
                _ => {}
            }
        }
        self.node_mut(parent).entries.remove(name);
        if let (Some(target), RenameMode::Exchange) = (target, mode) {
            self.set_entry(parent, name, target);
        }
        self.set_entry(new_parent, new_name, source);
        let now = self.now;
        self.node_mut(parent).touch(now);
        self.changed(source);
        if let Some(target) = target {
            self.changed(target);
            self.settle(target);
        }
        Ok(())
    }
}

pub fn check_name(name: &[u8]) -> Result<(), Status> {
    match name {
        b"" => Err(Status::NotFound),
        _ if name.len() > 255 => Err(Status::NameTooLong),
        b"." | b".." => Err(Status::Invalid),
        _ if name.contains(&b'/') => Err(Status::Invalid),
        _ => Ok(()),
    }
}
