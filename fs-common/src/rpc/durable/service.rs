//! What a receiver's requests do.

use crate::breach::Breach;
use crate::ids::{ClientId, LogSeq};
use crate::rdma::PeerIdentity;
use crate::redo::LogId;

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

/// What requests do.
pub trait Service: Send + Sync {
    /// Requests of one lane are executed in the order they were posted; those of different lanes may overlap.
    fn lane(&self, body: &[u8]) -> u64;

    /// Does a request; returns the service's own status. It may be executed a second time after a crash, and is durable
    /// once this returned: the head moves past it. `answer` is empty and takes what is answered; requests found in a ring
    /// that is being opened have nobody who waits for it.
    fn execute(&self, request: &Request<'_>, answer: &mut Vec<u8>) -> u32;

    /// Whether a sender may have the ring it names, over a connection with this peer. Says why not.
    ///
    /// # Errors
    /// The reason, for the log.
    fn admit(&self, _client: ClientId, _peer: &PeerIdentity) -> Result<(), Breach> {
        Ok(())
    }
}
