//! Counting one-sided reads for the server (TeRM section 4.4): the server cannot see them and pulls the counts.
//!
//! The counters are made when a server asks for them, belong to the attachment, and are shared over the control lane's
//! connection. A new connection means a new sharing: the server pulls over the one it was told on.

use super::{LaneGuard, Session};
use crate::file::volume::FsError;
use cuttlefs_common::rdma::{Access, MemoryRegion};
use cuttlefs_common::region::{AccessCounters, CountersShape};
use cuttlefs_common::rpc::{RemoteBuffer, Request};
use std::sync::Arc;

/// What the control thread has shared.
#[derive(Default)]
pub(super) struct Sharing {
    /// Registered for as long as it is shared.
    region: Option<Arc<dyn MemoryRegion>>,
    /// Over which connection.
    over: Option<u64>,
}

impl Sharing {
    /// Makes and shares the counters unless they are shared over the standing connection already.
    ///
    /// # Errors
    /// As the call's; it is not tried again on this connection.
    pub(super) fn share(&mut self, session: &Session, lane: &mut LaneGuard<'_>) -> Result<(), FsError> {
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
            // Of this session already: it is told over the new connection where they are.
            Some(counters) => counters.clone(),
            None => match AccessCounters::new(shape) {
                Ok(counters) => counters,
                Err(error) => {
                    tracing::warn!(%error, "no memory to count reads in; the server will not see what is hot");
                    return Ok(());
                }
            },
        };
        let access = Access { remote_atomic: false, remote_flush: false, ..Access::ALL };
        let region = match session.pd.register(counters.memory().clone(), access) {
            Ok(region) => region,
            Err(error) => {
                tracing::warn!(%error, "counters cannot be registered; the server will not see what is hot");
                return Ok(());
            }
        };
        let buffer = RemoteBuffer { rkey: region.rkey(), offset: 0, len: shape.len_bytes() as u32 };
        // Kept before the server knows it: it may read at once.
        self.region = Some(region);
        let caller = session.own_caller();
        let shared = lane.call(&caller, |_| Request::ShareCounters { buffer }, |_, _| Ok(()));
        // The call may have reconnected.
        self.over = lane.connection_number();
        shared?;
        // As is the attachment; what was there before is the same memory.
        if let Some(attachment) = session.attachment() {
            let _ = attachment.counting.set(counters);
        }
        Ok(())
    }
}
