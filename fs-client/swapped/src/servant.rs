//! The thread that moves pages to the staging area when the swapper asks for them, and ends the process when the swapper is gone.
//!
//! It has **a descriptor table of its own**: a program may close any number, and must not find ours; its table may be full, which a forked process cannot
//! mend; and none of the program's descriptors may stay open here, for a pipe would never end. So the thread itself connects to the swapper. It holds the process's userfaultfd, too: as long as one holds it, the kernel lets nobody go on who waits for a page,
//! and so nobody sees zeros in its place when the swapper is killed. Once it has connected, it allocates nothing, and touches no memory that is swapped.

use cuttlefs_client::signals::{self, Signals};
use cuttlefs_client::swap::sys::{Purpose, Uffd};
use cuttlefs_client::swap::wire::{ANSWER_MAX, Hello, PAGE, Plan, TAKE_LEN, TAKE_MAX, Taken, WELCOME};
use cuttlefs_client::swap::{receive_with, send_with};
use libc::{c_uint, c_void};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Room for the stack; it holds the thread-local variables of all libraries, besides.
const STACK: usize = 256 * 1024;

/// Set by the thread when it is done with its `Start`: from then on it serves, or `REFUSED` says why not.
static IS_DONE: AtomicBool = AtomicBool::new(false);
static REFUSED: Mutex<Option<io::Error>> = Mutex::new(None);

/// What the thread begins with.
pub(crate) struct Start<'p> {
    pub(crate) plan: &'p Plan,
    pub(crate) hello: Hello,
    pub(crate) staging_at: usize,
}

/// What the thread holds.
struct Held {
    socket: OwnedFd,
    _swapped: Uffd,
    staging: Uffd,
}

/// Starts the thread. When this returns the swapper has taken the process in.
pub(crate) fn start(start: Start<'_>) -> io::Result<()> {
    IS_DONE.store(false, Ordering::Relaxed);
    // Handlers are the program's, and run in its threads.
    let before = signals::block(Signals::ALL);
    // SAFETY: the all-zero attributes are filled before they are used; all of it is this function's own. The thread has `start` until it is done.
    let failed = unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        let mut thread: libc::pthread_t = std::mem::zeroed();
        libc::pthread_attr_init(&mut attributes);
        libc::pthread_attr_setstacksize(&mut attributes, STACK);
        libc::pthread_attr_setdetachstate(&mut attributes, libc::PTHREAD_CREATE_DETACHED);
        let given = (&raw const start).cast_mut().cast();
        let failed = libc::pthread_create(&mut thread, &attributes, serve, given);
        libc::pthread_attr_destroy(&mut attributes);
        failed
    };
    signals::block_only(before);
    if failed != 0 {
        return Err(io::Error::from_raw_os_error(failed));
    }
    while !IS_DONE.load(Ordering::Acquire) {
        std::thread::yield_now();
    }
    let refused = REFUSED.lock().ok().and_then(|mut refused| refused.take());
    refused.map_or(Ok(()), Err)
}

extern "C" fn serve(given: *mut c_void) -> *mut c_void {
    let (joined, staging_at) = {
        // SAFETY: `start` has it, and waits until this thread is done with it.
        let start = unsafe { &*given.cast_const().cast::<Start<'_>>() };
        (own_table().and_then(|()| join(start)), start.staging_at as u64)
    };
    let held = match joined {
        Ok(held) => held,
        Err(error) => {
            if let Ok(mut refused) = REFUSED.lock() {
                *refused = Some(error);
            }
            IS_DONE.store(true, Ordering::Release);
            return std::ptr::null_mut();
        }
    };
    IS_DONE.store(true, Ordering::Release);
    take_pages(held.socket.as_raw_fd(), &held.staging, staging_at);
    // With what it holds.
    loop {
        // SAFETY: no pointers. The swapper is gone, and the memory with it.
        unsafe {
            libc::kill(libc::getpid(), libc::SIGKILL);
            libc::pause();
        }
    }
}

/// Gets a table of its own, in which nothing is.
fn own_table() -> io::Result<()> {
    // SAFETY: the calling thread alone is concerned, and has no descriptor.
    let is_own = unsafe {
        libc::unshare(libc::CLONE_FILES) == 0 && libc::syscall(libc::SYS_close_range, 0, c_uint::MAX, 0) == 0
    };
    if is_own { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Connects, says hello, and waits for the answer.
fn join(start: &Start<'_>) -> io::Result<Held> {
    let own = match start.hello {
        Hello::Begun { .. } => Some(Uffd::create(Purpose::Swapped)?),
        Hello::Forked { .. } => None,
    };
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let mut answer = [0; ANSWER_MAX];
    let mut ask = || -> io::Result<_> {
        connect(&socket, &SocketAddrUnix::new(&start.plan.socket)?)?;
        send_with(&socket, &start.hello.encode(), own.as_ref().map(Uffd::as_fd))?;
        receive_with(&socket, &mut answer)
    };
    let ended = || io::Error::other("cuttlefs swap has ended");
    let (len, came) = ask().map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::ECONNREFUSED | libc::ECONNRESET | libc::EPIPE) => ended(),
        _ => error,
    })?;
    match &answer[..len] {
        [WELCOME] => {}
        [] => return Err(ended()),
        reason => return Err(io::Error::other(String::from_utf8_lossy(reason).into_owned())),
    }
    let swapped = own.or(came.map(Uffd::from)).ok_or_else(|| io::Error::other("no userfaultfd came"))?;
    let staging = Uffd::create(Purpose::Staging)?;
    staging.register(start.staging_at as u64, (TAKE_MAX * PAGE) as u64)?;
    Ok(Held { socket, _swapped: swapped, staging })
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
            // The swapper has read them. A place that is not empty would pass for one that a page has come to.
            // SAFETY: the staging area is this thread's alone.
            if unsafe { libc::syscall(libc::SYS_madvise, at, staged * PAGE, libc::MADV_DONTNEED) } != 0 {
                return;
            }
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

/// Moves a page to a place that is empty.
fn take(staging: &Uffd, to: u64, page: u64) -> Taken {
    match try_to_take(staging, to, page) {
        Taken::Staged => Taken::Staged,
        // While the kernel migrates pages (compaction), it may move one, look at it once more, and say that there is one at the place already: EEXIST (seen
        // with 6.18). So the place tells, and not the error.
        _ if is_there(to) => Taken::Staged,
        other => other,
    }
}

fn try_to_take(staging: &Uffd, to: u64, page: u64) -> Taken {
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

/// Whether a page is at a place of the staging area.
fn is_there(place: u64) -> bool {
    let mut answer = 0u8;
    // SAFETY: the kernel writes one byte for one page; the place is of the staging area, which stays mapped.
    let asked = unsafe { libc::syscall(libc::SYS_mincore, place, PAGE, &raw mut answer) };
    asked == 0 && answer & 1 == 1
}
