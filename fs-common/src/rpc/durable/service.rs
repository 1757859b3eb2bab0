//! What a receiver's requests do.

use super::connection::Work;
use crate::ids::{ClientId, LogSeq};
use crate::rdma::PeerIdentity;
use crate::redo::LogId;
use crate::rpc::SessionSecret;
use std::future::{Future, ready};
use std::pin::Pin;

/// A request, as whoever does it sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Whose ring it stands in.
    pub client: ClientId,
    /// In which life of the ring.
    pub log: LogId,
    /// Its number there.
    pub lsn: LogSeq,
    /// The sender's own number of it, the same however often it is sent. From the peer: any value may come.
    pub seq: u64,
    /// What is to be done.
    pub body: &'a [u8],
}

/// Who asks for a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenderIdentity {
    /// Names the ring.
    pub client: ClientId,
    /// What proves that it is this sender's, to services that ask for that.
    pub secret: SessionSecret,
}

impl From<ClientId> for SenderIdentity {
    /// Of who need not prove anything.
    fn from(client: ClientId) -> Self {
        Self { client, secret: SessionSecret::NONE }
    }
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Executed {
    /// It is done, with this status of the service's own.
    Done(u32),
    /// It could not be done and must not be lost: it is answered with this status, and the head stays before it. The next
    /// start executes it once more. Its ring's further requests are shown to the service all the same.
    Kept(u32),
}

/// What a service does while others go on: a receiver's thread blocks on it.
pub type ServiceFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// What requests do.
pub trait Service: Send + Sync {
    /// Requests of one lane are executed in the order they were posted; those of different lanes may overlap.
    fn lane(&self, body: &[u8]) -> u64;

    /// Does a request. It may be executed a second time after a crash. `answer` is empty and takes what is answered.
    /// Where nothing settles (below), it is durable once this returned: the head moves past it.
    fn execute(&self, request: &Request<'_>, answer: &mut Vec<u8>) -> Executed;

    /// As `execute`, of a request found in a ring that is being opened or let go: those are done one after the other, and
    /// nobody waits for an answer.
    fn execute_found<'a>(&'a self, request: Request<'a>) -> ServiceFuture<'a, Executed> {
        Box::pin(ready(self.execute(&request, &mut Vec::new())))
    }

    /// Whether a sender may have the ring it names, over a connection with this peer. Says why not.
    ///
    /// # Errors
    /// The reason, for the log.
    fn admit(&self, _sender: &SenderIdentity, _peer: &PeerIdentity) -> Result<(), String> {
        Ok(())
    }

    /// Whether a body is a request of this client's at all. What is none ends its connection.
    ///
    /// # Errors
    /// What is wrong with it, for the log.
    fn check(&self, _client: ClientId, _body: &[u8]) -> Result<(), String> {
        Ok(())
    }

    /// Takes a request over, to execute it elsewhere and then call [`Work::finish`]. Given back, the receiver has it
    /// executed.
    fn take_over(&self, work: Work) -> Option<Work> {
        Some(work)
    }

    /// The sender's own number of the last of its requests that was executed, where the service knows; else 0. A sender
    /// that comes back is told.
    fn last_done(&self, _client: ClientId) -> u64 {
        0
    }

    /// Whether a client is to post nothing more for now, however little it is behind.
    fn holds_back(&self, _client: ClientId) -> bool {
        false
    }

    /// Makes durable whatever was executed before this is called. Called once for the heads of many rings, where
    /// `ReceiverOptions::settles` says so.
    ///
    /// # Errors
    /// Why not, for the log: no head moves any more.
    fn settle(&self) -> ServiceFuture<'_, Result<(), String>> {
        Box::pin(ready(Ok(())))
    }
}
