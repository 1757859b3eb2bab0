//! Images of pages: the bytes of pages in frames, for the log, and their way back to the pages' places (docs/log.md).

use super::Pages;
use super::frames::Frames;
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::{Disk, IoBuffer, IoError, IoKind, IoRequest};
use cuttlefs_common::ids::{PAGE_SIZE, PoolPage};

impl Pages {
    /// The bytes of these pages, without zeros at their ends, if all are in frames. They are copied under all of the pages' block locks, so they are
    /// of one moment.
    pub(crate) async fn images_of(
        &self,
        pages: impl Iterator<Item = PoolPage> + Clone,
    ) -> Option<Vec<Vec<u8>>> {
        let _guards = self.locks.lock_many(pages.clone()).await;
        let image = |pool: PoolPage| {
            let entry = self.residency.load(pool);
            if !entry.is_resident() {
                return None;
            }
            let mut bytes = vec![0; PAGE_SIZE];
            self.frames().memory().read(Frames::offset(entry.frame()), &mut bytes);
            bytes.truncate(bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
            Some(bytes)
        };
        pages.map(image).collect()
    }
}

/// Writes images to the places of their pages. They are durable there after the next sync of the disk.
///
/// # Errors
/// The disk's first error.
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
