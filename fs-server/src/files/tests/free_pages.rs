//! The free page queue: appends beyond grants need nobody as long as it has pages; who else needs the space gets it; and no page is lost or in two
//! places, also when others cut, evict and write back meanwhile.

use super::grants::{INO, OWNERS, Session, append, grant};
use super::harness::{Storage, allocate_range};
use super::records::inode;
use crate::files::free_pages::fill_free_pages;
use crate::files::{fetch, return_grant, run_fault, sync, truncate, write_back_all};
use crate::meta::Caller;
use crate::pages::Sink;
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::{PAGE_SIZE, PAGE_SIZE_U64, PoolPage};
use cuttlefs_common::rdma::{FileAtomic, FileTarget, FileValue, FileWrite, WcStatus};
use cuttlefs_common::region::PageSet;
use cuttlefs_common::rpc::Allocate;
use cuttlefs_common::world::{Random, SeededRandom};
use futures_lite::future::block_on;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const POOL_PAGES: u64 = 400;
/// The queue may have a 32nd of those that can hold pages.
const FRAMES: u64 = 323;
const QUEUE: u64 = 10;

/// An empty file with a grant of its first byte, and a full queue.
fn world() -> (Storage, Session) {
    let storage = Storage::new(POOL_PAGES, FRAMES);
    storage.meta.create(inode(INO));
    let session = Session::open(&storage, OWNERS[0]);
    fill(&storage);
    assert_eq!(queued(&storage), 0, "nobody has a grant");
    grant(&storage, &session, 0, 1).expect("granted");
    fill(&storage);
    assert_eq!(queued(&storage), QUEUE);
    storage.check();
    (storage, session)
}

fn fill(storage: &Storage) {
    block_on(fill_free_pages(&storage.files, &storage.disk));
}

fn queued(storage: &Storage) -> u64 {
    storage.files.figures().free_page_queue as u64
}

#[test]
fn appends_beyond_a_grant_need_no_worker_while_there_are_pages() {
    let (storage, session) = world();
    let page = [7; PAGE_SIZE];
    let mut size = 0;
    let mut done = |storage: &Storage, bytes: &[u8]| {
        assert_eq!(append(storage, &session, bytes), Ok(FileValue::Done(size)));
        size += bytes.len() as u64;
    };
    done(&storage, &page);
    assert_eq!(queued(&storage), QUEUE, "the grant has a page for its range");
    for round in 0..3 {
        (0..QUEUE / 2).for_each(|_| done(&storage, &page));
        // A write-back takes nothing from the queue, and nothing that an append needs.
        block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
        done(&storage, &[8; 3 * PAGE_SIZE]);
        storage.check();
        assert!(queued(&storage) < QUEUE / 2, "round {round}");
        fill(&storage);
        assert_eq!(queued(&storage), QUEUE);
    }
    let counts = storage.pages.figures().counts;
    assert_eq!((counts.grant_faults, counts.queue_pages), (0, 3 * (QUEUE / 2 + 3)));
    // More than there is: nothing is taken, and the queue pair would stall.
    let large = vec![9; (QUEUE as usize + 1) * PAGE_SIZE];
    assert_eq!(append(&storage, &session, &large), Ok(FileValue::Faults));
    assert_eq!(queued(&storage), QUEUE, "all went back");
    done(&storage, &large[..QUEUE as usize * PAGE_SIZE]);
    assert_eq!(append(&storage, &session, b"more"), Ok(FileValue::Faults), "the queue is empty");
    assert_eq!(session.opened.file.size(), size);
    let read = storage.read(&session.opened.file, 0, size as usize).expect("reads");
    assert!(read[..6 * PAGE_SIZE].iter().all(|byte| *byte == 7) && read.ends_with(&[9; 10 * PAGE_SIZE]));
    storage.check();
    // Pages beyond the grant are pinned by nobody.
    block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
    block_on(storage.pages.evict(&storage.disk, FRAMES as u32));
    assert_eq!(storage.pages.figures().free_frames, storage.pages.figures().frames - 1);
    assert_eq!(session.opened.file.state().table.iter().count(), 1, "the file is in one piece");
}

#[test]
fn a_hole_of_a_granted_range_gets_its_page_when_it_is_written() {
    let (storage, session) = world();
    let (owner, key) = (session.owner, session.opened.filekey);
    let commit = |commit| {
        storage.meta.commit_data(&[commit])?;
        storage.meta.attr(inode(INO))
    };
    let file = &session.opened.file;
    block_on(truncate(&storage.files, &storage.disk, file, 6 * PAGE_SIZE_U64, commit)).expect("grows");
    // Space that is reserved and has no bytes is a part of it.
    let reserve = Allocate::Reserve { keep_size: true };
    block_on(allocate_range(&storage.files, &storage.disk, file, PAGE_SIZE_U64, PAGE_SIZE_U64, reserve))
        .expect("reserved");
    grant(&storage, &session, 0, 6 * PAGE_SIZE_U64).expect("granted");
    assert_eq!(file.allocated_pages(), 1, "what nobody has written has no page");
    let engine = |offset, bytes: &[u8]| storage.files.write_file(owner, key, offset, bytes);
    assert_eq!(engine(PAGE_SIZE_U64 - 3, b"across"), Ok(FileWrite::Done));
    assert_eq!(engine(4 * PAGE_SIZE_U64, &[5; PAGE_SIZE]), Ok(FileWrite::Done));
    let add = FileAtomic::FetchAdd { add: 0x0101 };
    for old in [0, 0x0101] {
        assert_eq!(storage.files.atomic_file(owner, key, 3 * PAGE_SIZE_U64, add), Ok(FileValue::Done(old)));
    }
    let differs = FileAtomic::CompareSwap { expect: 1, swap: 2 };
    assert_eq!(storage.files.atomic_file(owner, key, 5 * PAGE_SIZE_U64, differs), Ok(FileValue::Done(0)));
    assert_eq!(file.allocated_pages(), 4, "a swap that is not done fills no hole");
    storage.check();
    let mut expected = vec![0; 6 * PAGE_SIZE];
    expected[PAGE_SIZE - 3..][..6].copy_from_slice(b"across");
    expected[4 * PAGE_SIZE..5 * PAGE_SIZE].fill(5);
    expected[3 * PAGE_SIZE..][..2].copy_from_slice(&[2, 2]);
    assert_eq!(storage.read(file, 0, 6 * PAGE_SIZE).expect("reads"), expected);
    assert_eq!(storage.pages.figures().counts.grant_faults, 0);
    block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
    assert_eq!(block_on(storage.pages.evict(&storage.disk, FRAMES as u32)), 0, "all four are pinned");
    block_on(return_grant(file, key, 0, u64::MAX));
    assert_eq!(file.allocated_pages(), 4);
    fill(&storage);
    assert_eq!(queued(&storage), 0, "there is no grant any more");
    storage.check();
}

#[test]
fn a_file_with_grants_has_its_attributes_in_memory() {
    let (storage, session) = world();
    let second = Session::open(&storage, OWNERS[1]);
    grant(&storage, &second, 0, 1).expect("granted");
    let (meta, number) = (&storage.meta, inode(INO));
    assert!(meta.notes_at_once(number) && meta.live_count() == 0, "nothing has changed yet");
    append(&storage, &session, b"changed").expect("appended");
    assert_eq!(meta.live_count(), 1);
    block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
    assert!(meta.notes_at_once(number) && meta.live_count() == 0, "the store has it all");
    let set = SetAttr { mode: Some(0o4600), ..SetAttr::default() };
    let changed = meta.set_attr(Caller::default(), number, &set, None).expect("chmod");
    assert_eq!((meta.attr(number), meta.killed().attr(number)), (Ok(changed), Ok(changed)));
    assert!(!meta.notes_at_once(number) && meta.live_count() == 0, "set-id bits are for a worker");
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    meta.set_attr(Caller::default(), number, &set, None).expect("chmod");
    block_on(return_grant(&session.opened.file, session.opened.filekey, 0, 1));
    assert!(meta.notes_at_once(number), "another one has a grant");
    append(&storage, &second, b"again").expect("appended");
    let noted = meta.attr(number).expect("attr");
    block_on(return_grant(&second.opened.file, second.opened.filekey, 0, 1));
    assert_eq!(meta.attr(number), Ok(noted), "what the store has not stays");
    block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
    assert!(!meta.notes_at_once(number));
    assert_eq!((meta.attr(number), meta.killed().attr(number)), (Ok(noted), Ok(noted)));
}

#[test]
fn the_space_of_the_queue_is_free_for_all_others() {
    let (storage, session) = world();
    let free = storage.files.space_figures().free;
    assert_eq!(free, POOL_PAGES - 1, "all but the page of the grant");
    // As much as there is, the queue's pages included.
    storage.meta.create(inode(2));
    let (other, reserve) = (storage.file(2), Allocate::Reserve { keep_size: true });
    let reserved = allocate_range(&storage.files, &storage.disk, &other, 0, free * PAGE_SIZE_U64, reserve);
    block_on(reserved).expect("reserved");
    assert_eq!(queued(&storage), 0);
    assert_eq!(
        append(&storage, &session, &[7; PAGE_SIZE]),
        Ok(FileValue::Done(0)),
        "the grant has kept its page"
    );
    assert_eq!(append(&storage, &session, b"more"), Ok(FileValue::Faults));
    fill(&storage);
    assert_eq!(queued(&storage), 0, "the pool is full");
    storage.check();
    assert_eq!(append(&storage, &session, b"more"), Ok(FileValue::Faults));
    let (owner, key) = (session.owner, session.opened.filekey);
    let again = storage.files.append_file_faulting(owner, key, b"more");
    assert_eq!(again, Err(WcStatus::RemoteOperation));
    storage.check();
}

/// A place whose lock somebody has is no place for the engine; what it took goes back.
#[test]
fn a_change_that_cannot_be_made_takes_nothing() {
    let (storage, session) = world();
    append(&storage, &session, &[7; PAGE_SIZE]).expect("appended");
    let next = storage.files.space().allocate(1, None).expect("space");
    storage.files.space().give_back(&next);
    // The pages of the queue are all before the free ones.
    let busy = block_on(storage.pages.locks.lock_many((0..next[0].first.0).map(PoolPage)));
    assert_eq!(append(&storage, &session, b"more"), Ok(FileValue::Faults));
    assert_eq!(queued(&storage), QUEUE);
    drop(busy);
    storage.check();
    assert_eq!(append(&storage, &session, b"more"), Ok(FileValue::Done(PAGE_SIZE_U64)));
    assert_eq!(queued(&storage), QUEUE - 1);
    storage.check();
}

#[test]
fn a_server_that_dies_leaves_no_trace_of_the_queue() {
    let (storage, session) = world();
    for _ in 0..3 {
        append(&storage, &session, &[7; PAGE_SIZE]).expect("appended");
    }
    block_on(sync(&storage.files, &storage.disk, &session.opened.file)).expect("durable");
    append(&storage, &session, &[8; 2 * PAGE_SIZE]).expect("appended");
    let next = storage.restart(storage.meta.crash(0));
    let file = next.file(INO);
    assert_eq!(file.size(), 3 * PAGE_SIZE_U64);
    assert_eq!(next.read(&file, 0, 4 * PAGE_SIZE).expect("reads"), [7; 3 * PAGE_SIZE]);
    assert_eq!(next.files.space().figures().free, POOL_PAGES - 3);
    next.check();
}

/// Two appenders and a worker for their faults, beside all that takes pages from a file or moves them. Records are whole, and each appender's are in
/// their order.
#[test]
fn appenders_race_with_cuts_evictions_and_write_back() {
    const RECORD: usize = 512;
    const APPENDS: u64 = 400;
    const READ_PAGES: usize = 64;
    let (storage, first) = world();
    let second = Session::open(&storage, OWNERS[1]);
    grant(&storage, &second, 0, 1).expect("granted");
    let (running, stop) = (AtomicUsize::new(2), AtomicBool::new(false));
    let appender = |session: &Session, number: u64| {
        let (owner, key) = (session.owner, session.opened.filekey);
        for round in 1..=APPENDS {
            let record = (number << 32 | round).to_le_bytes().repeat(RECORD / 8);
            loop {
                match append(&storage, session, &record).expect("granted") {
                    FileValue::Done(at) => {
                        assert_eq!(at % RECORD as u64, 0);
                        break;
                    }
                    FileValue::Faults => match storage.files.append_file_faulting(owner, key, &record) {
                        Ok(_) => break,
                        // No space, before the next flush.
                        Err(WcStatus::RemoteOperation) => std::thread::yield_now(),
                        Err(other) => panic!("{other:?}"),
                    },
                }
            }
        }
        running.fetch_sub(1, Ordering::SeqCst);
    };
    let records = |bytes: &[u8]| -> Vec<u64> {
        let each = bytes.chunks_exact(RECORD).map(|record| {
            let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
            let first = word(&record[..8]);
            assert!(record.chunks_exact(8).all(|bytes| word(bytes) == first), "a record is torn");
            first
        });
        each.collect()
    };
    let jobs = storage.files.fault_jobs();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while let Ok(job) = jobs.recv_blocking() {
                block_on(run_fault(&storage.files, &storage.disk, job));
            }
        });
        scope.spawn(|| appender(&first, 1));
        scope.spawn(|| appender(&second, 2));
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                let mut read = vec![0; READ_PAGES * PAGE_SIZE];
                let (len, pages) = (read.len(), PageSet::all(READ_PAGES));
                let (sink, file) = (Sink::Bytes(&mut read), storage.file(INO));
                let valid = block_on(fetch(&storage.files, &storage.disk, &file, 0, len, &pages, sink));
                records(&read[..valid.expect("reads") as usize]);
            }
        });
        let random = SeededRandom::new(5);
        while running.load(Ordering::SeqCst) > 0 {
            let (files, disk, file) = (&storage.files, &storage.disk, storage.file(INO));
            match random.next_u64() % 8 {
                0 => {
                    let commit = |commit| {
                        storage.meta.commit_data(&[commit])?;
                        storage.meta.attr(inode(INO))
                    };
                    // The grants of the first byte stay.
                    let to = (file.size() / 2).next_multiple_of(RECORD as u64).max(RECORD as u64);
                    if to < file.size() {
                        block_on(truncate(files, disk, &file, to, commit)).expect("cuts");
                    }
                }
                1 => block_on(write_back_all(files, disk)).expect("durable"),
                2 => block_on(sync(files, disk, &file)).expect("durable"),
                3 => drop(block_on(storage.pages.evict(disk, 20))),
                _ => fill(&storage),
            }
        }
        stop.store(true, Ordering::SeqCst);
        storage.files.end_one_sided_writes();
    });
    storage.check();
    let file = storage.file(INO);
    let all = records(&storage.read(&file, 0, file.size() as usize).expect("reads"));
    for number in [1, 2] {
        let own: Vec<u64> = all.iter().filter(|record| **record >> 32 == number).copied().collect();
        assert!(own.is_sorted_by(|one, next| one < next), "appender {number}: {own:x?}");
    }
    assert!(all.iter().all(|record| [1, 2].contains(&(record >> 32))), "a hole that no one made");
    assert!(storage.pages.figures().counts.queue_pages > 0);
}
