//! The right to write blocks of one kind: one batch after another, so that the newest write of a block is the last.
//!
//! # Failure
//! A batch whose future is dropped may still be on its way to the device, and could overwrite a later batch. So after that no block of the kind is
//! written until the server is restarted.

use crate::pool::disk::{Disk, IoRequest};
use std::io;

/// A batch was submitted, and its end was not seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a write of {0} was given up half-way; what is on SSD is unknown until the server is restarted")]
pub(super) struct GivenUp(&'static str);

/// The turns for blocks of one kind.
#[derive(Debug)]
pub(super) struct Turns {
    what: &'static str,
    /// Whether a batch is on its way.
    is_writing: async_lock::Mutex<bool>,
}

/// A turn to write.
pub(super) struct Turn<'a> {
    what: &'static str,
    is_writing: async_lock::MutexGuard<'a, bool>,
}

impl Turns {
    /// Turns for blocks that errors call `what`.
    pub(super) fn of(what: &'static str) -> Self {
        Self { what, is_writing: async_lock::Mutex::new(false) }
    }

    /// Waits until nobody else writes.
    pub(super) async fn take(&self) -> Turn<'_> {
        Turn { what: self.what, is_writing: self.is_writing.lock().await }
    }
}

impl Turn<'_> {
    /// Writes a batch. Returns the result of each request.
    ///
    /// # Errors
    /// [`GivenUp`]: nothing was written.
    pub(super) async fn write(
        &mut self,
        disk: &dyn Disk,
        batch: Vec<IoRequest>,
    ) -> io::Result<Vec<io::Result<()>>> {
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        if *self.is_writing {
            return Err(io::Error::other(GivenUp(self.what)));
        }
        *self.is_writing = true;
        let done = disk.submit(batch).await;
        *self.is_writing = false;
        Ok(done.into_iter().map(|done| done.result.map_err(|error| error.source)).collect())
    }
}
