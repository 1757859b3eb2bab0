//! Moves of a file's pages to fewer runs of the server's pool (docs/file-regions.md, "Moves").

use super::{File, NativeError};
use cuttlefs_common::ids::FilePage;

pub use crate::file::Moved;

/// What became of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Defragmented {
    /// Runs of the pool in which its pages lay. Pages that are neighbours in the file and in the pool are of one run.
    pub runs_before: u64,
    /// Runs in which they lie now.
    pub runs_after: u64,
    /// Pages that were moved.
    pub moved_pages: u64,
}

impl File {
    /// Has the server move the file's pages to fewer runs of its pool. Contents, attributes, and all that anybody has open stay as they are. A file that
    /// lies in one run already costs a look. After each step `progress` is told the pages that were moved so far; if it returns `false`, no further ones
    /// are. A deadline is one of each step.
    ///
    /// # Errors
    /// `NotOpenFor` if it is not open for reading and writing, as a whole; `Server(NoSpace)` if the pool has too little free space; the server's,
    /// `Deadline`. What was moved stays moved.
    pub fn defragment(&self, mut progress: impl FnMut(u64) -> bool) -> Result<Defragmented, NativeError> {
        self.check_movable()?;
        let runs_before = self.runs()?;
        let (mut moved_pages, mut next) = (0, Some(FilePage(0)));
        while let Some(first_page) = next {
            let moved = self.defragment_step(first_page)?;
            (moved_pages, next) = (moved_pages + moved.pages, moved.next);
            if !progress(moved_pages) {
                break;
            }
        }
        let runs_after = if moved_pages > 0 { self.runs()? } else { runs_before };
        Ok(Defragmented { runs_before, runs_after, moved_pages })
    }

    /// One step of [`Self::defragment`]: moves the first pages at or behind `first_page` that have a better place, or tells where to go on looking.
    ///
    /// # Errors
    /// As `defragment`, but that the file need not be open for reading. Nothing was moved, unless it is `Deadline`, which may have been done.
    pub fn defragment_step(&self, first_page: FilePage) -> Result<Moved, NativeError> {
        self.check_movable()?;
        let file = self.opened().clone();
        self.session().run(move |volume, caller| {
            volume.defragment_state(caller, &file.state, first_page).map_err(|error| file.explained(error))
        })
    }

    fn check_movable(&self) -> Result<(), NativeError> {
        self.check(true)?;
        self.check_whole("moves of its pages")
    }

    /// The runs of the pool in which its pages lie, as of about now.
    ///
    /// # Errors
    /// `NotOpenFor` if it is not open for reading; the server's, `Deadline`.
    pub fn runs(&self) -> Result<u64, NativeError> {
        self.check(false)?;
        let file = self.opened().clone();
        self.session().run(move |volume, caller| {
            volume.runs(caller, &file.state).map_err(|error| file.explained(error))
        })
    }
}
