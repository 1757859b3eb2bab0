//! Permissions of extended attributes (xattr(7)).

use super::permission::{Judge, Need};
use cuttlefs_common::attr::{ACCESS_ACL_XATTR, CAPABILITY_XATTR, DEFAULT_ACL_XATTR, FileKind};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;

const STICKY: u16 = 0o1000;

/// The kind of an attribute, which decides who may read and change it.
enum Namespace {
    /// Read and written by whoever may read and write the inode.
    User,
    /// For root only, also the name.
    Trusted,
    /// Read by everybody, changed by root.
    Security,
    /// Access control lists: read by everybody, changed by the owner.
    AccessLists,
    /// Another prefix: there are no such attributes.
    Unknown,
}

fn namespace(name: &[u8]) -> Namespace {
    match name {
        ACCESS_ACL_XATTR | DEFAULT_ACL_XATTR => Namespace::AccessLists,
        _ if name.starts_with(b"user.") => Namespace::User,
        _ if name.starts_with(b"trusted.") => Namespace::Trusted,
        _ if name.starts_with(b"security.") => Namespace::Security,
        _ => Namespace::Unknown,
    }
}

impl Judge<'_> {
    /// # Errors
    /// `NoAttribute` if the identity may not even know whether it exists; `Denied`, `Unsupported`, `Stale`.
    pub(super) fn read_xattr(&self, ino: InodeNo, name: &[u8]) -> Result<(), Status> {
        if !self.who.checked {
            return Ok(());
        }
        match namespace(name) {
            Namespace::Security | Namespace::AccessLists => Ok(()),
            Namespace::Trusted if self.who.is_privileged() => Ok(()),
            Namespace::Trusted => Err(Status::NoAttribute),
            Namespace::Unknown => Err(Status::Unsupported),
            Namespace::User => {
                let attr = self.meta.attr(ino)?;
                match attr.kind {
                    FileKind::File | FileKind::Directory => self.check(&attr, Need::Read),
                    _ => Err(Status::NoAttribute),
                }
            }
        }
    }

    /// `removes`: the attribute is removed, not set.
    ///
    /// # Errors
    /// `NotPermitted`, `Denied`, `Unsupported`, `Stale`.
    pub(super) fn change_xattr(&self, ino: InodeNo, name: &[u8], removes: bool) -> Result<(), Status> {
        if !self.who.checked {
            return Ok(());
        }
        let attr = self.meta.attr(ino)?;
        match namespace(name) {
            Namespace::Security | Namespace::Trusted if self.who.is_privileged() => Ok(()),
            // A write removes it, and a client's kernel asks for that.
            Namespace::Security if removes && name == CAPABILITY_XATTR => self.check(&attr, Need::Write),
            Namespace::Security | Namespace::Trusted => Err(Status::NotPermitted),
            Namespace::AccessLists => self.check(&attr, Need::Own),
            Namespace::Unknown => Err(Status::Unsupported),
            Namespace::User => {
                match attr.kind {
                    FileKind::File => {}
                    FileKind::Directory if attr.mode & STICKY == 0 => {}
                    FileKind::Directory => self.check(&attr, Need::Own)?,
                    _ => return Err(Status::NotPermitted),
                }
                self.check(&attr, Need::Write)
            }
        }
    }

    /// Whether a listing has this attribute.
    pub fn may_know_xattr(&self, name: &[u8]) -> bool {
        self.who.is_privileged() || !matches!(namespace(name), Namespace::Trusted)
    }
}
