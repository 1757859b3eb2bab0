//! The two threads that serve waiters for locks.
//!
//! *lock-ends* asks the server for the ends of waits, one question after the other, each held by the server until there is an answer.
//! *lock-signals* gives up the waits of interrupted waiters, when it is told that there are some. Both start with the first wait of a mount and
//! end with the mount; while there is no wait they sleep.

use super::Session;
use crate::transport::FsError;
use cuttlefs_common::panic_ends;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long the server holds a question: far below a lane's patience, so that a lost answer is noticed soon.
const HOLD: Duration = Duration::from_secs(5);
/// The longest sleep, so that the threads of a session without users end soon.
const SLEEP: Duration = Duration::from_secs(1);

/// Starts both threads, once, in a process with background threads.
pub(super) fn start(session: &Arc<Session>) {
    if !session.options.background || session.locks.threads_started() {
        return;
    }
    let spawn = |name: &str, body: fn(&Weak<Session>)| {
        let weak = Arc::downgrade(session);
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(move || body(&weak));
        if let Err(error) = spawned {
            tracing::error!(%error, name, "who waits for a lock waits in vain: a thread could not be started");
        }
    };
    spawn("lock-ends", ends);
    spawn("lock-signals", signals);
}

/// Whether the threads were started.
#[derive(Default)]
pub(super) struct Started(AtomicBool);

impl Started {
    /// Returns `false` the first time, and `true` from then on.
    pub(super) fn begin(&self) -> bool {
        self.0.swap(true, Ordering::Relaxed)
    }
}

fn ends(weak: &Weak<Session>) {
    while let Some(session) = weak.upgrade() {
        if session.is_shut_down() {
            return;
        }
        if session.locks.wait_for_waits(SLEEP) {
            panic_ends::plant("lock-ends");
            match session.await_locks(HOLD) {
                Ok(()) => {}
                Err(FsError::ShutDown) => return,
                Err(error) => {
                    tracing::warn!(%error, "the server does not say how waits for locks ended");
                    session.link.pause(SLEEP);
                }
            }
        }
    }
}

fn signals(weak: &Weak<Session>) {
    while let Some(session) = weak.upgrade() {
        if session.is_shut_down() {
            return;
        }
        if !session.locks.wait_for_interrupts(SLEEP) {
            continue;
        }
        session.release_unwanted();
        let interrupted = session.locks.waiters().into_iter().filter(|(_, waiter)| waiter.is_interrupted());
        for (id, _) in interrupted {
            match session.cancel_lock(id) {
                Ok(()) => {}
                Err(FsError::ShutDown) => return,
                Err(error) => tracing::warn!(%error, "a wait for a lock could not be given up"),
            }
        }
    }
}
