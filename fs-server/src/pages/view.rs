//! The state of a page at one moment, and the copy of a resident page by readers without locks.

use super::Pages;
use cuttlefs_common::ids::PoolPage;
use cuttlefs_common::region::ResidencyEntry;

/// The state of a file's page at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PageView {
    /// Zeros: a hole, or an unwritten page.
    Zeros,
    /// A pool page with bytes, and its residency entry.
    Pool(PoolPage, ResidencyEntry),
}

impl Pages {
    /// The state of a pool page. The caller holds the lock of the mapping that names it; without that the entry would prove nothing.
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
