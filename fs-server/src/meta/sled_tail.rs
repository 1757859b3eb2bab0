//! The tail: every batch since the last flush, in two files that need no sync to outlive the process, and one to outlive
//! a power loss.
//!
//! Sled keeps its newest records in the process's own memory, so a killed server would lose what it acknowledged
//! since the last flush, and clients would see names come and go. What is written to a file survives the process
//! without any sync. So each batch's journal record is also appended here, and opening applies those that sled
//! does not have.
//!
//! ```text
//! tail-0, tail-1:   [ len u32 | crc32c u32 | journal record ] [ len | crc32c | journal record ] ...
//! ```
//!
//! # How it works
//! Batches go to one file. A flush turns to the other one first; once it is done, everything in the first is in
//! sled durably, and that file is emptied. So neither grows past what is committed between two flushes.
//!
//! # Invariants
//! * A batch is applied only if its number follows the last one applied: what a power loss left of the files is
//!   used up to its first gap.
//! * Both files are empty, durably, before the first new batch: numbers of batches that a power loss took away
//!   are given out again, and an old record must not pass for a new one.

use super::sled_journal::{self, JournalError};
use super::store::Batch;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

const FILES: [&str; 2] = ["tail-0", "tail-1"];
/// Length and checksum before each record.
const FRAME_BYTES: usize = 8;

/// The two files.
#[derive(Debug)]
pub struct Tail {
    files: [Arc<File>; 2],
    /// Which of them batches go to.
    current: usize,
}

impl Tail {
    /// Opens the files, making them if they are not there.
    ///
    /// # Errors
    /// [`io::Error`].
    pub fn open(directory: &Path) -> io::Result<Self> {
        let open = |name| OpenOptions::new().create(true).append(true).open(directory.join(name));
        Ok(Self { files: [Arc::new(open(FILES[0])?), Arc::new(open(FILES[1])?)], current: 0 })
    }

    /// What is in the files of `directory`: batches that follow `last` without a gap, in order.
    ///
    /// # Errors
    /// A record that is whole but does not parse, or whose large batch's file is damaged.
    pub fn read(directory: &Path, last: u64) -> Result<Vec<(u64, Batch)>, JournalError> {
        let mut found = Vec::new();
        for name in FILES {
            let bytes = match std::fs::read(directory.join(name)) {
                Ok(bytes) => bytes,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error.into()),
            };
            for record in records(&bytes) {
                // The number first: the file of a large batch that is in sled may be gone.
                let seq = sled_journal::seq_of(record)?;
                if seq > last {
                    found.push((seq, record.to_vec()));
                }
            }
        }
        found.sort_by_key(|(seq, _)| *seq);
        let mut batches = Vec::new();
        for (expected, (seq, record)) in (last + 1..).zip(found) {
            if seq != expected {
                tracing::warn!(
                    expected,
                    found = seq,
                    "metadata's tail has a gap; what follows it was never durable"
                );
                break;
            }
            batches.push(sled_journal::decode(directory, &record)?);
        }
        Ok(batches)
    }

    /// Appends a batch's journal record.
    ///
    /// # Errors
    /// [`io::Error`]; then the record may be there in part, and nothing may be appended after it.
    pub fn append(&mut self, record: &[u8]) -> io::Result<()> {
        let mut framed = Vec::with_capacity(FRAME_BYTES + record.len());
        framed.extend_from_slice(&(record.len() as u32).to_le_bytes());
        framed.extend_from_slice(&crc32c::crc32c(record).to_le_bytes());
        framed.extend_from_slice(record);
        (&*self.files[self.current]).write_all(&framed)
    }

    /// The files: what was appended is durable once both are synced.
    pub fn files(&self) -> [Arc<File>; 2] {
        self.files.clone()
    }

    /// A flush begins: new batches go to the other file.
    pub fn turn(&mut self) {
        self.current = 1 - self.current;
    }

    /// The flush that `turn` began is done: the file before is needed no more.
    ///
    /// # Errors
    /// [`io::Error`].
    pub fn empty_the_other(&self) -> io::Result<()> {
        let other = &self.files[1 - self.current];
        if other.metadata()?.len() > 0 {
            other.set_len(0)?;
        }
        Ok(())
    }

    /// Empties both, durably.
    ///
    /// # Errors
    /// [`io::Error`].
    pub fn empty(&self) -> io::Result<()> {
        for file in &self.files {
            file.set_len(0)?;
            file.sync_all()?;
        }
        Ok(())
    }
}

/// The whole records at the start of `bytes`.
fn records(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (len, rest) = bytes.split_first_chunk::<4>()?;
        let (crc, rest) = rest.split_first_chunk::<4>()?;
        let record = rest.get(..u32::from_le_bytes(*len) as usize)?;
        // An empty record is no record, but zeros a power loss left: their checksum would be right.
        if record.is_empty() || crc32c::crc32c(record) != u32::from_le_bytes(*crc) {
            return None;
        }
        bytes = &rest[record.len()..];
        Some(record)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(number: u8) -> Batch {
        let mut batch = Batch::default();
        batch.put([number], vec![number; 5]);
        batch
    }

    fn append(tail: &mut Tail, directory: &Path, number: u8) {
        let encoded = sled_journal::encode(directory, u64::from(number), &batch(number)).expect("encode");
        tail.append(&encoded.record).expect("append");
    }

    fn numbers(directory: &Path, last: u64) -> Vec<u64> {
        let read = Tail::read(directory, last).expect("read");
        for (seq, found) in &read {
            assert_eq!(*found, batch(*seq as u8));
        }
        read.into_iter().map(|(seq, _)| seq).collect()
    }

    #[test]
    fn what_follows_is_read_in_order_over_both_files() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        assert_eq!(numbers(at, 0), [0u64; 0], "no files, no batches");
        let mut tail = Tail::open(at).expect("open");
        (1..=3).for_each(|number| append(&mut tail, at, number));
        tail.turn();
        (4..=5).for_each(|number| append(&mut tail, at, number));
        assert_eq!(numbers(at, 0), [1, 2, 3, 4, 5], "killed in a flush");
        assert_eq!(numbers(at, 2), [3, 4, 5], "sled has the first two");
        assert_eq!(numbers(at, 5), [0u64; 0]);
        tail.empty_the_other().expect("empty");
        assert_eq!(numbers(at, 3), [4, 5], "killed after the flush");
        assert_eq!(numbers(at, 2), [0u64; 0], "a gap ends it");
        tail.turn();
        append(&mut tail, at, 6);
        assert_eq!(numbers(at, 3), [4, 5, 6], "turned back");
        tail.empty().expect("empty");
        assert_eq!(numbers(at, 0), [0u64; 0]);
    }

    #[test]
    fn a_torn_end_is_cut_off_anywhere() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        let mut tail = Tail::open(at).expect("open");
        append(&mut tail, at, 1);
        let whole_one = std::fs::read(at.join("tail-0")).expect("read").len();
        append(&mut tail, at, 2);
        let bytes = std::fs::read(at.join("tail-0")).expect("read");
        for cut in 0..bytes.len() {
            std::fs::write(at.join("tail-0"), &bytes[..cut]).expect("write");
            assert_eq!(numbers(at, 0).len(), usize::from(cut >= whole_one), "cut at {cut}");
            let mut zeros = bytes.clone();
            zeros[cut..].fill(0);
            std::fs::write(at.join("tail-0"), &zeros).expect("write");
            assert!(numbers(at, 0).len() <= 1, "zeros from {cut}");
        }
    }

    #[test]
    fn golden_bytes() {
        let directory = tempfile::tempdir().expect("directory");
        let mut tail = Tail::open(directory.path()).expect("open");
        append(&mut tail, directory.path(), 7);
        // Journal record: batch 7, inline, 11 bytes: one change, key 07, a value of five times 07.
        let record = [7, 0, 11, 1, 1, 1, 7, 1, 5, 7, 7, 7, 7, 7];
        let bytes = std::fs::read(directory.path().join("tail-0")).expect("read");
        assert_eq!(bytes[..4], (bytes.len() as u32 - 8).to_le_bytes());
        assert_eq!(bytes[4..8], crc32c::crc32c(&bytes[8..]).to_le_bytes());
        assert_eq!(bytes[9..], record, "after the record format's version");
    }
}
