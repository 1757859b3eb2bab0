//! Errors as C programs see them: a negative errno, and words for people.

use cuttlefs_client::fuse::errno_of;
use cuttlefs_client::native::NativeError;
use libc::{c_char, c_int};
use std::cell::RefCell;
use std::ffi::CString;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Notes the error, and returns its negative errno.
pub(crate) fn told(error: &NativeError) -> c_int {
    let errno = match error {
        NativeError::Server(status) => errno_of(*status),
        NativeError::FileLost | NativeError::RegionEnded => libc::ESTALE,
        NativeError::KeyRefused => libc::EACCES,
        NativeError::OutsideRegion { .. } => libc::ERANGE,
        NativeError::GrantOverlaps => libc::EEXIST,
        NativeError::PastEnd => libc::ENXIO,
        NativeError::MayBeDone => libc::ECONNABORTED,
        NativeError::BytesLost => libc::EIO,
        NativeError::Deadline { .. } => libc::ETIMEDOUT,
        NativeError::Closed => libc::ESHUTDOWN,
        NativeError::NotOpenFor(_) => libc::EBADF,
        NativeError::AbsoluteLink => libc::EXDEV,
        NativeError::LinkLoop { .. } => libc::ELOOP,
        NativeError::IsRoot => libc::EBUSY,
        NativeError::Connect(_) => libc::ECONNREFUSED,
        NativeError::QueueFull { .. } | NativeError::Busy { .. } => libc::EAGAIN,
        NativeError::Url(_)
        | NativeError::PastBuffer { .. }
        | NativeError::TooLong { .. }
        | NativeError::GrantLength { .. }
        | NativeError::Unaligned
        | NativeError::Depth { .. } => libc::EINVAL,
        NativeError::Resources(_) => libc::ENOMEM,
    };
    note(&error.to_string());
    -errno
}

/// An argument that cannot be meant.
pub(crate) fn invalid(why: &str) -> c_int {
    note(why);
    -libc::EINVAL
}

/// What cannot be had in this process.
pub(crate) fn unsupported(why: &str) -> c_int {
    note(why);
    -libc::EOPNOTSUPP
}

fn note(text: &str) {
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    LAST.set(text);
}

/// See `cuttlefs.h`.
#[unsafe(no_mangle)]
pub extern "C" fn cuttlefs_error() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}
