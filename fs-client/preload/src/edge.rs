//! The functions of the C library that are replaced. Each asks [`reader`], and calls the function behind it for what is left.
//!
//! A panic of these functions ends the process: the hook says so. They are `extern "C-unwind"`, because threads may be cancelled in the functions
//! behind them (`kernel`).

use crate::descriptor::{self, Regular};
use crate::kernel;
use crate::reader::{self, From, Taken};
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
unsafe fn into_buffer(fd: c_int, from: From, buffer: *mut c_void, count: size_t) -> Taken {
    // To the kernel: it tells of bad addresses by EFAULT.
    if buffer.is_null() || state::get().is_none() {
        return Taken::Left;
    }
    kernel::cancellation_point();
    let count = count.min(READ_MAX);
    let fill = |file: &File, at: u64, len: usize| {
        // SAFETY: `len` is at most `count`, and the caller has given so many bytes. They are written only.
        let out = unsafe { std::slice::from_raw_parts_mut(buffer.cast::<u8>(), len) };
        file.read_at(at, out)
    };
    kernel::keeping_errno(|| reader::read(fd, from, count, fill))
}

/// Reads into several buffers of the program's.
///
/// # Safety
/// The program has given `count` parts, each with its bytes to be written, as for readv(2).
unsafe fn into_parts(fd: c_int, from: From, parts: *const iovec, count: c_int) -> Taken {
    let count = usize::try_from(count).ok().filter(|count| (1..=PARTS_MAX).contains(count));
    let Some(count) = count.filter(|_| !parts.is_null() && state::get().is_some()) else {
        return Taken::Left;
    };
    kernel::cancellation_point();
    // SAFETY: the caller has given so many parts.
    let parts = unsafe { std::slice::from_raw_parts(parts, count) };
    let is_bad = |part: &iovec| part.iov_len > 0 && part.iov_base.is_null();
    let add = |total: usize, part: &iovec| total.checked_add(part.iov_len).filter(|_| !is_bad(part));
    let total = parts.iter().try_fold(0, add).filter(|total| *total <= READ_MAX);
    let Some(total) = total else { return Taken::Left };
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
    kernel::keeping_errno(|| reader::read(fd, from, total, fill))
}

/// The result of a read at the offset: what was taken, or what the kernel does, by `whole` or at the place that was claimed by `at_place`.
fn result(
    fd: c_int,
    taken: Taken,
    whole: impl FnOnce() -> ssize_t,
    at_place: impl FnOnce(size_t, off_t) -> ssize_t,
) -> ssize_t {
    match taken {
        Taken::Got(got) => got as ssize_t,
        Taken::Left => whole(),
        Taken::Claimed { at, len } => {
            let got = at_place(len, at as off_t);
            let missing = len as i64 - got.max(0) as i64;
            if missing > 0 {
                // It fails only if the program has closed the descriptor meanwhile.
                kernel::keeping_errno(|| descriptor::move_by(fd, -missing));
            }
            got
        }
    }
}

/// The result of a read at a place, for which no offset moves: what was taken, or what the kernel does.
fn result_at_place(taken: Taken, by_kernel: impl FnOnce() -> ssize_t) -> ssize_t {
    match taken {
        Taken::Got(got) => got as ssize_t,
        Taken::Left | Taken::Claimed { .. } => by_kernel(),
    }
}

/// # Safety
/// As read(2).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn read(fd: c_int, buffer: *mut c_void, count: size_t) -> ssize_t {
    // SAFETY: the caller's.
    let taken = unsafe { into_buffer(fd, From::Offset, buffer, count) };
    // SAFETY: the caller's; what is claimed is no longer than `count`.
    let whole = || unsafe { kernel::read(fd, buffer, count) };
    // SAFETY: as above.
    result(fd, taken, whole, |len, at| unsafe { kernel::pread(fd, buffer, len, at) })
}

/// # Safety
/// As read(2); `room` is the length of the buffer, as the compiler knows it.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __read_chk(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    room: size_t,
) -> ssize_t {
    if count > room {
        // The C library ends a program that reads more than it has room for.
        // SAFETY: the caller's.
        return unsafe { kernel::read_chk(fd, buffer, count, room) };
    }
    // SAFETY: the caller's.
    unsafe { read(fd, buffer, count) }
}

/// # Safety
/// As pread(2).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pread64(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    offset: off_t,
) -> ssize_t {
    // SAFETY: the caller's.
    let taken = unsafe { into_buffer(fd, From::Place(offset), buffer, count) };
    // SAFETY: the caller's.
    result_at_place(taken, || unsafe { kernel::pread(fd, buffer, count, offset) })
}

/// # Safety
/// As pread(2). On machines with 64-bit words it is `pread64`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pread(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    offset: off_t,
) -> ssize_t {
    // SAFETY: the caller's.
    unsafe { pread64(fd, buffer, count, offset) }
}

/// # Safety
/// As `__read_chk`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __pread64_chk(
    fd: c_int,
    buffer: *mut c_void,
    count: size_t,
    offset: off_t,
    room: size_t,
) -> ssize_t {
    if count > room {
        // SAFETY: the caller's.
        return unsafe { kernel::pread_chk(fd, buffer, count, offset, room) };
    }
    // SAFETY: the caller's.
    unsafe { pread64(fd, buffer, count, offset) }
}

/// # Safety
/// As `__pread64_chk`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __pread_chk(
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
pub unsafe extern "C-unwind" fn readv(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    // SAFETY: the caller's.
    let taken = unsafe { into_parts(fd, From::Offset, parts, count) };
    // SAFETY: the caller's; what is claimed is all parts.
    let whole = || unsafe { kernel::readv(fd, parts, count) };
    // SAFETY: as above.
    result(fd, taken, whole, |_, at| unsafe { kernel::preadv(fd, parts, count, at) })
}

/// # Safety
/// As preadv(2).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn preadv64(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
) -> ssize_t {
    // SAFETY: the caller's.
    let taken = unsafe { into_parts(fd, From::Place(offset), parts, count) };
    // SAFETY: the caller's.
    result_at_place(taken, || unsafe { kernel::preadv(fd, parts, count, offset) })
}

/// # Safety
/// As preadv(2).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn preadv(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
) -> ssize_t {
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
pub unsafe extern "C-unwind" fn write(fd: c_int, buffer: *const c_void, count: size_t) -> ssize_t {
    note_write(fd);
    // SAFETY: the caller's.
    unsafe { kernel::write(fd, buffer, count) }
}

/// # Safety
/// As pwrite(2).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwrite64(
    fd: c_int,
    buffer: *const c_void,
    count: size_t,
    offset: off_t,
) -> ssize_t {
    note_write(fd);
    // SAFETY: the caller's.
    unsafe { kernel::pwrite(fd, buffer, count, offset) }
}

/// # Safety
/// As pwrite(2).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwrite(
    fd: c_int,
    buffer: *const c_void,
    count: size_t,
    offset: off_t,
) -> ssize_t {
    // SAFETY: the caller's.
    unsafe { pwrite64(fd, buffer, count, offset) }
}

/// # Safety
/// As writev(2).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn writev(fd: c_int, parts: *const iovec, count: c_int) -> ssize_t {
    note_write(fd);
    // SAFETY: the caller's.
    unsafe { kernel::writev(fd, parts, count) }
}

/// # Safety
/// As pwritev(2).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev64(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
) -> ssize_t {
    note_write(fd);
    // SAFETY: the caller's.
    unsafe { kernel::pwritev(fd, parts, count, offset) }
}

/// # Safety
/// As pwritev(2).
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn pwritev(
    fd: c_int,
    parts: *const iovec,
    count: c_int,
    offset: off_t,
) -> ssize_t {
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
pub unsafe extern "C-unwind" fn mmap64(
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
pub unsafe extern "C-unwind" fn mmap(
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
pub unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
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
