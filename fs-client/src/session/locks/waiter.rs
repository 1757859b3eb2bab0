//! The caller of a request for a lock, and the answer to it.

use crate::transport::FsError;

/// A lock that was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantedLock {
    /// Somebody else may have changed the file since this mount looked at it: what is cached of its bytes is not what the
    /// holder of the lock is to read.
    pub is_stale: bool,
}

/// Who asked for a lock. He may be answered long after the call that asked, from any thread.
pub trait LockWaiter: Send + Sync {
    /// Whether he does not want to wait any more; once he does not, the session is told.
    fn is_interrupted(&self) -> bool;
    /// The lock is held, or it will not be. Called once; must not wait for the session. `false`: he has been told something
    /// else, and a lock is to be given up again.
    #[must_use]
    fn answer(&self, result: Result<GrantedLock, FsError>) -> bool;
}
