//! The registrations of one protection domain by key: where the memory of a range lies, for posts that copy it.

use super::sys::Mr;
use crate::ids::{Lkey, Rkey};
use crate::memory::SharedMemory;
use crate::rdma::verbs::MemoryRegion;
use parking_lot::{RwLock, RwLockReadGuard};
use std::collections::HashMap;
use std::sync::Arc;

/// See the module.
#[derive(Default)]
pub(super) struct Regions(RwLock<HashMap<u32, Arc<Mr>>>);

impl Regions {
    pub(super) fn add(self: &Arc<Self>, region: Mr) -> VerbsMr {
        let region = Arc::new(region);
        self.0.write().insert(region.lkey(), region.clone());
        VerbsMr { region, regions: self.clone() }
    }

    /// By local key. Nobody deregisters meanwhile.
    pub(super) fn read(&self) -> RwLockReadGuard<'_, HashMap<u32, Arc<Mr>>> {
        self.0.read()
    }
}

/// Registered memory.
pub(super) struct VerbsMr {
    region: Arc<Mr>,
    regions: Arc<Regions>,
}

impl MemoryRegion for VerbsMr {
    fn lkey(&self) -> Lkey {
        Lkey(self.region.lkey())
    }

    fn rkey(&self) -> Rkey {
        Rkey(self.region.rkey())
    }

    fn memory(&self) -> &Arc<SharedMemory> {
        &self.region.memory
    }
}

impl Drop for VerbsMr {
    fn drop(&mut self) {
        // Waits for posts that copy. Before the RNIC can give the key to another: it is deregistered behind this.
        self.regions.0.write().remove(&self.region.lkey());
    }
}
