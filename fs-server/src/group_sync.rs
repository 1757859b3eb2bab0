//! One sync for all waiters, led by one of them, on any thread.
//!
//! # How it works
//! A caller that finds no sync under way leads one. Callers that come meanwhile wait for the next, which the first of them leads
//! for all. No caller waits for company: alone, it leads at once. The leader does the sync in its own way: for the data files by a
//! request to its disk (`pool::DataSync`), for metadata by a write of its ring, or a thread's run (`committer`).
//!
//! # Invariants
//! * A waiter gets `Ok` only from a sync that began after its call.
//! * One sync is under way at a time; one whose leader is dropped counts for no waiter, and the next waiter leads.
//!
//! # Failure
//! A failed sync is final, for all waiters and all later callers: the contents of the SSD are unknown, and a second sync would
//! report success (the kernel reports a failed write once). Only a restart mends it.

use event_listener::Event;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// This sync failed, or one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a sync failed; nothing is durable any more until the server is restarted")]
pub struct SyncFailed;

#[derive(Debug, Default)]
struct State {
    /// Syncs begun so far: the number of the one under way, if there is one.
    begun: u64,
    /// The number of the last sync that succeeded.
    done: u64,
    is_running: bool,
}

/// The state that all callers share.
#[derive(Debug, Default)]
pub(crate) struct GroupSync {
    state: Mutex<State>,
    /// Set once, under `state`. Acquire and release, so that it can be read without that lock.
    failed: AtomicBool,
    /// Notified whenever a sync ends, successfully or not.
    ended: Event,
}

impl GroupSync {
    /// Whether a sync has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Whether a sync is under way.
    pub(crate) fn is_running(&self) -> bool {
        self.state.lock().is_running
    }

    /// Syncs begun so far.
    pub(crate) fn count(&self) -> u64 {
        self.state.lock().begun
    }

    /// Resolves when a sync that began after the call has ended. `lead` does a sync and returns whether it succeeded.
    ///
    /// # Errors
    /// [`SyncFailed`].
    pub(crate) async fn wait(&self, lead: impl AsyncFn() -> bool) -> Result<(), SyncFailed> {
        let wanted = self.state.lock().begun + 1;
        loop {
            let ended = {
                let mut state = self.state.lock();
                if self.has_failed() {
                    return Err(SyncFailed);
                }
                if state.done >= wanted {
                    return Ok(());
                }
                if state.is_running {
                    Some(self.ended.listen())
                } else {
                    state.is_running = true;
                    state.begun += 1;
                    None
                }
            };
            match ended {
                Some(ended) => ended.await,
                None => {
                    let mut run = Run { shared: self, is_well: None };
                    run.is_well = Some(lead().await);
                }
            }
        }
    }
}

/// A sync under way.
struct Run<'a> {
    shared: &'a GroupSync,
    /// Whether it succeeded; `None` if its future was dropped.
    is_well: Option<bool>,
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_running = false;
        match self.is_well {
            Some(true) => state.done = state.begun,
            Some(false) => self.shared.failed.store(true, Ordering::Release),
            None => {}
        }
        drop(state);
        self.shared.ended.notify(usize::MAX);
    }
}
