//! The part of a lane's memory that carries file bytes.

use super::lane::{DATA_LEN, DATA_OFFSET, PROOFS_OFFSET};
use cuttlefs_common::rdma::MemoryRegion;
use cuttlefs_common::rpc::{MAX_INLINE_BYTES, Payload, RemoteBuffer};
use std::sync::Arc;

/// The part of a lane's memory that carries file bytes.
pub(crate) struct DataBuffer {
    pub(super) region: Arc<dyn MemoryRegion>,
}

impl DataBuffer {
    /// Copies bytes into the buffer. They fit, because no request is larger than `MAX_TRANSFER_BYTES`.
    fn write(&self, bytes: &[u8]) {
        self.region.memory().write(DATA_OFFSET, bytes);
    }

    /// The bytes of a request as its payload: inline if they are few, otherwise for the server to pull from this buffer.
    pub(crate) fn payload<'b>(&self, bytes: &'b [u8]) -> Payload<'b> {
        if bytes.len() <= MAX_INLINE_BYTES {
            return Payload::Inline(bytes);
        }
        self.write(bytes);
        Payload::Pull(self.remote(bytes.len() as u32))
    }

    /// Copies bytes out of the buffer.
    pub(crate) fn read(&self, offset: usize, out: &mut [u8]) {
        self.region.memory().read(DATA_OFFSET + offset, out);
    }

    /// Copies proofs out of the lane's memory.
    pub(crate) fn proof(&self, at: usize, out: &mut [u8]) {
        self.region.memory().read(PROOFS_OFFSET + at, out);
    }

    /// The remote buffer by which the server reaches the first `len` bytes.
    pub(crate) fn remote(&self, len: u32) -> RemoteBuffer {
        assert!(len as usize <= DATA_LEN, "transfer larger than the lane's buffer");
        RemoteBuffer { rkey: self.region.rkey(), offset: DATA_OFFSET as u64, len }
    }
}
