//! Registered memory.

use crate::errors::told;
use crate::pointers::{free, give, handle, outcome};
use cuttlefs_client::native::{Buffer, Session};
use libc::{c_int, c_void};

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_buffer_new(
    session: *const Session,
    len: usize,
    buffer: *mut *mut Buffer,
) -> c_int {
    // SAFETY: the caller's.
    let make = || unsafe {
        let session = handle(session)?;
        give(buffer, Buffer::new(session, len).map_err(|error| told(&error))?)
    };
    outcome(make())
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_buffer_free(buffer: *mut Buffer) {
    // SAFETY: the caller's.
    unsafe { free(buffer) }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_buffer_data(buffer: *const Buffer) -> *mut c_void {
    // SAFETY: the caller's.
    let buffer = unsafe { handle(buffer) };
    buffer.map_or(std::ptr::null_mut(), |buffer| buffer.as_ptr().as_ptr().cast())
}
