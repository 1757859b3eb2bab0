//! A process that was forked from one that has sessions: its copies of their locks are as they were, and those that a thread of its parent held are
//! held for ever. So a call that uses a handle there fails, and one that frees a handle does nothing.

use crate::errors::unsupported;
use libc::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// (Relaxed: the child has one thread when it is set, and nothing else is told by it.)
static IS_CHILD: AtomicBool = AtomicBool::new(false);

extern "C" fn forked() {
    IS_CHILD.store(true, Ordering::Relaxed);
}

/// Looks out for forks from now on: called before the first session. Refuses it if this process is such a child.
pub(crate) fn watch() -> Result<(), c_int> {
    static IS_WATCHED: OnceLock<bool> = OnceLock::new();
    refuse()?;
    // SAFETY: the function may run in a forked process: it stores a flag, and takes no lock.
    if *IS_WATCHED.get_or_init(|| unsafe { libc::pthread_atfork(None, None, Some(forked)) == 0 }) {
        return Ok(());
    }
    Err(unsupported("the system has no memory to tell of forks, which a session must hear of"))
}

/// Whether this process is such a child.
pub(crate) fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// Refuses what such a child cannot have.
pub(crate) fn refuse() -> Result<(), c_int> {
    if !is_child() {
        return Ok(());
    }
    Err(unsupported(
        "this process was forked from one that had a session, and cannot use or have one: start a program (exec; Python's multiprocessing: the method spawn)",
    ))
}
