//! A mount's state at the FUSE edge, and what several of its requests need: who asks, what the kernel is told of an opened file.

use super::cached_files::At;
use super::convert;
use super::filling::Filling;
use super::kernel::{
    FileHandle, FopenFlags, INodeNo, InitFlags, Notifier, ReplyAttr, ReplyCreate, ReplyEntry, ReplyOpen,
    ReplyStatfs, Request,
};
use super::kernel_cache::KernelCache;
use super::lacking::{Lack, Lacking};
use super::nameless::NamelessOpens;
use super::reply::GENERATION;
use super::root::Remembered;
use super::settings::FuseSettings;
use super::told_names::{NameId, ToldNames};
use super::xattr_names;
use crate::file::volume::{Caller, Handle, OpenFile, Volume};
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::{InodeNo, TraceId};
use cuttlefs_common::panic_ends;
use cuttlefs_common::rpc::{NewNode, Space};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

/// The flags that the kernel must have for locks to be the volume's.
pub(super) const LOCKS: InitFlags = InitFlags::FUSE_POSIX_LOCKS.union(InitFlags::FUSE_FLOCK_LOCKS);

/// A volume as a FUSE file system.
pub struct CuttleFuse<V: Volume + ?Sized> {
    pub(super) volume: Arc<V>,
    pub(super) root: InodeNo,
    pub(super) settings: FuseSettings,
    pub(super) lacking: Arc<Lacking>,
    pub(super) root_attr: Remembered<ReplyAttr, Attr>,
    pub(super) space: Remembered<ReplyStatfs, Space>,
    /// Whether the kernel checks access control lists.
    pub(super) keeps_acls: bool,
    /// Whether the kernel can map files that are open past the page cache.
    pub(super) direct_io_maps: bool,
    /// Whether the volume keeps locks; otherwise the kernel does.
    pub(super) keeps_locks: bool,
    pub(super) nameless_opens: NamelessOpens,
    pub(super) names: ToldNames,
    pub(super) cache: Arc<KernelCache>,
    pub(super) filling: Arc<Filling>,
}

impl<V: Volume + ?Sized> CuttleFuse<V> {
    /// The volume as a FUSE file system, for a session that the kernel has accepted. `known` is the result of `look_at_root`.
    pub(super) fn new(
        volume: Arc<V>,
        known: (Option<Attr>, Option<Space>),
        settings: FuseSettings,
        agreed: InitFlags,
        notifier: Notifier,
    ) -> Self {
        let direct_io_maps = agreed.contains(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP);
        if settings.uncached && !direct_io_maps {
            tracing::warn!(
                "this kernel cannot map uncached files: cache=none keeps pages between open and close"
            );
        }
        Self {
            root: volume.root(),
            volume,
            lacking: Arc::new(Lacking::new(settings.attr_cache)),
            names: ToldNames::new(settings.entry_cache),
            root_attr: Remembered::new(known.0),
            space: Remembered::new(known.1),
            keeps_acls: agreed.contains(InitFlags::FUSE_POSIX_ACL),
            settings,
            direct_io_maps,
            keeps_locks: agreed.contains(LOCKS),
            nameless_opens: NamelessOpens::default(),
            cache: Arc::new(KernelCache::new(notifier)),
            filling: Arc::default(),
        }
    }

    pub(super) fn ino(&self, ino: INodeNo) -> InodeNo {
        convert::from_fuse_ino(self.root, ino)
    }

    pub(super) fn make(
        &self,
        caller: Caller,
        parent: INodeNo,
        name: &OsStr,
        node: NewNode<'_>,
        mode: u16,
        reply: ReplyEntry,
    ) {
        let made = self.volume.make(&caller, self.ino(parent), name.as_bytes(), node, mode);
        self.reply_entry(self.name(parent, name), made, reply);
    }

    pub(super) fn name(&self, parent: INodeNo, name: &OsStr) -> NameId {
        NameId::new(self.ino(parent), name.as_bytes())
    }

    /// Whether an extended attribute of this name can exist here.
    pub(super) fn has_xattr(&self, name: &[u8]) -> bool {
        xattr_names::is_supported(name) || (self.keeps_acls && xattr_names::is_acl(name))
    }

    /// The caller of a change of contents. `may_keep`: whether it is privileged enough to keep set-id bits on the file.
    pub(super) fn writer(&self, req: &Request, ino: InodeNo, may_keep: bool) -> Caller {
        let drops_privileges = !may_keep && !self.lacking.is_known(ino, Lack::Privileges);
        Caller { drops_privileges, ..caller(req) }
    }

    /// Does an own change of a file, so that the kernel's pages are known to have it. `change` returns the file's change counter behind it, if it has changed.
    pub(super) fn changing<T>(&self, ino: INodeNo, change: impl FnOnce() -> (T, Option<u64>)) -> T {
        let epoch = self.volume.server_epoch();
        let own = self.cache.files().changes(ino);
        let (done, counted) = change();
        own.answered(counted.and_then(|change| At::of(&*self.volume, epoch, change)));
        done
    }

    /// Notes an own change that was answered. Until then it was not known of which file.
    pub(super) fn changed(&self, ino: INodeNo, epoch: u64, change: u64) {
        self.cache.files().changes(ino).answered(At::of(&*self.volume, epoch, change));
    }

    /// Notes that `writer` has changed the contents of a file.
    pub(super) fn changed_by(&self, writer: &Caller, ino: INodeNo) {
        if writer.drops_privileges {
            self.lacking.dropped(self.ino(ino));
            // When the file is run, the kernel uses the mode that it has cached.
            self.cache.forget_attributes(ino);
        }
    }

    /// Whether a file that is opened with these flags is read and written past the page cache.
    pub(super) fn is_direct(&self, flags: i32) -> bool {
        let asked = flags & libc::O_DIRECT != 0;
        let appends = flags & libc::O_APPEND != 0 && flags & libc::O_ACCMODE != libc::O_RDONLY;
        self.direct_io_maps && (self.settings.uncached || asked || appends)
    }

    /// Answers that a file was opened with these flags. `epoch` is the server's number before the request.
    pub(super) fn reply_opened(&self, ino: INodeNo, flags: i32, opened: (u64, OpenFile), reply: ReplyOpen) {
        self.hand_over(ino, flags, opened, move |handle, how| reply.opened(handle, how));
    }

    /// As `reply_opened`, for a file that was made.
    pub(super) fn reply_created(&self, flags: i32, attr: &Attr, opened: (u64, OpenFile), reply: ReplyCreate) {
        self.lacking.told(attr);
        let attr = convert::to_file_attr(self.root, attr);
        let lifetime = self.settings.attr_cache.min(self.settings.entry_cache);
        let files = self.cache.files().clone();
        self.hand_over(attr.ino, flags, opened, move |handle, how| {
            files.takes_size(attr.ino, attr.size);
            reply.created(&lifetime, &attr, GENERATION, handle, how)
        });
    }

    /// Hands an open file over by `give`, when the kernel has no page of before. If nobody takes the file, closes it.
    fn hand_over(
        &self,
        ino: INodeNo,
        flags: i32,
        (epoch, opened): (u64, OpenFile),
        give: impl FnOnce(FileHandle, FopenFlags) -> bool + Send + 'static,
    ) {
        let writes = convert::open_how(flags).write;
        self.cache.files().opened(ino, writes);
        let (handle, how) = self.opened(ino, flags, &opened);
        let (volume, cache) = (self.volume.clone(), self.cache.clone());
        let answer = move || {
            if !give(handle, how) {
                cache.files().closed(ino, writes);
                volume.release(opened.handle);
            }
        };
        let at = At::of(&*self.volume, epoch, opened.change);
        self.cache.when_good(ino, at, answer);
    }

    /// How the kernel uses a file that was just opened.
    fn opened(&self, ino: INodeNo, flags: i32, opened: &OpenFile) -> (FileHandle, FopenFlags) {
        // The opener must see changes of mounts that have closed the file. The length comes with the attributes, which an open does not bring.
        self.lacking.forget_older(self.ino(ino), opened.change, || self.cache.forget_attributes(ino));
        let how = if self.is_direct(flags) {
            FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
        } else {
            FopenFlags::empty()
        };
        // Pages that are not good are forgotten before the answer.
        let keeps = if self.settings.uncached { FopenFlags::empty() } else { FopenFlags::FOPEN_KEEP_CACHE };
        (FileHandle(opened.handle.0), how | keeps)
    }
}

pub(super) fn caller(req: &Request) -> Caller {
    panic_ends::plant("fuse");
    Caller::new(req.uid(), req.gid(), TraceId(req.unique().0))
}

/// The caller of a request that makes an inode.
pub(super) fn maker(req: &Request, umask: u32) -> Caller {
    Caller { umask: convert::permission_bits(umask) & 0o777, ..caller(req) }
}

pub(super) fn handle(fh: FileHandle) -> Handle {
    Handle(fh.0)
}
