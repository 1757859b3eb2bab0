//! A client's request for a lock, and its answer, which may come later.

use cuttlefs_client::file::volume::{FsError, GrantedLock, LockWaiter};
use parking_lot::Mutex;

/// The waiter of one lock request: it keeps the answer for the test to look at.
#[derive(Default)]
pub struct Waiter(Mutex<Option<Answer>>);

#[derive(Clone)]
struct Answer {
    result: Result<(), FsError>,
    was_stale: bool,
}

impl LockWaiter for Waiter {
    fn is_interrupted(&self) -> bool {
        false
    }

    fn answer(&self, result: Result<GrantedLock, FsError>) -> bool {
        let was_stale = result.as_ref().is_ok_and(|granted| granted.is_stale);
        let answer = Answer { result: result.map(|_| ()), was_stale };
        assert!(self.0.lock().replace(answer).is_none(), "answered once");
        true
    }
}

impl Waiter {
    /// The answer, or `None` while the lock is waited for.
    pub fn answer(&self) -> Option<Result<(), FsError>> {
        self.0.lock().as_ref().map(|answer| answer.result.clone())
    }

    /// Whether the answer said that the mount's cached data of the file is stale.
    pub fn was_stale(&self) -> bool {
        self.0.lock().as_ref().is_some_and(|answer| answer.was_stale)
    }
}
