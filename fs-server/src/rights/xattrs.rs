//! Permissions of extended attributes (xattr(7)).

use super::permission::{Judge, Need};
use cuttlefs_common::attr::{ACCESS_ACL_XATTR, CAPABILITY_XATTR, DEFAULT_ACL_XATTR, FileKind};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;

const STICKY: u16 = 0o1000;

/// Who an attribute belongs to.
enum Namespace {
    /// Whoever may read and write the inode.
    User,
    /// Root, also its name.
    Trusted,
    /// Anybody to read, root to change.
    Security,
    /// Access control lists: anybody to read, the owner to change.
    AccessLists,
    /// There is none of that name.
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
    /// `NoAttribute` where not even its being there may be known, `Denied`, `Unsupported`, `Stale`.
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

    /// `removes`: it is not given another value.
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
            // A write takes it, and a client's kernel has it taken.
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

    /// Whether a listing tells of an attribute.
    pub fn may_know_xattr(&self, name: &[u8]) -> bool {
        self.who.is_privileged() || !matches!(namespace(name), Namespace::Trusted)
    }
}
