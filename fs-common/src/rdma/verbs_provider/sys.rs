//! libibverbs and librdmacm, with owners for their objects, and errors instead of numbers. All `unsafe` code of this provider is here and in its
//! parts: `address`, `channel` (what happens to connections), `cq`, `dma_buf` (registered dma-bufs), `id` (connections and their queue pairs), `mr`
//! (registered memory), `mw` (memory windows), `posted` (work requests), `srq` (shared receive queues).
//!
//! # Invariants
//! * Each object is destroyed once, after all objects that were made with it: each owner holds the owners of what it needs.
//! * Memory regions begin at address 0 of their own (`ibv_reg_mr_iova`): an offset is an address, here and at peers. Only memory that an RNIC follows
//!   has its real addresses, because rdma_rxe of Linux 7.2 looks up every address of such a region there, whatever it was registered as.
//! * A context belongs to librdmacm, which never closes it.

mod address;
mod channel;
mod cq;
mod dma_buf;
mod id;
mod mr;
mod mw;
mod posted;
mod srq;

use crate::rdma::verbs::SGES_MAX;
pub(super) use channel::{Channel, Event, Happened};
pub(super) use cq::{Cq, POLLED, WC_ROOM, Wc};
pub(super) use dma_buf::DmaBufMr;
pub(super) use ffi::ibv_wc_status as status;
pub(super) use id::{Capacities, Id, RETRIES, ReadDepth};
pub(super) use mr::{Mr, Mrs, Rights};
pub(super) use mw::Mw;
pub(super) use posted::{Batch, Far, Lists, Next};
use rdma_sys as ffi;
pub(super) use srq::Srq;
use std::ffi::{CStr, c_int};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// The result of a call that returns 0, or sets errno.
pub(super) fn done(result: c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

pub(super) fn made<T>(pointer: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(io::Error::last_os_error)
}

/// Makes a library's descriptor non-blocking.
fn unblock(fd: RawFd) -> io::Result<()> {
    // SAFETY: the library that gave the number keeps the descriptor open, and this borrows it for two calls.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = rustix::fs::fcntl_getfl(fd)?;
    Ok(rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK)?)
}

/// An opened RNIC.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Context(NonNull<ffi::ibv_context>);

// SAFETY: libibverbs' calls may be made from any thread, and librdmacm keeps contexts open for as long as the process lives.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The bounds of an RNIC.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Work requests of a queue.
    pub(super) queue_depth: u32,
    /// Completions of a queue.
    pub(super) completions: u32,
    /// The RNIC has windows of type 2B.
    pub(super) has_windows: bool,
    /// Receives of a shared queue; 0: the RNIC has no shared queues.
    pub(super) shared_receives: u32,
    /// Local ranges of any request.
    pub(super) sges: u32,
    /// Queue pairs of all users of the RNIC together.
    pub(super) queue_pairs: u32,
    /// READs and atomics of one queue pair.
    pub(super) reads: ReadDepth,
}

impl Context {
    pub(super) fn as_ptr(self) -> *mut ffi::ibv_context {
        self.0.as_ptr()
    }

    /// The kernel's name of the device.
    pub(super) fn name(self) -> String {
        // SAFETY: the context is open; the name is a string in memory of the library's, copied at once.
        unsafe {
            CStr::from_ptr(ffi::ibv_get_device_name((*self.0.as_ptr()).device)).to_string_lossy().into_owned()
        }
    }

    /// The largest MTU of a port.
    pub(super) fn max_mtu_bytes(self, port: u8) -> Option<u32> {
        let mut attributes = MaybeUninit::<ffi::ibv_port_attr>::zeroed();
        // SAFETY: the context is open; the library fills no more than the plain structure in (this call's is the beginning of it), of which all
        // zeros is a value.
        let attributes = unsafe {
            let asked = ffi::ibv_query_port(self.0.as_ptr(), port, attributes.as_mut_ptr().cast());
            (asked == 0).then(|| attributes.assume_init())
        };
        mtu_bytes(attributes?.max_mtu)
    }

    pub(super) fn limits(self) -> io::Result<Limits> {
        let mut attributes = MaybeUninit::<ffi::ibv_device_attr>::zeroed();
        // SAFETY: the context is open; the library fills the plain structure in, of which all zeros is a value, too.
        let attributes = unsafe {
            match ffi::ibv_query_device(self.0.as_ptr(), attributes.as_mut_ptr()) {
                0 => attributes.assume_init(),
                error => return Err(io::Error::from_raw_os_error(error)),
            }
        };
        let few = |count: c_int| u8::try_from(count.max(0)).unwrap_or(u8::MAX);
        Ok(Limits {
            queue_depth: attributes.max_qp_wr.max(0) as u32,
            completions: attributes.max_cqe.max(0) as u32,
            has_windows: attributes.device_cap_flags
                & ffi::ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B.0
                != 0,
            shared_receives: if attributes.max_srq > 0 { attributes.max_srq_wr.max(0) as u32 } else { 0 },
            // RNICs of iWARP may have one range for a READ. Those that do not tell have as many as for other requests.
            sges: [attributes.max_sge_rd, if attributes.max_srq > 0 { attributes.max_srq_sge } else { 0 }]
                .into_iter()
                .filter(|most| *most > 0)
                .fold(attributes.max_sge, c_int::min)
                .clamp(1, SGES_MAX as c_int) as u32,
            queue_pairs: attributes.max_qp.max(0) as u32,
            reads: ReadDepth {
                at_us: few(attributes.max_qp_rd_atom),
                of_us: few(attributes.max_qp_init_rd_atom),
            },
        })
    }
}

/// The bytes of an MTU: `IBV_MTU_256` is 1, and each next one twice that (verbs.h, enum ibv_mtu).
fn mtu_bytes(mtu: u32) -> Option<u32> {
    (1..=5).contains(&mtu).then(|| 128 << mtu)
}

/// A protection domain.
pub(super) struct Pd {
    raw: NonNull<ffi::ibv_pd>,
}

// SAFETY: libibverbs' calls may be made from any thread.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    pub(super) fn new(context: Context) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open.
        let raw = made(unsafe { ffi::ibv_alloc_pd(context.0.as_ptr()) })?;
        Ok(Arc::new(Self { raw }))
    }

    pub(super) fn as_ptr(&self) -> *mut ffi::ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: made by `new`; regions and queue pairs hold an `Arc` of it, so none is left.
        unsafe { ffi::ibv_dealloc_pd(self.raw.as_ptr()) };
    }
}
