//! Small system calls with one meaning each, so that their failure is decided in one place.

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use std::io;
use std::time::Duration;

/// A timeout in the kernel's form. Capped at a day: longer sleeps end spuriously, which callers allow for.
pub(super) fn timespec(timeout: Duration) -> Timespec {
    let timeout = timeout.min(Duration::from_secs(86_400));
    Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) }
}

/// A doorbell.
pub(super) fn new_eventfd() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Rings a doorbell. It fails only if the counter is at its limit, and then the doorbell has rung.
pub(super) fn ring_eventfd(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// A descriptor of the same memory that cannot be mapped writable, to hand to a peer.
///
/// The mode is cut to read-only as well, so that a peer that is not root cannot open the memory again through
/// `/proc`; a privileged peer could, but it could as well trace this process.
pub(super) fn read_only_descriptor(fd: impl AsFd) -> io::Result<OwnedFd> {
    let fd = fd.as_fd();
    rustix::fs::fchmod(fd, Mode::RUSR)?;
    // Of this thread: it may have a descriptor table of its own (unshare(2), CLONE_FILES).
    let path = format!("/proc/thread-self/fd/{}", fd.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Waits until `fd` is readable; false when `timeout` is over.
pub(super) fn wait_readable(fd: &OwnedFd, timeout: Duration) -> io::Result<bool> {
    let deadline = std::time::Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(std::time::Instant::now());
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&timespec(left))) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether the other end of a connected socket is gone: closed, or dead. Does not wait. If the kernel cannot tell, it counts as gone.
pub(super) fn is_hung_up(fd: &OwnedFd) -> bool {
    loop {
        // The kernel reports HUP and ERR even if they are not asked for.
        let mut fds = [PollFd::new(fd, PollFlags::RDHUP)];
        match rustix::event::poll(&mut fds, Some(&timespec(Duration::ZERO))) {
            Ok(events) => return events > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return true,
        }
    }
}
