//! Memory that is taken again, for the model checker: it makes the same few memories a hundred thousand times, and the kernel's work for them took
//! two thirds of its time.
//!
//! Only what [`super::SharedMemory::new`] made comes here. Views of it end with it: an execution of the checker keeps nothing for the next one.

use rustix::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Mutex;

/// A mapping that nobody uses.
struct Left {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: it is plain memory that this value owns.
unsafe impl Send for Left {}

static LEFT: Mutex<Vec<Left>> = Mutex::new(Vec::new());

/// A mapping of this length, of zeros.
pub(super) fn take(len: usize) -> Option<(OwnedFd, NonNull<u8>)> {
    let mut left = LEFT.lock().expect("nobody panics with it");
    let at = left.iter().position(|left| left.len == len)?;
    let Left { fd, base, len } = left.swap_remove(at);
    // SAFETY: the mapping has this length, is writable, and nobody else has it.
    unsafe { base.as_ptr().write_bytes(0, len) };
    Some((fd, base))
}

/// Leaves a mapping to the next one who takes such a length.
pub(super) fn leave(fd: OwnedFd, base: NonNull<u8>, len: usize) {
    LEFT.lock().expect("nobody panics with it").push(Left { fd, base, len });
}
