//! Receives that several queue pairs take from, after `ibv_srq`: the poster bounds the buffers, not the number of connections.
//!
//! # Invariants
//! * The queue pair that has a message first takes the oldest receive. The completion, in that queue pair's completion queue, gives the receive back:
//!   on success and on failure, and also if the queue pair is gone by then.
//! * Receives that nobody has taken stay posted when queue pairs break.
//! * While no receive is posted, messages wait at their senders, in order, as for a queue pair without a receive: an RNIC tells each sender that it
//!   is not ready (RNR), and the sender tries again. Queue pairs whose messages wait get receives in no particular order.
//! * A message that is longer than the receive it takes breaks its queue pair with `LocalLength`, and no other.

use super::verbs::{PostError, RecvWr};
use std::any::Any;

/// A queue of shared receives; see the module. It is `Any`, so that a provider recognises its own queues when a queue pair is made with them.
pub trait SharedReceiveQueue: Any + Send + Sync {
    /// Posts receive buffers.
    ///
    /// # Errors
    /// `PostError::QueueFull` and `PostError::TooManySges` tell how many were posted. A place is free again when the receive's completion was polled.
    fn post(&self, requests: &[RecvWr]) -> Result<(), PostError>;
    /// How many times the last receive was taken: from then until the next post every sender is told to wait. The RNIC counts how often senders were
    /// told (its `rnr` counters).
    fn ran_dry(&self) -> u64;
}
