//! A file's layout as cached by an initiator: a run of extents of one generation.
//!
//! It is a hint: every use is validated against the generation in the file table.

use super::initiator::NoAnswer;
use cuttlefs_common::ids::{FilePage, PoolPage};
use cuttlefs_common::region::{Extent, ExtentState};
use cuttlefs_common::rpc::Layout;

/// The most extents in one answer. A file with so many is badly fragmented, and the reply still fits one message.
pub(super) const MAX_EXTENTS: u32 = 1024;

/// Extents of one generation. They are known from `first` to the layout's `known_until`.
#[derive(Debug)]
pub(super) struct CachedLayout {
    first: FilePage,
    layout: Layout,
}

impl CachedLayout {
    /// The server's answer to a request for the layout from `first` on.
    pub(super) fn new(first: FilePage, mut layout: Layout) -> Self {
        // The server sends the extents in order, and the binary search needs that order. Sort them nevertheless, because the server is not trusted.
        layout.extents.retain(|extent| {
            let ends =
                [extent.file_page.0, extent.pool_page.0].map(|page| page.checked_add(extent.len_pages));
            extent.len_pages > 0 && ends.iter().all(Option::is_some)
        });
        layout.extents.sort_by_key(|extent| extent.file_page);
        Self { first, layout }
    }

    /// The generation it belongs to.
    pub(super) fn generation(&self) -> u64 {
        self.layout.generation
    }

    /// The pool pages of the file's written pages before `end`: first page and number of each extent.
    pub(super) fn written_before(&self, end: u64) -> impl Iterator<Item = (PoolPage, u64)> {
        let extents = self.layout.extents.iter();
        let written = extents.filter(|extent| extent.state != ExtentState::Unwritten);
        written
            .map(move |extent| {
                (extent.pool_page, extent.len_pages.min(end.saturating_sub(extent.file_page.0)))
            })
            .filter(|(_, len)| *len > 0)
    }

    /// The extent that covers a page; `None` for a hole.
    ///
    /// # Errors
    /// `LayoutStale` if the page is outside of the known range.
    pub(super) fn find(&self, page: FilePage) -> Result<Option<&Extent>, NoAnswer> {
        if page < self.first || self.layout.known_until.is_some_and(|until| page >= until) {
            return Err(NoAnswer::LayoutStale);
        }
        let after = self.layout.extents.partition_point(|extent| extent.file_page <= page);
        Ok(after.checked_sub(1).map(|index| &self.layout.extents[index]).filter(|extent| extent.covers(page)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_holes_and_the_edge_of_knowledge() {
        let extent = |file_page, len_pages| Extent {
            file_page: FilePage(file_page),
            pool_page: PoolPage(100 + file_page),
            len_pages,
            state: ExtentState::Written,
        };
        let layout = CachedLayout::new(
            FilePage(4),
            Layout {
                generation: 1,
                extents: vec![extent(10, 2), extent(5, 3)],
                known_until: Some(FilePage(20)),
            },
        );
        assert_eq!(layout.find(FilePage(3)), Err(NoAnswer::LayoutStale));
        assert_eq!(layout.find(FilePage(4)), Ok(None));
        assert_eq!(
            layout.find(FilePage(7)).expect("known").map(|e| e.pool_page_of(FilePage(7)).0),
            Some(107)
        );
        assert_eq!(layout.find(FilePage(8)), Ok(None));
        assert_eq!(layout.find(FilePage(11)).expect("known").map(|e| e.file_page.0), Some(10));
        assert_eq!(layout.find(FilePage(20)), Err(NoAnswer::LayoutStale));
    }
}
