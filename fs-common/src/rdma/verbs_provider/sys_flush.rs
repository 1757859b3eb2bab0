//! FLUSH through libibverbs: whether device and library support it, queue pairs that can FLUSH, and posting. It has `unsafe` code like `sys`, and is
//! a part of its own because the call is newer than the oldest library that this runs with.
//!
//! # How support is found
//! The device's attributes tell what it can do (kernel 6.2 on). The library has `ibv_wr_flush` since rdma-core 46; an older one, and a provider
//! without it, refuse a queue pair that asks for the operation. So one queue pair is tried at the start ([`Abilities::of`]). Only if it could be
//! made, the function pointer is used that newer libraries have behind the others: its place in `ibv_qp_ex` is part of their ABI. `ibv_post_send` has
//! no FLUSH in any version.
//!
//! # With other requests
//! Batches of `ibv_post_send` and of this interface may follow one another on one queue pair (ibv_wr_post(3)); the poster holds a lock.

use super::sys::{Context, Far, Pd, done, made};
use crate::rdma::verbs::FlushReach;
use rdma_sys as ffi;
use std::ffi::c_int;
use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

/// `IB_UVERBS_DEVICE_FLUSH_GLOBAL`, `_FLUSH_PERSISTENT` and `_ATOMIC_WRITE` of the kernel's ABI, in `device_cap_flags_ex`.
const CAP_FLUSH_GLOBAL: u64 = 1 << 38;
const CAP_FLUSH_PERSISTENT: u64 = 1 << 39;
const CAP_ATOMIC_WRITE: u64 = 1 << 40;
/// `IBV_ACCESS_FLUSH_GLOBAL` and `_PERSISTENT`, which older headers lack.
pub(super) const ACCESS_FLUSH_GLOBAL: c_int = 1 << 8;
pub(super) const ACCESS_FLUSH_PERSISTENT: c_int = 1 << 9;
/// `IBV_QP_EX_WITH_FLUSH`, reserved in older libraries.
const OP_FLUSH: u64 = 1 << 11;
/// All other operations that either interface posts, since a provider may size its queue by them. In the order of `ibv_qp_create_send_ops_flags`:
/// WRITE, with immediate, SEND, with immediate, READ, compare and swap, fetch and add, local invalidate, bind window, send with invalidate.
const OPS: u64 = (1 << 10) - 1;
/// `IBV_FLUSH_GLOBAL`, `IBV_FLUSH_PERSISTENT`: the placement type; `IBV_FLUSH_RANGE`: the selectivity level.
const FLUSH_GLOBAL: u8 = 1;
const FLUSH_PERSISTENT: u8 = 2;
const FLUSH_RANGE: u8 = 0;

/// What device and library support.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Abilities {
    /// How far the device executes peers' FLUSHes. This does not depend on the library.
    pub(super) as_target: FlushReach,
    /// How far a FLUSH that is posted here can reach.
    pub(super) as_initiator: FlushReach,
    pub(super) atomic_write: bool,
    /// Peers can READ memory that the device follows through the process's page table.
    pub(super) on_demand_paging: bool,
}

impl Abilities {
    /// Asks the device; if it supports anything, tries the library.
    pub(super) fn of(context: Context) -> Self {
        let attributes = attributes(context);
        let flags = attributes.map_or(0, |attributes| attributes.device_cap_flags_ex);
        let has = |flag| flags & flag != 0;
        // Persistence without visibility would be of no use: readers must find the persistent bytes.
        let as_target = match (has(CAP_FLUSH_GLOBAL), has(CAP_FLUSH_PERSISTENT)) {
            (false, _) => FlushReach::None,
            (true, false) => FlushReach::Visibility,
            (true, true) => FlushReach::Persistence,
        };
        let is_known = as_target != FlushReach::None && library_knows_flush(context).unwrap_or(false);
        let as_initiator = if is_known { as_target } else { FlushReach::None };
        let on_demand_paging = attributes.is_some_and(|attributes| {
            let paging = attributes.odp_caps;
            paging.general_caps & u64::from(ffi::ibv_odp_general_caps::IBV_ODP_SUPPORT.0) != 0
                && paging.per_transport_caps.rc_odp_caps
                    & ffi::ibv_odp_transport_cap_bits::IBV_ODP_SUPPORT_READ.0
                    != 0
        });
        Self { as_target, as_initiator, atomic_write: has(CAP_ATOMIC_WRITE), on_demand_paging }
    }
}

/// The part of a context with the calls that are newer than `ibv_context`, if it reaches to the call at `at` bytes from its beginning: newer calls
/// come before older ones (`verbs_get_ctx_op` of verbs.h). The bindings' own version of this finds none on machines of 64 bits.
///
/// # Safety
/// The context is open.
unsafe fn extension(context: Context, at: usize) -> Option<NonNull<ffi::verbs_context>> {
    let raw = context.as_ptr();
    // SAFETY: the context is open; a library that has the extension says so by this mark, and has allocated it before the context.
    unsafe {
        if (*raw).abi_compat as usize != usize::MAX {
            return None;
        }
        let extension = raw.byte_sub(offset_of!(ffi::verbs_context, context)).cast::<ffi::verbs_context>();
        let is_there = (*extension).sz >= size_of::<ffi::verbs_context>() - at;
        NonNull::new(extension).filter(|_| is_there)
    }
}

/// The device's attributes, with the newer ones.
fn attributes(context: Context) -> Option<ffi::ibv_device_attr_ex> {
    let mut attributes = MaybeUninit::<ffi::ibv_device_attr_ex>::zeroed();
    let len = size_of::<ffi::ibv_device_attr_ex>();
    // SAFETY: the context is open; the library fills as much of the plain structure in as it knows, and all zeros is a value.
    unsafe {
        let calls = extension(context, offset_of!(ffi::verbs_context, query_device_ex))?;
        let query = (*calls.as_ptr()).query_device_ex?;
        let asked = query(context.as_ptr(), null(), attributes.as_mut_ptr(), len);
        (asked == 0).then(|| attributes.assume_init())
    }
}

/// Whether the library can make a queue pair with FLUSH.
fn library_knows_flush(context: Context) -> io::Result<bool> {
    let pd = Pd::new(context)?;
    // SAFETY: the context is open.
    let queue = made(unsafe { ffi::ibv_create_cq(context.as_ptr(), 1, null_mut(), null_mut(), 0) })?;
    let wanted = ffi::ibv_qp_init_attr {
        qp_context: null_mut(),
        send_cq: queue.as_ptr(),
        recv_cq: queue.as_ptr(),
        srq: null_mut(),
        cap: ffi::ibv_qp_cap {
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        },
        qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
        sq_sig_all: 0,
    };
    let mut wanted = with_flush(&wanted, &pd);
    // SAFETY: domain and queue are there, and go after the queue pair.
    unsafe {
        let calls = extension(context, offset_of!(ffi::verbs_context, create_qp_ex));
        let create = calls.and_then(|calls| (*calls.as_ptr()).create_qp_ex);
        let qp = create.and_then(|create| NonNull::new(create(context.as_ptr(), &mut wanted)));
        if let Some(qp) = qp {
            ffi::ibv_destroy_qp(qp.as_ptr());
        }
        ffi::ibv_destroy_cq(queue.as_ptr());
        Ok(qp.is_some())
    }
}

/// The attributes of the same queue pair, with FLUSH.
fn with_flush(wanted: &ffi::ibv_qp_init_attr, pd: &Pd) -> ffi::ibv_qp_init_attr_ex {
    use ffi::ibv_qp_init_attr_mask as mask;
    // SAFETY: all zeros is a value of this plain structure.
    let mut extended: ffi::ibv_qp_init_attr_ex = unsafe { std::mem::zeroed() };
    extended.qp_context = wanted.qp_context;
    extended.send_cq = wanted.send_cq;
    extended.recv_cq = wanted.recv_cq;
    extended.srq = wanted.srq;
    extended.cap = wanted.cap;
    extended.qp_type = wanted.qp_type;
    extended.sq_sig_all = wanted.sq_sig_all;
    extended.comp_mask = (mask::IBV_QP_INIT_ATTR_PD | mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).0;
    extended.pd = pd.as_ptr();
    extended.send_ops_flags = OPS | OP_FLUSH;
    extended
}

/// Makes the queue pair of a connection's identifier, with FLUSH if `abilities` allow it.
///
/// # Safety
/// Identifier, domain, and the queues that `wanted` names are there; the latter stay until the queue pair is destroyed.
pub(super) unsafe fn create_qp(
    id: NonNull<ffi::rdma_cm_id>,
    pd: &Arc<Pd>,
    wanted: &mut ffi::ibv_qp_init_attr,
    abilities: Abilities,
) -> io::Result<()> {
    if abilities.as_initiator != FlushReach::None {
        let mut extended = with_flush(wanted, pd);
        // SAFETY: the caller's.
        done(unsafe { ffi::rdma_create_qp_ex(id.as_ptr(), &mut extended) })?;
        // The capacities that were granted.
        wanted.cap = extended.cap;
        return Ok(());
    }
    // SAFETY: the caller's.
    done(unsafe { ffi::rdma_create_qp(id.as_ptr(), pd.as_ptr(), wanted) })
}

/// `ibv_qp_ex` in libraries with FLUSH: the older structure, and one more function.
#[repr(C)]
struct QpWithFlush {
    before: ffi::ibv_qp_ex,
    wr_flush: Option<
        unsafe extern "C" fn(
            qp: *mut ffi::ibv_qp_ex,
            rkey: u32,
            address: u64,
            len: usize,
            placement: u8,
            level: u8,
        ),
    >,
}

/// A FLUSH to post.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flush {
    pub(super) far: Far,
    pub(super) len: u32,
    pub(super) persistent: bool,
}

/// Posts a FLUSH.
///
/// # Safety
/// The queue pair was made by [`create_qp`] with abilities to FLUSH, and is there.
pub(super) unsafe fn post(
    qp: NonNull<ffi::ibv_qp>,
    wr_id: u64,
    flush: Flush,
    signaled: bool,
) -> io::Result<()> {
    let placement = if flush.persistent { FLUSH_GLOBAL | FLUSH_PERSISTENT } else { FLUSH_GLOBAL };
    let unknown = || io::Error::from(io::ErrorKind::Unsupported);
    // SAFETY: the library made the queue pair with the operation, so its structure has the function's place; it is not moved. Between start
    // and completion nothing else is called.
    unsafe {
        let extended = NonNull::new(ffi::ibv_qp_to_qp_ex(qp.as_ptr())).ok_or_else(unknown)?;
        let with_flush = extended.cast::<QpWithFlush>();
        let base = extended.as_ptr();
        let (Some(start), Some(complete), Some(wr_flush)) =
            ((*base).wr_start, (*base).wr_complete, (*with_flush.as_ptr()).wr_flush)
        else {
            return Err(unknown());
        };
        start(base);
        (*base).wr_id = wr_id;
        (*base).wr_flags = if signaled { ffi::ibv_send_flags::IBV_SEND_SIGNALED.0 } else { 0 };
        wr_flush(base, flush.far.rkey, flush.far.offset, flush.len as usize, placement, FLUSH_RANGE);
        match complete(base) {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error.abs())),
        }
    }
}
