//! The tail: every batch since the last flush, in two files that need no sync to outlive the process, and one to outlive
//! a power loss.
//!
//! Sled keeps its newest records in the process's own memory, so a killed server would lose what it acknowledged
//! since the last flush, and clients would see names come and go. What is written to a file survives the process
//! without any sync. So each batch's journal record is also appended here, and opening applies those that sled
//! does not have.
//!
//! ```text
//! tail-0, tail-1:   header, record, record, ...
//! header            [ magic "CFTAIL02" | life u64 | crc32c u32 of the 16 bytes before | zero u32 ]
//! record            [ life u64 | persistent u64 | len u32 | crc32c u32 | journal record of len bytes ]
//! ```
//! Little-endian; a record's checksum is of all of it but itself. `life` is drawn at random each time the store is opened,
//! and nobody outside knows it: bytes that a client wrote never pass for a record. `persistent` is the last batch that
//! was durable when the record was written. Files of releases before have no header, and records `[ len | crc32c of the
//! journal record | journal record ]`; they are read, and emptied as all are.
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
//!
//! # A torn end and rot
//!
//! | found | meaning | done |
//! | --- | --- | --- |
//! | records up to a number, and nothing behind | the end | applied |
//! | a number is missing; no record says that it was durable | the sync that was under way, or a process killed in a write | what comes before it is applied |
//! | a number is missing, and some record says that it was durable | rot | the store does not open |
//! | a header that is not one, beside a good one | rot where nothing is lost | the other one's life counts |
//! | no file has a header | a release before wrote them | read as it did, up to the first record that is not whole |
//!
//! As in the redo log, nobody can tell the last durable record from one that was under way.

use super::sled_journal::{self, JournalError};
use super::store::Batch;
use cuttlefs_common::world::{Random, SystemRandom};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

const FILES: [&str; 2] = ["tail-0", "tail-1"];
const MAGIC: [u8; 8] = *b"CFTAIL02";
const HEADER_BYTES: usize = 24;
/// Bytes before each journal record.
const FRAME_BYTES: usize = 24;
/// Where in them the checksum is.
const CRC_AT: usize = 20;

/// The two files.
#[derive(Debug)]
pub struct Tail {
    files: [Arc<File>; 2],
    /// Which of them batches go to.
    current: usize,
    life: u64,
}

impl Tail {
    /// Opens the files, making them if they are not there. Nothing is appended before `begin`.
    ///
    /// # Errors
    /// [`io::Error`].
    pub fn open(directory: &Path) -> io::Result<Self> {
        let open = |name| OpenOptions::new().create(true).append(true).open(directory.join(name));
        let files = [Arc::new(open(FILES[0])?), Arc::new(open(FILES[1])?)];
        // Not zero: what a power loss leaves of a file may be zeros.
        Ok(Self { files, current: 0, life: SystemRandom.next_u64() | 1 })
    }

    /// What is in the files of `directory`: batches that follow `last` without a gap, in order.
    ///
    /// # Errors
    /// A batch that was durable is missing; a record that is whole but does not parse, or whose large batch's file is
    /// damaged.
    pub fn read(directory: &Path, last: u64) -> Result<Vec<(u64, Batch)>, JournalError> {
        let mut files = Vec::new();
        for name in FILES {
            match std::fs::read(directory.join(name)) {
                Ok(bytes) => files.push(bytes),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
        }
        let any = files.iter().find_map(|bytes| life_of(bytes));
        let (mut found, mut durable) = (Vec::new(), 0);
        for bytes in &files {
            let records = match life_of(bytes).or(any) {
                Some(life) => records(life, bytes.get(HEADER_BYTES..).unwrap_or_default()),
                None => records_without_header(bytes),
            };
            for record in records {
                durable = durable.max(record.persistent);
                // The number first: the file of a large batch that is in sled may be gone.
                let seq = sled_journal::seq_of(record.journal)?;
                if seq > last {
                    found.push((seq, record.journal));
                }
            }
        }
        found.sort_by_key(|(seq, _)| *seq);
        let mut batches = Vec::new();
        let mut next = last + 1;
        for (seq, journal) in found {
            if seq != next {
                tracing::warn!(
                    expected = next,
                    found = seq,
                    "metadata's tail has a gap; what follows it was never durable"
                );
                break;
            }
            batches.push(sled_journal::decode(directory, journal)?);
            next += 1;
        }
        if durable >= next {
            return Err(JournalError::TailDamaged { missing: next, durable });
        }
        Ok(batches)
    }

    /// Appends a batch's journal record; `persistent` is the last batch that is durable by now.
    ///
    /// # Errors
    /// [`io::Error`]; then the record may be there in part, and nothing may be appended after it.
    pub fn append(&mut self, record: &[u8], persistent: u64) -> io::Result<()> {
        (&*self.files[self.current]).write_all(&framed(self.life, persistent, record))
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
        // Its header stays: it is never written again in this life, so no crash can tear it.
        if other.metadata()?.len() > HEADER_BYTES as u64 {
            other.set_len(HEADER_BYTES as u64)?;
        }
        Ok(())
    }

    /// Empties both, durably, and begins a new life in them. What was in them is in the store, durably.
    ///
    /// # Errors
    /// [`io::Error`].
    pub fn begin(&self) -> io::Result<()> {
        for file in &self.files {
            file.set_len(0)?;
            (&**file).write_all(&header(self.life))?;
            file.sync_all()?;
        }
        Ok(())
    }
}

fn header(life: u64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..16].copy_from_slice(&life.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..16]);
    bytes[16..20].copy_from_slice(&crc.to_le_bytes());
    bytes
}

fn life_of(bytes: &[u8]) -> Option<u64> {
    let found = bytes.first_chunk::<HEADER_BYTES>()?;
    let life = u64::from_le_bytes(found[8..16].try_into().expect("eight bytes"));
    (*found == header(life)).then_some(life)
}

fn framed(life: u64, persistent: u64, journal: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(FRAME_BYTES + journal.len());
    bytes.extend_from_slice(&life.to_le_bytes());
    bytes.extend_from_slice(&persistent.to_le_bytes());
    bytes.extend_from_slice(&(journal.len() as u32).to_le_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes), journal);
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes.extend_from_slice(journal);
    bytes
}

/// A whole record.
struct Record<'a> {
    persistent: u64,
    journal: &'a [u8],
}

/// The record at the start of `bytes`, which has the right life.
fn record_at(bytes: &[u8]) -> Option<Record<'_>> {
    let (frame, rest) = bytes.split_first_chunk::<FRAME_BYTES>()?;
    let number = |at: usize| u32::from_le_bytes(frame[at..at + 4].try_into().expect("four bytes"));
    let journal = rest.get(..number(16) as usize)?;
    let crc = crc32c::crc32c_append(crc32c::crc32c(&frame[..CRC_AT]), journal);
    let persistent = u64::from_le_bytes(frame[8..16].try_into().expect("eight bytes"));
    (crc == number(CRC_AT)).then_some(Record { persistent, journal })
}

/// All whole records of a life, also behind bytes that are none.
fn records(life: u64, bytes: &[u8]) -> Vec<Record<'_>> {
    let life = life.to_le_bytes();
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(rest) = bytes.get(at..).filter(|rest| rest.len() >= FRAME_BYTES) {
        match rest.starts_with(&life).then(|| record_at(rest)).flatten() {
            Some(record) => {
                at += FRAME_BYTES + record.journal.len();
                found.push(record);
            }
            None => at += 1,
        }
    }
    found
}

/// The whole records at the start of a file without a header.
fn records_without_header(mut bytes: &[u8]) -> Vec<Record<'_>> {
    let mut found = Vec::new();
    while let Some((len, rest)) = bytes.split_first_chunk::<4>()
        && let Some((crc, rest)) = rest.split_first_chunk::<4>()
        && let Some(journal) = rest.get(..u32::from_le_bytes(*len) as usize)
        // An empty record is no record, but zeros a power loss left: their checksum would be right.
        && !journal.is_empty()
        && crc32c::crc32c(journal) == u32::from_le_bytes(*crc)
    {
        found.push(Record { persistent: 0, journal });
        bytes = &rest[journal.len()..];
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(number: u8) -> Batch {
        let mut batch = Batch::default();
        batch.put([number], vec![number; 5]);
        batch
    }

    fn journal(directory: &Path, number: u8) -> Vec<u8> {
        sled_journal::encode(directory, u64::from(number), &batch(number)).expect("encode").record
    }

    /// Nothing is durable by then.
    fn append(tail: &mut Tail, directory: &Path, number: u8) {
        tail.append(&journal(directory, number), 0).expect("append");
    }

    fn begun(directory: &Path) -> Tail {
        let tail = Tail::open(directory).expect("open");
        tail.begin().expect("begin");
        tail
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
        let mut tail = begun(at);
        assert_eq!(numbers(at, 0), [0u64; 0]);
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
        tail.begin().expect("empty");
        assert_eq!(numbers(at, 0), [0u64; 0]);
    }

    #[test]
    fn a_torn_end_is_cut_off_anywhere() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        let mut tail = begun(at);
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

    /// Four records; while the last was written, so many batches were durable.
    fn four(at: &Path, durable: u64) -> (Vec<u8>, usize) {
        let mut tail = begun(at);
        (1..=3).for_each(|number| append(&mut tail, at, number));
        tail.append(&journal(at, 4), durable).expect("append");
        let bytes = std::fs::read(at.join("tail-0")).expect("read");
        let record = (bytes.len() - HEADER_BYTES) / 4;
        (bytes, record)
    }

    #[test]
    fn rot_in_what_was_durable_is_not_taken_for_the_end() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        let (bytes, record) = four(at, 3);
        for place in HEADER_BYTES..bytes.len() {
            let mut rotten = bytes.clone();
            rotten[place] ^= 1 << (place % 8);
            std::fs::write(at.join("tail-0"), &rotten).expect("write");
            let hit = ((place - HEADER_BYTES) / record) as u64 + 1;
            if hit == 4 {
                // Nobody can tell it from a write that was cut.
                assert_eq!(numbers(at, 0), [1, 2, 3]);
                continue;
            }
            let read = Tail::read(at, 0);
            assert!(
                matches!(read, Err(JournalError::TailDamaged { missing, durable: 3 }) if missing == hit),
                "byte {place}: {read:?}"
            );
            // What sled has is not missed.
            assert_eq!(numbers(at, 3), [4]);
        }
        // All of the others are gone.
        let mut gone = bytes.clone();
        gone[HEADER_BYTES..HEADER_BYTES + 3 * record].fill(0);
        std::fs::write(at.join("tail-0"), &gone).expect("write");
        assert!(matches!(Tail::read(at, 0), Err(JournalError::TailDamaged { missing: 1, durable: 3 })));
    }

    #[test]
    fn a_sync_that_was_under_way_may_leave_holes() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        let (bytes, record) = four(at, 1);
        for (hole, left) in [(2, vec![1]), (3, vec![1, 2])] {
            let mut torn = bytes.clone();
            let from = HEADER_BYTES + (hole - 1) * record;
            torn[from..from + record].fill(0);
            std::fs::write(at.join("tail-0"), &torn).expect("write");
            assert_eq!(numbers(at, 0), left);
        }
    }

    #[test]
    fn a_header_that_rots_loses_nothing() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        let (bytes, _) = four(at, 3);
        for bit in 0..HEADER_BYTES * 8 {
            let mut rotten = bytes.clone();
            rotten[bit / 8] ^= 1 << (bit % 8);
            std::fs::write(at.join("tail-0"), &rotten).expect("write");
            assert_eq!(numbers(at, 0), [1, 2, 3, 4], "bit {bit}");
        }
    }

    #[test]
    fn what_a_client_wrote_is_no_record() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        let tail = begun(at);
        // A name or value made to look like one, in a record that a power loss tore.
        let forged = framed(tail.life ^ 2, u64::MAX, &journal(at, 9));
        let mut torn = framed(tail.life, 0, &forged);
        torn.truncate(torn.len() - 1);
        torn.push(!torn[torn.len() - 1]);
        std::fs::write(at.join("tail-0"), [&header(tail.life)[..], &torn].concat()).expect("write");
        assert_eq!(numbers(at, 0), [0u64; 0]);
    }

    #[test]
    fn files_of_a_release_without_headers_are_read() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        let old = |number| {
            let journal = journal(at, number);
            let (len, crc) = ((journal.len() as u32).to_le_bytes(), crc32c::crc32c(&journal).to_le_bytes());
            [&len[..], &crc, &journal].concat()
        };
        std::fs::write(at.join("tail-0"), [old(1), old(2)].concat()).expect("write");
        std::fs::write(at.join("tail-1"), [old(3), old(4)[..9].to_vec(), vec![0; 40]].concat())
            .expect("write");
        assert_eq!(numbers(at, 0), [1, 2, 3]);
        let tail = Tail::open(at).expect("open");
        assert_eq!(numbers(at, 0), [1, 2, 3], "opening changes nothing");
        tail.begin().expect("begin");
        assert_eq!(numbers(at, 0), [0u64; 0]);
    }

    #[test]
    fn golden_bytes() {
        let directory = tempfile::tempdir().expect("directory");
        let mut tail = Tail::open(directory.path()).expect("open");
        tail.life = 0x0102_0304_0506_0708;
        tail.begin().expect("begin");
        tail.append(&journal(directory.path(), 7), 6).expect("append");
        let bytes = std::fs::read(directory.path().join("tail-0")).expect("read");
        let mut expected = b"CFTAIL02\x08\x07\x06\x05\x04\x03\x02\x01".to_vec();
        expected.extend_from_slice(&HEADER_CRC.to_le_bytes());
        expected.extend_from_slice(&[0; 4]);
        expected.extend_from_slice(&[8, 7, 6, 5, 4, 3, 2, 1, 6, 0, 0, 0, 0, 0, 0, 0, 15, 0, 0, 0]);
        expected.extend_from_slice(&RECORD_CRC.to_le_bytes());
        // Journal record: version, batch 7, inline, 11 bytes: one change, key 07, a value of five times 07.
        expected.extend_from_slice(&[1, 7, 0, 11, 1, 1, 1, 7, 1, 5, 7, 7, 7, 7, 7]);
        assert_eq!(bytes, expected);
    }

    // Computed by another implementation.
    const HEADER_CRC: u32 = 0xa560_af7a;
    const RECORD_CRC: u32 = 0xe56c_4a1e;
}
