//! The changes of a request, which must be durable before its answer is sent, if answers are durable (docs/log.md), if they stand behind one-sided
//! appends that are not (`unsynced_appends`), or if the request says so.
//!
//! A change is noted by the code that makes it: contents where their change begins (`begin_change`, `restore`), names and attributes where their
//! batch is committed (`Server::execute`). So no kind of request can be forgotten.

use super::images::sync;
use crate::files::{FileRegion, Files};
use crate::pool::disk::Disk;
use cuttlefs_common::status::Status;
use std::cell::{Cell, RefCell};
use std::sync::Arc;

/// What one request has changed so far.
#[derive(Debug, Default)]
pub struct Changed {
    /// Files whose contents it changed: one, or none.
    contents: RefCell<Vec<Arc<FileRegion>>>,
    /// Whether some of that lies behind one-sided appends that no sync had covered when the change was made.
    behind_appends: Cell<bool>,
    /// Whether its client wants it to be durable before the answer.
    is_wanted_durable: Cell<bool>,
    /// Whether it committed a batch.
    records: Cell<bool>,
}

impl Changed {
    /// Notes that contents of a file are about to change.
    pub(super) fn note_contents(&self, file: &Arc<FileRegion>) {
        self.contents.borrow_mut().push(file.clone());
    }

    /// Notes that a change was made behind one-sided appends that no sync has covered.
    pub(super) fn note_behind_appends(&self) {
        self.behind_appends.set(true);
    }

    /// Whether it must be durable before the answer even if answers are not: else its client would bring it back to a place behind appends that nobody
    /// brings back.
    pub fn is_behind_appends(&self) -> bool {
        self.behind_appends.get()
    }

    /// Notes that its client wants it to be durable before the answer.
    pub fn note_wanted_durable(&self) {
        self.is_wanted_durable.set(true);
    }

    /// Whether its client wants it to be durable before the answer.
    pub fn is_wanted_durable(&self) -> bool {
        self.is_wanted_durable.get()
    }

    /// Notes that a batch was committed.
    pub fn note_records(&self) {
        self.records.set(true);
    }

    /// Whether contents of a file were changed.
    pub fn has_contents(&self) -> bool {
        !self.contents.borrow().is_empty()
    }

    /// Makes all of its changes durable, and with them earlier changes of the same files by other requests. If a write-back has already committed
    /// them, this waits until that batch is durable.
    ///
    /// # Errors
    /// As `sync`.
    pub async fn make_durable(&self, files: &Files, disk: &dyn Disk) -> Result<(), Status> {
        let changed = self.contents.take();
        for file in &changed {
            sync(files, disk, file).await?;
        }
        // The batches are in one log in their order, so the sync of a file makes these batches durable as well.
        if self.records.take() && changed.is_empty() {
            files.committer.flush().await?;
        }
        Ok(())
    }
}
