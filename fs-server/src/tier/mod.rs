//! Tiering IO: moves file bytes between requests, frames and SSD (DESIGN sections 3 and 4; TeRM section 4.3).
//!
//! Functions here are the operations on a file's contents. Each takes the shared `Regions`, the worker's own
//! [`Disk`](crate::pool::Disk) and the file, and follows the page protocol of docs/pages.md. None replaces a
//! page on the critical path: with a free frame a page becomes resident, without one it goes past the frames.
//!
//! The futures must be driven to completion (see `region`).

mod allocate;
mod changed;
mod copy;
mod detach;
mod fetch;
mod images;
mod load;
mod pages;
mod promote;
mod reap;
mod restore;
mod scrub;
mod seek;
mod steps;
mod truncate;
mod write;
mod write_back;

#[cfg(test)]
mod tests;

pub use allocate::{allocate_for, allocate_range, punch_hole};
pub use changed::Changed;
pub use copy::{Copied, MAX_COPY_BYTES, copy_range};
pub use fetch::fetch;
pub use images::{IMAGE_PAGES, begin_sync, put_in_place, sync};
pub use load::load;
pub use promote::run_promotion;
pub use reap::reap;
pub use restore::{Changing, begin_change, restore};
pub use scrub::{PassFigures, SWEEP_INTERVAL, Scrub, ScrubFigures, ScrubOptions, run_scrub, run_sweep};
pub use seek::seek;
pub use truncate::{restore_length, truncate};
pub use write::{Asked, WriteAt, Written, note_modified, write, write_for};
pub use write_back::{Timer, WRITE_BACK_INTERVAL, release_space, run_write_back, write_back, write_back_all};

use cuttlefs_common::memory::SharedMemory;

/// Where a write's bytes come from. They hold still until the write is done.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Bytes of the message.
    Bytes(&'a [u8]),
    /// A registered buffer, filled by RDMA READ.
    Memory {
        /// The buffer.
        memory: &'a SharedMemory,
        /// Where the bytes start in it.
        offset: usize,
        /// How many.
        len: usize,
    },
}

impl Source<'_> {
    /// Some of them.
    fn part(self, at: usize, len: usize) -> Self {
        assert!(at + len <= self.len(), "a part past the write's bytes");
        match self {
            Self::Bytes(bytes) => Self::Bytes(&bytes[at..at + len]),
            Self::Memory { memory, offset, .. } => Self::Memory { memory, offset: offset + at, len },
        }
    }

    /// How many bytes.
    pub const fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Memory { len, .. } => *len,
        }
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies into shared memory.
    fn copy_to_memory(&self, at: usize, len: usize, to: &SharedMemory, to_offset: usize) {
        match self {
            Self::Bytes(bytes) => to.write(to_offset, &bytes[at..at + len]),
            Self::Memory { memory, offset, len: whole } => {
                assert!(at + len <= *whole, "read past the write's bytes");
                memory.copy_to(offset + at, to, to_offset, len);
            }
        }
    }

    /// Copies into a slice.
    fn copy_to_slice(&self, at: usize, out: &mut [u8]) {
        match self {
            Self::Bytes(bytes) => out.copy_from_slice(&bytes[at..at + out.len()]),
            Self::Memory { memory, offset, len } => {
                assert!(at + out.len() <= *len, "read past the write's bytes");
                memory.read(offset + at, out);
            }
        }
    }
}

/// Where a fetch's bytes go: each wanted page at its place in the request; other places are not touched.
#[derive(Debug)]
pub enum Sink<'a> {
    /// A slice as long as the request.
    Bytes(&'a mut [u8]),
    /// A registered buffer, to be pushed by RDMA WRITE.
    Memory {
        /// The buffer.
        memory: &'a SharedMemory,
        /// Where the request's first byte goes.
        offset: usize,
    },
    /// Nobody wants them.
    Nowhere,
}

impl Sink<'_> {
    fn put_from_memory(&mut self, at: usize, len: usize, from: &SharedMemory, from_offset: usize) {
        match self {
            Self::Bytes(bytes) => from.read(from_offset, &mut bytes[at..at + len]),
            Self::Memory { memory, offset } => from.copy_to(from_offset, memory, *offset + at, len),
            Self::Nowhere => {}
        }
    }

    fn put_from_slice(&mut self, at: usize, from: &[u8]) {
        match self {
            Self::Bytes(bytes) => bytes[at..at + from.len()].copy_from_slice(from),
            Self::Memory { memory, offset } => memory.write(*offset + at, from),
            Self::Nowhere => {}
        }
    }

    fn put_zeros(&mut self, at: usize, len: usize) {
        match self {
            Self::Bytes(bytes) => bytes[at..at + len].fill(0),
            Self::Memory { memory, offset } => memory.fill(*offset + at, len, 0),
            Self::Nowhere => {}
        }
    }

    fn holds(&self, len: usize) -> bool {
        match self {
            Self::Bytes(bytes) => bytes.len() >= len,
            Self::Memory { memory, offset } => {
                memory.is_writable() && memory.contains(*offset as u64, len as u64)
            }
            Self::Nowhere => true,
        }
    }
}
