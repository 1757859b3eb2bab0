//! The C library's functions behind the replaced ones, and what else the library asks of it for the calling thread.
//!
//! Threads may be cancelled in these functions (pthread_cancel(3)): the C library unwinds their stacks then, through our frames, which have nothing to drop.
//! So they, and what calls them, are `C-unwind`.

use libc::{c_int, c_void, iovec, off_t, size_t, ssize_t};
use std::sync::atomic::{AtomicPtr, Ordering};

/// A function of the C library that comes after ours.
struct Next {
    name: &'static std::ffi::CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static std::ffi::CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Its address. Looked up at the first call; all calls find the same.
    fn address(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Acquire);
        if !found.is_null() {
            return found;
        }
        // SAFETY: the name is a C string; the next library that has it is the C library, to which this one is linked.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Release);
        found
    }
}

macro_rules! next {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal ($($arg:ident: $type:ty),*) -> $result:ty;)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// As the C library's function.
            pub(crate) unsafe fn $name($($arg: $type),*) -> $result {
                let address = next::$name.address();
                if address.is_null() {
                    // SAFETY: the calling thread's own variable.
                    unsafe { *libc::__errno_location() = libc::ENOSYS };
                    return -1i8 as $result;
                }
                // SAFETY: the C library's function of this name has this type.
                let function: unsafe extern "C-unwind" fn($($type),*) -> $result = unsafe { std::mem::transmute(address) };
                // SAFETY: the caller's.
                unsafe { function($($arg),*) }
            }
        )*
        #[allow(non_upper_case_globals, reason = "each is named as its function")]
        mod next {
            $(pub(super) static $name: super::Next = super::Next::new($symbol);)*
        }

        /// The lookups take locks of the loader and may allocate, so they are done before the program runs.
        pub(crate) fn look_up_all() {
            $(next::$name.address();)*
        }
    };
}

next! {
    /// read(2).
    read = c"read" (fd: c_int, buffer: *mut c_void, count: size_t) -> ssize_t;
    /// pread(2).
    pread = c"pread64" (fd: c_int, buffer: *mut c_void, count: size_t, offset: off_t) -> ssize_t;
    /// readv(2).
    readv = c"readv" (fd: c_int, parts: *const iovec, count: c_int) -> ssize_t;
    /// preadv(2).
    preadv = c"preadv64" (fd: c_int, parts: *const iovec, count: c_int, offset: off_t) -> ssize_t;
    /// read(2), called by programs that were built to check the length of buffers.
    read_chk = c"__read_chk" (fd: c_int, buffer: *mut c_void, count: size_t, room: size_t) -> ssize_t;
    /// pread(2), likewise.
    pread_chk = c"__pread64_chk" (fd: c_int, buffer: *mut c_void, count: size_t, offset: off_t, room: size_t) -> ssize_t;
    /// write(2).
    write = c"write" (fd: c_int, buffer: *const c_void, count: size_t) -> ssize_t;
    /// pwrite(2).
    pwrite = c"pwrite64" (fd: c_int, buffer: *const c_void, count: size_t, offset: off_t) -> ssize_t;
    /// writev(2).
    writev = c"writev" (fd: c_int, parts: *const iovec, count: c_int) -> ssize_t;
    /// pwritev(2).
    pwritev = c"pwritev64" (fd: c_int, parts: *const iovec, count: c_int, offset: off_t) -> ssize_t;
    /// mmap(2).
    mmap = c"mmap64" (address: *mut c_void, len: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void;
    /// close(2).
    close = c"close" (fd: c_int) -> c_int;
}

/// Runs `work` and leaves the calling thread's errno as it was.
pub(crate) fn keeping_errno<T>(work: impl FnOnce() -> T) -> T {
    // SAFETY: the calling thread's own variable, which lives as long as the thread.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    let result = work();
    // SAFETY: as above.
    unsafe { *errno = before };
    result
}

unsafe extern "C-unwind" {
    fn pthread_testcancel();
}

/// Ends the calling thread if somebody has asked for that, as a read does.
pub(crate) fn cancellation_point() {
    // SAFETY: no frame of ours has anything to drop, if the thread is unwound.
    unsafe { pthread_testcancel() }
}
