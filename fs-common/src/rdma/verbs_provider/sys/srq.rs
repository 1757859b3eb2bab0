//! Shared receive queues, and the posting of receives to any queue.

use super::posted::elements_of;
use super::{Pd, ffi, made};
use crate::rdma::verbs::Sge;
use std::ffi::c_int;
use std::io;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// A shared receive queue.
pub(in super::super) struct Srq {
    pub(super) raw: NonNull<ffi::ibv_srq>,
    _pd: Arc<Pd>,
}

// SAFETY: libibverbs' calls may be made from any thread.
unsafe impl Send for Srq {}
// SAFETY: as above.
unsafe impl Sync for Srq {}

impl Srq {
    pub(in super::super) fn new(pd: &Arc<Pd>, depth: u32, max_sge: u32) -> io::Result<Self> {
        let mut wanted = ffi::ibv_srq_init_attr {
            srq_context: null_mut(),
            attr: ffi::ibv_srq_attr { max_wr: depth, max_sge, srq_limit: 0 },
        };
        // SAFETY: the domain is there, and stays: `_pd` goes after the queue.
        let raw = made(unsafe { ffi::ibv_create_srq(pd.raw.as_ptr(), &mut wanted) })?;
        Ok(Self { raw, _pd: pd.clone() })
    }

    /// Posts a receive.
    pub(in super::super) fn post_receive(&self, wr_id: u64, local: &[Sge]) -> io::Result<()> {
        // SAFETY: the queue is there; `receive_with` says the rest.
        receive_with(wr_id, local, |wr, bad| unsafe { ffi::ibv_post_srq_recv(self.raw.as_ptr(), wr, bad) })
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: made by `new`; queue pairs hold an `Arc` of it, so none is left.
        unsafe { ffi::ibv_destroy_srq(self.raw.as_ptr()) };
    }
}

/// Builds a receive for `post`, which copies it and its elements.
pub(super) fn receive_with(
    wr_id: u64,
    local: &[Sge],
    post: impl FnOnce(*mut ffi::ibv_recv_wr, *mut *mut ffi::ibv_recv_wr) -> c_int,
) -> io::Result<()> {
    let mut wr = ffi::ibv_recv_wr {
        wr_id,
        next: null_mut(),
        sg_list: elements_of(local),
        num_sge: local.len() as c_int,
    };
    // The RNIC checks the elements' ranges.
    match post(&mut wr, &mut null_mut()) {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error.abs())),
    }
}
