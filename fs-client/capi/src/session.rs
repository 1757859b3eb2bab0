//! Sessions and names.

use crate::errors::{invalid, told};
use crate::forked;
use crate::layout::{Options, Stat};
use crate::pointers::{free, give, handle, optional, outcome, text};
use cuttlefs_client::native::{ConnectOptions, NativeError, Session, Trust};
use libc::{c_char, c_int, c_void};
use std::ffi::{CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

/// # Safety
/// The pointers in `options` are null or C strings.
unsafe fn options(options: &Options) -> Result<ConnectOptions, c_int> {
    let mut wanted = ConnectOptions::default();
    // SAFETY: the caller's.
    let (key, label, subtree) =
        unsafe { (optional(options.key), optional(options.label), optional(options.subtree)) };
    let user = u32::try_from(options.server_user).map_err(|_| invalid("server_user is no user"))?;
    wanted.trust =
        Trust { key: key.map(|key| OsStr::from_bytes(key).into()), server_user: (user != 0).then_some(user) };
    wanted.label = label.map(|label| String::from_utf8_lossy(label).into_owned()).unwrap_or_default();
    wanted.subtree = subtree.unwrap_or_default().to_vec();
    if options.threads > 0 {
        wanted.threads = options.threads as usize;
    }
    wanted.deadline = (options.deadline_ms > 0).then(|| Duration::from_millis(options.deadline_ms.into()));
    Ok(wanted)
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_connect(
    url: *const c_char,
    wanted: *const Options,
    session: *mut *mut Session,
) -> c_int {
    // SAFETY: the caller's.
    let connect = || unsafe {
        forked::watch()?;
        let url = text(url)?;
        let url = str::from_utf8(url).map_err(|_| invalid("the URL is not text"))?;
        let wanted = wanted.as_ref().map(|wanted| options(wanted)).transpose()?.unwrap_or_default();
        give(session, Session::connect(url, wanted).map_err(|error| told(&error))?)
    };
    outcome(connect())
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_session_free(session: *mut Session) {
    // SAFETY: the caller's.
    unsafe { free(session) }
}

/// Calls `work` with the session and a path.
///
/// # Safety
/// `session` is a handle or null, `path` a C string or null.
unsafe fn at(
    session: *const Session,
    path: *const c_char,
    work: impl FnOnce(&Session, &[u8]) -> Result<(), NativeError>,
) -> c_int {
    // SAFETY: the caller's.
    let arguments = unsafe { handle(session).and_then(|session| Ok((session, text(path)?))) };
    outcome(arguments.and_then(|(session, path)| work(session, path).map_err(|error| told(&error))))
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_stat(
    session: *const Session,
    path: *const c_char,
    stat: *mut Stat,
) -> c_int {
    if stat.is_null() {
        return invalid("there is no place for the attributes");
    }
    // SAFETY: the caller's; the place was checked.
    unsafe {
        at(session, path, |session, path| {
            stat.write(Stat::of(&session.stat(path)?));
            Ok(())
        })
    }
}

/// Permission bits.
fn bits(mode: u32) -> u16 {
    (mode & 0o7777) as u16
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_mkdir(session: *const Session, path: *const c_char, mode: u32) -> c_int {
    // SAFETY: the caller's.
    unsafe { at(session, path, |session, path| session.mkdir(path, bits(mode)).map(drop)) }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_unlink(session: *const Session, path: *const c_char) -> c_int {
    // SAFETY: the caller's.
    unsafe { at(session, path, |session, path| session.unlink(path)) }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_rmdir(session: *const Session, path: *const c_char) -> c_int {
    // SAFETY: the caller's.
    unsafe { at(session, path, |session, path| session.rmdir(path)) }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_rename(
    session: *const Session,
    from: *const c_char,
    to: *const c_char,
) -> c_int {
    // SAFETY: the caller's.
    let to = match unsafe { text(to) } {
        Ok(to) => to,
        Err(errno) => return errno,
    };
    // SAFETY: the caller's.
    unsafe { at(session, from, |session, from| session.rename(from, to)) }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_truncate(session: *const Session, path: *const c_char, len: u64) -> c_int {
    // SAFETY: the caller's.
    unsafe { at(session, path, |session, path| session.truncate(path, len)) }
}

/// # Safety
/// As `cuttlefs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuttlefs_readdir(
    session: *const Session,
    path: *const c_char,
    take: Option<unsafe extern "C" fn(*mut c_void, *const c_char, u64) -> c_int>,
    context: *mut c_void,
) -> c_int {
    let Some(take) = take else { return invalid("there is no function that takes names") };
    // SAFETY: the caller's.
    unsafe {
        at(session, path, |session, path| {
            session.read_dir(path, |entry| {
                // The server does not give out names with a NUL.
                let Ok(name) = CString::new(entry.name) else { return true };
                take(context, name.as_ptr(), entry.ino.0) == 0
            })
        })
    }
}
