//! The changes of a request. They must be durable before its answer leaves, where answers are durable (docs/log.md).
//!
//! The code that makes a change notes it, and no other code: contents where their change begins (`begin_change`, `restore`), names and
//! attributes where their batch is committed (`Server::execute`). So no kind of request can be forgotten, and the kind does not matter.

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
    /// It committed a batch.
    records: Cell<bool>,
}

impl Changed {
    /// Contents of a file are about to change.
    pub(super) fn note_contents(&self, file: &Arc<FileRegion>) {
        self.contents.borrow_mut().push(file.clone());
    }

    /// A batch was committed.
    pub fn note_records(&self) {
        self.records.set(true);
    }

    /// Whether contents of a file were changed.
    pub fn has_contents(&self) -> bool {
        !self.contents.borrow().is_empty()
    }

    /// Makes all of it durable. What others did to the same files is made durable with it; what they have committed already is
    /// waited for.
    ///
    /// # Errors
    /// As `sync`.
    pub async fn make_durable(&self, files: &Files, disk: &dyn Disk) -> Result<(), Status> {
        let changed = self.contents.take();
        for file in &changed {
            sync(files, disk, file).await?;
        }
        // Batches are in one log, in order: the flush of a file behind them covers them.
        if self.records.take() && changed.is_empty() {
            files.committer.flush().await?;
        }
        Ok(())
    }
}
