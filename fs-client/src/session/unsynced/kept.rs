//! A kept change of a file's contents.

use crate::transport::DataBuffer;
use cuttlefs_common::rpc::{Allocate, Payload, Restored};
use std::sync::Arc;

/// The kind of a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// Bytes were written.
    Bytes(Arc<[u8]>),
    /// The file was cut or extended to end at the offset.
    End,
    /// fallocate(2).
    Allocate {
        /// The length of the range in bytes.
        len: u64,
        /// The operation of fallocate(2).
        how: Allocate,
    },
}

/// A change of a file's contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(super) number: u64,
    /// The file's change counter in the answer.
    pub(crate) change: u64,
    /// The offset of the bytes or the range, or the new end.
    pub(crate) offset: u64,
    /// The kind of the change.
    pub(crate) what: What,
    /// The change's share of the bound on unsynced changes, in bytes.
    pub(super) cost: usize,
}

impl Kept {
    /// The change as the server restores it.
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

/// A change to restore, as a request carries it. The server pulls long bytes from `buffer`.
pub(in crate::session) fn in_message<'b>(
    what: Restored<&'b [u8]>,
    buffer: &DataBuffer,
) -> Restored<Payload<'b>> {
    what.map(|bytes| buffer.payload(bytes))
}
