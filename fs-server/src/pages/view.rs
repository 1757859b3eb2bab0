//! A page at one moment, and the copy of a resident one that readers without locks make.

use super::Pages;
use cuttlefs_common::ids::PoolPage;
use cuttlefs_common::region::ResidencyEntry;

/// What a page of a file is at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PageView {
    /// A hole or unwritten: zeros.
    Zeros,
    /// Bytes are in the pool, as of this entry.
    Pool(PoolPage, ResidencyEntry),
}

impl Pages {
    /// Looks a page up. The caller holds the lock of the mapping that names it, which is what makes the entry worth something.
    pub(crate) fn view(&self, pool: PoolPage) -> PageView {
        PageView::Pool(pool, self.residency.load(pool))
    }

    /// Whether a page is in a frame.
    pub(crate) fn is_resident(&self, pool: PoolPage) -> bool {
        self.residency.load(pool).is_resident()
    }

    /// Copies a part of a resident page; `false` if the page moved or changed meanwhile, or is not resident.
    pub(crate) fn copy_resident(
        &self,
        pool: PoolPage,
        before: ResidencyEntry,
        offset_in_page: usize,
        out: &mut [u8],
    ) -> bool {
        self.residency.copy(pool, before, offset_in_page, out)
    }
}
