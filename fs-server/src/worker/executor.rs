//! A worker's tasks, and the choice of the next one.
//!
//! Each task has a payer, the peer for which it runs. Ready tasks wait in a [`FairQueue`]: the next is one of the payer that has had the least of
//! this thread's time, so that a peer with a thousand requests keeps others waiting for one poll, not for a thousand. The time of a poll is charged
//! to the payer.
//!
//! # How it works
//! A wake-up of a task, on any thread, puts it into `woken` and notifies the worker's signal. The worker moves woken tasks to
//! the fair queue before it takes the next one.
//!
//! # Invariants
//! * A task is on one of the two queues exactly once while it is ready (`async_task` sees to that), so both are bounded by the
//!   number of tasks.
//! * Tasks are dropped on the worker's thread: by the executor's drop, which leaves none.

use super::signal::Signal;
use async_task::{Builder, Runnable, Task};
use crossbeam::queue::SegQueue;
use cuttlefs_common::fair::{FairQueue, Payer};
use slab::Slab;
use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

/// A task whose result can be awaited.
pub type Joined<T> = Task<T, Payer>;

/// Tasks that were woken, by any thread.
struct Woken {
    tasks: SegQueue<Runnable<Payer>>,
    signal: Arc<Signal>,
}

/// The tasks of one thread.
pub(super) struct Executor {
    woken: Arc<Woken>,
    ready: RefCell<FairQueue<Runnable<Payer>>>,
    /// The wakers of all tasks.
    alive: Rc<RefCell<Slab<Waker>>>,
}

/// A task's entry among the wakers.
struct Place {
    alive: Rc<RefCell<Slab<Waker>>>,
    index: usize,
}

impl Drop for Place {
    fn drop(&mut self) {
        // The entry is gone already if the executor is being dropped.
        self.alive.borrow_mut().try_remove(self.index);
    }
}

impl Executor {
    pub(super) fn new(signal: Arc<Signal>) -> Self {
        let woken = Arc::new(Woken { tasks: SegQueue::new(), signal });
        Self { woken, ready: RefCell::default(), alive: Rc::default() }
    }

    /// Starts a task on a payer's account.
    pub(super) fn spawn<T: 'static>(
        &self,
        payer: Payer,
        future: impl Future<Output = T> + 'static,
    ) -> Joined<T> {
        let mut alive = self.alive.borrow_mut();
        let entry = alive.vacant_entry();
        let place = Place { alive: self.alive.clone(), index: entry.key() };
        let placed = async move {
            let _place = place;
            future.await
        };
        let woken = self.woken.clone();
        let schedule = move |task| {
            woken.tasks.push(task);
            woken.signal.notify();
        };
        let (task, joined) = Builder::new().metadata(payer).spawn_local(|_| placed, schedule);
        entry.insert(task.waker());
        drop(alive);
        self.ready.borrow_mut().push(payer, task);
        joined
    }

    /// Whether a task is ready to run.
    pub(super) fn has_ready(&self) -> bool {
        !self.ready.borrow().is_empty() || !self.woken.tasks.is_empty()
    }

    /// The next task, and its payer.
    pub(super) fn next(&self) -> Option<(Payer, Runnable<Payer>)> {
        self.line_up();
        self.ready.borrow_mut().pop()
    }

    /// Charges a payer for the time that its task ran. Tasks that were woken meanwhile have waited for that.
    pub(super) fn charge(&self, payer: Payer, time: Duration) {
        self.line_up();
        self.ready.borrow_mut().charge(payer, time);
    }

    fn line_up(&self) {
        let mut ready = self.ready.borrow_mut();
        while let Some(task) = self.woken.tasks.pop() {
            ready.push(*task.metadata(), task);
        }
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        // Each woken task comes into a queue, and dropping it there cancels it and drops its future. That may wake other tasks, and starts none,
        // because all that start tasks hold the executor weakly.
        let alive = std::mem::take(&mut *self.alive.borrow_mut());
        alive.into_iter().for_each(|(_, waker)| waker.wake());
        while let Some((_, task)) = self.next() {
            drop(task);
        }
    }
}
