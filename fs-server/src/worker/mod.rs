//! A worker: one thread's executor and reactor.
//!
//! A worker has the tasks of its thread and its timers, and decides the order in which its event sources are checked. Every RPC is a task here, and
//! disk and RDMA completions wake it. Nothing on this thread blocks but the one `poll(2)` in `sleep`.
//!
//! # How it works
//! A *pass* looks at every source once: closures from other threads, ready tasks, each RNIC's completion queue, the disk's ring, timers.
//! Each has a bound for a pass, so that none starves the others. Of ready tasks the next is that of the peer that has had least of
//! the thread's time (`executor`). While passes find work they follow one another without system calls but those of the ring. When
//! one finds nothing, the worker spins for its adaptive budget (`SpinBudget`) and then sleeps in `poll(2)` on the completion
//! queues' events, the ring and its own eventfd.
//!
//! # Why no wake-up is lost
//! Before it sleeps, the worker (1) sets its signal to *awake*, (2) arms the completion queues and looks at every source once more,
//! (3) moves the signal from *awake* to *asleep*. A waker first puts the work where (2) looks, then swaps the signal to
//! *notified*. If the swap comes before (1), (2) sees the work; if between (1) and (3), (3) fails; if after (3), the swap finds
//! *asleep* and writes the eventfd. Only then is there a system call.
//!
//! # Failure
//! A ring or a `poll` that fails is an error of `run`: the server must stop, its IOs cannot complete. A task that panics takes its
//! worker with it (`Panics`): a panic is a broken invariant. In the server's process it has ended the whole process by then
//! (`panic_ends`); in a test the test gets it.

mod executor;
mod signal;
mod spawner;
mod timers;

#[cfg(test)]
mod tests;

pub use executor::Joined;
pub use spawner::{INJECTION_DEPTH, Job, Spawner, WorkerGone, WorkerHandle};
pub use timers::Sleep;

use crate::pool::UringDisk;
use cuttlefs_common::fair::Payer;
use cuttlefs_common::panic_ends;
use cuttlefs_common::rdma::{Completion, CompletionQueue};
use cuttlefs_common::spin::SpinBudget;
use cuttlefs_common::world::Clock;
use executor::Executor;
use rustix::event::{PollFd, PollFlags, Timespec};
use signal::Signal;
use spawner::{Panics, Shared};
use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use timers::Timers;

/// How long tasks run in one pass before other sources are checked. A request that another peer sends meanwhile waits for this time and for the
/// running task. A poll of a task takes about a microsecond; a check of all sources takes less.
const TASKS_A_PASS: Duration = Duration::from_micros(50);
/// Completions of a queue that are taken in one pass. A message among them waits in its peer's queue from then on, and no longer behind those of
/// others.
const COMPLETIONS_A_PASS: usize = 512;
/// Closures of other threads that are run in one pass.
const JOBS_A_PASS: usize = 16;
/// How long the worker sleeps before it offers entries of the ring again that the kernel, being short of memory, did not take.
const RING_RETRY: Duration = Duration::from_millis(1);

/// Why a worker cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The eventfd that wakes it could not be made.
    #[error("a worker cannot make its eventfd; is the limit of open files (ulimit -n) reached? {0}")]
    Signal(#[source] io::Error),
    /// io_uring cannot be entered.
    #[error("the disk's io_uring failed; the server must be restarted: {0}")]
    Disk(#[source] io::Error),
    /// `poll(2)` failed.
    #[error("a worker cannot wait for events; the server must be restarted: {0}")]
    Wait(#[source] io::Error),
}

/// One thread's executor and reactor. Made on the thread that runs it.
pub struct Worker {
    /// The only strong reference: tasks and spawners hold weak ones, so that dropping the worker drops its tasks. The first field, so that tasks are
    /// dropped before the disk that their futures wait for.
    executor: Rc<Executor>,
    timers: Rc<Timers>,
    panics: Rc<Panics>,
    shared: Arc<Shared>,
    /// One for each RNIC.
    cqs: Vec<Arc<dyn CompletionQueue>>,
    disk: Option<Rc<UringDisk>>,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("timers", &self.timers.len()).finish_non_exhaustive()
    }
}

impl Worker {
    /// A worker that drives `cqs` and `disk`; a simulated disk drives itself and is not passed. A completion is handed over with the index of its
    /// queue in `cqs`.
    ///
    /// # Errors
    /// If the system has no eventfd.
    pub fn new(
        cqs: Vec<Arc<dyn CompletionQueue>>,
        disk: Option<Rc<UringDisk>>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, WorkerError> {
        let signal = Arc::new(Signal::new().map_err(WorkerError::Signal)?);
        Ok(Self {
            executor: Rc::new(Executor::new(signal.clone())),
            timers: Rc::new(Timers::new(clock)),
            panics: Rc::default(),
            shared: Arc::new(Shared::new(signal)),
            cqs,
            disk,
        })
    }

    /// A handle for other threads, to wake the worker, stop it, or run a closure on it.
    pub fn handle(&self) -> WorkerHandle {
        WorkerHandle::new(self.shared.clone())
    }

    /// A handle for this thread's tasks, to spawn tasks and to sleep.
    pub fn spawner(&self) -> Spawner {
        Spawner::new(&self.executor, self.timers.clone(), self.panics.clone())
    }

    /// Starts a task on the server's own account that nobody awaits.
    pub fn spawn_local(&self, future: impl Future<Output = ()> + 'static) {
        self.executor.spawn(Payer::OWN, self.panics.clone().hear(future)).detach();
    }

    /// Resolves after `duration`.
    pub fn sleep(&self, duration: Duration) -> Sleep {
        Timers::sleep(&self.timers, duration)
    }

    /// The time of the next timer, by the worker's clock: a simulation moves its clock there.
    pub fn next_deadline(&self) -> Option<Duration> {
        self.timers.next_deadline()
    }

    /// Runs until [`WorkerHandle::stop`]. Unfinished tasks stay, and go on if `run` is called again.
    ///
    /// # Errors
    /// If the ring or `poll` fails.
    pub fn run(&self, on_completion: impl FnMut((usize, Completion))) -> Result<(), WorkerError> {
        self.run_until(on_completion, || self.shared.is_stopped())
    }

    /// Runs until `done` returns `true`. That may change only on this thread, or with a notification.
    fn run_until(
        &self,
        mut on_completion: impl FnMut((usize, Completion)),
        done: impl Fn() -> bool,
    ) -> Result<(), WorkerError> {
        let mut completions = Vec::with_capacity(COMPLETIONS_A_PASS);
        let budget = SpinBudget::new();
        let mut idle_since: Option<Instant> = None;
        while !done() {
            panic_ends::plant("worker");
            if self.pass(&mut completions, &mut on_completion)? {
                idle_since = None;
                continue;
            }
            let now = Instant::now();
            let since = *idle_since.get_or_insert(now);
            if now - since < budget.spin(now) {
                budget.pause();
                continue;
            }
            self.sleep_for_events()?;
            budget.waited(since.elapsed());
            idle_since = None;
        }
        Ok(())
    }

    /// Runs this thread's tasks until `future` is done, or the worker is stopped (`None`): for set-up and tests. Completions that arrive meanwhile
    /// are dropped.
    ///
    /// # Errors
    /// As `run`.
    pub fn block_on<T: 'static>(
        &self,
        future: impl Future<Output = T> + 'static,
    ) -> Result<Option<T>, WorkerError> {
        let result = Rc::new(RefCell::new(None));
        let slot = result.clone();
        self.spawn_local(async move {
            let value = future.await;
            *slot.borrow_mut() = Some(value);
        });
        self.run_until(|_| {}, || result.borrow().is_some() || self.shared.is_stopped())?;
        let value = result.borrow_mut().take();
        Ok(value)
    }

    /// Runs this thread's tasks, after a stop, until `future` is done. The other tasks go on meanwhile, because they may hold locks that the future
    /// waits for. Completions that arrive are dropped.
    ///
    /// # Errors
    /// As `run`.
    pub fn finish<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> Result<T, WorkerError> {
        let result = Rc::new(RefCell::new(None));
        let slot = result.clone();
        self.spawn_local(async move {
            let value = future.await;
            *slot.borrow_mut() = Some(value);
        });
        self.run_until(|_| {}, || result.borrow().is_some())?;
        let value = result.borrow_mut().take();
        Ok(value.expect("the loop ends only when there is a result"))
    }

    /// Does one step, for a simulation: one closure, one task, one completion, one turn of the disk, or the due timers. `false` if there was nothing
    /// to do. Never sleeps.
    ///
    /// # Errors
    /// If the ring fails.
    pub fn step(&self, on_completion: &mut dyn FnMut((usize, Completion))) -> Result<bool, WorkerError> {
        if self.run_jobs(1) || self.run_task() {
            return Ok(true);
        }
        if self.poll_completions(&mut Vec::new(), 1, on_completion) || self.turn_disk()? {
            return Ok(true);
        }
        Ok(self.timers.fire())
    }

    /// Checks every source once. Returns whether there was anything to do.
    fn pass(
        &self,
        completions: &mut Vec<Completion>,
        on_completion: &mut dyn FnMut((usize, Completion)),
    ) -> Result<bool, WorkerError> {
        let mut any = self.run_jobs(JOBS_A_PASS);
        any |= self.run_tasks();
        any |= self.poll_completions(completions, COMPLETIONS_A_PASS, on_completion);
        any |= self.turn_disk()?;
        any |= self.timers.fire();
        Ok(any)
    }

    /// Runs ready tasks for as long as a pass allows. Returns whether there were any. Charges the time of each to its payer.
    fn run_tasks(&self) -> bool {
        let Some((mut payer, mut task)) = self.executor.next() else { return false };
        let began = Instant::now();
        let mut since = began;
        loop {
            task.run();
            self.panics.take_up();
            let now = Instant::now();
            self.executor.charge(payer, now - since);
            if now - began >= TASKS_A_PASS {
                return true;
            }
            since = now;
            match self.executor.next() {
                Some(next) => (payer, task) = next,
                None => return true,
            }
        }
    }

    /// Runs a ready task, if there is one, as if every task took the same time.
    fn run_task(&self) -> bool {
        let Some((payer, task)) = self.executor.next() else { return false };
        task.run();
        self.executor.charge(payer, Duration::ZERO);
        self.panics.take_up();
        true
    }

    fn run_jobs(&self, most: usize) -> bool {
        let mut any = false;
        for job in std::iter::from_fn(|| self.shared.next_job()).take(most) {
            any = true;
            job(&self.spawner());
        }
        any
    }

    fn poll_completions(
        &self,
        completions: &mut Vec<Completion>,
        most: usize,
        on_completion: &mut dyn FnMut((usize, Completion)),
    ) -> bool {
        let mut any = false;
        for (place, cq) in self.cqs.iter().enumerate() {
            completions.clear();
            cq.poll(completions, most);
            any |= !completions.is_empty();
            completions.drain(..).for_each(|completion| on_completion((place, completion)));
        }
        any
    }

    /// Turns the disk's ring. Returns whether IOs completed or went to the kernel.
    fn turn_disk(&self) -> Result<bool, WorkerError> {
        match &self.disk {
            Some(disk) if disk.has_work() => {
                let enters = disk.counters().enters;
                let completed = disk.turn().map_err(WorkerError::Disk)?;
                // Entries that the kernel did not take are no progress: the worker sleeps before it tries again.
                Ok(completed > 0 || (disk.counters().enters > enters && !disk.has_work()))
            }
            _ => Ok(false),
        }
    }

    /// Sleeps until a source is ready or a timer is due. May return early.
    fn sleep_for_events(&self) -> Result<(), WorkerError> {
        let signal = self.shared.signal();
        signal.set_awake();
        if self.cqs.iter().any(|cq| !cq.arm()) {
            return Ok(());
        }
        // A task that becomes ready after this check notifies the signal.
        if self.executor.has_ready() || self.shared.is_stopped() || self.shared.has_jobs() {
            return Ok(());
        }
        let mut timeout = self.timers.until_next();
        if self.disk.as_ref().is_some_and(|disk| disk.has_work()) {
            timeout = Some(timeout.unwrap_or(RING_RETRY).min(RING_RETRY));
        }
        let timeout = timeout.map(|duration| Timespec {
            tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(duration.subsec_nanos()),
        });

        let mut fds = Vec::with_capacity(2 + self.cqs.len());
        fds.push(PollFd::new(signal.event(), PollFlags::IN));
        fds.extend(self.cqs.iter().map(|cq| PollFd::from_borrowed_fd(cq.event_fd(), PollFlags::IN)));
        let disk_fd = self.disk.as_ref().map(|disk| disk.poll_fd());
        if let Some(fd) = disk_fd {
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        }
        if !signal.fall_asleep() {
            return Ok(());
        }
        let polled = rustix::event::poll(&mut fds, timeout.as_ref());
        signal.set_awake();
        match polled {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(WorkerError::Wait(error.into())),
        }
        if !fds[0].revents().is_empty() {
            signal.take_event();
        }
        for (cq, fd) in self.cqs.iter().zip(&fds[1..]) {
            if !fd.revents().is_empty() {
                cq.take_event();
            }
        }
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.shared.close();
    }
}
