//! An RNIC that reaches a server by a host name with two addresses: connections lead to the one and to the other in turn, whatever
//! endpoint they name.

use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::persist::Persistence;
use cuttlefs_common::rdma::soft::{SoftDevice, SoftOptions};
use cuttlefs_common::rdma::{
    Access, Capabilities, CompletionQueue, ConnectOptions, Connected, Device, Endpoint, FileTarget, Listener,
    MemoryRegion, ProtectionDomain, RdmaError, WindowId,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// See the module.
pub struct HostName {
    device: Arc<dyn Device>,
    addresses: [Endpoint; 2],
}

impl HostName {
    pub fn new(addresses: [Endpoint; 2]) -> Self {
        Self { device: SoftDevice::new(SoftOptions::default()), addresses }
    }
}

impl Device for HostName {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.device.capabilities()
    }

    fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, RdmaError> {
        let pd = self.device.alloc_pd()?;
        Ok(Arc::new(Domain { pd, addresses: self.addresses.clone(), connects: AtomicUsize::new(0) }))
    }

    fn create_cq(&self, depth: u32) -> Result<Arc<dyn CompletionQueue>, RdmaError> {
        self.device.create_cq(depth)
    }

    fn set_file_target(&self, target: Arc<dyn FileTarget>) {
        self.device.set_file_target(target);
    }
}

struct Domain {
    pd: Arc<dyn ProtectionDomain>,
    addresses: [Endpoint; 2],
    /// How many were made.
    connects: AtomicUsize,
}

impl ProtectionDomain for Domain {
    fn register(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        self.pd.register(memory, access)
    }

    fn register_persistent(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
        domain: Arc<dyn Persistence>,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        self.pd.register_persistent(memory, access, domain)
    }

    fn export_window(&self, id: WindowId, memory: Arc<SharedMemory>) {
        self.pd.export_window(id, memory);
    }

    fn connect(&self, _endpoint: &Endpoint, options: ConnectOptions) -> Result<Connected, RdmaError> {
        let turn = self.connects.fetch_add(1, Ordering::Relaxed);
        self.pd.connect(&self.addresses[turn % 2], options)
    }

    fn listen(&self, endpoint: &Endpoint) -> Result<Box<dyn Listener>, RdmaError> {
        self.pd.listen(endpoint)
    }
}
