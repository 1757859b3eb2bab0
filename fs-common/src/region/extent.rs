//! One range of a file: file pages that lie side by side in the pool (FileMR's RangeMTT entry, section 3.2).

use crate::ids::{FilePage, PoolPage};
use serde::{Deserialize, Serialize};

/// Whether an extent's pool pages hold the file's bytes yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ExtentState {
    /// The pages hold the file's bytes (on SSD or in frames).
    Written,
    /// Space is reserved; reads give zeros.
    Unwritten,
}

/// `len_pages` pages of a file from `file_page` on, stored at `pool_page` on. Gaps between extents are holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Extent {
    /// First page of the file.
    pub file_page: FilePage,
    /// First page in the pool.
    pub pool_page: PoolPage,
    /// Number of pages; never 0.
    pub len_pages: u64,
    /// Whether reads see the pool pages' bytes.
    pub state: ExtentState,
}

impl Extent {
    /// One past the last file page.
    pub const fn file_end(&self) -> FilePage {
        FilePage(self.file_page.0 + self.len_pages)
    }

    /// Whether the extent covers `page`.
    pub const fn covers(&self, page: FilePage) -> bool {
        page.0 >= self.file_page.0 && page.0 < self.file_page.0 + self.len_pages
    }

    /// Pool page of a file page the extent covers.
    pub fn pool_page_of(&self, page: FilePage) -> PoolPage {
        assert!(self.covers(page), "{page} is outside {self:?}");
        PoolPage(self.pool_page.0 + (page.0 - self.file_page.0))
    }
}
