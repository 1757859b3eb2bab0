//! Ways into a worker: `Spawner` for its own tasks, `WorkerHandle` for other threads.

use super::executor::{Executor, Joined};
use super::signal::Signal;
use super::timers::{Sleep, Timers};
use crossbeam::queue::ArrayQueue;
use cuttlefs_common::fair::Payer;
use futures_lite::FutureExt;
use std::any::Any;
use std::cell::RefCell;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Closures of other threads that may wait for a worker. They set up connections, so more of them mean that the worker is stuck; then the caller gets
/// an error and refuses the connection.
pub const INJECTION_DEPTH: usize = 1024;

/// A closure that another thread runs on a worker.
pub type Job = Box<dyn FnOnce(&Spawner) + Send>;

/// The worker will not run a job. The job was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkerGone {
    /// Too many jobs wait already.
    #[error("the worker's queue is full")]
    Full,
    /// The worker was dropped.
    #[error("the worker has ended")]
    Ended,
}

/// The state that a worker and its handles share.
#[derive(Debug)]
pub(super) struct Shared {
    signal: Arc<Signal>,
    jobs: ArrayQueue<JobBox>,
    /// Written by handles, read by the worker. The signal's order publishes it.
    stop: AtomicBool,
    /// Written by the worker's drop, read by handles: no job is run after it.
    closed: AtomicBool,
}

struct JobBox(Job);

impl std::fmt::Debug for JobBox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Job")
    }
}

impl Shared {
    pub(super) fn new(signal: Arc<Signal>) -> Self {
        Self {
            signal,
            jobs: ArrayQueue::new(INJECTION_DEPTH),
            stop: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    pub(super) fn signal(&self) -> &Arc<Signal> {
        &self.signal
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub(super) fn has_jobs(&self) -> bool {
        !self.jobs.is_empty()
    }

    pub(super) fn next_job(&self) -> Option<Job> {
        self.jobs.pop().map(|job| job.0)
    }

    /// Ends the queue: later jobs are refused, and waiting jobs are dropped.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        while self.jobs.pop().is_some() {}
    }
}

/// A handle of a worker for other threads.
#[derive(Clone, Debug)]
pub struct WorkerHandle {
    shared: Arc<Shared>,
}

impl WorkerHandle {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// Runs `job` on the worker's thread, soon. It may spawn tasks there; it must not block.
    ///
    /// # Errors
    /// `WorkerGone`; the job was dropped.
    pub fn spawn(&self, job: Job) -> Result<(), WorkerGone> {
        if self.shared.closed.load(Ordering::SeqCst) {
            return Err(WorkerGone::Ended);
        }
        self.shared.jobs.push(JobBox(job)).map_err(|_| WorkerGone::Full)?;
        // The worker may have been dropped between the check and the push. Then only this thread knows of the job, and drops it.
        if self.shared.closed.load(Ordering::SeqCst) {
            while self.shared.jobs.pop().is_some() {}
            return Err(WorkerGone::Ended);
        }
        self.shared.signal.notify();
        Ok(())
    }

    /// Makes `run` return after its current pass. Idempotent.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.signal.notify();
    }

    /// Makes the worker check its sources.
    pub fn wake(&self) {
        self.shared.signal.notify();
    }
}

/// The panic of a task. The executor would keep it for the caller that awaits the task, which mostly is nobody, and go on.
#[derive(Default)]
pub(super) struct Panics(RefCell<Option<Box<dyn Any + Send>>>);

impl std::fmt::Debug for Panics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Panics").field(&self.0.borrow().is_some()).finish()
    }
}

impl Panics {
    /// Runs a task so that `take_up` gets its panic.
    pub(super) async fn hear<T>(self: Rc<Self>, task: impl Future<Output = T>) -> T {
        match AssertUnwindSafe(task).catch_unwind().await {
            Ok(result) => result,
            Err(panic) => {
                *self.0.borrow_mut() = Some(panic);
                std::future::pending().await
            }
        }
    }

    /// Resumes the panic of the task that ran last, if it panicked.
    pub(super) fn take_up(&self) {
        if self.0.borrow().is_some()
            && let Some(panic) = self.0.take()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

/// A handle of a worker for its own tasks. It does not keep the worker alive.
#[derive(Clone, Debug)]
pub struct Spawner {
    executor: Weak<Executor>,
    timers: Rc<Timers>,
    panics: Rc<Panics>,
}

impl Spawner {
    pub(super) fn new(executor: &Rc<Executor>, timers: Rc<Timers>, panics: Rc<Panics>) -> Self {
        Self { executor: Rc::downgrade(executor), timers, panics }
    }

    /// Starts a task on the server's own account that nobody awaits. While the worker is being dropped, the future is dropped instead.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        self.spawn_for(Payer::OWN, future);
    }

    /// The same on the account of `payer`.
    pub fn spawn_for(&self, payer: Payer, future: impl Future<Output = ()> + 'static) {
        if let Some(executor) = self.executor.upgrade() {
            executor.spawn(payer, self.panics.clone().hear(future)).detach();
        }
    }

    /// Starts a task whose result can be awaited; dropping the `Task` cancels it. `None` while the worker is being
    /// dropped.
    pub fn spawn_join<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Option<Joined<T>> {
        self.executor.upgrade().map(|executor| executor.spawn(Payer::OWN, self.panics.clone().hear(future)))
    }

    /// Resolves after `duration`.
    pub fn sleep(&self, duration: Duration) -> Sleep {
        Timers::sleep(&self.timers, duration)
    }

    /// The time of the worker's clock.
    pub fn now(&self) -> Duration {
        self.timers.now()
    }
}
