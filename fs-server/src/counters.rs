//! Every figure the server counts, by name, for `status`.

use crate::rpc::turns::TurnFigures;
use cuttlefs_common::rpc::Request;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! rpc_kinds {
    ($($name:literal => $pattern:pat),* $(,)?) => {
        /// Names of the kinds of RPCs, in the order of their counters.
        pub(crate) const RPC_KINDS: &[&str] = &[$($name),*];

        fn kind_of(request: &Request<'_>) -> usize {
            let mut index = 0;
            $(
                if matches!(request, $pattern) {
                    return index;
                }
                index += 1;
            )*
            index
        }
    };
}

rpc_kinds! {
    "attach" => Request::Attach { .. },
    "heartbeat" => Request::Heartbeat,
    "detach" => Request::Detach,
    "reclaim" => Request::Reclaim { .. },
    "lookup" => Request::Lookup { .. },
    "getattr" => Request::GetAttr { .. },
    "setattr" => Request::SetAttr { .. },
    "make" => Request::Make { .. },
    "create" => Request::Create { .. },
    "link" => Request::Link { .. },
    "unlink" => Request::Unlink { .. },
    "rmdir" => Request::Rmdir { .. },
    "rename" => Request::Rename { .. },
    "readlink" => Request::ReadLink { .. },
    "readdir" => Request::ReadDir { .. },
    "open" => Request::Open { .. },
    "close" => Request::Close { .. },
    "layout" => Request::Layout { .. },
    "fetch" => Request::Fetch { .. },
    "write" => Request::Write { .. },
    "sync" => Request::Sync(_),
    "allocate" => Request::Allocate { .. },
    "seek" => Request::Seek { .. },
    "copy_range" => Request::CopyRange { .. },
    "getxattr" => Request::GetXattr { .. },
    "listxattr" => Request::ListXattr { .. },
    "setxattr" => Request::SetXattr { .. },
    "removexattr" => Request::RemoveXattr { .. },
    "statfs" => Request::StatFs,
    "status" => Request::Status,
    "recovered" => Request::Recovered { .. },
    "share_counters" => Request::ShareCounters { .. },
    "set_lock" => Request::SetLock { .. },
    "unlock" => Request::Unlock { .. },
    "test_lock" => Request::TestLock { .. },
    "await_locks" => Request::AwaitLocks { .. },
    "cancel_lock" => Request::CancelLock { .. },
    "reclaim_locks" => Request::ReclaimLocks { .. },
    "restore" => Request::Restore { .. },
    "create_nameless" => Request::CreateNameless { .. },
    "bind" => Request::Bind { .. },
    "bind_again" => Request::BindAgain { .. },
    "unbind" => Request::Unbind { .. },
    "open_region" => Request::OpenRegion { .. },
    "grant_write" => Request::GrantWrite { .. },
    "return_grant" => Request::ReturnGrant { .. },
    "changes" => Request::Changes { .. },
    "defragment" => Request::Defragment { .. },
    "atomic" => Request::Atomic { .. },
}

/// Figures since the server started. Written by workers, read by status; relaxed.
pub struct ServerCounters {
    rpc: Vec<AtomicU64>,
    /// Messages that did not parse.
    pub bad_messages: AtomicU64,
    /// Connections that were ended because their peers kept the server waiting for too long.
    pub timed_out: AtomicU64,
    /// Connections that were refused because the peer has its share, or all places are taken.
    pub refused: AtomicU64,
    /// Connections accepted.
    pub connections: AtomicU64,
    /// Times at which all shared receives of a worker were in use.
    pub receives_ran_dry: AtomicU64,
    /// Bytes that clients wrote.
    pub written_bytes: AtomicU64,
    /// Bytes that clients fetched by RPC.
    pub fetched_bytes: AtomicU64,
    /// Short fetches that took memory of their own, because all reply buffers of their connection were in flight.
    pub fetched_aside: AtomicU64,
    /// Syncs that were begun before a client asked for them.
    pub syncs_ahead: AtomicU64,
    /// Syncs before an answer, because the request had put something behind one-sided appends that no sync had covered.
    pub syncs_for_appends: AtomicU64,
    /// Turns of requests for file bytes.
    pub turns: Arc<TurnFigures>,
    /// Turns of climbs from directories to the root.
    pub climbs: Arc<TurnFigures>,
    /// Turns for bounce buffers.
    pub bounce: Arc<TurnFigures>,
}

impl Default for ServerCounters {
    fn default() -> Self {
        Self {
            rpc: RPC_KINDS.iter().map(|_| AtomicU64::new(0)).collect(),
            bad_messages: AtomicU64::new(0),
            timed_out: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            receives_ran_dry: AtomicU64::new(0),
            written_bytes: AtomicU64::new(0),
            fetched_bytes: AtomicU64::new(0),
            fetched_aside: AtomicU64::new(0),
            syncs_ahead: AtomicU64::new(0),
            syncs_for_appends: AtomicU64::new(0),
            turns: Arc::default(),
            climbs: Arc::default(),
            bounce: Arc::default(),
        }
    }
}

impl ServerCounters {
    /// Counts a request.
    pub fn count_rpc(&self, request: &Request<'_>) {
        if let Some(counter) = self.rpc.get(kind_of(request)) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Requests by kind.
    pub fn rpc(&self) -> impl Iterator<Item = (&'static str, u64)> {
        RPC_KINDS.iter().zip(&self.rpc).map(|(name, count)| (*name, count.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_counted_apart() {
        let counters = ServerCounters::default();
        counters.count_rpc(&Request::StatFs);
        counters.count_rpc(&Request::Heartbeat);
        counters.count_rpc(&Request::Heartbeat);
        let counts: Vec<_> = counters.rpc().filter(|(_, count)| *count > 0).collect();
        assert_eq!(counts, [("heartbeat", 2), ("statfs", 1)]);
    }
}
