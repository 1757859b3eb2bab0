//! Counts of one-sided reads for the server (TeRM section 4.4): the server cannot see these reads and pulls the counts.
//!
//! The counters are made when a server asks for them, belong to the attachment, and are shared over the control lane's
//! connection. A new connection means a new sharing: the server pulls over the connection on which it was told of the
//! counters.

use super::OneSided;
use crate::session::{Session, SessionLane, Task};
use crate::transport::FsError;
use cuttlefs_common::ids::{FileKey, PAGE_SIZE_U64};
use cuttlefs_common::rdma::MemoryRegion;
use cuttlefs_common::region::{AccessCounters, CountersShape, divide};
use cuttlefs_common::rpc::{RemoteBuffer, Request};
use std::sync::Arc;
use std::time::Instant;

/// The counters that the control thread has shared.
#[derive(Default)]
pub(crate) struct CountSharing {
    /// Registered as long as it is shared.
    region: Option<Arc<dyn MemoryRegion>>,
    /// The connection over which it is shared.
    over: Option<u64>,
}

impl CountSharing {
    /// Makes the counters and shares them, unless they are already shared over the standing connection.
    ///
    /// # Errors
    /// The error of the call; sharing is not tried again on this connection.
    fn share(&mut self, session: &Session, lane: &mut SessionLane<'_>) -> Result<(), FsError> {
        let Some(connection) = lane.connection_number() else {
            return Ok(());
        };
        if self.over == Some(connection) {
            return Ok(());
        }
        self.over = Some(connection);
        let Some(attachment) = session.attachment() else {
            return Ok(());
        };
        let Some(shape) = attachment.attached.sampling.as_ref().and_then(CountersShape::of) else {
            return Ok(());
        };
        let counters = match attachment.counting.get() {
            // The session has counters already: the server is told over the new connection where they are.
            Some(counters) => counters.clone(),
            None => match AccessCounters::new(shape) {
                Ok(counters) => counters,
                Err(error) => {
                    tracing::warn!(%error, "no memory to count reads in; the server will not see what is hot");
                    return Ok(());
                }
            },
        };
        let region = match session.link().register(counters.memory().clone()) {
            Ok(region) => region,
            Err(error) => {
                tracing::warn!(%error, "counters cannot be registered; the server will not see what is hot");
                return Ok(());
            }
        };
        let buffer = RemoteBuffer { rkey: region.rkey(), offset: 0, len: shape.len_bytes() as u32 };
        // Stored before the server knows of it, because the server may read at once.
        self.region = Some(region);
        let caller = session.own_caller();
        let shared = lane.call(&caller, |_| Request::ShareCounters { buffer }, |_, _| Ok(()));
        // The call may have reconnected.
        self.over = lane.connection_number();
        shared?;
        // The attachment may be a new one. If it has counters already, they are in the same memory.
        if let Some(attachment) = session.attachment() {
            let _ = attachment.counting.set(counters);
        }
        Ok(())
    }
}

impl Task for CountSharing {
    fn run(&mut self, session: &Session, lane: &mut SessionLane<'_>) -> Result<Option<Instant>, FsError> {
        match self.share(session, lane) {
            Err(FsError::ShutDown) => return Err(FsError::ShutDown),
            Err(error) => tracing::debug!(%error, "the server does not pull counters"),
            Ok(()) => {}
        }
        // Nothing to do until the next connection: the thread wakes when this one is gone.
        Ok(None)
    }
}

/// Counts the pages that a one-sided read brought, for the server, which cannot see such reads (TeRM section 4.4).
pub(super) fn count(counters: &AccessCounters, filekey: FileKey, offset: u64, got: &OneSided) {
    if got.valid_len == 0 {
        return;
    }
    let first_page = offset / PAGE_SIZE_U64;
    if got.missing.is_empty() {
        let end_page = (offset + got.valid_len as u64).div_ceil(PAGE_SIZE_U64);
        return counters.count(filekey, first_page, end_page);
    }
    for index in (0..divide(offset, got.valid_len).len()).filter(|index| !got.missing.contains(*index)) {
        let page = first_page + index as u64;
        counters.count(filekey, page, page + 1);
    }
}
