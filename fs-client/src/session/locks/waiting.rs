//! The two threads that look after those who wait for locks.
//!
//! *lock-ends* asks the server how waits ended, one question after the other, each held by the server until there is an answer.
//! *lock-signals* looks who does not want to wait any more. Both start with the first wait of a mount and end with it; while
//! nobody waits they sleep.

use super::Session;
use crate::file::volume::FsError;
use cuttlefs_common::locks::WaitId;
use cuttlefs_common::panic_ends;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long the server holds a question: far below a lane's patience, so that a lost answer is noticed soon.
const HOLD: Duration = Duration::from_secs(5);
/// How often it is looked who gave up. Twice that, and a signal ends a wait: it must be seen in two looks, for one that another
/// thread of the process takes is seen for a moment, too.
const LOOK_PERIOD: Duration = Duration::from_millis(15);
/// Of the time, looking takes one part in so many at most.
const LOOK_SHARE: u32 = 50;
/// Sleeps are no longer, so that the threads of a session nobody has any more end.
const SLEEP: Duration = Duration::from_secs(1);

/// Starts them, once, where a session has threads.
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

/// Whether threads were started, kept beside the table.
#[derive(Default)]
pub(super) struct Started(AtomicBool);

impl Started {
    /// `true` but for the first time.
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
                    session.pause(SLEEP);
                }
            }
        }
    }
}

fn signals(weak: &Weak<Session>) {
    let mut seen: HashSet<WaitId> = HashSet::new();
    while let Some(session) = weak.upgrade() {
        if session.is_shut_down() {
            return;
        }
        if !session.locks.wait_for_waits(SLEEP) {
            seen.clear();
            continue;
        }
        let began = Instant::now();
        let waiters = session.locks.waiters();
        let now = waiters.into_iter().filter(|(_, waiter)| waiter.is_interrupted()).map(|(id, _)| id);
        let now: HashSet<WaitId> = now.collect();
        for &id in now.intersection(&seen) {
            match session.cancel_lock(id) {
                Ok(()) => {}
                Err(FsError::ShutDown) => return,
                Err(error) => tracing::warn!(%error, "a wait for a lock could not be given up"),
            }
        }
        seen = now;
        session.pause(LOOK_PERIOD.max(began.elapsed() * LOOK_SHARE));
    }
}
