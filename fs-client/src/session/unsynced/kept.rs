//! One change of a file's contents, as it is kept and restored.

use crate::transport::DataBuffer;
use cuttlefs_common::rpc::{Allocate, Payload, Restored};
use std::sync::Arc;

/// What was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// These bytes were written.
    Bytes(Arc<[u8]>),
    /// The file was made to end here.
    End,
    /// fallocate(2).
    Allocate {
        /// Bytes of the range.
        len: u64,
        /// What was asked for.
        how: Allocate,
    },
}

/// A change of a file's contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(super) number: u64,
    /// The file's change counter when it was answered.
    pub(crate) change: u64,
    /// Where.
    pub(crate) offset: u64,
    /// What.
    pub(crate) what: What,
    /// What it takes of the bound.
    pub(super) cost: usize,
}

impl Kept {
    /// What the server is to restore.
    pub(in crate::session) fn restored(&self) -> Restored<&[u8]> {
        let offset = self.offset;
        match &self.what {
            What::Bytes(bytes) => Restored::Bytes { offset, bytes },
            What::End => Restored::End(offset),
            What::Allocate { len, how } => Restored::Allocate { offset, len: *len, how: *how },
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match &self.what {
            What::Bytes(bytes) => bytes.len(),
            What::End | What::Allocate { .. } => 0,
        }
    }
}

/// What is to be restored, as a request tells it; many bytes are pulled from `buffer`.
pub(in crate::session) fn in_message<'b>(
    what: Restored<&'b [u8]>,
    buffer: &DataBuffer,
) -> Restored<Payload<'b>> {
    what.map(|bytes| buffer.payload(bytes))
}
