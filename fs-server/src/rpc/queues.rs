//! The queues of a worker at one RNIC, and who may use their places.
//!
//! An RNIC's completion queue holds only so many completions (rdma_rxe's 32,767), and each connection is promised its own. So a peer gets no more of
//! a worker's queue than it leaves to others, as of all connections (`shares`): a peer that is alone half of the places, each further one at most half
//! of the rest.

use super::shared_receives::PeersReceives;
use crate::rnics::Rnic;
use cuttlefs_common::rdma::{CompletionPlaces, CompletionQueue, PeerKey, RdmaError};
use std::sync::Arc;

/// Completions that a worker's queue of an RNIC holds: every connection may have a few of each kind outstanding.
const CQ_DEPTH: u32 = 64 * 1024;

/// Depth of a connection's send queue: replies, and the transfers of its running requests. A fetch whose wanted pages are all apart is 128 transfers,
/// but they are posted one after the other.
pub(crate) const SEND_DEPTH: u32 = 32;

/// A worker's queues at one RNIC.
#[derive(Clone)]
pub(crate) struct RnicQueues {
    /// Completions of all queue pairs of the RNIC that the worker serves.
    pub(crate) cq: Arc<dyn CompletionQueue>,
    /// The receives of those queue pairs, if the RNIC has shared receives.
    pub(crate) receives: Option<Arc<PeersReceives>>,
}

impl RnicQueues {
    /// Makes a worker's queues.
    ///
    /// # Errors
    /// The device cannot.
    pub(crate) fn new(rnic: &Rnic) -> Result<Self, RdmaError> {
        let has_shared = rnic.device.capabilities().shared_receives;
        Ok(Self {
            cq: rnic.device.create_cq(CQ_DEPTH)?,
            receives: has_shared.then(|| Arc::new(PeersReceives::new())),
        })
    }

    /// Why a peer gets no further connection here; `None`: it does.
    pub(crate) fn lacks_room(&self, peer: &PeerKey) -> Option<&'static str> {
        let (receives, places) = (self.receives.as_ref()?, self.cq.places()?);
        let is_full = !leaves_room(receives.connections(peer), places);
        is_full.then_some(
            "this peer has its share of a completion queue of the server's RNIC; close connections, or serve with more --workers",
        )
    }
}

/// Whether a peer with so many connections leaves as much to others as it has itself, with one more.
fn leaves_room(connections: usize, CompletionPlaces { promised, most }: CompletionPlaces) -> bool {
    // One for the check of the peer.
    let each = u64::from(SEND_DEPTH) + 1;
    let own = connections as u64 * each;
    let of_others = u64::from(promised).saturating_sub(own);
    2 * (own + each) <= u64::from(most).saturating_sub(of_others)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds connections of each of these peers in turn until one gets no more, for each of them.
    fn taken(most: u32, peers: usize) -> Vec<usize> {
        let mut taken: Vec<usize> = Vec::new();
        for _ in 0..peers {
            let others: usize = taken.iter().sum();
            let places =
                |own: usize| CompletionPlaces { promised: (others + own) as u32 * (SEND_DEPTH + 1), most };
            taken.push((0..).find(|own| !leaves_room(*own, places(*own))).expect("there is a bound"));
        }
        taken
    }

    #[test]
    fn who_takes_all_it_can_leaves_room_for_who_comes_later() {
        // As rdma_rxe has them.
        assert_eq!(taken(32_767, 5), [496, 248, 124, 62, 31]);
        // As others have them: the share of connections is the bound.
        assert!(taken(4_194_303, 1)[0] > 4096);
    }
}
