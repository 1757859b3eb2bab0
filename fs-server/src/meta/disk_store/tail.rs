//! The log: every batch since the last checkpoint, in two files. They need no sync to outlive the process, and one to outlive a power
//! loss.
//!
//! ```text
//! tail-0, tail-1:   header, record, record, ...          (`direct-0`, `direct-1`: see `direct`)
//! header            [ magic "CFTAIL05" | life u64 | crc32c u32 of the 16 bytes before | zero u32 ]
//! record            [ life u64 | persistent u64 | len u32 | crc32c u32 | batch of len bytes (`logged`) ]
//! ```
//! Little-endian; a record's checksum is of all of it but itself. `life` is drawn at random each time the log is begun, and no client
//! knows it: bytes that a client wrote never pass for a record. `persistent` is the last batch that was durable when the record was
//! written.
//!
//! # How it works
//! Batches go to one file. A checkpoint turns to the other one first; once it is durable, everything in the first is in it, and that
//! file is written over from its start when the next checkpoint turns back. So neither grows past the batches between two checkpoints.
//!
//! **A sync writes data only.** The sync of a file that has grown makes the file system write its own journal as well, one wait
//! behind the other. So a file is filled with zeros ahead of its records, some at a time, and is not cut off after a checkpoint. On a
//! disk that has not plenty of room it is cut off, and nothing is filled ahead.
//!
//! # Invariants
//! * A batch is applied only if its number follows the last one applied: after a power loss the files are used up to their first gap.
//! * Records that are left behind the last one of a file have numbers that the checkpoint covers: within a life of the log numbers
//!   only grow, and a file is written over only once a checkpoint that has all of it is durable.
//! * Both files are empty, durably, before the first new batch of a life: numbers of batches that a power loss took away
//!   are given out again, and an old record must not pass for a new one. A start goes on in a life only if no whole record has such a
//!   number (`replay`).
//! * A record is whole, or nothing of this turn comes after it: a record that found no space is cut off again.
//!
//! # A torn end and rot
//!
//! | found | meaning | action |
//! | --- | --- | --- |
//! | records up to a number, and nothing behind | the end | applied |
//! | a number is missing; no record says that it was durable | the sync that was under way, or a process killed in a write | the records before it are applied |
//! | a number is missing, and some record says that it was durable | rot | the store does not open |
//! | a number that the checkpoint has | written before it | skipped |
//! | a header that is not one, beside a good one | rot where nothing is lost | the other one's life counts |
//! | no file has a header | the power failed while a log was begun: all was in the checkpoint | nothing |
//!
//! The last durable record cannot be told from one that was under way.

use super::space::Space;
use cuttlefs_common::world::{Random, SystemRandom};
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::Arc;

pub(super) const FILES: [&str; 2] = ["tail-0", "tail-1"];
const MAGIC: [u8; 8] = *b"CFTAIL05";
/// The version in it.
pub(super) const VERSION: &str = "05";
/// What all versions begin with; two digits follow.
const FAMILY: &[u8] = b"CFTAIL";
pub(super) const HEADER_BYTES: usize = 24;
/// No file is as long: commits stop at 64 MiB of both, and no batch has as much again.
pub(super) const FILE_MOST_BYTES: u64 = 256 << 20;
/// Bytes before each batch.
const FRAME_BYTES: usize = 24;
/// What is kept of a file behind a checkpoint at most: what an ordinary one has is less, and the rest goes back to the disk.
const KEPT_MOST_BYTES: u64 = 52 << 20;
/// A page of the kernel's cache.
pub(super) const CACHE_PAGE_BYTES: u64 = 4096;
/// Where in them the checksum is.
const CRC_AT: usize = 20;

/// The two files.
#[derive(Debug)]
pub(super) struct Tail {
    files: [Arc<File>; 2],
    /// Bytes of each that are records, and its header.
    lens: [u64; 2],
    /// Bytes of each: what is behind its records is zeros, or records that a checkpoint has.
    filled: [u64; 2],
    /// So many zeros are put behind a file's end at once.
    fill_bytes: u64,
    /// Which of them were written to since the last sync began.
    unsynced: [bool; 2],
    /// Which of them batches go to.
    current: usize,
    life: u64,
    space: Arc<Space>,
}

/// The files as a process left them that was killed, or stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Left {
    pub life: u64,
    /// Which of them batches go to.
    pub current: usize,
    /// Where the next record of each goes to: what is before it is needed.
    pub lens: [u64; 2],
    /// Bytes of each.
    pub filled: [u64; 2],
}

impl Tail {
    /// Opens the files, making them if they are not there. Nothing is appended before `go_on` or `begin`.
    ///
    /// # Errors
    /// [`io::Error`].
    pub(super) fn open(directory: &Path, space: Arc<Space>, fill_bytes: u64) -> io::Result<Self> {
        let open = |name| {
            let options = OpenOptions::new().create(true).write(true).truncate(false).to_owned();
            options.open(directory.join(name))
        };
        let files = [Arc::new(open(FILES[0])?), Arc::new(open(FILES[1])?)];
        // Not zero: what a power loss leaves of a file may be zeros.
        let life = SystemRandom.next_u64() | 1;
        let (lens, filled, unsynced) = ([0; 2], [0; 2], [false; 2]);
        Ok(Self { files, lens, filled, fill_bytes, unsynced, current: 0, life, space })
    }

    /// Goes on where a process left the files.
    pub(super) fn go_on(&mut self, left: Left) {
        (self.life, self.current, self.lens, self.filled) = (left.life, left.current, left.lens, left.filled);
        // It may have synced none of it.
        self.unsynced = left.lens.map(|len| len > HEADER_BYTES as u64);
    }

    /// Appends a batch; `persistent` is the last one that is durable by now. Gives its record.
    ///
    /// # Errors
    /// [`io::Error`]; if it is `StorageFull` the file is as before, else nothing may be appended any more.
    pub(super) fn append(&mut self, batch: &[u8], persistent: u64) -> io::Result<Vec<u8>> {
        let mut bytes = framed(self.life, persistent, batch);
        let record_bytes = bytes.len();
        let end = self.lens[self.current] + record_bytes as u64;
        self.fill_to(end);
        // To the end of its last page of the kernel's cache, which need not be read then to be changed in part.
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

    /// Fills the current file with zeros if it ends before this place, and there is plenty of room. It goes without, too.
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

    /// Begins a sync: the files that it takes to make durable what was appended, and their names.
    pub(super) fn begin_sync(&mut self) -> Vec<(&'static str, Arc<File>)> {
        let unsynced = std::mem::take(&mut self.unsynced);
        let files = FILES.into_iter().zip(self.files.iter().cloned()).zip(unsynced);
        files.filter_map(|(file, unsynced)| unsynced.then_some(file)).collect()
    }

    /// Bytes of both files.
    pub(super) fn len_bytes(&self) -> u64 {
        self.filled.iter().sum()
    }

    /// Bytes since the last checkpoint began.
    pub(super) fn current_bytes(&self) -> u64 {
        self.lens[self.current]
    }

    /// A checkpoint begins: new batches go to the other file.
    pub(super) fn turn(&mut self) {
        self.current = 1 - self.current;
    }

    /// The checkpoint that `turn` began is durable: the file before is needed no more.
    ///
    /// # Errors
    /// [`io::Error`].
    pub(super) fn give_up_the_other(&mut self) -> io::Result<()> {
        let other = 1 - self.current;
        // Its header stays: it is never written again in this life, so no crash can tear it.
        let keeps = if self.space.is_plenty() { KEPT_MOST_BYTES } else { HEADER_BYTES as u64 };
        if self.filled[other] > keeps {
            self.files[other].set_len(keeps)?;
            self.filled[other] = keeps;
        }
        self.lens[other] = HEADER_BYTES as u64;
        // Nobody needs what it held.
        self.unsynced[other] = false;
        Ok(())
    }

    /// Gives back what is behind the records of each: for a clean stop.
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

    /// Empties both, durably, and begins a new life in them. What was in them is in the checkpoint, durably.
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

/// The life of a file that begins so, if its header is good.
pub(super) fn life_of(bytes: &[u8]) -> Option<u64> {
    let found = bytes.first_chunk::<HEADER_BYTES>()?;
    let life = u64::from_le_bytes(found[8..16].try_into().expect("eight bytes"));
    (*found == header(life)).then_some(life)
}

/// The version of a header that is good, but for being of another one. What rots is no other version.
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
    /// The last batch that was durable when it was written.
    pub persistent: u64,
    /// `logged`.
    pub batch: &'a [u8],
}

impl Record<'_> {
    /// Its batch's number.
    #[cfg(test)]
    pub fn number(&self) -> u64 {
        super::logged::number(self.batch).expect("a batch")
    }

    pub(super) fn len_bytes(&self) -> usize {
        FRAME_BYTES + self.batch.len()
    }
}

/// The record of this life at the start of `bytes`.
pub(super) fn record_of(life: u64, bytes: &[u8]) -> Option<Record<'_>> {
    if bytes.starts_with(&life.to_le_bytes()) { record_at(bytes) } else { None }
}

/// The record at the start of `bytes`, which has the right life.
fn record_at(bytes: &[u8]) -> Option<Record<'_>> {
    let (frame, rest) = bytes.split_first_chunk::<FRAME_BYTES>()?;
    let number = |at: usize| u32::from_le_bytes(frame[at..at + 4].try_into().expect("four bytes"));
    let batch = rest.get(..number(16) as usize)?;
    let crc = crc32c::crc32c_append(crc32c::crc32c(&frame[..CRC_AT]), batch);
    let persistent = u64::from_le_bytes(frame[8..16].try_into().expect("eight bytes"));
    (crc == number(CRC_AT)).then_some(Record { persistent, batch })
}

/// All whole records of a life in a file, also behind bytes that are none, each with the place behind it.
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
