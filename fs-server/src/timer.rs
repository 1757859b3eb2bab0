//! Sleeps: time comes in from outside, by a worker's timers, or in tests by hand.

use crate::pool::LocalFuture;
use std::time::Duration;

/// Who can wait.
pub trait Timer {
    /// Resolves after `duration`.
    fn sleep(&self, duration: Duration) -> LocalFuture<'static, ()>;
}
