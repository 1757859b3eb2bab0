//! Makes metadata durable for all waiters: fsync, answers that must be durable, marks of zones that are about to be overwritten, and freed space that
//! is about to be given out again.
//!
//! # How it works
//! One of the waiters leads (`GroupSync`). It writes all records that are not durable through its own worker's ring, in one direct write that
//! is durable when it is done: no thread in between. Where that is impossible (a thread without a ring, more bytes than a write takes, a file
//! system without such writes) it has the committing thread (`GroupCommit`) sync the log, which blocks. The thread also prepares the files that
//! such writes go to, and syncs behind them (`meta/disk_store/direct.rs`).

use crate::group_commit::GroupCommit;
use crate::group_sync::GroupSync;
use crate::meta::{FlushStep, Meta};
use crate::pool::{LocalFuture, MarkStore, OwnRing};
use cuttlefs_common::status::Status;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What makes metadata durable.
pub struct Committer {
    flushes: Arc<Flushes>,
}

struct Flushes {
    meta: Arc<Meta>,
    syncs: GroupSync,
    commits: GroupCommit,
}

impl Committer {
    /// Starts the committing thread.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(meta: Arc<Meta>) -> std::io::Result<Arc<Self>> {
        let (flushed, is_ready) = (meta.clone(), AtomicBool::new(false));
        let work = move || {
            flushed.flush()?;
            if !is_ready.swap(true, Ordering::Relaxed) {
                flushed.prepare_flushes();
            }
            Ok(())
        };
        let commits = GroupCommit::start("committer", work)?;
        commits.ask();
        Ok(Self::of(meta, commits))
    }

    /// Without a thread: the driver of the server steps `commits`. For a server in one thread.
    pub fn by_hand(meta: Arc<Meta>) -> Arc<Self> {
        let flushed = meta.clone();
        let commits = GroupCommit::by_hand(move || flushed.flush());
        Self::of(meta, commits)
    }

    /// For tests and models: whoever asks for a flush does it at once.
    #[cfg(any(test, feature = "model-check"))]
    pub(crate) fn at_once(meta: Arc<Meta>) -> Arc<Self> {
        let flushed = meta.clone();
        let commits = GroupCommit::at_once(move || flushed.flush());
        Self::of(meta, commits)
    }

    fn of(meta: Arc<Meta>, commits: GroupCommit) -> Arc<Self> {
        Arc::new(Self { flushes: Arc::new(Flushes { meta, syncs: GroupSync::default(), commits }) })
    }

    /// The group commit, to step if there is no thread.
    pub fn commits(&self) -> &GroupCommit {
        &self.flushes.commits
    }

    /// Ends the thread, after it has served all waiters.
    pub fn stop(&self) {
        self.flushes.commits.stop();
    }
}

impl Flushes {
    /// Makes all batches so far durable. Only one caller runs this at a time.
    async fn lead(&self) -> Result<(), Status> {
        let Some(ring) = OwnRing::get() else {
            return self.commits.wait().await;
        };
        let (flush, write) = match self.meta.begin_flush()? {
            FlushStep::Nothing => return Ok(()),
            FlushStep::Block => return self.commits.wait().await,
            FlushStep::Write(flush, write) => (flush, write),
        };
        if flush.is_flush_due() {
            self.commits.ask();
        }
        let written = ring.write_blocks(write).await;
        if self.meta.end_flush(&flush, written)? { Ok(()) } else { self.commits.wait().await }
    }
}

impl Committer {
    /// The metadata.
    pub fn meta(&self) -> &Arc<Meta> {
        &self.flushes.meta
    }

    /// Whether a flush is under way. It may be over when this returns, so this is for callers to whom that does not matter.
    pub fn is_flushing(&self) -> bool {
        self.flushes.syncs.is_running()
    }

    /// Makes every batch so far durable.
    pub fn flush(&self) -> LocalFuture<'static, Result<(), Status>> {
        if self.flushes.meta.is_durable() {
            return Box::pin(std::future::ready(Ok(())));
        }
        let flushes = self.flushes.clone();
        Box::pin(async move {
            let flushed = flushes.syncs.wait(async || flushes.lead().await.is_ok()).await;
            flushed.map_err(|_| Status::Io)
        })
    }
}

impl MarkStore for Committer {
    fn put_marks(&self, regions: &[u64], marked: bool) -> std::io::Result<()> {
        self.flushes.meta.put_marks(regions, marked).map_err(failed)
    }

    fn flush_marks(&self) -> LocalFuture<'static, std::io::Result<()>> {
        let flushed = self.flush();
        Box::pin(async move { flushed.await.map_err(failed) })
    }
}

fn failed(status: Status) -> std::io::Error {
    std::io::Error::other(format!("the metadata: {status}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::{Batch, Caller, DiskOptions, DiskStore, Format, HashKey, Store};
    use crate::pool::{DataFiles, UringDisk};
    use cuttlefs_common::ids::PAGE_SIZE;
    use cuttlefs_common::memory::SharedMemory;
    use cuttlefs_common::world::SystemClock;
    use futures_lite::future::{block_on, poll_once};
    use std::path::Path;
    use std::rc::Rc;
    use std::time::{Duration, Instant};

    struct Served {
        store: Arc<DiskStore>,
        committed: Arc<Committer>,
        directory: tempfile::TempDir,
    }

    impl Served {
        fn start() -> Self {
            let directory = tempfile::tempdir().expect("directory");
            let options = DiskOptions { reserve_bytes: 0, direct_bytes: 64 << 10, ..DiskOptions::default() };
            let store = Arc::new(DiskStore::open(&directory.path().join("meta"), options).expect("open"));
            let clock = Arc::new(SystemClock::new());
            let root =
                Caller { uid: 0, gid: 0, umask: 0, drops_privileges: false, request: None, opens: None };
            let format = Format { uuid: [7; 16], hash_key: HashKey([7; 16]), root, root_mode: 0o755 };
            Meta::format(&*store, &*clock, &format).expect("format");
            let meta = Meta::open(store.clone(), clock).expect("open");
            let committed = Committer::start(Arc::new(meta)).expect("start");
            let served = Self { store, committed, directory };
            let until = Instant::now() + Duration::from_secs(60);
            while served.direct().is_none() {
                assert!(Instant::now() < until, "the thread makes ready what direct writes go to");
                std::thread::sleep(Duration::from_millis(5));
            }
            // The thread flushes what was committed before.
            served.commit(0);
            block_on(served.committed.flush()).expect("flushed");
            served
        }

        /// The bytes that direct writes have left, if there are any.
        fn direct(&self) -> Option<Vec<u8>> {
            let read = |name| std::fs::read(self.directory.path().join("meta").join(name)).ok();
            let bytes = [read("direct-0")?, read("direct-1")?].concat();
            (bytes.len() == 128 << 10).then_some(bytes)
        }

        fn commit(&self, number: u64) {
            let mut batch = Batch::default();
            batch.put(number.to_be_bytes(), number.to_be_bytes().repeat(20));
            self.store.commit(batch).expect("commits");
        }
    }

    fn ring(at: &Path) -> Rc<UringDisk> {
        let mut files = DataFiles::new();
        files.push(at.join("x"), tempfile::tempfile().expect("a file"), 1, false);
        let frames = Arc::new(SharedMemory::new("frames", PAGE_SIZE).expect("memfd"));
        Rc::new(UringDisk::new(Arc::new(files), frames).expect("io_uring"))
    }

    /// Drives a future as a worker does: its ring wakes the future if it has one, else another thread does.
    fn driven<T>(ring: Option<&UringDisk>, future: impl Future<Output = T>) -> T {
        let mut future = std::pin::pin!(future);
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(value) = block_on(poll_once(future.as_mut())) {
                return value;
            }
            assert!(Instant::now() < until, "nobody leads");
            if let Some(ring) = ring {
                ring.turn().expect("the ring works");
            }
        }
    }

    #[test]
    fn a_thread_with_a_ring_writes_by_it_and_another_one_has_it_synced() {
        let served = Served::start();
        let before = served.direct();
        served.commit(1);
        block_on(served.committed.flush()).expect("flushed");
        assert_eq!(served.direct(), before, "the thread synced");
        let ring = ring(served.directory.path());
        let own = OwnRing::set(&ring);
        served.commit(2);
        driven(Some(&ring), served.committed.flush()).expect("flushed");
        let after = served.direct();
        assert!(served.store.is_durable() && after != before);
        drop(own);
        served.commit(3);
        block_on(served.committed.flush()).expect("flushed");
        assert_eq!(served.direct(), after);
        served.committed.stop();
    }

    #[test]
    fn who_waits_for_a_leader_that_is_dropped_leads() {
        let served = Served::start();
        let ring = ring(served.directory.path());
        let _own = OwnRing::set(&ring);
        let mut waited = 0;
        for number in 0..40 {
            served.commit(number);
            let mut first = served.committed.flush();
            let led = block_on(poll_once(&mut first));
            let mut second = served.committed.flush();
            let followed = block_on(poll_once(&mut second));
            drop(first);
            // An earlier leader may have asked the thread to sync the log, so that the thread is done before this waiter.
            waited += u64::from((led, &followed) == (None, &None));
            if followed.is_none() {
                // Led by this thread's ring, or by the committing thread if no file for direct writes is free.
                driven(Some(&ring), second).expect("flushed");
            }
            assert!(served.store.is_durable());
        }
        assert!(waited > 0, "nobody waited for a leader");
        served.committed.stop();
    }

    #[test]
    fn whatever_was_committed_is_durable_behind_a_flush_on_any_thread() {
        const THREADS: u64 = 4;
        const ROUNDS: u64 = 200;
        let served = Served::start();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let served = &served;
                scope.spawn(move || {
                    // One of the threads has no ring.
                    let ring = (thread > 0).then(|| ring(served.directory.path()));
                    let _own = ring.as_ref().map(OwnRing::set);
                    for round in 0..ROUNDS {
                        served.commit(thread << 32 | round);
                        driven(ring.as_deref(), served.committed.flush()).expect("flushed");
                    }
                });
            }
        });
        served.committed.stop();
        let Served { store, committed, directory } = served;
        drop(committed);
        assert!(store.is_durable());
        drop(store);
        let store = DiskStore::open(&directory.path().join("meta"), DiskOptions::default()).expect("open");
        for thread in 0..THREADS {
            for round in 0..ROUNDS {
                let number: u64 = thread << 32 | round;
                assert!(store.get(&number.to_be_bytes()).expect("get").is_some());
            }
        }
    }
}
