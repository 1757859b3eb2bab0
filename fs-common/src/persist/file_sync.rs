//! Group commit of a mapped file: many ranges, one data sync.
//!
//! # How it works
//! A thread sleeps until there is a waiter. It takes all waiters that are there by then, syncs the file once
//! (`fdatasync` writes back the dirty pages of mappings, too) and tells them all. A waiter that comes meanwhile is in
//! the next round. Callers never wait here, so the NIC's thread can call.
//!
//! # Invariants
//! * A waiter gets `Ok` only from a successful sync that began after its call.
//! * Waiters are told in the order of their calls.
//! * After the first failure every call fails.

use super::{Persistence, SyncFailed, WhenPersistent};
use crate::memory::SharedMemory;
use crate::panic_ends;
use parking_lot::{Condvar, Mutex};
use rustix::fd::OwnedFd;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

#[derive(Default)]
struct State {
    /// Bounded by the outstanding flushes of all queue pairs, each of which has a bounded queue.
    waiting: Vec<WhenPersistent>,
    failed: bool,
    stopping: bool,
}

struct Shared {
    file: OwnedFd,
    state: Mutex<State>,
    asked: Condvar,
    /// Syncs done, and requests they served. Written by the thread; relaxed, they are figures.
    syncs: AtomicU64,
    served: AtomicU64,
}

/// A file whose mapped bytes become durable by syncing it.
pub struct FileSync {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl FileSync {
    /// Starts the thread that syncs `file`.
    ///
    /// # Errors
    /// If there is no thread to be had.
    pub fn start(file: OwnedFd) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            file,
            state: Mutex::default(),
            asked: Condvar::new(),
            syncs: AtomicU64::new(0),
            served: AtomicU64::new(0),
        });
        let running = shared.clone();
        let thread =
            std::thread::Builder::new().name("cuttlefs-persist".to_owned()).spawn(move || running.run())?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Syncs done, and how many requests they served.
    pub fn counts(&self) -> (u64, u64) {
        (self.shared.syncs.load(Ordering::Relaxed), self.shared.served.load(Ordering::Relaxed))
    }
}

impl Shared {
    fn run(&self) {
        loop {
            let (batch, mut failed) = {
                let mut state = self.state.lock();
                while state.waiting.is_empty() && !state.stopping {
                    self.asked.wait(&mut state);
                }
                if state.waiting.is_empty() {
                    return;
                }
                (std::mem::take(&mut state.waiting), state.failed)
            };
            panic_ends::plant("cuttlefs-persist");
            if !failed && let Err(error) = rustix::fs::fdatasync(&self.file) {
                tracing::error!(%error, "the log could not be synced; it takes nothing more");
                failed = true;
                self.state.lock().failed = true;
            }
            self.syncs.fetch_add(1, Ordering::Relaxed);
            self.served.fetch_add(batch.len() as u64, Ordering::Relaxed);
            for done in batch {
                done(if failed { Err(SyncFailed) } else { Ok(()) });
            }
        }
    }
}

impl Persistence for FileSync {
    fn by_cache_lines(&self) -> bool {
        false
    }

    fn persist(&self, _memory: &SharedMemory, _offset: usize, _len: usize, done: WhenPersistent) {
        self.shared.state.lock().waiting.push(done);
        self.shared.asked.notify_one();
    }
}

impl Drop for FileSync {
    fn drop(&mut self) {
        self.shared.state.lock().stopping = true;
        self.shared.asked.notify_one();
        // The last reference may go in a callback of the thread itself; then it ends by itself.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
            && thread.join().is_err()
        {
            tracing::error!("the persistence thread panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn many_requests_share_a_sync_and_are_told_in_order() {
        let file = tempfile::tempfile().expect("file");
        file.set_len(8192).expect("len");
        let memory = SharedMemory::new("unused", 4096).expect("memory");
        let sync = FileSync::start(file.into()).expect("thread");
        let (give, take) = channel();
        for index in 0..1000 {
            let give = give.clone();
            sync.persist(&memory, 0, 64, Box::new(move |result| give.send((index, result)).expect("taken")));
        }
        for index in 0..1000 {
            assert_eq!(take.recv().expect("told"), (index, Ok(())));
        }
        let (syncs, served) = sync.counts();
        assert!(served == 1000 && syncs <= served, "{syncs} syncs for {served}");
    }

    #[test]
    fn a_failed_sync_is_final() {
        // A pipe cannot be synced.
        let (_read, write) = rustix::pipe::pipe().expect("pipe");
        let memory = SharedMemory::new("unused", 4096).expect("memory");
        let sync = FileSync::start(write).expect("thread");
        for _ in 0..2 {
            assert_eq!(sync.persist_and_wait(&memory, 0, 1), Err(SyncFailed));
        }
    }
}
