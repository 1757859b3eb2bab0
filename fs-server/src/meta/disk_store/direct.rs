//! Records that are synced by a direct write, beside the log.
//!
//! A sync of the log (`tail`) blocks, and writes through the page cache, so it takes a thread. A caller that must not wait for a thread writes all
//! records that are not durable a second time: by one direct write (`O_DIRECT`) that is durable when it is done (`RWF_DSYNC`), as a request of a
//! worker's own ring. This module has the files for these writes.
//!
//! ```text
//! direct-0, direct-1:   a sync, a sync, ...           of one length, written over from its start in turn
//! sync                  record, record, ..., zeros to the end of a block of 4 KiB        records as in `tail`, byte for byte
//! ```
//!
//! # How it works
//! Records that are not durable are kept in memory, up to `KEPT_MOST_BYTES`. A sync writes all of them, to blocks of its own behind those of the sync
//! before. When a file is full, syncs go on in the other one, and a thread that can block has to sync the log. Once that is done, all records of the
//! first file are durable in the log as well, and the file may be overwritten. Both files are filled with zeros to their full length before the first
//! sync, and are kept over restarts, so that a sync writes data only.
//!
//! They are separate files, because no page of theirs is in the page cache, and because an append to the log holds the file's lock in the kernel, for
//! which a request of a ring would have to wait in a thread.
//!
//! # Invariants
//! * A record in these files is in the log as well, or was: it is appended there first. A kill loses no record. After a power loss a record may be in
//!   either or in both; recovery takes either, by its number.
//! * A file is overwritten only once all its records are durable in the log or in a checkpoint, and no write to it is under way, not even one that
//!   was given up.
//! * Records of another life of the log do not count: the files are not emptied when a new life begins.
//! * A sync writes records without a gap, from the first one that is not durable. No block is shared by two syncs, so that none can tear another's.
//!
//! # Failure
//! | event | result |
//! | --- | --- |
//! | the file system has no such writes, or little room | no files: the log is synced by the thread |
//! | there is more to sync than was kept | the same, this time |
//! | the other file is not free yet | the same, this time; all of it is free after that |
//! | a write finds no space (a copied file with holes, a file system that never overwrites) | no files until the next start; the thread syncs |
//! | any other error | final, like that of a sync |

use super::logged::{self, LogError};
use super::space::Space;
use super::tail;
use crate::meta::store::DirectSync;
use crate::pool::{AlignedBuf, BLOCK_BYTES, BlockWrite};
use rustix::io::ReadWriteFlags;
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSlice};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

pub(super) const FILES: [&str; 2] = ["direct-0", "direct-1"];
/// Default length of each file. It has room for some hundred small syncs, so that the log rarely has to be synced after them, and a start reads
/// little.
pub(super) const FILE_BYTES: u64 = 2 << 20;
/// Most bytes of records that are kept for a sync. Writing more of them twice would cost more than the thread does.
const KEPT_MOST_BYTES: usize = 256 << 10;
/// A sync takes at most this part of a file, so that the other file is free in time.
const FILE_PART: usize = 4;
/// Bytes that one write fills with zeros.
const FILL_BYTES: usize = 256 << 10;

const _: () = assert!(KEPT_MOST_BYTES as u64 * FILE_PART as u64 <= FILE_BYTES);

/// The files for direct writes, and the records for the next one.
#[derive(Debug)]
pub(super) struct Direct {
    file_bytes: u64,
    /// `None` before the files are ready, and if they cannot be.
    files: Option<[Arc<File>; 2]>,
    current: usize,
    /// The offset in the current file at which the next sync is written.
    at: u64,
    /// The last batch in each file.
    last: [u64; 2],
    /// Records behind the last batch that was known to be durable, with their numbers. Some may be durable by now.
    kept: VecDeque<(u64, Vec<u8>)>,
    kept_bytes: usize,
}

/// Opens a file at its full length, whatever is in it.
fn open(path: &Path, file_bytes: u64) -> io::Result<File> {
    let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
    let options = OpenOptions::new().create(true).write(true).truncate(false).custom_flags(flags).to_owned();
    let file = options.open(path)?;
    let zeros = AlignedBuf::zeroed(FILL_BYTES.min(file_bytes as usize));
    let found = file.metadata()?;
    if found.len() != file_bytes || found.blocks() * 512 < file_bytes {
        file.set_len(0)?;
        for at in (0..file_bytes).step_by(zeros.len()) {
            file.write_all_at(zeros.as_slice(), at)?;
        }
    }
    // This also checks that such writes are possible. No record of this life is in the file yet.
    let first = &zeros.as_slice()[..BLOCK_BYTES];
    let written = rustix::io::pwritev2(&file, &[IoSlice::new(first)], 0, ReadWriteFlags::DSYNC)?;
    if written != BLOCK_BYTES {
        return Err(io::ErrorKind::WriteZero.into());
    }
    file.sync_all()?;
    Ok(file)
}

/// Opens the files, and makes them if they do not exist. Blocks.
///
/// # Errors
/// [`io::Error`] if there is little room, or such writes are impossible; no files are left then.
pub(super) fn prepare(directory: &Path, file_bytes: u64, space: &Space) -> io::Result<[Arc<File>; 2]> {
    let prepare = || {
        if !space.is_plenty() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let files =
            [open(&directory.join(FILES[0]), file_bytes)?, open(&directory.join(FILES[1]), file_bytes)?];
        // Makes the files' names durable.
        File::open(directory)?.sync_all()?;
        Ok(files.map(Arc::new))
    };
    prepare().inspect_err(|_| FILES.iter().for_each(|name| drop(std::fs::remove_file(directory.join(name)))))
}

impl Direct {
    /// No files yet; each will have `file_bytes` bytes, a power of two of blocks.
    pub(super) fn new(file_bytes: u64) -> Self {
        Self {
            file_bytes,
            files: None,
            current: 0,
            at: 0,
            last: [0; 2],
            kept: VecDeque::new(),
            kept_bytes: 0,
        }
    }

    fn kept_most_bytes(&self) -> usize {
        KEPT_MOST_BYTES.min(self.file_bytes as usize / FILE_PART)
    }

    /// Lets syncs use these files from now on.
    pub(super) fn start(&mut self, files: [Arc<File>; 2]) {
        *self = Self { files: Some(files), ..Self::new(self.file_bytes) };
    }

    /// Lets no sync use the files any more.
    pub(super) fn give_up(&mut self) {
        *self = Self::new(self.file_bytes);
    }

    /// The length of each file.
    pub(super) fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// The length of both files together.
    pub(super) fn len_bytes(&self) -> u64 {
        if self.files.is_some() { 2 * self.file_bytes } else { 0 }
    }

    /// Keeps a record that was appended to the log.
    pub(super) fn keep(&mut self, batch: u64, record: Vec<u8>) {
        if self.files.is_none() {
            return;
        }
        if self.kept_bytes + record.len() > self.kept_most_bytes() {
            // There is too much for a direct write. Later records are kept again once these are durable.
            self.kept.clear();
            self.kept_bytes = 0;
        }
        if record.len() <= self.kept_most_bytes() {
            self.kept_bytes += record.len();
            self.kept.push_back((batch, record));
        }
    }

    /// Begins a sync of all batches behind `persistent`, which is durable, up to `last`. Batches up to `settled` are durable in the log or in a
    /// checkpoint. `None` if the log has to be synced instead.
    pub(super) fn begin(
        &mut self,
        persistent: u64,
        last: u64,
        settled: u64,
    ) -> Option<(DirectSync, BlockWrite)> {
        while self.kept.front().is_some_and(|(number, _)| *number <= persistent) {
            let (_, record) = self.kept.pop_front()?;
            self.kept_bytes -= record.len();
        }
        let files = self.files.as_ref()?;
        let is_whole = self.kept.len() as u64 == last - persistent
            && self.kept.front().is_some_and(|(number, _)| *number == persistent + 1);
        if !is_whole {
            return None;
        }
        let mut buffer = AlignedBuf::unfilled(self.kept_bytes.next_multiple_of(BLOCK_BYTES));
        let len = buffer.len() as u64;
        let is_flush_due = self.at + len > self.file_bytes;
        if is_flush_due {
            let other = 1 - self.current;
            // A write under way has a reference to its file.
            if self.last[other] > settled || Arc::strong_count(&files[other]) > 1 {
                return None;
            }
            (self.current, self.at) = (other, 0);
        }
        let mut left = buffer.as_mut_slice();
        for (_, record) in &self.kept {
            let (place, rest) = left.split_at_mut(record.len());
            place.copy_from_slice(record);
            left = rest;
        }
        left.fill(0);
        let write = BlockWrite { file: files[self.current].clone(), offset: self.at, buffer };
        self.at += len;
        self.last[self.current] = last;
        Some((DirectSync { batch: last, is_flush_due }, write))
    }
}

/// The bytes of both files, as far as they exist.
///
/// # Errors
/// [`LogError`].
pub(super) fn read(directory: &Path) -> Result<Vec<Vec<u8>>, LogError> {
    FILES.into_iter().map(|name| logged::read(directory, name, FILE_BYTES)).collect()
}

/// All whole records of a life in a file. Behind a record that is not whole, nothing of its sync was ever answered.
pub(super) fn records(life: u64, bytes: &[u8]) -> Vec<tail::Record<'_>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(rest) = bytes.get(at..).filter(|rest| !rest.is_empty()) {
        match tail::record_of(life, rest) {
            Some(record) => {
                at += record.len_bytes();
                found.push(record);
            }
            None => at = (at + 1).next_multiple_of(BLOCK_BYTES),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::disk_store::tail::tests::record;

    const LIFE: u64 = 0x0102_0304_0506_0709;
    const FILE: u64 = 64 << 10;

    fn started(directory: &Path) -> Direct {
        let space = Space::open(directory, 0).expect("space");
        let mut direct = Direct::new(FILE);
        direct.start(prepare(directory, FILE, &space).expect("a file system with direct writes, and room"));
        direct
    }

    /// Writes like the worker.
    fn write(write: &BlockWrite) {
        write.file.write_all_at(write.buffer.as_slice(), write.offset).expect("writes");
    }

    fn numbers(directory: &Path) -> Vec<u64> {
        let files = read(directory).expect("reads");
        files.iter().flat_map(|bytes| records(LIFE, bytes)).map(|record| record.number()).collect()
    }

    #[test]
    fn a_sync_takes_all_that_is_not_durable_or_nothing() {
        let directory = tempfile::tempdir().expect("directory");
        let mut direct = Direct::new(FILE);
        direct.keep(1, record(LIFE, 1, 10));
        assert!(direct.begin(0, 1, 0).is_none(), "there are no files");
        direct = started(directory.path());
        assert_eq!((direct.len_bytes(), numbers(directory.path())), (2 * FILE, vec![]));
        direct.keep(2, record(LIFE, 2, 10));
        direct.keep(3, record(LIFE, 3, 5000));
        assert!(direct.begin(0, 3, 0).is_none(), "the first was not kept");
        let (sync, blocks) = direct.begin(1, 3, 0).expect("all behind the first");
        assert_eq!((sync.batch, blocks.offset, blocks.buffer.len()), (3, 0, 2 * BLOCK_BYTES));
        write(&blocks);
        assert_eq!(numbers(directory.path()), [2, 3]);
        // The sync was given up, and one of its batches became durable by other means.
        let (_, again) = direct.begin(2, 3, 2).expect("one");
        assert_eq!((again.offset, again.buffer.len()), (2 * BLOCK_BYTES as u64, 2 * BLOCK_BYTES));
        write(&again);
        assert_eq!(numbers(directory.path()), [2, 3, 3]);
        assert!(direct.begin(3, 4, 2).is_none(), "one is missing at the end");
    }

    #[test]
    fn what_is_kept_is_bounded_and_goes_on_behind_what_was_too_much() {
        let directory = tempfile::tempdir().expect("directory");
        let mut direct = started(directory.path());
        for number in 1..=100 {
            direct.keep(number, record(LIFE, number, 300));
            assert!(direct.kept_bytes <= FILE as usize / FILE_PART);
        }
        assert!(direct.begin(0, 100, 0).is_none());
        let first = direct.kept.front().expect("some").0;
        assert!(direct.begin(first - 1, 100, first - 1).is_some());
        direct.keep(101, record(LIFE, 101, FILE as usize));
        direct.keep(102, record(LIFE, 102, 10));
        assert!(direct.begin(100, 102, 100).is_none(), "one alone was too much");
        assert!(direct.begin(101, 102, 101).is_some());
    }

    #[test]
    fn a_file_is_written_over_once_the_log_has_all_of_it_and_nobody_writes_to_it() {
        let directory = tempfile::tempdir().expect("directory");
        let mut direct = started(directory.path());
        fn sync(direct: &mut Direct, number: u64, settled: u64) -> Option<(DirectSync, BlockWrite)> {
            if direct.kept.back().is_none_or(|(last, _)| *last < number) {
                direct.keep(number, record(LIFE, number, 10));
            }
            direct.begin(number - 1, number, settled)
        }
        let each = FILE / BLOCK_BYTES as u64;
        for number in 1..=2 * each {
            let (begun, blocks) = sync(&mut direct, number, 0).expect("both files are free");
            assert_eq!(begun.is_flush_due, number == each + 1, "the other file was begun with");
            write(&blocks);
        }
        assert_eq!(numbers(directory.path()), (1..=2 * each).collect::<Vec<_>>());
        assert!(sync(&mut direct, 2 * each + 1, each - 1).is_none(), "the log lacks one of the first file");
        let (begun, under_way) = sync(&mut direct, 2 * each + 1, each).expect("it has all of it");
        assert!(begun.is_flush_due && under_way.offset == 0);
        write(&under_way);
        assert_eq!(numbers(directory.path())[..2], [2 * each + 1, 2], "old ones are behind it");
        for number in 2 * each + 2..=4 * each {
            write(&sync(&mut direct, number, 2 * each).expect("free").1);
        }
        let next = 4 * each + 1;
        assert!(
            sync(&mut direct, next, next - 1).is_none(),
            "the first one's write was given up, and may come"
        );
        drop(under_way);
        assert!(sync(&mut direct, next, next - 1).is_some());
    }

    #[test]
    fn a_torn_sync_ends_at_its_tear_and_harms_no_other() {
        let directory = tempfile::tempdir().expect("directory");
        let mut direct = started(directory.path());
        for (last, lens) in [(1, vec![2000]), (4, vec![700, 6000, 700]), (5, vec![300])] {
            let first = last + 1 - lens.len() as u64;
            (first..).zip(lens).for_each(|(number, len)| direct.keep(number, record(LIFE, number, len)));
            write(&direct.begin(first - 1, last, 0).expect("free").1);
        }
        let path = directory.path().join(FILES[0]);
        let whole = std::fs::read(&path).expect("read");
        assert_eq!(numbers(directory.path()), [1, 2, 3, 4, 5]);
        for sector in 8..24 {
            let mut torn = whole.clone();
            torn[sector * 512..(sector + 1) * 512].fill(0);
            std::fs::write(&path, torn).expect("write");
            let found = numbers(directory.path());
            assert_eq!((found.first(), found.last()), (Some(&1), Some(&5)), "sector {sector}");
            // Records 2, 3 and 4 end in sectors 9, 21 and 22. Records behind a torn one of the same sync were not answered either.
            let expected = match sector {
                ..10 => 2,
                10..22 => 3,
                22 => 4,
                _ => 5,
            };
            assert_eq!(found.len(), expected, "sector {sector}");
        }
        assert_eq!(records(LIFE ^ 2, &whole).len(), 0, "records of another life are none");
    }

    #[test]
    fn a_restart_keeps_the_files_and_a_file_of_another_length_is_made_anew() {
        let directory = tempfile::tempdir().expect("directory");
        let mut direct = started(directory.path());
        direct.keep(1, record(LIFE, 1, 10));
        write(&direct.begin(0, 1, 0).expect("free").1);
        let path = directory.path().join(FILES[1]);
        std::fs::write(&path, [7; 9000]).expect("write");
        drop(started(directory.path()));
        assert_eq!(std::fs::read(&path).expect("read"), vec![0; FILE as usize]);
        let space = Space::open(directory.path(), 0).expect("space");
        space.set_full(true);
        assert!(prepare(directory.path(), FILE, &space).is_err());
        assert!(!path.exists(), "what is not used takes no room");
    }
}
