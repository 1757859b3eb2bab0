//! One sync of the data files for all waiters, on any worker's disk.
//!
//! A sync of a data file covers every write to it that has completed, by any worker. So one of the waiters does it for all (`group_sync` says how,
//! and what a failure means).

use super::disk::Disk;
use crate::group_sync::{GroupSync, SyncFailed};

/// The state that all workers share.
#[derive(Debug, Default)]
pub struct DataSync {
    group: GroupSync,
}

impl DataSync {
    /// Whether a sync has failed.
    pub fn has_failed(&self) -> bool {
        self.group.has_failed()
    }

    /// Syncs begun so far, for `status`.
    pub fn count(&self) -> u64 {
        self.group.count()
    }

    /// Resolves when every write that completed before the call is durable. `disk` is the caller's disk.
    ///
    /// # Errors
    /// [`SyncFailed`].
    pub async fn sync(&self, disk: &dyn Disk) -> Result<(), SyncFailed> {
        let lead = async || {
            let result = disk.sync().await;
            if let Err(error) = &result {
                tracing::error!(%error, "a data sync failed; nothing is durable any more until the server is restarted");
            }
            result.is_ok()
        };
        self.group.wait(lead).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::disk::{IoDone, IoRequest, LocalFuture};
    use futures_lite::future::{block_on, poll_once};
    use std::io;
    use std::pin::pin;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    /// A disk whose syncs succeed or fail when the test says so.
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
            assert_eq!(first.await, Err(SyncFailed));
            gated.fails.store(false, Ordering::SeqCst);
            assert_eq!(second.await, Err(SyncFailed));
            assert_eq!(shared.sync(&disk).await, Err(SyncFailed));
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

    /// One device, on which several threads each have a disk of their own.
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
