//! The ways in which committed batches become durable: a sync of the log, which blocks, or a direct write, which the caller makes.
//!
//! # Invariants
//! * Batches up to `settled` are durable in the log or a checkpoint. Batches up to `persistent` may be durable in `direct-*` only, until these files
//!   are overwritten. Both numbers are only raised.
//! * Syncs of the log are done one after another. Direct writes need not be: each has all records that are not durable when it begins.

use super::direct;
use super::{Shared, backend};
use crate::meta::store::{DirectSync, StoreError, SyncStep};
use std::io;
use std::sync::atomic::Ordering;

impl Shared {
    pub(super) fn sync_log(&self) -> Result<(), StoreError> {
        let _one_at_a_time = self.syncing.lock();
        let (batch, files) = {
            let mut last = self.last.lock();
            (last.batch, last.tail.begin_sync())
        };
        if files.is_empty() {
            // All batches that are not in these files are in a checkpoint.
            self.settled.fetch_max(batch, Ordering::AcqRel);
            self.persistent.fetch_max(batch, Ordering::AcqRel);
            return Ok(());
        }
        for (name, file) in files {
            self.space.sync(name, &file).map_err(|e| backend("sync the log", e))?;
        }
        self.note_settled(batch)
    }

    pub(super) fn prepare_sync(&self) {
        // Without the lock, because it takes some milliseconds.
        let file_bytes = self.last.lock().direct.file_bytes();
        match direct::prepare(&self.path, file_bytes, &self.space) {
            Ok(files) => self.last.lock().direct.start(files),
            Err(error) => {
                tracing::info!(%error, "metadata: syncs by direct writes are not possible; a thread syncs")
            }
        }
    }

    pub(super) fn begin_sync(&self) -> SyncStep {
        let mut last = self.last.lock();
        let persistent = self.persistent.load(Ordering::Acquire);
        if persistent >= last.batch {
            return SyncStep::Nothing;
        }
        let (batch, settled) = (last.batch, self.settled.load(Ordering::Acquire));
        match last.direct.begin(persistent, batch, settled) {
            Some((sync, write)) => SyncStep::Write(sync, write),
            None => SyncStep::Block,
        }
    }

    pub(super) fn end_sync(&self, sync: DirectSync, written: io::Result<()>) -> Result<bool, StoreError> {
        match written {
            Ok(()) => self.note_durable(sync.batch).map(|()| true),
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                tracing::warn!(
                    "metadata: no space for a direct write of the log; a thread syncs until the next start"
                );
                self.last.lock().direct.give_up();
                Ok(false)
            }
            Err(error) => Err(backend("sync the log", error)),
        }
    }

    /// Notes that all batches up to this one survive a power loss in the log or a checkpoint.
    pub(super) fn note_settled(&self, batch: u64) -> Result<(), StoreError> {
        self.settled.fetch_max(batch, Ordering::AcqRel);
        self.note_durable(batch)
    }

    /// Notes that all batches up to this one survive a power loss.
    fn note_durable(&self, batch: u64) -> Result<(), StoreError> {
        self.flushed.note(batch, &self.space).map_err(|e| backend("note what is durable", e))?;
        self.persistent.fetch_max(batch, Ordering::AcqRel);
        Ok(())
    }
}
