//! Operations on names: make, create, create without a name, link, unlink, rmdir and rename.

use super::super::climbs::NEAR_LEVELS;
use super::super::draft::Draft;
use super::super::error::MetaError;
use super::super::key;
use super::super::operation::{ApplyContext, LINK_MAX, Outcome};
use super::super::record::{self, BytesRecord, InodeRecord};
use super::super::written::Written;
use super::data;
use super::marks::{Entries, may_change, may_change_entries};
use super::{acl, touch_contents, touch_inode};
use cuttlefs_common::attr::{FileKind, InodeFlags};
use cuttlefs_common::ids::{InodeNo, PAGE_SIZE_U64, SYMLINK_MAX};
use cuttlefs_common::name;
use cuttlefs_common::rpc::{NewNode, RenameMode};
use cuttlefs_common::status::Status;

const S_ISGID: u16 = 0o2000;
/// Set-id bits of directories come from their parents, never from the caller.
const DIRECTORY_MODE: u16 = 0o1777;
const MODE: u16 = 0o7777;
/// The length of a directory in `stat`. Its entries are records, so any multiple of a page would do.
const DIRECTORY_SIZE: u64 = PAGE_SIZE_U64;

pub(super) fn make(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    parent: InodeNo,
    name: &[u8],
    node: &NewNode<'_>,
    mode: u16,
) -> Result<Outcome, MetaError> {
    draft.directory(parent)?;
    name::check(name)?;
    if draft.find(parent, name)?.is_some() {
        return Err(Status::Exists.into());
    }
    new_inode(draft, context, parent, name, node, mode)
}

pub(super) fn create(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    parent: InodeNo,
    name: &[u8],
    mode: u16,
    exclusive: bool,
) -> Result<Outcome, MetaError> {
    draft.directory(parent)?;
    name::check(name)?;
    match draft.find(parent, name)? {
        None => new_inode(draft, context, parent, name, &NewNode::File, mode),
        Some(_) if exclusive => Err(Status::Exists.into()),
        Some(found) => match found.kind {
            FileKind::File => {
                let record = draft.inode_of_entry(found.ino)?;
                Ok(Outcome { attr: Some(record.attr(found.ino)), ..Outcome::default() })
            }
            FileKind::Directory => Err(Status::IsDirectory.into()),
            // Another client has made it since this one looked. The client's kernel follows links and opens devices itself.
            _ => Err(Status::Exists.into()),
        },
    }
}

/// Like `create` in that directory, but without an entry: the file is an orphan that is about to be opened.
pub(super) fn create_nameless(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    parent: InodeNo,
    mode: u16,
) -> Result<Outcome, MetaError> {
    may_change_entries(&draft.directory(parent)?, Entries::Added)?;
    let ino = context.new_ino;
    let mut record = InodeRecord { mode: mode & MODE, nlink: 0, ..new_record(draft, context, parent)? };
    acl::inherit(draft, context, parent, ino, &mut record)?;
    draft.put_inode(ino, record);
    data::put_orphan(draft, ino);
    Ok(Outcome { attr: Some(record.attr(ino)), created: true, orphaned: Some(ino), ..Outcome::default() })
}

/// A new regular file in a directory, without any permission bits.
fn new_record(
    draft: &Draft<'_>,
    context: &ApplyContext<'_>,
    parent: InodeNo,
) -> Result<InodeRecord, MetaError> {
    let directory = draft.inode(parent)?;
    let inherits_group = directory.mode & S_ISGID != 0;
    Ok(InodeRecord {
        kind: FileKind::File,
        mode: 0,
        nlink: 1,
        uid: context.caller.uid,
        gid: if inherits_group { directory.gid } else { context.caller.gid },
        rdev: 0,
        size: 0,
        allocated_pages: 0,
        atime: context.now,
        mtime: context.now,
        ctime: context.now,
        btime: context.now,
        change: context.next_change(0),
        parent: InodeNo(0),
        xattrs: 0,
        flags: InodeFlags::default(),
        written: Written::default(),
        name_lost: 0,
    })
}

fn new_inode(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    parent: InodeNo,
    name: &[u8],
    node: &NewNode<'_>,
    mode: u16,
) -> Result<Outcome, MetaError> {
    may_change_entries(&draft.inode(parent)?, Entries::Added)?;
    let ino = context.new_ino;
    let mut record = new_record(draft, context, parent)?;
    record.mode = mode & MODE;
    match *node {
        NewNode::File => {}
        NewNode::Directory => {
            record.kind = FileKind::Directory;
            // The parent's set-group-id bit is inherited together with its group.
            record.mode = record.mode & DIRECTORY_MODE | draft.inode(parent)?.mode & S_ISGID;
            record.nlink = 2;
            record.size = DIRECTORY_SIZE;
            record.parent = parent;
        }
        NewNode::Symlink(target) => {
            if target.len() > SYMLINK_MAX {
                return Err(Status::NameTooLong.into());
            }
            if target.is_empty() || target.contains(&0) {
                return Err(Status::Invalid.into());
            }
            record.kind = FileKind::Symlink;
            record.mode = 0o777;
            record.size = target.len() as u64;
            draft.batch.put(key::symlink(ino), record::encode(&BytesRecord { bytes: target }));
        }
        NewNode::Special { kind, rdev } => {
            record.kind = kind;
            record.rdev = match kind {
                FileKind::BlockDevice | FileKind::CharDevice => rdev,
                FileKind::Fifo | FileKind::Socket => 0,
                _ => return Err(Status::Invalid.into()),
            };
        }
    }
    acl::inherit(draft, context, parent, ino, &mut record)?;
    draft.add_entry(parent, name, ino, record.kind)?;
    draft.put_inode(ino, record);
    let gained = u32::from(record.is_directory());
    draft.edit_inode(parent, |directory| {
        directory.nlink = directory.nlink.saturating_add(gained);
        touch_contents(directory, context);
    })?;
    Ok(Outcome { attr: Some(record.attr(ino)), created: true, ..Outcome::default() })
}

pub(super) fn link(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    ino: InodeNo,
    parent: InodeNo,
    name: &[u8],
) -> Result<Outcome, MetaError> {
    may_change_entries(&draft.directory(parent)?, Entries::Added)?;
    name::check(name)?;
    let record = draft.inode(ino)?;
    may_change(&record)?;
    if draft.find(parent, name)?.is_some() {
        return Err(Status::Exists.into());
    }
    let mut named = None;
    match record.nlink {
        _ if record.is_directory() => return Err(Status::NotPermitted.into()),
        // The file was made without a name. Whether it ever had one is checked by the client's kernel.
        0 if (context.is_open)(ino) => {
            draft.batch.remove(key::orphan(ino));
            named = Some(ino);
        }
        // It is not open: it is about to be reaped, or a part of it has been.
        0 => return Err(Status::NotFound.into()),
        LINK_MAX.. => return Err(Status::TooManyLinks.into()),
        _ => {}
    }
    draft.add_entry(parent, name, ino, record.kind)?;
    let record = draft.edit_inode(ino, |record| {
        record.nlink += 1;
        touch_inode(record, context);
    })?;
    draft.edit_inode(parent, |directory| touch_contents(directory, context))?;
    Ok(Outcome { attr: Some(record.attr(ino)), named, ..Outcome::default() })
}

pub(super) fn unlink(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    parent: InodeNo,
    name: &[u8],
) -> Result<Outcome, MetaError> {
    draft.directory(parent)?;
    name::check(name)?;
    let found = draft.find_existing(parent, name)?;
    if found.kind == FileKind::Directory {
        return Err(Status::IsDirectory.into());
    }
    may_remove(draft, parent, found.ino)?;
    draft.remove_entry(parent, name)?;
    draft.edit_inode(parent, |directory| touch_contents(directory, context))?;
    let mut outcome = Outcome::default();
    drop_name(draft, context, found.ino, &mut outcome)?;
    Ok(outcome)
}

pub(super) fn rmdir(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    parent: InodeNo,
    name: &[u8],
) -> Result<Outcome, MetaError> {
    draft.directory(parent)?;
    name::check(name)?;
    let found = draft.find_existing(parent, name)?;
    if found.kind != FileKind::Directory {
        return Err(Status::NotDirectory.into());
    }
    may_remove(draft, parent, found.ino)?;
    if !draft.view.is_empty_directory(found.ino)? {
        return Err(Status::NotEmpty.into());
    }
    draft.remove_entry(parent, name)?;
    draft.edit_inode(parent, |directory| {
        directory.nlink = directory.nlink.saturating_sub(1);
        touch_contents(directory, context);
    })?;
    let mut outcome = Outcome::default();
    drop_name(draft, context, found.ino, &mut outcome)?;
    Ok(outcome)
}

/// Checks that the chattr marks of a directory and of an entry's inode allow the entry's removal.
fn may_remove(draft: &Draft<'_>, directory: InodeNo, ino: InodeNo) -> Result<(), MetaError> {
    may_change_entries(&draft.inode(directory)?, Entries::Removed)?;
    Ok(may_change(&draft.inode_of_entry(ino)?)?)
}

/// Updates an inode that has lost an entry.
fn drop_name(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    ino: InodeNo,
    outcome: &mut Outcome,
) -> Result<(), MetaError> {
    let record = draft.edit_inode(ino, |record| {
        // A directory has one name. Its other links are its own `.` and its children's `..`.
        record.nlink = if record.is_directory() { 0 } else { record.nlink.saturating_sub(1) };
        touch_inode(record, context);
        record.name_lost = record.change;
    })?;
    if record.nlink == 0 {
        data::lose(draft, context, ino, &record, outcome)?;
    }
    Ok(())
}

/// Whether `directory` is `ancestor` or below it. `Busy` if it is too far from the root to check that under the writer, and nobody holds a climb from
/// it (`climbs`).
fn is_below(
    draft: &Draft<'_>,
    context: &ApplyContext<'_>,
    directory: InodeNo,
    ancestor: InodeNo,
) -> Result<bool, MetaError> {
    if let Some(is_below) = context.climbs.is_below(directory, ancestor) {
        return Ok(is_below?);
    }
    let mut at = directory;
    for _ in 0..NEAR_LEVELS {
        if at == ancestor {
            return Ok(true);
        }
        if at == InodeNo::ROOT {
            return Ok(false);
        }
        at = draft.inode_of_entry(at)?.parent;
    }
    Err(Status::Busy.into())
}

pub(super) fn rename(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    (parent, name): (InodeNo, &[u8]),
    (new_parent, new_name): (InodeNo, &[u8]),
    mode: RenameMode,
) -> Result<Outcome, MetaError> {
    draft.directory(parent)?;
    draft.directory(new_parent)?;
    name::check(name)?;
    name::check(new_name)?;
    let source = draft.find_existing(parent, name)?;
    let target = draft.find(new_parent, new_name)?;
    let source_is_directory = source.kind == FileKind::Directory;
    match (mode, target) {
        (RenameMode::NoReplace | RenameMode::NoReplaceWhiteout, Some(_)) => return Err(Status::Exists.into()),
        (RenameMode::Exchange, None) => return Err(Status::NotFound.into()),
        _ => {}
    }
    may_remove(draft, parent, source.ino)?;
    match target {
        Some(target) => may_remove(draft, new_parent, target.ino)?,
        None => may_change_entries(&draft.inode(new_parent)?, Entries::Added)?,
    }
    let moves = parent != new_parent;
    if moves && source_is_directory && is_below(draft, context, new_parent, source.ino)? {
        return Err(Status::Invalid.into());
    }
    let mut outcome = Outcome::default();
    // How many subdirectories the two parents lose or gain.
    let (mut from_parent, mut to_new_parent) = (0i64, 0i64);
    if source_is_directory {
        from_parent -= 1;
        to_new_parent += 1;
    }
    match target {
        // Both names are of one file: POSIX says to do nothing.
        Some(target) if target.ino == source.ino => {
            let record = draft.inode_of_entry(source.ino)?;
            return Ok(Outcome { attr: Some(record.attr(source.ino)), ..Outcome::default() });
        }
        Some(target) if mode == RenameMode::Exchange => {
            let target_is_directory = target.kind == FileKind::Directory;
            if moves && target_is_directory && is_below(draft, context, parent, target.ino)? {
                return Err(Status::Invalid.into());
            }
            draft.point_entry(parent, name, target.ino, target.kind)?;
            draft.point_entry(new_parent, new_name, source.ino, source.kind)?;
            if target_is_directory {
                from_parent += 1;
                to_new_parent -= 1;
            }
            arrive(draft, context, target.ino, parent)?;
        }
        Some(target) => {
            match (source_is_directory, target.kind == FileKind::Directory) {
                (false, true) => return Err(Status::IsDirectory.into()),
                (true, false) => return Err(Status::NotDirectory.into()),
                (true, true) if !draft.view.is_empty_directory(target.ino)? => {
                    return Err(Status::NotEmpty.into());
                }
                (true, true) => to_new_parent -= 1,
                (false, false) => {}
            }
            draft.point_entry(new_parent, new_name, source.ino, source.kind)?;
            draft.remove_entry(parent, name)?;
            drop_name(draft, context, target.ino, &mut outcome)?;
        }
        None => {
            draft.remove_entry(parent, name)?;
            draft.add_entry(new_parent, new_name, source.ino, source.kind)?;
        }
    }
    if matches!(mode, RenameMode::Whiteout | RenameMode::NoReplaceWhiteout) {
        leave_whiteout(draft, context, parent, name)?;
        outcome.created = true;
    }
    let moved = arrive(draft, context, source.ino, new_parent)?;
    for (directory, gained) in [(parent, from_parent), (new_parent, to_new_parent)] {
        draft.edit_inode(directory, |record| {
            record.nlink = (i64::from(record.nlink) + gained).clamp(0, i64::from(u32::MAX)) as u32;
            // A second update of the same directory only moves its counter once more.
            touch_contents(record, context);
        })?;
    }
    outcome.attr = Some(moved.attr(source.ino));
    Ok(outcome)
}

/// Makes a whiteout, by which a union file system marks a missing name: a character device 0:0 that nobody may open.
fn leave_whiteout(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    parent: InodeNo,
    name: &[u8],
) -> Result<(), MetaError> {
    let ino = context.new_ino;
    let record = InodeRecord { kind: FileKind::CharDevice, mode: 0, ..new_record(draft, context, parent)? };
    draft.add_entry(parent, name, ino, record.kind)?;
    draft.put_inode(ino, record);
    Ok(())
}

/// Updates an inode that has another name now, perhaps in another directory.
fn arrive(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    ino: InodeNo,
    parent: InodeNo,
) -> Result<InodeRecord, MetaError> {
    draft.edit_inode(ino, |record| {
        if record.is_directory() {
            record.parent = parent;
        }
        touch_inode(record, context);
        record.name_lost = record.change;
    })
}
