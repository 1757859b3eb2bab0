//! Clients that have asked and may connect, until they are accepted: peers take turns.
//!
//! To accept a client takes a hundred times the time of its asking. So they are accepted one a peer in turn, in the order of their asking within a
//! peer: whoever asks faster than the server accepts waits behind its own asks, and delays another peer's by the one in hand.
//!
//! # Bounds
//! A peer may have [`WAITING_OF_PEER_MAX`] clients here. If there are [`WAITING_MAX`], the newest one of the peer that has most makes room for a peer
//! that has fewer. Clients that find no place are refused, and ask again.

use crate::rdma::PeerKey;
use crate::rdma::soft::arrivals::UNHEARD_OF_PEER_MAX;
use std::collections::{HashMap, VecDeque};

/// Clients of all peers.
const WAITING_MAX: usize = 128;
/// Clients of one peer: as many as may wait before a hello over the other links.
const WAITING_OF_PEER_MAX: usize = UNHEARD_OF_PEER_MAX;

/// Clients that wait to be accepted; see the module.
pub(super) struct Asks<T> {
    of_peer: HashMap<PeerKey, VecDeque<T>>,
    /// Peers with clients here, each once, in the order of their turns.
    turns: VecDeque<PeerKey>,
    count: usize,
}

impl<T> Default for Asks<T> {
    fn default() -> Self {
        Self { of_peer: HashMap::new(), turns: VecDeque::new(), count: 0 }
    }
}

impl<T> Asks<T> {
    fn of_peer(&self, peer: &PeerKey) -> usize {
        self.of_peer.get(peer).map_or(0, VecDeque::len)
    }

    /// Adds a client of a peer. Returns the one that finds no place: this one, or another that makes room for it.
    #[must_use]
    pub(super) fn push(&mut self, peer: PeerKey, ask: T) -> Option<T> {
        let own = self.of_peer(&peer);
        if own >= WAITING_OF_PEER_MAX {
            return Some(ask);
        }
        let mut gone = None;
        if self.count >= WAITING_MAX {
            let most = self.turns.iter().max_by_key(|peer| self.of_peer(peer)).cloned();
            let Some(most) = most.filter(|most| self.of_peer(most) > own + 1) else { return Some(ask) };
            // It keeps at least one, and with it its turn.
            gone = self.of_peer.get_mut(&most).and_then(VecDeque::pop_back);
            self.count -= 1;
        }
        if own == 0 {
            self.turns.push_back(peer.clone());
        }
        self.of_peer.entry(peer).or_default().push_back(ask);
        self.count += 1;
        gone
    }

    /// The client whose turn it is.
    pub(super) fn pop(&mut self) -> Option<T> {
        let peer = self.turns.pop_front()?;
        let asks = self.of_peer.get_mut(&peer).expect("a peer with a turn has clients");
        let ask = asks.pop_front().expect("a peer with a turn has clients");
        self.count -= 1;
        if asks.is_empty() {
            self.of_peer.remove(&peer);
        } else {
            self.turns.push_back(peer);
        }
        Some(ask)
    }

    /// All clients, which leave.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = T> + use<T> {
        std::mem::take(self).of_peer.into_values().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GREEDY: PeerKey = PeerKey::User(1);
    const MODEST: PeerKey = PeerKey::User(2);

    #[test]
    fn peers_take_turns_and_each_has_its_own_order() {
        let mut asks = Asks::default();
        for ask in 0..10 {
            assert_eq!(asks.push(GREEDY, (1, ask)), None);
        }
        for ask in 0..3 {
            assert_eq!(asks.push(MODEST, (2, ask)), None);
        }
        let first: Vec<_> = (0..7).map_while(|_| asks.pop()).collect();
        assert_eq!(first, [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3)]);
        // A newcomer waits for one of the other's.
        assert_eq!(asks.push(MODEST, (2, 3)), None);
        assert_eq!([asks.pop(), asks.pop()], [Some((1, 4)), Some((2, 3))]);
        assert_eq!(std::iter::from_fn(|| asks.pop()).count(), 5);
        assert!(asks.count == 0 && asks.of_peer.is_empty() && asks.turns.is_empty());
    }

    #[test]
    fn a_peer_has_few_and_who_has_most_makes_room() {
        let mut asks = Asks::default();
        for ask in 0..WAITING_OF_PEER_MAX {
            assert_eq!(asks.push(GREEDY, 100 + ask), None);
        }
        assert_eq!(asks.push(GREEDY, 1000), Some(1000), "it has its most");
        assert_eq!(asks.push(MODEST, 0), None);
        // As many peers as it takes to fill the rest, with one each.
        let others = (10..).take(WAITING_MAX - WAITING_OF_PEER_MAX - 1);
        for other in others {
            assert_eq!(asks.push(PeerKey::User(other), 0), None);
        }
        assert_eq!(
            asks.push(PeerKey::User(9), 7),
            Some(100 + WAITING_OF_PEER_MAX - 1),
            "the newest of the greedy one"
        );
        while asks.of_peer(&GREEDY) > 2 {
            assert!(
                asks.push(PeerKey::User(1000 + asks.of_peer(&GREEDY) as u32), 7)
                    .is_some_and(|gone| gone != 7)
            );
        }
        // Now everybody has about as many.
        assert!(asks.push(PeerKey::User(8), 7).is_some_and(|gone| gone != 7));
        assert_eq!(asks.push(PeerKey::User(6), 7), Some(7), "nobody has more than one");
        assert_eq!((asks.count, asks.drain().count(), asks.count), (WAITING_MAX, WAITING_MAX, 0));
    }
}
