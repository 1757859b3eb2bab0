//! Memory windows over libibverbs.

use super::queue::VerbsQp;
use super::sys::{Mw, Rights, What};
use crate::ids::Rkey;
use crate::rdma::memory_window::{Binding, MemoryWindow};
use crate::rdma::verbs::{Access, CompletionKind, MemoryRegion, PostError, WrId};
use parking_lot::Mutex;
use std::sync::Arc;

/// See the module.
pub(super) struct VerbsWindow {
    /// Before the queue pair, which must be there as long as the RNIC knows the window to be bound to it.
    window: Mutex<Bound>,
    qp: Arc<VerbsQp>,
}

struct Bound {
    /// Before the region: it cannot be deregistered with a window on it.
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
        // No lock is held while posting. The binding's own reference keeps it registered.
        let registered = self.qp.regions().read().get(&region.lkey().0).cloned();
        let Some(registered) = registered else {
            // Of another domain: as the RNIC would say it.
            self.qp.fail();
            return Err(PostError::BadState { state: crate::rdma::QpState::Error });
        };
        let what = What::Bind { window: &bound.raw, rkey, region: &registered, offset, len, rights };
        self.qp.post_of_window(wr_id, CompletionKind::Bind, what)?;
        bound.raw.set_rkey(rkey);
        bound.region = Some(region.clone());
        Ok(Rkey(rkey))
    }

    /// The region stays until the next binding, or the end: the RNIC has yet to do this.
    fn invalidate(&self, wr_id: WrId) -> Result<(), PostError> {
        let bound = self.window.lock();
        let what = What::Invalidate { rkey: bound.raw.rkey() };
        self.qp.post_of_window(wr_id, CompletionKind::Invalidate, what)
    }
}
