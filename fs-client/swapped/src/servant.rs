//! The thread that moves pages to the staging area when the swapper asks for them, and ends the process when the swapper is gone.
//!
//! It has **a descriptor table of its own**: a program may close any number, and must not find ours; and none of the program's descriptors may stay open
//! here, for a pipe would never end. It holds the process's userfaultfd, too: as long as one holds it, the kernel lets nobody go on who waits for a page,
//! and so nobody sees zeros in its place when the swapper is killed. It allocates nothing, and touches no memory that is swapped.

use cuttlefs_client::signals::{self, Signals};
use cuttlefs_client::swap::sys::Uffd;
use cuttlefs_client::swap::wire::{PAGE, TAKE_LEN, TAKE_MAX, Taken};
use libc::{c_int, c_uint, c_void};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

/// Room for the stack; it holds the thread-local variables of all libraries, besides.
const STACK: usize = 256 * 1024;

// Written by who starts the thread (relaxed: the start orders them), read by the thread.
static SOCKET: AtomicI32 = AtomicI32::new(-1);
static SWAPPED: AtomicI32 = AtomicI32::new(-1);
static STAGING_FD: AtomicI32 = AtomicI32::new(-1);
static STAGING: AtomicU64 = AtomicU64::new(0);
/// Set by the thread when it has its own table.
static HAS_TABLE: AtomicBool = AtomicBool::new(false);

/// What the thread holds.
pub(crate) struct Held {
    pub(crate) socket: OwnedFd,
    pub(crate) swapped: Uffd,
    pub(crate) staging: Uffd,
    pub(crate) staging_at: u64,
}

/// Starts the thread. When this returns the descriptors are its own.
pub(crate) fn start(held: Held) -> io::Result<()> {
    let (swapped, staging) = (OwnedFd::from(held.swapped), OwnedFd::from(held.staging));
    SOCKET.store(held.socket.as_raw_fd(), Ordering::Relaxed);
    SWAPPED.store(swapped.as_raw_fd(), Ordering::Relaxed);
    STAGING_FD.store(staging.as_raw_fd(), Ordering::Relaxed);
    STAGING.store(held.staging_at, Ordering::Relaxed);
    HAS_TABLE.store(false, Ordering::Relaxed);
    // Handlers are the program's, and run in its threads.
    let before = signals::block(Signals::ALL);
    // SAFETY: the all-zero attributes are filled before they are used; all of it is this function's own. The thread gets no pointer.
    let failed = unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        let mut thread: libc::pthread_t = std::mem::zeroed();
        libc::pthread_attr_init(&mut attributes);
        libc::pthread_attr_setstacksize(&mut attributes, STACK);
        libc::pthread_attr_setdetachstate(&mut attributes, libc::PTHREAD_CREATE_DETACHED);
        let failed = libc::pthread_create(&mut thread, &attributes, serve, std::ptr::null_mut());
        libc::pthread_attr_destroy(&mut attributes);
        failed
    };
    signals::block_only(before);
    if failed != 0 {
        return Err(io::Error::from_raw_os_error(failed));
    }
    while !HAS_TABLE.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
    // The thread has copies.
    Ok(())
}

extern "C" fn serve(_: *mut c_void) -> *mut c_void {
    let socket = SOCKET.load(Ordering::Relaxed);
    let fds = [socket, SWAPPED.load(Ordering::Relaxed), STAGING_FD.load(Ordering::Relaxed)];
    let has_table = own_table(fds);
    HAS_TABLE.store(true, Ordering::Release);
    if has_table {
        // SAFETY: the number is of a descriptor that is this table's, and nobody else closes it.
        let staging = Uffd::from(unsafe { OwnedFd::from_raw_fd(fds[2]) });
        take_pages(socket, &staging, STAGING.load(Ordering::Relaxed));
    }
    loop {
        // SAFETY: no pointers. The swapper is gone, and the memory with it.
        unsafe {
            libc::kill(libc::getpid(), libc::SIGKILL);
            libc::pause();
        }
    }
}

/// Gets a table of its own, and closes all but these.
fn own_table(mut fds: [RawFd; 3]) -> bool {
    fds.sort_unstable();
    // SAFETY: the calling thread alone is concerned, and uses none of the descriptors that are closed.
    unsafe {
        if libc::unshare(libc::CLONE_FILES) != 0 {
            return false;
        }
        let close = |first: c_int, last: c_uint| {
            first as c_uint > last || libc::syscall(libc::SYS_close_range, first as c_uint, last, 0) == 0
        };
        let mut first = 0;
        for fd in fds {
            if fd > 0 && !close(first, fd as c_uint - 1) {
                return false;
            }
            first = fd + 1;
        }
        close(first, c_uint::MAX)
    }
}

/// Says that it is there, and does what it is asked for until the swapper is gone.
fn take_pages(socket: RawFd, staging: &Uffd, at: u64) {
    // SAFETY: no pointers.
    let thread = unsafe { libc::gettid() } as u32;
    if !send(socket, &thread.to_ne_bytes()) {
        return;
    }
    let mut staged = 0;
    loop {
        let mut request = [0u8; TAKE_LEN];
        // SAFETY: the buffer is this function's own.
        let len = unsafe { libc::recv(socket, request.as_mut_ptr().cast(), TAKE_LEN, 0) };
        if len <= 0 {
            return;
        }
        if staged > 0 {
            // The swapper has read them.
            // SAFETY: the staging area is this thread's alone.
            unsafe { libc::syscall(libc::SYS_madvise, at, staged * PAGE, libc::MADV_DONTNEED) };
        }
        let pages = request[..len as usize].as_chunks::<8>().0;
        let mut answer = [Taken::Held as u8; TAKE_MAX];
        for (place, (page, taken)) in pages.iter().zip(&mut answer).enumerate() {
            *taken = take(staging, at + (place * PAGE) as u64, u64::from_ne_bytes(*page)) as u8;
        }
        staged = pages.len();
        if !send(socket, &answer[..pages.len()]) {
            return;
        }
    }
}

fn send(socket: RawFd, bytes: &[u8]) -> bool {
    // SAFETY: the bytes live until the call returns.
    let sent = unsafe { libc::send(socket, bytes.as_ptr().cast(), bytes.len(), libc::MSG_NOSIGNAL) };
    sent == bytes.len() as isize
}

fn take(staging: &Uffd, to: u64, page: u64) -> Taken {
    let refused = |error: &io::Error, errno| error.raw_os_error() == Some(errno);
    match staging.move_page(to, page) {
        Ok(()) => Taken::Staged,
        Err(error) if refused(&error, libc::ENOENT) => Taken::Absent,
        Err(error) if refused(&error, libc::EBUSY) => {
            // It may be shared since a fork. Then this makes it this process's own, as a write would, and changes no byte of it.
            // SAFETY: no byte is changed; a range that is no longer mapped is an error.
            unsafe { libc::syscall(libc::SYS_madvise, page, PAGE, libc::MADV_POPULATE_WRITE) };
            match staging.move_page(to, page) {
                Ok(()) => Taken::Staged,
                Err(_) => Taken::Held,
            }
        }
        Err(_) => Taken::Held,
    }
}
