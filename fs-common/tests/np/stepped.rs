//! An RNIC that lets a test act before each single work request: every other RNIC executes a doorbell's requests one behind the other, and a test could
//! not evict a page between them.

use cuttlefs_common::ids::QpNumber;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::memory::paged::PagedMemory;
use cuttlefs_common::persist::Persistence;
use cuttlefs_common::rdma::{
    Access, Capabilities, CompletionQueue, ConnectOptions, Connected, Device, Endpoint, FileTarget, LinkKind,
    Listener, MemoryRegion, PagedAccess, PeerIdentity, PostError, ProtectionDomain, QpState, QueuePair,
    RdmaError, RecvWr, RegionOwner, SendWr, WindowId,
};
use std::cell::RefCell;
use std::sync::Arc;

thread_local! {
    static BEFORE: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
}

/// Sets what this thread does before each work request of a stepped device; `None`: nothing.
pub(super) fn before_each(act: Option<Box<dyn FnMut()>>) {
    BEFORE.with_borrow_mut(|slot| *slot = act);
}

/// A device whose requests are posted one by one.
pub(super) struct Stepped(pub(super) Arc<dyn Device>);

struct SteppedDomain(Arc<dyn ProtectionDomain>);

struct SteppedPair(Arc<dyn QueuePair>);

impl Device for Stepped {
    fn name(&self) -> &str {
        "stepped"
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn alloc_pd(&self) -> Result<Arc<dyn ProtectionDomain>, RdmaError> {
        Ok(Arc::new(SteppedDomain(self.0.alloc_pd()?)))
    }

    fn create_cq(&self, depth: u32) -> Result<Arc<dyn CompletionQueue>, RdmaError> {
        self.0.create_cq(depth)
    }

    fn set_file_target(&self, target: Arc<dyn FileTarget>) {
        self.0.set_file_target(target);
    }
}

impl ProtectionDomain for SteppedDomain {
    fn register(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        self.0.register(memory, access)
    }

    fn register_persistent(
        &self,
        memory: Arc<SharedMemory>,
        access: Access,
        domain: Arc<dyn Persistence>,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        self.0.register_persistent(memory, access, domain)
    }

    fn register_paged(
        &self,
        memory: Arc<PagedMemory>,
        access: PagedAccess,
    ) -> Result<Arc<dyn MemoryRegion>, RdmaError> {
        self.0.register_paged(memory, access)
    }

    fn export_window(&self, id: WindowId, memory: Arc<SharedMemory>) {
        self.0.export_window(id, memory);
    }

    fn connect(&self, endpoint: &Endpoint, options: ConnectOptions) -> Result<Connected, RdmaError> {
        let Connected { qp, windows } = self.0.connect(endpoint, options)?;
        Ok(Connected { qp: Arc::new(SteppedPair(qp)), windows })
    }

    fn listen(&self, endpoint: &Endpoint) -> Result<Box<dyn Listener>, RdmaError> {
        self.0.listen(endpoint)
    }
}

impl QueuePair for SteppedPair {
    fn number(&self) -> QpNumber {
        self.0.number()
    }

    fn state(&self) -> QpState {
        self.0.state()
    }

    fn link(&self) -> LinkKind {
        self.0.link()
    }

    fn peer(&self) -> PeerIdentity {
        self.0.peer()
    }

    fn post_send(&self, requests: &[SendWr]) -> Result<(), PostError> {
        for request in requests {
            BEFORE.with_borrow_mut(|act| act.as_mut().map(|act| act()));
            self.0.post_send(std::slice::from_ref(request))?;
        }
        Ok(())
    }

    fn post_recv(&self, requests: &[RecvWr]) -> Result<(), PostError> {
        self.0.post_recv(requests)
    }

    fn looks_pages_up(&self) -> bool {
        self.0.looks_pages_up()
    }

    fn set_region_owner(&self, owner: RegionOwner) {
        self.0.set_region_owner(owner);
    }

    fn close(&self) {
        self.0.close();
    }
}
