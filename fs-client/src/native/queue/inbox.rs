//! Where threads leave what they have done for a queue, and the event that says so.

use super::super::NativeError;
use super::Done;
use crate::transport::interrupt::Interruptible;
use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// What a thread has done.
pub(super) struct Ended {
    /// The number of the request in its queue.
    pub(super) number: u64,
    pub(super) result: Result<Done, NativeError>,
}

/// See the module.
pub(super) struct Inbox {
    ended: Mutex<Vec<Ended>>,
    /// Readable while something is in the inbox, or the queue has completions of its own.
    event: OwnedFd,
    /// The queue is gone (release; acquire): requests that were not sent yet end.
    gone: AtomicBool,
}

impl Inbox {
    pub(super) fn new() -> Result<Self, NativeError> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(std::io::Error::from)?;
        Ok(Self { ended: Mutex::default(), event, gone: AtomicBool::new(false) })
    }

    pub(super) fn put(&self, number: u64, result: Result<Done, NativeError>) {
        let mut ended = self.ended.lock();
        ended.push(Ended { number, result });
        if ended.len() == 1 {
            self.ring();
        }
    }

    /// Makes the event readable.
    pub(super) fn ring(&self) {
        // It fails only if the counter is at its end: then it is readable.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Takes all of it, and the event.
    pub(super) fn take(&self) -> Vec<Ended> {
        // Before the look: what is put after that rings again.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        std::mem::take(&mut *self.ended.lock())
    }

    pub(super) fn event_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    pub(super) fn leave(&self) {
        self.gone.store(true, Ordering::Release);
    }
}

impl Interruptible for Inbox {
    fn is_interrupted(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }
}
