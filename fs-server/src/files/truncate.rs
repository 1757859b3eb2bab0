//! Truncate: changes a file's length together with its other attributes, in one batch of the store.
//!
//! # How it works
//! The truncation has the file to itself, with no write-back of it under way. It prepares the change of the durable record and hands it to the
//! caller's `commit`, which puts it into the same batch as the attributes. Only then does the mapping change, clients see a new generation, and the
//! pages leave the file. The durable length never grows past the bytes on SSD: growth over bytes that are not there yet becomes durable with the next
//! write-back.
//!
//! # A cut in steps
//! A file in very many pieces loses them in several batches, the last pages first, so that no other request waits for one file. The first batch is
//! the caller's: it has the length, the note that the request was done, and a record that a cut has begun (`Cut`). From then on the rest is
//! invisible. Its pages stay the file's until the batch that removes them. The file's locks are held throughout, so that nothing is written behind
//! the new end before the last step.
//!
//! | the server dies | the next server |
//! | --- | --- |
//! | before the first batch | has no trace of it; the client sends the request again |
//! | between two batches | finishes the cut when it opens the metadata, before it serves any client; the request is known to be done |
//! | after the last batch | has nothing to do |
//!
//! # Failure
//! If `commit` fails, nothing is changed. If a later step fails, or its future is dropped, the file's contents are closed until the next start has
//! finished the cut: the rest of the cut would remove bytes that were written behind the end meanwhile.

use super::detach::{detach, end_is_inside_bytes};
use super::steps::{self, Steps};
use super::write::zero_tail;
use super::write_back::write_back;
use crate::files::range_table::MAX_FILE_PAGES;
use crate::files::{FileRegion, Files};
use crate::meta::{Covers, CutStep, DataCommit, NoteData, RangeUpdate};
use crate::pool::disk::Disk;
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::{FilePage, MAX_FILE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// Sets the length. `commit` is called once, in the middle. It must put the given change and the rest of the operation, with the request's answer,
/// into one batch.
///
/// # Errors
/// `TooLarge`, `Stale`, `Io`, and those of `commit`.
pub async fn truncate(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    new_size: u64,
    commit: impl FnOnce(DataCommit) -> Result<Attr, Status>,
) -> Result<Attr, Status> {
    set_length(files, disk, file, new_size, By::Client, commit).await
}

/// Sets the length for a client that restores it. Other clients may still restore older changes behind the end, so the commit does not say that it
/// covers these.
///
/// # Errors
/// As `truncate`.
pub async fn restore_length(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    new_size: u64,
    commit: impl FnOnce(DataCommit) -> Result<Attr, Status>,
) -> Result<(), Status> {
    set_length(files, disk, file, new_size, By::Restoring, commit).await.map(drop)
}

/// The origin of a change of length.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    /// A client asks for it now: it is newer than everything before.
    Client,
    /// A client restores it: it was done by an earlier server.
    Restoring,
}

async fn set_length(
    files: &Files,
    disk: &dyn Disk,
    file: &Arc<FileRegion>,
    new_size: u64,
    by: By,
    commit: impl FnOnce(DataCommit) -> Result<Attr, Status>,
) -> Result<Attr, Status> {
    let is_restored = by == By::Restoring;
    if new_size > MAX_FILE_SIZE {
        return Err(Status::TooLarge);
    }
    let _alone = file.order.write().await;
    // The store remembers one cut, the lowest, which may be durable without the changes before it. A second cut at a higher offset would hide changes
    // that were written between the two. So these are written back first, while nobody can write more.
    let cut_before = files.meta.written(file.ino())?.cut;
    if new_size < file.size() && cut_before.is_some_and(|cut| cut.size < new_size) {
        write_back(files, disk, std::slice::from_ref(file), false).await?;
    }
    let _settled = file.settle.lock().await;
    file.usable()?;
    if new_size > file.size() {
        zero_tail(files, disk, file).await?;
    }
    let (size, durable_size, whole, all) = {
        let state = file.state();
        // Everything is on SSD, down to the zeros behind the end in the last page, so growth can be durable at once.
        let whole = state.table.fresh_pages() == 0 && state.durable_size == state.size && !state.uncommitted;
        let all = state.table.fresh_pages() == 0 && !state.uncommitted;
        (state.size, state.durable_size, whole, all)
    };
    let end_page = new_size.div_ceil(PAGE_SIZE_U64);
    let shrinks = new_size < size;
    let new_durable = if shrinks {
        durable_size.min(new_size)
    } else if whole {
        new_size
    } else {
        durable_size
    };
    let steps =
        if shrinks { Steps::of(&file.state().table, end_page, MAX_FILE_PAGES) } else { Steps::default() };
    let cuts = !steps.is_empty();
    let mut steps = steps.last_first();
    let first_step = steps.next();
    let ranges: Vec<RangeUpdate> = first_step.iter().map(steps::Step::removal).collect();
    let step_mark = if steps.len() > 0 { CutStep::From(FilePage(end_page)) } else { CutStep::Unchanged };
    // A change that makes the file longer overwrites nobody's bytes.
    let covers = if shrinks && !is_restored { Covers::Cut { all } } else { Covers::Nothing };
    let cut = commit(DataCommit {
        covers,
        cut: step_mark,
        ..DataCommit::of_ranges(file.ino(), ranges, new_durable)
    })?;

    file.change_layout(files.file_table(), &files.generations, |state| {
        if cuts {
            state.table.remove(end_page, MAX_FILE_PAGES);
        }
        state.size = new_size;
        state.durable_size = new_durable;
        state.uncommitted |= new_durable != new_size;
        if shrinks && all && !is_restored {
            (state.contents, state.covered) = (cut.change, cut.change);
        }
        if shrinks {
            state.unsynced_appends.cut(new_size);
            state.tail_is_zero = !end_is_inside_bytes(state, new_size);
        }
    });
    if shrinks {
        // Before the pages leave: their frames are pinned no more.
        file.end_grants(new_size, u64::MAX);
    }
    if cuts {
        file.dirty.lock().split_off(&FilePage(end_page));
    }
    if let Some(step) = first_step {
        let under_way = CutUnderWay { files, file, is_done: steps.len() == 0 };
        detach(files, &step.pieces).await;
        cut_the_rest(under_way, steps, new_durable).await?;
    }
    if !file.is_clean() {
        files.list_dirty(file);
    }
    let pages = file.allocated_pages();
    let note = NoteData { size: Some(new_size), allocated_pages: Some(pages), modified: false };
    files.meta.note_data(file.ino(), note)
}

/// A cut of which a step was committed, and the last step was not.
struct CutUnderWay<'a> {
    files: &'a Files,
    file: &'a Arc<FileRegion>,
    is_done: bool,
}

impl Drop for CutUnderWay<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            let ino = self.file.ino();
            tracing::error!(%ino, "the cut of a file could not be finished: its contents are closed until the server restarts");
            self.files.close_contents(ino);
        }
    }
}

async fn cut_the_rest(
    mut under_way: CutUnderWay<'_>,
    mut steps: impl ExactSizeIterator<Item = steps::Step>,
    durable_size: u64,
) -> Result<(), Status> {
    let (files, ino) = (under_way.files, under_way.file.ino());
    while let Some(step) = steps.next() {
        futures_lite::future::yield_now().await;
        let is_last = steps.len() == 0;
        let cut = if is_last { CutStep::Done } else { CutStep::Unchanged };
        let commit = DataCommit { cut, ..DataCommit::of_ranges(ino, vec![step.removal()], durable_size) };
        files.meta.commit_data(&[commit])?;
        under_way.is_done = is_last;
        detach(files, &step.pieces).await;
    }
    Ok(())
}
