//! Operations on files' contents: commits of data that became durable, and files that lost their last name.

use super::super::draft::Draft;
use super::super::error::MetaError;
use super::super::images;
use super::super::key;
use super::super::operation::{
    ApplyContext, Covers, CutStep, DataCommit, DataStamp, INLINE_REAP_EXTENTS, Outcome, REAP_BATCH_EXTENTS,
    RangeUpdate,
};
use super::super::record::{self, BytesRecord, CounterRecord, InodeRecord, SlotRecord};
use super::super::store::Direction;
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::{FilePage, InodeNo, MAX_FILE_SIZE};
use cuttlefs_common::region::Extent;
use cuttlefs_common::status::Status;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// Edits a file's extents. Returns the number of pages that are allocated then.
pub(super) fn edit_ranges(
    draft: &mut Draft<'_>,
    ino: InodeNo,
    allocated_pages: u64,
    ranges: &[RangeUpdate],
) -> Result<u64, MetaError> {
    let (edit, view) = draft.extents(ino);
    let before = edit.allocated_delta();
    for update in ranges {
        edit.replace(view, ino, update)?;
    }
    let allocated = i128::from(allocated_pages) + edit.allocated_delta() - before;
    u64::try_from(allocated)
        .map_err(|_| MetaError::Inconsistent { what: "fewer pages allocated than extents hold", ino: ino.0 })
}

/// Puts or removes the record of a cut in steps.
pub(super) fn note_cut(draft: &mut Draft<'_>, commit: &DataCommit) {
    match commit.cut {
        CutStep::Unchanged => {}
        CutStep::From(page) => draft.batch.put(key::cut(commit.ino), record::encode(&CounterRecord(page.0))),
        CutStep::Done => draft.batch.remove(key::cut(commit.ino)),
    }
}

pub(super) fn commit_data(
    draft: &mut Draft<'_>,
    commits: &[DataCommit],
    stamps: &[Option<DataStamp>],
) -> Result<Outcome, MetaError> {
    if stamps.len() != commits.len() {
        return Err(Status::Invalid.into());
    }
    let mut slots: BTreeMap<[u8; 19], Option<SlotRecord>> = BTreeMap::new();
    for (commit, stamp) in commits.iter().zip(stamps) {
        let Some(mut record) = draft.inode_if_any(commit.ino)? else {
            continue;
        };
        if record.kind != FileKind::File {
            return Err(Status::Invalid.into());
        }
        if commit.size > MAX_FILE_SIZE {
            return Err(Status::TooLarge.into());
        }
        record.allocated_pages = edit_ranges(draft, commit.ino, record.allocated_pages, &commit.ranges)?;
        record.size = commit.size;
        images::change(draft, commit)?;
        note_cut(draft, commit);
        if let Some(stamp) = stamp {
            (record.mtime, record.ctime, record.change) = (stamp.mtime, stamp.ctime, stamp.change);
        }
        if let Covers::Changes { until, restored } = &commit.covers {
            record.written.cover(*until);
            restored.iter().for_each(|by| record.written.restore(*by, record.change));
        }
        draft.put_inode(commit.ino, record);
        for done in &commit.done {
            let slot = key::client_slot(done.request.client, done.request.slot);
            let in_slot = SlotRecord { seq: done.request.seq, answer: done.answer };
            // The slot may have gone on, in another batch or with another file of this batch.
            let known = match slots.entry(slot) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(unknown) => unknown.insert(draft.view.slot(&slot)?),
            };
            if known.is_none_or(|known| known.seq < in_slot.seq) {
                *known = Some(in_slot);
                draft.batch.put(slot, record::encode(&in_slot));
            }
        }
    }
    Ok(Outcome::default())
}

/// At most `limit` extents of a file that begin before a page, from that page backwards.
fn last_extents(
    draft: &Draft<'_>,
    ino: InodeNo,
    below: FilePage,
    limit: usize,
) -> Result<Vec<Extent>, MetaError> {
    let mut extents = Vec::new();
    let Some(last) = below.0.checked_sub(1) else { return Ok(extents) };
    draft.view.extents(ino, FilePage(0), FilePage(last), Direction::Reverse, &mut |extent| {
        extents.push(extent);
        extents.len() < limit
    })?;
    Ok(extents)
}

/// Handles the loss of the last name of `ino`: removes it at once if it is small and not open, else makes it an orphan.
pub(super) fn lose(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    ino: InodeNo,
    record: &InodeRecord,
    outcome: &mut Outcome,
) -> Result<(), MetaError> {
    if !(context.is_open)(ino) {
        let extents = match record.allocated_pages {
            0 => Vec::new(),
            _ => last_extents(draft, ino, FilePage(u64::MAX), INLINE_REAP_EXTENTS + 1)?,
        };
        if extents.len() <= INLINE_REAP_EXTENTS {
            free(draft, ino, record, &extents)?;
            outcome.reaped = Some(ino);
            outcome.freed = extents;
            return Ok(());
        }
    }
    put_orphan(draft, ino);
    outcome.orphaned = Some(ino);
    Ok(())
}

/// Puts the record that makes an inode an orphan.
pub(super) fn put_orphan(draft: &mut Draft<'_>, ino: InodeNo) {
    draft.batch.put(key::orphan(ino), record::encode(&BytesRecord { bytes: b"" }));
}

/// Removes an inode and all its records; `extents` are all of its extents.
fn free(
    draft: &mut Draft<'_>,
    ino: InodeNo,
    record: &InodeRecord,
    extents: &[Extent],
) -> Result<(), MetaError> {
    for extent in extents {
        draft.batch.remove(key::extent(ino, extent.file_page));
    }
    if !extents.is_empty() {
        images::drop_from(draft, ino, FilePage(0))?;
    }
    if record.xattrs > 0 {
        for key in draft.view.xattr_keys(ino)? {
            draft.batch.remove(key);
        }
    }
    if record.kind == FileKind::Symlink {
        draft.batch.remove(key::symlink(ino));
    }
    draft.remove_inode(ino);
    Ok(())
}

pub(super) fn reap_orphan(
    draft: &mut Draft<'_>,
    context: &ApplyContext<'_>,
    ino: InodeNo,
    below: FilePage,
) -> Result<Outcome, MetaError> {
    let Some(record) = draft.inode_if_any(ino)? else {
        draft.batch.remove(key::orphan(ino));
        return Ok(Outcome::default());
    };
    if record.nlink > 0 {
        return Err(Status::Invalid.into());
    }
    if (context.is_open)(ino) {
        return Err(Status::Busy.into());
    }
    let extents = last_extents(draft, ino, below, REAP_BATCH_EXTENTS)?;
    if extents.len() < REAP_BATCH_EXTENTS {
        free(draft, ino, &record, &extents)?;
        draft.batch.remove(key::orphan(ino));
        return Ok(Outcome { reaped: Some(ino), freed: extents, ..Outcome::default() });
    }
    for extent in &extents {
        draft.batch.remove(key::extent(ino, extent.file_page));
    }
    images::drop_from(draft, ino, extents.last().map_or(below, |lowest| lowest.file_page))?;
    let pages: u64 = extents.iter().map(|extent| extent.len_pages).sum();
    draft.edit_inode(ino, |record| record.allocated_pages = record.allocated_pages.saturating_sub(pages))?;
    Ok(Outcome { freed: extents, more: true, ..Outcome::default() })
}
