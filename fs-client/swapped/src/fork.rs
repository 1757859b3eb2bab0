//! Forks: a child's memory is its own, and so are its thread, its connection and its userfaultfd. Until it has them its pages come, and none leaves.
//!
//! A child that is made past the C library (clone(2) by syscall(2)) runs none of this: its pages come, none leaves, and nothing ends it with the swapper.

use crate::arena::ARENA;
use crate::begin::{end, laid, reach, serve, staging_area, welcome};
use cuttlefs_client::swap::send_with;
use cuttlefs_client::swap::sys::Uffd;
use cuttlefs_client::swap::wire::Hello;
use std::io;

unsafe extern "C" {
    fn pthread_atfork(
        prepare: extern "C" fn(),
        parent: extern "C" fn(),
        child: extern "C" fn(),
    ) -> libc::c_int;
}

/// Hears of forks from now on.
pub(crate) fn watch() -> io::Result<()> {
    // SAFETY: the functions live as long as the process: this library is never unloaded.
    match unsafe { pthread_atfork(prepare, parent, child) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

extern "C" fn prepare() {
    ARENA.lock();
}

extern "C" fn parent() {
    ARENA.unlock();
}

extern "C" fn child() {
    ARENA.unlock();
    if let Err(error) = join() {
        end(&format!("a forked process's memory cannot be swapped: {error}"));
    }
}

fn join() -> io::Result<()> {
    let Some(laid) = laid() else { return Ok(()) };
    let staging = staging_area()?;
    let number = laid.number();
    let socket = reach(&laid.plan)?;
    let hello = Hello::Forked { number, staging: staging as u64 };
    send_with(&socket, &hello.encode(), None)?;
    let swapped = welcome(&socket)?.ok_or_else(|| io::Error::other("no userfaultfd came"))?;
    serve(socket, Uffd::from(swapped), staging)
}
