//! Group commit of memory to a file: many ranges, one data sync.
//!
//! # How it works
//! The bytes are in memory, and the file has a copy. A thread sleeps until there is a waiter. It takes all waiters of that moment, writes their
//! ranges to the file, syncs it once (`fdatasync`) and tells them all. A waiter that comes meanwhile is in the next round. Callers never wait here,
//! so the NIC's thread can call.
//!
//! The file is not mapped, because an RNIC cannot use such a mapping: a mapping of a disk's file cannot be pinned for writing (the kernel's file
//! system must be told of each page that becomes dirty; Linux 6.5 and later refuse). So the disk also gets no other bytes.
//!
//! # Invariants
//! * Only the ranges of calls are written to the file.
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

/// A range, and the waiter to tell.
struct Asked {
    offset: usize,
    len: usize,
    done: WhenPersistent,
}

/// Most bytes of one write to the file.
const PIECE: usize = 64 << 10;

#[derive(Default)]
struct State {
    /// Bounded by the outstanding flushes of all queue pairs, each of which has a bounded queue.
    waiting: Vec<Asked>,
    failed: bool,
    stopping: bool,
}

struct Shared {
    file: OwnedFd,
    memory: Arc<SharedMemory>,
    state: Mutex<State>,
    asked: Condvar,
    /// Syncs done, and requests that they served. Written by the thread; relaxed, since they are only figures.
    syncs: AtomicU64,
    served: AtomicU64,
}

/// Memory whose bytes become durable in a file.
pub struct FileSync {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl FileSync {
    /// Starts the thread that copies `memory` to `file`, each byte to its own offset.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn start(file: OwnedFd, memory: Arc<SharedMemory>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            file,
            memory,
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

    /// Syncs done, and requests that they served.
    pub fn counts(&self) -> (u64, u64) {
        (self.shared.syncs.load(Ordering::Relaxed), self.shared.served.load(Ordering::Relaxed))
    }
}

impl Shared {
    /// Writes the ranges and syncs.
    fn write(&self, batch: &[Asked], piece: &mut [u8]) -> rustix::io::Result<()> {
        // Adjacent ranges go in one write.
        let mut ranges: Vec<(usize, usize)> = batch.iter().map(|asked| (asked.offset, asked.len)).collect();
        ranges.sort_unstable();
        ranges.dedup_by(|next, open| {
            let joins = next.0 <= open.0 + open.1;
            if joins {
                open.1 = open.1.max(next.0 + next.1 - open.0);
            }
            joins
        });
        for (start, len) in ranges {
            for offset in (start..start + len).step_by(PIECE) {
                let mut left = &mut piece[..PIECE.min(start + len - offset)];
                self.memory.read(offset, left);
                let mut at = offset;
                while !left.is_empty() {
                    let written = rustix::io::pwrite(&self.file, &*left, at as u64)?;
                    if written == 0 {
                        return Err(rustix::io::Errno::IO);
                    }
                    at += written;
                    left = &mut left[written..];
                }
            }
        }
        rustix::fs::fdatasync(&self.file)
    }

    fn run(&self) {
        let mut piece = vec![0; PIECE];
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
            if !failed && let Err(error) = self.write(&batch, &mut piece) {
                tracing::error!(%error, "the log could not be synced; it takes nothing more");
                failed = true;
                self.state.lock().failed = true;
            }
            self.syncs.fetch_add(1, Ordering::Relaxed);
            self.served.fetch_add(batch.len() as u64, Ordering::Relaxed);
            for Asked { done, .. } in batch {
                done(if failed { Err(SyncFailed) } else { Ok(()) });
            }
        }
    }
}

impl Persistence for FileSync {
    fn by_cache_lines(&self) -> bool {
        false
    }

    fn persist(&self, memory: &SharedMemory, offset: usize, len: usize, done: WhenPersistent) {
        let own = &*self.shared.memory;
        assert!(std::ptr::eq(memory, own), "a domain is asked for its own memory");
        assert!(own.contains(offset as u64, len as u64), "who asks has checked the range");
        self.shared.state.lock().waiting.push(Asked { offset, len, done });
        self.shared.asked.notify_one();
    }
}

impl Drop for FileSync {
    fn drop(&mut self) {
        self.shared.state.lock().stopping = true;
        self.shared.asked.notify_one();
        // If a callback of the thread itself drops the last reference, the thread ends by itself.
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
    use std::os::unix::fs::FileExt;
    use std::sync::mpsc::channel;

    #[test]
    fn many_requests_share_a_sync_and_are_told_in_order() {
        let file = tempfile::tempfile().expect("file");
        file.set_len(8192).expect("len");
        let copy = file.try_clone().expect("the file");
        let memory = Arc::new(SharedMemory::new("log", 8192).expect("memory"));
        let sync = FileSync::start(file.into(), memory.clone()).expect("thread");
        memory.fill(0, 8192, 7);
        let (give, take) = channel();
        for index in 0..1000 {
            let give = give.clone();
            sync.persist(
                &memory,
                index * 4,
                4,
                Box::new(move |result| give.send((index, result)).expect("taken")),
            );
        }
        for index in 0..1000 {
            assert_eq!(take.recv().expect("told"), (index, Ok(())));
        }
        let mut bytes = [0; 8192];
        copy.read_exact_at(&mut bytes, 0).expect("read");
        assert!(bytes[..4000].iter().all(|byte| *byte == 7), "what was asked for is in the file");
        assert!(bytes[4000..].iter().all(|byte| *byte == 0), "and nothing else");
        let (syncs, served) = sync.counts();
        assert!(served == 1000 && syncs <= served, "{syncs} syncs for {served}");
    }

    #[test]
    fn a_failed_sync_is_final() {
        // A pipe has no offsets to write at.
        let (_read, write) = rustix::pipe::pipe().expect("pipe");
        let memory = Arc::new(SharedMemory::new("log", 4096).expect("memory"));
        let sync = FileSync::start(write, memory.clone()).expect("thread");
        for _ in 0..2 {
            assert_eq!(sync.persist_and_wait(&memory, 0, 1), Err(SyncFailed));
        }
    }
}
