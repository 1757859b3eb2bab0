//! A kernel request for a lock: its answer, and whether its caller still waits.

use super::kernel::{INodeNo, ReplyEmpty};
use super::kernel_cache::KernelCache;
use super::reply::refused;
use crate::file::volume::{FsError, GrantedLock, LockWaiter};
use parking_lot::Mutex;
use std::sync::Arc;

/// A kernel request for a lock.
#[derive(Debug)]
pub(super) struct LockRequest {
    ino: INodeNo,
    cache: Arc<KernelCache>,
    reply: Mutex<Option<ReplyEmpty>>,
}

impl LockRequest {
    pub(super) fn new(ino: INodeNo, cache: &Arc<KernelCache>, reply: ReplyEmpty) -> Arc<Self> {
        Arc::new(Self { ino, cache: cache.clone(), reply: Mutex::new(Some(reply)) })
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
            Ok(GrantedLock { is_stale }) => {
                let Some(reply) = reply.claim() else {
                    return false;
                };
                self.cache.forget_attributes(self.ino);
                if is_stale { self.cache.answer_without_bytes(self.ino, reply) } else { reply.ok() }
            }
            Err(error) => reply.error(refused(&error)),
        }
        true
    }
}
