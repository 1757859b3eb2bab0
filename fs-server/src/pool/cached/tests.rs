//! The cached pool on real files, by read and write and by load and store.

use super::*;
use crate::pool::aligned_buf::AlignedBuf;
use cuttlefs_common::ids::FrameIndex;
use futures_lite::future::block_on;
use std::fs::File;
use std::path::PathBuf;

const BOTH: [Reach; 2] = [Reach::Buffered, Reach::Mapped];

/// Makes data files with so many pages each.
fn files(pages: &[u64]) -> (DataFiles, Vec<File>) {
    let mut files = DataFiles::new();
    let mut plain = Vec::new();
    for &pages in pages {
        let file = tempfile::tempfile().expect("a temporary file");
        file.set_len(DATA_START + pages * PAGE_SIZE_U64).expect("length");
        plain.push(file.try_clone().expect("a second descriptor"));
        files.push(PathBuf::from("x"), file, pages, false);
    }
    (files, plain)
}

fn filled(pages: usize, byte: u8) -> IoBuffer {
    let mut buffer = AlignedBuf::zeroed(pages * PAGE_SIZE);
    buffer.as_mut_slice().fill(byte);
    IoBuffer::Owned(buffer)
}

fn request(kind: IoKind, page: u64, buffer: IoBuffer) -> IoRequest {
    IoRequest { kind, offset: page * PAGE_SIZE_U64, buffer }
}

fn first_bytes(done: &IoDone) -> Vec<u8> {
    let IoBuffer::Owned(buffer) = &done.buffer else { panic!("another buffer came back") };
    buffer.as_slice().chunks_exact(PAGE_SIZE).map(|page| page[0]).collect()
}

#[test]
fn reads_give_what_writes_wrote_across_files_and_reaches() {
    for (reach, other) in [(Reach::Buffered, Reach::Mapped), (Reach::Mapped, Reach::Buffered)] {
        let (files, plain) = files(&[3, 1, 4]);
        let disk = CachedDisk::new(CachedPool::open(&files, reach).expect("open"));
        let done =
            block_on(disk.submit(vec![
                request(IoKind::Write, 2, filled(3, 7)),
                request(IoKind::Write, 7, filled(1, 9)),
            ]));
        assert!(done.iter().all(|done| done.result.is_ok()));
        block_on(disk.sync()).expect("sync");
        let mut superblock = vec![1; DATA_START as usize];
        for file in &plain {
            file.read_exact_at(&mut superblock, 0).expect("read");
            assert!(superblock.iter().all(|byte| *byte == 0), "no IO reaches a superblock");
        }
        // A pool with the other kind of access finds the same bytes at the same places.
        let next = CachedDisk::new(CachedPool::open(&files, other).expect("open"));
        let done = block_on(next.submit(vec![request(IoKind::Read, 0, filled(8, 1))]));
        assert_eq!(first_bytes(&done[0]), [0, 0, 7, 7, 7, 0, 0, 9]);
    }
}

#[test]
fn what_cannot_be_is_refused_with_its_buffer_and_harms_no_other() {
    for reach in BOTH {
        let (files, _plain) = files(&[4]);
        let disk = CachedDisk::new(CachedPool::open(&files, reach).expect("open"));
        let done = block_on(disk.submit(vec![
            request(IoKind::Read, 3, filled(2, 1)),
            request(IoKind::Read, u64::MAX / PAGE_SIZE_U64, filled(1, 1)),
            IoRequest { kind: IoKind::Write, offset: 5, buffer: filled(1, 1) },
            request(IoKind::Read, 0, IoBuffer::Frames(vec![FrameIndex(3)])),
            request(IoKind::Write, 3, filled(1, 4)),
        ]));
        for bad in &done[..4] {
            let error = bad.result.as_ref().expect_err("it cannot be");
            assert_eq!(error.source.kind(), io::ErrorKind::InvalidInput);
        }
        assert!(matches!(&done[3].buffer, IoBuffer::Frames(frames) if frames.len() == 1));
        assert!(done[4].result.is_ok());
        assert!(block_on(disk.submit(Vec::new())).is_empty());
    }
}

#[test]
fn a_file_that_was_cut_is_an_error_of_buffered_reads() {
    let (files, plain) = files(&[4]);
    let disk = CachedDisk::new(CachedPool::open(&files, Reach::Buffered).expect("open"));
    plain[0].set_len(DATA_START + 2 * PAGE_SIZE_U64).expect("cut");
    let done = block_on(disk.submit(vec![request(IoKind::Read, 1, filled(2, 1))]));
    let error = done[0].result.as_ref().expect_err("the file is short");
    assert_eq!((error.source.kind(), error.len), (io::ErrorKind::UnexpectedEof, 2 * PAGE_SIZE));
}

#[test]
fn a_full_device_fails_the_write_and_a_failed_sync_is_final() {
    let full = OpenOptions::new().read(true).write(true).open("/dev/full").expect("open /dev/full");
    let mut files = DataFiles::new();
    files.push("/dev/full".into(), full, 16, false);
    let pool = CachedPool { files, mappings: Vec::new(), sync_failed: Mutex::new(false) };
    let disk = CachedDisk::new(Arc::new(pool));
    let done = block_on(disk.submit(vec![request(IoKind::Write, 3, filled(1, 1))]));
    let error = done[0].result.as_ref().expect_err("full");
    assert_eq!(error.source.raw_os_error(), Some(libc::ENOSPC));
    assert!(block_on(disk.sync()).is_err(), "a device file cannot be synced");
    assert!(block_on(disk.sync()).expect_err("final").to_string().contains("before"));
}

#[test]
fn a_mapped_pool_knows_what_is_in_memory() {
    let (files, plain) = files(&[2, 600]);
    for page in 0..600 {
        let at = DATA_START + page * PAGE_SIZE_U64;
        plain[1].write_all_at(&[page as u8; PAGE_SIZE], at).expect("write");
    }
    let pool = CachedPool::open(&files, Reach::Mapped).expect("open");
    pool.touch(0, 602 * PAGE_SIZE);
    assert!(pool.is_cached(10, 602 * PAGE_SIZE - 10));
    assert!(!pool.is_cached(602 * PAGE_SIZE_U64, 1), "past the pool there is nothing");
    let mut bytes = [0; 20];
    pool.read_mapped(2 * PAGE_SIZE_U64 + 300 * PAGE_SIZE_U64 - 10, &mut bytes);
    assert_eq!((bytes[9], bytes[10]), (299u64 as u8, 300u64 as u8));
    let buffered = CachedPool::open(&files, Reach::Buffered).expect("open");
    assert!(!buffered.is_cached(0, 1), "who has no mapping knows nothing");
}
