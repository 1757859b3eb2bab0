//! Registered memory, and the rights of a registration.

use super::{Pd, ffi, made};
use crate::memory::{Pinned, SharedMemory};
use crate::rdma::verbs::Sge;
use crate::rdma::verbs_provider::sys_flush;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// The rights that the RNIC is told.
#[derive(Clone, Copy, Default)]
pub(in super::super) struct Rights {
    pub(in super::super) local_write: bool,
    pub(in super::super) remote_read: bool,
    pub(in super::super) remote_write: bool,
    pub(in super::super) remote_atomic: bool,
    pub(in super::super) flush_global: bool,
    pub(in super::super) flush_persistent: bool,
    /// Windows can be bound to the region.
    pub(in super::super) windows: bool,
}

impl Rights {
    pub(super) fn flags(self) -> ffi::ibv_access_flags {
        let mut access = ffi::ibv_access_flags(0);
        for (has, flag) in [
            (self.local_write, ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE),
            (self.remote_read, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ),
            (self.remote_write, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE),
            (self.remote_atomic, ffi::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC),
            (self.windows, ffi::ibv_access_flags::IBV_ACCESS_MW_BIND),
        ] {
            if has {
                access |= flag;
            }
        }
        access
    }
}

/// Registrations by local key.
pub(in super::super) type Mrs = BTreeMap<u32, Arc<Mr>>;

/// Registered memory.
pub(in super::super) struct Mr {
    pub(super) raw: NonNull<ffi::ibv_mr>,
    pub(in super::super) memory: Pinned,
    pub(in super::super) first_address: u64,
    /// Offset in the memory at which the registration begins.
    from: u64,
    _pd: Arc<Pd>,
}

// SAFETY: libibverbs' calls may be made from any thread; the keys do not change.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Pins the memory from an offset on, which must be a whole number of pages: the pages stay where they are until this is dropped. Memory whose
    /// pages are pointed is registered as a whole, and not pinned but followed, for which the RNIC needs on-demand paging.
    pub(in super::super) fn new(
        pd: &Arc<Pd>,
        memory: Arc<SharedMemory>,
        from: usize,
        rights: Rights,
    ) -> io::Result<Self> {
        // When peers write to a region, this side's RNIC is the writer (IBTA volume 1, 10.6.3.1).
        let local_write = rights.local_write || rights.remote_write || rights.remote_atomic;
        let mut access = Rights { local_write, ..rights }.flags().0 as c_int;
        for (has, flag) in [
            (memory.is_pointed(), ffi::ibv_access_flags::IBV_ACCESS_ON_DEMAND.0 as c_int),
            (rights.flush_global, sys_flush::ACCESS_FLUSH_GLOBAL),
            (rights.flush_persistent, sys_flush::ACCESS_FLUSH_PERSISTENT),
        ] {
            if has {
                access |= flag;
            }
        }
        assert!(from < memory.len(), "something of the memory is registered");
        let memory = memory.pin();
        assert!(from == 0 || !memory.is_pointed(), "memory whose pages are pointed is registered whole");
        // SAFETY: inside of the mapping.
        let base = unsafe { memory.base_address().as_ptr().add(from) }.cast::<c_void>();
        let len = memory.len() - from;
        let first_address = if memory.is_pointed() { base as u64 } else { 0 };
        let address = first_address + from as u64;
        // SAFETY: the range is mapped for as long as `memory` lives, which this owns until after deregistration. The RNIC's copies race
        // with the CPU's, as `SharedMemory` allows.
        let raw = unsafe { ffi::ibv_reg_mr_iova(pd.raw.as_ptr(), base, len, address, access) };
        Ok(Self { raw: made(raw)?, memory, first_address, from: from as u64, _pd: pd.clone() })
    }

    /// The mapped address of a range, for a post that copies.
    pub(super) fn mapped(&self, local: &Sge) -> Option<u64> {
        let is_inside = local.offset >= self.from && self.memory.contains(local.offset, local.len.into());
        is_inside.then(|| self.memory.base_address().as_ptr() as u64 + local.offset)
    }

    /// Registered bytes.
    pub(in super::super) fn len(&self) -> u64 {
        // SAFETY: the registration stands while `self` lives; the field does not change.
        unsafe { (*self.raw.as_ptr()).length as u64 }
    }

    pub(in super::super) fn lkey(&self) -> u32 {
        // SAFETY: the registration stands while `self` lives; the field does not change.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    pub(in super::super) fn rkey(&self) -> u32 {
        // SAFETY: as `lkey`.
        unsafe { (*self.raw.as_ptr()).rkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: made by `new`, deregistered once; `memory` and `_pd` go after this.
        unsafe { ffi::ibv_dereg_mr(self.raw.as_ptr()) };
    }
}
