//! Group commit: one thread that makes changes durable for all waiters, with one sync for many, so that no worker ever blocks on a
//! disk.
//!
//! # Invariants
//! * A waiter gets `Ok` only from a run of the work that began after its call.
//! * A failure is final: all later callers get it, too.
//!
//! # Group commit and group sync
//! If a sync is a request to a worker's io_uring, one of the waiters does it (`group_sync`), and no thread is needed. The work here blocks (syncs of
//! metadata that no ring can do), so it has a thread. It runs also if the caller has gone.
//!
//! In a server without threads the driver of the server runs the work (`step`), as late as it likes. Between a call and its result other tasks run,
//! as with a thread.

use crate::pool::LocalFuture;
use cuttlefs_common::panic_ends;
use cuttlefs_common::status::Status;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::thread::JoinHandle;

#[derive(Default)]
struct State {
    /// The number of the last run of the work that was asked for.
    asked: u64,
    /// All runs up to this number are done.
    done: u64,
    /// Whether a run failed.
    failed: bool,
    wakers: Vec<Waker>,
    stop: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
}

type Work = Box<dyn Fn() -> Result<(), Status> + Send + Sync>;

/// The thread and the work that it does. Without a thread, `step` does the work.
pub struct GroupCommit {
    shared: Arc<Shared>,
    work: Arc<Work>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Whether each waiter does the work by itself.
    is_at_once: bool,
}

impl GroupCommit {
    /// Starts a thread that does `work` whenever there are waiters.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(
        name: &str,
        work: impl Fn() -> Result<(), Status> + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let commit = Self::by_hand(work);
        let (shared, work) = (commit.shared.clone(), commit.work.clone());
        let place = name.to_owned();
        let run = move || run(&place, &work, &shared);
        let thread = std::thread::Builder::new().name(name.into()).spawn(run)?;
        *commit.thread.lock() = Some(thread);
        Ok(commit)
    }

    /// Without a thread. For a server in one thread.
    pub fn by_hand(work: impl Fn() -> Result<(), Status> + Send + Sync + 'static) -> Self {
        Self {
            shared: Arc::default(),
            work: Arc::new(Box::new(work)),
            thread: Mutex::new(None),
            is_at_once: false,
        }
    }

    /// For tests and models: each wait does the work at once.
    #[cfg(any(test, feature = "model-check"))]
    pub(crate) fn at_once(work: impl Fn() -> Result<(), Status> + Send + Sync + 'static) -> Self {
        Self { is_at_once: true, ..Self::by_hand(work) }
    }

    /// Resolves when a run of the work that began after this call has ended.
    pub fn wait(&self) -> LocalFuture<'static, Result<(), Status>> {
        let shared = self.shared.clone();
        let ticket = {
            let mut state = shared.state.lock();
            state.asked += 1;
            state.asked
        };
        shared.work.notify_one();
        if self.is_at_once {
            self.step();
        }
        Box::pin(std::future::poll_fn(move |context| {
            let mut state = shared.state.lock();
            if state.done >= ticket {
                return Poll::Ready(if state.failed { Err(Status::Io) } else { Ok(()) });
            }
            state.wakers.push(context.waker().clone());
            Poll::Pending
        }))
    }

    /// Asks for a run that nobody waits for.
    pub fn ask(&self) {
        self.shared.state.lock().asked += 1;
        self.shared.work.notify_one();
    }

    /// Whether a run was asked for that is not done.
    pub fn is_asked(&self) -> bool {
        let state = self.shared.state.lock();
        state.asked > state.done
    }

    /// Runs the work once if it was asked for. Returns whether it was.
    pub fn step(&self) -> bool {
        let state = self.shared.state.lock();
        let asked = state.asked > state.done;
        if asked {
            drop(commit(&self.work, &self.shared, state));
        }
        asked
    }

    /// Ends the thread, after it has served all waiters.
    pub fn stop(&self) {
        self.shared.state.lock().stop = true;
        self.shared.work.notify_one();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("a committing thread panicked");
        }
    }
}

fn run(place: &str, work: &Work, shared: &Shared) {
    let mut state = shared.state.lock();
    loop {
        panic_ends::plant(place);
        if state.asked == state.done {
            if state.stop {
                return;
            }
            shared.work.wait(&mut state);
            continue;
        }
        state = commit(work, shared, state);
    }
}

/// Runs the work once, for all that wait by now.
fn commit<'s>(work: &Work, shared: &'s Shared, state: MutexGuard<'s, State>) -> MutexGuard<'s, State> {
    let upto = state.asked;
    drop(state);
    let failed = work().is_err();
    let mut state = shared.state.lock();
    state.done = upto;
    state.failed |= failed;
    for waker in state.wakers.drain(..) {
        waker.wake();
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_lite::future::block_on;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn a_wait_is_answered_by_a_run_that_began_after_it() {
        let begun = Arc::new(AtomicU64::new(0));
        let counted = begun.clone();
        let commit = GroupCommit::start("test", move || {
            counted.fetch_add(1, Ordering::SeqCst);
            Ok(())
        })
        .expect("start");
        for _ in 0..100 {
            let before = begun.load(Ordering::SeqCst);
            block_on(commit.wait()).expect("runs");
            assert!(begun.load(Ordering::SeqCst) > before);
        }
        let many: Vec<_> = (0..50).map(|_| commit.wait()).collect();
        many.into_iter().for_each(|wait| block_on(wait).expect("runs"));
        commit.stop();
    }

    #[test]
    fn by_hand_nobody_is_told_before_a_step_and_one_is_enough_for_all() {
        let runs = Arc::new(AtomicU64::new(0));
        let counted = runs.clone();
        let commit = GroupCommit::by_hand(move || {
            counted.fetch_add(1, Ordering::SeqCst);
            Ok(())
        });
        assert!(!commit.step(), "nobody waits");
        let mut waits: Vec<_> = (0..3).map(|_| commit.wait()).collect();
        assert_eq!(block_on(futures_lite::future::poll_once(&mut waits[0])), None);
        assert!(commit.is_asked() && commit.step() && !commit.is_asked());
        waits.into_iter().for_each(|wait| block_on(wait).expect("runs"));
        assert_eq!(runs.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_failure_is_for_good() {
        let runs = AtomicU64::new(0);
        let fails_once =
            move || if runs.fetch_add(1, Ordering::SeqCst) == 1 { Err(Status::Io) } else { Ok(()) };
        let commit = GroupCommit::start("test", fails_once).expect("start");
        let outcomes: Vec<_> = (0..3).map(|_| block_on(commit.wait())).collect();
        assert_eq!(outcomes, [Ok(()), Err(Status::Io), Err(Status::Io)]);
        commit.stop();
    }
}
