//! What is left to do of a log's operations: by file, in order, without what later ones take away again. Gathered while
//! the log is read.
//!
//! Space that an early write had may belong to another file since a later record cut or zeroed the range, so writing those
//! bytes first could find the pool full. They are left out instead.

use super::operation::{Change, Operation};
use crate::meta::{Placed, RequestId};
use cuttlefs_common::attr::Timestamp;
use cuttlefs_common::ids::{ClientId, InodeNo, PAGE_SIZE_U64, SlotIndex};
use cuttlefs_common::redo::Record;
use std::collections::BTreeMap;

/// One thing to do again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Again {
    /// Write bytes.
    Write {
        /// File offset.
        offset: u64,
        /// Them.
        bytes: Vec<u8>,
    },
    /// Give the file this length.
    Length(u64),
    /// Give the file this length if it is shorter. Never cuts: if the file is longer by now, what made it so comes later
    /// in the log, or a cut does.
    AtLeast(u64),
    /// Zero a range.
    Zeros {
        /// File offset.
        offset: u64,
        /// Bytes.
        len: u64,
        /// The range keeps its space.
        keep_space: bool,
    },
    /// Reserve space for a range.
    Reserve {
        /// File offset.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// What to do to one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileChanges {
    /// In this order.
    pub changes: Vec<Again>,
    /// When contents or length were changed last, and the inode's change counter before that.
    pub modified: Option<(Timestamp, u64)>,
    /// The last request of each slot, with the place of a write's bytes, of a copy's last: also of those that a later change took away, which must
    /// not be written once more.
    pub done: BTreeMap<(ClientId, SlotIndex), (RequestId, Placed)>,
}

/// What is left to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Net {
    /// By file.
    pub files: BTreeMap<InodeNo, FileChanges>,
}

impl Net {
    /// The next record's operation.
    pub fn add(&mut self, record: &Record<'_>, operation: &Operation<'_>) {
        let file = self.files.entry(operation.ino).or_default();
        // The order of times is that of counters: changes of different pages reach the log in any order.
        let is_last = file.modified.is_none_or(|(_, before)| before <= operation.before);
        let changes_no_time = matches!(operation.change, Change::Reserve { .. } | Change::Copied { .. });
        if is_last && !changes_no_time {
            file.modified = Some((operation.at, operation.before));
        }
        file.add(operation.change, request(record));
    }
}

fn request(record: &Record<'_>) -> Option<RequestId> {
    let known = record.client.0 != 0;
    known.then_some(RequestId { client: record.client, slot: record.slot, seq: record.seq })
}

/// What is known of a record's request, by its slot.
fn done(request: Option<RequestId>, placed: Placed) -> Option<((ClientId, SlotIndex), (RequestId, Placed))> {
    request.map(|request| ((request.client, request.slot), (request, placed)))
}

impl FileChanges {
    fn add(&mut self, change: Change<'_>, request: Option<RequestId>) {
        let changes = &mut self.changes;
        match change {
            Change::Write { offset, bytes, ends } => {
                self.done.extend(done(request, Placed { offset, len: bytes.len() as u32 }));
                changes.push(Again::Write { offset, bytes: bytes.to_vec() });
                // The length it gave, for the bytes that give it may be cut off.
                if let Some(end) = ends {
                    changes.push(Again::AtLeast(end));
                }
            }
            Change::Length(size) => {
                self.done.extend(done(request, Placed { offset: size, len: 0 }));
                without(changes, size.next_multiple_of(PAGE_SIZE_U64), u64::MAX);
                changes.push(Again::Length(size));
            }
            Change::Zeros { offset, len, keep_space } => {
                self.done.extend(done(request, Placed { offset, len: 0 }));
                if !keep_space {
                    let end = offset + len;
                    without(changes, offset.next_multiple_of(PAGE_SIZE_U64), end - end % PAGE_SIZE_U64);
                }
                changes.push(Again::Zeros { offset, len, keep_space });
            }
            Change::Reserve { offset, len } => {
                self.done.extend(done(request, Placed { offset, len: 0 }));
                changes.push(Again::Reserve { offset, len });
            }
            Change::Copied { end } => self.done.extend(done(request, Placed { offset: end, len: 0 })),
            Change::Done => {}
        }
    }
}

/// Takes the pages of `[start, end)` out of what gives them bytes or space.
fn without(changes: &mut Vec<Again>, start: u64, end: u64) {
    for change in std::mem::take(changes) {
        match change {
            Again::Write { offset, bytes } => {
                for (from, to) in outside(offset, bytes.len() as u64, start, end) {
                    let bytes = bytes[(from - offset) as usize..(to - offset) as usize].to_vec();
                    changes.push(Again::Write { offset: from, bytes });
                }
            }
            Again::Zeros { offset, len, keep_space: true } => {
                let parts = outside(offset, len, start, end).into_iter();
                changes.extend(parts.map(|(from, to)| Again::Zeros {
                    offset: from,
                    len: to - from,
                    keep_space: true,
                }));
            }
            Again::Reserve { offset, len } => {
                let parts = outside(offset, len, start, end).into_iter();
                changes.extend(parts.map(|(from, to)| Again::Reserve { offset: from, len: to - from }));
            }
            other => changes.push(other),
        }
    }
}

/// The parts of `len` bytes at `offset` that are not in `[start, end)`.
fn outside(offset: u64, len: u64, start: u64, end: u64) -> Vec<(u64, u64)> {
    let own_end = offset + len;
    if own_end <= start || offset >= end || start >= end {
        return vec![(offset, own_end)];
    }
    let parts = [(offset, own_end.min(start)), (offset.max(end), own_end)];
    parts.into_iter().filter(|(from, to)| from < to).collect()
}
