//! The file of the B-tree, with a checksum for each of its blocks.
//!
//! redb has checksums of its pages and checks them when it recovers; it does not check a page that it reads later. Here each block that is read is
//! compared with its sum, so that a rotten bit is an error and never a record.
//!
//! ```text
//! file    [ sums of group 0 | 1,024 blocks ] [ sums of group 1 | 1,024 blocks ] ...      all blocks are 4 KiB
//! sums    1,024 times u32, little-endian: CRC32C of the block; 0: never written, all zeros
//! ```
//!
//! # Why a power loss cannot separate a block from its sum
//! redb never writes to a block that its last durable commit can reach. So for each block that counts after a power loss, block and sum were synced
//! by one `fdatasync`, and no later write has changed either. A torn block of sums has the same values for them in its old and its new sectors. The
//! exception is block 0, redb's header, which is overwritten in place, in one sector, and has checksums of its own: it has no sum here.
//!
//! # A full disk
//! redb refuses all further work after an error. So a write that finds no space is no error: the reserve is given up for it, and if that is not
//! enough, its bytes wait in memory, where reads find them, and the next sync waits until there is space, or the store is closed. Meanwhile committed
//! batches go to the log.
//!
//! No reader needs a file that is being made (`Draft`): it does not wait for space, and is given up.
//!
//! # Bound
//! 4 KiB of sums for each 4 MiB of the file that were used; and at most as many waiting blocks as one checkpoint writes.

use super::space::Space;
use parking_lot::Mutex;
use redb::StorageBackend;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const BLOCK_BYTES: usize = 4096;
const BLOCK: u64 = BLOCK_BYTES as u64;
/// Blocks whose sums fill one block.
const GROUP_BLOCKS: u64 = BLOCK / 4;
/// How often a sync that waits for space tries again.
const FULL_RETRY: Duration = Duration::from_millis(100);

type Sums = Box<[u32]>;

#[derive(Debug)]
struct Group {
    sums: Sums,
    /// Whether it differs from the bytes on disk.
    changed: bool,
}

#[derive(Debug, Default)]
struct State {
    /// The file's length as redb knows it.
    len_blocks: u64,
    groups: BTreeMap<u64, Group>,
    /// Blocks for which there was no space.
    waiting: BTreeMap<u64, Vec<u8>>,
}

/// Whether a file is being made: set until it takes its place. Relaxed: only the same thread relies on it after that.
pub(super) type Draft = Arc<AtomicBool>;

/// The file of records.
#[derive(Debug)]
pub(super) struct SummedFile {
    file: File,
    is_draft: Draft,
    space: Arc<Space>,
    state: Mutex<State>,
}

/// The offset of a block.
fn place(block: u64) -> u64 {
    (block + block / GROUP_BLOCKS + 1) * BLOCK
}

/// The offset of a group's sums.
fn sums_place(group: u64) -> u64 {
    group * (GROUP_BLOCKS + 1) * BLOCK
}

/// The length of a file with so many blocks.
fn file_len(len_blocks: u64) -> u64 {
    (len_blocks + len_blocks.div_ceil(GROUP_BLOCKS)) * BLOCK
}

/// The number of blocks of a file of this length.
fn blocks_of(file_len: u64) -> u64 {
    let all = file_len / BLOCK;
    all - all.div_ceil(GROUP_BLOCKS + 1)
}

fn sum_of(bytes: &[u8]) -> u32 {
    // 0 stands for a block that was never written.
    crc32c::crc32c(bytes).max(1)
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

impl SummedFile {
    /// Takes over the file, which may be empty.
    ///
    /// # Errors
    /// [`io::Error`].
    pub(super) fn new(file: File, is_draft: Draft, space: Arc<Space>) -> io::Result<Self> {
        let len_blocks = blocks_of(file.metadata()?.len());
        Ok(Self { file, is_draft, space, state: Mutex::new(State { len_blocks, ..State::default() }) })
    }

    fn read_sums(&self, group: u64) -> io::Result<Sums> {
        let mut bytes = [0; BLOCK_BYTES];
        self.read_or_zeros(&mut bytes, sums_place(group))?;
        let numbers = bytes.as_chunks::<4>().0.iter();
        Ok(numbers.map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }

    /// Reads bytes. A hole at the end of the file, which a crash may leave, reads as zeros.
    fn read_or_zeros(&self, mut bytes: &mut [u8], mut at: u64) -> io::Result<()> {
        while !bytes.is_empty() {
            match self.file.read_at(bytes, at) {
                Ok(0) => {
                    bytes.fill(0);
                    return Ok(());
                }
                Ok(read) => {
                    bytes = &mut bytes[read..];
                    at += read as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn group<'a>(&self, state: &'a mut State, group: u64) -> io::Result<&'a mut Group> {
        match state.groups.entry(group) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(place) => Ok(place.insert(Group { sums: self.read_sums(group)?, changed: false })),
        }
    }

    /// Reads whole blocks and compares them with their sums.
    fn read_blocks(&self, first: u64, out: &mut [u8]) -> io::Result<()> {
        let mut block = first;
        let mut rest = out;
        while !rest.is_empty() {
            let in_group = ((GROUP_BLOCKS - block % GROUP_BLOCKS) * BLOCK) as usize;
            let (run, later) = rest.split_at_mut(in_group.min(rest.len()));
            let (run_blocks, sums) = (run.len() as u64 / BLOCK, {
                let state = &mut *self.state.lock();
                let at = (block % GROUP_BLOCKS) as usize;
                self.group(state, block / GROUP_BLOCKS)?.sums[at..at + run.len() / BLOCK_BYTES].to_vec()
            });
            self.read_or_zeros(run, place(block))?;
            for (number, (bytes, sum)) in (block..).zip(run.chunks_mut(BLOCK_BYTES).zip(sums)) {
                if let Some(waiting) = self.state.lock().waiting.get(&number) {
                    bytes.copy_from_slice(waiting);
                    continue;
                }
                let good = match sum {
                    _ if number == 0 => true,
                    0 => bytes.iter().all(|byte| *byte == 0),
                    sum => sum_of(bytes) == sum,
                };
                if !good {
                    let what = format!(
                        "block {number} of meta/records does not match its checksum; restore the pool from a copy"
                    );
                    return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                }
            }
            block += run_blocks;
            rest = later;
        }
        Ok(())
    }

    fn write_blocks(&self, first: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock();
        for (block, bytes) in (first..).zip(data.chunks(BLOCK_BYTES)) {
            let group = self.group(&mut state, block / GROUP_BLOCKS)?;
            group.sums[(block % GROUP_BLOCKS) as usize] = sum_of(bytes);
            group.changed = true;
            state.waiting.remove(&block);
        }
        drop(state);
        let mut block = first;
        let mut rest = data;
        while !rest.is_empty() {
            let in_group = ((GROUP_BLOCKS - block % GROUP_BLOCKS) * BLOCK) as usize;
            let (run, later) = rest.split_at(in_group.min(rest.len()));
            match self.space.write_all_at(&self.file, run, place(block)) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                    let blocks = (block..).zip(run.chunks(BLOCK_BYTES).map(<[u8]>::to_vec));
                    self.state.lock().waiting.extend(blocks);
                }
                Err(error) => return Err(error),
            }
            block += run.len() as u64 / BLOCK;
            rest = later;
        }
        Ok(())
    }

    /// Writes the waiting blocks, if there is space for them now, and the sums that changed.
    fn write_waiting(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        while let Some((block, bytes)) = state.waiting.first_key_value() {
            self.space.write_all_at(&self.file, bytes, place(*block))?;
            state.waiting.pop_first();
        }
        for (group, sums) in state.groups.iter_mut().filter(|(_, sums)| sums.changed) {
            let bytes: Vec<u8> = sums.sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
            self.space.write_all_at(&self.file, &bytes, sums_place(*group))?;
            sums.changed = false;
        }
        Ok(())
    }
}

impl StorageBackend for SummedFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.state.lock().len_blocks * BLOCK)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let end = offset + out.len() as u64;
        if end > self.state.lock().len_blocks * BLOCK {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if offset.is_multiple_of(BLOCK) && end.is_multiple_of(BLOCK) {
            return self.read_blocks(offset / BLOCK, out);
        }
        let first = offset / BLOCK;
        let mut whole = vec![0; ((end.div_ceil(BLOCK) - first) * BLOCK) as usize];
        self.read_blocks(first, &mut whole)?;
        let skip = (offset - first * BLOCK) as usize;
        out.copy_from_slice(&whole[skip..skip + out.len()]);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if !len.is_multiple_of(BLOCK) {
            return Err(invalid("a length that is no whole number of blocks"));
        }
        let mut state = self.state.lock();
        let len_blocks = len / BLOCK;
        // Blocks that are cut off read as zeros if the file grows over them again.
        let (last, within) = (len_blocks / GROUP_BLOCKS, (len_blocks % GROUP_BLOCKS) as usize);
        if len_blocks < state.len_blocks {
            state.waiting.split_off(&len_blocks);
            state.groups.split_off(&(last + u64::from(within > 0)));
            if within > 0 {
                let group = self.group(&mut state, last)?;
                group.sums[within..].fill(0);
                group.changed = true;
            }
        }
        self.file.set_len(file_len(len_blocks))?;
        state.len_blocks = len_blocks;
        Ok(())
    }

    fn sync_data(&self) -> io::Result<()> {
        let is_draft = self.is_draft.load(Ordering::Relaxed);
        let may_wait = || !is_draft && !self.space.is_closing();
        let mut told = false;
        loop {
            match self.write_waiting() {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::StorageFull && may_wait() => {
                    if !std::mem::replace(&mut told, true) {
                        tracing::error!(
                            "the metadata's disk is full: a checkpoint waits for space; make some on the file system of meta/"
                        );
                    }
                    self.space.set_stuck(true);
                    self.space.wait(FULL_RETRY);
                }
                Err(error) => return Err(error),
            }
        }
        self.space.set_stuck(false);
        let name = if is_draft { super::checkpoint::DRAFT_NAME } else { super::checkpoint::FILE_NAME };
        self.space.sync(name, &self.file)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let end = offset + data.len() as u64;
        match (offset.is_multiple_of(BLOCK), end.is_multiple_of(BLOCK)) {
            (true, true) if offset > 0 => self.write_blocks(offset / BLOCK, data),
            // The header: its block is never a hole, so it needs no space.
            _ if end <= BLOCK => self.file.write_all_at(data, place(0) + offset),
            (true, true) => {
                self.file.write_all_at(&data[..BLOCK_BYTES], place(0))?;
                self.write_blocks(1, &data[BLOCK_BYTES..])
            }
            _ => Err(invalid("a write of parts of blocks")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(directory: &std::path::Path) -> SummedFile {
        let path = directory.join("records");
        let file =
            File::options().read(true).write(true).create(true).truncate(false).open(path).expect("open");
        SummedFile::new(file, Draft::default(), Arc::new(Space::open(directory, 0).expect("space")))
            .expect("takes it")
    }

    #[test]
    fn places_and_lengths_agree() {
        for blocks in [0, 1, 2, 1023, 1024, 1025, 2048, 2049, 5000] {
            assert_eq!(blocks_of(file_len(blocks)), blocks);
            if blocks > 0 {
                assert_eq!(place(blocks - 1) + BLOCK, file_len(blocks), "the last block ends the file");
            }
        }
        assert_eq!((place(0), place(1023), place(1024)), (BLOCK, 1024 * BLOCK, 1026 * BLOCK));
        assert_eq!((sums_place(0), sums_place(1)), (0, 1025 * BLOCK));
    }

    #[test]
    fn what_was_written_is_read_also_by_the_next_and_flipped_bits_are_errors() {
        let directory = tempfile::tempdir().expect("directory");
        let file = opened(directory.path());
        file.set_len(2100 * BLOCK).expect("grows");
        let bytes: Vec<u8> = (0..8 * BLOCK_BYTES).map(|at| (at / 7) as u8).collect();
        file.write(1020 * BLOCK, &bytes).expect("writes over a group's end");
        file.write(0, &bytes[..320]).expect("writes a header");
        file.sync_data().expect("syncs");
        let file = opened(directory.path());
        assert_eq!(file.len().expect("known"), 2100 * BLOCK);
        let mut found = vec![0; bytes.len()];
        file.read(1020 * BLOCK, &mut found).expect("reads");
        assert_eq!(found, bytes);
        file.read(5 * BLOCK + 100, &mut found[..50]).expect("never written");
        assert_eq!(found[..50], [0; 50]);
        assert!(file.read(2099 * BLOCK, &mut found).is_err(), "past the end");
        assert!(file.write(BLOCK + 1, &bytes[..100]).is_err());
        // The header has no sum here. All other blocks have, and so have the sums.
        let path = directory.path().join("records");
        for (at, block) in
            [(place(1021) + 77, 1021), (place(1026), 1026), (sums_place(1) + 8, 1026), (place(3) + 1, 3)]
        {
            let whole = std::fs::read(&path).expect("read");
            let mut rotten = whole.clone();
            rotten[at as usize] ^= 0x10;
            std::fs::write(&path, rotten).expect("write");
            let error =
                opened(directory.path()).read(block * BLOCK, &mut found[..BLOCK_BYTES]).expect_err("rot");
            assert!(error.to_string().contains(&format!("block {block} ")), "{error}");
            std::fs::write(&path, whole).expect("write");
        }
        opened(directory.path()).read(0, &mut found[..320]).expect("reads the header");
    }

    #[test]
    fn what_is_cut_off_does_not_come_back() {
        let directory = tempfile::tempdir().expect("directory");
        let file = opened(directory.path());
        file.set_len(3000 * BLOCK).expect("grows");
        file.write(1500 * BLOCK, &[7; BLOCK_BYTES]).expect("writes");
        file.write(2500 * BLOCK, &[7; BLOCK_BYTES]).expect("writes");
        file.sync_data().expect("syncs");
        file.set_len(1400 * BLOCK).expect("shrinks");
        file.set_len(3000 * BLOCK).expect("grows");
        file.sync_data().expect("syncs");
        for file in [file, opened(directory.path())] {
            for block in [1500, 2500] {
                let mut found = [1; BLOCK_BYTES];
                file.read(block * BLOCK, &mut found).expect("reads");
                assert_eq!(found, [0; BLOCK_BYTES]);
            }
        }
    }
}
