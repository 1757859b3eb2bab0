//! A client's ring: a bounded log of records in memory that outlives a crash, one for each connection.
//!
//! ```text
//! 0     identity: magic, version, stride, capacity; written when the ring is made, never again   (own cache line)
//! 128   checkpoint A: which life, head position and number, the last life's end                  (own two lines)
//! 256   checkpoint B: the same; the valid one of the higher generation counts                    (own two lines)
//! 4096  capacity bytes of records
//! ```
//! Identity:
//!
//! | offset | bytes | field    |
//! |-------:|------:|----------|
//! | 0      | 4     | magic `CFRG` |
//! | 4      | 2     | version, `RING_VERSION` |
//! | 6      | 2     | reserved, zero |
//! | 8      | 8     | capacity |
//! | 16     | 8     | stride |
//! | 24     | 4     | CRC32C of the 24 bytes before |
//!
//! Checkpoint:
//!
//! | offset | bytes | field    |
//! |-------:|------:|----------|
//! | 0      | 8     | generation: counts checkpoints, odd ones go to A |
//! | 8      | 8     | log: which life of the ring |
//! | 16     | 8     | position of the head: bytes since this life began |
//! | 24     | 8     | number of the record that begins there |
//! | 32     | 16    | client whose ring it is |
//! | 48     | 8     | the life before that had records: its log |
//! | 56     | 8     | and the last of its records that was executed |
//! | 64     | 4     | CRC32C of the 64 bytes before |
//!
//! # How it works
//! Positions count bytes and only grow; a position's place is its remainder by the capacity. The client (`writer`) puts
//! records one behind the other and never across the end: the space at the end that is too short for a record stays unused,
//! and a `Wrap` record says so where one fits. The server (`reader`) takes records in order and checkpoints: the head moves
//! past executed records, and the client is told only of a head that is persistent.
//!
//! A *stride* larger than a record's alignment makes the ring one of slots: each record begins at a multiple of it and no
//! record is longer. Then the buffers of a receive queue can be the ring (SFlush).
//!
//! # Ordering
//! A record's last word is stored after all its other bytes: by one WRITE whose last aligned word the RNIC stores last (`Capabilities::word_last`).
//! Where an RNIC promises no such order, a reader looks at a record only after a completion for it. This is the order in which a poller *sees* the
//! record. Cache lines reach persistent memory in any order before the flush, so after a crash the word can be there without the data: then the
//! checksum in the header decides whether the record is valid.
//!
//! # Invariants
//! * A record is valid only if everything before it is valid: reading stops at the first that is not.
//! * Nothing between the persistent head and the tail is overwritten.
//! * A life ends with the crash it did not survive: after recovery the ring gets a new log id, so that records behind the
//!   first invalid one can never become valid.
//!
//! # Failure
//! A crash between any two stores leaves one of the two checkpoints valid. Without one, or with a damaged identity, the ring
//! is refused: it may hold acknowledged records.
//!

mod layout;
mod reader;
mod recovery;
#[cfg(test)]
mod tests;
mod writer;

pub use layout::{CHECKPOINT_LEN, CHECKPOINTS_AT, Checkpoint, Geometry, RECORDS_AT, RingError};
pub use reader::{RingReader, Taken};
pub use recovery::{Recovered, Recovery, ScanEnd};
pub use writer::{RingWriter, Room, Span};
