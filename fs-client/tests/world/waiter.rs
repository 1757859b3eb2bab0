//! A client's request for a lock, and its answer, which may come later.

use cuttlefs_client::file::volume::{FsError, GrantedLock, LockWaiter};
use parking_lot::Mutex;

/// The waiter of one lock request: it keeps the answer for the test to look at.
#[derive(Default)]
pub struct Waiter(Mutex<Option<Answer>>);

#[derive(Clone)]
struct Answer {
    result: Result<(), FsError>,
    change: Option<u64>,
}

impl LockWaiter for Waiter {
    fn is_interrupted(&self) -> bool {
        false
    }

    fn answer(&self, result: Result<GrantedLock, FsError>) -> bool {
        let change = result.as_ref().ok().and_then(|granted| granted.change);
        let answer = Answer { result: result.map(|_| ()), change };
        assert!(self.0.lock().replace(answer).is_none(), "answered once");
        true
    }
}

impl Waiter {
    /// The answer, or `None` while the lock is waited for.
    pub fn answer(&self) -> Option<Result<(), FsError>> {
        self.0.lock().as_ref().map(|answer| answer.result.clone())
    }

    /// The file's change counter in the answer.
    pub fn change(&self) -> Option<u64> {
        self.0.lock().as_ref().and_then(|answer| answer.change)
    }
}
