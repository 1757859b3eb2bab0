//! The ends of connections: a thread destroys their identifiers, so that no thread with a deadline waits for that.
//!
//! Destroying an identifier waits in the kernel for messages that the connection manager has sent for it (`cm_destroy_id`), and nothing bounds that
//! wait.
//!
//! # Failure
//! A destroy that hangs blocks the thread, and later ones wait behind it. They are counted: with too many of them no connection is made
//! (`Shared::few_ending`), and no event of a connection is taken (`cm`), so that peers cannot make more. The process can be killed, but is not gone
//! before the kernel's wait ends.

use super::sys::Channel;
use rdma_sys as ffi;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

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
    /// Identifiers that such threads have not destroyed yet. Relaxed: a figure.
    ending: Arc<AtomicUsize>,
}

impl Ends {
    /// Starts the thread of a channel. `ending` counts the identifiers that all channels of the device have not destroyed yet.
    pub(super) fn start(ending: &Arc<AtomicUsize>) -> io::Result<Self> {
        let (to_thread, remains) = mpsc::channel::<Remains>();
        let left = ending.clone();
        // The thread ends with the channel, whose last owner may be an identifier in here. So nobody joins it.
        std::thread::Builder::new().name("rdma-ends".to_owned()).spawn(move || {
            while let Ok(one) = remains.recv() {
                drop(one);
                left.fetch_sub(1, Ordering::Relaxed);
            }
        })?;
        Ok(Self { to_thread, ending: ending.clone() })
    }

    /// Destroys an identifier of this channel. The caller was its only owner, and its queue pair is gone.
    pub(super) fn destroy(&self, raw: NonNull<ffi::rdma_cm_id>, channel: &Arc<Channel>) {
        self.ending.fetch_add(1, Ordering::Relaxed);
        // If the thread is gone, the identifier is destroyed here.
        if self.to_thread.send(Remains { raw, _channel: channel.clone() }).is_err() {
            self.ending.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
