//! The log on a device that crashes: what was committed is read again, in order; the rest ends it or is refused.

use super::header::RING_OFFSET;
use super::redo_log::MIN_CAPACITY;
use super::*;
use crate::meta::RequestId;
use cuttlefs_common::ids::{ClientId, InodeNo, LogSeq, SlotIndex};
use cuttlefs_common::life::{End, Event, Life};
use cuttlefs_common::redo::LogId;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{ManualClock, Random, SeededRandom};
use futures_lite::future::{block_on, poll_once};
use std::pin::pin;
use std::sync::Arc;

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

/// The offsets of the writes a log holds; each is whole.
fn offsets(contents: &Contents) -> Vec<u64> {
    contents
        .operations()
        .map(|(record, operation)| {
            let Change::Write { offset, bytes, ends: None } = operation.change else {
                panic!("{operation:?}");
            };
            assert!(bytes.iter().all(|byte| *byte == offset as u8), "torn");
            assert_eq!(record.seq, offset);
            offset
        })
        .collect()
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
            let held = Contents::read(&device).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            let found = offsets(&held);
            // A checkpoint's header may be lost only with all that was synced with it.
            let from = found.first().copied().unwrap_or(next);
            let end = from + found.len() as u64;
            assert_eq!(found, (from..end).collect::<Vec<_>>(), "seed {seed}");
            assert!(found.is_empty() && committed == first || from <= first, "seed {seed}: {from} {first}");
            assert!(end >= committed || committed == first, "seed {seed}: {end} of {committed}");
            assert!(end <= next, "seed {seed}");
            ends_inside += u64::from(end > committed && end < next);
            turn = held.header.turn;
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
    let held = Contents::read(&device).expect("reads");
    assert_eq!(offsets(&held), (1..20).collect::<Vec<_>>());
    let log = begin(&device, &random, held.header.turn);
    assert!(Contents::read(&device).expect("reads").is_empty());
    write(&log, 77, 5000);
    commit(&log).expect("commits");
    assert_eq!(offsets(&Contents::read(&device).expect("reads")), [77]);
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
        let refused = Contents::read(&device).map(|held| offsets(&held));
        assert!(matches!(refused, Err(LogError::Damaged(lsn)) if lsn == lost), "{refused:?}");
        device.flip(byte, 3);
    }
    // Nobody can tell the last one from a sync that was cut.
    device.flip(RING_OFFSET as usize + 4 * record + 200, 3);
    assert_eq!(offsets(&Contents::read(&device).expect("reads")), [1, 2, 3, 4]);
    // One header copy is enough, none is not.
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
    assert_eq!(offsets(&Contents::read(&device).expect("reads")), [next]);
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
    let found = offsets(&Contents::read(&device).expect("reads"));
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
    commit(&log).expect("commits");
    let held = Contents::read(&device).expect("reads");
    assert_eq!(
        held.operations().map(|(record, _)| record.lsn).collect::<Vec<_>>(),
        [1, 2, 3, 4, 5].map(LogSeq)
    );
    let files = net(&held);
    assert_eq!(files.keys().copied().collect::<Vec<_>>(), [InodeNo(5), InodeNo(6)]);
    let first: Vec<(u64, u64)> = files[&InodeNo(5)]
        .changes
        .iter()
        .filter_map(|change| match change {
            Again::Write { offset, bytes, of } => {
                let (request, placed) = of.expect("known");
                assert_eq!((request.seq, placed.offset, placed.len), (1, 0, 5 * 4096));
                Some((*offset, bytes.len() as u64))
            }
            _ => None,
        })
        .collect();
    // Pages 2 (punched whole) and 4 (cut off) are left out; parts of pages stay, and are zeroed and cut again.
    assert_eq!(first, [(0, 2 * page), (3 * page, page)]);
    let rest: Vec<_> =
        files[&InodeNo(5)].changes.iter().filter(|change| !matches!(change, Again::Write { .. })).collect();
    let zeros = Again::Zeros { offset: page + 10, len: 2 * page, keep_space: false };
    assert_eq!(rest, [&Again::AtLeast(5 * page), &zeros, &Again::Length(3 * page + 5)]);
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
        let left = offsets(&Contents::read(&device).expect("the crash cut a sync nobody was told of"));
        assert_eq!(left, (1..=left.len() as u64).collect::<Vec<_>>());
        found.insert(left.len());
    }
    assert!(found.contains(&1) && found.len() > 3, "{found:?}");
}
