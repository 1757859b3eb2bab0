//! fsync of little: the bytes go into the store, as images of their pages, in the batch that says that they are there (docs/log.md).
//!
//! # How it works
//! A file with few pages that nothing durable has puts images of them, its mapping and its length into one batch, and one sync of the
//! store's log makes all of it durable. The pages stay dirty: the next write-back puts them in their places and has the images
//! removed by the batch behind its data sync. A start does the same before anything else (`put_in_place`).
//!
//! # Invariants
//! * An image and the commit that it belongs to are of one moment, or the image is newer: its bytes are copied after the file's snapshot was
//!   taken, under the page's block lock.
//! * A page whose bytes are newer than its image is on the file's list without it.
//!
//! # Failure
//! Where images cannot be put (too much is dirty, a page was written past the frames or has left them, the store takes none) the
//! file is written back as ever. A batch that fails leaves the file as it was (`Taken`).

use super::write_back::{Taken, release_space, write_back};
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::{Disk, IoBuffer, IoError, IoKind, IoRequest};
use crate::region::range_table::PieceState;
use crate::region::{DirtyPage, FileRegion, FileState, Frames, Images, PageImage, Regions};
use cuttlefs_common::ids::{FilePage, PAGE_SIZE, PoolPage};
use cuttlefs_common::status::Status;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Pages of a file that one sync makes images of at most: 64 KiB. What they cost is written twice, so beyond it a second file
/// to sync is cheaper.
pub const IMAGE_PAGES: usize = 16;

/// Makes everything that was written to a file durable.
///
/// # Errors
/// As `write_back`.
pub async fn sync(regions: &Regions, disk: &dyn Disk, file: &Arc<FileRegion>) -> Result<(), Status> {
    match by_images(regions, file).await {
        Ok(true) => release_space(regions).await,
        // There is no room for images; the reserve has some for what is behind a write-back.
        Ok(false) | Err(Status::NoSpace) => write_back(regions, disk, std::slice::from_ref(file), true).await,
        Err(status) => Err(status),
    }
}

/// Has what was written to a file durable with the next flush, if it is little: a client is about to ask for it (`SyncRhythm`). What
/// fails here is told to who asks: his sync finds the same.
pub async fn begin_sync(regions: &Regions, file: &Arc<FileRegion>) -> bool {
    by_images(regions, file).await == Ok(true)
}

/// Has images of all that is not durable committed; `false`: that is not for images.
async fn by_images(regions: &Regions, file: &Arc<FileRegion>) -> Result<bool, Status> {
    if regions.data_sync.has_failed() || !regions.meta.takes_images() {
        return Ok(false);
    }
    let _settled = file.settle.lock().await;
    // Declared after `_settled`, so that what goes back does so before anybody else settles the file.
    let mut taken = match file.change_bookkeeping(|state| take(regions, file, state)) {
        Snapshot::Nothing => return Ok(true),
        Snapshot::NotForImages => return Ok(false),
        Snapshot::Taken(taken) => taken,
    };
    let Some(images) = images_of(regions, &taken.dirty).await else {
        return Ok(false);
    };
    taken.commit.images = Images::Put(images);
    regions.meta.commit_data(std::slice::from_ref(&taken.commit))?;
    taken.committed();
    let dirty = std::mem::take(&mut taken.dirty);
    file.change_bookkeeping(|state| {
        state.has_images |= !dirty.is_empty();
        let mut listed = file.dirty.lock();
        for (page, DirtyPage { pool, .. }) in dirty {
            // What was written meanwhile is on the list again.
            listed.entry(page).or_insert(DirtyPage { pool, has_image: true });
        }
    });
    regions.list_dirty(file);
    Ok(true)
}

/// What is to be made durable.
enum Snapshot<'a> {
    Nothing,
    NotForImages,
    Taken(Box<Taken<'a>>),
}

fn take<'a>(regions: &'a Regions, file: &'a Arc<FileRegion>, state: &mut FileState) -> Snapshot<'a> {
    let fresh = state.table.fresh_pages();
    if state.is_written_directly || fresh > IMAGE_PAGES as u64 {
        return Snapshot::NotForImages;
    }
    let mut listed = file.dirty.lock();
    // A page that is on the list and not mapped is about to be: it belongs to a write that is not done.
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
    Snapshot::Taken(Box::new(Taken::of(regions, file, state, wanted)))
}

/// Images of these pages, if all are in frames.
async fn images_of(regions: &Regions, dirty: &BTreeMap<FilePage, DirtyPage>) -> Option<Vec<PageImage>> {
    let _guards = regions.locks.lock_many(dirty.values().map(|page| page.pool)).await;
    let image = |(page, DirtyPage { pool, .. }): (&FilePage, &DirtyPage)| {
        let entry = regions.residency.load(*pool);
        if !entry.is_resident() {
            return None;
        }
        let mut bytes = vec![0; PAGE_SIZE];
        regions.frames().memory().read(Frames::offset(entry.frame()), &mut bytes);
        bytes.truncate(bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
        Some(PageImage { page: *page, bytes })
    };
    dirty.iter().map(image).collect()
}

/// Writes images to the pages that they are of. Durable with the next sync of the disk.
///
/// # Errors
/// The first of the disk's.
pub async fn put_in_place(disk: &dyn Disk, images: Vec<(PoolPage, Vec<u8>)>) -> Result<(), IoError> {
    let write = |(page, bytes): (PoolPage, Vec<u8>)| {
        let mut buffer = AlignedBuf::zeroed(PAGE_SIZE);
        buffer.as_mut_slice()[..bytes.len()].copy_from_slice(&bytes);
        let (kind, offset) = (IoKind::Write, page.byte_offset());
        IoRequest { kind, offset, buffer: IoBuffer::Owned(buffer) }
    };
    let done = disk.submit(images.into_iter().map(write).collect()).await;
    done.into_iter().try_for_each(|done| done.result)
}
