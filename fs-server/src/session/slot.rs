//! The state of one slot: its last request and the answer.
//!
//! | request's seq | slot is idle                    | slot is busy                        |
//! |---------------|---------------------------------|-------------------------------------|
//! | new (last + 1)| run it                          | `BadSequence`                       |
//! | last          | replay the answer, or run again if it changed nothing | wait: answer goes to the newest connection |
//! | other         | `BadSequence`                   | `BadSequence`                       |
//!
//! A fresh slot takes any number as its first, for the client goes on with the numbers that it used with the server before. If that server did the
//! request, its answer is put here first (`recall`).

use cuttlefs_common::status::Status;
use std::sync::Arc;

/// Largest answer that is kept for a replay. Answers to mutations are far smaller.
pub(super) const MAX_CACHED_REPLY: usize = 4096;

/// What is done with an arriving request.
#[derive(Debug, PartialEq, Eq)]
pub enum Admission {
    /// The request is run.
    Run,
    /// The request was answered before, with this reply, which is sent again.
    Replay(Arc<[u8]>),
    /// The request is running. Its answer will go to the newest connection on which it came in.
    Running,
}

/// The last request of a slot.
#[derive(Debug, Default)]
pub struct Slot {
    last: Option<u64>,
    busy: bool,
    reply: Option<Arc<[u8]>>,
    /// The number of the connection that waits for the answer. Numbers of connections grow.
    answer_to: u64,
}

impl Slot {
    /// Whether the slot has had no request yet, and no recalled answer.
    pub fn is_fresh(&self) -> bool {
        self.last.is_none()
    }

    /// Puts in the answer of a request that the server before did. `false`: the slot is not fresh, and stays as it is.
    pub fn recall(&mut self, seq: u64, reply: Arc<[u8]>) -> bool {
        let is_fresh = self.is_fresh();
        if is_fresh {
            (self.last, self.reply) = (Some(seq), Some(reply));
        }
        is_fresh
    }

    /// Admits a request that arrived on a connection.
    ///
    /// # Errors
    /// `BadSequence` by the table above.
    pub fn admit(&mut self, seq: u64, connection: u64) -> Result<Admission, Status> {
        match self.last {
            Some(last) if seq == last && self.busy => {
                // Copies of a request may be handled in any order. Nobody reads answers on an older connection.
                self.answer_to = self.answer_to.max(connection);
                Ok(Admission::Running)
            }
            Some(_) if self.busy => Err(Status::BadSequence),
            Some(last) if seq == last => match &self.reply {
                Some(reply) => Ok(Admission::Replay(reply.clone())),
                None => {
                    self.begin(seq, connection);
                    Ok(Admission::Run)
                }
            },
            Some(last) if seq != last.wrapping_add(1) => Err(Status::BadSequence),
            _ => {
                self.begin(seq, connection);
                Ok(Admission::Run)
            }
        }
    }

    fn begin(&mut self, seq: u64, connection: u64) {
        self.last = Some(seq);
        self.busy = true;
        self.reply = None;
        self.answer_to = connection;
    }

    /// Ends the request; `reply` is kept if the request must not run again. Returns the connection to answer on.
    pub fn finish(&mut self, reply: Option<Arc<[u8]>>) -> u64 {
        self.busy = false;
        self.reply = reply.filter(|reply| reply.len() <= MAX_CACHED_REPLY);
        self.answer_to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_of_the_table() {
        let reply: Arc<[u8]> = Arc::from(&b"answer"[..]);
        let mut slot = Slot::default();
        assert_eq!(slot.admit(41, 1), Ok(Admission::Run), "a fresh slot takes any number");
        assert_eq!(slot.admit(41, 2), Ok(Admission::Running));
        assert_eq!(slot.admit(41, 1), Ok(Admission::Running), "a late copy");
        assert_eq!(slot.admit(42, 2), Err(Status::BadSequence), "one request at a time");
        assert_eq!(slot.admit(40, 2), Err(Status::BadSequence));
        assert_eq!(slot.finish(Some(reply.clone())), 2, "the newest connection gets the answer");
        assert_eq!(slot.admit(41, 3), Ok(Admission::Replay(reply)));
        assert_eq!(slot.admit(40, 3), Err(Status::BadSequence));
        assert_eq!(slot.admit(43, 3), Err(Status::BadSequence));
        assert_eq!(slot.admit(42, 3), Ok(Admission::Run));
        slot.finish(None);
        assert_eq!(slot.admit(42, 3), Ok(Admission::Run), "what changed nothing may run again");
        slot.finish(None);
        assert_eq!(slot.admit(43, 3), Ok(Admission::Run));
    }

    #[test]
    fn an_answer_is_recalled_to_a_fresh_slot_only() {
        let reply: Arc<[u8]> = Arc::from(&b"answer"[..]);
        let mut slot = Slot::default();
        assert!(slot.recall(41, reply.clone()) && !slot.is_fresh());
        assert!(
            !slot.recall(41, Arc::from(&b"another"[..])),
            "a client that recovers once more has the first"
        );
        assert_eq!(slot.admit(40, 1), Err(Status::BadSequence));
        assert_eq!(slot.admit(41, 1), Ok(Admission::Replay(reply.clone())));
        assert_eq!(slot.admit(42, 1), Ok(Admission::Run), "it has its answer");
        assert!(!slot.recall(41, reply.clone()), "while it runs");
        slot.finish(None);
        assert!(!slot.recall(41, reply));
    }
}
