//! Access control lists in metadata: kept in step with mode bits, and inherited.
//!
//! A list is stored as the extended attribute by which Linux knows it. The inode's flags (`InodeFlags`) say which lists it has, so that no list is
//! looked up in vain. An access list that says no more than the mode is not stored.

use super::super::draft::Draft;
use super::super::error::MetaError;
use super::super::operation::{ApplyContext, Outcome};
use super::super::record::InodeRecord;
use super::attributes::{drop_xattr, put_xattr};
use super::touch_inode;
use crate::acl::Acl;
use cuttlefs_common::attr::{ACCESS_ACL_XATTR, DEFAULT_ACL_XATTR, FileKind, InodeFlags};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;

const S_ISGID: u16 = 0o2000;
const PERMISSIONS: u16 = 0o777;

/// The kind of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Access,
    Default,
}

impl Which {
    pub(super) fn of(name: &[u8]) -> Option<Self> {
        match name {
            ACCESS_ACL_XATTR => Some(Self::Access),
            DEFAULT_ACL_XATTR => Some(Self::Default),
            _ => None,
        }
    }

    const fn name(self) -> &'static [u8] {
        match self {
            Self::Access => ACCESS_ACL_XATTR,
            Self::Default => DEFAULT_ACL_XATTR,
        }
    }

    const fn mark(self) -> InodeFlags {
        match self {
            Self::Access => InodeFlags::ACCESS_ACL,
            Self::Default => InodeFlags::DEFAULT_ACL,
        }
    }
}

/// Sets a list. An access list sets the mode bits as well.
pub(super) fn set(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    ino: InodeNo,
    which: Which,
    value: &[u8],
) -> Result<Outcome, MetaError> {
    let mut record = draft.inode(ino)?;
    let acl = Acl::parse(value)?;
    match (record.kind, which) {
        (FileKind::Symlink, _) => return Err(Status::Unsupported.into()),
        (FileKind::Directory, _) | (_, Which::Access) => {}
        (_, Which::Default) => return Err(Status::Denied.into()),
    }
    if let (Which::Access, Some(acl)) = (which, &acl) {
        record.mode = record.mode & !PERMISSIONS | acl.mode();
        if context.caller.drops_privileges {
            record.mode &= !S_ISGID;
        }
    }
    let is_stored = |acl: &Acl| which == Which::Default || !acl.is_minimal();
    match acl.filter(is_stored) {
        Some(acl) => put_xattr(draft, ino, &mut record, which.name(), &acl.encode())?,
        None if record.flags.has(which.mark()) => drop_xattr(draft, ino, &mut record, which.name())?,
        None => {}
    }
    draft.put_inode(ino, record);
    let record = draft.edit_inode(ino, |record| touch_inode(record, context))?;
    Ok(Outcome { attr: Some(record.attr(ino)), ..Outcome::default() })
}

/// The flag of an inode with an attribute of this name.
pub(super) fn mark_of(name: &[u8]) -> Option<InodeFlags> {
    Which::of(name).map(Which::mark)
}

/// Changes a file's access list after its mode bits have changed.
pub(super) fn follow_mode(
    draft: &mut Draft<'_>,
    ino: InodeNo,
    record: &mut InodeRecord,
) -> Result<(), MetaError> {
    if !record.flags.has(InodeFlags::ACCESS_ACL) {
        return Ok(());
    }
    let mut acl = stored(draft, ino, Which::Access)?;
    acl.set_mode(record.mode);
    put_xattr(draft, ino, record, ACCESS_ACL_XATTR, &acl.encode())
}

/// Gives a new inode in `parent` its mode and lists: by the directory's default list if it has one, else by the umask. `record` has the requested
/// mode.
pub(super) fn inherit(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    parent: InodeNo,
    ino: InodeNo,
    record: &mut InodeRecord,
) -> Result<(), MetaError> {
    if record.kind == FileKind::Symlink {
        return Ok(());
    }
    if !draft.inode(parent)?.flags.has(InodeFlags::DEFAULT_ACL) {
        record.mode &= !context.caller.umask;
        return Ok(());
    }
    let default = stored(draft, parent, Which::Default)?;
    let (access, mode) = default.inherit(record.mode);
    record.mode = mode;
    if !access.is_minimal() {
        put_xattr(draft, ino, record, ACCESS_ACL_XATTR, &access.encode())?;
    }
    if record.is_directory() {
        put_xattr(draft, ino, record, DEFAULT_ACL_XATTR, &default.encode())?;
    }
    Ok(())
}

fn stored(draft: &Draft<'_>, ino: InodeNo, which: Which) -> Result<Acl, MetaError> {
    let value = draft.view.xattr(ino, which.name())?;
    let acl = value.and_then(|value| Acl::parse(&value).ok().flatten());
    acl.ok_or(MetaError::Inconsistent { what: "an access control list is marked and not there", ino: ino.0 })
}
