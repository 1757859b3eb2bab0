//! Moves of a file's pages to fewer runs of the server's pool (docs/file-regions.md, "Moves").

use super::{File, NativeError};
use cuttlefs_common::ids::FilePage;

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
    /// lies in one run already costs a look. `progress` is told the pages that were moved so far; if it returns `false`, no further ones are. A
    /// deadline is one of each step.
    ///
    /// # Errors
    /// `NotOpenFor` if it is not open for reading and writing, as a whole; `Server(NoSpace)` if the pool has too little free space; the server's,
    /// `Deadline`. What was moved stays moved.
    pub fn defragment(&self, mut progress: impl FnMut(u64) -> bool) -> Result<Defragmented, NativeError> {
        self.check(false)?;
        self.check(true)?;
        self.check_whole("moves of its pages")?;
        let runs_before = self.runs()?;
        let (mut moved_pages, mut next) = (0, Some(FilePage(0)));
        while let Some(first_page) = next {
            let file = self.opened().clone();
            let moved = self.session().run(move |volume, caller| {
                volume
                    .defragment_state(caller, &file.state, first_page)
                    .map_err(|error| file.explained(error))
            })?;
            (moved_pages, next) = (moved_pages + moved.pages, moved.next);
            if moved.pages > 0 && !progress(moved_pages) {
                break;
            }
        }
        let runs_after = if moved_pages > 0 { self.runs()? } else { runs_before };
        Ok(Defragmented { runs_before, runs_after, moved_pages })
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
