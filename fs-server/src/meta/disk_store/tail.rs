//! The log: every batch since the last checkpoint, in two files that need no sync to outlive the process, and one to outlive a
//! power loss.
//!
//! ```text
//! tail-0, tail-1:   header, record, record, ...
//! header            [ magic "CFTAIL04" | life u64 | crc32c u32 of the 16 bytes before | zero u32 ]
//! record            [ life u64 | persistent u64 | len u32 | crc32c u32 | batch of len bytes (`logged`) ]
//! ```
//! Little-endian; a record's checksum is of all of it but itself. `life` is drawn at random each time the store is opened,
//! and nobody outside knows it: bytes that a client wrote never pass for a record. `persistent` is the last batch that
//! was durable when the record was written.
//!
//! # How it works
//! Batches go to one file. A checkpoint turns to the other one first; once it is durable, everything in the first is in
//! it, and that file is written over from its start when the next checkpoint turns back. So neither grows past what is committed
//! between two checkpoints.
//!
//! **A sync writes data only.** The sync of a file that has grown makes the file system write its own journal as well, one wait
//! behind the other. So a file is filled with zeros ahead of its records, some at a time, and is not cut off behind a checkpoint. On a
//! disk that has not plenty of room it is cut off, and nothing is filled ahead.
//!
//! # Invariants
//! * A batch is applied only if its number follows the last one applied: what a power loss left of the files is
//!   used up to its first gap.
//! * Records that are left behind the last one of a file have numbers that the checkpoint covers: within a life of the log numbers
//!   only grow, and a file is written over only once a checkpoint that has all of it is durable.
//! * Both files are empty, durably, before the first new batch of a life: numbers of batches that a power loss took away
//!   are given out again, and an old record must not pass for a new one.
//! * A record is whole, or nothing of this turn comes after it: one that found no space is cut off again.
//!
//! # A torn end and rot
//!
//! | found | meaning | done |
//! | --- | --- | --- |
//! | records up to a number, and nothing behind | the end | applied |
//! | a number is missing; no record says that it was durable | the sync that was under way, or a process killed in a write | what comes before it is applied |
//! | a number is missing, and some record says that it was durable | rot | the store does not open |
//! | a number that the checkpoint has | written before it | skipped |
//! | a header that is not one, beside a good one | rot where nothing is lost | the other one's life counts |
//! | no file has a header | the power failed while a store was opened: all was in the checkpoint | nothing |
//!
//! As in the redo log, nobody can tell the last durable record from one that was under way.

use super::logged::{self, LogError};
use super::space::Space;
use crate::meta::store::Batch;
use cuttlefs_common::world::{Random, SystemRandom};
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::Arc;

const FILES: [&str; 2] = ["tail-0", "tail-1"];
const MAGIC: [u8; 8] = *b"CFTAIL04";
/// The version in it.
const VERSION: &str = "04";
/// What all versions begin with; two digits follow.
const FAMILY: &[u8] = b"CFTAIL";
const HEADER_BYTES: usize = 24;
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
pub struct Tail {
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

impl Tail {
    /// Opens the files, making them if they are not there. Nothing is appended before `begin`.
    ///
    /// # Errors
    /// [`io::Error`].
    pub fn open(directory: &Path, space: Arc<Space>, fill_bytes: u64) -> io::Result<Self> {
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

    /// What is in the files of `directory`: batches that follow `last` without a gap, in order.
    ///
    /// # Errors
    /// A batch that was durable is missing, a record that is whole does not parse, or all is of another version.
    pub fn read(directory: &Path, last: u64) -> Result<Vec<(u64, Batch)>, LogError> {
        let mut files = Vec::new();
        for name in FILES {
            match std::fs::read(directory.join(name)) {
                Ok(bytes) => files.push(bytes),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(found) = files.iter().find_map(|bytes| other_version_of(bytes)) {
            return Err(LogError::Version { found, known: VERSION });
        }
        let any = files.iter().find_map(|bytes| life_of(bytes));
        let (mut found, mut durable) = (Vec::new(), 0);
        for bytes in &files {
            let Some(life) = life_of(bytes).or(any) else { continue };
            for record in records(life, bytes.get(HEADER_BYTES..).unwrap_or_default()) {
                durable = durable.max(record.persistent);
                // Most of a file may be what the checkpoint has.
                if logged::number(record.batch)? > last {
                    found.push(logged::decode(record.batch)?);
                }
            }
        }
        found.sort_by_key(|(seq, _)| *seq);
        let mut batches = Vec::new();
        let mut next = last + 1;
        for (seq, batch) in found {
            if seq < next {
                // A copy of a record: contents of files are in records, too, and bytes of a torn one are looked through.
                continue;
            }
            if seq != next {
                tracing::warn!(
                    expected = next,
                    found = seq,
                    "metadata's tail has a gap; what follows it was never durable"
                );
                break;
            }
            batches.push((seq, batch));
            next += 1;
        }
        if durable >= next {
            return Err(LogError::Damaged { missing: next, durable });
        }
        Ok(batches)
    }

    /// Appends a batch; `persistent` is the last one that is durable by now.
    ///
    /// # Errors
    /// [`io::Error`]; if it is `StorageFull` the file is as before, else nothing may be appended any more.
    pub fn append(&mut self, batch: &[u8], persistent: u64) -> io::Result<()> {
        let mut bytes = framed(self.life, persistent, batch);
        let end = self.lens[self.current] + bytes.len() as u64;
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
        written
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
    pub fn begin_sync(&mut self) -> Vec<(&'static str, Arc<File>)> {
        let unsynced = std::mem::take(&mut self.unsynced);
        let files = FILES.into_iter().zip(self.files.iter().cloned()).zip(unsynced);
        files.filter_map(|(file, unsynced)| unsynced.then_some(file)).collect()
    }

    /// Bytes of both files.
    pub fn len_bytes(&self) -> u64 {
        self.filled.iter().sum()
    }

    /// Bytes since the last checkpoint began.
    pub fn current_bytes(&self) -> u64 {
        self.lens[self.current]
    }

    /// A checkpoint begins: new batches go to the other file.
    pub fn turn(&mut self) {
        self.current = 1 - self.current;
    }

    /// The checkpoint that `turn` began is durable: the file before is needed no more.
    ///
    /// # Errors
    /// [`io::Error`].
    pub fn give_up_the_other(&mut self) -> io::Result<()> {
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
    pub fn give_back(&mut self) -> io::Result<()> {
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
    pub fn begin(&mut self) -> io::Result<()> {
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

fn header_of(magic: [u8; 8], life: u64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&magic);
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

/// The version of a header that is good, but for being of another one. What rots is no other version.
fn other_version_of(bytes: &[u8]) -> Option<String> {
    let found = bytes.first_chunk::<HEADER_BYTES>()?;
    let (magic, life) = (found.first_chunk::<8>()?, found[8..16].first_chunk::<8>()?);
    let is_header = *found == header_of(*magic, u64::from_le_bytes(*life));
    let is_other = magic.starts_with(FAMILY) && *magic != MAGIC;
    (is_header && is_other).then(|| String::from_utf8_lossy(&magic[FAMILY.len()..]).into_owned())
}

fn framed(life: u64, persistent: u64, batch: &[u8]) -> Vec<u8> {
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
struct Record<'a> {
    persistent: u64,
    batch: &'a [u8],
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

/// All whole records of a life, also behind bytes that are none.
fn records(life: u64, bytes: &[u8]) -> Vec<Record<'_>> {
    let life = life.to_le_bytes();
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(rest) = bytes.get(at..).filter(|rest| rest.len() >= FRAME_BYTES) {
        match rest.starts_with(&life).then(|| record_at(rest)).flatten() {
            Some(record) => {
                at += FRAME_BYTES + record.batch.len();
                found.push(record);
            }
            None => at += 1,
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILL: u64 = 4096;

    fn batch(number: u8) -> Batch {
        let mut batch = Batch::default();
        batch.put([number], vec![number; 5]);
        batch
    }

    fn logged(number: u8) -> Vec<u8> {
        logged::encode(u64::from(number), &batch(number))
    }

    /// Nothing is durable by then.
    fn append(tail: &mut Tail, number: u8) {
        tail.append(&logged(number), 0).expect("append");
    }

    fn begun(directory: &Path) -> Tail {
        let space = Arc::new(Space::open(directory, 0).expect("space"));
        let mut tail = Tail::open(directory, space, FILL).expect("open");
        tail.begin().expect("begin");
        tail
    }

    /// The bytes of a file up to where its records end, and all of them.
    fn used(tail: &Tail, at: &Path) -> (Vec<u8>, Vec<u8>) {
        let all = std::fs::read(at.join(FILES[tail.current])).expect("read");
        assert_eq!(all.len() as u64, tail.filled[tail.current]);
        (all[..tail.lens[tail.current] as usize].to_vec(), all)
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
        (1..=3).for_each(|number| append(&mut tail, number));
        tail.turn();
        (4..=5).for_each(|number| append(&mut tail, number));
        assert_eq!(numbers(at, 0), [1, 2, 3, 4, 5], "killed in a checkpoint");
        assert_eq!(numbers(at, 2), [3, 4, 5], "the checkpoint has the first two");
        assert_eq!(numbers(at, 5), [0u64; 0]);
        tail.give_up_the_other().expect("given up");
        assert_eq!(numbers(at, 3), [4, 5], "killed after the checkpoint: what it has is skipped");
        tail.turn();
        append(&mut tail, 6);
        assert_eq!(numbers(at, 3), [4, 5, 6], "turned back: the first record is written over");
        assert_eq!(numbers(at, 0), [0u64; 0], "and missed by who has no checkpoint");
        tail.begin().expect("empty");
        assert_eq!(numbers(at, 0), [0u64; 0]);
    }

    #[test]
    fn a_file_that_is_written_over_keeps_its_length_and_is_torn_anywhere() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        let mut tail = begun(at);
        // Of different lengths, so that new records end in the midst of old ones.
        let long = |number: u8| {
            let mut batch = Batch::default();
            batch.put([number], vec![number; 40 + 7 * usize::from(number)]);
            logged::encode(u64::from(number), &batch)
        };
        (1..=9).for_each(|number| tail.append(&long(number), 0).expect("append"));
        tail.turn();
        append(&mut tail, 10);
        tail.give_up_the_other().expect("given up");
        tail.turn();
        let before = used(&tail, at).1;
        let mut written_over = Vec::new();
        for number in 11..=14 {
            append(&mut tail, number);
            written_over.push(tail.lens[tail.current] as usize);
        }
        let after = used(&tail, at).1;
        assert_eq!(before.len(), after.len(), "no sync of this has anything but data to write");
        for cut in HEADER_BYTES..=*written_over.last().expect("some") {
            let torn = [&after[..cut], &before[cut..]].concat();
            std::fs::write(at.join("tail-0"), torn).expect("write");
            let whole = written_over.iter().filter(|end| **end <= cut).count() as u64;
            assert_eq!(numbers(at, 9), (10..=10 + whole).collect::<Vec<_>>(), "cut at {cut}");
        }
    }

    #[test]
    fn without_plenty_of_room_nothing_is_filled_and_nothing_kept() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        let mut tail = begun(at);
        append(&mut tail, 1);
        assert_eq!(tail.filled, [2 * FILL, HEADER_BYTES as u64], "the one is filled, the other not yet");
        tail.space.set_full(true);
        tail.turn();
        let refused = tail.append(&logged(2), 0).expect_err("full");
        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        tail.give_up_the_other().expect("given up");
        assert_eq!(tail.len_bytes(), 2 * HEADER_BYTES as u64);
        tail.space.set_full(false);
        append(&mut tail, 2);
        assert_eq!(numbers(at, 1), [2]);
    }

    #[test]
    fn a_copy_of_a_record_in_a_torn_one_ends_nothing() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        let mut tail = begun(at);
        append(&mut tail, 1);
        append(&mut tail, 2);
        let log = used(&tail, at).0;
        // A file that holds a copy of the log is written and synced; the power fails.
        let mut batch = Batch::default();
        batch.put(*b"P", log);
        tail.append(&logged::encode(3, &batch), 0).expect("append");
        let (log, mut all) = used(&tail, at);
        all[log.len() - 1] ^= 1;
        std::fs::write(at.join("tail-0"), all).expect("write");
        assert_eq!(numbers(at, 0), [1, 2]);
    }

    #[test]
    fn a_torn_end_is_cut_off_anywhere() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        let mut tail = begun(at);
        append(&mut tail, 1);
        let whole_one = used(&tail, at).0.len();
        append(&mut tail, 2);
        let bytes = used(&tail, at).0;
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
        (1..=3).for_each(|number| append(&mut tail, number));
        tail.append(&logged(4), durable).expect("append");
        let bytes = used(&tail, at).0;
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
                matches!(read, Err(LogError::Damaged { missing, durable: 3 }) if missing == hit),
                "byte {place}: {read:?}"
            );
            // What the checkpoint has is not missed.
            assert_eq!(numbers(at, 3), [4]);
        }
        // All of the others are gone.
        let mut gone = bytes.clone();
        gone[HEADER_BYTES..HEADER_BYTES + 3 * record].fill(0);
        std::fs::write(at.join("tail-0"), &gone).expect("write");
        assert!(matches!(Tail::read(at, 0), Err(LogError::Damaged { missing: 1, durable: 3 })));
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
    fn a_log_of_another_version_is_refused_and_left_alone() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        append(&mut begun(at), 1);
        let mut bytes = std::fs::read(at.join("tail-0")).expect("read");
        bytes[..HEADER_BYTES].copy_from_slice(&header_of(*b"CFTAIL03", 77));
        std::fs::write(at.join("tail-0"), &bytes).expect("write");
        let refused = Tail::read(at, 0).expect_err("another version");
        assert!(matches!(&refused, LogError::Version { found, .. } if found == "03"), "{refused}");
        assert_eq!(std::fs::read(at.join("tail-0")).expect("read"), bytes);
    }

    #[test]
    fn what_a_client_wrote_is_no_record() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        let tail = begun(at);
        // A name or value made to look like one, in a record that a power loss tore.
        let forged = framed(tail.life ^ 2, u64::MAX, &logged(9));
        let mut torn = framed(tail.life, 0, &forged);
        torn.truncate(torn.len() - 1);
        torn.push(!torn[torn.len() - 1]);
        std::fs::write(at.join("tail-0"), [&header(tail.life)[..], &torn].concat()).expect("write");
        assert_eq!(numbers(at, 0), [0u64; 0]);
    }

    #[test]
    fn what_finds_no_space_leaves_the_file_as_it_was() {
        let directory = tempfile::tempdir().expect("directory");
        let at = directory.path();
        let mut tail = begun(at);
        append(&mut tail, 1);
        // A device that is always full.
        let whole = std::mem::replace(
            &mut tail.files[0],
            Arc::new(File::options().write(true).open("/dev/full").expect("open")),
        );
        let refused = tail.append(&logged(2), 0).map_err(|error| error.kind());
        // Its length cannot be set, so that no more is appended; on a file it can.
        assert!(refused.is_err());
        tail.files[0] = whole;
        append(&mut tail, 2);
        assert_eq!(numbers(at, 0), [1, 2]);
    }

    #[test]
    fn only_what_was_written_to_is_synced() {
        let directory = tempfile::tempdir().expect("directory");
        let mut tail = begun(directory.path());
        assert_eq!(tail.begin_sync().len(), 0);
        append(&mut tail, 1);
        tail.turn();
        assert_eq!(tail.begin_sync().len(), 1);
        assert_eq!(tail.begin_sync().len(), 0);
        append(&mut tail, 2);
        tail.turn();
        append(&mut tail, 3);
        assert_eq!(tail.begin_sync().len(), 2);
    }

    #[test]
    fn golden_bytes() {
        let directory = tempfile::tempdir().expect("directory");
        let mut tail = begun(directory.path());
        tail.life = 0x0102_0304_0506_0708;
        tail.begin().expect("begin");
        tail.append(&logged(7), 6).expect("append");
        let bytes = used(&tail, directory.path()).0;
        let mut expected = b"CFTAIL04\x08\x07\x06\x05\x04\x03\x02\x01".to_vec();
        expected.extend_from_slice(&HEADER_CRC.to_le_bytes());
        expected.extend_from_slice(&[0; 4]);
        expected.extend_from_slice(&[8, 7, 6, 5, 4, 3, 2, 1, 6, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0, 0]);
        expected.extend_from_slice(&RECORD_CRC.to_le_bytes());
        // Batch: version, number 7, one change, key 07, a value of five times 07.
        expected.extend_from_slice(&[1, 7, 1, 1, 7, 1, 5, 7, 7, 7, 7, 7]);
        assert_eq!(bytes, expected);
    }

    // Computed by another implementation.
    const HEADER_CRC: u32 = 0x963e_b728;
    const RECORD_CRC: u32 = 0xdfdf_640d;
}
