//! Registered dma-bufs: addresses that another driver gives to the RNIC, with no memory of this process behind them.
//!
//! The bindings do not declare the call, which is newer than the oldest library that this runs with (rdma-core 34). So it is looked up among the
//! symbols of the libraries that are loaded.

use super::{Pd, Rights, ffi, made};
use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// `ibv_reg_dmabuf_mr` of verbs.h.
type Register = unsafe extern "C" fn(
    pd: *mut ffi::ibv_pd,
    offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ffi::ibv_mr;

/// The library's call; `None`: it is older.
fn register() -> Option<Register> {
    // SAFETY: the name is a string that ends; nothing is changed.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"ibv_reg_dmabuf_mr".as_ptr()) };
    // SAFETY: libibverbs, which is loaded, has a function of this type by that name, and `Option` takes a null pointer for none.
    unsafe { std::mem::transmute::<*mut c_void, Option<Register>>(found) }
}

/// A dma-buf that peers may READ.
pub(in super::super) struct DmaBufMr {
    raw: NonNull<ffi::ibv_mr>,
    _pd: Arc<Pd>,
}

// SAFETY: libibverbs' calls may be made from any thread; the key does not change.
unsafe impl Send for DmaBufMr {}
// SAFETY: as above.
unsafe impl Sync for DmaBufMr {}

impl DmaBufMr {
    /// Registers the first bytes of a dma-buf; their addresses begin at 0. The kernel keeps the dma-buf.
    pub(in super::super) fn new(pd: &Arc<Pd>, dma_buf: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let register = register().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSYS))?;
        let access = Rights { remote_read: true, ..Rights::default() }.flags().0 as c_int;
        // SAFETY: the domain is there and goes after the registration; the descriptor is open. What it opens, the kernel checks.
        let raw = unsafe { register(pd.raw.as_ptr(), 0, len, 0, dma_buf.as_raw_fd(), access) };
        Ok(Self { raw: made(raw)?, _pd: pd.clone() })
    }

    pub(in super::super) fn rkey(&self) -> u32 {
        // SAFETY: the registration stands while `self` lives; the field does not change.
        unsafe { (*self.raw.as_ptr()).rkey }
    }
}

impl Drop for DmaBufMr {
    fn drop(&mut self) {
        // SAFETY: made by `new`, deregistered once; `_pd` goes after this.
        unsafe { ffi::ibv_dereg_mr(self.raw.as_ptr()) };
    }
}
