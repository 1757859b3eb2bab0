//! Memory windows of the simulated RNIC, of type 2B. Their keys are in a table of the device, beside those of its regions.

use super::link::SimDevice;
use super::queue::SimPair;
use crate::ids::{QpNumber, Rkey};
use crate::memory::SharedMemory;
use crate::rdma::memory_window::{Binding, MemoryWindow};
use crate::rdma::{Access, CompletionKind, MemoryRegion, PostError, QpState, QueuePair, WcStatus, WrId};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

/// What a window's key opens, and to the peer of which queue pair.
pub(super) struct Opening {
    qp: QpNumber,
    memory: Arc<SharedMemory>,
    offset: u64,
    len: u64,
    access: Access,
}

/// The bound windows of a device, by key.
#[derive(Default)]
pub(super) struct Openings(Mutex<HashMap<u32, Opening>>);

impl Openings {
    /// The memory of a window's key for a request that came by this queue pair; `None`: the key opens no such range to it.
    pub(super) fn find(
        &self,
        rkey: Rkey,
        qp: QpNumber,
        (offset, len): (u64, usize),
        allowed: impl Fn(&Access) -> bool,
    ) -> Option<Arc<SharedMemory>> {
        let openings = self.0.lock();
        let opening = openings.get(&rkey.0).filter(|opening| opening.qp == qp)?;
        let end = offset.checked_add(len as u64)?;
        let is_inside = offset >= opening.offset && end <= opening.offset + opening.len;
        (is_inside && allowed(&opening.access)).then(|| opening.memory.clone())
    }

    fn close(&self, rkey: u32) {
        self.0.lock().remove(&rkey);
    }
}

/// The region of a binding stays registered while this lives.
struct Bound {
    rkey: u32,
    _region: Arc<dyn MemoryRegion>,
}

/// A memory window; see the module.
pub(super) struct SimWindow {
    pair: Arc<SimPair>,
    bound: Mutex<Option<Bound>>,
}

impl SimWindow {
    pub(super) fn new(pair: Arc<SimPair>) -> Self {
        Self { pair, bound: Mutex::default() }
    }

    fn device(&self) -> &SimDevice {
        self.pair.device()
    }

    fn takes_posts(&self) -> Result<(), PostError> {
        match self.pair.state() {
            QpState::ReadyToSend => Ok(()),
            state => Err(PostError::BadState { state }),
        }
    }

    /// What this binding opens, if the region is one of this device's, has the range, and is writable here where the peer may change it.
    fn opening(&self, binding: &Binding) -> Option<Opening> {
        let Binding { region, offset, len, access } = binding;
        let Access { remote_read, remote_write, remote_atomic, .. } = *access;
        let memory = self.device().to_bind(region.lkey(), remote_write || remote_atomic)?;
        let access = Access { remote_read, remote_write, remote_atomic, ..Access::NONE };
        let opening = Opening { qp: self.pair.number(), memory, offset: *offset, len: *len, access };
        opening.memory.contains(*offset, *len).then_some(opening)
    }
}

impl MemoryWindow for SimWindow {
    fn bind(&self, wr_id: WrId, binding: Binding) -> Result<Rkey, PostError> {
        self.takes_posts()?;
        let mut bound = self.bound.lock();
        let rkey = self.device().new_key();
        let opening = if bound.is_none() { self.opening(&binding) } else { None };
        let status = match opening {
            Some(opening) => {
                self.device().openings().0.lock().insert(rkey, opening);
                *bound = Some(Bound { rkey, _region: binding.region });
                WcStatus::Success
            }
            None => WcStatus::LocalProtection,
        };
        drop(bound);
        self.pair.complete_of_window(wr_id, CompletionKind::Bind, status);
        Ok(Rkey(rkey))
    }

    fn invalidate(&self, wr_id: WrId) -> Result<(), PostError> {
        self.takes_posts()?;
        let bound = self.bound.lock().take();
        if let Some(bound) = &bound {
            self.device().openings().close(bound.rkey);
        }
        let status = if bound.is_some() { WcStatus::Success } else { WcStatus::LocalProtection };
        self.pair.complete_of_window(wr_id, CompletionKind::Invalidate, status);
        Ok(())
    }
}

impl Drop for SimWindow {
    fn drop(&mut self) {
        if let Some(bound) = self.bound.get_mut().take() {
            self.device().openings().close(bound.rkey);
        }
    }
}
