//! Versions of pages that the simulated disk keeps, loses and tears.

use super::*;
use crate::pool::AlignedBuf;
use cuttlefs_common::life::End;
use futures_lite::future::{block_on, poll_once};
use std::collections::BTreeSet;

fn frames() -> Arc<SharedMemory> {
    Arc::new(SharedMemory::new("frames", 16 * PAGE_SIZE).expect("memfd"))
}

fn filled(pages: usize, byte: u8) -> IoBuffer {
    let mut buffer = AlignedBuf::zeroed(pages * PAGE_SIZE);
    buffer.as_mut_slice().fill(byte);
    IoBuffer::Owned(buffer)
}

fn write(page: u64, buffer: IoBuffer) -> IoRequest {
    IoRequest { kind: IoKind::Write, offset: page * PAGE_SIZE_U64, buffer }
}

fn read(page: u64, buffer: IoBuffer) -> IoRequest {
    IoRequest { kind: IoKind::Read, offset: page * PAGE_SIZE_U64, buffer }
}

fn put(disk: &SimDisk, page: u64, byte: u8) {
    for done in block_on(disk.submit(vec![write(page, filled(1, byte))])) {
        done.result.expect("the write is done");
    }
}

#[test]
fn reads_what_was_written_through_buffers_and_frames() {
    let (frames, other) = (frames(), frames());
    let disk = SimDisk::new(8, frames.clone());
    frames.fill(3 * PAGE_SIZE, PAGE_SIZE, 3);
    frames.fill(9 * PAGE_SIZE, PAGE_SIZE, 9);
    let scattered = IoBuffer::Frames(vec![FrameIndex(9), FrameIndex(3)]);
    let done = block_on(disk.submit(vec![write(4, scattered), write(0, filled(1, 1))]));
    assert!(done.iter().all(|done| done.result.is_ok()));
    assert_eq!((disk.peek(4)[0], disk.peek(5)[4095], disk.peek(0)[7]), (9, 3, 1));
    assert_eq!(disk.peek(1), vec![UNWRITTEN_BYTE; PAGE_SIZE]);

    let again = disk.attach(other.clone());
    let into = IoBuffer::Frames(vec![FrameIndex(5), FrameIndex(6)]);
    let mut done = block_on(again.submit(vec![read(0, filled(2, 0)), read(4, into)]));
    assert!(done.iter().all(|done| done.result.is_ok()));
    let mut out = [0; PAGE_SIZE];
    other.read(6 * PAGE_SIZE, &mut out);
    assert_eq!(out, [3; PAGE_SIZE]);
    let IoBuffer::Owned(buffer) = done.swap_remove(0).buffer else { panic!("another buffer came back") };
    assert_eq!((buffer.as_slice()[0], buffer.as_slice()[PAGE_SIZE]), (1, UNWRITTEN_BYTE));
    assert_eq!(disk.counters().pages_read, 4);
}

#[test]
fn bad_requests_are_errors_with_the_buffer_given_back() {
    let disk = SimDisk::new(2, frames());
    let misplaced = IoRequest { kind: IoKind::Read, offset: 12, buffer: filled(1, 0) };
    let requests = vec![misplaced, read(1, filled(2, 0)), read(u64::MAX / PAGE_SIZE_U64, filled(1, 0))];
    for done in block_on(disk.submit(requests)) {
        let error = done.result.expect_err("refused");
        assert_eq!(error.source.raw_os_error(), Some(libc::EINVAL));
        assert!(matches!(done.buffer, IoBuffer::Owned(_)));
    }
    assert!(block_on(disk.submit(vec![])).is_empty());
}

#[test]
fn deferred_ios_come_in_any_order_and_results_in_request_order() {
    let mut orders = BTreeSet::new();
    for seed in 0..40 {
        let disk = SimDisk::seeded(8, frames(), seed);
        disk.set_mode(SimMode::Deferred);
        let mut first = disk.submit(vec![write(0, filled(1, 1)), write(1, filled(1, 2))]);
        let mut second = disk.submit(vec![write(2, filled(1, 3))]);
        let mut order = Vec::new();
        let mut results = (false, false);
        while disk.step() {
            order.push(disk.pending());
            if !results.0
                && let Some(done) = block_on(poll_once(&mut first))
            {
                assert_eq!(done.len(), 2);
                results.0 = true;
                order.push(100);
            }
            results.1 = results.1 || block_on(poll_once(&mut second)).is_some();
        }
        assert_eq!(results, (true, true));
        orders.insert(order);
    }
    assert!(orders.len() > 1, "the order depends on the seed");
}

#[test]
fn a_crash_takes_only_what_was_not_synced() {
    let random = SeededRandom::new(5);
    let (mut kept, mut lost, mut torn) = (0, 0, 0);
    for _ in 0..200 {
        let disk = SimDisk::new(4, frames());
        put(&disk, 0, 1);
        put(&disk, 1, 1);
        block_on(disk.sync()).expect("synced");
        put(&disk, 1, 2);
        assert_eq!(disk.unsynced_pages(), 1);
        disk.crash(&random);
        assert_eq!(disk.peek(0), vec![1; PAGE_SIZE]);
        let page = disk.peek(1);
        for sector in page.chunks(SECTOR_BYTES) {
            assert!(sector.iter().all(|byte| *byte == sector[0]), "a sector is whole");
        }
        match (page.contains(&1), page.contains(&2)) {
            (true, false) => lost += 1,
            (false, true) => kept += 1,
            _ => torn += 1,
        }
        disk.crash(&random);
        assert_eq!(disk.peek(1), page, "after a crash what is there is durable");
    }
    assert!(kept > 10 && lost > 10 && torn > 10, "kept {kept}, lost {lost}, torn {torn}");
}

#[test]
fn a_sync_covers_only_writes_that_completed_before_it() {
    let random = SeededRandom::new(1);
    let mut lost = 0;
    for seed in 0..60 {
        let disk = SimDisk::seeded(2, frames(), seed);
        put(&disk, 0, 1);
        disk.set_mode(SimMode::Deferred);
        let write = disk.submit(vec![write(0, filled(1, 2))]);
        let sync = disk.sync();
        while disk.step() {}
        block_on(sync).expect("synced");
        block_on(write);
        disk.crash(&random);
        let page = disk.peek(0);
        assert!(page.iter().all(|byte| [1, 2].contains(byte)));
        lost += u32::from(page.contains(&1));
    }
    assert!(lost > 0);
}

#[test]
fn writes_in_flight_at_a_crash_may_be_there_and_never_complete() {
    let random = SeededRandom::new(9);
    let mut seen = BTreeSet::new();
    for _ in 0..50 {
        let disk = SimDisk::new(2, frames());
        disk.set_mode(SimMode::Deferred);
        let mut future = disk.submit(vec![write(0, filled(1, 7))]);
        disk.crash(&random);
        assert!(!disk.step());
        assert!(block_on(poll_once(&mut future)).is_none());
        seen.extend(disk.peek(0));
    }
    assert_eq!(seen, BTreeSet::from([7, UNWRITTEN_BYTE]));
}

#[test]
fn after_a_failed_sync_only_a_new_write_is_safe() {
    let random = SeededRandom::new(2);
    let mut lost = 0;
    for _ in 0..60 {
        let disk = SimDisk::new(2, frames());
        put(&disk, 0, 1);
        put(&disk, 1, 1);
        disk.fail_next_sync(libc::EIO);
        assert!(block_on(disk.sync()).is_err());
        put(&disk, 1, 2);
        block_on(disk.sync()).expect("the next sync works");
        disk.crash(&random);
        assert_eq!(disk.peek(1), vec![2; PAGE_SIZE]);
        lost += u32::from(disk.peek(0).contains(&UNWRITTEN_BYTE));
    }
    assert!(lost > 0, "what the failed sync covered is at risk");
}

#[test]
fn injected_errors_hit_their_pages_as_often_as_told() {
    let disk = SimDisk::new(8, frames());
    disk.inject(SimFault { pages: 2..3, kind: Some(IoKind::Write), errno: libc::EIO, times: 1 });
    let done = block_on(disk.submit(vec![write(1, filled(3, 4)), write(5, filled(1, 4))]));
    let error = done[0].result.as_ref().expect_err("page 2 is bad");
    assert_eq!((error.kind, error.offset, error.len), (IoKind::Write, 4096, 3 * PAGE_SIZE));
    assert!(done[1].result.is_ok());
    assert_eq!((disk.peek(1)[0], disk.peek(2)[0], disk.peek(3)[0]), (4, UNWRITTEN_BYTE, UNWRITTEN_BYTE));
    assert!(block_on(disk.submit(vec![write(1, filled(3, 4))]))[0].result.is_ok());
    disk.inject(SimFault { pages: 0..8, kind: None, errno: libc::EIO, times: u32::MAX });
    assert!(block_on(disk.submit(vec![read(0, filled(1, 0))]))[0].result.is_err());
    disk.clear_faults();
    assert!(block_on(disk.submit(vec![read(0, filled(1, 0))]))[0].result.is_ok());
    disk.poke(3, &[8; PAGE_SIZE]);
    assert_eq!(disk.peek(3), vec![8; PAGE_SIZE]);
}

#[test]
fn a_server_dies_with_an_io_or_a_sync_and_leaves_any_part_of_what_was_in_flight() {
    let random = SeededRandom::new(3);
    let (mut wrote, mut torn) = (BTreeSet::new(), 0);
    for (mode, round) in [SimMode::AtOnce, SimMode::Deferred]
        .into_iter()
        .flat_map(|mode| (0..60).map(move |round| (mode, round)))
    {
        let disk = SimDisk::seeded(2, frames(), round);
        put(&disk, 0, 1);
        block_on(disk.sync()).expect("synced");
        disk.set_mode(mode);
        let life = Life::default();
        disk.set_life(life.clone());
        // The second write is submitted and not completed.
        life.end(Some(End { after: 1, of: None }));
        let mut future = disk.submit(vec![write(0, filled(1, 2))]);
        disk.step();
        assert_eq!(life.last_event(), Some(Event::DiskDone));
        assert!(block_on(poll_once(&mut future)).is_none(), "nobody is told");
        assert!(block_on(poll_once(&mut disk.submit(vec![write(1, filled(1, 9))]))).is_none());
        assert!(block_on(poll_once(&mut disk.sync())).is_none());
        disk.kill(&random);
        life.begin();
        let page = disk.peek(0);
        torn += u32::from(page.contains(&1) && page.contains(&2));
        wrote.extend(page);
        assert_eq!(disk.peek(1), vec![UNWRITTEN_BYTE; PAGE_SIZE], "the dead write nothing");
        disk.crash(&random);
        assert!(disk.peek(0).iter().all(|byte| [1, 2].contains(byte)));
    }
    assert_eq!(wrote, BTreeSet::from([1, 2]));
    assert!(torn > 10, "{torn}");
}

#[test]
fn a_lying_disk_loses_what_it_said_it_had() {
    let random = SeededRandom::new(4);
    let lost = (0..40).filter(|_| {
        let disk = SimDisk::new(1, frames());
        disk.lie();
        put(&disk, 0, 1);
        block_on(disk.sync()).expect("it says so");
        disk.crash(&random);
        disk.peek(0).contains(&UNWRITTEN_BYTE)
    });
    assert!(lost.count() > 10);
}
