//! The chattr marks of an inode, and the operations that they forbid. The rules are those of the kernel's `fs/namei.c`, which cannot apply them here,
//! because FUSE does not tell it of chattr marks. They apply to every user, also to root.

use super::super::record::InodeRecord;
use cuttlefs_common::attr::InodeFlags;
use cuttlefs_common::status::Status;

const FIXED: InodeFlags = InodeFlags::IMMUTABLE.with(InodeFlags::APPEND_ONLY, true);

/// A change of a directory's entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entries {
    /// An entry is added.
    Added,
    /// An entry is removed, or names another inode.
    Removed,
}

/// Checks that the entries of a directory may be changed.
pub(super) fn may_change_entries(directory: &InodeRecord, how: Entries) -> Result<(), Status> {
    let forbidding = match how {
        Entries::Added => InodeFlags::IMMUTABLE,
        Entries::Removed => FIXED,
    };
    if directory.flags.has_any(forbidding) { Err(Status::NotPermitted) } else { Ok(()) }
}

/// Checks that an inode or its names may be changed.
pub(super) fn may_change(record: &InodeRecord) -> Result<(), Status> {
    if record.flags.has_any(FIXED) { Err(Status::NotPermitted) } else { Ok(()) }
}
