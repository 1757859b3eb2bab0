//! Receives that all connections of one peer at one worker share, where the RNIC has shared receive queues.
//!
//! An RNIC's registered memory is pinned, whether or not messages come to it. So there are as many receives as a peer can use at a worker, and not two
//! for each connection. A message is copied out and its receive posted again as soon as its completion is polled. So the number of receives no longer
//! limits the requests of a connection: a third request at once ends the connection (`Connection::begin`).
//!
//! # Why each peer has its own
//! RNICs, rdma_rxe among them, forget a receive whose message ends in the middle because the queue pair is destroyed between its packets. Nobody can
//! tell which receive that was while other queue pairs may still take it. A peer that does so on purpose takes its own receives only.
//!
//! # Lifetime
//! They are made when the peer's first connection there is accepted. Connections own them, so they are dropped with the last one, and new ones are made
//! when the peer comes again: receives that were lost do not last.
//!
//! # All receives in use
//! If more messages than receives come between two polls, the senders' RNICs try again every 0.64 ms until the worker has polled, and nothing is
//! lost. The beginnings of such times are counted (`receives_ran_dry`).

use super::connection::WorkId;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{
    Access, MemoryRegion, PeerKey, PostError, ProtectionDomain, RdmaError, RecvWr, SharedReceiveQueue,
};
use cuttlefs_common::rpc::MAX_MESSAGE_BYTES;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

const MESSAGE: usize = MAX_MESSAGE_BYTES as usize;
/// Receives of a peer at a worker, 4 MiB: a mount whose every lane asks at once.
pub(crate) const RECEIVES_OF_PEER: usize = 64;

/// One peer's receives at one worker.
pub(crate) struct SharedReceives {
    /// Distinguishes them from others of the worker, also from those that the peer had before.
    number: u32,
    // Dropped before the memory that its receives name.
    queue: Arc<dyn SharedReceiveQueue>,
    region: Arc<dyn MemoryRegion>,
    /// How many times it had run dry when `ran_dry` was called last. Relaxed: only the worker calls that.
    told: AtomicU64,
}

impl SharedReceives {
    /// Posts all receives.
    fn new(number: u32, pd: &dyn ProtectionDomain) -> Result<Self, RdmaError> {
        let failed = |action, source| RdmaError::Io { action, endpoint: "shared receives".into(), source };
        let memory = SharedMemory::new("cuttlefs-receives", MESSAGE * RECEIVES_OF_PEER)
            .map_err(|source| failed("allocate memory for", source))?;
        let region = pd.register(Arc::new(memory), Access::LOCAL)?;
        let queue = pd.create_shared_receives(RECEIVES_OF_PEER as u32, 1)?;
        let receives = Self { number, queue, region, told: AtomicU64::new(0) };
        let all: Vec<_> = (0..RECEIVES_OF_PEER).map(|index| receives.receive(index)).collect();
        receives.queue.post(&all).map_err(|error| failed("post", std::io::Error::other(error)))?;
        Ok(receives)
    }

    /// The queue, for a new queue pair.
    pub(crate) fn queue(&self) -> &Arc<dyn SharedReceiveQueue> {
        &self.queue
    }

    fn receive(&self, index: usize) -> RecvWr {
        RecvWr {
            wr_id: WorkId::Shared { queue: self.number, index }.encode(),
            local: self.region.sge((MESSAGE * index) as u64, MAX_MESSAGE_BYTES).into(),
        }
    }

    /// Takes the first `len` bytes of the message in a receive that has completed, and posts the receive again.
    fn take(&self, index: usize, len: usize) -> Vec<u8> {
        let mut message = vec![0; len];
        self.region.memory().read(MESSAGE * index, &mut message);
        match self.queue.post(&[self.receive(index)]) {
            Ok(()) => {}
            // The receive's completion was polled, so the queue has room for it.
            Err(error @ (PostError::QueueFull { .. } | PostError::SharedReceives)) => {
                unreachable!("a receive that came back is not taken: {error}")
            }
            // The RNIC is broken, and its connections end.
            Err(error) => tracing::error!(%error, "a receive is lost"),
        }
        message
    }

    /// How many times it has run dry since the last call.
    fn ran_dry(&self) -> u64 {
        let count = self.queue.ran_dry();
        count - self.told.swap(count, Ordering::Relaxed)
    }
}

/// Values that live as long as somebody else holds them. Dead entries are removed when one is added.
struct Held<K, V>(HashMap<K, Weak<V>>);

impl<K: Hash + Eq, V> Held<K, V> {
    fn get(&self, key: &K) -> Option<Arc<V>> {
        self.0.get(key).and_then(Weak::upgrade)
    }

    fn add(&mut self, key: K, value: &Arc<V>) {
        self.0.retain(|_, value| value.strong_count() > 0);
        self.0.insert(key, Arc::downgrade(value));
    }
}

/// The receives of all peers at one worker, by one RNIC. Acceptors make them, and the worker finds them.
pub(crate) struct PeersReceives {
    /// Locked while receives are made, so that a peer has one set of them.
    of_peer: Mutex<Held<PeerKey, SharedReceives>>,
    /// Locked for a look only, since the worker waits for it.
    by_number: Mutex<Held<u32, SharedReceives>>,
    last: AtomicU32,
}

impl PeersReceives {
    pub(crate) fn new() -> Self {
        let (of_peer, by_number) = (Held(HashMap::new()), Held(HashMap::new()));
        Self { of_peer: Mutex::new(of_peer), by_number: Mutex::new(by_number), last: AtomicU32::new(0) }
    }

    /// The receives of a peer, made if it has none here.
    ///
    /// # Errors
    /// `RdmaError` if there is no memory, or the RNIC has no more queues.
    pub(crate) fn of(
        &self,
        peer: &PeerKey,
        pd: &dyn ProtectionDomain,
    ) -> Result<Arc<SharedReceives>, RdmaError> {
        let mut of_peer = self.of_peer.lock();
        if let Some(receives) = of_peer.get(peer) {
            return Ok(receives);
        }
        let number = self.last.fetch_add(1, Ordering::Relaxed);
        let receives = Arc::new(SharedReceives::new(number, pd)?);
        of_peer.add(peer.clone(), &receives);
        self.by_number.lock().add(number, &receives);
        Ok(receives)
    }

    /// How many connections of a peer have its receives here.
    pub(crate) fn connections(&self, peer: &PeerKey) -> usize {
        // One is this look's.
        self.of_peer.lock().get(peer).map_or(0, |receives| Arc::strong_count(&receives) - 1)
    }

    /// Takes a message as [`SharedReceives::take`] does. Nothing if the receives are gone: then its connection is gone, too.
    pub(crate) fn take(&self, queue: u32, index: usize, len: usize) -> Vec<u8> {
        let receives = self.by_number.lock().get(&queue);
        receives.map_or_else(Vec::new, |receives| receives.take(index, len))
    }

    /// How many times any have run dry since the last call.
    pub(crate) fn ran_dry(&self) -> u64 {
        let all: Vec<_> = self.by_number.lock().0.values().filter_map(Weak::upgrade).collect();
        all.iter().map(|receives| receives.ran_dry()).sum()
    }
}
