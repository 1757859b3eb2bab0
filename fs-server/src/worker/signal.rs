//! The wake-up of a worker by other threads: an atomic word, and an eventfd that is written only when the worker sleeps.
//!
//! | state    | set by                         | `wake` does                     |
//! |----------|--------------------------------|---------------------------------|
//! | awake    | the worker, before it looks    | -> notified                     |
//! | notified | anyone                         | nothing: it is already noted    |
//! | asleep   | the worker, only from awake    | -> notified, writes the eventfd |
//!
//! Every change is a read-modify-write with acquire and release on one word. So a thread that finds another thread's value sees everything that the
//! other did before: the worker that moves *notified* back to *awake* sees the work.

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

const AWAKE: u8 = 0;
const NOTIFIED: u8 = 1;
const ASLEEP: u8 = 2;

/// A worker's signal.
#[derive(Debug)]
pub(super) struct Signal {
    /// Written by the worker and by all that wake it. The module's table has the order.
    state: AtomicU8,
    event: OwnedFd,
}

impl Signal {
    pub(super) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { state: AtomicU8::new(AWAKE), event })
    }

    /// For the worker: forgets earlier notifications. The worker checks every source after this.
    pub(super) fn set_awake(&self) {
        self.state.swap(AWAKE, Ordering::AcqRel);
    }

    /// For the worker: whether it may sleep. It may not if it was notified since `set_awake`.
    pub(super) fn fall_asleep(&self) -> bool {
        self.state.compare_exchange(AWAKE, ASLEEP, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The eventfd: readable after a wake-up that found the worker asleep.
    pub(super) fn event(&self) -> &OwnedFd {
        &self.event
    }

    /// Makes the eventfd unreadable again.
    pub(super) fn take_event(&self) {
        // Only EAGAIN can come back: the eventfd is unreadable already.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
    }

    /// For any thread, after it has put work where the worker looks.
    pub(super) fn notify(&self) {
        if self.state.swap(NOTIFIED, Ordering::AcqRel) == ASLEEP {
            // Only EAGAIN can come back, at 2^64 - 1 unread wake-ups: the eventfd is readable then, too.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(signal: &Signal) -> bool {
        rustix::io::read(&signal.event, &mut [0; 8]).is_ok()
    }

    #[test]
    fn the_eventfd_is_written_only_for_a_sleeper_and_once() {
        let signal = Signal::new().expect("eventfd");
        signal.notify();
        assert!(!signal.fall_asleep() && !readable(&signal));
        signal.set_awake();
        assert!(signal.fall_asleep());
        signal.notify();
        signal.notify();
        let mut count = [0; 8];
        rustix::io::read(&signal.event, &mut count).expect("readable");
        assert_eq!(u64::from_ne_bytes(count), 1);
        signal.take_event();
        assert!(!signal.fall_asleep());
        signal.set_awake();
        assert!(signal.fall_asleep());
    }
}
