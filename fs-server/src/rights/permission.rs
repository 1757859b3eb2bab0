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

/// Run as the owner.
const SET_UID: u16 = 0o4000;
/// Run with the group; on a directory: what is made in it has its group.
const SET_GID: u16 = 0o2000;
/// Of a directory: only owners remove.
const STICKY: u16 = 0o1000;
const GROUP_EXECUTE: u16 = 0o010;

/// A permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// To read: bytes, or names of a directory.
    Read,
    /// To write: bytes, or (with `Search`) names of a directory.
    Write,
    /// To reach what a directory names.
    Search,
    /// To make and remove names of a directory.
    ChangeEntries,
    /// To be the owner.
    Own,
}

/// Decides for one identity.
#[derive(Clone, Copy)]
pub struct Judge<'j> {
    /// What it decides by.
    pub meta: &'j Meta,
    /// For whom.
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

    /// The access control list that counts instead of the mode, if there is one. An owner's bits are those of the mode.
    fn list(&self, attr: &Attr) -> Result<Option<Acl>, Status> {
        if attr.uid == self.who.uid || !attr.flags.has(InodeFlags::ACCESS_ACL) {
            return Ok(None);
        }
        // Removed meanwhile: the mode says all.
        let Some(value) = self.meta.access_list(attr.ino)? else { return Ok(None) };
        Acl::parse(&value).map_err(|_| Status::Io)
    }

    /// Whether it may.
    ///
    /// # Errors
    /// `Denied`, or `NotPermitted` where ownership is needed.
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

    /// As `check`, of an inode by its number.
    ///
    /// # Errors
    /// As `check`; `Stale` if it is gone.
    pub fn check_inode(&self, ino: InodeNo, need: Need) -> Result<(), Status> {
        if self.who.is_privileged() { Ok(()) } else { self.check(&self.meta.attr(ino)?, need) }
    }

    /// A directory that names are looked for in.
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

    /// What a name means, if it means anything.
    ///
    /// # Errors
    /// What is wrong with the name or the metadata.
    pub fn find(&self, parent: InodeNo, name: &[u8]) -> Result<Option<Attr>, Status> {
        match self.meta.lookup(parent, name) {
            Ok(attr) => Ok(Some(attr)),
            Err(Status::NotFound) => Ok(None),
            Err(status) => Err(status),
        }
    }

    /// Whether an entry may be removed from its directory, or replaced.
    ///
    /// # Errors
    /// `Denied`; `NotPermitted` where the directory is sticky and neither is this identity's.
    pub fn check_removal(&self, directory: &Attr, entry: &Attr) -> Result<(), Status> {
        self.check(directory, Need::ChangeEntries)?;
        if directory.mode & STICKY == 0 || entry.uid == self.who.uid {
            return Ok(());
        }
        self.check(directory, Need::Own)
    }

    /// Whether another name may be made for an inode. POSIX asks for nothing; Linux asks for what keeps a stranger from holding
    /// on to a file (`fs.protected_hardlinks`), and so does this.
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

    /// Whether a node may be made. What RENAME_WHITEOUT leaves behind anybody may make.
    ///
    /// # Errors
    /// `NotPermitted` for a device.
    pub fn check_device(&self, kind: FileKind, rdev: u32) -> Result<(), Status> {
        let is_device = kind == FileKind::BlockDevice || kind == FileKind::CharDevice && rdev != 0;
        if is_device && !self.who.is_privileged() { Err(Status::NotPermitted) } else { Ok(()) }
    }

    /// The mode of a new inode that is no directory: who is not in the group that it inherits does not make a program that runs
    /// with it.
    pub fn new_mode(&self, parent: &Attr, mode: u16) -> u16 {
        let runs_with_group = mode & (SET_GID | GROUP_EXECUTE) == SET_GID | GROUP_EXECUTE;
        let is_foreign = parent.mode & SET_GID != 0 && !self.is_in_or_privileged(parent.gid);
        if runs_with_group && is_foreign { mode & !SET_GID } else { mode }
    }

    fn is_in_or_privileged(&self, gid: u32) -> bool {
        self.who.is_privileged() || self.who.is_in(gid)
    }

    /// The change of attributes that is made when this one is asked for: what it must take besides, it takes.
    /// `may_write`: whoever asks has the file open for writing, whatever its bits say by now.
    ///
    /// # Errors
    /// `Denied`, or `NotPermitted` where ownership or privilege is needed.
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
                // Said also where nothing goes: metadata knows of one group only, and would take what a member by another one keeps.
                let has_set_ids = attr.mode & (SET_UID | SET_GID) != 0;
                set.mode = (has_set_ids || set.mode.is_some()).then_some(left);
            }
        }
        let group = set.gid.unwrap_or(attr.gid);
        if !self.who.is_in(group) {
            // Who is not in a group gives nobody its rights.
            set.mode = set.mode.map(|mode| mode & !SET_GID);
        }
        Ok(set)
    }

    /// chmod(2) is the owner's. A client's kernel also asks for the change of mode that a write makes, as whoever writes.
    fn check_mode(&self, attr: &Attr, set: &SetAttr, may_write: bool) -> Result<(), Status> {
        let is_by_write = |mode| {
            // Who may write a directory makes names in it, which takes no bits from it.
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

    /// Times of the server's clock, both, are anybody's who may write; all else is the owner's.
    fn check_times(&self, attr: &Attr, set: &SetAttr) -> Result<(), Status> {
        if set.ctime.is_some() {
            return Err(Status::NotPermitted);
        }
        // A change of length sets the time of the contents by itself.
        let mtime = set.mtime.filter(|mtime| set.size.is_none() || *mtime != SetTime::Now);
        match (set.atime, mtime) {
            (None, None) => Ok(()),
            (Some(SetTime::Now), Some(SetTime::Now)) => {
                self.check(attr, Need::Own).or_else(|_| self.check(attr, Need::Write))
            }
            _ => self.check(attr, Need::Own),
        }
    }

    /// chattr(1) is the owner's, but for what binds the owner, too.
    fn check_flags(&self, attr: &Attr, set: &SetAttr) -> Result<(), Status> {
        let Some(flags) = set.flags else { return Ok(()) };
        self.check(attr, Need::Own)?;
        let binding = InodeFlags::IMMUTABLE.with(InodeFlags::APPEND_ONLY, true).0;
        if (flags.0 ^ attr.flags.0) & binding == 0 { Ok(()) } else { Err(Status::NotPermitted) }
    }

    /// What a change of contents, or of the owner, leaves of a mode.
    fn without_set_ids(&self, attr: &Attr, mode: u16) -> u16 {
        let mode = mode & !SET_UID;
        let keeps = mode & GROUP_EXECUTE == 0 && self.who.is_in(attr.gid);
        if keeps { mode } else { mode & !SET_GID }
    }
}
