//! Region keys, write grants and atomics.

use crate::errors::{invalid, told};
use crate::pointers::{free, give, handle, outcome, text};
use cuttlefs_client::native::{File, Grant, NativeError, RegionKey, Rights, Session};
use libc::{c_char, c_int};
use std::ffi::CString;
use std::time::Duration;

/// `CUTTLEFS_READ`.
const READ: c_int = 1;
/// `CUTTLEFS_WRITE`.
const WRITE: c_int = 2;
/// `CUTTLEFS_KEY_TEXT`: the text of a key, and a NUL.
const KEY_TEXT: usize = 177;

/// # Safety
/// `key` is a C string or null.
unsafe fn key(key: *const c_char) -> Result<RegionKey, c_int> {
    // SAFETY: the caller's.
    let key = unsafe { text(key) }?;
    let key = str::from_utf8(key).map_err(|_| invalid("the region key is not text"))?;
    key.parse().map_err(|error| invalid(&format!("{error}")))
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_bind(
    file: *const File,
    offset: u64,
    len: u64,
    rights: c_int,
    lifetime_ms: u64,
    key: *mut c_char,
) -> c_int {
    if key.is_null() {
        return invalid("there is no place for the key");
    }
    if rights & !(READ | WRITE) != 0 {
        return invalid("rights are CUTTLEFS_READ and CUTTLEFS_WRITE");
    }
    let rights = Rights { read: rights & READ != 0, write: rights & WRITE != 0 };
    let lifetime = (lifetime_ms > 0).then(|| Duration::from_millis(lifetime_ms));
    // SAFETY: the caller's.
    let bind = || unsafe {
        let bound = handle(file)?.bind(offset, len, rights, lifetime).map_err(|error| told(&error))?;
        let text = CString::new(bound.to_string()).map_err(|_| invalid("the key is no text"))?;
        let bytes = text.as_bytes_with_nul();
        if bytes.len() != KEY_TEXT {
            return Err(invalid("the key has another length than the header says"));
        }
        key.copy_from_nonoverlapping(bytes.as_ptr().cast(), bytes.len());
        Ok(())
    };
    outcome(bind())
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_unbind(file: *const File, bound: *const c_char) -> c_int {
    // SAFETY: the caller's.
    let unbind = || unsafe { handle(file)?.unbind(&key(bound)?).map_err(|error| told(&error)) };
    outcome(unbind())
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_redeem(
    session: *const Session,
    handed: *const c_char,
    file: *mut *mut File,
) -> c_int {
    // SAFETY: the caller's.
    let redeem = || unsafe {
        let (session, key) = (handle(session)?, key(handed)?);
        give(file, session.redeem(&key).map_err(|error| told(&error))?)
    };
    outcome(redeem())
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_grant_write(
    file: *const File,
    offset: u64,
    len: u64,
    grant: *mut *mut Grant,
) -> c_int {
    // SAFETY: the caller's.
    let ask = || unsafe {
        let file = handle(file)?;
        give(grant, file.grant_write(offset, len).map_err(|error| told(&error))?)
    };
    outcome(ask())
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_grant_stands(grant: *const Grant) -> c_int {
    // SAFETY: the caller's.
    match unsafe { handle(grant) } {
        Ok(grant) => grant.stands().into(),
        Err(errno) => errno,
    }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_grant_renew(grant: *const Grant) -> c_int {
    // SAFETY: the caller's.
    let grant = unsafe { handle(grant) };
    outcome(grant.and_then(|grant| grant.renew().map_err(|error| told(&error))))
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_grant_free(grant: *mut Grant) {
    // SAFETY: the caller's.
    unsafe { free(grant) }
}

/// # Safety
/// `file` is a handle or null; `old` is null, or a number may be stored there.
unsafe fn atomic(
    file: *const File,
    old: *mut u64,
    work: impl FnOnce(&File) -> Result<u64, NativeError>,
) -> c_int {
    if old.is_null() {
        return invalid("there is no place for the old word");
    }
    // SAFETY: the caller's; the place was checked.
    let work = || unsafe {
        old.write(work(handle(file)?).map_err(|error| told(&error))?);
        Ok(())
    };
    outcome(work())
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_compare_swap(
    file: *const File,
    offset: u64,
    expect: u64,
    swap: u64,
    old: *mut u64,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { atomic(file, old, |file| file.compare_swap(offset, expect, swap)) }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_fetch_add(
    file: *const File,
    offset: u64,
    add: u64,
    old: *mut u64,
) -> c_int {
    // SAFETY: the caller's.
    unsafe { atomic(file, old, |file| file.fetch_add(offset, add)) }
}
