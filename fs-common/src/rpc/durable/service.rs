//! The execution of a receiver's requests.

use crate::breach::Breach;
use crate::ids::{ClientId, LogSeq};
use crate::rdma::PeerIdentity;
use crate::redo::LogId;

/// A request, as it is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The client whose ring has it.
    pub client: ClientId,
    /// The life of the ring.
    pub log: LogId,
    /// Its number in that life.
    pub lsn: LogSeq,
    /// The sender's own number of the request, the same however often it is sent. It comes from the peer: any value is possible.
    pub seq: u64,
    /// The request itself.
    pub body: &'a [u8],
}

/// The execution of requests.
pub trait Service: Send + Sync {
    /// Requests of one lane are executed in the order they were posted; those of different lanes may overlap.
    fn lane(&self, body: &[u8]) -> u64;

    /// Executes a request, and returns the service's own status. A request may be executed a second time after a crash. It must be durable when this
    /// returns, because the head then moves past it. `answer` is empty and takes the answer; nobody waits for answers to requests that are found
    /// while a ring is opened.
    fn execute(&self, request: &Request<'_>, answer: &mut Vec<u8>) -> u32;

    /// Whether a sender may use the ring that it names, over a connection with this peer.
    ///
    /// # Errors
    /// The reason for a refusal, for the log.
    fn admit(&self, _client: ClientId, _peer: &PeerIdentity) -> Result<(), Breach> {
        Ok(())
    }
}
