//! The table of handles: from the number that the kernel knows to the open file and its open flags.

use super::grants::HeldGrants;
use super::volume::{Handle, OpenHow};
use crate::read::CachedRegion;
use crate::session::{LossesTold, ServerOpen};
use crate::transport::FsError;
use parking_lot::RwLock;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One open(2).
#[derive(Debug)]
pub(crate) struct HandleState {
    /// The client's cached layout of the file, and through it the file as it is open at the server.
    pub(crate) region: Arc<CachedRegion>,
    pub(crate) how: OpenHow,
    /// The last loss of written bytes that this handle was told of.
    pub(crate) losses_told: LossesTold,
    /// What it may change one-sidedly.
    pub(crate) grants: HeldGrants,
}

impl HandleState {
    /// The file at the server.
    pub(crate) fn file(&self) -> &Arc<ServerOpen> {
        self.region.open()
    }
}

/// Handles of all mounts of this process, so that a number means one open for good.
static NEXT: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The handle that this thread looked up last. A closed handle here does no harm: its number is never used again.
    static LAST: RefCell<Option<(Handle, Arc<HandleState>)>> = const { RefCell::new(None) };
}

/// All handles of a mount. Bounded by the kernel, which opens no more files than its own limits allow.
#[derive(Debug, Default)]
pub(crate) struct HandleTable {
    handles: RwLock<HashMap<Handle, Arc<HandleState>>>,
}

impl HandleTable {
    pub(crate) fn insert(&self, state: HandleState) -> Handle {
        let handle = Handle(NEXT.fetch_add(1, Ordering::Relaxed));
        self.handles.write().insert(handle, Arc::new(state));
        handle
    }

    pub(crate) fn get(&self, handle: Handle) -> Result<Arc<HandleState>, FsError> {
        self.handles.read().get(&handle).cloned().ok_or(FsError::BadHandle)
    }

    /// As `get`, for frequent calls: a thread that names the same handle as the last time takes no lock and counts no reference, because both would
    /// move a cache line between all readers.
    pub(crate) fn with<T>(
        &self,
        handle: Handle,
        look: impl FnOnce(&HandleState) -> Result<T, FsError>,
    ) -> Result<T, FsError> {
        LAST.with_borrow_mut(|last| {
            let state = match last {
                Some((known, state)) if *known == handle => state,
                _ => &mut last.insert((handle, self.get(handle)?)).1,
            };
            look(state)
        })
    }

    /// The cached layouts of all open files.
    pub(crate) fn regions(&self) -> Vec<Arc<CachedRegion>> {
        self.handles.read().values().map(|state| state.region.clone()).collect()
    }

    pub(crate) fn remove(&self, handle: Handle) -> Option<Arc<HandleState>> {
        self.handles.write().remove(&handle)
    }
}
