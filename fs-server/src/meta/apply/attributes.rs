//! Operations on an inode's attributes, plain and extended.

use super::super::draft::Draft;
use super::super::error::MetaError;
use super::super::extent_edit;
use super::super::images;
use super::super::key;
use super::super::operation::{
    ApplyContext, Covers, DataCommit, Outcome, XATTR_PIECE_BYTES, XATTRS_PER_INODE_MAX,
};
use super::super::record::{self, BytesRecord, InodeRecord, XattrHead, is_valid_time};
use super::super::written::Cut;
use super::{acl, data, marks, privileges, touch_inode};
use cuttlefs_common::attr::{CAPABILITY_XATTR, FileKind, InodeFlags, SetAttr, SetTime, Timestamp};
use cuttlefs_common::ids::{FilePage, InodeNo, MAX_FILE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::rpc::{XATTR_LIST_MAX, XATTR_NAME_MAX, XATTR_VALUE_MAX, XattrMode};
use cuttlefs_common::status::Status;

const MODE: u16 = 0o7777;
/// Most pieces of a value.
const XATTR_PIECES_MAX: usize = XATTR_VALUE_MAX.div_ceil(XATTR_PIECE_BYTES);
/// If an inode has no more attributes than this, their list is short enough whatever their names are.
const XATTRS_WITH_ANY_NAMES: u32 = (XATTR_LIST_MAX / (XATTR_NAME_MAX + 1)) as u32;
// The number of a piece is one byte of its key.
const _: () = assert!(XATTR_PIECES_MAX <= u8::MAX as usize + 1);

pub(super) fn set_attr(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    ino: InodeNo,
    set: &SetAttr,
    commit: Option<&DataCommit>,
) -> Result<Outcome, MetaError> {
    let record = draft.inode(ino)?;
    if *set == SetAttr::default() && commit.is_none() {
        // POSIX leaves open whether `chown(-1, -1)` changes the times. Nothing else changes, so nothing is written.
        return Ok(Outcome { attr: Some(record.attr(ino)), ..Outcome::default() });
    }
    check_times(set)?;
    let mut outcome = Outcome::default();
    let allocated_pages = match (set.size, commit) {
        (None, None) => record.allocated_pages,
        (None, Some(_)) => return Err(Status::Invalid.into()),
        (Some(size), commit) => truncate(draft, ino, &record, size, commit, &mut outcome)?,
    };
    let mut record = record;
    let gives_away = set.uid.is_some() || set.gid.is_some();
    if gives_away || (set.size.is_some() && context.caller.drops_privileges) {
        let without = privileges::without_privileges(draft, ino, record, &context.caller)?;
        record = without.unwrap_or(record);
    }
    record.allocated_pages = allocated_pages;
    change(&mut record, context, set);
    if let Some(commit) = commit {
        record.size = commit.size;
    }
    match (commit.map(|commit| &commit.covers), set.size) {
        (Some(Covers::Cut { all: true }), _) => record.written.cover(record.change),
        (Some(Covers::Cut { all: false }), Some(size)) => {
            record.written.cut(Cut { size, change: record.change });
        }
        _ => {}
    }
    if set.mode.is_some() {
        acl::follow_mode(draft, ino, &mut record)?;
    }
    draft.put_inode(ino, record);
    if let Some(commit) = commit {
        data::note_cut(draft, commit);
    }
    outcome.attr = Some(record.attr(ino));
    Ok(outcome)
}

fn check_times(set: &SetAttr) -> Result<(), Status> {
    let given = |time: Option<SetTime>| match time {
        Some(SetTime::At(time)) => Some(time),
        _ => None,
    };
    let times = [given(set.atime), given(set.mtime), set.ctime];
    if times.into_iter().flatten().all(is_valid_time) { Ok(()) } else { Err(Status::Invalid) }
}

/// Edits the extents for a new size. Returns the number of pages that are allocated then.
fn truncate(
    draft: &mut Draft<'_>,
    ino: InodeNo,
    record: &InodeRecord,
    size: u64,
    commit: Option<&DataCommit>,
    outcome: &mut Outcome,
) -> Result<u64, MetaError> {
    match record.kind {
        FileKind::File => {}
        FileKind::Directory => return Err(Status::IsDirectory.into()),
        _ => return Err(Status::Invalid.into()),
    }
    if size > MAX_FILE_SIZE {
        return Err(Status::TooLarge.into());
    }
    match commit {
        // The durable length stays below the new one while bytes before it are not durable.
        Some(commit) if commit.ino != ino || commit.size > size => Err(Status::Invalid.into()),
        Some(commit) => {
            images::change(draft, commit)?;
            data::edit_ranges(draft, ino, record.allocated_pages, &commit.ranges)
        }
        None if record.allocated_pages == 0 => Ok(0),
        None => {
            let end = FilePage(size.div_ceil(PAGE_SIZE_U64));
            let (update, freed) = extent_edit::trim(draft.view, ino, end)?;
            outcome.freed = freed;
            images::follow(draft, ino, &update)?;
            data::edit_ranges(draft, ino, record.allocated_pages, &[update])
        }
    }
}

fn change(record: &mut InodeRecord, context: &ApplyContext<'_>, set: &SetAttr) {
    let at = |time: SetTime| -> Timestamp {
        match time {
            SetTime::Now => context.now,
            SetTime::At(time) => time,
        }
    };
    touch_inode(record, context);
    if let Some(size) = set.size {
        record.size = size;
        // Also if the length stays the same: a successful `ftruncate` changes both times.
        record.mtime = context.now;
    }
    record.uid = set.uid.unwrap_or(record.uid);
    record.gid = set.gid.unwrap_or(record.gid);
    if let Some(mode) = set.mode {
        record.mode = mode & MODE;
    }
    if let Some(flags) = set.flags {
        let settable = InodeFlags(flags.0 & InodeFlags::SETTABLE.0);
        record.flags = record.flags.with(InodeFlags::SETTABLE, false).with(settable, true);
    }
    record.atime = set.atime.map_or(record.atime, at);
    record.mtime = set.mtime.map_or(record.mtime, at);
    record.ctime = set.ctime.unwrap_or(record.ctime);
}

fn check_xattr_name(name: &[u8]) -> Result<(), Status> {
    if name.is_empty() || name.contains(&0) {
        return Err(Status::Invalid);
    }
    if name.len() > XATTR_NAME_MAX { Err(Status::NameTooLong) } else { Ok(()) }
}

pub(super) fn set_xattr(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    ino: InodeNo,
    name: &[u8],
    value: &[u8],
    mode: XattrMode,
) -> Result<Outcome, MetaError> {
    let mut record = draft.inode(ino)?;
    check_xattr_name(name)?;
    marks::may_change(&record)?;
    if value.len() > XATTR_VALUE_MAX {
        return Err(Status::ValueTooLarge.into());
    }
    if let Some(which) = acl::Which::of(name) {
        return acl::set(draft, context, ino, which, value);
    }
    // An inode with a count of 0 has no attributes, so the usual first one needs no scan.
    let is_new = record.xattrs == 0 || draft.view.keys(&key::all_of_xattr(ino, name))?.is_empty();
    match mode {
        XattrMode::Create if !is_new => return Err(Status::Exists.into()),
        XattrMode::Replace if is_new => return Err(Status::NoAttribute.into()),
        _ => {}
    }
    put_xattr(draft, ino, &mut record, name, value)?;
    touch_inode(&mut record, context);
    draft.put_inode(ino, record);
    Ok(Outcome { attr: Some(record.attr(ino)), ..Outcome::default() })
}

/// Puts an extended attribute into the batch in place of its old value, and updates count and flags in `record`.
pub(super) fn put_xattr(
    draft: &mut Draft<'_>,
    ino: InodeNo,
    record: &mut InodeRecord,
    name: &[u8],
    value: &[u8],
) -> Result<(), MetaError> {
    let old = if record.xattrs == 0 { Vec::new() } else { draft.view.keys(&key::all_of_xattr(ino, name))? };
    if old.is_empty() {
        if record.xattrs >= XATTRS_PER_INODE_MAX {
            return Err(Status::NoSpace.into());
        }
        if record.xattrs >= XATTRS_WITH_ANY_NAMES {
            let mut list_bytes = name.len() + 1;
            draft.view.xattr_names(ino, &mut |name| list_bytes += name.len() + 1)?;
            if list_bytes > XATTR_LIST_MAX {
                return Err(Status::NoSpace.into());
            }
        }
        record.xattrs += 1;
    }
    if let Some(mark) = mark_of(name) {
        record.flags = record.flags.with(mark, true);
    }
    for key in old {
        draft.batch.remove(key);
    }
    let (first, rest) = value.split_at(value.len().min(XATTR_PIECE_BYTES));
    let head = XattrHead { len_bytes: value.len() as u32, bytes: first };
    draft.batch.put(key::xattr(ino, name, 0), record::encode(&head));
    for (index, piece) in rest.chunks(XATTR_PIECE_BYTES).enumerate() {
        let piece = record::encode(&BytesRecord { bytes: piece });
        draft.batch.put(key::xattr(ino, name, index as u8 + 1), piece);
    }
    Ok(())
}

/// Removes an extended attribute in the batch, and updates count and flags in `record`.
pub(super) fn drop_xattr(
    draft: &mut Draft<'_>,
    ino: InodeNo,
    record: &mut InodeRecord,
    name: &[u8],
) -> Result<(), MetaError> {
    let old = draft.view.keys(&key::all_of_xattr(ino, name))?;
    if old.is_empty() {
        return Err(Status::NoAttribute.into());
    }
    if record.xattrs == 0 {
        return Err(MetaError::Inconsistent { what: "attributes are not counted", ino: ino.0 });
    }
    for key in old {
        draft.batch.remove(key);
    }
    record.xattrs -= 1;
    if let Some(mark) = mark_of(name) {
        record.flags = record.flags.with(mark, false);
    }
    Ok(())
}

/// The flag of an inode with an attribute of this name. The attribute is looked up only in inodes with the flag.
pub(crate) fn mark_of(name: &[u8]) -> Option<InodeFlags> {
    if name == CAPABILITY_XATTR { Some(InodeFlags::CAPABILITY) } else { acl::mark_of(name) }
}

pub(super) fn remove_xattr(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    ino: InodeNo,
    name: &[u8],
) -> Result<Outcome, MetaError> {
    let mut record = draft.inode(ino)?;
    check_xattr_name(name)?;
    marks::may_change(&record)?;
    drop_xattr(draft, ino, &mut record, name)?;
    touch_inode(&mut record, context);
    draft.put_inode(ino, record);
    Ok(Outcome { attr: Some(record.attr(ino)), ..Outcome::default() })
}
