//! The disk on real files, with O_DIRECT if the file system has it.

use super::*;
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::data_files::DATA_START;
use cuttlefs_common::ids::{FrameIndex, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::world::{Random, SeededRandom};
use futures_lite::future::{block_on, poll_once};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// Makes data files with so many pages each, and opens them a second time for the tests to look at them.
fn files(pages: &[u64]) -> (Arc<DataFiles>, Vec<File>, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut files = DataFiles::new();
    let mut plain = Vec::new();
    for (index, &pages) in pages.iter().enumerate() {
        let path = dir.path().join(index.to_string());
        let file = File::create_new(&path).expect("a new file");
        file.set_len(DATA_START + pages * PAGE_SIZE_U64).expect("its length");
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        let direct = options.clone().custom_flags(libc::O_DIRECT).open(&path);
        let is_direct = direct.is_ok();
        let opened = direct.or_else(|_| options.open(&path)).expect("open");
        files.push(path.clone(), opened, pages, is_direct);
        plain.push(options.open(&path).expect("open"));
    }
    (Arc::new(files), plain, dir)
}

/// Overwrites all pages. Direct reads of holes would complete at once, without the device.
fn fill(plain: &File, pages: u64) {
    for page in 0..pages {
        plain.write_all_at(&[0x11; PAGE_SIZE], DATA_START + page * PAGE_SIZE_U64).expect("write");
    }
    plain.sync_all().expect("sync");
}

fn frames(count: usize) -> Arc<SharedMemory> {
    Arc::new(SharedMemory::new("frames", count * PAGE_SIZE).expect("memfd"))
}

fn filled(pages: usize, byte: u8) -> AlignedBuf {
    let mut buffer = AlignedBuf::zeroed(pages * PAGE_SIZE);
    buffer.as_mut_slice().fill(byte);
    buffer
}

fn request(kind: IoKind, page: u64, buffer: IoBuffer) -> IoRequest {
    IoRequest { kind, offset: page * PAGE_SIZE_U64, buffer }
}

fn frame_list(list: &[u32]) -> IoBuffer {
    IoBuffer::Frames(list.iter().map(|&index| FrameIndex(index)).collect())
}

fn byte_of(frames: &SharedMemory, frame: usize) -> u8 {
    let mut page = [0; PAGE_SIZE];
    frames.read(frame * PAGE_SIZE, &mut page);
    assert!(page.iter().all(|byte| *byte == page[0]));
    page[0]
}

#[test]
fn a_batch_goes_to_its_files_with_one_system_call() {
    let (files, plain, _dir) = files(&[4, 4]);
    let frames = frames(16);
    let disk = UringDisk::new(files, frames.clone()).expect("io_uring");
    for frame in 3..16 {
        frames.fill(frame * PAGE_SIZE, PAGE_SIZE, frame as u8);
    }
    let batch = vec![
        request(IoKind::Write, 0, frame_list(&[5, 6, 7])),
        request(IoKind::Write, 3, IoBuffer::Owned(filled(2, 77))),
        request(IoKind::Write, 5, frame_list(&[9, 4, 3])),
    ];
    let future = disk.submit(batch);
    assert_eq!(disk.counters().enters, 0);
    let done = disk.block_on(future).expect("the ring works");
    assert!(done.iter().all(|done| done.result.is_ok()));
    disk.block_on(disk.sync()).expect("the ring works").expect("fdatasync");
    for (page, expected) in [5, 6, 7, 77, 77, 9, 4, 3].into_iter().enumerate() {
        let mut bytes = [0; PAGE_SIZE];
        let at = DATA_START + (page as u64 % 4) * PAGE_SIZE_U64;
        plain[page / 4].read_exact_at(&mut bytes, at).expect("read");
        assert_eq!(bytes, [expected; PAGE_SIZE]);
    }
    let mut superblock = vec![0; DATA_START as usize];
    plain[1].read_exact_at(&mut superblock, 0).expect("read");
    assert!(superblock.iter().all(|byte| *byte == 0), "no IO reaches the superblock");

    let reads = disk.submit(vec![
        request(IoKind::Read, 1, frame_list(&[10, 12, 11])),
        request(IoKind::Read, 4, IoBuffer::Owned(filled(4, 0))),
    ]);
    let done = disk.block_on(reads).expect("the ring works");
    assert!(done.iter().all(|done| done.result.is_ok()));
    assert_eq!([10, 12, 11].map(|frame| byte_of(&frames, frame)), [6, 7, 77]);
    let IoBuffer::Owned(buffer) = &done[1].buffer else { panic!("another buffer came back") };
    assert_eq!([0, 1, 2, 3].map(|page| buffer.as_slice()[page * PAGE_SIZE]), [77, 9, 4, 3]);
    if disk.has_registered_frames() {
        assert_eq!(disk.counters().fixed, 1, "neighbouring frames go through registered memory");
    }
    assert!(disk.is_idle() && !disk.has_work());
}

#[test]
fn errors_come_with_the_buffer_and_harm_no_other_request() {
    let (files, plain, _dir) = files(&[4]);
    let disk = UringDisk::new(files, frames(4)).expect("io_uring");
    // The file is shortened under the pool. Reads behind its end are errors, never zeros.
    plain[0].set_len(DATA_START + 2 * PAGE_SIZE_U64).expect("cut");
    let batch = vec![
        request(IoKind::Read, 0, IoBuffer::Owned(filled(2, 1))),
        request(IoKind::Read, 1, IoBuffer::Owned(filled(2, 1))),
        // Page 5 is behind the four pages and the one block of sums.
        request(IoKind::Read, 5, IoBuffer::Owned(filled(1, 1))),
        request(IoKind::Read, 3, IoBuffer::Owned(filled(2, 1))),
        request(IoKind::Read, 0, frame_list(&[4])),
    ];
    let done = disk.block_on(disk.submit(batch)).expect("the ring works");
    assert!(done[0].result.is_ok());
    let error = done[1].result.as_ref().expect_err("the file is short");
    assert_eq!(error.source.kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!((error.offset, error.len), (PAGE_SIZE_U64, 2 * PAGE_SIZE));
    for bad in &done[2..] {
        let error = bad.result.as_ref().expect_err("out of range");
        assert_eq!(error.source.kind(), io::ErrorKind::InvalidInput);
    }
    assert!(disk.block_on(disk.submit(Vec::new())).expect("the ring works").is_empty());
    assert!(disk.block_on(std::future::pending::<()>()).is_err());
}

#[test]
fn a_device_that_is_full_fails_the_write() {
    let mut files = DataFiles::new();
    let full = OpenOptions::new().read(true).write(true).open("/dev/full").expect("open /dev/full");
    files.push("/dev/full".into(), full, 16, false);
    let disk = UringDisk::new(Arc::new(files), frames(4)).expect("io_uring");
    let write = disk.submit(vec![request(IoKind::Write, 3, frame_list(&[3]))]);
    let done = disk.block_on(write).expect("the ring works");
    let error = done[0].result.as_ref().expect_err("full");
    assert_eq!(error.source.raw_os_error(), Some(libc::ENOSPC));
    assert!(disk.block_on(disk.sync()).expect("the ring works").is_err(), "a device file cannot be synced");
}

#[test]
fn a_dropped_future_leaves_its_buffer_with_the_kernel() {
    let (files, plain, _dir) = files(&[256]);
    fill(&plain[0], 256);
    let disk = UringDisk::new(files, frames(4)).expect("io_uring");
    for round in 0..20 {
        let reads: Vec<_> = (0..200)
            .map(|page| disk.submit(vec![request(IoKind::Read, page, IoBuffer::Owned(filled(1, 0)))]))
            .collect();
        disk.turn().expect("the ring works");
        drop(reads);
        // If the reads' buffers had been freed, the canaries would be at their addresses, and the kernel would overwrite them.
        let canaries: Vec<_> = (0..400).map(|_| filled(1, 0xEE)).collect();
        while !disk.is_idle() {
            disk.turn_and_wait(1).expect("the ring works");
        }
        for canary in canaries {
            assert!(canary.as_slice().iter().all(|byte| *byte == 0xEE), "round {round}");
        }
    }
    // A dropped write is still done.
    let mut write = disk.submit(vec![request(IoKind::Write, 7, IoBuffer::Owned(filled(1, 9)))]);
    assert!(block_on(poll_once(&mut write)).is_none());
    drop(write);
    while !disk.is_idle() {
        disk.turn_and_wait(1).expect("the ring works");
    }
    let mut bytes = [0; PAGE_SIZE];
    plain[0].read_exact_at(&mut bytes, DATA_START + 7 * PAGE_SIZE_U64).expect("read");
    assert_eq!(bytes, [9; PAGE_SIZE]);
}

#[test]
fn a_dropped_disk_waits_for_the_kernel() {
    let (files, plain, _dir) = files(&[256]);
    fill(&plain[0], 256);
    for _ in 0..20 {
        let disk = UringDisk::new(files.clone(), frames(4)).expect("io_uring");
        let reads: Vec<_> = (0..256)
            .map(|page| disk.submit(vec![request(IoKind::Read, page, IoBuffer::Owned(filled(1, 0)))]))
            .collect();
        disk.turn().expect("the ring works");
        drop(disk);
        let canaries: Vec<_> = (0..300).map(|_| filled(1, 0xEE)).collect();
        drop(reads);
        for canary in canaries {
            assert!(canary.as_slice().iter().all(|byte| *byte == 0xEE));
        }
    }
}

#[test]
fn batches_beyond_the_bound_wait_outside() {
    let (files, _plain, _dir) = files(&[16]);
    let disk = UringDisk::new(files, frames(4)).expect("io_uring");
    let one = |page: u64| request(IoKind::Read, page % 16, IoBuffer::Owned(filled(1, 1)));
    let first = disk.submit((0..MOST_WAITING as u64).map(one).collect());
    let mut second = disk.submit((0..10).map(one).collect());
    let third = disk.submit(vec![one(3)]);
    assert!(block_on(poll_once(&mut second)).is_none());
    drop(third);
    assert_eq!(disk.core.borrow().waiting.len(), MOST_WAITING);
    let second = disk.block_on(second).expect("the ring works");
    assert!(second.len() == 10 && second.iter().all(|done| done.result.is_ok()));
    let first = disk.block_on(first).expect("the ring works");
    assert_eq!(first.iter().filter(|done| done.result.is_ok()).count(), MOST_WAITING);
    assert!(disk.counters().enters < 2 * (MOST_WAITING + 10) as u64);

    let full = disk.submit((0..MOST_WAITING as u64).map(one).collect());
    let mut outside = disk.submit(vec![one(1)]);
    assert!(block_on(poll_once(&mut outside)).is_none());
    drop((full, disk));
    assert!(block_on(outside)[0].result.is_err(), "the disk is gone");
}

/// Does random reads and writes with 64 batches in flight, and compares them with a model that has one stamp for each page.
fn agree_with_a_model(register: bool, cancels: bool) {
    const PAGES: u64 = 600;
    const IN_FLIGHT: usize = 64;
    const BATCHES: usize = 6000;
    let (files, _plain, _dir) = files(&[200, 77, PAGES - 277]);
    // Each slot has six frames of its own.
    let frames = frames(3 + IN_FLIGHT * 6);
    let disk = UringDisk::with_registration(files, frames.clone(), register).expect("io_uring");
    disk.core.borrow_mut().ring.cancels = cancels;
    let random = SeededRandom::new(42);
    let below = |bound: u64| random.next_u64() % bound;
    let mut model = vec![0u64; PAGES as usize];
    let mut busy = vec![false; PAGES as usize];
    let mut stamp = 0u64;

    struct Flight {
        future: LocalFuture<'static, Vec<IoDone>>,
        pages: std::ops::Range<u64>,
        kind: IoKind,
        stamps: Vec<u64>,
    }
    let mut slots: Vec<Option<Flight>> = (0..IN_FLIGHT).map(|_| None).collect();
    let (mut started, mut finished) = (0, 0);
    while finished < BATCHES {
        for (slot, place) in slots.iter_mut().enumerate() {
            if place.is_some() || started == BATCHES {
                continue;
            }
            let len = 1 + below(6);
            let first = below(PAGES - len + 1);
            let pages = first..first + len;
            if pages.clone().any(|page| busy[page as usize]) {
                continue;
            }
            pages.clone().for_each(|page| busy[page as usize] = true);
            let kind = if below(2) == 0 { IoKind::Read } else { IoKind::Write };
            let stamps: Vec<u64> = pages
                .clone()
                .map(|page| match kind {
                    IoKind::Read => model[page as usize],
                    IoKind::Write => {
                        stamp += 1;
                        stamp
                    }
                })
                .collect();
            let mut list: Vec<u32> = (0..len as u32).map(|index| 3 + slot as u32 * 6 + index).collect();
            if below(2) == 0 {
                list.reverse();
            }
            let buffer = if below(2) == 0 {
                for (index, frame) in list.iter().enumerate() {
                    let page = match kind {
                        IoKind::Read => vec![0xCC; PAGE_SIZE],
                        IoKind::Write => stamps[index].to_le_bytes().repeat(PAGE_SIZE / 8),
                    };
                    frames.write(*frame as usize * PAGE_SIZE, &page);
                }
                frame_list(&list)
            } else {
                let mut buffer = filled(len as usize, 0xCC);
                if kind == IoKind::Write {
                    for (index, page) in buffer.as_mut_slice().chunks_mut(PAGE_SIZE).enumerate() {
                        page.copy_from_slice(&stamps[index].to_le_bytes().repeat(PAGE_SIZE / 8));
                    }
                }
                IoBuffer::Owned(buffer)
            };
            let future = disk.submit(vec![request(kind, first, buffer)]);
            *place = Some(Flight { future, pages, kind, stamps });
            started += 1;
        }
        disk.turn_and_wait(1).expect("the ring works");
        for place in &mut slots {
            let Some(flight) = place else { continue };
            let Some(mut done) = block_on(poll_once(&mut flight.future)) else {
                continue;
            };
            let done = done.pop().expect("one result");
            done.result.expect("the IO works");
            for (index, page) in flight.pages.clone().enumerate() {
                busy[page as usize] = false;
                if flight.kind == IoKind::Write {
                    model[page as usize] = flight.stamps[index];
                    continue;
                }
                let mut bytes = [0; PAGE_SIZE];
                match &done.buffer {
                    IoBuffer::Owned(buffer) => {
                        bytes.copy_from_slice(&buffer.as_slice()[index * PAGE_SIZE..][..PAGE_SIZE]);
                    }
                    IoBuffer::Frames(list) => frames.read(list[index].0 as usize * PAGE_SIZE, &mut bytes),
                }
                let expected = flight.stamps[index].to_le_bytes().repeat(PAGE_SIZE / 8);
                assert!(bytes[..] == expected[..], "page {page} after {finished} batches");
            }
            *place = None;
            finished += 1;
        }
    }
    assert!(disk.is_idle());
    let fixed = disk.counters().fixed;
    assert_eq!(fixed > 0, disk.has_registered_frames());
}

#[test]
fn agrees_with_a_model_with_64_batches_in_flight() {
    agree_with_a_model(true, false);
}

#[test]
fn agrees_with_a_model_where_nothing_can_be_registered() {
    agree_with_a_model(false, false);
}

/// As where the kernel can start no thread.
#[test]
fn what_the_kernel_cancels_is_done_nevertheless() {
    agree_with_a_model(true, true);
    agree_with_a_model(false, true);
    let (files, plain, dir) = files(&[4]);
    let disk = UringDisk::new(files, frames(1)).expect("io_uring");
    disk.core.borrow_mut().ring.cancels = true;
    let (file, path) = beside(&dir, 3);
    let write = |file, pages| BlockWrite { file, offset: PAGE_SIZE_U64, buffer: filled(pages, 0x22) };
    disk.block_on(disk.write_blocks(write(file, 2))).expect("the ring works").expect("written");
    let bytes = std::fs::read(&path).expect("read");
    assert!(
        bytes[..PAGE_SIZE].iter().all(|byte| *byte == 0x11)
            && bytes[PAGE_SIZE..].iter().all(|byte| *byte == 0x22)
    );
    disk.block_on(disk.sync()).expect("the ring works").expect("fdatasync");
    // Errors are the call's.
    let file = Arc::new(File::open(path).expect("open, to read"));
    let written = disk.block_on(disk.write_blocks(write(file, 1))).expect("the ring works");
    assert_eq!(written.map_err(|error| error.raw_os_error()), Err(Some(libc::EBADF)));
    plain[0].set_len(DATA_START).expect("cut");
    let done = disk.block_on(disk.submit(vec![request(IoKind::Read, 0, IoBuffer::Owned(filled(1, 1)))]));
    let error = done.expect("the ring works").remove(0).result.expect_err("the file is short");
    assert_eq!(error.source.kind(), io::ErrorKind::UnexpectedEof);
}

/// A file that is not the pool's, opened as metadata's log opens its files.
fn beside(dir: &tempfile::TempDir, blocks: usize) -> (Arc<File>, std::path::PathBuf) {
    let path = dir.path().join("beside");
    std::fs::write(&path, vec![0x11; blocks * PAGE_SIZE]).expect("write");
    let file = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(&path).expect("O_DIRECT");
    (Arc::new(file), path)
}

#[test]
fn blocks_are_written_to_a_file_that_is_none_of_the_pools_also_if_nobody_waits() {
    let (files, _, dir) = files(&[4]);
    let disk = UringDisk::new(files, frames(1)).expect("io_uring");
    let (file, path) = beside(&dir, 6);
    let write = |offset: usize, pages, byte| {
        let write = BlockWrite {
            file: file.clone(),
            offset: (offset * PAGE_SIZE) as u64,
            buffer: filled(pages, byte),
        };
        disk.write_blocks(write)
    };
    disk.block_on(write(1, 2, 0x22)).expect("the ring works").expect("written");
    drop(write(4, 1, 0x33));
    assert!(Arc::strong_count(&file) > 1, "the file is kept as long as the kernel writes to it");
    disk.block_on(write(5, 1, 0x44)).expect("the ring works").expect("written");
    while !disk.is_idle() {
        disk.turn_and_wait(1).expect("the ring works");
    }
    assert_eq!(Arc::strong_count(&file), 1);
    let bytes = std::fs::read(path).expect("read");
    let pages: Vec<u8> = bytes.chunks(PAGE_SIZE).map(|page| page[7]).collect();
    assert_eq!(pages, [0x11, 0x22, 0x22, 0x11, 0x33, 0x44]);
}

#[test]
fn blocks_that_cannot_be_written_are_an_error() {
    let (files, _, dir) = files(&[4]);
    let disk = UringDisk::new(files, frames(1)).expect("io_uring");
    let (_, path) = beside(&dir, 2);
    let file = Arc::new(File::open(path).expect("open, to read"));
    let write = BlockWrite { file, offset: 0, buffer: filled(1, 1) };
    let written = disk.block_on(disk.write_blocks(write)).expect("the ring works");
    assert_eq!(written.map_err(|error| error.raw_os_error()), Err(Some(libc::EBADF)));
}
