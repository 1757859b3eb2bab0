//! The time at which the server listens to a new connection, and so the number and rate of one peer's connections.
//!
//! A handshake takes a hundred times the processor time of a request. A peer may make `BURST` connections at once, as its mounts do when their server
//! comes back, and `PER_SECOND` from then on. A connection that comes sooner waits for its time without being read from, at no cost. At most
//! `UNHEARD_OF_PEER_MAX` connections of one peer wait. Before a key is proven the peer is the address. Connections of root and of the server's own
//! user are not counted.
//!
//! The bookkeeping is that of GCRA: for each peer, the time by which all its connections would be paid for at `PER_SECOND`. A peer owes no more than for
//! those that may wait: others are turned away, and what they cost is not paid for by waiting later.

use crate::rdma::PeerKey;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Connections a peer may make at once: those of a dozen mounts.
pub(super) const BURST: u32 = 256;
/// Connections that a peer may make each second from then on: at some 0.2 ms each, a fortieth of a core.
pub(super) const PER_SECOND: u32 = 128;
/// Connections of one peer that have not said hello yet, or whose time has not come.
pub(in crate::rdma) const UNHEARD_OF_PEER_MAX: usize = 32;
/// Peers that are remembered before those whose time is over are forgotten.
const PEERS_MAX: usize = 256;

const INTERVAL: Duration = Duration::from_nanos(1_000_000_000 / PER_SECOND as u64);

/// The rate of connections of each peer. See the module.
#[derive(Debug)]
pub(super) struct Arrivals {
    paid_by: HashMap<PeerKey, Instant>,
    /// Peers that may be remembered before all are looked through again.
    peers_max: usize,
}

impl Arrivals {
    pub(super) fn new() -> Self {
        Self { paid_by: HashMap::new(), peers_max: PEERS_MAX }
    }

    /// A peer has connected: the time from which on it may be listened to.
    pub(super) fn due(&mut self, peer: &PeerKey, now: Instant) -> Instant {
        if self.paid_by.len() >= self.peers_max {
            self.paid_by.retain(|_, paid_by| *paid_by > now);
            self.peers_max = (2 * self.paid_by.len()).max(PEERS_MAX);
        }
        let paid_by = self.paid_by.entry(peer.clone()).or_insert(now);
        *paid_by =
            ((*paid_by).max(now) + INTERVAL).min(now + INTERVAL * (BURST + UNHEARD_OF_PEER_MAX as u32));
        now + (*paid_by - now).saturating_sub(INTERVAL * BURST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_heard_at_once_and_the_rest_in_its_time() {
        let (mut arrivals, now) = (Arrivals::new(), Instant::now());
        let (greedy, modest) = (PeerKey::User(7), PeerKey::User(8));
        for _ in 0..BURST {
            assert_eq!(arrivals.due(&greedy, now), now);
        }
        for number in 1..=10 {
            assert_eq!(arrivals.due(&greedy, now), now + INTERVAL * number);
        }
        assert_eq!(arrivals.due(&modest, now), now, "another peer's are its own");
        let later = now + INTERVAL * 20;
        for _ in 0..10 {
            assert_eq!(arrivals.due(&greedy, later), later, "what time has paid for");
        }
        assert!(arrivals.due(&greedy, later) > later);
    }

    #[test]
    fn after_a_flood_a_peer_waits_no_longer_than_behind_those_that_may_wait() {
        let (mut arrivals, now) = (Arrivals::new(), Instant::now());
        let greedy = PeerKey::User(7);
        let waits = INTERVAL * UNHEARD_OF_PEER_MAX as u32;
        for _ in 0..100_000 {
            assert!(arrivals.due(&greedy, now) <= now + waits);
        }
        assert_eq!(arrivals.due(&greedy, now), now + waits);
        let later = now + waits + INTERVAL;
        assert_eq!(arrivals.due(&greedy, later), later);
    }

    #[test]
    fn peers_are_forgotten_when_their_time_is_over() {
        let (mut arrivals, mut now) = (Arrivals::new(), Instant::now());
        for uid in 0..100_000 {
            arrivals.due(&PeerKey::User(uid), now);
            now += INTERVAL / 2;
        }
        assert!(arrivals.paid_by.len() <= 2 * PEERS_MAX, "{}", arrivals.paid_by.len());
    }
}
