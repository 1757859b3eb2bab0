//! The table of handles: from the number the kernel knows to the open file and how it was opened.

use super::open_file::OpenFile;
use super::volume::{FsError, Handle, OpenHow};
use parking_lot::RwLock;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One open(2).
#[derive(Clone, Debug)]
pub(crate) struct HandleState {
    pub(crate) file: Arc<OpenFile>,
    pub(crate) how: OpenHow,
}

/// All handles of a mount. Bounded by the kernel, which opens no more files than its own limits allow.
#[derive(Debug, Default)]
pub struct HandleTable {
    handles: RwLock<HashMap<Handle, Arc<HandleState>>>,
    next: AtomicU64,
}

impl HandleTable {
    pub(crate) fn insert(&self, file: Arc<OpenFile>, how: OpenHow) -> Handle {
        let handle = Handle(self.next.fetch_add(1, Ordering::Relaxed));
        self.handles.write().insert(handle, Arc::new(HandleState { file, how }));
        handle
    }

    pub(crate) fn get(&self, handle: Handle) -> Result<Arc<HandleState>, FsError> {
        self.handles.read().get(&handle).cloned().ok_or(FsError::BadHandle)
    }

    pub(crate) fn remove(&self, handle: Handle) -> Option<Arc<HandleState>> {
        self.handles.write().remove(&handle)
    }
}
