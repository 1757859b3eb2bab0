//! The ends of connections: a thread destroys their identifiers, so that no thread with a deadline waits for that.
//!
//! Destroying an identifier waits in the kernel for messages that the connection manager has sent for it (`cm_destroy_id`), and nothing bounds that
//! wait.
//!
//! While the port is down nothing is destroyed: a destroy sends a message, and soft-RoCE's queue pair for such messages (GSI) is dead for good once it
//! could not send one. The peer is told when the port is up again.
//!
//! # Failure
//! A destroy that hangs keeps the thread, and later ones wait there. They are counted ([`Ending`]): with too many of them no connection is made,
//! and no event of a connection is taken (`cm`), so that peers cannot make more. The process can be killed, but is not gone before the kernel
//! lets go.

use super::port::LastLook;
use super::sys::Channel;
use rdma_sys as ffi;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Connections that are over and that the kernel has not let go of: with so many its connection manager does not come to an end with any.
/// Healthy, it takes a millisecond for each.
pub(super) const ENDING_MAX: usize = 64;
/// Between two looks how many there are.
pub(super) const ENDING_PAUSE: Duration = Duration::from_millis(5);
/// Between two looks whether the port is up again.
const DOWN_PAUSE: Duration = Duration::from_millis(100);

/// Identifiers that the channels of a device have not come to an end with. Relaxed: a figure.
#[derive(Default)]
pub(super) struct Ending(AtomicUsize);

impl Ending {
    pub(super) fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Whether nothing may be begun that has such an end.
    pub(super) fn is_full(&self) -> bool {
        self.count() >= ENDING_MAX
    }

    /// Waits until it is not full; `false`: it was until the deadline.
    pub(super) fn has_room(&self, deadline: Instant) -> bool {
        while self.is_full() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(ENDING_PAUSE);
        }
        true
    }

    pub(super) fn begin(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn end(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An identifier whose queue pair is gone.
struct Remains {
    raw: NonNull<ffi::rdma_cm_id>,
    /// Dropped after the identifier.
    _channel: Arc<Channel>,
}

// SAFETY: librdmacm's calls may be made from any thread.
unsafe impl Send for Remains {}

impl Drop for Remains {
    fn drop(&mut self) {
        // SAFETY: made once and destroyed once, by its only owner; its queue pair is gone, and its events are acknowledged (`Channel::next`).
        unsafe { ffi::rdma_destroy_id(self.raw.as_ptr()) };
    }
}

/// The thread that destroys identifiers; see the module.
pub(super) struct Ends {
    to_thread: mpsc::Sender<Remains>,
    /// Handed to such threads, and not gone yet.
    ending: Arc<Ending>,
}

impl Ends {
    /// Starts the thread of a channel; `ending` counts what its device's channels have not come to an end with. Nothing ends while `port` is down.
    pub(super) fn start(ending: &Arc<Ending>, port: &Arc<LastLook>) -> io::Result<Self> {
        let (to_thread, remains) = mpsc::channel::<Remains>();
        let (left, port) = (ending.clone(), port.clone());
        // The thread ends with the channel, whose last owner may be an identifier in here. So nobody joins it.
        std::thread::Builder::new().name("rdma-ends".to_owned()).spawn(move || {
            while let Ok(one) = remains.recv() {
                while !port.is_up() {
                    std::thread::sleep(DOWN_PAUSE);
                }
                drop(one);
                left.end();
            }
        })?;
        Ok(Self { to_thread, ending: ending.clone() })
    }

    /// Destroys an identifier of this channel. The caller was its only owner, and its queue pair is gone.
    pub(super) fn destroy(&self, raw: NonNull<ffi::rdma_cm_id>, channel: &Arc<Channel>) {
        self.ending.begin();
        // Should its thread be gone, it is destroyed here.
        if self.to_thread.send(Remains { raw, _channel: channel.clone() }).is_err() {
            self.ending.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_room_for_few() {
        let ending = Ending::default();
        (0..ENDING_MAX).for_each(|_| {
            assert!(!ending.is_full());
            ending.begin();
        });
        assert!(ending.is_full() && !ending.has_room(Instant::now()));
        std::thread::scope(|scope| {
            scope.spawn(|| ending.end());
            assert!(ending.has_room(Instant::now() + Duration::from_secs(60)));
        });
        assert_eq!(ending.count(), ENDING_MAX - 1);
    }
}
