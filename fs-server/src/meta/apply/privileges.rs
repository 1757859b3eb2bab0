//! Set-id bits and capabilities that a file loses when it is written or given away, or its group changes.
//!
//! The rules are those of Linux's `setattr_should_drop_suidgid` and `chown_common`. The client's kernel says with the request whether the caller may
//! keep these bits.

use super::super::draft::Draft;
use super::super::error::MetaError;
use super::super::operation::{ApplyContext, Caller, Outcome};
use super::super::record::InodeRecord;
use super::attributes::drop_xattr;
use super::touch_inode;
use cuttlefs_common::attr::{CAPABILITY_XATTR, InodeFlags};
use cuttlefs_common::ids::InodeNo;

const S_ISUID: u16 = 0o4000;
const S_ISGID: u16 = 0o2000;
const GROUP_EXECUTE: u16 = 0o010;
const ROOT_USER: u32 = 0;

/// Takes all privileges from a file, if the caller may not keep them when it changes the contents.
pub(super) fn drop_privileges(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    ino: InodeNo,
) -> Result<Outcome, MetaError> {
    let record = draft.inode(ino)?;
    let Some(without) = without_privileges(draft, ino, record, &context.caller)? else {
        return Ok(Outcome { attr: Some(record.attr(ino)), ..Outcome::default() });
    };
    draft.put_inode(ino, without);
    let record = draft.edit_inode(ino, |record| touch_inode(record, context))?;
    Ok(Outcome { attr: Some(record.attr(ino)), ..Outcome::default() })
}

/// The record without privileges, if it has any. Its capabilities are removed in this batch.
pub(super) fn without_privileges(
    draft: &mut Draft<'_>,
    ino: InodeNo,
    mut record: InodeRecord,
    caller: &Caller,
) -> Result<Option<InodeRecord>, MetaError> {
    let mode = without_set_ids(&record, caller);
    let has_capability = record.flags.has(InodeFlags::CAPABILITY);
    if record.is_directory() || (mode == record.mode && !has_capability) {
        return Ok(None);
    }
    record.mode = mode;
    if has_capability {
        drop_xattr(draft, ino, &mut record, CAPABILITY_XATTR)?;
    }
    Ok(Some(record))
}

/// The mode of a file, not of a directory, after such a change. Without the group's execute bit the set-group-id bit used to mean mandatory locking,
/// so it stays if the caller is in the file's group.
pub(super) fn without_set_ids(record: &InodeRecord, caller: &Caller) -> u16 {
    let stays = record.mode & GROUP_EXECUTE == 0 && is_in_group(record, caller);
    record.mode & !S_ISUID & if stays { !0 } else { !S_ISGID }
}

/// Whether the caller is known to be in a file's group, or is root. Supplementary groups are not known here.
fn is_in_group(record: &InodeRecord, caller: &Caller) -> bool {
    caller.uid == ROOT_USER || caller.gid == record.gid
}
