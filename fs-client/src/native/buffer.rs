//! Memory that is registered once, for the requests of queues.

use super::{NativeError, Session};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{MemoryRegion, Sge};
use std::ptr::NonNull;
use std::sync::Arc;

/// Registered memory of this program. A clone is the same memory. Peers cannot reach it: only this program's READs land in it.
///
/// A range belongs to a request from its post until its completion is polled. Two requests that share bytes, and a program that touches them
/// meanwhile, get bytes of either.
#[derive(Clone)]
pub struct Buffer {
    region: Arc<dyn MemoryRegion>,
    len: usize,
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Buffer {
    /// Zeroed memory of this length, for requests of this session's queues.
    ///
    /// # Errors
    /// `Resources`.
    pub fn new(session: &Session, len: usize) -> Result<Self, NativeError> {
        let memory = Arc::new(SharedMemory::new("cuttlefs-buffer", len)?);
        let region = session.volume().session().link().register_own(memory)?;
        Ok(Self { region, len })
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// `PastBuffer`.
    pub fn read(&self, at: usize, out: &mut [u8]) -> Result<(), NativeError> {
        self.check(at, out.len())?;
        self.memory().read(at, out);
        Ok(())
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// `PastBuffer`.
    pub fn write(&self, at: usize, bytes: &[u8]) -> Result<(), NativeError> {
        self.check(at, bytes.len())?;
        self.memory().write(at, bytes);
        Ok(())
    }

    /// The memory's address, for programs that use the bytes in place. It stays as long as a clone of the buffer exists.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.memory().base_address()
    }

    pub(super) fn memory(&self) -> &SharedMemory {
        self.region.memory()
    }

    pub(super) fn check(&self, at: usize, len: usize) -> Result<(), NativeError> {
        match at.checked_add(len) {
            Some(end) if end <= self.len => Ok(()),
            _ => Err(NativeError::PastBuffer { len: self.len }),
        }
    }

    /// A range that was checked, for a READ.
    pub(super) fn sge(&self, at: usize, len: usize) -> Sge {
        self.region.sge(at as u64, len as u32)
    }
}
