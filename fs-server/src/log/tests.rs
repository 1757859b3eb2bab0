//! The log on a device that crashes: what was committed is read again, in order; the rest ends it or is refused.

use super::header::{Header, RING_OFFSET};
use super::redo_log::MIN_CAPACITY;
use super::*;
use crate::meta::{Placed, RequestId};
use cuttlefs_common::attr::Timestamp;
use cuttlefs_common::ids::{ClientId, InodeNo, LogSeq, SlotIndex};
use cuttlefs_common::life::{End, Event, Life};
use cuttlefs_common::redo::LogId;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{ManualClock, Random, SeededRandom};
use futures_lite::future::{block_on, poll_once};
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const FILE: LoggedFile = LoggedFile { ino: InodeNo(5), before: 0 };

fn begin(device: &SimLog, random: &dyn Random, turn: u64) -> Arc<RedoLog> {
    RedoLog::begin(Arc::new(device.clone()), turn, Arc::new(ManualClock::default()), random, false)
        .expect("begins")
}

fn device() -> SimLog {
    SimLog::new(RING_OFFSET + MIN_CAPACITY, LogId(99))
}

/// Has everything so far made durable.
fn commit(log: &RedoLog) -> Result<(), Status> {
    let done = log.committed();
    log.commits().step();
    block_on(done)
}

fn checkpoint(log: &RedoLog, mark: Mark) -> Result<(), Status> {
    let mut done = pin!(log.checkpoint(mark));
    if let Some(at_once) = block_on(poll_once(&mut done)) {
        return at_once;
    }
    log.commits().step();
    block_on(done)
}

/// Logs a write of so many bytes at `offset`.
fn write(log: &RedoLog, offset: u64, len: usize) {
    let ticket = block_on(log.begin_change(len, 1)).expect("room");
    let request = RequestId { client: ClientId(1), slot: SlotIndex(2), seq: offset };
    let bytes = vec![offset as u8; len];
    ticket.append(Some(request), FILE, Change::Write { offset, bytes: &bytes, ends: None });
}

/// The newest header, and the offsets of the writes a log holds; each is whole.
fn held(device: &SimLog) -> Result<(Header, Vec<u64>), LogError> {
    let mut offsets = Vec::new();
    let header = super::contents::read(device, &mut |record, operation| {
        let Change::Write { offset, bytes, ends: None } = operation.change else {
            panic!("{operation:?}");
        };
        assert!(bytes.iter().all(|byte| *byte == offset as u8), "torn");
        assert_eq!(record.seq, offset);
        offsets.push(offset);
    })?;
    Ok((header, offsets))
}

fn offsets(device: &SimLog) -> Vec<u64> {
    held(device).expect("reads").1
}

#[test]
fn a_crash_leaves_what_was_committed_and_a_part_of_the_rest_in_order() {
    let mut ends_inside = 0;
    for seed in 0..300 {
        let random = SeededRandom::new(seed);
        let device = device();
        let mut turn = 0;
        let mut next = 1;
        for _life in 0..3 {
            let log = begin(&device, &random, turn);
            // Offsets, oldest first: checkpointed ones leave in front.
            let (mut first, mut committed) = (next, next);
            for _ in 0..random.next_u64() % 60 {
                match random.next_u64() % 8 {
                    0 => {
                        commit(&log).expect("commits");
                        committed = next;
                    }
                    1 => {
                        let mark = log.mark();
                        checkpoint(&log, mark).expect("checkpoints");
                        // Its commit is everybody's.
                        (first, committed) = (next, next);
                    }
                    kind => {
                        let most = if kind == 2 { 200_000 } else { 3000 };
                        write(&log, next, 1 + (random.next_u64() % most) as usize);
                        next += 1;
                    }
                }
            }
            // Power goes while a sync is under way.
            device.fail_syncs();
            let _ = commit(&log);
            drop(log);
            device.crash(&random);
            let (header, found) = held(&device).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            // A checkpoint's header may be lost only with all that was synced with it.
            let from = found.first().copied().unwrap_or(next);
            let end = from + found.len() as u64;
            assert_eq!(found, (from..end).collect::<Vec<_>>(), "seed {seed}");
            assert!(found.is_empty() && committed == first || from <= first, "seed {seed}: {from} {first}");
            assert!(end >= committed || committed == first, "seed {seed}: {end} of {committed}");
            assert!(end <= next, "seed {seed}");
            ends_inside += u64::from(end > committed && end < next);
            turn = header.turn;
        }
    }
    assert!(ends_inside > 20, "crashes cut syncs: {ends_inside}");
}

#[test]
fn a_new_life_leaves_nothing_of_the_old_one() {
    let (device, random) = (device(), SeededRandom::new(1));
    let log = begin(&device, &random, 0);
    (1..20).for_each(|offset| write(&log, offset, 5000));
    commit(&log).expect("commits");
    let (header, found) = held(&device).expect("reads");
    assert_eq!(found, (1..20).collect::<Vec<_>>());
    let log = begin(&device, &random, header.turn);
    assert!(offsets(&device).is_empty());
    write(&log, 77, 5000);
    commit(&log).expect("commits");
    assert_eq!(offsets(&device), [77]);
}

#[test]
fn rot_in_what_was_durable_is_not_taken_for_the_end() {
    let (device, random) = (device(), SeededRandom::new(2));
    let log = begin(&device, &random, 0);
    for offset in 1..6 {
        write(&log, offset, 1000);
        commit(&log).expect("commits");
    }
    let record = cuttlefs_common::redo::encoded_len(super::operation::OPERATION_BYTES + 1000);
    for (place, lost) in [(0, 1), (2, 3), (3, 4)] {
        let byte = RING_OFFSET as usize + place * record + 200;
        device.flip(byte, 3);
        let refused = held(&device);
        assert!(matches!(refused, Err(LogError::Damaged(lsn)) if lsn == lost), "{refused:?}");
        device.flip(byte, 3);
    }
    // Nobody can tell the last one from a sync that was cut.
    device.flip(RING_OFFSET as usize + 4 * record + 200, 3);
    assert_eq!(offsets(&device), [1, 2, 3, 4]);
    // One header copy is enough, whichever it is; none is not.
    device.flip(20, 0);
    assert_eq!(offsets(&device), [1, 2, 3, 4]);
    device.flip(20, 0);
    device.flip(4096 + 20, 0);
    assert_eq!(offsets(&device), [1, 2, 3, 4]);
    device.flip(4096 + 20, 0);
    for block in 0..2 {
        device.flip(block * 4096 + 20, 0);
    }
    assert!(matches!(Contents::read(&device), Err(LogError::NoHeader)));
}

#[test]
fn a_full_log_waits_for_a_checkpoint_that_passes_no_change_under_way() {
    let (device, random) = (device(), SeededRandom::new(3));
    let log = begin(&device, &random, 0);
    let under_way = block_on(log.begin_change(10, 1)).expect("room");
    let mut next = 1;
    while log.figures().used + (1 << 20) < MIN_CAPACITY - (1 << 20) {
        write(&log, next, 60_000);
        next += 1;
    }
    let big = 1 << 20;
    let mut waiting = pin!(log.begin_change(big, 1));
    assert!(block_on(poll_once(&mut waiting)).is_none(), "there is no room");
    // The change that began first keeps everything.
    checkpoint(&log, log.mark()).expect("checkpoints");
    assert!(block_on(poll_once(&mut waiting)).is_none());
    drop(under_way);
    checkpoint(&log, log.mark()).expect("checkpoints");
    let ticket = block_on(waiting).expect("room at last");
    drop(ticket);
    assert_eq!(log.figures().used, 0);
    // Laps later all that counts is found.
    for lap in 0..200 {
        write(&log, next, 60_000);
        next += 1;
        if lap % 20 == 19 {
            checkpoint(&log, log.mark()).expect("checkpoints");
        }
    }
    write(&log, next, 10);
    commit(&log).expect("commits");
    assert_eq!(offsets(&device), [next]);
}

#[test]
fn who_waits_for_room_that_cannot_be_made_is_refused() {
    let (device, random) = (device(), SeededRandom::new(4));
    let log = begin(&device, &random, 0);
    while log.figures().used + (1 << 20) < MIN_CAPACITY - (1 << 20) {
        write(&log, 1, 60_000);
    }
    let mut waiting = pin!(log.begin_change(1 << 20, 1));
    assert!(block_on(poll_once(&mut waiting)).is_none());
    log.refuse_waiting();
    assert!(matches!(block_on(waiting), Err(Status::NoSpace)));
}

#[test]
fn a_log_that_failed_says_so_for_good() {
    let (device, random) = (device(), SeededRandom::new(5));
    let log = begin(&device, &random, 0);
    write(&log, 1, 10);
    commit(&log).expect("commits");
    write(&log, 2, 10);
    device.fail();
    assert_eq!(commit(&log), Err(Status::Io));
    assert!(log.figures().failed);
    assert!(matches!(block_on(log.begin_change(10, 1)), Err(Status::Io)));
    assert_eq!(checkpoint(&log, log.mark()), Err(Status::Io));
    device.crash(&random);
    let found = offsets(&device);
    assert!(found.starts_with(&[1]), "{found:?}");
}

#[test]
fn what_later_changes_take_away_is_not_written_again() {
    let (device, random) = (device(), SeededRandom::new(6));
    let log = begin(&device, &random, 0);
    let request = |seq| Some(RequestId { client: ClientId(1), slot: SlotIndex(2), seq });
    let ticket = block_on(log.begin_change(60_000, 6)).expect("room");
    let bytes = |byte, len| vec![byte; len];
    let page = 4096;
    ticket.append(
        request(1),
        FILE,
        Change::Write { offset: 0, bytes: &bytes(1, 5 * 4096), ends: Some(5 * page) },
    );
    ticket.append(None, FILE, Change::Zeros { offset: page + 10, len: 2 * page, keep_space: false });
    ticket.append(None, FILE, Change::Reserve { offset: 8 * page, len: page });
    ticket.append(None, FILE, Change::Length(3 * page + 5));
    let other = LoggedFile { ino: InodeNo(6), before: 3 };
    ticket.append(request(2), other, Change::Write { offset: 7, bytes: b"x", ends: None });
    ticket.append(request(3), other, Change::Copied { end: 8 });
    commit(&log).expect("commits");
    let mut lsns = Vec::new();
    super::contents::read(&device, &mut |record, _| lsns.push(record.lsn)).expect("reads");
    assert_eq!(lsns, [1, 2, 3, 4, 5, 6].map(LogSeq));
    let held = Contents::read(&device).expect("reads");
    assert_eq!(held.records, 6);
    let files = held.net.files;
    assert_eq!(files.keys().copied().collect::<Vec<_>>(), [InodeNo(5), InodeNo(6)]);
    let first: Vec<(u64, u64)> = files[&InodeNo(5)]
        .changes
        .iter()
        .filter_map(|change| match change {
            Again::Write { offset, bytes } => Some((*offset, bytes.len() as u64)),
            _ => None,
        })
        .collect();
    // Pages 2 (punched whole) and 4 (cut off) are left out; parts of pages stay, and are zeroed and cut again.
    assert_eq!(first, [(0, 2 * page), (3 * page, page)]);
    let rest: Vec<_> =
        files[&InodeNo(5)].changes.iter().filter(|change| !matches!(change, Again::Write { .. })).collect();
    // That it was done is known all the same, also if nothing of it were left.
    let done: Vec<_> = files[&InodeNo(5)].done.values().collect();
    let [(request, placed)] = done[..] else { panic!("{done:?}") };
    assert_eq!((request.seq, placed.offset, placed.len), (1, 0, 5 * 4096));
    let zeros = Again::Zeros { offset: page + 10, len: 2 * page, keep_space: false };
    assert_eq!(rest, [&Again::AtLeast(5 * page), &zeros, &Again::Length(3 * page + 5)]);
    // Of a copy that ended early: its writes, and where it ended.
    let copied = &files[&InodeNo(6)];
    let done: Vec<_> = copied.done.values().map(|(request, placed)| (request.seq, *placed)).collect();
    assert_eq!(done, [(3, Placed { offset: 8, len: 0 })]);
    assert_eq!(copied.changes, [Again::Write { offset: 7, bytes: b"x".to_vec() }]);
}

#[test]
fn the_times_of_the_change_with_the_last_counter_count() {
    let (device, random) = (device(), SeededRandom::new(8));
    let log = begin(&device, &random, 0);
    let at = |secs| Timestamp { secs, nanos: 0 };
    let file = |before| LoggedFile { before, ..FILE };
    let modified = || Contents::read(&device).expect("reads").net.files[&FILE.ino].modified;
    let ticket = block_on(log.begin_change(100, 10)).expect("room");
    let write = |before, offset| {
        ticket.append(None, file(before), Change::Write { offset, bytes: b"bytes", ends: None });
    };
    // Two at a time, on different pages: the first one to be done is the last one to say so, by a clock that stepped back.
    write(5, 0);
    write(5, 4096);
    ticket.done(file(6), at(300));
    ticket.done(file(5), at(400));
    commit(&log).expect("commits");
    assert_eq!(modified(), Some((at(300), 6)));
    // One that was logged and is not known to be done.
    write(7, 0);
    commit(&log).expect("commits");
    assert_eq!(modified().map(|(_, before)| before), Some(7));
    ticket.done(file(7), at(200));
    ticket.append(None, file(8), Change::Reserve { offset: 0, len: 4096 });
    ticket.append(None, file(8), Change::Copied { end: 10 });
    commit(&log).expect("commits");
    assert_eq!(modified(), Some((at(200), 7)), "space and a copy's early end change no times");
    assert_eq!(Contents::read(&device).expect("reads").net.files[&FILE.ino].changes.len(), 4);
}

/// Counts what is read.
struct Counted(SimLog, AtomicU64);

impl LogDevice for Counted {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.1.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.0.read(offset, bytes)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write(offset, bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
}

#[test]
fn after_a_clean_stop_only_the_headers_are_read() {
    let (device, random) = (device(), SeededRandom::new(7));
    let log = begin(&device, &random, 0);
    (1..20).for_each(|offset| write(&log, offset, 5000));
    checkpoint(&log, log.mark()).expect("checkpoints");
    log.stop();
    assert!(matches!(block_on(log.begin_change(10, 1)), Err(Status::Io)), "nothing is put behind the end");
    device.crash(&random);
    let counted = Counted(device.clone(), AtomicU64::new(0));
    let read = Contents::read(&counted).expect("reads");
    assert!(read.header.closed && read.is_empty());
    assert_eq!(counted.1.load(Ordering::Relaxed), 2 * super::header::HEADER_BYTES as u64);
    // The life after it is read again; losing either header does not bring the closed one back.
    let log = begin(&device, &random, read.header.turn);
    write(&log, 77, 5000);
    commit(&log).expect("commits");
    for lost in [0, 4096] {
        device.flip(lost + 20, 0);
        assert_eq!(offsets(&device), [77]);
        device.flip(lost + 20, 0);
    }
}

#[test]
fn a_stop_with_records_that_are_needed_is_not_clean() {
    let (device, random) = (device(), SeededRandom::new(8));
    let log = begin(&device, &random, 0);
    write(&log, 1, 10);
    commit(&log).expect("commits");
    log.stop();
    let (header, found) = held(&device).expect("reads");
    assert!(!header.closed);
    assert_eq!(found, [1]);
    // A change under way may still put records.
    let log = begin(&device, &random, header.turn);
    let under_way = block_on(log.begin_change(10, 1)).expect("room");
    log.stop();
    drop(under_way);
    assert!(!held(&device).expect("reads").0.closed);
    // A clean end that could not be noted costs reading.
    device.fail();
    log.stop();
    device.crash(&random);
    assert!(offsets(&device).is_empty());
}

#[test]
fn rot_is_seen_however_far_behind_it_the_next_sync_begins() {
    // More than is read at once lies between.
    let (device, random) = (SimLog::new(RING_OFFSET + (64 << 20), LogId(99)), SeededRandom::new(9));
    let log = begin(&device, &random, 0);
    let at = |lsn: usize| {
        RING_OFFSET as usize
            + (lsn - 1) * cuttlefs_common::redo::encoded_len(super::operation::OPERATION_BYTES + 1_000_000)
    };
    (1..=20).for_each(|offset| write(&log, offset, 1_000_000));
    commit(&log).expect("commits");
    assert_eq!(offsets(&device), (1..=20).collect::<Vec<_>>());
    device.flip(at(3) + 200, 1);
    assert_eq!(offsets(&device), [1, 2], "all of one sync");
    write(&log, 21, 1_000_000);
    commit(&log).expect("commits");
    assert!(matches!(held(&device), Err(LogError::Damaged(3))));
    // All but the two are gone.
    for lsn in 4..=20 {
        device.flip(at(lsn), 1);
    }
    assert!(matches!(held(&device), Err(LogError::Damaged(3))));
}

#[test]
fn a_writer_that_is_killed_leaves_what_it_wrote_and_the_beginning_of_the_last_write() {
    let mut found = std::collections::BTreeSet::new();
    for seed in 0..60 {
        let (device, random) = (device(), SeededRandom::new(seed));
        let life = Life::default();
        device.set_life(life.clone());
        let log = begin(&device, &random, 0);
        write(&log, 1, 3000);
        commit(&log).expect("commits");
        (2..6).for_each(|offset| write(&log, offset, 3000));
        life.end(Some(End { after: 0, of: None }));
        assert_eq!(commit(&log), Err(Status::Io));
        assert_eq!(life.last_event(), Some(Event::LogWrite));
        drop(log);
        device.kill(&random);
        life.begin();
        let left = offsets(&device);
        assert_eq!(left, (1..=left.len() as u64).collect::<Vec<_>>());
        found.insert(left.len());
    }
    assert!(found.contains(&1) && found.len() > 3, "{found:?}");
}
