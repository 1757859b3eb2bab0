//! Memory windows over libibverbs.

use super::queue::VerbsQp;
use super::sys::{Mw, Rights};
use crate::ids::Rkey;
use crate::rdma::memory_window::{Binding, MemoryWindow};
use crate::rdma::verbs::{Access, CompletionKind, MemoryRegion, PostError, WrId};
use parking_lot::Mutex;
use std::sync::Arc;

/// A memory window; see the module.
pub(super) struct VerbsWindow {
    /// Declared before the queue pair, which must exist as long as the RNIC knows the window as bound to it.
    window: Mutex<Bound>,
    qp: Arc<VerbsQp>,
}

struct Bound {
    /// Declared before the region, which cannot be deregistered while a window is bound to it.
    raw: Mw,
    region: Option<Arc<dyn MemoryRegion>>,
}

impl VerbsWindow {
    pub(super) fn new(qp: Arc<VerbsQp>, raw: Mw) -> Self {
        Self { window: Mutex::new(Bound { raw, region: None }), qp }
    }
}

impl MemoryWindow for VerbsWindow {
    fn bind(&self, wr_id: WrId, binding: Binding) -> Result<Rkey, PostError> {
        let Binding { region, offset, len, access } = binding;
        let Access { remote_read, remote_write, remote_atomic, .. } = access;
        let rights = Rights { remote_read, remote_write, remote_atomic, ..Rights::default() };
        let mut bound = self.window.lock();
        let rkey = bound.raw.next_rkey();
        // No lock of the registrations is held while posting. The reference keeps the region registered.
        let registered = self.qp.regions().read().get(&region.lkey().0).cloned();
        let Some(registered) = registered else {
            // The region is of another domain: the result is as if the RNIC had refused it.
            self.qp.fail();
            return Err(PostError::BadState { state: crate::rdma::QpState::Error });
        };
        self.qp.post_of_window(wr_id, CompletionKind::Bind, |next| {
            next.bind((&bound.raw, rkey), (&registered, offset, len), rights)
        })?;
        bound.raw.set_rkey(rkey);
        bound.region = Some(region.clone());
        Ok(Rkey(rkey))
    }

    /// Keeps the region until the next binding, or the end: the RNIC has not executed this yet.
    fn invalidate(&self, wr_id: WrId) -> Result<(), PostError> {
        let bound = self.window.lock();
        let rkey = bound.raw.rkey();
        self.qp.post_of_window(wr_id, CompletionKind::Invalidate, |next| next.invalidate(rkey))
    }
}
