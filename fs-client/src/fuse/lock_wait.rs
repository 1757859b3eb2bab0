//! A kernel request for a lock: its answer, and whether its caller still waits.

use super::kernel::{INodeNo, ReplyEmpty};
use super::kernel_cache::KernelCache;
use super::lacking::Lacking;
use super::reply::refused;
use crate::file::volume::{FsError, GrantedLock, LockWaiter};
use cuttlefs_common::ids::InodeNo;
use parking_lot::Mutex;
use std::sync::Arc;

/// A kernel request for a lock.
#[derive(Debug)]
pub(super) struct LockRequest {
    ino: INodeNo,
    /// The same, for the volume.
    volume_ino: InodeNo,
    cache: Arc<KernelCache>,
    lacking: Arc<Lacking>,
    reply: Mutex<Option<ReplyEmpty>>,
}

impl LockRequest {
    pub(super) fn new(
        ino: INodeNo,
        volume_ino: InodeNo,
        cache: &Arc<KernelCache>,
        lacking: &Arc<Lacking>,
        reply: ReplyEmpty,
    ) -> Arc<Self> {
        let (cache, lacking) = (cache.clone(), lacking.clone());
        Arc::new(Self { ino, volume_ino, cache, lacking, reply: Mutex::new(Some(reply)) })
    }

    /// The kernel's attributes are from before the lock: has it forget them.
    fn forget_attributes(&self, change: Option<u64>) {
        let forget = || self.cache.forget_attributes(self.ino);
        match change {
            Some(change) => self.lacking.forget_older(self.volume_ino, change, forget),
            None => forget(),
        }
    }
}

impl LockWaiter for LockRequest {
    fn is_interrupted(&self) -> bool {
        self.reply.lock().as_ref().is_some_and(ReplyEmpty::is_interrupted)
    }

    fn answer(&self, result: Result<GrantedLock, FsError>) -> bool {
        let Some(reply) = self.reply.lock().take() else {
            return false;
        };
        match result {
            // From here on nobody else may answer, or there would be a lock that nobody knows of.
            Ok(GrantedLock { change, is_stale }) => {
                let Some(reply) = reply.claim() else {
                    return false;
                };
                self.forget_attributes(change);
                if is_stale { self.cache.answer_without_bytes(self.ino, reply) } else { reply.ok() }
            }
            Err(error) => reply.error(refused(&error)),
        }
        true
    }
}
