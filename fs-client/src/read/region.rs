//! The cached part of an open file's region: its layout, and its page bitmap.
//!
//! Both are hints. A layout is validated against the file's generation at each use, and belongs to the filekey of its request: after a recovery
//! the file has another filekey, so that a generation of one server is never compared with another's. A stale bit of a bitmap costs time.

use super::bitmap::{MAX_BITMAP_BYTES, PageBitmap};
use super::layout::CachedLayout;
use crate::session::{ServerOpen, SessionLane};
use arc_swap::ArcSwapOption;
use cuttlefs_common::ids::FileKey;
use cuttlefs_common::rdma::Remote;
use cuttlefs_common::rpc::MAX_TRANSFER_BYTES;
use parking_lot::RwLock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[derive(Debug)]
struct KnownLayout {
    asked_by: FileKey,
    layout: CachedLayout,
}

/// The cached part of a file's region; see the module.
#[derive(Debug)]
pub(crate) struct CachedRegion {
    open: Arc<ServerOpen>,
    layout: ArcSwapOption<KnownLayout>,
    bitmap: RwLock<PageBitmap>,
    /// The number of pages up to the end of the furthest read: as far as bitmaps are pulled.
    read_pages: AtomicU64,
    was_read: AtomicBool,
}

impl CachedRegion {
    /// A region of which nothing is known yet.
    pub(crate) fn new(open: Arc<ServerOpen>) -> Self {
        Self {
            open,
            layout: ArcSwapOption::empty(),
            bitmap: RwLock::default(),
            read_pages: AtomicU64::new(0),
            was_read: AtomicBool::new(false),
        }
    }

    /// The open file.
    pub(crate) fn open(&self) -> &Arc<ServerOpen> {
        &self.open
    }

    /// Hands the layout to `look`, if it is known for the present filekey.
    pub(super) fn with_layout<T>(&self, look: impl FnOnce(&CachedLayout) -> T) -> Option<T> {
        let known = self.layout.load();
        let known = known.as_ref().filter(|known| known.asked_by == self.open.bound_key());
        known.map(|known| look(&known.layout))
    }

    /// Remembers a layout, which the server sent for this filekey.
    pub(super) fn set_layout(&self, asked_by: FileKey, layout: CachedLayout) {
        self.layout.store(Some(Arc::new(KnownLayout { asked_by, layout })));
    }

    /// Hands the bitmap to `look`.
    pub(super) fn with_bitmap<T>(&self, look: impl FnOnce(&PageBitmap) -> T) -> T {
        look(&self.bitmap.read())
    }

    /// Notes a read up to `end_page`, so that the next pull, or look around, covers it.
    pub(super) fn note_read(&self, end_page: u64) {
        self.read_pages.fetch_max(end_page, Ordering::Relaxed);
        self.was_read.store(true, Ordering::Relaxed);
    }

    /// The end of the furthest read, if any was noted since the last call.
    pub(super) fn read_since(&self) -> Option<u64> {
        self.was_read.swap(false, Ordering::Relaxed).then(|| self.read_pages.load(Ordering::Relaxed))
    }

    /// Pulls the bitmap one-sidedly if the file was read since the last pull. Returns the number of READs and bytes of that.
    pub(super) fn pull_bitmap(&self, lane: &mut SessionLane<'_>) -> Pulled {
        self.open.unless_closing(|| self.pull(lane)).unwrap_or_default()
    }

    fn pull(&self, lane: &mut SessionLane<'_>) -> Pulled {
        let mut pulled = Pulled::default();
        let Some(pages) = self.read_since() else { return pulled };
        // A filekey that names nothing would end the connection.
        if self.open.is_lost() {
            return pulled;
        }
        let wanted = usize::try_from(pages.div_ceil(8)).unwrap_or(usize::MAX).min(MAX_BITMAP_BYTES);
        let mut bytes = vec![0u8; wanted];
        let chunk_len = MAX_TRANSFER_BYTES as usize;
        for (index, chunk) in bytes.chunks_mut(chunk_len).enumerate() {
            let first_page = (index * chunk_len * 8) as u64;
            let remote = Remote::Bitmap { filekey: self.open.filekey(), first_page };
            if lane.read_runs(&[(0, chunk.len())], |_| remote).is_none() {
                return pulled;
            }
            pulled.reads += 1;
            lane.data().read(0, chunk);
        }
        *self.bitmap.write() = PageBitmap::new(bytes);
        pulled.bytes = wanted as u64;
        pulled
    }
}

/// The cost of pulls of bitmaps, or of a look around.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pulled {
    pub(super) reads: u64,
    /// 0 if nothing was pulled.
    pub(super) bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::ServerOpens;
    use cuttlefs_common::attr::Attr;
    use cuttlefs_common::ids::{FilePage, InodeNo};
    use cuttlefs_common::rpc::{Layout, OpenTicket, Opened, Rights};

    #[test]
    fn a_layout_is_good_for_the_filekey_it_was_asked_for_by() {
        let attr = Attr::empty_file(InodeNo(9));
        let opened = Opened { filekey: FileKey(7), slot: None, attr, ticket: OpenTicket(0) };
        let region = CachedRegion::new(ServerOpens::default().add(&opened, Rights::default()));
        let layout = || {
            let layout = Layout { generation: 3, extents: Vec::new(), known_until: None };
            CachedLayout::new(FilePage(0), layout)
        };
        assert_eq!(region.with_layout(CachedLayout::generation), None);
        region.set_layout(FileKey(7), layout());
        assert_eq!(region.with_layout(CachedLayout::generation), Some(3));
        // This layout belongs to an earlier filekey, from another server.
        region.set_layout(FileKey(6), layout());
        assert_eq!(region.with_layout(CachedLayout::generation), None);
    }
}
