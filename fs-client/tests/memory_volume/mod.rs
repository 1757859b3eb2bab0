//! An in-memory `Volume` with the semantics that a server must have, small enough to be checked by reading it.
//!
//! It is a test double for the FUSE edge, and no model of the real server: it has one lock, no sessions, and nothing durable. The kernel checks
//! permissions here too. This volume does what the kernel leaves to a server: set-group-id directories, link counts, times, files without a name.

mod file_pages;
pub mod mount;
mod tree;

use cuttlefs_client::file::volume::{
    Away, Caller, Condition, Copied, FsError, Handle, OpenFile, OpenHow, UnsyncedChanges, Volume, WriteHow,
    Written,
};
use cuttlefs_common::attr::{Attr, CAPABILITY_XATTR, FileKind, InodeFlags, SetAttr, SetTime};
use cuttlefs_common::ids::{InodeNo, MAX_FILE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::rpc::{Allocate, DirEntry, NewNode, RenameMode, SeekFor, Space, XattrMode};
use cuttlefs_common::status::Status;
use file_pages::FilePages;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tree::{Body, Tree, now};

/// The size of the pool that the volume reports, in pages.
const POOL_PAGES: u64 = 1 << 20;

/// An in-memory volume.
pub struct MemoryVolume {
    root: InodeNo,
    state: Mutex<State>,
    /// Whether the server is away: reads wait until the mount is shut down.
    stalled: AtomicBool,
    /// Whether answers from which the kernel learns the end of a file come late.
    ends_late: AtomicBool,
    /// Whether the server is away and only the mount has some changes.
    stranded: AtomicBool,
    ended: Condvar,
    /// Notified when other operations are held than before.
    changed: Condvar,
}

struct State {
    tree: Tree,
    handles: HashMap<u64, (InodeNo, OpenHow)>,
    next_handle: u64,
    calls: BTreeMap<&'static str, u64>,
    shut_down: bool,
    /// Operations of this name wait before they do anything.
    held: Option<&'static str>,
    /// All calls wait except the first one of each operation.
    vanished: bool,
}

impl MemoryVolume {
    /// An empty volume whose root directory has this inode number.
    pub fn new(root: InodeNo) -> Self {
        let state = State {
            tree: Tree::new(root),
            handles: HashMap::new(),
            next_handle: 1,
            calls: BTreeMap::new(),
            shut_down: false,
            held: None,
            vanished: false,
        };
        let (ended, changed) = (Condvar::new(), Condvar::new());
        Self {
            root,
            state: Mutex::new(state),
            stalled: AtomicBool::new(false),
            ends_late: AtomicBool::new(false),
            stranded: AtomicBool::new(false),
            ended,
            changed,
        }
    }

    /// From now on calls of this operation wait, as if the server were away. Calls of other operations held before go on.
    pub fn hold(&self, operation: Option<&'static str>) {
        self.state.lock().held = operation;
        self.changed.notify_all();
    }

    /// From now on the server answers the first call of each operation, and no other.
    pub fn vanish(&self) {
        self.state.lock().vanished = true;
    }

    /// How often an operation was called.
    pub fn calls(&self, operation: &str) -> u64 {
        self.state.lock().calls.get(operation).copied().unwrap_or(0)
    }

    /// From now on the server is away for reads.
    pub fn stall_reads(&self) {
        self.stalled.store(true, Ordering::Release);
    }

    /// From now on answers from which the kernel learns the end of a file come late, after answers to later requests: to reads with the last bytes
    /// of a file, and to changes of its length.
    pub fn tell_ends_late(&self) {
        self.ends_late.store(true, Ordering::Release);
    }

    fn tell_end_late(&self) {
        if self.ends_late.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// From now on the server is away, the mount has unsynced changes, and no sync is answered.
    pub fn strand(&self) {
        self.stranded.store(true, Ordering::Release);
    }

    /// The number of open files and directories.
    pub fn open_handles(&self) -> usize {
        self.state.lock().handles.len()
    }

    /// The number of inodes, with the root.
    pub fn inodes(&self) -> usize {
        self.state.lock().tree.len()
    }

    /// Whether the mount has ended.
    pub fn is_shut_down(&self) -> bool {
        self.state.lock().shut_down
    }

    fn enter(&self, operation: &'static str) -> parking_lot::MutexGuard<'_, State> {
        let mut state = self.state.lock();
        let calls = state.calls.entry(operation).or_default();
        *calls += 1;
        let is_first = *calls == 1;
        self.changed.wait_while(&mut state, |state| {
            let waits = state.held == Some(operation) || (state.vanished && !is_first);
            waits && !state.shut_down
        });
        state
    }
}

impl State {
    fn open(&mut self, ino: InodeNo, how: OpenHow) -> Result<OpenFile, FsError> {
        if how.truncate {
            self.resize(ino, 0)?;
        }
        self.tree.file(ino)?;
        let node = self.tree.node_mut(ino)?;
        node.opens += 1;
        let change = node.attr.change;
        let handle = self.next_handle;
        self.next_handle += 1;
        self.handles.insert(handle, (ino, how));
        Ok(OpenFile { handle: Handle(handle), change })
    }

    /// Takes set-id bits and capabilities away from the file, if the caller's change of contents must do that.
    fn drop_privileges(&mut self, caller: &Caller, ino: InodeNo) -> Result<(), FsError> {
        let node = self.tree.node_mut(ino)?;
        if caller.drops_privileges {
            let runs_as_group = node.attr.mode & 0o010 != 0 || caller.gid != node.attr.gid;
            node.attr.mode &= if runs_as_group { !0o6000 } else { !0o4000 };
            node.xattrs.remove(CAPABILITY_XATTR);
            node.mark();
        }
        Ok(())
    }

    fn handle(&self, handle: Handle) -> Result<(InodeNo, OpenHow), FsError> {
        self.handles.get(&handle.0).copied().ok_or(FsError::BadHandle)
    }

    fn resize(&mut self, ino: InodeNo, size: u64) -> Result<(), FsError> {
        if size > MAX_FILE_SIZE {
            return Err(Status::TooLarge.into());
        }
        self.change_contents(ino, |pages, attr| {
            pages.resize(size);
            attr.size = size;
        })
    }

    fn change_contents(
        &mut self,
        ino: InodeNo,
        change: impl FnOnce(&mut FilePages, &mut Attr),
    ) -> Result<(), FsError> {
        let node = self.tree.node_mut(ino)?;
        let Body::File(pages) = &mut node.body else {
            return Err(not_a_file(node.attr.kind));
        };
        change(pages, &mut node.attr);
        node.attr.allocated_bytes = pages.count() * PAGE_SIZE_U64;
        node.attr.mtime = now();
        node.attr.ctime = node.attr.mtime;
        node.attr.change += 1;
        Ok(())
    }
}

fn not_a_file(kind: FileKind) -> FsError {
    match kind {
        FileKind::Directory => Status::IsDirectory.into(),
        _ => Status::Invalid.into(),
    }
}

fn range_end(offset: u64, len: u64) -> Result<u64, FsError> {
    offset.checked_add(len).filter(|end| *end <= MAX_FILE_SIZE).ok_or(Status::TooLarge.into())
}

impl Volume for MemoryVolume {
    fn root(&self) -> InodeNo {
        self.root
    }

    fn lookup(&self, _caller: &Caller, parent: InodeNo, name: &[u8]) -> Result<Attr, FsError> {
        let state = self.enter("lookup");
        let ino = state.tree.find(parent, name)?.ok_or(Status::NotFound)?;
        Ok(state.tree.node(ino)?.attr)
    }

    fn get_attr(&self, _caller: &Caller, ino: InodeNo) -> Result<Attr, FsError> {
        Ok(self.enter("get_attr").tree.node(ino)?.attr)
    }

    fn changes(&self, inos: &[InodeNo]) -> Result<Vec<Option<u64>>, FsError> {
        let state = self.enter("changes");
        Ok(inos.iter().map(|ino| state.tree.node(*ino).ok().map(|node| node.attr.change)).collect())
    }

    fn set_attr(&self, caller: &Caller, ino: InodeNo, set: SetAttr) -> Result<Attr, FsError> {
        let mut state = self.enter("set_attr");
        if let Some(size) = set.size {
            state.drop_privileges(caller, ino)?;
            state.resize(ino, size)?;
        }
        let attr = &mut state.tree.node_mut(ino)?.attr;
        let time = |set: SetTime| match set {
            SetTime::Now => now(),
            SetTime::At(time) => time,
        };
        attr.mode = set.mode.unwrap_or(attr.mode);
        attr.uid = set.uid.unwrap_or(attr.uid);
        attr.gid = set.gid.unwrap_or(attr.gid);
        attr.atime = set.atime.map_or(attr.atime, time);
        attr.mtime = set.mtime.map_or(attr.mtime, time);
        if let Some(flags) = set.flags {
            attr.flags = attr.flags.with(InodeFlags::SETTABLE, false).with(flags, true);
        }
        attr.ctime = set.ctime.unwrap_or_else(now);
        attr.change += 1;
        let attr = *attr;
        drop(state);
        if set.size.is_some() {
            self.tell_end_late();
        }
        Ok(attr)
    }

    fn make(
        &self,
        caller: &Caller,
        parent: InodeNo,
        name: &[u8],
        node: NewNode<'_>,
        mode: u16,
    ) -> Result<Attr, FsError> {
        self.enter("make").tree.make(caller, parent, name, node, mode)
    }

    fn create(
        &self,
        caller: &Caller,
        parent: InodeNo,
        name: &[u8],
        mode: u16,
        exclusive: bool,
        how: OpenHow,
    ) -> Result<(Attr, OpenFile), FsError> {
        let mut state = self.enter("create");
        let ino = match state.tree.find(parent, name)? {
            Some(_) if exclusive => return Err(Status::Exists.into()),
            Some(ino) => ino,
            None => state.tree.make(caller, parent, name, NewNode::File, mode)?.ino,
        };
        let opened = state.open(ino, how)?;
        Ok((state.tree.node(ino)?.attr, opened))
    }

    fn create_nameless(
        &self,
        caller: &Caller,
        parent: InodeNo,
        mode: u16,
        how: OpenHow,
    ) -> Result<(Attr, OpenFile), FsError> {
        let mut state = self.enter("create_nameless");
        let ino = state.tree.make_nameless(caller, parent, mode)?;
        let opened = state.open(ino, how)?;
        Ok((state.tree.node(ino)?.attr, opened))
    }

    fn link(&self, _caller: &Caller, ino: InodeNo, parent: InodeNo, name: &[u8]) -> Result<Attr, FsError> {
        self.enter("link").tree.link(ino, parent, name)
    }

    fn unlink(&self, _caller: &Caller, parent: InodeNo, name: &[u8]) -> Result<(), FsError> {
        self.enter("unlink").tree.remove(parent, name, false)
    }

    fn rmdir(&self, _caller: &Caller, parent: InodeNo, name: &[u8]) -> Result<(), FsError> {
        self.enter("rmdir").tree.remove(parent, name, true)
    }

    fn rename(
        &self,
        caller: &Caller,
        parent: InodeNo,
        name: &[u8],
        new_parent: InodeNo,
        new_name: &[u8],
        mode: RenameMode,
    ) -> Result<Attr, FsError> {
        let mut held = self.enter("rename");
        let moved = held.tree.find(parent, name)?.ok_or(Status::NotFound)?;
        held.tree.rename(caller, parent, name, new_parent, new_name, mode)?;
        Ok(held.tree.node(moved)?.attr)
    }

    fn read_link(&self, _caller: &Caller, ino: InodeNo) -> Result<Vec<u8>, FsError> {
        match &self.enter("read_link").tree.node(ino)?.body {
            Body::Symlink(target) => Ok(target.clone()),
            _ => Err(Status::Invalid.into()),
        }
    }

    fn open(&self, _caller: &Caller, ino: InodeNo, how: OpenHow) -> Result<OpenFile, FsError> {
        self.enter("open").open(ino, how)
    }

    fn read(
        &self,
        _caller: &Caller,
        handle: Handle,
        offset: u64,
        len: u32,
        take: &mut dyn FnMut(&[u8]),
    ) -> Result<(), FsError> {
        let mut state = self.enter("read");
        if self.stalled.load(Ordering::Acquire) {
            self.ended.wait_while(&mut state, |state| !state.shut_down);
            return Err(FsError::ShutDown);
        }
        let (ino, how) = state.handle(handle)?;
        if !how.read {
            return Err(Status::Denied.into());
        }
        let size = state.tree.node(ino)?.attr.size;
        let wanted = len;
        let len = size.saturating_sub(offset).min(u64::from(len));
        let bytes = state.tree.file(ino)?.read(offset, len as usize);
        // Reads that come at the same time may be answered in any order.
        drop(state);
        if !bytes.is_empty() && bytes.len() < wanted as usize {
            self.tell_end_late();
        }
        take(&bytes);
        Ok(())
    }

    fn write(&self, caller: &Caller, handle: Handle, offset: u64, bytes: &[u8]) -> Result<u32, FsError> {
        let (_, OpenHow { append, sync, .. }) = self.state.lock().handle(handle)?;
        self.write_how(caller, handle, offset, bytes, WriteHow { append, sync }).map(|written| written.len)
    }

    fn write_how(
        &self,
        caller: &Caller,
        handle: Handle,
        offset: u64,
        bytes: &[u8],
        how: WriteHow,
    ) -> Result<Written, FsError> {
        let mut state = self.enter("write");
        let (ino, opened) = state.handle(handle)?;
        if !opened.write {
            return Err(Status::Denied.into());
        }
        if how.sync {
            *state.calls.entry("durable_write").or_default() += 1;
        }
        state.drop_privileges(caller, ino)?;
        let offset = if how.append { state.tree.node(ino)?.attr.size } else { offset };
        let end = range_end(offset, bytes.len() as u64)?;
        state.change_contents(ino, |pages, attr| {
            pages.write(offset, bytes);
            attr.size = attr.size.max(end);
        })?;
        let change = state.tree.node(ino)?.attr.change;
        Ok(Written { offset, len: bytes.len() as u32, change })
    }

    fn fsync(&self, _caller: &Caller, handle: Handle, _contents_only: bool) -> Result<(), FsError> {
        self.enter("fsync").handle(handle).map(|_| ())
    }

    fn fsync_dir(&self, _caller: &Caller, ino: InodeNo) -> Result<(), FsError> {
        self.enter("fsync_dir").tree.node(ino).map(|_| ())
    }

    fn open_directory(&self, _caller: &Caller, ino: InodeNo) -> Result<Handle, FsError> {
        let mut state = self.enter("open_directory");
        state.tree.node_mut(ino)?.opens += 1;
        let handle = state.next_handle;
        state.next_handle += 1;
        state.handles.insert(handle, (ino, OpenHow::default()));
        Ok(Handle(handle))
    }

    fn release(&self, handle: Handle) {
        let mut state = self.enter("release");
        if let Some((ino, _)) = state.handles.remove(&handle.0) {
            state.tree.close(ino);
        }
    }

    fn read_dir(
        &self,
        _caller: &Caller,
        ino: InodeNo,
        cookie: u64,
        plus: bool,
        take: &mut dyn FnMut(&DirEntry<'_>) -> bool,
    ) -> Result<(), FsError> {
        let state = self.enter(if plus { "read_dir_plus" } else { "read_dir" });
        for (cookie, name, child) in state.tree.list(ino, cookie)? {
            let attr = state.tree.node(child)?.attr;
            let entry = DirEntry { cookie, ino: child, kind: attr.kind, name, attr: plus.then_some(attr) };
            if !take(&entry) {
                break;
            }
        }
        Ok(())
    }

    fn stat_fs(&self, _caller: &Caller) -> Result<Space, FsError> {
        let state = self.enter("stat_fs");
        let free_pages = POOL_PAGES - state.tree.pages();
        let inodes = state.tree.len() as u64;
        Ok(Space { pool_pages: POOL_PAGES, free_pages, inodes, free_inodes: free_pages })
    }

    fn get_xattr(&self, _caller: &Caller, ino: InodeNo, name: &[u8]) -> Result<Vec<u8>, FsError> {
        let state = self.enter("get_xattr");
        Ok(state.tree.node(ino)?.xattrs.get(name).ok_or(Status::NoAttribute)?.clone())
    }

    fn list_xattr(&self, _caller: &Caller, ino: InodeNo) -> Result<Vec<u8>, FsError> {
        let state = self.enter("list_xattr");
        Ok(state.tree.node(ino)?.xattrs.keys().flat_map(|name| name.iter().copied().chain([0])).collect())
    }

    fn set_xattr(
        &self,
        _caller: &Caller,
        ino: InodeNo,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<(), FsError> {
        let mut state = self.enter("set_xattr");
        let node = state.tree.node_mut(ino)?;
        match (mode, node.xattrs.contains_key(name)) {
            (XattrMode::Create, true) => return Err(Status::Exists.into()),
            (XattrMode::Replace, false) => return Err(Status::NoAttribute.into()),
            _ => {}
        }
        node.xattrs.insert(name.to_vec(), value.to_vec());
        node.mark();
        node.attr.ctime = now();
        Ok(())
    }

    fn remove_xattr(&self, _caller: &Caller, ino: InodeNo, name: &[u8]) -> Result<(), FsError> {
        let mut state = self.enter("remove_xattr");
        let node = state.tree.node_mut(ino)?;
        node.xattrs.remove(name).ok_or(Status::NoAttribute)?;
        node.mark();
        node.attr.ctime = now();
        Ok(())
    }

    fn allocate(
        &self,
        caller: &Caller,
        handle: Handle,
        offset: u64,
        len: u64,
        how: Allocate,
    ) -> Result<u64, FsError> {
        let mut state = self.enter("allocate");
        let (ino, opened) = state.handle(handle)?;
        if !opened.write {
            return Err(Status::Denied.into());
        }
        state.drop_privileges(caller, ino)?;
        let end = range_end(offset, len)?;
        state.change_contents(ino, |pages, attr| {
            let keep_size = match how {
                Allocate::Reserve { keep_size } => {
                    pages.reserve(offset, end);
                    keep_size
                }
                Allocate::PunchHole => {
                    pages.punch(offset, end);
                    true
                }
                Allocate::ZeroRange { keep_size } => {
                    pages.punch(offset, end);
                    pages.reserve(offset, end);
                    keep_size
                }
            };
            if !keep_size {
                attr.size = attr.size.max(end);
            }
        })?;
        Ok(state.tree.node(ino)?.attr.change)
    }

    fn seek(&self, _caller: &Caller, handle: Handle, offset: u64, seek: SeekFor) -> Result<u64, FsError> {
        let state = self.enter("seek");
        let (ino, _) = state.handle(handle)?;
        let size = state.tree.node(ino)?.attr.size;
        let found = if offset < size { state.tree.file(ino)?.seek(offset, size, seek) } else { None };
        found.ok_or(Status::NoSuchOffset.into())
    }

    fn copy_range(
        &self,
        _caller: &Caller,
        from: Handle,
        from_offset: u64,
        to: Handle,
        to_offset: u64,
        len: u64,
    ) -> Result<Copied, FsError> {
        let mut state = self.enter("copy_range");
        let ((from, _), (to, _)) = (state.handle(from)?, state.handle(to)?);
        let size = state.tree.node(from)?.attr.size;
        let len = size.saturating_sub(from_offset).min(len);
        let end = range_end(to_offset, len)?;
        let bytes = state.tree.file(from)?.read(from_offset, len as usize);
        state.change_contents(to, |pages, attr| {
            pages.write(to_offset, &bytes);
            attr.size = attr.size.max(end);
        })?;
        Ok(Copied { len, change: state.tree.node(to)?.attr.change })
    }

    fn figures(&self) -> Vec<(&'static str, u64)> {
        vec![("onesided_reads", 3)]
    }

    fn condition(&self) -> Condition {
        if !self.stranded.load(Ordering::Acquire) {
            return Condition::default();
        }
        let away = Away { time: Duration::from_secs(7), because: "its key was taken away".to_owned() };
        Condition {
            away: Some(away),
            unheard: None,
            lease: None,
            unsynced: UnsyncedChanges { files: 2, bytes: 5 },
            pool: None,
        }
    }

    fn sync_all(&self) -> Result<(), FsError> {
        let mut state = self.enter("sync_all");
        let is_stranded = self.stranded.load(Ordering::Acquire);
        self.ended.wait_while(&mut state, |state| is_stranded && !state.shut_down);
        if is_stranded { Err(FsError::ShutDown) } else { Ok(()) }
    }

    fn shut_down(&self) {
        self.enter("shut_down").shut_down = true;
        self.ended.notify_all();
        self.changed.notify_all();
    }
}
