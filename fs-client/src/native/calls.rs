//! Threads for requests that wait for the server: those of queues, whose poster goes on, and those whose caller waits no longer than a deadline.
//!
//! A request that was sent must be sent again until it is answered (`transport`), or its slot would be lost and its outcome unknown. So a caller whose
//! time is over goes away, and the thread stays with the request. A job that no thread has taken yet is taken back.
//!
//! # Bound
//! [`WAITING_MAX`] jobs wait for a thread; a further one is refused (`Busy`).

use super::NativeError;
use crate::transport::interrupt::{self, Interruptible};
use cuttlefs_common::panic_ends;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The most jobs that wait for a thread: the requests of some full queues.
const WAITING_MAX: usize = 1024;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<(u64, Job)>,
    next: u64,
    ended: bool,
}

#[derive(Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

/// The threads; see the module.
pub(super) struct Calls {
    shared: Arc<Shared>,
}

/// A call whose caller waits.
struct Call<T> {
    outcome: Mutex<Outcome<T>>,
    changed: Condvar,
    /// The caller does not wait any more (release; read with acquire by the thread that has the call).
    given_up: AtomicBool,
}

enum Outcome<T> {
    Waits,
    Runs,
    Done(T),
}

/// A job's hold of its call. A job that is dropped and was never run tells its caller.
struct Ticket<T>(Arc<Call<Result<T, NativeError>>>);

impl<T> Drop for Ticket<T> {
    fn drop(&mut self) {
        let mut outcome = self.0.outcome.lock();
        if matches!(*outcome, Outcome::Waits) {
            *outcome = Outcome::Done(Err(NativeError::Closed));
            self.0.changed.notify_one();
        }
    }
}

impl<T: Send> Interruptible for Call<T> {
    fn is_interrupted(&self) -> bool {
        self.given_up.load(Ordering::Acquire)
    }
}

impl Calls {
    /// Starts so many threads. They have the descriptors and blocked signals of the calling thread.
    ///
    /// # Errors
    /// The system gives no thread.
    pub(super) fn start(threads: usize) -> Result<Self, NativeError> {
        let calls = Self { shared: Arc::default() };
        for _ in 0..threads.max(1) {
            let shared = calls.shared.clone();
            std::thread::Builder::new().name("cuttlefs-call".to_owned()).spawn(move || {
                while let Some(job) = shared.next() {
                    panic_ends::plant("native");
                    job();
                }
            })?;
        }
        Ok(calls)
    }

    /// Has a thread do this, sooner or later.
    ///
    /// # Errors
    /// `Busy`, `Closed`.
    pub(super) fn spawn(&self, job: impl FnOnce() + Send + 'static) -> Result<(), NativeError> {
        self.put(Box::new(job)).map(drop)
    }

    fn put(&self, job: Job) -> Result<u64, NativeError> {
        let mut waiting = self.shared.waiting.lock();
        if waiting.ended {
            return Err(NativeError::Closed);
        }
        if waiting.jobs.len() >= WAITING_MAX {
            return Err(NativeError::Busy { waiting: waiting.jobs.len() });
        }
        waiting.next += 1;
        let number = waiting.next;
        waiting.jobs.push_back((number, job));
        self.shared.changed.notify_one();
        Ok(number)
    }

    /// Has a thread do this, and waits for the end of it, no longer than `limit`.
    ///
    /// # Errors
    /// `Deadline`, `Busy`, `Closed`, and the call's own.
    pub(super) fn within<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> Result<T, NativeError> + Send + 'static,
    ) -> Result<T, NativeError> {
        let until = Instant::now() + limit;
        let call = Arc::new(Call {
            outcome: Mutex::new(Outcome::Waits),
            changed: Condvar::new(),
            given_up: AtomicBool::new(false),
        });
        let runs = call.clone();
        let ticket = Ticket(runs);
        let number = self.put(Box::new(move || {
            let Ticket(call) = &ticket;
            *call.outcome.lock() = Outcome::Runs;
            let result = interrupt::handling(call.clone(), work);
            *call.outcome.lock() = Outcome::Done(result);
            call.changed.notify_one();
        }))?;
        let mut outcome = call.outcome.lock();
        loop {
            if let Outcome::Done(_) = &*outcome {
                let Outcome::Done(result) = std::mem::replace(&mut *outcome, Outcome::Runs) else {
                    unreachable!("it was just looked at");
                };
                return result;
            }
            if call.changed.wait_until(&mut outcome, until).timed_out()
                && !matches!(*outcome, Outcome::Done(_))
            {
                call.given_up.store(true, Ordering::Release);
                drop(outcome);
                let is_taken_back = self.shared.take_back(number);
                return Err(NativeError::Deadline { waited: limit, may_be_done: !is_taken_back });
            }
        }
    }

    /// No more jobs. Those that wait are dropped; the threads end with what they do.
    pub(super) fn end(&self) {
        let mut waiting = self.shared.waiting.lock();
        waiting.ended = true;
        let jobs = std::mem::take(&mut waiting.jobs);
        drop(waiting);
        self.shared.changed.notify_all();
        drop(jobs);
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    fn next(&self) -> Option<Job> {
        let mut waiting = self.waiting.lock();
        loop {
            if let Some((_, job)) = waiting.jobs.pop_front() {
                return Some(job);
            }
            if waiting.ended {
                return None;
            }
            self.changed.wait(&mut waiting);
        }
    }

    fn take_back(&self, number: u64) -> bool {
        let mut waiting = self.waiting.lock();
        let place = waiting.jobs.iter().position(|(found, _)| *found == number);
        place.and_then(|place| waiting.jobs.remove(place)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_caller_whose_time_is_over_goes_and_the_call_goes_on() {
        let calls = Calls::start(1).expect("a thread");
        assert_eq!(calls.within(LONG, || Ok(5)).expect("done"), 5);
        let (go, wait) = channel::<()>();
        let (tell, told) = channel();
        let late = calls.within(Duration::from_millis(20), move || {
            wait.recv().expect("the test goes on");
            tell.send("done").expect("the test waits");
            Ok(())
        });
        // On a machine that gives the thread no time the call may not have begun, and then it never does.
        let begun = match late {
            Err(NativeError::Deadline { may_be_done, .. }) => may_be_done,
            other => panic!("{other:?}"),
        };
        if begun {
            // The only thread is busy, so this one is taken back.
            let never =
                calls.within(Duration::from_millis(20), || -> Result<(), NativeError> { panic!("run") });
            assert!(matches!(never, Err(NativeError::Deadline { may_be_done: false, .. })), "{never:?}");
            go.send(()).expect("the thread waits");
            assert_eq!(told.recv_timeout(LONG), Ok("done"));
        }
        assert_eq!(calls.within(LONG, || Ok(6)).expect("done"), 6);
        calls.end();
        assert!(matches!(calls.spawn(|| ()), Err(NativeError::Closed)));
    }
}
