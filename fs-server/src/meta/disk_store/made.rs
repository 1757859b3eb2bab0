//! Files of a log that are made byte by byte, for tests of a start that finds them.

use super::{direct, logged, tail};
use crate::meta::store::Batch;
use crate::pool::BLOCK_BYTES;
use std::path::Path;

/// The life of the test's log. Any other number is another life.
pub const LIFE: u64 = 0x0102_0304_0506_0709;
/// Names of the files.
pub const TAILS: [&str; 2] = tail::FILES;
pub const DIRECT: [&str; 2] = direct::FILES;

/// The record of a batch; `persistent` is the last batch that was durable when it was written.
pub fn record(life: u64, persistent: u64, number: u64, batch: &Batch) -> Vec<u8> {
    tail::framed(life, persistent, &logged::encode(number, batch))
}

/// The bytes of a `tail-*`: a header with these two digits as its version, and these records.
pub fn tail_of_version(version: &str, life: u64, records: &[Vec<u8>]) -> Vec<u8> {
    let magic = ["CFTAIL", version].concat();
    let header = tail::header_of(magic.as_bytes().try_into().expect("eight bytes"), life);
    [&header[..], &records.concat()].concat()
}

pub fn tail(life: u64, records: &[Vec<u8>]) -> Vec<u8> {
    tail_of_version(tail::VERSION, life, records)
}

/// The bytes of a `direct-*`: one sync of these records.
pub fn direct(records: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = records.concat();
    bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
    bytes
}

/// The life in the header of an existing file.
pub fn life_in(directory: &Path, file: &str) -> Option<u64> {
    tail::life_of(&std::fs::read(directory.join(file)).expect("read"))
}
