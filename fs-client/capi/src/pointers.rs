//! What C hands over, as Rust knows it. A null pointer where one must be is `-EINVAL`; other bad pointers cannot be found out.

use crate::errors::invalid;
use crate::forked;
use libc::{c_char, c_int};
use std::ffi::CStr;

/// A handle that C has got from this library.
///
/// # Safety
/// `handle` is null, or was made by [`give`] as this type, and is not freed before the returned reference is gone.
pub(crate) unsafe fn handle<'h, T>(handle: *const T) -> Result<&'h T, c_int> {
    forked::refuse()?;
    // SAFETY: the caller's.
    unsafe { handle.as_ref() }.ok_or_else(|| invalid("a handle is NULL"))
}

/// As [`handle`], for one thread at a time.
///
/// # Safety
/// As [`handle`], and no other thread uses it meanwhile.
pub(crate) unsafe fn handle_alone<'h, T>(handle: *mut T) -> Result<&'h mut T, c_int> {
    forked::refuse()?;
    // SAFETY: the caller's.
    unsafe { handle.as_mut() }.ok_or_else(|| invalid("a handle is NULL"))
}

/// Hands a new handle to C.
///
/// # Safety
/// `place` is null, or a handle may be stored there.
pub(crate) unsafe fn give<T>(place: *mut *mut T, value: T) -> Result<(), c_int> {
    if place.is_null() {
        return Err(invalid("there is no place for the handle"));
    }
    // SAFETY: the caller's.
    unsafe { place.write(Box::into_raw(Box::new(value))) };
    Ok(())
}

/// Takes a handle back. Null is nothing, and in a forked child any is.
///
/// # Safety
/// As [`handle`], and nobody uses it any more.
pub(crate) unsafe fn free<T>(handle: *mut T) {
    // A forked child's copy goes with the child: its end would wait for threads that are not there.
    if !handle.is_null() && !forked::is_child() {
        // SAFETY: it was made by `give`, of a box.
        drop(unsafe { Box::from_raw(handle) });
    }
}

/// A text that must be there.
///
/// # Safety
/// `text` is null, or a C string that lives as long as the call.
pub(crate) unsafe fn text<'t>(text: *const c_char) -> Result<&'t [u8], c_int> {
    // SAFETY: the caller's.
    unsafe { optional(text) }.ok_or_else(|| invalid("a text is NULL"))
}

/// A text that may be missing.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn optional<'t>(text: *const c_char) -> Option<&'t [u8]> {
    // SAFETY: the caller's.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_bytes())
}

/// Bytes to read.
///
/// # Safety
/// `bytes` has `len` bytes that nobody changes during the call, or `len` is 0.
pub(crate) unsafe fn bytes<'b>(bytes: *const libc::c_void, len: usize) -> Result<&'b [u8], c_int> {
    check(bytes, len)?;
    if len == 0 {
        return Ok(&[]);
    }
    // SAFETY: the caller's; the length was checked.
    Ok(unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), len) })
}

/// Room to fill.
///
/// # Safety
/// `room` has `len` bytes that nobody else touches during the call, or `len` is 0.
pub(crate) unsafe fn room<'b>(room: *mut libc::c_void, len: usize) -> Result<&'b mut [u8], c_int> {
    check(room, len)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the caller's; the length was checked. The bytes are written only.
    Ok(unsafe { std::slice::from_raw_parts_mut(room.cast::<u8>(), len) })
}

fn check(start: *const libc::c_void, len: usize) -> Result<(), c_int> {
    match len {
        0 => Ok(()),
        _ if start.is_null() => Err(invalid("bytes are NULL")),
        // Longer than any allocation, and than a result can tell.
        _ if isize::try_from(len).is_err() => Err(invalid("a length is no length of memory")),
        _ => Ok(()),
    }
}

/// The return value of a function that has only success to tell.
pub(crate) fn outcome(result: Result<(), c_int>) -> c_int {
    result.err().unwrap_or(0)
}

/// The return value of a function that tells a number.
pub(crate) fn number(result: Result<u64, c_int>) -> i64 {
    match result {
        Ok(number) => i64::try_from(number).unwrap_or(i64::MAX),
        Err(errno) => errno.into(),
    }
}
