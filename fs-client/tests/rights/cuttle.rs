//! The other world: a server, and the users' operations through its `unix://` socket.

use super::op::{Answer, Errno, Kind, MADE_WITH, Node, Op, State, Time};
use super::people::Person;
use super::serving::{self, Serve};
use cuttlefs_client::file::RemoteVolume;
use cuttlefs_client::file::volume::{Caller, FsError, OpenHow, Volume};
use cuttlefs_common::attr::{Attr, FileKind, SetAttr, SetTime, Timestamp};
use cuttlefs_common::ids::{InodeNo, TraceId};
use cuttlefs_common::rdma::Endpoint;
use cuttlefs_common::rpc::{Allocate, NewNode, XattrMode};
use cuttlefs_common::status::Status;
use cuttlefs_server::pages::Hotspots;
use cuttlefs_server::pages::policy::RegionPolicy;
use cuttlefs_server::pool::FormatOptions;
use cuttlefs_server::rights::ExportRule;
use cuttlefs_server::serve::RunningServer;
use std::sync::Arc;
use tempfile::TempDir;

/// A server on a pool of its own.
pub struct Site {
    server: Option<RunningServer>,
    directory: TempDir,
    rules: Vec<ExportRule>,
}

impl Site {
    pub fn new(rules: Vec<ExportRule>) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        // The socket is in this directory, and users must reach it.
        rustix::fs::chmod(directory.path(), 0o711.into()).expect("for everybody");
        let options = FormatOptions {
            dir: directory.path().join("pool"),
            size: 32 << 20,
            data: Vec::new(),
            force: false,
        };
        serving::make_pool(&options, *b"a test's own key");
        let mut site = Self { server: None, directory, rules };
        site.start();
        site
    }

    fn start(&mut self) {
        let serve = Serve {
            frames: 512,
            listen: vec![self.endpoint()],
            policy: RegionPolicy::default(),
            hotspots: Hotspots::Pages,
            durable_answers: false,
        };
        self.server = Some(
            serving::serve_by(self.rules.clone(), &self.directory.path().join("pool"), serve).expect("serve"),
        );
    }

    /// Restarts the server, with other export rules if any are given.
    pub fn restart(&mut self, rules: Option<Vec<ExportRule>>) {
        self.server.take().expect("it serves").stop();
        self.rules = rules.unwrap_or(std::mem::take(&mut self.rules));
        self.start();
    }

    pub fn endpoint(&self) -> Endpoint {
        format!("unix://{}/socket", self.directory.path().display()).parse().expect("an endpoint")
    }

    /// Connects as this user.
    pub fn volume(&self, person: &Person) -> Cuttle {
        let (endpoint, name) = (self.endpoint(), person.credentials.name);
        let volume = person.does(|| serving::connect(&endpoint, name, 1, false));
        Cuttle { volume: Arc::new(volume), said: (0, 0) }
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some(server) = self.server.take() {
            server.stop();
        }
    }
}

/// Runs a closure as root, over root's own connection.
pub type ByRoot<'r> = &'r dyn Fn(&mut (dyn FnMut(&Cuttle) + Send));

/// A user's connection to the server.
#[derive(Clone)]
pub struct Cuttle {
    pub volume: Arc<RemoteVolume>,
    /// The user and group that its requests name.
    pub said: (u32, u32),
}

/// The error number that an application would see.
pub fn errno(error: FsError) -> Errno {
    let FsError::Server(status) = error else { panic!("{error}") };
    match status {
        Status::NotFound => libc::ENOENT,
        Status::Exists => libc::EEXIST,
        Status::NotDirectory => libc::ENOTDIR,
        Status::IsDirectory => libc::EISDIR,
        Status::NotEmpty => libc::ENOTEMPTY,
        Status::Invalid => libc::EINVAL,
        Status::Denied => libc::EACCES,
        Status::NotPermitted => libc::EPERM,
        Status::NoAttribute => libc::ENODATA,
        Status::ReadOnly => libc::EROFS,
        Status::Stale => libc::ESTALE,
        other => panic!("{other}"),
    }
}

impl Cuttle {
    pub fn caller(&self) -> Caller {
        Caller::new(self.said.0, self.said.1, TraceId(1))
    }

    /// Finds the inode of a path as the kernel does, with one lookup for each name.
    pub fn walk(&self, path: &str) -> Result<Attr, FsError> {
        let mut at = self.volume.get_attr(&self.caller(), self.volume.root())?;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            at = self.volume.lookup(&self.caller(), at.ino, name.as_bytes())?;
        }
        Ok(at)
    }

    /// The inode of a path's directory, and the path's last name.
    pub fn place<'p>(&self, path: &'p str) -> Result<(InodeNo, &'p [u8]), FsError> {
        let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.walk(parent)?.ino, name.as_bytes()))
    }

    /// Removes everything below the root. To be called as root.
    pub fn clear(&self) {
        self.clear_directory(self.volume.root());
    }

    fn entries(&self, ino: InodeNo) -> Result<Vec<(Vec<u8>, InodeNo, FileKind)>, FsError> {
        let mut entries = Vec::new();
        self.volume.read_dir(&self.caller(), ino, 0, false, &mut |entry| {
            entries.push((entry.name.to_vec(), entry.ino, entry.kind));
            true
        })?;
        Ok(entries)
    }

    fn clear_directory(&self, directory: InodeNo) {
        for (name, ino, kind) in self.entries(directory).expect("root may") {
            if kind == FileKind::Directory {
                self.clear_directory(ino);
                self.volume.rmdir(&self.caller(), directory, &name).expect("root may");
            } else {
                self.volume.unlink(&self.caller(), directory, &name).expect("root may");
            }
        }
    }

    /// Makes the tree. To be called as root.
    pub fn make(&self, tree: &[Node]) {
        let caller = &self.caller();
        for node in tree {
            let (parent, name) = self.place(node.path).expect(node.path);
            let kind = match node.kind {
                Kind::Directory => NewNode::Directory,
                Kind::Symlink => NewNode::Symlink(b"f"),
                Kind::Fifo => NewNode::Special { kind: FileKind::Fifo, rdev: 0 },
                Kind::File => NewNode::File,
            };
            let attr = self.volume.make(caller, parent, name, kind, 0o600).expect(node.path);
            if node.kind == Kind::File {
                let how = OpenHow { write: true, ..OpenHow::default() };
                let handle = self.volume.open(caller, attr.ino, how).expect(node.path).handle;
                self.volume.write(caller, handle, 0, b"bytes").expect(node.path);
                self.volume.release(handle);
            }
            if matches!(node.kind, Kind::File | Kind::Directory) {
                for (name, value) in MADE_WITH {
                    let (name, value) = (name.as_bytes(), value.as_bytes());
                    self.volume.set_xattr(caller, attr.ino, name, value, XattrMode::Create).expect(node.path);
                }
            }
            let owned = SetAttr { uid: Some(node.uid), gid: Some(node.gid), ..SetAttr::default() };
            self.volume.set_attr(caller, attr.ino, owned).expect(node.path);
            if node.kind != Kind::Symlink {
                let mode = SetAttr { mode: Some(node.mode), ..SetAttr::default() };
                self.volume.set_attr(caller, attr.ino, mode).expect(node.path);
            }
        }
    }

    /// The state of the tree. To be called as root.
    pub fn state(&self) -> State {
        let mut state = State::new();
        self.look(self.volume.root(), "", &mut state);
        state
    }

    fn look(&self, directory: InodeNo, below: &str, state: &mut State) {
        for (name, ino, kind) in self.entries(directory).expect("root may") {
            let name = String::from_utf8(name).expect("UTF-8");
            let shown = if below.is_empty() { name } else { format!("{below}/{name}") };
            let attr = self.volume.get_attr(&self.caller(), ino).expect("it is there");
            let type_bits = match kind {
                FileKind::File => libc::S_IFREG,
                FileKind::Directory => libc::S_IFDIR,
                FileKind::Symlink => libc::S_IFLNK,
                FileKind::BlockDevice => libc::S_IFBLK,
                FileKind::CharDevice => libc::S_IFCHR,
                FileKind::Fifo => libc::S_IFIFO,
                FileKind::Socket => libc::S_IFSOCK,
            };
            let (links, size) = if kind == FileKind::File { (attr.nlink, attr.size) } else { (0, 0) };
            let names = self.xattrs(ino).expect("root may");
            let mode = type_bits | u32::from(attr.mode);
            state.insert(shown.clone(), (mode, attr.uid, attr.gid, links, size, names));
            if kind == FileKind::Directory {
                self.look(ino, &shown, state);
            }
        }
    }

    fn xattrs(&self, ino: InodeNo) -> Result<Vec<String>, FsError> {
        let names = self.volume.list_xattr(&self.caller(), ino)?;
        let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        let mut names: Vec<String> = names.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        names.sort();
        Ok(names)
    }

    /// Runs an operation as the user of the calling thread. `root` runs the part of it that root must do.
    pub fn run(&self, op: &Op, root: ByRoot<'_>) -> Answer {
        self.try_run(op, root).map_err(errno)
    }

    fn open(&self, path: &str, how: OpenHow) -> Result<cuttlefs_client::file::volume::Handle, FsError> {
        // As the kernel does, looks the file up before it opens it.
        let attr = self.walk(path)?;
        Ok(self.volume.open(&self.caller(), attr.ino, how)?.handle)
    }

    fn try_run(&self, op: &Op, root: ByRoot<'_>) -> Result<String, FsError> {
        let (volume, caller) = (&self.volume, &self.caller());
        let write = OpenHow { write: true, ..OpenHow::default() };
        let read = OpenHow { read: true, ..OpenHow::default() };
        let nothing = String::new();
        match *op {
            Op::Stat(path) => self.walk(path).map(|_| nothing),
            Op::Open { path, read, write, truncate } => {
                let handle = self.open(path, OpenHow { read, write, truncate, ..OpenHow::default() })?;
                volume.release(handle);
                Ok(nothing)
            }
            Op::Create { path, mode, exclusive, read, write } => {
                let (parent, name) = self.place(path)?;
                let how = OpenHow { read, write, ..OpenHow::default() };
                let (_, opened) = volume.create(caller, parent, name, mode, exclusive, how)?;
                volume.read(caller, opened.handle, 0, 4, &mut |_| ())?;
                if write {
                    volume.write(caller, opened.handle, 0, b"new")?;
                }
                volume.release(opened.handle);
                Ok(nothing)
            }
            Op::Nameless(path, mode) => {
                let (parent, name) = self.place(path)?;
                let how = OpenHow { read: true, write: true, ..OpenHow::default() };
                let (attr, opened) = volume.create_nameless(caller, parent, mode, how)?;
                volume.write(caller, opened.handle, 0, b"new")?;
                let linked = volume.link(caller, attr.ino, parent, name);
                volume.release(opened.handle);
                linked.map(|_| nothing)
            }
            Op::Mkdir(path, mode) => {
                let (parent, name) = self.place(path)?;
                volume.make(caller, parent, name, NewNode::Directory, mode).map(|_| nothing)
            }
            Op::Fifo(path, mode) => {
                let (parent, name) = self.place(path)?;
                let fifo = NewNode::Special { kind: FileKind::Fifo, rdev: 0 };
                volume.make(caller, parent, name, fifo, mode).map(|_| nothing)
            }
            Op::Device { path, block, whiteout } => {
                let (parent, name) = self.place(path)?;
                let kind = if block { FileKind::BlockDevice } else { FileKind::CharDevice };
                let device = NewNode::Special { kind, rdev: if whiteout { 0 } else { 0x103 } };
                volume.make(caller, parent, name, device, 0o600).map(|_| nothing)
            }
            Op::Symlink(path) => {
                let (parent, name) = self.place(path)?;
                volume.make(caller, parent, name, NewNode::Symlink(b"f"), 0o777).map(|_| nothing)
            }
            Op::Link(from, to) => {
                let ino = self.walk(from)?.ino;
                let (parent, name) = self.place(to)?;
                volume.link(caller, ino, parent, name).map(|_| nothing)
            }
            Op::Unlink(path) => {
                let (parent, name) = self.place(path)?;
                volume.unlink(caller, parent, name).map(|()| nothing)
            }
            Op::Rmdir(path) => {
                let (parent, name) = self.place(path)?;
                volume.rmdir(caller, parent, name).map(|()| nothing)
            }
            Op::Rename(from, to, mode) => {
                let (parent, name) = self.place(from)?;
                let (new_parent, new_name) = self.place(to)?;
                volume.rename(caller, parent, name, new_parent, new_name, mode).map(|_| nothing)
            }
            Op::Chmod(path, mode) => self.set(path, SetAttr { mode: Some(mode), ..SetAttr::default() }),
            Op::Chown(path, uid, gid) => self.set(path, SetAttr { uid, gid, ..SetAttr::default() }),
            Op::Truncate(path) => self.set(path, SetAttr { size: Some(2), ..SetAttr::default() }),
            Op::Times(path, atime, mtime) => {
                let time = |time| match time {
                    Time::Omit => None,
                    Time::Now => Some(SetTime::Now),
                    Time::At => Some(SetTime::At(Timestamp { secs: 1_000_000, nanos: 0 })),
                };
                self.set(path, SetAttr { atime: time(atime), mtime: time(mtime), ..SetAttr::default() })
            }
            Op::List(path) => {
                let mut names: Vec<String> = self
                    .entries(self.walk(path)?.ino)?
                    .into_iter()
                    .map(|(name, ..)| String::from_utf8(name).expect("UTF-8"))
                    .collect();
                names.sort();
                Ok(names.join(" "))
            }
            Op::ReadLink(path) => {
                let target = volume.read_link(caller, self.walk(path)?.ino)?;
                Ok(String::from_utf8(target).expect("UTF-8"))
            }
            Op::SetXattr(path, name) => {
                let ino = self.walk(path)?.ino;
                volume.set_xattr(caller, ino, name.as_bytes(), b"new", XattrMode::Any).map(|()| nothing)
            }
            Op::GetXattr(path, name) => {
                let value = volume.get_xattr(caller, self.walk(path)?.ino, name.as_bytes())?;
                Ok(String::from_utf8(value).expect("UTF-8"))
            }
            Op::RemoveXattr(path, name) => {
                volume.remove_xattr(caller, self.walk(path)?.ino, name.as_bytes()).map(|()| nothing)
            }
            Op::ListXattr(path) => Ok(self.xattrs(self.walk(path)?.ino)?.join(" ")),
            Op::Write(path) => {
                let handle = self.open(path, write)?;
                volume.write(caller, handle, 1, b"w")?;
                volume.release(handle);
                Ok(nothing)
            }
            Op::Allocate(path) => {
                let handle = self.open(path, write)?;
                volume.allocate(caller, handle, 0, 4096, Allocate::Reserve { keep_size: false })?;
                volume.release(handle);
                Ok(nothing)
            }
            Op::Copy(from, to) => {
                let from = self.open(from, read)?;
                let to = self.open(to, write)?;
                volume.copy_range(caller, from, 0, to, 100, 3)?;
                volume.release(from);
                volume.release(to);
                Ok(nothing)
            }
            Op::CutOpen(path) => {
                let ino = self.walk(path)?.ino;
                let handle = self.volume.open(caller, ino, write)?.handle;
                root(&mut |root| {
                    let mode = SetAttr { mode: Some(0), ..SetAttr::default() };
                    let ino = root.walk(path).expect("root may").ino;
                    root.volume.set_attr(&root.caller(), ino, mode).expect("root may");
                });
                let cut = SetAttr { size: Some(1), ..SetAttr::default() };
                let result = self.volume.set_attr(caller, ino, cut).map(|_| nothing);
                volume.release(handle);
                result
            }
        }
    }

    fn set(&self, path: &str, set: SetAttr) -> Result<String, FsError> {
        let ino = self.walk(path)?.ino;
        self.volume.set_attr(&self.caller(), ino, set).map(|_| String::new())
    }
}
