//! Open files.

use crate::errors::{invalid, told};
use crate::layout::Stat;
use crate::pointers::{bytes, free, give, handle, number, outcome, room, text};
use cuttlefs_client::native::{File, NativeError, OpenOptions, Session};
use libc::{c_char, c_int, c_void};

/// The flags that are known.
const FLAGS: c_int = libc::O_ACCMODE
    | libc::O_CREAT
    | libc::O_EXCL
    | libc::O_TRUNC
    | libc::O_SYNC
    | libc::O_DSYNC
    | libc::O_CLOEXEC;

fn options(flags: c_int, mode: u32) -> Result<OpenOptions, c_int> {
    if flags & !FLAGS != 0 {
        return Err(invalid(
            "a flag of the open is not known here; known are O_RDONLY, O_WRONLY, O_RDWR, O_CREAT, O_EXCL, O_TRUNC, O_SYNC, O_DSYNC, O_CLOEXEC; cuttlefs_append() appends",
        ));
    }
    let (read, write) = match flags & libc::O_ACCMODE {
        libc::O_RDONLY => (true, false),
        libc::O_WRONLY => (false, true),
        libc::O_RDWR => (true, true),
        _ => return Err(invalid("the file is opened neither for reading nor for writing")),
    };
    Ok(OpenOptions {
        read,
        write,
        create: flags & libc::O_CREAT != 0,
        exclusive: flags & libc::O_EXCL != 0,
        truncate: flags & libc::O_TRUNC != 0,
        sync: flags & (libc::O_SYNC | libc::O_DSYNC) != 0,
        mode: (mode & 0o7777) as u16,
    })
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_open(
    session: *const Session,
    path: *const c_char,
    flags: c_int,
    mode: u32,
    file: *mut *mut File,
) -> c_int {
    // SAFETY: the caller's.
    let open = || unsafe {
        let (session, path) = (handle(session)?, text(path)?);
        give(file, session.open(path, options(flags, mode)?).map_err(|error| told(&error))?)
    };
    outcome(open())
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_file_free(file: *mut File) {
    // SAFETY: the caller's.
    unsafe { free(file) }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_pread(
    file: *const File,
    into: *mut c_void,
    len: usize,
    offset: u64,
) -> i64 {
    // SAFETY: the caller's.
    let read = || unsafe {
        let (file, into) = (handle(file)?, room(into, len)?);
        file.read_at(offset, into).map_err(|error| told(&error))
    };
    number(read().map(|got| got as u64))
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_pwrite(
    file: *const File,
    from: *const c_void,
    len: usize,
    offset: u64,
) -> i64 {
    // SAFETY: the caller's.
    let write = || unsafe {
        let (file, from) = (handle(file)?, bytes(from, len)?);
        file.write_at(offset, from).map_err(|error| told(&error))
    };
    number(write().map(|()| len as u64))
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_append(file: *const File, from: *const c_void, len: usize) -> i64 {
    // SAFETY: the caller's.
    let append = || unsafe {
        let (file, from) = (handle(file)?, bytes(from, len)?);
        file.append(from).map_err(|error| told(&error))
    };
    number(append())
}

/// Calls `work` with the file.
///
/// # Safety
/// `file` is a handle or null.
unsafe fn of(file: *const File, work: impl FnOnce(&File) -> Result<(), NativeError>) -> c_int {
    // SAFETY: the caller's.
    let file = unsafe { handle(file) };
    outcome(file.and_then(|file| work(file).map_err(|error| told(&error))))
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_fsync(file: *const File) -> c_int {
    // SAFETY: the caller's.
    unsafe { of(file, File::sync) }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_ftruncate(file: *const File, len: u64) -> c_int {
    // SAFETY: the caller's.
    unsafe { of(file, |file| file.set_len(len)) }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_fstat(file: *const File, stat: *mut Stat) -> c_int {
    if stat.is_null() {
        return invalid("there is no place for the attributes");
    }
    // SAFETY: the caller's; the place was checked.
    unsafe {
        of(file, |file| {
            stat.write(Stat::of(&file.stat()?));
            Ok(())
        })
    }
}
