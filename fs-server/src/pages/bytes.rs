//! Source and sink of a request's bytes: the message, or a registered buffer.

use cuttlefs_common::memory::SharedMemory;

/// Where a write's bytes are. They do not change until the write is done.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Bytes of the message.
    Bytes(&'a [u8]),
    /// A registered buffer, filled by RDMA READ.
    Memory {
        /// The buffer.
        memory: &'a SharedMemory,
        /// The offset of the bytes in it.
        offset: usize,
        /// The number of bytes.
        len: usize,
    },
}

impl Source<'_> {
    /// A part of the bytes.
    pub(crate) fn part(self, at: usize, len: usize) -> Self {
        assert!(at + len <= self.len(), "a part past the write's bytes");
        match self {
            Self::Bytes(bytes) => Self::Bytes(&bytes[at..at + len]),
            Self::Memory { memory, offset, .. } => Self::Memory { memory, offset: offset + at, len },
        }
    }

    /// The number of bytes.
    pub const fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Memory { len, .. } => *len,
        }
    }

    /// Whether there are no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy of the bytes.
    pub(crate) fn to_vec(self) -> Vec<u8> {
        match self {
            Self::Bytes(bytes) => bytes.to_vec(),
            Self::Memory { memory, offset, len } => {
                let mut bytes = vec![0; len];
                memory.read(offset, &mut bytes);
                bytes
            }
        }
    }

    /// Copies into shared memory.
    pub(crate) fn copy_to_memory(&self, at: usize, len: usize, to: &SharedMemory, to_offset: usize) {
        match self {
            Self::Bytes(bytes) => to.write(to_offset, &bytes[at..at + len]),
            Self::Memory { memory, offset, len: whole } => {
                assert!(at + len <= *whole, "read past the write's bytes");
                memory.copy_to(offset + at, to, to_offset, len);
            }
        }
    }

    /// Copies into a slice.
    pub(crate) fn copy_to_slice(&self, at: usize, out: &mut [u8]) {
        match self {
            Self::Bytes(bytes) => out.copy_from_slice(&bytes[at..at + out.len()]),
            Self::Memory { memory, offset, len } => {
                assert!(at + out.len() <= *len, "read past the write's bytes");
                memory.read(offset + at, out);
            }
        }
    }
}

/// Where a fetch's bytes go: each wanted page to its place in the request. Other places are not touched.
#[derive(Debug)]
pub enum Sink<'a> {
    /// A slice as long as the request.
    Bytes(&'a mut [u8]),
    /// A registered buffer, to be pushed by RDMA WRITE.
    Memory {
        /// The buffer.
        memory: &'a SharedMemory,
        /// The offset of the request's first byte in it.
        offset: usize,
    },
    /// Nowhere: the pages are read into frames only.
    Nowhere,
}

impl Sink<'_> {
    pub(crate) fn put_from_memory(&mut self, at: usize, len: usize, from: &SharedMemory, from_offset: usize) {
        match self {
            Self::Bytes(bytes) => from.read(from_offset, &mut bytes[at..at + len]),
            Self::Memory { memory, offset } => from.copy_to(from_offset, memory, *offset + at, len),
            Self::Nowhere => {}
        }
    }

    pub(crate) fn put_from_slice(&mut self, at: usize, from: &[u8]) {
        match self {
            Self::Bytes(bytes) => bytes[at..at + from.len()].copy_from_slice(from),
            Self::Memory { memory, offset } => memory.write(*offset + at, from),
            Self::Nowhere => {}
        }
    }

    pub(crate) fn put_zeros(&mut self, at: usize, len: usize) {
        match self {
            Self::Bytes(bytes) => bytes[at..at + len].fill(0),
            Self::Memory { memory, offset } => memory.fill(*offset + at, len, 0),
            Self::Nowhere => {}
        }
    }

    pub(crate) fn holds(&self, len: usize) -> bool {
        match self {
            Self::Bytes(bytes) => bytes.len() >= len,
            Self::Memory { memory, offset } => {
                memory.is_writable() && memory.contains(*offset as u64, len as u64)
            }
            Self::Nowhere => true,
        }
    }
}
