//! The log: every batch since the last checkpoint, in two files. A batch needs no sync to outlive the process, and one to outlive a power loss.
//!
//! ```text
//! tail-0, tail-1:   header, record, record, ...          (`direct-0`, `direct-1`: see `direct`)
//! header            [ magic "CFTAIL05" | life u64 | crc32c u32 of the 16 bytes before | zero u32 ]
//! record            [ life u64 | persistent u64 | len u32 | crc32c u32 | batch of len bytes (`logged`) ]
//! ```
//! Numbers are little-endian. A record's checksum covers all of the record but itself. `life` is drawn at random each time the log is begun, and no
//! client knows it, so bytes that a client wrote never pass for a record. `persistent` is the last batch that was durable when the record was
//! written.
//!
//! # How it works
//! Batches go to one file. A checkpoint switches to the other one first. Once the checkpoint is durable, it has everything in the first file, which
//! is overwritten from its start when the next checkpoint switches back. So neither file grows past the batches between two checkpoints.
//!
//! **A sync writes data only.** The sync of a file that has grown makes the file system write its own journal as well, with one wait after another.
//! So a file is filled with zeros ahead of its records, some at a time, and is not cut off after a checkpoint. On a disk without plenty of room it is
//! cut off, and nothing is filled ahead.
//!
//! # Invariants
//! * A batch is applied only if its number follows the last one applied: after a power loss the files are used up to their first gap.
//! * Old records behind the last record of a file have numbers that the checkpoint covers: within a life of the log numbers only grow, and a file is
//!   overwritten only once a checkpoint with all of it is durable.
//! * Both files are empty, durably, before the first new batch of a life: the numbers of batches that a power loss took are given out again, and an
//!   old record must not pass for a new one. A start goes on in a life only if no whole record has such a number (`replay`).
//! * A record is whole, or no later record of its file follows it: a record that found no space is cut off again.
//!
//! # A torn end and rot
//!
//! | found | meaning | action |
//! | --- | --- | --- |
//! | records up to a number, and nothing behind | the end of the log | they are applied |
//! | a number is missing; no record says that it was durable | a sync was under way, or a kill cut a write off | the records before it are applied |
//! | a number is missing, and some record says that it was durable | rot | the store does not open |
//! | a number that the checkpoint has | the record is older than the checkpoint | it is skipped |
//! | a bad header, beside a good one | rot where nothing is lost | the other file's life counts |
//! | no file has a header | the power failed while a log was begun: all was in the checkpoint | nothing is applied |
//!
//! Rot of the last durable record cannot be told from a write that was under way.

use super::space::Space;
use cuttlefs_common::world::{Random, SystemRandom};
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::Arc;

pub(super) const FILES: [&str; 2] = ["tail-0", "tail-1"];
const MAGIC: [u8; 8] = *b"CFTAIL05";
/// The version in the magic.
pub(super) const VERSION: &str = "05";
/// The beginning of the magic in all versions; two digits follow.
const FAMILY: &[u8] = b"CFTAIL";
pub(super) const HEADER_BYTES: usize = 24;
/// More than the length of any file: commits stop at 64 MiB in both, and no batch is as large again.
pub(super) const FILE_MOST_BYTES: u64 = 256 << 20;
/// Bytes in front of each batch.
const FRAME_BYTES: usize = 24;
/// Most bytes of a file that are kept after a checkpoint. An ordinary file has fewer; the rest is given back to the disk.
const KEPT_MOST_BYTES: u64 = 52 << 20;
/// A page of the kernel's cache.
pub(super) const CACHE_PAGE_BYTES: u64 = 4096;
/// The offset of the checksum in them.
const CRC_AT: usize = 20;

/// The two files of the log.
#[derive(Debug)]
pub(super) struct Tail {
    files: [Arc<File>; 2],
    /// The bytes of each file that are its header and records.
    lens: [u64; 2],
    /// The length of each file. Behind its records are zeros, or records that a checkpoint has.
    filled: [u64; 2],
    /// Bytes of zeros that are put behind a file's end at a time.
    fill_bytes: u64,
    /// Which files were written to since the last sync began.
    unsynced: [bool; 2],
    /// The index of the file to which batches go.
    current: usize,
    life: u64,
    space: Arc<Space>,
}

/// The files as a killed or stopped process left them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Left {
    pub life: u64,
    /// The index of the file to which batches go.
    pub current: usize,
    /// The offset of each file's next record: all bytes before it are needed.
    pub lens: [u64; 2],
    /// The length of each file.
    pub filled: [u64; 2],
}

impl Tail {
    /// Opens the files, or makes them if they do not exist. Nothing may be appended before `go_on` or `begin`.
    ///
    /// # Errors
    /// [`io::Error`].
    pub(super) fn open(directory: &Path, space: Arc<Space>, fill_bytes: u64) -> io::Result<Self> {
        let open = |name| {
            let options = OpenOptions::new().create(true).write(true).truncate(false).to_owned();
            options.open(directory.join(name))
        };
        let files = [Arc::new(open(FILES[0])?), Arc::new(open(FILES[1])?)];
        // Not zero, because a power loss may leave zeros in a file.
        let life = SystemRandom.next_u64() | 1;
        let (lens, filled, unsynced) = ([0; 2], [0; 2], [false; 2]);
        Ok(Self { files, lens, filled, fill_bytes, unsynced, current: 0, life, space })
    }

    /// Goes on with the files as a process left them.
    pub(super) fn go_on(&mut self, left: Left) {
        (self.life, self.current, self.lens, self.filled) = (left.life, left.current, left.lens, left.filled);
        // That process may not have synced any of it.
        self.unsynced = left.lens.map(|len| len > HEADER_BYTES as u64);
    }

    /// Appends a batch; `persistent` is the last batch that is durable by now. Returns the batch's record.
    ///
    /// # Errors
    /// [`io::Error`]. After `StorageFull` the file is as before; after any other error nothing may be appended any more.
    pub(super) fn append(&mut self, batch: &[u8], persistent: u64) -> io::Result<Vec<u8>> {
        let mut bytes = framed(self.life, persistent, batch);
        let record_bytes = bytes.len();
        let end = self.lens[self.current] + record_bytes as u64;
        self.fill_to(end);
        // Padded to the end of its last page in the kernel's cache, so that the kernel need not read the page to change a part of it.
        bytes.resize(bytes.len() + (end.next_multiple_of(CACHE_PAGE_BYTES) - end) as usize, 0);
        let (file, len) = (&self.files[self.current], &mut self.lens[self.current]);
        let filled = &mut self.filled[self.current];
        let written = self.space.write_all_at(file, &bytes, *len);
        match &written {
            Ok(()) => {
                *filled = (*filled).max(*len + bytes.len() as u64);
                *len = end;
                self.unsynced[self.current] = true;
            }
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                file.set_len(*len)?;
                *filled = *len;
            }
            Err(_) => {}
        }
        bytes.truncate(record_bytes);
        written.map(|()| bytes)
    }

    /// Fills the current file with zeros up to this offset, if it is shorter and there is plenty of room. It works without as well.
    fn fill_to(&mut self, end: u64) {
        let (file, filled) = (&self.files[self.current], &mut self.filled[self.current]);
        if end <= *filled {
            return;
        }
        let until = (end + self.fill_bytes).next_multiple_of(self.fill_bytes);
        if self.space.fill(file, *filled, until) {
            *filled = until;
        }
    }

    /// Begins a sync: returns the files that must be synced to make all records durable, with their names.
    pub(super) fn begin_sync(&mut self) -> Vec<(&'static str, Arc<File>)> {
        let unsynced = std::mem::take(&mut self.unsynced);
        let files = FILES.into_iter().zip(self.files.iter().cloned()).zip(unsynced);
        files.filter_map(|(file, unsynced)| unsynced.then_some(file)).collect()
    }

    /// The length of both files together.
    pub(super) fn len_bytes(&self) -> u64 {
        self.filled.iter().sum()
    }

    /// Bytes of records since the last checkpoint began.
    pub(super) fn current_bytes(&self) -> u64 {
        self.lens[self.current]
    }

    /// Switches files for a checkpoint that begins: new batches go to the other file.
    pub(super) fn turn(&mut self) {
        self.current = 1 - self.current;
    }

    /// Releases the other file, because the checkpoint that `turn` began is durable.
    ///
    /// # Errors
    /// [`io::Error`].
    pub(super) fn give_up_the_other(&mut self) -> io::Result<()> {
        let other = 1 - self.current;
        // Its header stays. It is not written again in this life, so no crash can tear it.
        let keeps = if self.space.is_plenty() { KEPT_MOST_BYTES } else { HEADER_BYTES as u64 };
        if self.filled[other] > keeps {
            self.files[other].set_len(keeps)?;
            self.filled[other] = keeps;
        }
        self.lens[other] = HEADER_BYTES as u64;
        // Nobody needs its old records.
        self.unsynced[other] = false;
        Ok(())
    }

    /// Cuts off each file behind its records, for a clean stop.
    ///
    /// # Errors
    /// [`io::Error`].
    pub(super) fn give_back(&mut self) -> io::Result<()> {
        for (file, (len, filled)) in self.files.iter().zip(self.lens.iter().zip(&mut self.filled)) {
            if *filled > *len {
                file.set_len(*len)?;
                *filled = *len;
            }
        }
        Ok(())
    }

    /// Empties both files, durably, and begins a new life in them. The checkpoint has all of their batches, durably.
    ///
    /// # Errors
    /// [`io::Error`].
    pub(super) fn begin(&mut self) -> io::Result<()> {
        for file in &self.files {
            file.set_len(0)?;
            self.space.write_all_at(file, &header(self.life), 0)?;
            file.sync_all()?;
        }
        (self.lens, self.filled) = ([HEADER_BYTES as u64; 2], [HEADER_BYTES as u64; 2]);
        Ok(())
    }
}

fn header(life: u64) -> [u8; HEADER_BYTES] {
    header_of(MAGIC, life)
}

pub(super) fn header_of(magic: [u8; 8], life: u64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&magic);
    bytes[8..16].copy_from_slice(&life.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..16]);
    bytes[16..20].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// The life of a file that begins with these bytes, if its header is good.
pub(super) fn life_of(bytes: &[u8]) -> Option<u64> {
    let found = bytes.first_chunk::<HEADER_BYTES>()?;
    let life = u64::from_le_bytes(found[8..16].try_into().expect("eight bytes"));
    (*found == header(life)).then_some(life)
}

/// The version of a header that is good, but of another version. A rotten header does not count as one.
pub(super) fn other_version_of(bytes: &[u8]) -> Option<String> {
    let found = bytes.first_chunk::<HEADER_BYTES>()?;
    let (magic, life) = (found.first_chunk::<8>()?, found[8..16].first_chunk::<8>()?);
    let is_header = *found == header_of(*magic, u64::from_le_bytes(*life));
    let is_other = magic.starts_with(FAMILY) && *magic != MAGIC;
    (is_header && is_other).then(|| String::from_utf8_lossy(&magic[FAMILY.len()..]).into_owned())
}

pub(super) fn framed(life: u64, persistent: u64, batch: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FRAME_BYTES + batch.len());
    bytes.extend_from_slice(&life.to_le_bytes());
    bytes.extend_from_slice(&persistent.to_le_bytes());
    bytes.extend_from_slice(&(batch.len() as u32).to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes), batch);
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes.extend_from_slice(batch);
    bytes
}

/// A whole record.
pub(super) struct Record<'a> {
    /// The last batch that was durable when the record was written.
    pub persistent: u64,
    /// The bytes of the batch (`logged`).
    pub batch: &'a [u8],
}

impl Record<'_> {
    /// The number of its batch.
    #[cfg(test)]
    pub fn number(&self) -> u64 {
        super::logged::number(self.batch).expect("a batch")
    }

    pub(super) fn len_bytes(&self) -> usize {
        FRAME_BYTES + self.batch.len()
    }
}

/// The record at the start of `bytes`, if it is whole and of this life.
pub(super) fn record_of(life: u64, bytes: &[u8]) -> Option<Record<'_>> {
    if bytes.starts_with(&life.to_le_bytes()) { record_at(bytes) } else { None }
}

/// The record at the start of `bytes`, whose life is right, if it is whole.
fn record_at(bytes: &[u8]) -> Option<Record<'_>> {
    let (frame, rest) = bytes.split_first_chunk::<FRAME_BYTES>()?;
    let number = |at: usize| u32::from_le_bytes(frame[at..at + 4].try_into().expect("four bytes"));
    let batch = rest.get(..number(16) as usize)?;
    let crc = crc32c::crc32c_append(crc32c::crc32c(&frame[..CRC_AT]), batch);
    let persistent = u64::from_le_bytes(frame[8..16].try_into().expect("eight bytes"));
    (crc == number(CRC_AT)).then_some(Record { persistent, batch })
}

/// All whole records of a life in a file, also behind other bytes, each with the offset behind it.
pub(super) fn records(life: u64, bytes: &[u8]) -> Vec<(usize, Record<'_>)> {
    let mut found = Vec::new();
    let mut at = HEADER_BYTES;
    while let Some(rest) = bytes.get(at..).filter(|rest| rest.len() >= FRAME_BYTES) {
        match record_of(life, rest) {
            Some(record) => {
                at += record.len_bytes();
                found.push((at, record));
            }
            None => at += 1,
        }
    }
    found
}

#[cfg(test)]
pub mod tests;
