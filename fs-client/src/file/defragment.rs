//! Moves of a file's pages by the server, and the runs of the pool in which the pages lie.

use super::handles::HandleState;
use super::remote::{RemoteVolume, unless_fenced};
use super::replies::unexpected;
use super::volume::{Caller, FsError, Handle};
use cuttlefs_common::ids::{FilePage, PoolPage};
use cuttlefs_common::rpc::{Layout, Reply, Request};

/// Extents that are asked for at once; the server may tell fewer.
const EXTENTS_A_TIME: u32 = 2048;

/// One step of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Pages that were moved.
    pub pages: u64,
    /// The page at which the next step begins; `None`: that was the last one.
    pub next: Option<FilePage>,
}

impl RemoteVolume {
    /// Has the server move some pages of an open file to fewer runs: the first ones at or behind `first_page` that have a better place. The file must be
    /// open for writing.
    ///
    /// # Errors
    /// `NoSpace` if the pool has too little free space to move them.
    pub fn defragment(
        &self,
        caller: &Caller,
        handle: Handle,
        first_page: FilePage,
    ) -> Result<Moved, FsError> {
        self.defragment_state(caller, &*self.state_of(handle)?, first_page)
    }

    /// The same of an open file.
    pub(crate) fn defragment_state(
        &self,
        caller: &Caller,
        state: &HandleState,
        first_page: FilePage,
    ) -> Result<Moved, FsError> {
        let build = || Request::Defragment { filekey: state.file().filekey(), first_page };
        let moved = self.session.call(caller, build, |reply| match reply {
            Reply::Moved { pages, next } => Ok(Moved { pages, next: next.filter(|next| *next > first_page) }),
            other => unexpected(other),
        });
        unless_fenced(state.file(), moved)
    }

    /// The number of runs of the pool in which the pages of an open file lie, as of about now: pages that are neighbours in the file and in the pool are
    /// of one run. The file must be open for reading.
    ///
    /// # Errors
    /// Those of the server.
    pub(crate) fn runs(&self, caller: &Caller, state: &HandleState) -> Result<u64, FsError> {
        let mut runs = Runs::default();
        let mut first_page = FilePage(0);
        loop {
            let build = || Request::Layout {
                filekey: state.file().filekey(),
                first_page,
                max_extents: EXTENTS_A_TIME,
            };
            let layout = self.session.call(caller, build, |reply| match reply {
                Reply::Layout(layout) => Ok(layout),
                other => unexpected(other),
            });
            let layout = unless_fenced(state.file(), layout)?;
            runs.add(&layout, first_page);
            match layout.known_until.filter(|until| *until > first_page) {
                Some(until) => first_page = until,
                None => return Ok(runs.count),
            }
        }
    }
}

/// A count of runs.
#[derive(Debug, Default)]
struct Runs {
    count: u64,
    /// The file page and the pool page behind the last run.
    behind: Option<(FilePage, PoolPage)>,
}

impl Runs {
    /// Adds the extents that begin at a page or behind it. One that begins before was added with those before.
    fn add(&mut self, layout: &Layout, first_page: FilePage) {
        for extent in layout.extents.iter().filter(|extent| extent.file_page >= first_page) {
            if self.behind != Some((extent.file_page, extent.pool_page)) {
                self.count += 1;
            }
            let end = PoolPage(extent.pool_page.0.saturating_add(extent.len_pages));
            self.behind = Some((extent.file_end(), end));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cuttlefs_common::region::{Extent, ExtentState};

    #[test]
    fn runs_go_on_over_states_and_parts_of_a_layout() {
        let extent = |file_page: u64, pool_page: u64, len_pages, state| Extent {
            file_page: file_page.into(),
            pool_page: pool_page.into(),
            len_pages,
            state,
        };
        let (written, reserved) = (ExtentState::Written, ExtentState::Unwritten);
        let layout =
            |extents: &[Extent]| Layout { generation: 1, extents: extents.to_vec(), known_until: None };
        let mut runs = Runs::default();
        runs.add(&layout(&[extent(0, 10, 2, written), extent(2, 12, 3, reserved)]), FilePage(0));
        assert_eq!(runs.count, 1);
        runs.add(&layout(&[extent(2, 12, 3, reserved), extent(5, 15, 1, written)]), FilePage(5));
        assert_eq!(runs.count, 1);
        runs.add(&layout(&[extent(7, 16, 1, written), extent(8, 30, 1, written)]), FilePage(6));
        assert_eq!(runs.count, 3, "behind a hole, and elsewhere");
    }
}
