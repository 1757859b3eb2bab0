//! Who asks for a lock, and hears of it later.

use cuttlefs_client::file::volume::{FsError, GrantedLock, LockWaiter};
use parking_lot::Mutex;

/// Somebody who asked for a lock.
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
    /// The answer, once there is one.
    pub fn answer(&self) -> Option<Result<(), FsError>> {
        self.0.lock().as_ref().map(|answer| answer.result.clone())
    }

    /// Whether what its mount has of the file was said to be stale.
    pub fn was_stale(&self) -> bool {
        self.0.lock().as_ref().is_some_and(|answer| answer.was_stale)
    }
}
