//! Persistence domains: the steps after which bytes of a memory region outlive a crash.
//!
//! A region of the RDMA layer may be registered with one (`crate::rdma::ProtectionDomain::register_persistent`); a FLUSH to persistence then
//! completes when the domain reports the range as persistent.
//!
//! | device | way of a range to persistence | permitted to |
//! | --- | --- | --- |
//! | persistent memory (a DAX file, or a part of a `/dev/dax*` (`dax`), mapped with `MAP_SYNC`) | cache-line write-back and a store fence (`cache_lines`) | any CPU that maps it, so also an initiator over shared memory |
//! | a file *declared* to be persistent memory (`pmem-emulated`) | the same instructions; survives the process, not the machine | the same |
//! | any other file | memory that is written to it, one data sync for all waiters, on a thread of its own (`file_sync`) | the process that opened it |
//!
//! # Failure
//! A failed data sync is final: it is unknown which parts of the file are on the disk, and a second sync would report
//! success for pages the kernel has dropped. All waiters, and all later calls, fail.

pub mod cache_lines;
mod dax;
mod device;
mod file_sync;

pub use dax::{DaxDevice, is_device};
pub use device::{LogDevice, LogDeviceError, LogDeviceKind};
pub use file_sync::FileSync;

use crate::memory::SharedMemory;

/// The sync failed; nothing written since the last good one is known to be durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the log device could not sync; it takes nothing more until it is opened again")]
pub struct SyncFailed;

/// Called once a range is persistent, or will never be; on the domain's own thread or the caller's.
pub type WhenPersistent = Box<dyn FnOnce(Result<(), SyncFailed>) + Send>;

/// The way to make ranges of a region persistent.
pub trait Persistence: Send + Sync {
    /// Whether cache-line write-back by any CPU that maps the memory is enough.
    fn by_cache_lines(&self) -> bool;

    /// Makes a range persistent and calls `done`. Never blocks on a device: if a device must be waited for, another thread waits, and `done` runs
    /// there. Ranges of earlier calls are not persistent later than this one.
    fn persist(&self, memory: &SharedMemory, offset: usize, len: usize, done: WhenPersistent);

    /// As `persist`, and waits for it. Not for a NIC's thread.
    ///
    /// # Errors
    /// [`SyncFailed`].
    fn persist_and_wait(&self, memory: &SharedMemory, offset: usize, len: usize) -> Result<(), SyncFailed> {
        if self.by_cache_lines() {
            memory.write_back(offset, len);
            return Ok(());
        }
        let (give, take) = std::sync::mpsc::sync_channel(1);
        let done = move |result| {
            // The receiver is gone only if this thread is gone, and it waits below.
            let _ = give.send(result);
        };
        self.persist(memory, offset, len, Box::new(done));
        take.recv().unwrap_or(Err(SyncFailed))
    }
}

/// Persistent memory, real or declared: the calling CPU writes cache lines back.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheLines;

impl Persistence for CacheLines {
    fn by_cache_lines(&self) -> bool {
        true
    }

    fn persist(&self, memory: &SharedMemory, offset: usize, len: usize, done: WhenPersistent) {
        memory.write_back(offset, len);
        done(Ok(()));
    }
}
