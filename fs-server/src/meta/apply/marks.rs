//! The chattr marks of an inode, and the operations that they forbid. The rules are those of the kernel's `fs/namei.c`, which
//! cannot apply them here, for FUSE does not tell it of chattr marks. They hold for every user, root included.

use super::super::record::InodeRecord;
use cuttlefs_common::attr::InodeFlags;
use cuttlefs_common::status::Status;

const FIXED: InodeFlags = InodeFlags::IMMUTABLE.with(InodeFlags::APPEND_ONLY, true);

/// What happens to a directory's entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entries {
    /// One more.
    Added,
    /// One fewer, or one that means something else.
    Removed,
}

/// Whether entries of a directory may be changed.
pub(super) fn may_change_entries(directory: &InodeRecord, how: Entries) -> Result<(), Status> {
    let forbidding = match how {
        Entries::Added => InodeFlags::IMMUTABLE,
        Entries::Removed => FIXED,
    };
    if directory.flags.has_any(forbidding) { Err(Status::NotPermitted) } else { Ok(()) }
}

/// Whether an inode itself, or its names, may be changed.
pub(super) fn may_change(record: &InodeRecord) -> Result<(), Status> {
    if record.flags.has_any(FIXED) { Err(Status::NotPermitted) } else { Ok(()) }
}
