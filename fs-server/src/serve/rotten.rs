//! The files of pages that a scrub found rotten.
//!
//! No record says which file a pool page belongs to; keeping one for each page would slow down every write. So that takes a walk through all extents,
//! about a second for a million, on a thread of its own: no request waits for it, and it holds no lock. There is one walk at a time, for all pages
//! that were found by then. It ends with the server.

use crate::server::Server;
use cuttlefs_common::ids::{FilePage, PoolPage};
use cuttlefs_common::region::Extent;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The walk under way.
#[derive(Debug, Default)]
pub struct RottenPages {
    /// Acquired by the caller that begins a walk, released at its end.
    is_busy: AtomicBool,
}

impl RottenPages {
    /// Starts a walk that logs the files of these pages. `false`: a walk is already under way; ask again later.
    pub fn name(&self, server: &Arc<Server>, pages: &[PoolPage]) -> bool {
        if self.is_busy.swap(true, Ordering::Acquire) {
            return false;
        }
        let mut pages: Vec<u64> = pages.iter().map(|page| page.0).collect();
        pages.sort_unstable();
        let walker = server.clone();
        let begun = std::thread::Builder::new().name("rotten".into()).spawn(move || {
            walk(&walker, &pages);
            walker.integrity.rotten.is_busy.store(false, Ordering::Release);
        });
        if let Err(error) = begun {
            tracing::warn!(%error, "no thread can be started that finds the files of rotten pages");
            self.is_busy.store(false, Ordering::Release);
            return false;
        }
        true
    }
}

/// The pages of a sorted list that are in an extent: pool page and file page of each.
fn found_in(extent: Extent, pages: &[u64]) -> impl Iterator<Item = (u64, FilePage)> {
    let first = extent.pool_page.0;
    let from = pages.partition_point(|page| *page < first);
    let within = pages[from..].iter().take_while(move |page| **page < first + extent.len_pages);
    within.map(move |page| (*page, FilePage(extent.file_page.0 + (page - first))))
}

fn walk(server: &Server, pages: &[u64]) {
    // An error is counted and logged where it happens.
    let _ = server.meta.all_extents(&mut |ino, extent| {
        for (pool_page, page) in found_in(extent, pages) {
            tracing::error!(
                pool_page,
                %ino,
                page = page.0,
                "scrub: a file has a page that is not what was written; restore the file (find MOUNT -inum INO), or write that page anew"
            );
        }
        !server.drain.is_stopping()
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::region::ExtentState;

    #[test]
    fn pages_are_found_in_the_extents_that_name_them() {
        let pages = [3, 10, 11, 19, 20, 40];
        let found = |pool_page, len_pages| {
            let (file_page, state) = (FilePage(100), ExtentState::Written);
            let extent = Extent { file_page, pool_page: PoolPage(pool_page), len_pages, state };
            found_in(extent, &pages).map(|(pool, file)| (pool, file.0)).collect::<Vec<_>>()
        };
        assert_eq!(found(10, 10), [(10, 100), (11, 101), (19, 109)]);
        assert_eq!(found(0, 4), [(3, 103)]);
        assert_eq!(found(40, 1), [(40, 100)]);
        assert_eq!(found(12, 7), []);
        assert_eq!(found(41, 100), []);
    }
}
