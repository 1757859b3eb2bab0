//! The narrow trait the pool's storage comes in through.
//!
//! One `Disk` belongs to one worker thread and is driven by that thread's reactor; it is not shared. Buffers are owned
//! by the disk from `submit` to completion, also if the future is dropped meanwhile, so an IO can never write to memory
//! that has another user.
//!
//! IOs in flight are not ordered, not within a batch either: a caller that needs an order waits for the first before it
//! submits the second. An IO whose future was dropped may or may not be done.
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

/// Memory of an IO. Its length is a multiple of the page size.
#[derive(Debug)]
pub enum IoBuffer {
    /// A bounce buffer.
    Owned(AlignedBuf),
    /// Frames of the pool's DRAM, in file order; they need not be neighbours. Whoever submits holds the pages'
    /// block locks (or the frames are not published yet), so nobody else writes them meanwhile.
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

/// One IO: pages that are neighbours in the pool.
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
    /// The buffer, given back.
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
    /// Where.
    pub offset: u64,
    /// How much.
    pub len: usize,
    /// What the device said.
    pub source: std::io::Error,
}

impl IoError {
    fn rot(&self) -> Option<&RottenPages> {
        self.source.get_ref()?.downcast_ref()
    }

    /// Whether the device read all of it and some pages' checksums do not match.
    pub fn is_rot(&self) -> bool {
        self.rot().is_some()
    }

    /// Whether this page of the IO is concerned; where the device failed all of them may be.
    pub fn concerns(&self, page: PoolPage) -> bool {
        self.rot().is_none_or(|rot| rot.pages.contains(&page))
    }
}

/// The pool's storage as one worker sees it.
pub trait Disk {
    /// Submits a batch with one system call at most and resolves when all of it is done; results are in request
    /// order. Bounded in flight: a batch beyond the bound waits its turn inside.
    fn submit(&self, batch: Vec<IoRequest>) -> LocalFuture<'static, Vec<IoDone>>;
    /// Makes every write that completed before this call durable (fdatasync of every data file).
    fn sync(&self) -> LocalFuture<'static, Result<(), std::io::Error>>;
}
