//! One slot's memory: which request it saw last and what was answered.
//!
//! | request's seq | slot is idle                    | slot is busy                        |
//! |---------------|---------------------------------|-------------------------------------|
//! | new (last + 1)| run it                          | `BadSequence`                       |
//! | last          | replay the answer, or run again if it changed nothing | wait: answer goes to the newest connection |
//! | other         | `BadSequence`                   | `BadSequence`                       |
//!
//! A fresh slot takes any number as its first: the client has counted on with the server before this one. Whether that
//! one did the request already is for the metadata to say. What that request was about is kept until it has come and was
//! answered (`session/`, "What is kept for requests that are asked again").

use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::status::Status;
use std::sync::Arc;

/// Largest answer kept for a replay; answers of mutations are far smaller.
pub const MAX_CACHED_REPLY: usize = 4096;

/// What to do with an arriving request.
#[derive(Debug, PartialEq, Eq)]
pub enum Admission {
    /// Run it. `first`: it is the first one this slot sees.
    Run {
        /// See there.
        first: bool,
    },
    /// It was answered before: send this again.
    Replay(Arc<[u8]>),
    /// It is running: whoever runs it will answer on the newest connection it came in on.
    Running,
}

/// Last request of a slot.
#[derive(Debug, Default)]
pub struct Slot {
    last: Option<u64>,
    busy: bool,
    reply: Option<Arc<[u8]>>,
    /// Connection that waits for the answer: its number within the server, which grows.
    answer_to: u64,
    /// Kept for the request that comes first.
    keeps: Option<InodeNo>,
}

impl Slot {
    /// From now on this is kept for the request that comes first. Gives what was kept for it before.
    ///
    /// # Errors
    /// `BadSequence` if one has come; nothing is changed.
    pub fn keep(&mut self, ino: Option<InodeNo>) -> Result<Option<InodeNo>, Status> {
        match self.last {
            None => Ok(std::mem::replace(&mut self.keeps, ino)),
            Some(_) => Err(Status::BadSequence),
        }
    }

    /// Nothing is kept any more. Gives what was.
    pub fn let_go(&mut self) -> Option<InodeNo> {
        self.keeps.take()
    }

    /// A request arrived on a connection.
    ///
    /// # Errors
    /// `BadSequence` by the table above.
    pub fn admit(&mut self, seq: u64, connection: u64) -> Result<Admission, Status> {
        match self.last {
            Some(last) if seq == last && self.busy => {
                // Copies may be looked at in any order; what is behind an older connection nobody reads.
                self.answer_to = self.answer_to.max(connection);
                Ok(Admission::Running)
            }
            Some(_) if self.busy => Err(Status::BadSequence),
            Some(last) if seq == last => match &self.reply {
                Some(reply) => Ok(Admission::Replay(reply.clone())),
                None => {
                    self.begin(seq, connection);
                    Ok(Admission::Run { first: false })
                }
            },
            Some(last) if seq != last.wrapping_add(1) => Err(Status::BadSequence),
            last => {
                self.begin(seq, connection);
                Ok(Admission::Run { first: last.is_none() })
            }
        }
    }

    fn begin(&mut self, seq: u64, connection: u64) {
        self.last = Some(seq);
        self.busy = true;
        self.reply = None;
        self.answer_to = connection;
    }

    /// The request is done; `reply` is kept if it must not run again. Returns the connection to answer on.
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
        assert_eq!(slot.admit(41, 1), Ok(Admission::Run { first: true }), "a fresh slot takes any number");
        assert_eq!(slot.admit(41, 2), Ok(Admission::Running));
        assert_eq!(slot.admit(41, 1), Ok(Admission::Running), "a late copy");
        assert_eq!(slot.admit(42, 2), Err(Status::BadSequence), "one request at a time");
        assert_eq!(slot.admit(40, 2), Err(Status::BadSequence));
        assert_eq!(slot.finish(Some(reply.clone())), 2, "the newest connection gets the answer");
        assert_eq!(slot.admit(41, 3), Ok(Admission::Replay(reply)));
        assert_eq!(slot.admit(40, 3), Err(Status::BadSequence));
        assert_eq!(slot.admit(43, 3), Err(Status::BadSequence));
        assert_eq!(slot.admit(42, 3), Ok(Admission::Run { first: false }));
        slot.finish(None);
        assert_eq!(
            slot.admit(42, 3),
            Ok(Admission::Run { first: false }),
            "what changed nothing may run again"
        );
        slot.finish(None);
        assert_eq!(slot.admit(43, 3), Ok(Admission::Run { first: false }));
    }

    #[test]
    fn something_is_kept_for_the_first_request_only() {
        let (one, other) = (Some(InodeNo(5)), Some(InodeNo(6)));
        let mut slot = Slot::default();
        assert_eq!(slot.keep(one), Ok(None));
        assert_eq!(slot.keep(other), Ok(one), "a client that recovers once more says it anew");
        assert_eq!(slot.admit(41, 1), Ok(Admission::Run { first: true }));
        assert_eq!(slot.keep(one), Err(Status::BadSequence));
        slot.finish(None);
        assert_eq!((slot.let_go(), slot.let_go()), (other, None));
        assert_eq!(slot.keep(one), Err(Status::BadSequence), "it was asked again");
    }
}
