//! fsync of a few pages: the bytes go into the store, as images of their pages, in the batch that maps them (docs/log.md).
//!
//! # How it works
//! For a file with few pages that are not durable, one batch gets images of these pages, the mapping and the length, and one sync of the store's log
//! makes all of it durable. The pages stay dirty. The next write-back writes them to their places, and the batch after its data sync removes the
//! images. A start does the same before anything else (`put_in_place`).
//! # Invariants
//! * An image is as new as the commit with it, or newer: its bytes are copied after the file's snapshot is taken, under the page's block lock.
//! * A page whose bytes are newer than its image is on the file's list without the image.
//!
//! # Failure
//! If images are impossible (too many pages are dirty, a page was written directly to SSD or has left its frame, the store takes none), the file is
//! written back in the usual way. A failed batch leaves the file unchanged (`Taken`).

use super::file_region::DirtyPage;
use super::range_table::PieceState;
use super::write_back::{Taken, flush_files, write_back};
use super::{FileRegion, FileState, Files};
use crate::meta::{Images, PageImage};
use crate::pool::disk::Disk;
use cuttlefs_common::ids::{FilePage, PoolPage};
use cuttlefs_common::status::Status;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Most pages of a file of which one sync makes images: 64 KiB. The bytes of images are written twice, so for more pages a data sync is cheaper.
pub(super) const IMAGE_PAGES: usize = 16;

/// Makes all changes of a file durable.
///
/// # Errors
/// As `write_back`.
pub async fn sync(files: &Files, disk: &dyn Disk, file: &Arc<FileRegion>) -> Result<(), Status> {
    match by_images(files, file).await {
        Ok(true) => flush_files(files, std::slice::from_ref(file)).await,
        // The log has no room for images. Its reserve has room for the batch of a write-back.
        Ok(false) | Err(Status::NoSpace) => write_back(files, disk, std::slice::from_ref(file), true).await,
        Err(status) => Err(status),
    }
}

/// Commits images of a file's changes, if these are few, so that they are durable with the next flush: a client is about to ask for that
/// (`SyncRhythm`). Returns whether it did. A failure here is not reported, because the client's own sync finds the same.
pub async fn begin_sync(files: &Files, file: &Arc<FileRegion>) -> bool {
    by_images(files, file).await == Ok(true)
}

/// Commits images of all pages that are not durable. `false` if that is not possible.
async fn by_images(files: &Files, file: &Arc<FileRegion>) -> Result<bool, Status> {
    if files.pages.data_sync.has_failed() || !files.meta.takes_images() {
        return Ok(false);
    }
    let _settled = file.settle.lock().await;
    // Declared after `_settled`, so that uncommitted pages are listed again before another task settles the file.
    let mut taken = match file.change_bookkeeping(|state| take(files, file, state)) {
        Snapshot::Nothing => return Ok(true),
        Snapshot::NotForImages => return Ok(false),
        Snapshot::Taken(taken) => taken,
    };
    let Some(images) = images_of(files, &taken.dirty).await else {
        return Ok(false);
    };
    taken.commit.images = Images::Put(images);
    files.meta.commit_data(std::slice::from_ref(&taken.commit))?;
    taken.committed();
    let dirty = std::mem::take(&mut taken.dirty);
    file.change_bookkeeping(|state| {
        state.has_images |= !dirty.is_empty();
        let mut listed = file.dirty.lock();
        for (page, DirtyPage { pool, .. }) in dirty {
            // A page that was written meanwhile is listed again already.
            listed.entry(page).or_insert(DirtyPage { pool, has_image: true });
        }
    });
    files.list_dirty(file);
    Ok(true)
}

/// What a sync has to make durable.
enum Snapshot<'a> {
    Nothing,
    NotForImages,
    Taken(Box<Taken<'a>>),
}

fn take<'a>(files: &'a Files, file: &'a Arc<FileRegion>, state: &mut FileState) -> Snapshot<'a> {
    let fresh = state.table.fresh_pages();
    if state.is_written_directly || fresh > IMAGE_PAGES as u64 {
        return Snapshot::NotForImages;
    }
    let mut listed = file.dirty.lock();
    // A listed page that is not mapped belongs to a write that is not done.
    let is_wanted = |page: FilePage, dirty: &DirtyPage| {
        let has_bytes = |(pool, piece): (PoolPage, PieceState)| pool == dirty.pool && piece.has_bytes();
        !dirty.has_image && state.table.get(page).is_some_and(has_bytes)
    };
    let wanted = listed.iter().filter(|(page, dirty)| is_wanted(**page, dirty));
    let wanted: BTreeMap<FilePage, DirtyPage> =
        wanted.take(IMAGE_PAGES + 1).map(|(page, dirty)| (*page, *dirty)).collect();
    if wanted.is_empty() && !state.uncommitted && fresh == 0 {
        return Snapshot::Nothing;
    }
    let fresh = state.table.fresh();
    let mut fresh_pages = fresh.iter().flat_map(|piece| (piece.first..piece.end()).map(FilePage));
    if wanted.len() > IMAGE_PAGES || !fresh_pages.all(|page| wanted.contains_key(&page)) {
        return Snapshot::NotForImages;
    }
    listed.retain(|page, _| !wanted.contains_key(page));
    drop(listed);
    Snapshot::Taken(Box::new(Taken::of(files, file, state, wanted)))
}

/// Images of these pages, if all are in frames.
async fn images_of(files: &Files, dirty: &BTreeMap<FilePage, DirtyPage>) -> Option<Vec<PageImage>> {
    let images = files.pages.images_of(dirty.values().map(|page| page.pool)).await?;
    Some(dirty.keys().zip(images).map(|(page, bytes)| PageImage { page: *page, bytes }).collect())
}
