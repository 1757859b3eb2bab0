//! Moving heads where executed requests have to be made durable first: once for many. A thread does it.
//!
//! # How it works
//! The thread wakes when a ring has `RECORDS_PER_HEAD` executed records or an eighth of its bytes, and else looks every `IDLE`.
//! It notes how far each ring was executed, has the service settle, and moves all heads to what it noted. It also ends
//! connections for others (`Receiver::retire`), because that waits.
//!
//! # Failure
//! If the service cannot settle, every connection is closed: what is not durable must not leave a ring.

use super::core::Core;
use crate::ids::ClientId;
use crate::panic_ends;
use futures_lite::future::block_on;
use parking_lot::{Condvar, Mutex};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How often heads are moved although little was executed.
pub(super) const IDLE: Duration = Duration::from_millis(200);

/// Called once a client's connection is ended; `true`: its ring holds nothing any more.
pub(super) type WhenRetired = Box<dyn FnOnce(bool) + Send>;

pub(super) struct Retire {
    client: ClientId,
    forget: bool,
    done: WhenRetired,
}

#[derive(Default)]
struct Due {
    heads: bool,
    /// Bounded by whoever asks: each client's rings once.
    retire: Vec<Retire>,
    stopped: bool,
}

/// What the thread is asked for.
#[derive(Default)]
pub(super) struct Settling {
    due: Mutex<Due>,
    moved: Condvar,
}

impl Settling {
    /// Heads are to be moved soon.
    pub(super) fn is_due(&self) {
        if !std::mem::replace(&mut self.due.lock().heads, true) {
            self.moved.notify_one();
        }
    }

    /// A client's ring is to be let go.
    pub(super) fn retire(&self, client: ClientId, forget: bool, done: WhenRetired) {
        let mut due = self.due.lock();
        if due.stopped {
            drop(due);
            // What the ring holds stays there for the next start.
            return done(false);
        }
        due.retire.push(Retire { client, forget, done });
        self.moved.notify_one();
    }

    /// Ends the thread; who waits is told.
    pub(super) fn stop(&self) {
        let mut due = self.due.lock();
        due.stopped = true;
        self.moved.notify_all();
        let left = std::mem::take(&mut due.retire);
        drop(due);
        left.into_iter().for_each(|retire| (retire.done)(false));
    }

    /// What there is to do now; `None`: stopped.
    pub(super) fn take(&self) -> Option<Vec<Retire>> {
        let mut due = self.due.lock();
        due.heads = false;
        (!due.stopped).then(|| std::mem::take(&mut due.retire))
    }

    /// As `take`, once there is something, or it is time to look.
    fn wait(&self) -> Option<Vec<Retire>> {
        let mut due = self.due.lock();
        if !due.heads && due.retire.is_empty() && !due.stopped {
            self.moved.wait_for(&mut due, IDLE);
        }
        drop(due);
        self.take()
    }
}

impl Core {
    /// The thread.
    pub(super) fn settle(&self) {
        while let Some(retire) = self.common.settling.wait() {
            panic_ends::plant("durable-settle");
            block_on(self.settle_once(retire));
        }
    }

    /// Moves all heads, then lets go of these rings.
    pub(super) async fn settle_once(&self, retire: Vec<Retire>) {
        self.move_heads().await;
        for Retire { client, forget, done } in retire {
            done(self.let_go(client, forget).await);
        }
    }

    async fn move_heads(&self) {
        let connections = self.welcomed();
        let finished: Vec<_> =
            connections.iter().filter_map(|connection| Some((connection, connection.finished()?))).collect();
        if !finished.is_empty()
            && let Err(reason) = self.common.service.settle().await
        {
            connections.iter().for_each(|connection| connection.give_up(&reason));
            return;
        }
        for (connection, upto) in finished {
            if let Err(reason) = connection.advance_to(upto) {
                connection.give_up(&reason);
            }
        }
        connections.iter().for_each(|connection| connection.look_again());
    }

    /// Ends a client's connection, executes what its ring holds and begins a new life of it, or removes it. Whether that
    /// could be done.
    async fn let_go(&self, client: ClientId, forget: bool) -> bool {
        let _alone = self.opening.lock().await;
        self.retire(client).await;
        match self.store.let_go(client, &*self.common.service, forget).await {
            Ok(executed) => {
                self.common.recovered.fetch_add(executed, Ordering::Relaxed);
                true
            }
            Err(error) => {
                tracing::error!(%client, %error, "a ring is kept for the next start");
                false
            }
        }
    }
}
