//! Files of a log, made byte by byte: for tests of a start that finds them.

use super::{direct, logged, tail};
use crate::meta::store::Batch;
use crate::pool::BLOCK_BYTES;
use std::path::Path;

/// A life; another one is any other number.
pub const LIFE: u64 = 0x0102_0304_0506_0709;
/// Of both kinds.
pub const TAILS: [&str; 2] = tail::FILES;
pub const DIRECT: [&str; 2] = direct::FILES;

/// The record of a batch; `persistent` was durable by then.
pub fn record(life: u64, persistent: u64, number: u64, batch: &Batch) -> Vec<u8> {
    tail::framed(life, persistent, &logged::encode(number, batch))
}

/// `tail-*`: a header with these two digits as its version, and these records.
pub fn tail_of_version(version: &str, life: u64, records: &[Vec<u8>]) -> Vec<u8> {
    let magic = ["CFTAIL", version].concat();
    let header = tail::header_of(magic.as_bytes().try_into().expect("eight bytes"), life);
    [&header[..], &records.concat()].concat()
}

pub fn tail(life: u64, records: &[Vec<u8>]) -> Vec<u8> {
    tail_of_version(tail::VERSION, life, records)
}

/// `direct-*`: a sync of these records.
pub fn direct(records: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = records.concat();
    bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
    bytes
}

/// The life of a file there is.
pub fn life_in(directory: &Path, file: &str) -> Option<u64> {
    tail::life_of(&std::fs::read(directory.join(file)).expect("read"))
}
