//! Answers to the kernel: attributes, an entry, a value or an errno, with the lifetimes of the mount's settings.

use super::cached_files::At;
use super::file_system::CuttleFuse;
use super::kernel::{Errno, FileAttr, Generation, ReplyAttr, ReplyEmpty, ReplyEntry, ReplyXattr};
use super::told_names::NameId;
use super::{convert, directory, errno};
use crate::file::volume::{Caller, FsError, Volume};
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::DirEntry;

/// Inode numbers are never reused, so every inode is of generation 0.
pub(super) const GENERATION: Generation = Generation(0);

impl<V: Volume + ?Sized> CuttleFuse<V> {
    pub(super) fn reply_attr(&self, result: Result<Attr, FsError>, reply: ReplyAttr) {
        match result {
            Ok(attr) => {
                if attr.ino == self.root {
                    self.root_attr.remember(attr);
                }
                self.cache.files().takes_size(convert::to_fuse_ino(self.root, attr.ino), attr.size);
                self.attr(&attr, reply)();
            }
            Err(error) => reply.error(refused(&error)),
        }
    }

    /// Answers with the inode that `name` means.
    pub(super) fn reply_entry(&self, name: NameId, result: Result<Attr, FsError>, reply: ReplyEntry) {
        match result {
            Ok(attr) => {
                self.cache.files().takes_size(convert::to_fuse_ino(self.root, attr.ino), attr.size);
                self.entry(name, &attr, reply)();
            }
            Err(error) => reply.error(refused(&error)),
        }
    }

    /// As `reply_attr`, for attributes that were read, with the server's number before that. If they show another client's change, the pages of before are
    /// forgotten: before a program is told of it, and behind the answer if the kernel asks for the sake of a read (`is_reading`) that needs another length,
    /// which the kernel would not take otherwise.
    pub(super) fn tell_attr(
        &self,
        epoch: u64,
        result: Result<Attr, FsError>,
        is_reading: bool,
        reply: ReplyAttr,
    ) {
        let Ok(attr) = result else { return self.reply_attr(result, reply) };
        let answer = self.attr(&attr, reply);
        self.tell(epoch, &attr, is_reading, answer);
    }

    /// As `tell_attr`, for an inode that was looked up.
    pub(super) fn tell_entry(
        &self,
        epoch: u64,
        name: NameId,
        result: Result<Attr, FsError>,
        reply: ReplyEntry,
    ) {
        let Ok(attr) = result else { return self.reply_entry(name, result, reply) };
        let answer = self.entry(name, &attr, reply);
        self.tell(epoch, &attr, false, answer);
    }

    fn tell(&self, epoch: u64, attr: &Attr, is_reading: bool, answer: impl FnOnce() + Send + 'static) {
        let at = At::of(&*self.volume, epoch, attr.change);
        self.cache.tell(convert::to_fuse_ino(self.root, attr.ino), at, attr.size, is_reading, answer);
    }

    /// The answer with these attributes, which the kernel is going to be told.
    fn attr(&self, attr: &Attr, reply: ReplyAttr) -> impl FnOnce() + Send + 'static + use<V> {
        self.lacking.told(attr);
        let (lifetime, told) = (self.settings.attr_cache, convert::to_file_attr(self.root, attr));
        move || reply.attr(&lifetime, &told)
    }

    /// The answer with the inode that `name` means, which the kernel is going to be told.
    fn entry(&self, name: NameId, attr: &Attr, reply: ReplyEntry) -> impl FnOnce() + Send + 'static + use<V> {
        self.lacking.told(attr);
        self.names.told(name, attr);
        let (attr_cache, entry_cache) = (self.settings.attr_cache, self.settings.entry_cache);
        let told = convert::to_file_attr(self.root, attr);
        move || reply.entry_with_ttls(&attr_cache, &entry_cache, &told, GENERATION)
    }

    /// The attributes of an entry for readdirplus, and whether they are known. The kernel has one inode number for the name and for the attributes,
    /// so an entry cannot be listed without them (0 would hide the name). In a directory that may be read and not searched they may not be known:
    /// then the answer has only the number and the type, with no lifetime.
    pub(super) fn listed_attr(
        &self,
        caller: &Caller,
        directory: InodeNo,
        entry: &DirEntry<'_>,
    ) -> (FileAttr, bool) {
        let bare = || FileAttr {
            ino: convert::to_fuse_ino(self.root, entry.ino),
            kind: convert::to_file_type(entry.kind),
            ..FileAttr::NONE
        };
        if directory::is_dot(entry.name) {
            // Of these two the kernel takes only the number and the type.
            return (bare(), true);
        }
        let attr = entry.attr.map_or_else(|| self.volume.get_attr(caller, entry.ino).ok(), Some);
        let Some(attr) = attr else { return (bare(), false) };
        self.lacking.told(&attr);
        self.names.told(NameId::new(directory, entry.name), &attr);
        self.cache.files().takes_size(convert::to_fuse_ino(self.root, attr.ino), attr.size);
        (convert::to_file_attr(self.root, &attr), true)
    }
}

/// The errno of an error, which is logged inside the request's span.
pub(super) fn refused(error: &FsError) -> Errno {
    tracing::debug!(%error, "refused");
    errno::of(error)
}

pub(super) fn reply_done(result: Result<(), FsError>, reply: ReplyEmpty) {
    match result {
        Ok(()) => {
            reply.ok();
        }
        Err(error) => reply.error(refused(&error)),
    }
}

/// Answers a request for a value or its length (listxattr(2): size 0 asks for the length).
pub(super) fn reply_sized(result: Result<Vec<u8>, FsError>, size: u32, reply: ReplyXattr) {
    match result {
        Ok(value) => match u32::try_from(value.len()) {
            Ok(len) if size == 0 => reply.size(len),
            Ok(len) if len <= size => reply.data(&value),
            _ => reply.error(Errno::ERANGE),
        },
        Err(error) => reply.error(refused(&error)),
    }
}
