//! A kernel request for a lock: its answer, and whether its caller still waits.

use super::cached_files::At;
use super::file_system::CuttleFuse;
use super::kernel::{INodeNo, ReplyEmpty};
use super::kernel_cache::KernelCache;
use super::lacking::Lacking;
use super::reply::refused;
use crate::file::volume::{FsError, GrantedLock, LockWaiter, Volume};
use cuttlefs_common::ids::InodeNo;
use parking_lot::Mutex;
use std::sync::Arc;

/// A kernel request for a lock.
pub(super) struct LockRequest<V: ?Sized> {
    volume: Arc<V>,
    /// The server's number before the request.
    epoch: u64,
    ino: INodeNo,
    /// The same, for the volume.
    volume_ino: InodeNo,
    cache: Arc<KernelCache>,
    lacking: Arc<Lacking>,
    reply: Mutex<Option<ReplyEmpty>>,
}

impl<V: Volume + ?Sized> LockRequest<V> {
    pub(super) fn new(edge: &CuttleFuse<V>, ino: INodeNo, reply: ReplyEmpty) -> Arc<Self> {
        Arc::new(Self {
            volume: edge.volume.clone(),
            epoch: edge.volume.server_epoch(),
            ino,
            volume_ino: edge.ino(ino),
            cache: edge.cache.clone(),
            lacking: edge.lacking.clone(),
            reply: Mutex::new(Some(reply)),
        })
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

impl<V: Volume + ?Sized> LockWaiter for LockRequest<V> {
    fn is_interrupted(&self) -> bool {
        self.reply.lock().as_ref().is_some_and(ReplyEmpty::is_interrupted)
    }

    fn answer(&self, result: Result<GrantedLock, FsError>) -> bool {
        let Some(reply) = self.reply.lock().take() else {
            return false;
        };
        match result {
            // From here on nobody else may answer, or there would be a lock that nobody knows of.
            Ok(GrantedLock { change }) => {
                let Some(reply) = reply.claim() else {
                    return false;
                };
                self.forget_attributes(change);
                let at = change.and_then(|change| At::of(&*self.volume, self.epoch, change));
                self.cache.soon_good(self.ino, at, move || reply.ok());
            }
            Err(error) => reply.error(refused(&error)),
        }
        true
    }
}
