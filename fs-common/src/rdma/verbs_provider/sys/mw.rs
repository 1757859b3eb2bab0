//! Memory windows.

use super::{Pd, ffi, made};
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// A window of type 2B. Work requests of its queue pair bind it, one after the other.
pub(in super::super) struct Mw {
    pub(super) raw: NonNull<ffi::ibv_mw>,
    _pd: Arc<Pd>,
}

// SAFETY: libibverbs' calls may be made from any thread; `rkey` and `set_rkey` are called under a lock of the window's.
unsafe impl Send for Mw {}
// SAFETY: as above.
unsafe impl Sync for Mw {}

impl Mw {
    pub(in super::super) fn new(pd: &Arc<Pd>) -> io::Result<Self> {
        // SAFETY: the domain is there, and stays: `_pd` goes after the window.
        let raw = unsafe { ffi::ibv_alloc_mw(pd.raw.as_ptr(), ffi::ibv_mw_type::IBV_MW_TYPE_2) };
        let raw = raw.ok_or_else(io::Error::last_os_error)?;
        Ok(Self { raw: made(raw)?, _pd: pd.clone() })
    }

    /// The key of its last binding. The key of the next binding has another last byte.
    pub(in super::super) fn rkey(&self) -> u32 {
        // SAFETY: the window is there.
        unsafe { (*self.raw.as_ptr()).rkey }
    }

    /// The key for another binding.
    pub(in super::super) fn next_rkey(&self) -> u32 {
        // SAFETY: it is computed of the number alone.
        unsafe { ffi::ibv_inc_rkey(self.rkey()) }
    }

    /// Sets the key of a binding that was just posted, as ibv_bind_mw(3) does for type 1: the next binding counts on from it.
    pub(in super::super) fn set_rkey(&self, rkey: u32) {
        // SAFETY: the window is there; callers hold a lock, so nobody reads the field meanwhile.
        unsafe { (*self.raw.as_ptr()).rkey = rkey };
    }
}

impl Drop for Mw {
    fn drop(&mut self) {
        // SAFETY: made by `new`, freed once; `_pd` goes after it. What it is bound to is open no longer.
        unsafe { ffi::ibv_dealloc_mw(self.raw.as_ptr()) };
    }
}
