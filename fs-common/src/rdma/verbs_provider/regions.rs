//! The registrations of one protection domain, by key. Posts that copy bytes find their memory here.

use super::Shared;
use super::sys::{DmaBufMr, Mr};
use crate::ids::{Lkey, Rkey};
use crate::memory::SharedMemory;
use crate::rdma::verbs::{DmaBufRegion, FlushReach, MemoryRegion, RemoteRange};
use parking_lot::{RwLock, RwLockReadGuard};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The registrations by local key; see the module.
#[derive(Default)]
pub(super) struct Regions(RwLock<BTreeMap<u32, Arc<Mr>>>);

impl Regions {
    pub(super) fn add(
        self: &Arc<Self>,
        main: Mr,
        reading: Option<Mr>,
        reach: FlushReach,
        device: &Arc<Shared>,
    ) -> VerbsMr {
        let main = Arc::new(main);
        self.0.write().insert(main.lkey(), main.clone());
        // Memory that the RNIC follows is not pinned.
        let pinned =
            if main.memory.is_pointed() { 0 } else { main.len() + reading.as_ref().map_or(0, Mr::len) };
        device.pinned_bytes.fetch_add(pinned, Ordering::Relaxed);
        VerbsMr { main, reading, reach, pinned, regions: self.clone(), device: device.clone() }
    }

    /// All registrations by local key. None can be deregistered while the guard lives.
    pub(super) fn read(&self) -> RwLockReadGuard<'_, BTreeMap<u32, Arc<Mr>>> {
        self.0.read()
    }
}

/// Registered memory.
pub(super) struct VerbsMr {
    /// The registration of `rkey`: the whole memory, or the part behind the owner's bytes.
    main: Arc<Mr>,
    /// A registration of the whole memory for reading, if there are owner's bytes.
    reading: Option<Mr>,
    reach: FlushReach,
    /// Bytes of both registrations.
    pinned: u64,
    regions: Arc<Regions>,
    device: Arc<Shared>,
}

impl MemoryRegion for VerbsMr {
    fn lkey(&self) -> Lkey {
        Lkey(self.main.lkey())
    }

    fn rkey(&self) -> Rkey {
        Rkey(self.main.rkey())
    }

    fn read_rkey(&self) -> Rkey {
        Rkey(self.reading.as_ref().unwrap_or(&self.main).rkey())
    }

    fn flush_reach(&self) -> FlushReach {
        self.reach
    }

    fn memory(&self) -> &Arc<SharedMemory> {
        &self.main.memory
    }

    fn first_address(&self) -> u64 {
        self.main.first_address
    }
}

impl Drop for VerbsMr {
    fn drop(&mut self) {
        // Waits for posts that copy. The RNIC deregisters after this, so it cannot have given the key to another region yet.
        self.regions.0.write().remove(&self.main.lkey());
        self.device.pinned_bytes.fetch_sub(self.pinned, Ordering::Relaxed);
    }
}

/// A registered dma-buf. Nothing of it is pinned by this process, and no post copies from it.
pub(super) struct VerbsDmaBuf {
    pub(super) registered: DmaBufMr,
    pub(super) len: u64,
}

impl DmaBufRegion for VerbsDmaBuf {
    fn range(&self) -> RemoteRange {
        RemoteRange { rkey: Rkey(self.registered.rkey()), first_address: 0, len: self.len }
    }
}
