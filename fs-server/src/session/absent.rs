//! Clients without a session that may come back: their peers, and which of them are forgotten first.
//!
//! Metadata keeps their last requests (`meta`), so they are bounded by [`MAX_ABSENT`] in all. Beyond that the peer with the most of them loses the
//! one that has been away for longest, so that a peer with thousands of clients pushes out only its own.

use cuttlefs_common::ids::ClientId;
use cuttlefs_common::rdma::PeerKey;
use std::collections::{HashMap, VecDeque};

/// Clients without a session whose last requests are remembered.
pub(crate) const MAX_ABSENT: usize = 1024;

/// The clients, the one that has been away for longest in front.
#[derive(Debug, Default)]
pub(super) struct Absent(VecDeque<(ClientId, PeerKey)>);

impl Absent {
    /// The peer of a client, if the client is away.
    pub(super) fn owner(&self, client: ClientId) -> Option<&PeerKey> {
        self.0.iter().find(|(known, _)| *known == client).map(|(_, owner)| owner)
    }

    /// Notes that a client is back.
    pub(super) fn remove(&mut self, client: ClientId) {
        self.0.retain(|(known, _)| *known != client);
    }

    /// Notes that clients are away. Returns those that must be forgotten instead.
    pub(super) fn extend(&mut self, clients: impl IntoIterator<Item = (ClientId, PeerKey)>) -> Vec<ClientId> {
        self.0.extend(clients);
        let many = self.0.len().saturating_sub(MAX_ABSENT);
        (0..many).filter_map(|_| self.take_one()).collect()
    }

    fn take_one(&mut self) -> Option<ClientId> {
        let mut counts: HashMap<&PeerKey, usize> = HashMap::new();
        self.0.iter().for_each(|(_, owner)| *counts.entry(owner).or_default() += 1);
        let most = counts.values().copied().max()?;
        let first = self.0.iter().position(|(_, owner)| counts[owner] == most)?;
        self.0.remove(first).map(|(client, _)| client)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(user: u32, clients: std::ops::Range<u128>) -> impl Iterator<Item = (ClientId, PeerKey)> {
        clients.map(move |client| (ClientId(client), PeerKey::User(user)))
    }

    #[test]
    fn who_is_away_the_longest_is_forgotten_first() {
        let mut absent = Absent::default();
        assert_eq!(absent.extend(of(7, 0..MAX_ABSENT as u128)), []);
        absent.remove(ClientId(0));
        assert_eq!(absent.extend(of(7, 5000..5001)), []);
        assert_eq!(absent.extend(of(7, 5001..5002)), [ClientId(1)]);
        assert_eq!(absent.extend(of(7, 5002..5004)), [ClientId(2), ClientId(3)]);
        assert_eq!(absent.extend([]), []);
    }

    #[test]
    fn who_makes_many_pushes_out_his_own() {
        let mut absent = Absent::default();
        assert_eq!(absent.extend(of(1, 0..5)), []);
        let forgotten = absent.extend(of(2, 1000..1000 + 3 * MAX_ABSENT as u128));
        assert!(forgotten.iter().all(|client| client.0 >= 1000));
        assert_eq!(forgotten.len(), 2 * MAX_ABSENT + 5);
        assert_eq!(absent.owner(ClientId(4)), Some(&PeerKey::User(1)));
        assert_eq!(absent.extend(of(3, 9000..9002)).len(), 2);
        assert_eq!(absent.owner(ClientId(9001)), Some(&PeerKey::User(3)), "a newcomer has room");
    }
}
