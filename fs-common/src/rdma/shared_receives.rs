//! Receives that several queue pairs take from, after `ibv_srq`: buffers are bounded by whoever posts them, and not by how many are connected.
//!
//! # Invariants
//! * Whichever queue pair has a message first takes the oldest receive. Its completion, at that queue pair's queue, gives the receive back:
//!   in success and in failure, and also if the queue pair is gone by then.
//! * What nobody has taken stays posted when queue pairs break: their ends flush nothing here.
//! * While nothing is posted messages wait at their senders, in order, as for a queue pair without a receive: an RNIC tells each sender that
//!   it is not ready (RNR), and is asked again. Queue pairs whose messages wait get receives in no particular order.
//! * A message that is longer than the receive it takes breaks its queue pair with `LocalLength`, and no other.

use super::verbs::{PostError, RecvWr};
use std::any::Any;

/// See the module. `Any`, so that a provider knows its own queues again when a queue pair is made with them.
pub trait SharedReceiveQueue: Any + Send + Sync {
    /// Posts receive buffers.
    ///
    /// # Errors
    /// `PostError::QueueFull` says how many were taken. A place is free again when the receive's completion was polled.
    fn post(&self, requests: &[RecvWr]) -> Result<(), PostError>;
    /// How many times the last one was taken: from then until the next post whoever sent was told to wait. How many were told is the
    /// RNIC's to count (its `rnr` counters).
    fn ran_dry(&self) -> u64;
}
