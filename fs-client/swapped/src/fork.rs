//! Forks: a child's memory is its own, and so are its thread, its connection and its userfaultfd. Until it has them its pages come, and none leaves.
//!
//! A child that is made past the C library (clone(2) by syscall(2)) runs none of this: its pages come, none leaves, and nothing ends it with the swapper.

use crate::arena::ARENA;
use crate::begin::{end, laid, staging_area};
use crate::servant::{self, Start};
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
    let staging_at = staging_area()?;
    let hello = Hello::Forked { number: laid.number(), staging: staging_at as u64 };
    servant::start(Start { plan: &laid.plan, hello, staging_at })
}
