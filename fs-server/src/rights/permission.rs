//! Permissions of inodes: the only place where permission bits are looked at.
//!
//! `Judge` decides for an identity that the server checks, as Linux's VFS does for a local file system: by the same rules and,
//! where there are two errors, with the same one (capabilities(7), path_resolution(7), chmod(2), chown(2), utimensat(2),
//! unlink(2), rename(2), link(2), xattr(7)).
//!
//! # Invariants
//! * An identity that is not checked is never refused anything here, and costs nothing.
//! * Nothing here takes the metadata's writer: changes are judged under it (`table`).

use super::identity::Identity;
use crate::acl::Acl;
use crate::meta::Meta;
use cuttlefs_common::attr::{Attr, FileKind, InodeFlags, SetAttr, SetTime};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;

/// The set-user-id bit: the program runs as the file's owner.
const SET_UID: u16 = 0o4000;
/// The set-group-id bit: the program runs with the file's group. On a directory: new inodes in it get its group.
const SET_GID: u16 = 0o2000;
/// The sticky bit of a directory: only owners remove names.
const STICKY: u16 = 0o1000;
const GROUP_EXECUTE: u16 = 0o010;

/// A permission that an operation needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Read bytes, or the names of a directory.
    Read,
    /// Write bytes, or (with `Search`) change the names of a directory.
    Write,
    /// Look up names in a directory.
    Search,
    /// Make and remove names in a directory.
    ChangeEntries,
    /// Own the inode.
    Own,
}

/// Decides what one identity may do.
#[derive(Clone, Copy)]
pub struct Judge<'j> {
    /// The metadata with the modes and lists.
    pub meta: &'j Meta,
    /// The identity.
    pub who: &'j Identity,
}

impl Judge<'_> {
    /// The bits (rwx) of the mode that count for this identity.
    fn granted(&self, attr: &Attr) -> u16 {
        let shift = if attr.uid == self.who.uid {
            6
        } else if self.who.is_in(attr.gid) {
            3
        } else {
            0
        };
        attr.mode >> shift & 7
    }

    /// The access control list that counts instead of the mode, if there is one. For the owner the mode counts.
    fn list(&self, attr: &Attr) -> Result<Option<Acl>, Status> {
        if attr.uid == self.who.uid || !attr.flags.has(InodeFlags::ACCESS_ACL) {
            return Ok(None);
        }
        // The list was removed meanwhile, so the mode counts.
        let Some(value) = self.meta.access_list(attr.ino)? else { return Ok(None) };
        Acl::parse(&value).map_err(|_| Status::Io)
    }

    /// Checks that the identity has a permission.
    ///
    /// # Errors
    /// `Denied`, or `NotPermitted` if it would have to be the owner.
    pub fn check(&self, attr: &Attr, need: Need) -> Result<(), Status> {
        if self.who.is_privileged() {
            return Ok(());
        }
        let bits = match need {
            Need::Own if attr.uid == self.who.uid => return Ok(()),
            Need::Own => return Err(Status::NotPermitted),
            Need::Read => 4,
            Need::Write => 2,
            Need::Search => 1,
            Need::ChangeEntries => 3,
        };
        let granted = match self.list(attr)? {
            Some(list) => {
                list.permits((attr.uid, attr.gid), self.who.uid, |group| self.who.is_in(group), bits)
            }
            None => self.granted(attr) & bits == bits,
        };
        if granted { Ok(()) } else { Err(Status::Denied) }
    }

    /// Like `check`, for the inode of this number.
    ///
    /// # Errors
    /// As `check`; `Stale` if the inode is gone.
    pub fn check_inode(&self, ino: InodeNo, need: Need) -> Result<(), Status> {
        if self.who.is_privileged() { Ok(()) } else { self.check(&self.meta.attr(ino)?, need) }
    }

    /// The attributes of a directory in which the identity may look up names.
    ///
    /// # Errors
    /// `NotDirectory`, `Denied`, `Stale`.
    pub fn directory(&self, ino: InodeNo) -> Result<Attr, Status> {
        let attr = self.meta.attr(ino)?;
        if attr.kind != FileKind::Directory {
            return Err(Status::NotDirectory);
        }
        self.check(&attr, Need::Search)?;
        Ok(attr)
    }

    /// The inode of a name, if there is one.
    ///
    /// # Errors
    /// If the name is wrong, or the metadata is damaged.
    pub fn find(&self, parent: InodeNo, name: &[u8]) -> Result<Option<Attr>, Status> {
        match self.meta.lookup(parent, name) {
            Ok(attr) => Ok(Some(attr)),
            Err(Status::NotFound) => Ok(None),
            Err(status) => Err(status),
        }
    }

    /// Checks that an entry may be removed from its directory, or replaced.
    ///
    /// # Errors
    /// `Denied`; `NotPermitted` if the directory is sticky and the identity owns neither it nor the entry.
    pub fn check_removal(&self, directory: &Attr, entry: &Attr) -> Result<(), Status> {
        self.check(directory, Need::ChangeEntries)?;
        if directory.mode & STICKY == 0 || entry.uid == self.who.uid {
            return Ok(());
        }
        self.check(directory, Need::Own)
    }

    /// Checks that another name may be made for an inode. POSIX demands no right for that. Linux does (`fs.protected_hardlinks`), so that a stranger
    /// cannot keep a file from being freed, and so does this.
    ///
    /// # Errors
    /// `NotPermitted`.
    pub fn check_link(&self, attr: &Attr) -> Result<(), Status> {
        let set_group = SET_GID | GROUP_EXECUTE;
        let is_harmless =
            attr.kind == FileKind::File && attr.mode & SET_UID == 0 && attr.mode & set_group != set_group;
        let is_theirs_to_use = self.check(attr, Need::Read).is_ok() && self.check(attr, Need::Write).is_ok();
        if is_harmless && is_theirs_to_use { Ok(()) } else { self.check(attr, Need::Own) }
    }

    /// Checks that a node may be made. Anybody may make the whiteouts of RENAME_WHITEOUT.
    ///
    /// # Errors
    /// `NotPermitted` for a device.
    pub fn check_device(&self, kind: FileKind, rdev: u32) -> Result<(), Status> {
        let is_device = kind == FileKind::BlockDevice || kind == FileKind::CharDevice && rdev != 0;
        if is_device && !self.who.is_privileged() { Err(Status::NotPermitted) } else { Ok(()) }
    }

    /// The mode of a new inode that is not a directory. It loses the set-group-id bit if the identity is not in the inherited group, for it would
    /// make a program that runs with that group.
    pub fn new_mode(&self, parent: &Attr, mode: u16) -> u16 {
        let runs_with_group = mode & (SET_GID | GROUP_EXECUTE) == SET_GID | GROUP_EXECUTE;
        let is_foreign = parent.mode & SET_GID != 0 && !self.is_in_or_privileged(parent.gid);
        if runs_with_group && is_foreign { mode & !SET_GID } else { mode }
    }

    fn is_in_or_privileged(&self, gid: u32) -> bool {
        self.who.is_privileged() || self.who.is_in(gid)
    }

    /// The change of attributes to make when `set` is asked for: `set`, and the bits that it must take as well. `may_write`: the requester has the
    /// file open for writing, whatever its mode is by now.
    ///
    /// # Errors
    /// `Denied`, or `NotPermitted` if it would have to be the owner or privileged.
    pub fn changed(&self, attr: &Attr, set: &SetAttr, may_write: bool) -> Result<SetAttr, Status> {
        let mut set = *set;
        if self.who.is_privileged() {
            return Ok(set);
        }
        if set.size.is_some() && !may_write {
            self.check(attr, Need::Write)?;
        }
        if set.uid.is_some_and(|uid| uid != attr.uid || attr.uid != self.who.uid) {
            return Err(Status::NotPermitted);
        }
        if set.gid.is_some_and(|gid| attr.uid != self.who.uid || gid != attr.gid && !self.who.is_in(gid)) {
            return Err(Status::NotPermitted);
        }
        self.check_mode(attr, &set, may_write)?;
        self.check_times(attr, &set)?;
        self.check_flags(attr, &set)?;
        if attr.kind != FileKind::Directory {
            let gives = set.uid.is_some() || set.gid.is_some();
            if gives || set.size.is_some() && attr.kind == FileKind::File {
                let mode = set.mode.unwrap_or(attr.mode);
                let left = self.without_set_ids(attr, mode);
                // The mode is set even if it stays the same: metadata knows one group of the caller only, and would take a bit that a member by
                // another group may keep.
                let has_set_ids = attr.mode & (SET_UID | SET_GID) != 0;
                set.mode = (has_set_ids || set.mode.is_some()).then_some(left);
            }
        }
        let group = set.gid.unwrap_or(attr.gid);
        if !self.who.is_in(group) {
            // An identity outside of the group cannot set its set-group-id bit.
            set.mode = set.mode.map(|mode| mode & !SET_GID);
        }
        Ok(set)
    }

    /// Checks a change of mode. Only the owner may chmod(2), but a client's kernel also sends, as the writing user, the change that a write makes.
    fn check_mode(&self, attr: &Attr, set: &SetAttr, may_write: bool) -> Result<(), Status> {
        let is_by_write = |mode| {
            // A write takes bits from files only. A directory loses none when a user makes names in it.
            attr.kind == FileKind::File && mode != attr.mode && mode == self.without_set_ids(attr, attr.mode)
        };
        match set.mode {
            None => Ok(()),
            Some(mode) if is_by_write(mode) => match self.check(attr, Need::Own) {
                Err(_) if may_write => Ok(()),
                Err(_) => self.check(attr, Need::Write),
                owner => owner,
            },
            Some(_) => self.check(attr, Need::Own),
        }
    }

    /// Checks a change of times. Setting both to the server's clock needs the right to write, all else ownership.
    fn check_times(&self, attr: &Attr, set: &SetAttr) -> Result<(), Status> {
        if set.ctime.is_some() {
            return Err(Status::NotPermitted);
        }
        // A change of length already sets the modification time.
        let mtime = set.mtime.filter(|mtime| set.size.is_none() || *mtime != SetTime::Now);
        match (set.atime, mtime) {
            (None, None) => Ok(()),
            (Some(SetTime::Now), Some(SetTime::Now)) => {
                self.check(attr, Need::Own).or_else(|_| self.check(attr, Need::Write))
            }
            _ => self.check(attr, Need::Own),
        }
    }

    /// Checks a change of chattr marks: they need ownership, and marks that bind the owner as well need root.
    fn check_flags(&self, attr: &Attr, set: &SetAttr) -> Result<(), Status> {
        let Some(flags) = set.flags else { return Ok(()) };
        self.check(attr, Need::Own)?;
        let binding = InodeFlags::IMMUTABLE.with(InodeFlags::APPEND_ONLY, true).0;
        if (flags.0 ^ attr.flags.0) & binding == 0 { Ok(()) } else { Err(Status::NotPermitted) }
    }

    /// The bits of a mode that are left after a change of contents or of the owner.
    fn without_set_ids(&self, attr: &Attr, mode: u16) -> u16 {
        let mode = mode & !SET_UID;
        let keeps = mode & GROUP_EXECUTE == 0 && self.who.is_in(attr.gid);
        if keeps { mode } else { mode & !SET_GID }
    }
}
