//! The caller of a request for a lock, and the answer to it.

use crate::transport::FsError;

/// A lock that was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantedLock {
    /// The file's change counter, behind the changes of the holder before: bytes and attributes with an older counter must not be used any more. `None`:
    /// the server could not be asked.
    pub change: Option<u64>,
}

/// The caller of a request for a lock. It may be answered long after the request, from any thread.
pub trait LockWaiter: Send + Sync {
    /// Whether the caller was interrupted and does not want to wait any more. The session is told when that may have changed.
    fn is_interrupted(&self) -> bool;
    /// The lock is granted, or will not be. Called once; must not wait for the session. `false`: the caller has had another answer, so a granted lock
    /// must be given up again.
    #[must_use]
    fn answer(&self, result: Result<GrantedLock, FsError>) -> bool;
}
