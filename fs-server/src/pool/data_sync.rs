//! One sync of the data files for everybody who waits, on whichever worker's disk.
//!
//! # How it works
//! A sync of a data file covers every write to it that has completed, whoever submitted it. So who finds no sync under way
//! does one, and whoever comes meanwhile waits for the next, which the first of them does for all. Nobody waits on
//! purpose: alone, a caller syncs at once.
//!
//! # Invariants
//! * Who waits is told `Ok` only by a sync that began after the call.
//! * One sync is under way at a time; one whose future is dropped counts for nobody, and the next who waits does it.
//!
//! Work that blocks is committed for many by a thread instead: `group_commit`, which says why there are two.
//!
//! # Failure
//! A failed sync is final, for all who wait and for all who come later: what is on SSD is unknown, and a second sync would
//! say that it is well (the kernel reports a write that failed once). Nothing but a restart mends it.

use super::disk::Disk;
use event_listener::Event;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// A data sync failed, this one or one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a sync of the data files failed; nothing is durable any more until the server is restarted")]
pub struct DataSyncFailed;

#[derive(Debug, Default)]
struct State {
    /// Syncs begun; the number of the one under way, if there is one.
    begun: u64,
    /// The last one that ended well.
    done: u64,
    is_running: bool,
}

/// What those who sync share.
#[derive(Debug, Default)]
pub struct DataSync {
    state: Mutex<State>,
    /// Set once, under `state`. Acquire and release, so that it can be looked at without it.
    failed: AtomicBool,
    /// Told when a sync ended, in whatever way.
    ended: Event,
}

impl DataSync {
    /// Whether one failed.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Syncs begun so far, for `status`.
    pub fn count(&self) -> u64 {
        self.state.lock().begun
    }

    /// Resolves when every write that completed before the call is durable. `disk` is the caller's.
    ///
    /// # Errors
    /// [`DataSyncFailed`].
    pub async fn sync(&self, disk: &dyn Disk) -> Result<(), DataSyncFailed> {
        let wanted = self.state.lock().begun + 1;
        loop {
            let ended = {
                let mut state = self.state.lock();
                if self.has_failed() {
                    return Err(DataSyncFailed);
                }
                if state.done >= wanted {
                    return Ok(());
                }
                if state.is_running {
                    Some(self.ended.listen())
                } else {
                    state.is_running = true;
                    state.begun += 1;
                    None
                }
            };
            match ended {
                Some(ended) => ended.await,
                None => self.run(disk).await,
            }
        }
    }

    /// Does the sync that the caller has begun.
    async fn run(&self, disk: &dyn Disk) {
        let mut run = Run { shared: self, is_well: None };
        let result = disk.sync().await;
        if let Err(error) = &result {
            tracing::error!(%error, "a data sync failed; nothing is durable any more until the server is restarted");
        }
        run.is_well = Some(result.is_ok());
    }
}

/// A sync under way.
struct Run<'a> {
    shared: &'a DataSync,
    /// Whether it ended well; `None`: it was given up.
    is_well: Option<bool>,
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.is_running = false;
        match self.is_well {
            Some(true) => state.done = state.begun,
            Some(false) => self.shared.failed.store(true, Ordering::Release),
            None => {}
        }
        drop(state);
        self.shared.ended.notify(usize::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::disk::{IoDone, IoRequest, LocalFuture};
    use futures_lite::future::{block_on, poll_once};
    use std::io;
    use std::pin::pin;
    use std::sync::atomic::AtomicU64;

    /// A disk whose syncs are done, or fail, when the test says so.
    #[derive(Default)]
    struct Gated {
        begun: AtomicU64,
        open: async_lock::Mutex<()>,
        fails: AtomicBool,
    }

    struct Gate(&'static Gated);

    impl Disk for Gate {
        fn submit(&self, _: Vec<IoRequest>) -> LocalFuture<'static, Vec<IoDone>> {
            unreachable!("nothing is transferred here")
        }

        fn sync(&self) -> LocalFuture<'static, io::Result<()>> {
            let gated = self.0;
            gated.begun.fetch_add(1, Ordering::SeqCst);
            Box::pin(async move {
                drop(gated.open.lock().await);
                if gated.fails.load(Ordering::SeqCst) { Err(io::Error::other("the test's")) } else { Ok(()) }
            })
        }
    }

    fn gated() -> (&'static Gated, Gate) {
        let gated: &'static Gated = Box::leak(Box::default());
        (gated, Gate(gated))
    }

    #[test]
    fn who_comes_while_one_is_under_way_shares_the_next() {
        let ((gated, disk), shared) = (gated(), DataSync::default());
        block_on(async {
            let closed = gated.open.lock().await;
            let mut first = pin!(shared.sync(&disk));
            assert_eq!(poll_once(&mut first).await, None);
            let mut others: Vec<_> = (0..5).map(|_| Box::pin(shared.sync(&disk))).collect();
            for other in &mut others {
                assert_eq!(poll_once(other).await, None);
            }
            assert_eq!(gated.begun.load(Ordering::SeqCst), 1);
            drop(closed);
            assert_eq!(first.await, Ok(()));
            let closed = gated.open.lock().await;
            for other in &mut others {
                assert_eq!(poll_once(other).await, None, "the first one's began before they came");
            }
            drop(closed);
            for other in others {
                assert_eq!(other.await, Ok(()));
            }
            assert_eq!(gated.begun.load(Ordering::SeqCst), 2);
            assert_eq!(shared.sync(&disk).await, Ok(()));
            assert_eq!(gated.begun.load(Ordering::SeqCst), 3, "and who comes later has one of his own");
        });
    }

    #[test]
    fn a_failure_is_everybodys_and_for_good() {
        let ((gated, disk), shared) = (gated(), DataSync::default());
        block_on(async {
            let closed = gated.open.lock().await;
            let mut first = pin!(shared.sync(&disk));
            let mut second = pin!(shared.sync(&disk));
            assert_eq!((poll_once(&mut first).await, poll_once(&mut second).await), (None, None));
            gated.fails.store(true, Ordering::SeqCst);
            drop(closed);
            assert_eq!(first.await, Err(DataSyncFailed));
            gated.fails.store(false, Ordering::SeqCst);
            assert_eq!(second.await, Err(DataSyncFailed));
            assert_eq!(shared.sync(&disk).await, Err(DataSyncFailed));
            assert!(shared.has_failed());
            assert_eq!(gated.begun.load(Ordering::SeqCst), 1, "it is not tried again");
        });
    }

    #[test]
    fn one_that_was_given_up_is_done_by_who_waits_for_it() {
        let ((gated, disk), shared) = (gated(), DataSync::default());
        block_on(async {
            let closed = gated.open.lock().await;
            let mut first = Box::pin(shared.sync(&disk));
            assert_eq!(poll_once(&mut first).await, None);
            let mut second = pin!(shared.sync(&disk));
            assert_eq!(poll_once(&mut second).await, None);
            drop(first);
            assert_eq!(poll_once(&mut second).await, None);
            drop(closed);
            assert_eq!(second.await, Ok(()));
            assert_eq!(gated.begun.load(Ordering::SeqCst), 2);
        });
    }

    /// Threads that each have a disk of their own, over one device.
    #[derive(Default)]
    struct Device {
        written: AtomicU64,
        durable: AtomicU64,
        syncs: AtomicU64,
    }

    struct Own(&'static Device);

    impl Disk for Own {
        fn submit(&self, _: Vec<IoRequest>) -> LocalFuture<'static, Vec<IoDone>> {
            unreachable!("nothing is transferred here")
        }

        fn sync(&self) -> LocalFuture<'static, io::Result<()>> {
            let device = self.0;
            let covered = device.written.load(Ordering::SeqCst);
            Box::pin(async move {
                std::thread::yield_now();
                device.durable.fetch_max(covered, Ordering::SeqCst);
                device.syncs.fetch_add(1, Ordering::SeqCst);
                Ok(())
            })
        }
    }

    #[test]
    fn a_sync_covers_what_was_written_before_it_on_any_thread() {
        const THREADS: u64 = 4;
        const ROUNDS: u64 = 500;
        let device: &'static Device = Box::leak(Box::default());
        let shared = DataSync::default();
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let disk = Own(device);
                    for _ in 0..ROUNDS {
                        let mine = device.written.fetch_add(1, Ordering::SeqCst) + 1;
                        block_on(shared.sync(&disk)).expect("syncs");
                        assert!(device.durable.load(Ordering::SeqCst) >= mine);
                    }
                });
            }
        });
        assert!(device.syncs.load(Ordering::SeqCst) <= THREADS * ROUNDS);
    }
}
