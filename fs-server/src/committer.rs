//! The committer: one thread that makes metadata durable for everybody who waits, with one sync for many
//! (group commit), so that no worker ever blocks on the store's disk.
//!
//! Also the place where `Meta` meets the regions' narrow view of it (`MetaPort`).
//!
//! # Invariants
//! A waiter is told `Ok` only by a flush that began after it asked.

use crate::meta::Meta;
use crate::pool::LocalFuture;
use crate::region::{DataCommit, MetaPort, NoteData};
use cuttlefs_common::attr::Attr;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::region::Extent;
use cuttlefs_common::status::Status;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::thread::JoinHandle;

#[derive(Default)]
struct State {
    /// Flushes asked for; the number of the last one somebody waits for.
    asked: u64,
    /// All up to this one are done.
    done: u64,
    /// How the flush that ended at `done` went; a failed one is final.
    failed: bool,
    wakers: Vec<Waker>,
    stop: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    work: Condvar,
}

/// Metadata with its committer thread.
pub struct CommittedMeta {
    meta: Arc<Meta>,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl CommittedMeta {
    /// Starts the committer.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(meta: Arc<Meta>) -> std::io::Result<Arc<Self>> {
        let shared = Arc::new(Shared::default());
        let thread = std::thread::Builder::new().name("committer".into()).spawn({
            let (meta, shared) = (meta.clone(), shared.clone());
            move || run(&meta, &shared)
        })?;
        Ok(Arc::new(Self { meta, shared, thread: Mutex::new(Some(thread)) }))
    }

    /// Without a thread: who asks for a flush flushes. For a server in one thread.
    pub fn inline(meta: Arc<Meta>) -> Arc<Self> {
        Arc::new(Self { meta, shared: Arc::default(), thread: Mutex::new(None) })
    }

    /// Ends the thread; who still waits is served first.
    pub fn stop(&self) {
        self.shared.state.lock().stop = true;
        self.shared.work.notify_one();
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the committer thread panicked");
        }
    }
}

fn run(meta: &Meta, shared: &Shared) {
    let mut state = shared.state.lock();
    loop {
        if state.asked == state.done {
            if state.stop {
                return;
            }
            shared.work.wait(&mut state);
            continue;
        }
        let upto = state.asked;
        drop(state);
        let failed = meta.flush().is_err();
        state = shared.state.lock();
        state.done = upto;
        state.failed |= failed;
        for waker in state.wakers.drain(..) {
            waker.wake();
        }
    }
}

impl MetaPort for CommittedMeta {
    fn attr(&self, ino: InodeNo) -> Result<Attr, Status> {
        self.meta.attr(ino)
    }

    fn extents(&self, ino: InodeNo) -> Result<Vec<Extent>, Status> {
        self.meta.extents(ino)
    }

    fn note_data(&self, ino: InodeNo, note: NoteData) -> Result<Attr, Status> {
        self.meta.note_data(ino, note)
    }

    fn commit_data(&self, commits: &[DataCommit]) -> Result<(), Status> {
        self.meta.commit_data(commits)
    }

    fn flush(&self) -> LocalFuture<'static, Result<(), Status>> {
        if self.thread.lock().is_none() {
            return Box::pin(std::future::ready(self.meta.flush()));
        }
        let shared = self.shared.clone();
        let ticket = {
            let mut state = shared.state.lock();
            state.asked += 1;
            state.asked
        };
        shared.work.notify_one();
        Box::pin(std::future::poll_fn(move |context| {
            let mut state = shared.state.lock();
            if state.done >= ticket {
                return Poll::Ready(if state.failed { Err(Status::Io) } else { Ok(()) });
            }
            state.wakers.push(context.waker().clone());
            Poll::Pending
        }))
    }
}
