//! The two threads that serve waiters for locks.
//!
//! *lock-ends* asks the server for the ends of waits, one question after the other, each held by the server until there is an answer.
//! *lock-signals* gives up the waits of interrupted waiters, when it is told that there are some. Both start before the first request of a
//! mount for a lock (any may wait: in the grace period also one that does not block), and end with the mount; while there is no wait they sleep.

use super::Session;
use crate::transport::FsError;
use cuttlefs_common::panic_ends;
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long the server holds a question: far below a lane's patience, so that a lost answer is noticed soon.
const HOLD: Duration = Duration::from_secs(5);
/// The longest sleep, so that the threads of a session without users end soon.
const SLEEP: Duration = Duration::from_secs(1);

type Body = fn(&Weak<Session>);
const THREADS: [(&str, Body); 2] = [("lock-ends", ends), ("lock-signals", signals)];

/// Which of the threads were started.
pub(super) type Started = Mutex<[bool; THREADS.len()]>;

/// Starts those threads that were not started, in a process with background threads. `false`: one could not be started, so no lock may be asked for:
/// nobody would end a wait.
pub(super) fn start(session: &Arc<Session>) -> bool {
    if !session.options.background {
        return true;
    }
    let mut started = session.locks.threads.lock();
    for (started, (name, body)) in started.iter_mut().zip(THREADS) {
        if *started {
            continue;
        }
        let weak = Arc::downgrade(session);
        if let Err(error) = std::thread::Builder::new().name(name.to_owned()).spawn(move || body(&weak)) {
            tracing::error!(%error, name, "no lock can be waited for: a thread could not be started");
            return false;
        }
        *started = true;
    }
    true
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
