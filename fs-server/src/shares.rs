//! Shares: the part of each bounded resource that one peer may have.
//!
//! A *peer* is the other end of a link, as the link knows it (`PeerKey`): a user of this machine, a machine, a key. Each resource that
//! the server holds for peers has a bound for all peers, a share for each, and a reserve.
//!
//! | resource    | for all   | share of a peer | reserve |
//! |-------------|-----------|-----------------|---------|
//! | connections | 4,096     | 1,024           | 128     |
//! | sessions    | 1,024     | 256             | 16      |
//! | filekeys    | 2,097,152 | 524,288         | 65,536  |
//! | locks       | 262,144   | 65,536          | 4,096   |
//!
//! Nor may a peer have more than it leaves to others: a peer that is alone may take its share, and each further one at most half of the
//! rest. So it takes many identities, not four, to keep newcomers out.
//!
//! File slots, without which a file is read by RPC, are not counted: a peer with a quarter as many files open as there are slots gets no
//! more.
//!
//! Root and the server's own user are *administrators*: they have no share but the whole, and only they have access to the reserve, so
//! that an administrator can always mount and look at `status`.
//!
//! # How it works
//! A peer is interned: all its connections and sessions hold one `Arc<Peer>`, which counts. `Peer::take` gives a `Taken`, and
//! dropping that is the only way a place comes back: none is given back twice, and none is forgotten.
//!
//! A peer is a payer, too: the time that its work takes on workers is on its account (`cuttlefs_common::fair`). And it has workers that
//! serve it (`placement`).
//!
//! # Ordering
//! Counters are moved by compare-and-swap and guard no other memory: relaxed.

use crate::placement::{Home, Placement};
use cuttlefs_common::fair::Payer;
use cuttlefs_common::rdma::{PeerIdentity, PeerKey};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// Locks of all clients.
pub(crate) const LOCKS_MAX: usize = 262_144;

/// A resource of which each peer has a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Connections, each with registered memory and descriptors.
    Connections,
    /// Sessions, each with its slots.
    Sessions,
    /// Open files.
    Filekeys,
    /// Advisory locks.
    Locks,
    /// Ranges of files that are bound for others.
    Regions,
}

/// Kinds of resources.
const RESOURCES: usize = 5;

/// The bounds of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bound {
    /// The bound of all peers together.
    pub all: usize,
    /// The bound of one peer.
    pub share: usize,
    /// The part of `all` that only administrators may use.
    pub reserve: usize,
}

impl Resource {
    /// Every resource, in the order of their counters.
    pub const ALL: [Resource; RESOURCES] =
        [Resource::Connections, Resource::Sessions, Resource::Filekeys, Resource::Locks, Resource::Regions];

    /// The resource's name in `status`.
    pub const fn name(self) -> &'static str {
        match self {
            Resource::Connections => "connections",
            Resource::Sessions => "sessions",
            Resource::Filekeys => "filekeys",
            Resource::Locks => "locks",
            Resource::Regions => "bound_regions",
        }
    }

    /// The resource's bounds. A share is a quarter of the whole, so that one hostile peer leaves three shares to others.
    pub const fn bound(self) -> Bound {
        match self {
            // A mount has some twenty connections, with all lanes in use 64. The reserve is two such mounts.
            Resource::Connections => Bound { all: 4096, share: 1024, reserve: 128 },
            Resource::Sessions => Bound { all: 1024, share: 256, reserve: 16 },
            // A filekey takes some 150 bytes. By default Linux gives a process at most 1,048,576 open files.
            Resource::Filekeys => Bound { all: 1 << 21, share: 1 << 19, reserve: 1 << 16 },
            Resource::Locks => Bound { all: LOCKS_MAX, share: 65_536, reserve: 4096 },
            // A binding takes some 500 bytes.
            Resource::Regions => Bound { all: 65_536, share: 16_384, reserve: 4096 },
        }
    }
}

/// Why a peer gets no more of a resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Full {
    /// The peer has its whole share.
    #[error("this peer has its share of {share} {}; close some, then try again", .of.name())]
    Share {
        /// The resource.
        of: Resource,
        /// The peer's share.
        share: usize,
    },
    /// All peers together have as much as there is, but for a rest that is reserved for others.
    #[error("the server has as many {} as it may have; try again later", .of.name())]
    All {
        /// The resource.
        of: Resource,
    },
}

/// Counts of all peers.
pub struct Shares {
    used: Arc<[AtomicUsize; RESOURCES]>,
    /// The known peers. Dead entries are removed when there are as many of them as live ones.
    peers: Mutex<HashMap<PeerKey, Weak<Peer>>>,
    /// Peers so far; each gets the next number.
    numbers: AtomicU64,
    placement: Placement,
}

impl Shares {
    /// No peers yet; the server has so many workers.
    pub fn new(workers: usize) -> Self {
        Self {
            used: Arc::default(),
            peers: Mutex::default(),
            numbers: AtomicU64::default(),
            placement: Placement::new(workers),
        }
    }

    /// The peer with this identity: the same one for as long as anything is held in its name.
    pub fn peer(&self, identity: &PeerIdentity) -> Arc<Peer> {
        self.of_key(PeerKey::from(identity))
    }

    /// The server's own peer, for work that it does in nobody else's name.
    pub fn own(&self) -> Arc<Peer> {
        self.of_key(PeerKey::User(rustix::process::geteuid().as_raw()))
    }

    fn of_key(&self, key: PeerKey) -> Arc<Peer> {
        let mut peers = self.peers.lock();
        if let Some(peer) = peers.get(&key).and_then(Weak::upgrade) {
            return peer;
        }
        // At least as many entries are dead as are live, so that this costs little on average.
        if peers.len() >= 2 * peers.values().filter(|peer| peer.strong_count() > 0).count() {
            peers.retain(|_, peer| peer.strong_count() > 0);
        }
        let is_administrator = key.is_administrator(rustix::process::geteuid().as_raw());
        let peer = Arc::new(Peer {
            key: key.clone(),
            is_administrator,
            payer: Payer(self.numbers.fetch_add(1, Ordering::Relaxed) + Payer::OWN.0 + 1),
            home: self.placement.settle(),
            used: Default::default(),
            all: self.used.clone(),
        });
        peers.insert(key, Arc::downgrade(&peer));
        peer
    }

    /// How much of a resource all peers have.
    pub fn used(&self, resource: Resource) -> usize {
        self.used[resource as usize].load(Ordering::Relaxed)
    }

    /// How much of a resource the peer has that has the most.
    pub fn largest(&self, resource: Resource) -> usize {
        let peers = self.peers.lock();
        let live = peers.values().filter_map(Weak::upgrade);
        live.map(|peer| peer.used(resource)).max().unwrap_or(0)
    }

    /// How many peers hold anything.
    pub fn peers(&self) -> usize {
        self.peers.lock().values().filter(|peer| peer.strong_count() > 0).count()
    }
}

/// The peer at the other end of connections.
pub struct Peer {
    key: PeerKey,
    is_administrator: bool,
    payer: Payer,
    home: Home,
    used: [AtomicUsize; RESOURCES],
    all: Arc<[AtomicUsize; RESOURCES]>,
}

impl std::fmt::Debug for Peer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.key.fmt(f)
    }
}

impl Peer {
    /// The peer's key.
    pub fn key(&self) -> &PeerKey {
        &self.key
    }

    /// Whether the peer is root or the server's own user.
    pub fn is_administrator(&self) -> bool {
        self.is_administrator
    }

    /// The account for the work on its requests.
    pub fn payer(&self) -> Payer {
        self.payer
    }

    /// The workers that serve it.
    pub fn home(&self) -> &Home {
        &self.home
    }

    /// How much of a resource it has.
    pub fn used(&self, resource: Resource) -> usize {
        self.used[resource as usize].load(Ordering::Relaxed)
    }

    /// Takes one more of a resource.
    ///
    /// # Errors
    /// [`Full`], which says whose bound is reached.
    pub fn take(self: &Arc<Self>, resource: Resource) -> Result<Taken, Full> {
        let (all, share) = self.bounds(resource);
        let used = &self.used[resource as usize];
        if !add_below(used, share) {
            let own = resource.bound().share;
            let has_own = used.load(Ordering::Relaxed) >= own;
            return Err(if has_own {
                Full::Share { of: resource, share: own }
            } else {
                Full::All { of: resource }
            });
        }
        if !add_below(&self.all[resource as usize], all) {
            used.fetch_sub(1, Ordering::Relaxed);
            return Err(Full::All { of: resource });
        }
        Ok(Taken { peer: self.clone(), resource })
    }

    /// How many more of a resource it may have.
    pub fn room(&self, resource: Resource) -> usize {
        let (all, share) = self.bounds(resource);
        let left = all.saturating_sub(self.all[resource as usize].load(Ordering::Relaxed));
        share.saturating_sub(self.used(resource)).min(left)
    }

    /// The bound of all peers together as it applies to this peer, and the bound of this peer as of now.
    fn bounds(&self, resource: Resource) -> (usize, usize) {
        let Bound { all, share, reserve } = resource.bound();
        if self.is_administrator {
            return (all, all);
        }
        let all = all - reserve;
        let of_others =
            self.all[resource as usize].load(Ordering::Relaxed).saturating_sub(self.used(resource));
        // Half of the part that other peers do not have.
        (all, share.min(all.saturating_sub(of_others).div_ceil(2)))
    }

    /// Whether it has at most so much of a resource, or is an administrator.
    pub fn has_at_most(&self, resource: Resource, most: usize) -> bool {
        self.is_administrator || self.used(resource) <= most
    }

    /// A count of a resource, 0 at first, that belongs to this peer's share.
    pub fn tally(self: &Arc<Self>, resource: Resource) -> Tally {
        Tally { peer: self.clone(), resource, count: 0 }
    }

    fn move_by(&self, resource: Resource, before: usize, after: usize) {
        for used in [&self.used[resource as usize], &self.all[resource as usize]] {
            if after > before {
                used.fetch_add(after - before, Ordering::Relaxed);
            } else {
                used.fetch_sub(before - after, Ordering::Relaxed);
            }
        }
    }
}

fn add_below(count: &AtomicUsize, bound: usize) -> bool {
    let below = |used| (used < bound).then_some(used + 1);
    count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, below).is_ok()
}

/// One place of a peer's share, which is given back when this is dropped.
#[derive(Debug)]
pub struct Taken {
    peer: Arc<Peer>,
    resource: Resource,
}

impl Taken {
    /// The peer that has the place.
    pub fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.peer.move_by(self.resource, 1, 0);
    }
}

/// A changing count of a resource that belongs to a peer's share. Before it grows, its owner asks `Peer::room`, under the lock of the counted things.
#[derive(Debug)]
pub struct Tally {
    peer: Arc<Peer>,
    resource: Resource,
    count: usize,
}

impl Tally {
    /// The peer whose share it belongs to.
    pub fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// Sets the count.
    pub fn set(&mut self, count: usize) {
        self.peer.move_by(self.resource, self.count, count);
        self.count = count;
    }
}

impl Drop for Tally {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user(shares: &Shares, uid: u32) -> Arc<Peer> {
        shares.of_key(PeerKey::User(uid))
    }

    /// A user that is not an administrator. (The user who runs the tests is one.)
    const STRANGER: u32 = 4_000_000_001;
    const ANOTHER: u32 = 4_000_000_002;

    #[test]
    fn a_peer_has_its_share_and_others_have_theirs() {
        let shares = Shares::new(1);
        let greedy = user(&shares, STRANGER);
        let share = Resource::Sessions.bound().share;
        let mut taken: Vec<_> =
            (0..share).map(|_| greedy.take(Resource::Sessions).expect("its share")).collect();
        let full = greedy.take(Resource::Sessions).expect_err("no more");
        assert_eq!(full, Full::Share { of: Resource::Sessions, share });
        assert!(user(&shares, ANOTHER).take(Resource::Sessions).is_ok());
        assert!(greedy.take(Resource::Locks).is_ok(), "another resource");
        taken.pop();
        let again = greedy.take(Resource::Sessions);
        assert!(again.is_ok(), "what came back is free");
        drop((again, taken));
        assert_eq!((shares.used(Resource::Sessions), greedy.used(Resource::Sessions)), (0, 0));
    }

    #[test]
    fn the_reserve_is_for_administrators() {
        let shares = Shares::new(1);
        let Bound { all, share, reserve } = Resource::Sessions.bound();
        let mut taken = Vec::new();
        for uid in 0..40 {
            let peer = user(&shares, STRANGER + uid);
            taken.extend((0..share).map_while(|_| peer.take(Resource::Sessions).ok()));
        }
        assert_eq!(taken.len(), all - reserve);
        let refused = user(&shares, STRANGER + 100).take(Resource::Sessions).expect_err("all is taken");
        assert_eq!(refused, Full::All { of: Resource::Sessions });
        let root = user(&shares, 0);
        let of_root: Vec<_> =
            (0..reserve).map(|_| root.take(Resource::Sessions).expect("the reserve")).collect();
        assert!(root.take(Resource::Sessions).is_err());
        drop((taken, of_root));
        assert_eq!(shares.used(Resource::Sessions), 0);
    }

    #[test]
    fn peers_that_hold_nothing_are_forgotten() {
        let shares = Shares::new(1);
        let stays = user(&shares, STRANGER);
        for uid in 0..1000 {
            user(&shares, uid);
        }
        assert!(shares.peers.lock().len() <= 4, "{}", shares.peers.lock().len());
        assert!(Arc::ptr_eq(&stays, &user(&shares, STRANGER)));
    }

    #[test]
    fn a_few_peers_leave_room_for_others() {
        let shares = Shares::new(1);
        let mut taken = Vec::new();
        let mut newcomer = Vec::new();
        for uid in 0..8 {
            let peer = user(&shares, STRANGER + uid);
            let before = taken.len();
            assert_eq!(peer.room(Resource::Sessions).min(1), 1, "the {uid}th finds a place");
            taken.extend(std::iter::from_fn(|| peer.take(Resource::Sessions).ok()));
            newcomer.push(taken.len() - before);
        }
        assert_eq!(newcomer, [256, 256, 248, 124, 62, 31, 16, 8]);
    }

    #[test]
    fn shares_leave_room_for_others() {
        for resource in Resource::ALL {
            let Bound { all, share, reserve } = resource.bound();
            assert!(share * 2 + reserve <= all, "{resource:?}");
        }
    }
}
