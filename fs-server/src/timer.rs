//! Sleeps: a worker's timers provide them, or a test by hand.

use crate::pool::LocalFuture;
use std::time::Duration;

/// A source of sleeps.
pub trait Timer {
    /// Resolves after `duration`.
    fn sleep(&self, duration: Duration) -> LocalFuture<'static, ()>;
}
