//! Clients that have connected and not said hello: the place where they wait, and the choice of the client to drop when there are too many.
//!
//! There are two crowds, so that a client that has proven something never gives way to one that has not:
//!
//! | crowd | its clients | client to drop when it is full |
//! |---|---|---|
//! | strangers | over `tcp` with keys, before their first words prove one | the oldest of the address that has most |
//! | known | all others: a user, a key, and over `--insecure` an address | the oldest of the peer that has most |
//!
//! A stranger proves its key with its first words, which come as soon as it is connected; a silent client may be dropped as soon as others come. The
//! rest of a handshake takes two round trips, in which a client without a key cannot take its place. At most `UNHEARD_OF_PEER_MAX` clients of one
//! known peer wait, and they are listened to at its rate (`arrivals`).

use super::arrivals::{Arrivals, UNHEARD_OF_PEER_MAX};
use super::listen::Greeting;
use crate::rdma::PeerKey;
use crate::rdma::peer::PeerIdentity;
use crate::rdma::verbs::HELLO_WAIT;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Most clients of a crowd.
pub(super) const UNHEARD_MAX: usize = 512;

/// A client that has not said hello.
pub(super) struct Client {
    pub(super) peer: PeerIdentity,
    pub(super) key: PeerKey,
    pub(super) greeting: Greeting,
    /// The time from which on it is listened to, and the time at which it is dropped.
    pub(super) due: Instant,
    deadline: Instant,
}

impl Client {
    /// A client that is listened to from `due` on.
    pub(super) fn new(peer: PeerIdentity, key: PeerKey, greeting: Greeting, due: Instant) -> Self {
        Self { peer, key, greeting, due, deadline: due + HELLO_WAIT }
    }
}

/// The number of clients in each crowd, at all listeners of a device. Relaxed: for status.
#[derive(Default)]
pub(super) struct Waiting {
    pub(super) strangers: Arc<AtomicUsize>,
    pub(super) known: Arc<AtomicUsize>,
}

/// Clients in the order in which they came.
#[derive(Default)]
pub(super) struct Crowd {
    clients: VecDeque<Client>,
    of_peer: HashMap<PeerKey, usize>,
    /// The number of `clients`, summed with those of other listeners. Changed together with `of_peer`.
    waiting: Arc<AtomicUsize>,
}

impl Crowd {
    fn counted(waiting: &Arc<AtomicUsize>) -> Self {
        Self { clients: VecDeque::new(), of_peer: HashMap::new(), waiting: waiting.clone() }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Client> {
        self.clients.iter()
    }

    fn of_peer(&self, key: &PeerKey) -> usize {
        self.of_peer.get(key).copied().unwrap_or(0)
    }

    /// Adds a client. In a full crowd the oldest client of the peer that has most makes room for it, and is returned.
    #[must_use]
    pub(super) fn add(&mut self, client: Client) -> Option<Client> {
        let gone = if self.clients.len() < UNHEARD_MAX {
            None
        } else {
            let most = self.of_peer.values().max().copied().unwrap_or(0);
            let oldest = self.clients.iter().position(|client| self.of_peer(&client.key) == most);
            oldest.and_then(|index| self.remove(index))
        };
        *self.of_peer.entry(client.key.clone()).or_default() += 1;
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.clients.push_back(client);
        gone
    }

    fn remove(&mut self, index: usize) -> Option<Client> {
        let client = self.clients.remove(index)?;
        self.forget(&client.key);
        Some(client)
    }

    fn forget(&mut self, key: &PeerKey) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        let count = self.of_peer.get_mut(key).expect("whoever is there is counted");
        *count -= 1;
        if *count == 0 {
            self.of_peer.remove(key);
        }
    }

    /// Passes the clients for which something `is_due` to `act`, in order. `act` returns a client that stays, or `None`.
    pub(super) fn visit(
        &mut self,
        mut is_due: impl FnMut(usize, &Client) -> bool,
        mut act: impl FnMut(Client) -> Option<Client>,
    ) {
        for (index, client) in std::mem::take(&mut self.clients).into_iter().enumerate() {
            if !is_due(index, &client) {
                self.clients.push_back(client);
                continue;
            }
            let key = client.key.clone();
            match act(client) {
                Some(client) => self.clients.push_back(client),
                None => self.forget(&key),
            }
        }
    }

    /// Drops the clients whose time is over.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.clients.iter().any(|client| client.deadline <= now) {
            self.visit(|_, client| client.deadline <= now, |_| None);
        }
    }

    /// The next time at which a client's turn or end is due.
    fn next_due(&self, now: Instant) -> Option<Instant> {
        self.clients.iter().map(|client| if client.due > now { client.due } else { client.deadline }).min()
    }

    /// Whether one more client of a peer may wait. If need be, the oldest that was listened to and said nothing is dropped. Those whose turn has not
    /// come stay, or a peer that connects again and again would keep even its own clients from being heard.
    fn has_room_for(&mut self, key: &PeerKey, now: Instant) -> bool {
        if self.of_peer(key) < UNHEARD_OF_PEER_MAX {
            return true;
        }
        let mute = self.clients.iter().position(|client| client.key == *key && client.due <= now);
        mute.and_then(|index| self.remove(index)).is_some()
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.waiting.fetch_sub(self.of_peer.values().sum(), Ordering::Relaxed);
    }
}

/// All clients of a listener that have not said hello.
pub(super) struct Unheard {
    pub(super) strangers: Crowd,
    pub(super) known: Crowd,
    arrivals: Arrivals,
}

impl Unheard {
    pub(super) fn new(waiting: &Waiting) -> Self {
        Self {
            strangers: Crowd::counted(&waiting.strangers),
            known: Crowd::counted(&waiting.known),
            arrivals: Arrivals::new(),
        }
    }

    /// The time from which on one more client of a known peer is listened to; `None`: too many of that peer wait already.
    pub(super) fn due(&mut self, key: &PeerKey, is_administrator: bool, now: Instant) -> Option<Instant> {
        if is_administrator {
            return Some(now);
        }
        self.known.has_room_for(key, now).then(|| self.arrivals.due(key, now))
    }

    /// The next time at which something is due for any client.
    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        [&self.strangers, &self.known].into_iter().filter_map(|crowd| crowd.next_due(now)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, SocketAddr};
    use std::time::Duration;

    fn client(from: [u8; 4], now: Instant) -> Client {
        let (peer, socket) = std::os::unix::net::UnixStream::pair().expect("sockets");
        drop(peer);
        let peer = PeerIdentity::Remote(SocketAddr::new(IpAddr::from(from), 1));
        let key = PeerKey::from(&peer);
        Client::new(peer, key, Greeting::Shm(socket.into()), now)
    }

    #[test]
    fn the_oldest_of_who_has_most_goes() {
        let (mut crowd, now) = (Crowd::default(), Instant::now());
        for number in 0..UNHEARD_MAX {
            let from = if number % 2 == 0 {
                [10, 0, 0, 1]
            } else {
                [10, 1, (number / 250) as u8, (number % 250) as u8]
            };
            assert!(crowd.add(client(from, now)).is_none());
        }
        // Until that peer has no more clients than others: then the oldest of all is dropped.
        for number in 0..UNHEARD_MAX / 2 - 1 {
            let gone = crowd.add(client([10, 2, (number / 250) as u8, (number % 250) as u8], now));
            assert_eq!(gone.expect("it is full").key, client([10, 0, 0, 1], now).key, "{number}");
        }
        let gone = crowd.add(client([10, 3, 0, 1], now)).expect("it is full");
        assert_eq!(gone.key, client([10, 1, 0, 1], now).key);
        assert_eq!((crowd.clients.len(), crowd.of_peer.values().sum::<usize>()), (UNHEARD_MAX, UNHEARD_MAX));
    }

    #[test]
    fn who_is_gone_is_not_counted() {
        let waiting = Waiting::default();
        let (mut crowd, now) = (Crowd::counted(&waiting.known), Instant::now());
        let mut other = Crowd::counted(&waiting.known);
        assert!(other.add(client([10, 0, 0, 1], now)).is_none());
        let shown = || waiting.known.load(Ordering::Relaxed);
        for last in 1..=10 {
            assert!(crowd.add(client([10, 0, 0, last], now)).is_none());
            assert!(crowd.add(client([10, 0, 0, last], now + Duration::from_secs(1))).is_none());
        }
        crowd.visit(|index, _| index % 4 == 0, |_| None);
        crowd.visit(|_, _| true, Some);
        assert_eq!((crowd.clients.len(), crowd.of_peer.values().sum::<usize>()), (15, 15));
        assert_eq!(shown(), 15 + 1);
        drop(std::mem::take(&mut other));
        assert_eq!(shown(), 15);
        crowd.expire(now + HELLO_WAIT);
        assert_eq!((crowd.clients.len(), crowd.of_peer.len()), (10, 10));
        crowd.expire(now + HELLO_WAIT + Duration::from_secs(1));
        assert_eq!((crowd.clients.len(), crowd.of_peer.len(), shown()), (0, 0, 0));
    }
}
