//! The workers that serve each peer.
//!
//! A thread that one peer keeps busy never rests. The kernel makes a thread that wants more than its part wait, so this one waits
//! behind the time slices of others for each core that it loses. All other peers of that thread wait along, for each request, however
//! fair the thread's own turns are (`cuttlefs_common::fair`). Where each peer has threads of its own, the kernel divides the cores
//! among the peers, as it does among programs.
//!
//! # How it works
//! A peer's connections go in turn to half of the workers: to the neighbours that fewest other peers use when it comes. So two peers
//! share no worker. Where there are more peers than that, some share workers, and take turns there.
//!
//! # Invariants
//! * A peer keeps its workers for as long as the server holds anything in its name.
//! * `Home` counts once on each worker that it names.

use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of peers of each worker.
#[derive(Clone, Debug)]
pub(crate) struct Placement(Arc<Mutex<Vec<usize>>>);

/// The workers of one peer.
#[derive(Debug)]
pub struct Home {
    placement: Placement,
    workers: usize,
    first: usize,
    /// Connections so far. Relaxed, for it only spreads them.
    connections: AtomicUsize,
}

impl Placement {
    /// No peers yet, and so many workers.
    pub(crate) fn new(workers: usize) -> Self {
        assert!(workers > 0, "a server has a worker");
        Self(Arc::new(Mutex::new(vec![0; workers])))
    }

    /// Chooses the workers of one more peer.
    pub(crate) fn settle(&self) -> Home {
        let mut peers = self.0.lock();
        let workers = peers.len();
        let others = |first: &usize| home_of(*first, workers).map(|worker| peers[worker]).sum::<usize>();
        let first = (0..workers).min_by_key(others).expect("there is a worker");
        home_of(first, workers).for_each(|worker| peers[worker] += 1);
        Home { placement: self.clone(), workers, first, connections: AtomicUsize::new(0) }
    }
}

/// How many of `workers` workers a peer has.
fn span(workers: usize) -> usize {
    (workers / 2).max(1)
}

/// The workers of a peer, of which `first` is the first.
fn home_of(first: usize, workers: usize) -> impl Iterator<Item = usize> {
    (first..first + span(workers)).map(move |worker| worker % workers)
}

impl Home {
    /// The worker for one more connection of the peer.
    pub fn next_worker(&self) -> usize {
        self.worker_of(self.connections.fetch_add(1, Ordering::Relaxed))
    }

    /// The peer's worker for its connection of this number.
    pub fn worker_of(&self, number: usize) -> usize {
        (self.first + number % span(self.workers)) % self.workers
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let mut peers = self.placement.0.lock();
        home_of(self.first, self.workers).for_each(|worker| peers[worker] -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn workers_of(home: &Home) -> BTreeSet<usize> {
        (0..64).map(|_| home.next_worker()).collect()
    }

    #[test]
    fn two_peers_share_no_worker_and_one_has_half_of_them() {
        for workers in 2..=17 {
            let placement = Placement::new(workers);
            let (one, other) = (placement.settle(), placement.settle());
            assert_eq!(workers_of(&one).len(), workers / 2);
            assert!((0..64).all(|ring| workers_of(&one).contains(&one.worker_of(ring))));
            assert_eq!(workers_of(&other).len(), workers / 2);
            assert!(workers_of(&one).is_disjoint(&workers_of(&other)), "{workers} workers");
        }
    }

    #[test]
    fn a_newcomer_goes_where_fewest_are() {
        let placement = Placement::new(4);
        let homes: Vec<_> = (0..5).map(|_| placement.settle()).collect();
        let of: Vec<_> = homes.iter().map(workers_of).collect();
        assert_eq!((&of[0], &of[1]), (&BTreeSet::from([0, 1]), &BTreeSet::from([2, 3])));
        assert_eq!(*placement.0.lock(), [3, 3, 2, 2]);
        drop(homes);
        assert_eq!(*placement.0.lock(), [0; 4], "who is gone is not counted");
    }

    #[test]
    fn one_worker_serves_everybody() {
        let placement = Placement::new(1);
        let (one, other) = (placement.settle(), placement.settle());
        assert_eq!((one.next_worker(), other.next_worker()), (0, 0));
    }
}
