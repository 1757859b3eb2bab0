//! The device below the checksums; its first failed sync is final.
//!
//! A device reports a loss once, at the next sync. That may be the sync of a mark or of a sweep, and the lost pages may be those of other writers.
//! The sync after it would report success. So after a failed sync every sync fails, on every worker's disk, until the server is restarted.
//! (`DataSync` shares one sync among committers, and does not know of other syncs.)

use super::PageSums;
use crate::pool::disk::{Disk, IoDone, IoRequest, LocalFuture};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// An earlier sync failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a sync of the data files failed before; nothing is durable any more until the server is restarted")]
pub(super) struct SyncFailedBefore;

pub(super) struct FinalSync {
    device: Rc<dyn Disk>,
    sums: Arc<PageSums>,
}

impl FinalSync {
    pub(super) fn new(device: Rc<dyn Disk>, sums: Arc<PageSums>) -> Self {
        Self { device, sums }
    }
}

impl Disk for FinalSync {
    fn submit(&self, batch: Vec<IoRequest>) -> LocalFuture<'static, Vec<IoDone>> {
        self.device.submit(batch)
    }

    fn sync(&self) -> LocalFuture<'static, io::Result<()>> {
        let (sync, sums) = (self.device.sync(), self.sums.clone());
        Box::pin(async move {
            let result = sync.await;
            // Checked after the sync: of two syncs at once, one may get the report of pages that the other should have made durable.
            if result.is_err() {
                sums.sync_failed.store(true, Ordering::Release);
            }
            if sums.sync_failed.load(Ordering::Acquire) {
                return result.and(Err(io::Error::other(SyncFailedBefore)));
            }
            Ok(())
        })
    }
}
