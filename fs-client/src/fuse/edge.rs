//! [`Filesystem`] over a [`Volume`]: each request is one method, with a span, a call and a reply.
//!
//! # Decisions of this module, and their reasons
//! * **`create` never opens an existing file.** The kernel sends CREATE only for a name it takes for missing, and then checks no permissions on
//!   the file. If another client has made the name meanwhile, an open would bypass these checks. So the volume is asked for an exclusive
//!   create; a name that turns out to exist is `ESTALE` to a caller without `O_EXCL`, upon which the kernel looks the name up afresh and opens
//!   it the ordinary way.
//! * **No `FUSE_ATOMIC_O_TRUNC`.** With it the kernel truncates and does not tell us to drop the set-id bits. So `O_TRUNC` comes as a setattr
//!   that says both.
//! * **`O_DIRECT` opens are `FOPEN_DIRECT_IO`**, with parallel writes, if the kernel can still map such files
//!   (`FUSE_DIRECT_IO_ALLOW_MMAP`, Linux 6.6). They skip the page cache's bookkeeping; the kernel keeps them coherent
//!   with mappings and, with our help (`kernel_cache`), with cached opens on the same mount. On older kernels they are ordinary opens, for which
//!   the kernel does direct IO itself.
//! * **Opens with `O_APPEND` for writing are `FOPEN_DIRECT_IO`, too.** Through its page cache the kernel sends a write in parts: a part ends with
//!   each page that is not cached, and bytes of another mount could come in between. A direct write(2) is one request, as long as it fits one.
//! * **`flush` is `ENOSYS`** unless the volume keeps locks: a close gives up the locks of the process. Nothing else is buffered here. After `ENOSYS`
//!   the kernel sends no more flushes, and still writes dirty mapped pages back at close, which `FOPEN_NOFLUSH` would forgo.
//! * **A write says whether it appends**, not the open: see `convert::write_how`.
//! * **A file without a name is opened only at the second request**: see `nameless`.
//! * **A reply's lifetime for a created file is one for name and attributes**: the shorter.
//! * **An open file without a caller is closed here**: the caller was killed meanwhile, and the kernel will not close the file.
//!
//! # Failure
//! A method that cannot do its request replies with an errno of the table; it never panics on input from the kernel or the volume. A reply that
//! is dropped is EIO.

use super::file_system::{CuttleFuse, caller, handle, maker};
use super::groups;
use super::inode_flags::{self, Asked};
use super::kernel::{
    CopyFileRangeFlags, Errno, FileAttr, FileHandle, Filesystem, FopenFlags, INodeNo, IoctlFlags, LockKind,
    LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use super::lock_wait::LockRequest;
use super::reply::{GENERATION, refused, reply_done, reply_sized};
use super::xattr_names;
use super::{convert, directory};
use crate::file::volume::{Caller, FsError, OpenHow, Volume, Written};
use cuttlefs_common::attr::{ACCESS_ACL_XATTR, SetAttr, Timestamp};
use cuttlefs_common::ids::PAGE_SIZE;
use cuttlefs_common::locks::LockSpace;
use cuttlefs_common::rpc::{NewNode, RenameMode};
use cuttlefs_common::status::Status;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// The user who may keep set-id bits in a change, for requests in which the kernel does not say whether the caller may.
const ROOT_USER: u32 = 0;
/// The largest count that a copy's reply can carry, rounded down to a page so that the next part starts aligned, too.
const MAX_COPY_BYTES: u64 = (u32::MAX as u64) & !(PAGE_SIZE as u64 - 1);

/// Opens a debug span for a request. Costs one load when debug logging is off.
macro_rules! request {
    ($op:literal, $req:expr $(, $($fields:tt)+)?) => {
        tracing::debug_span!($op, req = $req.unique().0, pid = $req.pid() $(, $($fields)+)?).entered()
    };
}

impl<V: Volume + ?Sized> Filesystem for CuttleFuse<V> {
    fn lock_waits_interrupted(&self) {
        self.volume.lock_waits_interrupted();
    }

    fn lookup(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _span = request!("lookup", req, parent = parent.0, name = ?name);
        if name == "." {
            // The kernel resolves a file handle, and has forgotten everything about the inode but its number.
            return self.reply_entry(
                self.name(parent, name),
                self.volume.get_attr(&caller(req), self.ino(parent)),
                reply,
            );
        }
        let epoch = self.volume.server_epoch();
        let found = self.volume.lookup(&caller(req), self.ino(parent), name.as_bytes());
        let led_to = found.as_ref().ok().map(|attr| (attr.ino, attr.kind));
        self.nameless_opens.note_lookup(req.pid(), self.name(parent, name), led_to);
        match found {
            Err(FsError::Server(Status::NotFound)) if !self.settings.negative_cache.is_zero() => {
                // An entry with inode number 0 is ENOENT with a lifetime.
                let ttl = &self.settings.negative_cache;
                reply.entry_with_ttls(&Duration::ZERO, ttl, &FileAttr::NONE, GENERATION);
            }
            found => {
                if let Ok(attr) = &found {
                    self.filling.until_passed(convert::to_fuse_ino(self.root, attr.ino));
                }
                self.tell_entry(epoch, self.name(parent, name), found, reply);
            }
        }
    }

    fn getattr(&self, req: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        let _span = request!("getattr", req, ino = ino.0, fh = ?fh);
        match self.ino(ino) {
            ino if ino == self.root => self.reply_root_attr(&caller(req), reply),
            volume_ino => {
                let epoch = self.volume.server_epoch();
                let attr = self.volume.get_attr(&caller(req), volume_ino);
                self.filling.until_passed(ino);
                self.tell_attr(epoch, attr, fh.is_some(), reply);
            }
        }
    }

    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<Timestamp>,
        fh: Option<FileHandle>,
        takes_set_ids: bool,
        reply: ReplyAttr,
    ) {
        let _span = request!("setattr", req, ino = ino.0, fh = ?fh, size = ?size, mode = ?mode);
        // Short answers to READs wait for the answer.
        let length = size.map(|_| self.filling.changes_length(ino));
        let set = SetAttr {
            mode: mode.map(convert::permission_bits),
            uid,
            gid,
            size,
            atime: atime.map(convert::to_set_time),
            mtime: mtime.map(convert::to_set_time),
            ctime,
            flags: None,
        };
        let caller = Caller { drops_privileges: takes_set_ids && size.is_some(), ..caller(req) };
        let changed = self.changing(ino, || {
            let changed = self.volume.set_attr(&caller, self.ino(ino), set);
            // Nothing changes by an empty set, so its counter may be of another client's change.
            let change = changed.as_ref().ok().filter(|_| set != SetAttr::default()).map(|attr| attr.change);
            (changed, change)
        });
        self.reply_attr(changed, reply);
        if let Some(length) = length {
            length.answered(req.pid());
        }
    }

    fn readlink(&self, req: &Request, ino: INodeNo, reply: ReplyData) {
        let _span = request!("readlink", req, ino = ino.0);
        match self.volume.read_link(&caller(req), self.ino(ino)) {
            Ok(target) => reply.data(&target),
            Err(error) => reply.error(refused(&error)),
        }
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let _span = request!("mknod", req, parent = parent.0, name = ?name, mode = mode);
        match convert::node_of_mode(mode, rdev) {
            Some(node) => {
                let mode = convert::permission_bits(mode);
                self.make(maker(req, umask), parent, name, node, mode, reply);
            }
            None => reply.error(Errno::EINVAL),
        }
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let _span = request!("mkdir", req, parent = parent.0, name = ?name, mode = mode);
        let mode = convert::permission_bits(mode);
        self.make(maker(req, umask), parent, name, NewNode::Directory, mode, reply);
    }

    fn unlink(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _span = request!("unlink", req, parent = parent.0, name = ?name);
        reply_done(self.volume.unlink(&caller(req), self.ino(parent), name.as_bytes()), reply);
    }

    fn rmdir(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _span = request!("rmdir", req, parent = parent.0, name = ?name);
        reply_done(self.volume.rmdir(&caller(req), self.ino(parent), name.as_bytes()), reply);
    }

    fn symlink(&self, req: &Request, parent: INodeNo, link_name: &OsStr, target: &Path, reply: ReplyEntry) {
        let _span = request!("symlink", req, parent = parent.0, name = ?link_name);
        let node = NewNode::Symlink(target.as_os_str().as_bytes());
        self.make(caller(req), parent, link_name, node, 0o777, reply);
    }

    fn rename(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let _span = request!("rename", req, parent = parent.0, name = ?name, new_parent = newparent.0, new_name = ?newname);
        let Some(mode) = convert::rename_mode(flags) else {
            return reply.error(Errno::EINVAL);
        };
        let (from, to) = (self.ino(parent), self.ino(newparent));
        let epoch = self.volume.server_epoch();
        let renamed = self.volume.rename(&caller(req), from, name.as_bytes(), to, newname.as_bytes(), mode);
        if let Ok(attr) = &renamed {
            self.changed(convert::to_fuse_ino(self.root, attr.ino), epoch, attr.change);
            let exchanges = mode == RenameMode::Exchange;
            self.names.moved(self.name(parent, name), self.name(newparent, newname), exchanges, attr);
        }
        reply_done(renamed.map(drop), reply);
    }

    fn link(&self, req: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let _span = request!("link", req, ino = ino.0, parent = newparent.0, name = ?newname);
        let linked = self.changing(ino, || {
            let linked =
                self.volume.link(&caller(req), self.ino(ino), self.ino(newparent), newname.as_bytes());
            let change = linked.as_ref().ok().map(|attr| attr.change);
            (linked, change)
        });
        self.reply_entry(self.name(newparent, newname), linked, reply);
    }

    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let _span = request!("open", req, ino = ino.0, flags = flags.0);
        let is_trusted = self.nameless_opens.is_trusted(req.pid(), self.ino(ino));
        let told = (!is_trusted).then(|| self.names.of(self.ino(ino)));
        let how = OpenHow { told, ..convert::open_how(flags.0) };
        let epoch = self.volume.server_epoch();
        match self.volume.open(&caller(req), self.ino(ino), how) {
            Ok(opened) => {
                self.reply_opened(ino, flags.0, (epoch, opened), reply);
            }
            Err(error) => {
                if !is_trusted && matches!(error, FsError::Server(Status::Stale)) {
                    self.nameless_opens.note_refused(req.pid(), self.ino(ino));
                }
                reply.error(refused(&error));
            }
        }
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let _span = request!("create", req, parent = parent.0, name = ?name, mode = mode, flags = flags);
        let (mode, how) = (convert::permission_bits(mode), convert::open_how(flags));
        let epoch = self.volume.server_epoch();
        match self.volume.create(&maker(req, umask), self.ino(parent), name.as_bytes(), mode, true, how) {
            Ok((attr, opened)) => {
                self.names.told(self.name(parent, name), &attr);
                self.reply_created(flags, &attr, (epoch, opened), reply);
            }
            // See the module's header: the kernel retries by lookup and open.
            Err(FsError::Server(Status::Exists)) if flags & libc::O_EXCL == 0 => reply.error(Errno::ESTALE),
            Err(error) => reply.error(refused(&error)),
        }
    }

    /// The kernel itself enforces `O_EXCL`, which forbids the file to get a name later.
    fn tmpfile(&self, req: &Request, parent: INodeNo, mode: u32, umask: u32, flags: i32, reply: ReplyCreate) {
        let _span = request!("tmpfile", req, parent = parent.0, mode = mode, flags = flags);
        let (mode, how) = (convert::permission_bits(mode), convert::open_how(flags));
        let epoch = self.volume.server_epoch();
        match self.volume.create_nameless(&maker(req, umask), self.ino(parent), mode, how) {
            Ok((attr, opened)) => self.reply_created(flags, &attr, (epoch, opened), reply),
            Err(error) => reply.error(refused(&error)),
        }
    }

    fn read(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let _span = request!("read", req, ino = ino.0, fh = fh.0, offset = offset, size = size);
        // The kernel names a lock owner when it reads past its cache for a system call, and none when it fills pages.
        let fills = lock_owner.is_none();
        // Until the answer is given.
        let _filling = fills.then(|| {
            self.cache.files().reads(ino, offset, offset.saturating_add(u64::from(size)));
            self.filling.reads(ino, offset)
        });
        let mut reply = Some(reply);
        let mut short = None;
        let result = self.volume.read(&caller(req), handle(fh), offset, size, &mut |bytes| {
            let lacking = (size as usize).saturating_sub(bytes.len());
            let is_surprise = lacking >= PAGE_SIZE;
            if fills && lacking > 0 && (is_surprise || !self.filling.short_counts(ino, offset)) {
                // The volume may need its memory for the READ that is waited for.
                short = Some((bytes.to_vec(), is_surprise));
            } else if let Some(reply) = reply.take() {
                reply.data(bytes);
            }
        });
        match (result, reply) {
            (Err(error), Some(reply)) => reply.error(refused(&error)),
            // If the volume has handed nothing over, this is the end of the file.
            (Ok(()), Some(reply)) => {
                let (bytes, is_surprise) = short.unwrap_or((Vec::new(), true));
                if fills {
                    self.filling.until_short_counts(ino, offset, is_surprise);
                }
                reply.data(&bytes);
            }
            (_, None) => {}
        }
    }

    fn write(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _span = request!("write", req, ino = ino.0, fh = fh.0, offset = offset, size = data.len());
        let may_keep = !write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let caller = self.writer(req, self.ino(ino), may_keep);
        // A lock owner means the same as for a read. A write through the cache, or a write-back of mapped pages, keeps its pages locked until it is
        // answered.
        let is_past_cache = lock_owner.is_some();
        // Until the answer: attributes with the new length wait for it.
        let passing = self.filling.passes(ino);
        if !is_past_cache {
            self.cache.files().fills(ino);
        }
        let how = convert::write_how(flags.0, write_flags);
        let written = self.changing(ino, || {
            let written = self.volume.write_how(&caller, handle(fh), offset, data, how);
            let change =
                written.as_ref().ok().filter(|written| written.len > 0).map(|written| written.change);
            (written, change)
        });
        if written.is_ok() {
            self.changed_by(&caller, ino);
        }
        match written {
            Ok(Written { offset, len, .. }) => {
                self.cache.files().wrote_up_to(ino, offset.saturating_add(len.into()));
                if is_past_cache {
                    self.cache.when_passed(ino, offset, len, move || {
                        reply.written(len);
                        drop(passing);
                    });
                } else {
                    self.cache.wrote(ino, offset, len);
                    reply.written(len);
                }
            }
            Err(error) => reply.error(refused(&error)),
        }
    }

    fn flush(&self, req: &Request, ino: INodeNo, fh: FileHandle, lock_owner: LockOwner, reply: ReplyEmpty) {
        let _span = request!("flush", req, ino = ino.0, fh = fh.0);
        if !self.keeps_locks {
            return reply.error(Errno::ENOSYS);
        }
        reply_done(self.volume.flush(handle(fh), convert::lock_owner(lock_owner)), reply);
    }

    fn release(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let _span = request!("release", req, ino = ino.0, fh = fh.0);
        self.cache.files().closed(ino, convert::open_how(flags.0).write);
        self.volume.release(handle(fh));
        reply.ok();
    }

    fn fsync(&self, req: &Request, ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let _span = request!("fsync", req, ino = ino.0, fh = fh.0, datasync = datasync);
        reply_done(self.volume.fsync(&caller(req), handle(fh), datasync), reply);
    }

    fn getlk(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        reply: ReplyLock,
    ) {
        let _span = request!("getlk", req, ino = ino.0, fh = fh.0, start = start, end = end, kind = typ);
        // flock(2) has no such request.
        let space = LockSpace::Ranges;
        let Some(lock) = convert::lock(space, lock_owner, start, end, typ, pid) else {
            return reply.error(Errno::EINVAL);
        };
        match self.volume.test_lock(&caller(req), handle(fh), lock) {
            Ok(None) => reply.locked(start, end, libc::F_UNLCK, 0),
            Ok(Some(held)) => {
                reply.locked(held.range.first, held.range.last, convert::lock_type(held.mode), held.pid);
            }
            Err(error) => reply.error(refused(&error)),
        }
    }

    fn setlk(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        kind: LockKind,
        lock_owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        sleep: bool,
        reply: ReplyEmpty,
    ) {
        let _span = request!("setlk", req, ino = ino.0, fh = fh.0, start = start, end = end, kind = typ);
        let (space, owner) = match kind {
            // The owner is an open file description. The kernel names it by its address, and the next description may have the same address before
            // the release of this one is read.
            LockKind::Flock => (LockSpace::Whole, LockOwner(fh.0)),
            LockKind::Posix => (LockSpace::Ranges, lock_owner),
        };
        if typ == libc::F_UNLCK {
            let Some(range) = convert::lock_range(start, end) else {
                return reply.error(Errno::EINVAL);
            };
            let owner = convert::lock_owner(owner);
            return reply_done(self.volume.unlock(&caller(req), handle(fh), space, owner, range), reply);
        }
        let Some(lock) = convert::lock(space, owner, start, end, typ, pid) else {
            return reply.error(Errno::EINVAL);
        };
        let waiter = LockRequest::new(self, ino, reply);
        self.volume.set_lock(&caller(req), handle(fh), lock, sleep, waiter);
    }

    fn opendir(&self, req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let _span = request!("opendir", req, ino = ino.0);
        match self.volume.open_directory(&caller(req), self.ino(ino)) {
            // No FOPEN_CACHE_DIR: nothing tells us when another client changes the directory.
            Ok(opened) => {
                let handle = FileHandle(opened.0);
                if !reply.opened(handle, FopenFlags::empty()) {
                    self.volume.release(opened);
                }
            }
            Err(error) => reply.error(refused(&error)),
        }
    }

    fn releasedir(&self, req: &Request, ino: INodeNo, fh: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        let _span = request!("releasedir", req, ino = ino.0, fh = fh.0);
        self.volume.release(handle(fh));
        reply.ok();
    }

    fn readdir(&self, req: &Request, ino: INodeNo, _fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let _span = request!("readdir", req, ino = ino.0, offset = offset);
        let listed =
            directory::list(&*self.volume, &caller(req), self.ino(ino), offset, false, &mut |entry| {
                let number = convert::to_fuse_ino(self.root, entry.ino);
                !reply.add(
                    number,
                    entry.cookie,
                    convert::to_file_type(entry.kind),
                    OsStr::from_bytes(entry.name),
                )
            });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(refused(&error)),
        }
    }

    fn readdirplus(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let _span = request!("readdirplus", req, ino = ino.0, offset = offset);
        let ttl = self.settings.attr_cache.min(self.settings.entry_cache);
        let listed =
            directory::list(&*self.volume, &caller(req), self.ino(ino), offset, true, &mut |entry| {
                let (attr, is_known) = self.listed_attr(&caller(req), self.ino(ino), entry);
                let ttl = if is_known { ttl } else { Duration::ZERO };
                !reply.add(attr.ino, entry.cookie, OsStr::from_bytes(entry.name), &ttl, &attr, GENERATION)
            });
        match listed {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(refused(&error)),
        }
    }

    fn fsyncdir(&self, req: &Request, ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let _span = request!("fsyncdir", req, ino = ino.0);
        reply_done(self.volume.fsync_dir(&caller(req), self.ino(ino)), reply);
    }

    fn statfs(&self, req: &Request, ino: INodeNo, reply: ReplyStatfs) {
        let _span = request!("statfs", req, ino = ino.0);
        self.reply_space(&caller(req), reply);
    }

    fn setxattr(
        &self,
        req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let _span = request!("setxattr", req, ino = ino.0, name = ?name, size = value.len());
        let (ino, name) = (self.ino(ino), name.as_bytes());
        if !self.has_xattr(name) {
            return reply.error(Errno::EOPNOTSUPP);
        }
        let Some(mode) = convert::xattr_mode(flags) else {
            return reply.error(Errno::EINVAL);
        };
        let mut caller = caller(req);
        // As in chmod(2), a caller that is not in the file's group takes the set-group-id bit. For root, whose `cp -a` sets an ACL on each file, the
        // file's group does not matter and is not requested.
        if name == ACCESS_ACL_XATTR && !groups::is_privileged(req) {
            caller.drops_privileges = match self.volume.get_attr(&caller, ino) {
                Ok(attr) => !groups::may_set_group_id(req, attr.gid),
                Err(error) => return reply.error(refused(&error)),
            };
        }
        let set = self.volume.set_xattr(&caller, ino, name, value, mode);
        // After the change, so that an earlier answer cannot be remembered for longer than its time after it.
        self.lacking.forget(ino);
        reply_done(set, reply);
    }

    fn getxattr(&self, req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let _span = request!("getxattr", req, ino = ino.0, name = ?name, size = size);
        let (ino, name) = (self.ino(ino), name.as_bytes());
        if !self.has_xattr(name) {
            return reply.error(Errno::EOPNOTSUPP);
        }
        if xattr_names::lack_of(name).is_some_and(|lack| self.lacking.is_known(ino, lack)) {
            return reply.error(Errno::NO_XATTR);
        }
        reply_sized(self.volume.get_xattr(&caller(req), ino, name), size, reply);
    }

    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let _span = request!("listxattr", req, ino = ino.0, size = size);
        let listed = self.volume.list_xattr(&caller(req), self.ino(ino));
        reply_sized(listed.map(|names| xattr_names::shown_to(req.uid(), names)), size, reply);
    }

    fn removexattr(&self, req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _span = request!("removexattr", req, ino = ino.0, name = ?name);
        if !self.has_xattr(name.as_bytes()) {
            return reply.error(Errno::EOPNOTSUPP);
        }
        reply_done(self.volume.remove_xattr(&caller(req), self.ino(ino), name.as_bytes()), reply);
    }

    fn ioctl(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: IoctlFlags,
        cmd: u32,
        in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        let _span = request!("ioctl", req, ino = ino.0, fh = fh.0, cmd = cmd);
        let (caller, ino) = (caller(req), self.ino(ino));
        match inode_flags::asked(cmd, in_data) {
            Some(Asked::Get(form)) => match self.volume.get_attr(&caller, ino) {
                Ok(attr) => reply.ioctl(0, &form.encode(attr.flags)),
                Err(error) => reply.error(refused(&error)),
            },
            Some(Asked::Set(flags)) => {
                let set = SetAttr { flags: Some(flags), ..SetAttr::default() };
                match self.volume.set_attr(&caller, ino, set) {
                    Ok(_) => reply.ioctl(0, &[]),
                    Err(error) => reply.error(refused(&error)),
                }
            }
            Some(Asked::Unsupported) => reply.error(Errno::EOPNOTSUPP),
            // Not ENOSYS, because applications do not expect that errno from ioctl(2).
            None => reply.error(Errno::ENOTTY),
        }
    }

    fn fallocate(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let _span =
            request!("fallocate", req, ino = ino.0, fh = fh.0, offset = offset, size = length, mode = mode);
        match convert::allocate_mode(mode) {
            Some(how) => {
                let writer = self.writer(req, self.ino(ino), req.uid() == ROOT_USER);
                let allocated = self.changing(ino, || {
                    let allocated = self.volume.allocate(&writer, handle(fh), offset, length, how);
                    let change = allocated.as_ref().ok().copied();
                    (allocated.map(drop), change)
                });
                self.changed_by(&writer, ino);
                reply_done(allocated, reply);
            }
            None => reply.error(Errno::EOPNOTSUPP),
        }
    }

    fn lseek(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let _span = request!("lseek", req, ino = ino.0, fh = fh.0, offset = offset, whence = whence);
        let Some(seek) = convert::seek_for(whence) else {
            return reply.error(Errno::EINVAL);
        };
        // lseek(2): ENXIO for an offset that SEEK_DATA and SEEK_HOLE cannot start from.
        let Ok(from) = u64::try_from(offset) else {
            return reply.error(Errno::ENXIO);
        };
        // The volume does not know of bytes that are only in pages.
        if self.cache.files().may_be_dirty(ino) {
            self.cache.write_back(ino);
        }
        match self.volume.seek(&caller(req), handle(fh), from, seek).map(i64::try_from) {
            Ok(Ok(found)) => reply.offset(found),
            Ok(Err(_)) => reply.error(Errno::EOVERFLOW),
            Err(error) => reply.error(refused(&error)),
        }
    }

    fn copy_file_range(
        &self,
        req: &Request,
        ino_in: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let _span = request!(
            "copy_file_range",
            req,
            ino = ino_in.0,
            fh = fh_in.0,
            offset = offset_in,
            to_ino = ino_out.0,
            to_fh = fh_out.0,
            to_offset = offset_out,
            size = len,
        );
        if !flags.is_empty() {
            return reply.error(Errno::EINVAL);
        }
        let len = len.min(MAX_COPY_BYTES);
        let (from, to) = (handle(fh_in), handle(fh_out));
        let writer = self.writer(req, self.ino(ino_out), req.uid() == ROOT_USER);
        let copied = self.changing(ino_out, || {
            let copied = self.volume.copy_range(&writer, from, offset_in, to, offset_out, len);
            let change = copied.as_ref().ok().filter(|copied| copied.len > 0).map(|copied| copied.change);
            (copied, change)
        });
        self.changed_by(&writer, ino_out);
        match copied.map(|copied| u32::try_from(copied.len)) {
            Ok(Ok(copied)) => reply.written(copied),
            Ok(Err(_)) => reply.error(Errno::EIO),
            Err(error) => reply.error(refused(&error)),
        }
    }
}
