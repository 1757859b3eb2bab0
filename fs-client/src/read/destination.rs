//! Where the bytes of a read go: a buffer of the caller's, or registered memory.

use cuttlefs_common::memory::SharedMemory;

/// Where the bytes of a read go. Places are offsets in the request.
pub(crate) trait Destination {
    /// The number of bytes that are wanted.
    fn wanted(&self) -> usize;
    /// Copies from the server's frames. A concurrent writer can tear the bytes, which the caller finds out.
    fn copy(&mut self, frames: &SharedMemory, from: usize, at: usize, len: usize);
    /// Zeros of a hole.
    fn zero(&mut self, at: usize, len: usize);
}

impl Destination for [u8] {
    fn wanted(&self) -> usize {
        self.len()
    }

    fn copy(&mut self, frames: &SharedMemory, from: usize, at: usize, len: usize) {
        frames.read(from, &mut self[at..at + len]);
    }

    fn zero(&mut self, at: usize, len: usize) {
        self[at..at + len].fill(0);
    }
}

/// A part of registered memory.
#[derive(Debug)]
pub(crate) struct Part<'m> {
    /// The memory.
    pub(crate) memory: &'m SharedMemory,
    /// The place of the request's first byte.
    pub(crate) start: usize,
    /// The length of the request.
    pub(crate) len: usize,
}

impl Destination for Part<'_> {
    fn wanted(&self) -> usize {
        self.len
    }

    fn copy(&mut self, frames: &SharedMemory, from: usize, at: usize, len: usize) {
        assert!(at + len <= self.len, "past the part");
        frames.copy_to(from, self.memory, self.start + at, len);
    }

    fn zero(&mut self, at: usize, len: usize) {
        assert!(at + len <= self.len, "past the part");
        self.memory.fill(self.start + at, len, 0);
    }
}
