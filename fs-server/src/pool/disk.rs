//! The trait by which the server accesses the pool's storage.
//!
//! One `Disk` belongs to one worker thread and is driven by that thread's reactor; it is not shared. The disk owns buffers from `submit` to
//! completion, also if the future is dropped meanwhile, so an IO can never write to memory that has another user.
//!
//! IOs in flight are not ordered, not even within a batch: a caller that needs an order waits for the first before it submits the second. An IO whose
//! future was dropped may be done or not.
//!
//! Implementations: `uring` (io_uring, O_DIRECT), `cached` (the kernel's page cache, for comparison; it blocks) and
//! `simdisk` (in memory, seeded, can drop and tear unsynced writes). `sums` puts checksums over any of them.

use super::aligned_buf::AlignedBuf;
use super::sums::RottenPages;
use cuttlefs_common::ids::{FrameIndex, PoolPage};
use std::future::Future;
use std::pin::Pin;

/// A future of one worker thread.
pub type LocalFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// The memory of an IO. Its length is a multiple of the page size.
#[derive(Debug)]
pub enum IoBuffer {
    /// A bounce buffer.
    Owned(AlignedBuf),
    /// Frames of the pool's DRAM, in the order of the file; they need not be neighbours. The submitter holds the pages' block locks (or the frames
    /// are not published yet), so nobody else writes to them meanwhile.
    Frames(Vec<FrameIndex>),
}

/// Direction of an IO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoKind {
    /// From the device into the buffer.
    Read,
    /// From the buffer to the device.
    Write,
}

/// One IO of pages that are neighbours in the pool.
#[derive(Debug)]
pub struct IoRequest {
    /// Direction.
    pub kind: IoKind,
    /// Byte offset in the pool; a multiple of the page size.
    pub offset: u64,
    /// The memory.
    pub buffer: IoBuffer,
}

/// A finished IO.
#[derive(Debug)]
pub struct IoDone {
    /// The buffer, returned to the submitter.
    pub buffer: IoBuffer,
    /// Whether all of it was transferred.
    pub result: Result<(), IoError>,
}

/// Why an IO failed.
#[derive(Debug, thiserror::Error)]
#[error("{kind:?} of {len} bytes at pool offset {offset}: {source}")]
pub struct IoError {
    /// Direction.
    pub kind: IoKind,
    /// The offset in the pool.
    pub offset: u64,
    /// The length in bytes.
    pub len: usize,
    /// The device's error.
    pub source: std::io::Error,
}

impl IoError {
    fn rot(&self) -> Option<&RottenPages> {
        self.source.get_ref()?.downcast_ref()
    }

    /// Whether the device read all pages and the checksums of some do not match.
    pub fn is_rot(&self) -> bool {
        self.rot().is_some()
    }

    /// Whether the error concerns this page of the IO. If the device failed, it may concern all of them.
    pub fn concerns(&self, page: PoolPage) -> bool {
        self.rot().is_none_or(|rot| rot.pages.contains(&page))
    }
}

/// The pool's storage for one worker.
pub trait Disk {
    /// Submits a batch with at most one system call, and resolves when all of it is done, with the results in the order of the requests. The IOs in
    /// flight are bounded: a batch beyond the bound waits in its future.
    fn submit(&self, batch: Vec<IoRequest>) -> LocalFuture<'static, Vec<IoDone>>;
    /// Makes every write that completed before this call durable (fdatasync of every data file).
    fn sync(&self) -> LocalFuture<'static, Result<(), std::io::Error>>;
}
