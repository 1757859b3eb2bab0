//! A mount's state at the FUSE edge, and what several of its requests need: who asks, what the kernel is told of an opened file.

use super::convert;
use super::filling::Filling;
use super::kernel::{
    FileHandle, FopenFlags, INodeNo, InitFlags, Notifier, ReplyAttr, ReplyCreate, ReplyEntry, ReplyStatfs,
    Request,
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

    /// How the kernel uses a file that was just opened.
    pub(super) fn opened(&self, ino: InodeNo, flags: i32, opened: &OpenFile) -> (FileHandle, FopenFlags) {
        // The opener must see changes of mounts that have closed the file. The length comes with the attributes, which an open does not bring.
        self.lacking.forget_older(ino, opened.change, || {
            self.cache.forget_attributes(convert::to_fuse_ino(self.root, ino));
        });
        let handle = FileHandle(opened.handle.0);
        if self.is_direct(flags) {
            return (handle, FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
        }
        let keep_cache = opened.keep_cache && !self.settings.uncached;
        (handle, if keep_cache { FopenFlags::FOPEN_KEEP_CACHE } else { FopenFlags::empty() })
    }

    /// Answers that a file was made and opened with these flags. If nobody takes the answer, closes the file.
    pub(super) fn reply_created(&self, flags: i32, attr: &Attr, opened: &OpenFile, reply: ReplyCreate) {
        self.lacking.told(attr);
        let (handle, how) = self.opened(attr.ino, flags, opened);
        let attr = convert::to_file_attr(self.root, attr);
        let lifetime = self.settings.attr_cache.min(self.settings.entry_cache);
        if !reply.created(&lifetime, &attr, GENERATION, handle, how) {
            self.volume.release(opened.handle);
        }
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
