//! The functions of the C library that are replaced. Each asks [`reader`], and calls the function behind it for what is left.
//!
//! A panic of these functions ends the process: they are `extern "C"`.

use crate::descriptor::{self, Regular};
use crate::kernel;
use crate::reader::{self, From};
use crate::state::{self, State};
use cuttlefs_client::native::{File, NativeError};
use cuttlefs_client::preload::Count;
use libc::{c_int, c_void, iovec, off_t, size_t, ssize_t};

/// The most bytes of one read(2), as Linux has it.
const READ_MAX: usize = 0x7fff_f000;
/// The most parts of a readv(2) that are looked at; more are an error, which the kernel tells.
const PARTS_MAX: usize = 1024;

#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = end;

extern "C" fn begin() {
    state::begin();
}

extern "C" fn end() {
    state::end();
}

/// Reads into one buffer of the program's.
///
/// # Safety
/// The program has given `count` bytes at `buffer` to be written, as for read(2).
unsafe fn into_buffer(fd: c_int, from: From, buffer: *mut c_void, count: size_t) -> Option<ssize_t> {
    // To the kernel: it tells of bad addresses by EFAULT.
    if buffer.is_null() || state::get().is_none() {
        return None;
    }
    let count = count.min(READ_MAX);
    let fill = |file: &File, at: u64, len: usize| {
        // SAFETY: `len` is at most `count`, and the caller has given so many bytes. They are written only.
        let out = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), len) };
        file.read_at(at, out)
    };
    kernel::keeping_errno(|| reader::read(fd, from, count, fill)).map(|got| got as ssize_t)
}

/// Reads into several buffers of the program's.
///
/// # Safety
/// The program has given `count` parts, each with its bytes to be written, as for readv(2).
unsafe fn into_parts(fd: c_int, from: From, parts: *const iovec, count: c_int) -> Option<ssize_t> {
    let count = usize::try_from(count).ok().filter(|count| (1..=PARTS_MAX).contains(count))?;
    if parts.is_null() || state::get().is_none() {
        return None;
    }
    // SAFETY: the caller has given so many parts.
    let parts = unsafe { std::slice::from_raw_parts(parts, count) };
    let mut total = 0usize;
    for part in parts {
        total = total.checked_add(part.iov_len).filter(|total| *total <= READ_MAX)?;
        if part.iov_len > 0 && part.iov_base.is_null() {
            return None;
        }
    }
    let fill = |file: &File, at: u64, len: usize| -> Result<usize, NativeError> {
        let mut done = 0;
        for part in parts.iter().filter(|part| part.iov_len > 0) {
            let wanted = part.iov_len.min(len - done);
            if wanted == 0 {
                break;
            }
            // SAFETY: the caller has given the part's bytes. They are written only.
            let out = unsafe { std::slice::from_raw_parts_mut(part.iov_base.cast::<u8>(), wanted) };
            let got = file.read_at(at + done as u64, out)?;
            done += got;
            if got < wanted {
                break;
            }
        }
        Ok(done)
    };
    kernel::keeping_errno(|| reader::read(fd, from, total, fill)).map(|got| got as ssize_t)
}

/// # Safety
/// As read(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, count: size_t) -> ssize_t {
    // SAFETY: the caller's.
    unsafe { into_buffer(fd, From::Offset, buffer, count).unwrap_or_else(|| kernel::read(fd, buffer, count)) }
}

/// # Safety
/// As read(2); `room` is the length of the buffer, as the compiler knows it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __read_chk(fd: c_int, buffer: *mut c_void, count: size_t, room: size_t) -> ssize_t {
    // The C library ends a program that reads more than it has room for.
    // SAFETY: the caller's.
    unsafe {
        let taken = if count > room { None } else { into_buffer(fd, From::Offset, buffer, count) };
        taken.unwrap_or_else(|| kernel::read_chk(fd, buffer, count, room))
    }
}

/// # Safety
/// As pread(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pread64(fd: c_int, buffer: *mut c_void, count: size_t, offset: off_t) -> ssize_t {
    // SAFETY: the caller's.
    unsafe {
        into_buffer(fd, From::Place(offset), buffer, count)
            .unwrap_or_else(|| kernel::pread(fd, buffer, count, offset))
    }
}

/// # Safety
/// As pread(2). On machines with 64-bit words it is `pread64`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pread(fd: c_int, buffer: *mut c_void, count: size_t, offset: off_t) -> ssize_t {
    // SAFETY: the caller's.
    unsafe { pread64(fd, buffer, count, offset) }
}

/// # Safety
/// As `__read_chk`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __pread64_chk(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    offset: off_t,
    room: size_t,
) -> ssize_t {
    // SAFETY: the caller's.
    unsafe {
        let taken = if count > room { None } else { into_buffer(fd, From::Place(offset), buffer, count) };
        taken.unwrap_or_else(|| kernel::pread_chk(fd, buffer, count, offset, room))
    }
}

/// # Safety
/// As `__pread64_chk`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __pread_chk(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    offset: off_t,
    room: size_t,
) -> ssize_t {
    // SAFETY: the caller's.
    unsafe { __pread64_chk(fd, buffer, count, offset, room) }
}

/// # Safety
/// As readv(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readv(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the caller's.
    unsafe { into_parts(fd, From::Offset, parts, count).unwrap_or_else(|| kernel::readv(fd, parts, count)) }
}

/// # Safety
/// As preadv(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn preadv64(fd: c_int, parts: *const iovec, count: c_int, offset: off_t) -> ssize_t {
    // SAFETY: the caller's.
    unsafe {
        into_parts(fd, From::Place(offset), parts, count)
            .unwrap_or_else(|| kernel::preadv(fd, parts, count, offset))
    }
}

/// # Safety
/// As preadv(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn preadv(fd: c_int, parts: *const iovec, count: c_int, offset: off_t) -> ssize_t {
    // SAFETY: the caller's.
    unsafe { preadv64(fd, parts, count, offset) }
}

/// The state and the file, if the descriptor is of a file of a mount. Not in signal handlers that interrupt this library.
fn ours(fd: c_int) -> Option<(&'static State, Regular)> {
    let state = state::get()?;
    let found = descriptor::regular(fd, |device| state.mount_of(device).is_some())?;
    Some((state, found))
}

fn note_write(fd: c_int) {
    if state::get().is_some_and(State::counts)
        && let Some((state, _)) = kernel::keeping_errno(|| ours(fd))
    {
        state.count(Count::LeftWrites, 1);
    }
}

/// # Safety
/// As write(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, buffer: *const c_void, count: size_t) -> ssize_t {
    note_write(fd);
    // SAFETY: the caller's.
    unsafe { kernel::write(fd, buffer, count) }
}

/// # Safety
/// As pwrite(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwrite64(fd: c_int, buffer: *const c_void, count: size_t, offset: off_t) -> ssize_t {
    note_write(fd);
    // SAFETY: the caller's.
    unsafe { kernel::pwrite(fd, buffer, count, offset) }
}

/// # Safety
/// As pwrite(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwrite(fd: c_int, buffer: *const c_void, count: size_t, offset: off_t) -> ssize_t {
    // SAFETY: the caller's.
    unsafe { pwrite64(fd, buffer, count, offset) }
}

/// # Safety
/// As writev(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    note_write(fd);
    // SAFETY: the caller's.
    unsafe { kernel::writev(fd, parts, count) }
}

/// # Safety
/// As pwritev(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwritev64(fd: c_int, parts: *const iovec, count: c_int, offset: off_t) -> ssize_t {
    note_write(fd);
    // SAFETY: the caller's.
    unsafe { kernel::pwritev(fd, parts, count, offset) }
}

/// # Safety
/// As pwritev(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pwritev(fd: c_int, parts: *const iovec, count: c_int, offset: off_t) -> ssize_t {
    // SAFETY: the caller's.
    unsafe { pwritev64(fd, parts, count, offset) }
}

/// Notes a mapping before it is there. A shared one of a descriptor that may be written can be written, now or after an mprotect(2).
fn note_map(fd: c_int, protection: c_int, flags: c_int) {
    let Some((state, found)) = ours(fd) else { return };
    state.count(Count::LeftMaps, 1);
    let is_shared = matches!(flags & libc::MAP_TYPE, libc::MAP_SHARED | libc::MAP_SHARED_VALIDATE);
    let may_write = protection & libc::PROT_WRITE != 0 || descriptor::is_writable(fd);
    // In a forked process nothing is read past the kernel, and its locks may be held by nobody.
    if is_shared && may_write && !state::is_forked() {
        let inside = state::enter();
        state.mapped.add(found.id);
        if inside.is_some() {
            state.files.forget(found.id);
        }
    }
}

/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    if fd >= 0 && flags & libc::MAP_ANONYMOUS == 0 {
        kernel::keeping_errno(|| note_map(fd, protection, flags));
    }
    // SAFETY: the caller's.
    unsafe { kernel::mmap(address, len, protection, flags, fd, offset) }
}

/// # Safety
/// As mmap(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's.
    unsafe { mmap64(address, len, protection, flags, fd, offset) }
}

/// # Safety
/// As close(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    if state::get().is_some_and(|state| !state.files.is_empty()) && !state::is_forked() {
        kernel::keeping_errno(|| {
            if let Some((state, found)) = ours(fd)
                && let Some(_inside) = state::enter()
            {
                state.files.forget(found.id);
            }
        });
    }
    // SAFETY: the caller's.
    unsafe { kernel::close(fd) }
}
