//! Images of pages: contents that a sync covers and that are not in their places in the pool yet (docs/log.md).
//!
//! An image is a record. It is put by the batch that says that its page has bytes, and removed by the batch that says that the bytes are in their
//! place, or that the page has none. So images are right whatever batches a crash leaves: the bytes of a page with an image are the image's. An image
//! belongs to an inode and a file page, and is written to no pool page but the one that the file has there.
//!
//! # Failure
//! An image whose page has no extent with bytes is damage: a start leaves it out and logs it, and the survey reports it.

use super::draft::Draft;
use super::error::MetaError;
use super::key::{self, KeyRange, tag};
use super::metadata::Meta;
use super::operation::{DataCommit, Images, RangeUpdate};
use super::record::{self, BytesRecord, RecordError};
use super::store::{Batch, Direction, Store, StoreError};
use super::view::View;
use cuttlefs_common::ids::{FilePage, InodeNo, PAGE_SIZE, PoolPage};
use cuttlefs_common::region::{Extent, ExtentState};
use cuttlefs_common::status::Status;

/// Most keys that one batch removes at a start.
const DROPS_PER_BATCH: usize = 4096;

/// Changes the images of a commit's file.
pub(super) fn change(draft: &mut Draft<'_>, commit: &DataCommit) -> Result<(), MetaError> {
    match &commit.images {
        Images::Follow => commit.ranges.iter().try_for_each(|update| follow(draft, commit.ino, update)),
        Images::Drop => drop_from(draft, commit.ino, FilePage(0)),
        Images::Put(images) => {
            for image in images {
                if image.bytes.len() > PAGE_SIZE {
                    return Err(Status::Invalid.into());
                }
                let value = record::encode(&BytesRecord { bytes: &image.bytes });
                draft.batch.put(key::image(commit.ino, image.page), value);
            }
            Ok(())
        }
    }
}

/// Removes the images of pages that an update leaves without bytes.
pub(super) fn follow(draft: &mut Draft<'_>, ino: InodeNo, update: &RangeUpdate) -> Result<(), MetaError> {
    let has_bytes = |page: FilePage| {
        let mut extents = update.extents.iter();
        let found = extents.find(|extent| (extent.file_page..extent.file_end()).contains(&page));
        found.is_some_and(|extent| extent.state == ExtentState::Written)
    };
    for key in draft.view.keys(&key::images(ino, update.first, update.end))? {
        if !key::parse_paged(&key).is_some_and(|(_, page)| has_bytes(page)) {
            draft.batch.remove(key);
        }
    }
    Ok(())
}

/// Removes the images of all pages of a file from `first` on.
pub(super) fn drop_from(draft: &mut Draft<'_>, ino: InodeNo, first: FilePage) -> Result<(), MetaError> {
    let all = KeyRange { from: key::image(ino, first).to_vec(), to: key::all_of(tag::IMAGE, ino).to };
    draft.view.keys(&all)?.into_iter().for_each(|key| draft.batch.remove(key));
    Ok(())
}

/// The bytes of an image's record.
///
/// # Errors
/// [`RecordError`].
pub(super) fn parse(value: &[u8]) -> Result<&[u8], RecordError> {
    let BytesRecord { bytes } = record::parse(value)?;
    if bytes.len() > PAGE_SIZE {
        Err(RecordError::Impossible("an image of more than a page"))
    } else {
        Ok(bytes)
    }
}

/// The pool page of a file's page, if it has bytes.
pub(super) fn place_of(view: View<'_>, ino: InodeNo, page: FilePage) -> Result<Option<PoolPage>, MetaError> {
    let mut found = None;
    view.extents(ino, FilePage(0), page, Direction::Reverse, &mut |extent| {
        found = Some(extent);
        false
    })?;
    let holds = |extent: &Extent| extent.file_end() > page && extent.state == ExtentState::Written;
    Ok(found.filter(holds).map(|extent| PoolPage(extent.pool_page.0 + (page.0 - extent.file_page.0))))
}

/// The number of images in a store.
///
/// # Errors
/// [`StoreError`].
pub fn image_count(store: &dyn Store) -> Result<u64, StoreError> {
    store.count(tag::IMAGE)
}

/// An image as a start finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredImage {
    /// The file.
    pub ino: InodeNo,
    /// The file page.
    pub page: FilePage,
    /// Its pool page; `None` if the file has no bytes there.
    pub pool_page: Option<PoolPage>,
    /// The page's bytes; the rest of the page is zeros.
    pub bytes: Vec<u8>,
}

impl Meta {
    /// At most `most` images behind this page, in order.
    ///
    /// # Errors
    /// `Io` if one cannot be read.
    pub fn images(
        &self,
        behind: Option<(InodeNo, FilePage)>,
        most: usize,
    ) -> Result<Vec<StoredImage>, Status> {
        self.read_images(behind, most).map_err(|e| self.fail("images", e))
    }

    fn read_images(
        &self,
        behind: Option<(InodeNo, FilePage)>,
        most: usize,
    ) -> Result<Vec<StoredImage>, MetaError> {
        let mut all = key::all(tag::IMAGE);
        if let Some((ino, page)) = behind {
            all.from = key::image(ino, page).to_vec();
            // The smallest key behind it.
            all.from.push(0);
        }
        let mut images = Vec::new();
        let stored = self.stored();
        stored.scan(&all.from, &all.to, Direction::Forward, &mut |key, value| {
            let (ino, page) =
                key::parse_paged(key).ok_or_else(|| MetaError::record(key)(RecordError::Malformed))?;
            let bytes = parse(value).map_err(MetaError::record(key))?.to_vec();
            images.push(StoredImage { ino, page, pool_page: None, bytes });
            Ok(images.len() < most)
        })?;
        for image in &mut images {
            image.pool_page = place_of(stored, image.ino, image.page)?;
        }
        Ok(images)
    }

    /// Removes all images: their bytes are in their places, durably. The removal is durable with the next flush.
    ///
    /// # Errors
    /// `Io`.
    pub fn drop_images(&self) -> Result<(), Status> {
        let _writer = self.writer.lock();
        let drop_all = || {
            for keys in self.stored().keys(&key::all(tag::IMAGE))?.chunks(DROPS_PER_BATCH) {
                let mut batch = Batch::default();
                keys.iter().for_each(|key| batch.remove(key.clone()));
                self.store.commit(batch)?;
            }
            Ok(())
        };
        drop_all().map_err(|e| self.fail("drop_images", e))
    }
}
