//! What a request puts behind one-sided appends that no sync has covered is answered once they are durable: after a kill or a power loss, and after its
//! client has brought the change back to the next server, no zeros stand in the place of an append.

use super::grants::{INO, OWNERS, Session, append, grant};
use super::harness::{Storage, write};
use super::records::{Records, inode};
use crate::files::one_sided_faults::{OneSided, change};
use crate::files::write_back::write_back;
use crate::files::{
    Changed, FileRegion, WriteAt, allocate_for, begin_change, copy_range, restore, restore_length, sync,
    truncate, write_back_all, write_for,
};
use crate::meta::{Caller, ClientChange, DataCommit};
use crate::pages::Source;
use crate::pool::simdisk::SimMode;
use cuttlefs_common::attr::{Attr, SetAttr};
use cuttlefs_common::ids::{ClientId, PAGE_SIZE_U64};
use cuttlefs_common::rdma::{FileValue, PeerKey};
use cuttlefs_common::rpc::{Allocate, Restored};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Random, SeededRandom};
use futures_lite::future::{block_on, poll_once};
use std::cell::Cell;
use std::fmt::Debug;
use std::pin::pin;
use std::slice::from_ref;
use std::sync::Arc;

const POOL_PAGES: u64 = 96;
const FRAMES: u64 = 64;
/// The length of the file at first, which is durable; of an append; and the places behind the first append and in the midst of it.
const OLD: u64 = 3000;
const LEN: u64 = 9000;
const BEHIND: u64 = OLD + LEN;
const MIDST: u64 = OLD + 5000;
const OTHER: u64 = 2;
const CLIENT: ClientId = ClientId(7);

/// Who makes a one-sided append.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    Engine,
    Worker,
}

/// What a client asks for.
#[derive(Clone, Copy, Debug)]
enum Asked {
    Append,
    /// A write of 100 bytes.
    Write(u64),
    SetLen(u64),
    Allocate(u64, u64, Allocate),
    /// A copy of all bytes of the other file.
    Copy(u64),
}

/// A change that a client keeps until a sync covers it.
struct Kept {
    change: u64,
    what: Restored<Vec<u8>>,
}

/// A file of `OLD` ones with a grant for what is behind them, and another file of 100 threes.
fn world() -> (Storage, Session) {
    let storage = Storage::new(POOL_PAGES, FRAMES);
    for (ino, byte, len) in [(INO, 1, OLD), (OTHER, 3, 100)] {
        storage.meta.create(inode(ino));
        let (file, bytes) = (storage.file(ino), vec![byte; len as usize]);
        let written = write(&storage.files, &storage.disk, &file, WriteAt::End, Source::Bytes(&bytes));
        block_on(written).expect("written");
    }
    block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
    let session = Session::open(&storage, OWNERS[0]);
    grant(&storage, &session, 0, BEHIND + 8 * PAGE_SIZE_U64).expect("granted");
    (storage, session)
}

/// An append of `len` twos.
fn append_by(maker: Maker, storage: &Storage, session: &Session, len: u64) {
    let (at, bytes) = (session.opened.file.size(), vec![2; len as usize]);
    match maker {
        Maker::Engine => assert_eq!(append(storage, session, &bytes), Ok(FileValue::Done(at))),
        Maker::Worker => append_by_worker(storage, session, at, bytes),
    }
}

fn append_by_worker(storage: &Storage, session: &Session, at: u64, bytes: Vec<u8>) {
    let who = (session.owner, session.opened.filekey);
    let made = change(&storage.files, &storage.disk, who, OneSided::Append { bytes });
    assert_eq!(block_on(made), Ok(at));
}

/// Does what a client asks for, without an answer. Returns what must be durable before that, and what the client keeps.
fn done(storage: &Storage, file: &Arc<FileRegion>, asked: Asked) -> (Changed, Kept) {
    let (files, disk) = (&storage.files, &storage.disk);
    let (changed, bytes) = (Changed::default(), vec![4; 100]);
    let ask = async {
        let changing = begin_change(files, file, &changed).await?;
        let (change, range, what) = match asked {
            Asked::Append | Asked::Write(_) => {
                let at = if let Asked::Write(at) = asked { WriteAt::Offset(at) } else { WriteAt::End };
                let written = write_for(files, disk, file, at, Source::Bytes(&bytes), None).await?;
                let offset = written.offset;
                (written.attr.change, offset..offset + 100, Restored::Bytes { offset, bytes: bytes.clone() })
            }
            Asked::SetLen(len) => {
                let commit = |commit| set_length(storage, len, commit);
                let attr = truncate(files, disk, file, len, commit).await?;
                (attr.change, len..u64::MAX, Restored::End(len))
            }
            Asked::Allocate(offset, len, how) => {
                let attr = allocate_for(files, disk, file, (offset, len), how, None).await?;
                let range = match how {
                    Allocate::Reserve { keep_size: true } => offset..offset,
                    Allocate::Reserve { keep_size: false } => offset + len..offset + len,
                    _ => offset..offset + len,
                };
                (attr.change, range, Restored::Allocate { offset, len, how })
            }
            Asked::Copy(offset) => {
                let other = storage.file(OTHER);
                let copied = copy_range(files, disk, (&other, 0), (file, offset), 100, None).await?;
                (copied.change, offset..offset + 100, Restored::Bytes { offset, bytes: vec![3; 100] })
            }
        };
        changing.done(change, range);
        Ok::<_, Status>(Kept { change, what })
    };
    let kept = block_on(ask).expect("done");
    (changed, kept)
}

/// The batch of a cut, as the server makes it.
fn set_length(storage: &Storage, len: u64, commit: DataCommit) -> Result<Attr, Status> {
    let set = SetAttr { size: Some(len), ..SetAttr::default() };
    storage.meta.set_attr(Caller::default(), commit.ino, &set, Some(commit))
}

/// Waits as the dispatcher does where answers are not durable. Returns whether there was anything to wait for.
fn answer(storage: &Storage, changed: &Changed) -> Result<bool, Status> {
    let waits = changed.is_behind_appends();
    if waits {
        block_on(changed.make_durable(&storage.files, &storage.disk))?;
    }
    Ok(waits)
}

fn answered(storage: &Storage, file: &Arc<FileRegion>, asked: Asked) -> (bool, Kept) {
    let (changed, kept) = done(storage, file, asked);
    (answer(storage, &changed).expect("durable"), kept)
}

/// The next server, to which the client has brought back what it had kept.
fn next_with(storage: &Storage, records: Records, kept: &[Kept]) -> Storage {
    storage.disk.set_mode(SimMode::AtOnce);
    let next = storage.restart(records);
    let file = next.file(INO);
    for Kept { change, what } in kept {
        let by = (ClientChange { client: CLIENT, change: *change }, &PeerKey::User(0));
        let what = match what {
            Restored::Bytes { offset, bytes } => {
                Restored::Bytes { offset: *offset, bytes: Source::Bytes(bytes) }
            }
            Restored::End(len) => Restored::End(*len),
            Restored::Allocate { offset, len, how } => {
                Restored::Allocate { offset: *offset, len: *len, how: *how }
            }
        };
        let cut = async |len| {
            let commit = |commit| set_length(&next, len, commit);
            restore_length(&next.files, &next.disk, &file, len, commit).await
        };
        let changed = Changed::default();
        let restored = restore(&next.files, &next.disk, &file, by, what, cut, &changed);
        assert_eq!(block_on(restored), Ok(false), "nothing of it is lost");
    }
    drop(file);
    next.check();
    next
}

/// A site after some work, and what its client keeps.
type Worked = (Storage, Session, Vec<Kept>);

/// Has `look` look at each state that a kill or a power loss behind the work may leave, with the client's changes brought back to it. The work does the
/// same each time.
fn after_each_crash(work: impl Fn() -> Worked, look: impl Fn(&Worked, &Storage, usize)) {
    for crash in 0.. {
        let worked = work();
        let (storage, _, kept) = &worked;
        let states = storage.meta.crash_states();
        let records = match crash {
            0 => storage.meta.killed(),
            crash if crash <= states => {
                storage.disk.crash(&SeededRandom::new(crash as u64));
                storage.meta.crash(crash - 1)
            }
            _ => return,
        };
        let next = next_with(storage, records, kept);
        look(&worked, &next, crash);
    }
}

/// All bytes are there, those of the appends and those of the client.
fn all_is_there(what: &dyn Debug, work: impl Fn() -> Worked) {
    after_each_crash(work, |(storage, session, _), next, crash| {
        let file = &session.opened.file;
        // Its pages are in frames, so what became of its disk does not matter.
        let bytes = storage.read(file, 0, file.size() as usize).expect("reads");
        let found = contents(next);
        assert!(found == bytes, "{what:?}, {crash}: {} bytes of {}", found.len(), bytes.len());
    });
}

fn contents(storage: &Storage) -> Vec<u8> {
    let file = storage.file(INO);
    storage.read(&file, 0, file.size() as usize).expect("reads")
}

#[test]
fn what_is_answered_behind_an_append_has_it_before_it() {
    let grows = Allocate::Reserve { keep_size: false };
    let all = [
        Asked::Append,
        Asked::Write(BEHIND),
        Asked::Write(BEHIND + 5000),
        Asked::Write(MIDST),
        Asked::SetLen(BEHIND + 5000),
        Asked::SetLen(MIDST),
        Asked::Allocate(OLD, LEN + 5000, grows),
        Asked::Allocate(MIDST, LEN, Allocate::ZeroRange { keep_size: false }),
        Asked::Copy(BEHIND),
    ];
    for (maker, asked) in all.into_iter().flat_map(|asked| [(Maker::Engine, asked), (Maker::Worker, asked)]) {
        all_is_there(&(maker, asked), || {
            let (storage, session) = world();
            append_by(maker, &storage, &session, LEN);
            let (waits, kept) = answered(&storage, &session.opened.file, asked);
            assert!(waits, "{maker:?} {asked:?}");
            // The next one has nothing to wait for.
            let (waits, next) = answered(&storage, &session.opened.file, Asked::Append);
            assert!(!waits, "{maker:?} {asked:?}");
            (storage, session, vec![kept, next])
        });
    }
}

/// Without the wait: what the other tests here look for is there then.
#[test]
fn without_a_sync_zeros_stand_in_its_place() {
    let (storage, session) = world();
    append_by(Maker::Engine, &storage, &session, LEN);
    let (_, kept) = done(&storage, &session.opened.file, Asked::Append);
    let next = next_with(&storage, storage.meta.killed(), &[kept]);
    let found = contents(&next);
    assert!(found[..OLD as usize].iter().all(|byte| *byte == 1) && found[BEHIND as usize..] == [4; 100]);
    assert!(found[OLD as usize..BEHIND as usize].iter().all(|byte| *byte == 0));
}

#[test]
fn what_is_not_behind_them_waits_for_nothing() {
    let keeps = Allocate::Reserve { keep_size: true };
    for asked in
        [Asked::Write(0), Asked::Write(OLD - 50), Asked::Write(OLD), Asked::Allocate(0, BEHIND, keeps)]
    {
        let (storage, session) = world();
        append_by(Maker::Engine, &storage, &session, LEN);
        let (waits, kept) = answered(&storage, &session.opened.file, asked);
        assert!(!waits, "{asked:?}");
        // The append may be lost, and takes its length along.
        let found = contents(&next_with(&storage, storage.meta.killed(), &[kept]));
        assert!(!found.contains(&0) && !found.contains(&2), "{asked:?}");
    }
    // Another file, and a file to which nobody has appended.
    let (storage, session) = world();
    assert!(!answered(&storage, &session.opened.file, Asked::Append).0);
    append_by(Maker::Engine, &storage, &session, LEN);
    assert!(!answered(&storage, &storage.file(OTHER), Asked::Append).0);
    assert!(answered(&storage, &session.opened.file, Asked::Append).0);
}

#[test]
fn whatever_syncs_them_ends_the_wait_and_nothing_else_does() {
    all_is_there(&"appends in turns", || {
        let (storage, session) = world();
        let (files, disk, file) = (&storage.files, &storage.disk, &session.opened.file);
        let mut kept = Vec::new();
        for round in 0..6 {
            append_by(Maker::Engine, &storage, &session, 100);
            match round % 3 {
                0 => block_on(sync(files, disk, file)).expect("durable"),
                1 => block_on(write_back_all(files, disk)).expect("durable"),
                _ => {
                    // Committed, and not flushed: a machine that goes down may lose it.
                    block_on(write_back(files, disk, from_ref(file), false)).expect("committed");
                    assert!(storage.meta.crash_states() > 1);
                }
            }
            let (waits, change) = answered(&storage, file, Asked::Append);
            assert_eq!(waits, round % 3 == 2, "round {round}");
            kept.push(change);
        }
        (storage, session, kept)
    });
}

#[test]
fn appends_that_come_after_a_sync_has_begun_are_not_covered_by_it() {
    all_is_there(&"appends beside a sync", || {
        let (storage, session) = world();
        let (files, disk, file) = (&storage.files, &storage.disk, &session.opened.file);
        // To the end of a page: the next one touches none that is being written.
        append_by(Maker::Engine, &storage, &session, 3 * PAGE_SIZE_U64 - OLD);
        disk.set_mode(SimMode::Deferred);
        {
            let which = [file.clone()];
            let mut syncing = pin!(write_back(files, disk, &which, true));
            assert_eq!(block_on(poll_once(&mut syncing)), None, "it waits for the disk");
            append_by(Maker::Engine, &storage, &session, 100);
            disk.set_mode(SimMode::AtOnce);
            while disk.step() {}
            block_on(syncing).expect("durable");
        }
        let (waits, first) = answered(&storage, file, Asked::Write(3 * PAGE_SIZE_U64));
        assert!(!waits, "the first one is durable");
        let (waits, second) = answered(&storage, file, Asked::Append);
        assert!(waits, "the second one is not");
        (storage, session, vec![first, second])
    });
}

#[test]
fn what_is_cut_off_is_waited_for_by_nobody() {
    all_is_there(&"a cut", || {
        let (storage, session) = world();
        let file = &session.opened.file;
        append_by(Maker::Engine, &storage, &session, LEN);
        let (waits, cut) = answered(&storage, file, Asked::SetLen(OLD));
        assert!(!waits, "nothing is left of it");
        let (waits, behind) = answered(&storage, file, Asked::Append);
        assert!(!waits, "it is in its place");
        grant(&storage, &session, 0, BEHIND).expect("granted");
        append_by(Maker::Engine, &storage, &session, 100);
        let (waits, last) = answered(&storage, file, Asked::Append);
        assert!(waits, "a new one is before it");
        (storage, session, vec![cut, behind, last])
    });
}

#[test]
fn a_file_that_nobody_has_open_is_not_forgotten_with_them() {
    all_is_there(&"a file that was closed", || {
        let (storage, session) = world();
        append_by(Maker::Engine, &storage, &session, LEN);
        let (owner, key) = (session.owner, session.opened.filekey);
        block_on(write_back(&storage.files, &storage.disk, &[storage.file(INO)], false)).expect("committed");
        drop(session);
        storage.files.close(owner, key).expect("closes");
        storage.files.trim_active();
        let session = Session::open(&storage, owner);
        let (waits, kept) = answered(&storage, &session.opened.file, Asked::Append);
        assert!(waits, "the batch with it is not flushed");
        (storage, session, vec![kept])
    });
}

/// One that is committed and not flushed keeps its file on the list, so that the next write-back ends that.
#[test]
fn a_file_with_appends_that_are_not_flushed_stays_on_the_list() {
    let (storage, session) = world();
    append_by(Maker::Worker, &storage, &session, LEN);
    block_on(write_back(&storage.files, &storage.disk, from_ref(&session.opened.file), false))
        .expect("committed");
    assert!(!session.opened.file.is_clean() && storage.files.figures().dirty_files == 1);
    block_on(write_back_all(&storage.files, &storage.disk)).expect("durable");
    assert!(session.opened.file.is_clean() && storage.files.figures().dirty_files == 0);
    let (owner, key) = (session.owner, session.opened.filekey);
    drop(session);
    storage.files.close(owner, key).expect("closes");
    storage.files.trim_active();
    assert_eq!(storage.files.figures().active.regions, 0, "what is durable goes");
}

#[test]
fn a_sync_that_fails_is_told_to_who_waits() {
    // Many pages, which go to their places, and few, which go into the log.
    for pages in [20, 0] {
        let (storage, session) = world();
        let file = &session.opened.file;
        let (bytes, at) = (vec![5; pages * PAGE_SIZE_U64 as usize], WriteAt::End);
        block_on(write(&storage.files, &storage.disk, file, at, Source::Bytes(&bytes))).expect("written");
        append_by(Maker::Engine, &storage, &session, 100);
        if pages > 0 {
            storage.disk.fail_next_sync(libc::EIO);
        } else {
            storage.meta.fail_batches(true);
        }
        for round in 0..2 {
            let (changed, _) = done(&storage, file, Asked::Append);
            assert_eq!(answer(&storage, &changed), Err(Status::Io), "{pages} pages, {round}");
        }
        assert!(!answered(&storage, file, Asked::Write(0)).0, "what is before it is answered");
    }
}

/// Random turns of two appenders, one of each kind, beside syncs, write-backs and cuts.
fn turns(seed: u64, synced: &Cell<u32>, by_engine: &Cell<u32>) -> Worked {
    let (storage, session) = world();
    let (files, disk, random) = (&storage.files, &storage.disk, SeededRandom::new(seed));
    let file = &session.opened.file;
    let mut kept = Vec::new();
    let below = |bound: u64| random.next_u64() % bound;
    for _ in 0..12 {
        match below(10) {
            0..4 => {
                grant(&storage, &session, 0, file.size() + PAGE_SIZE_U64).expect("granted");
                let (at, bytes) = (file.size(), vec![2; 1 + below(150) as usize]);
                // What the engine would have to wait for is a worker's.
                if below(2) == 0 && append(&storage, &session, &bytes) == Ok(FileValue::Done(at)) {
                    by_engine.set(by_engine.get() + 1);
                } else {
                    append_by_worker(&storage, &session, at, bytes);
                }
            }
            4..7 => {
                let (waits, change) = answered(&storage, file, Asked::Append);
                synced.set(synced.get() + u32::from(waits));
                kept.push(change);
            }
            7 => {
                let from = OLD - 200;
                kept.push(answered(&storage, file, Asked::SetLen(from + below(file.size() + 1 - from))).1);
            }
            8 => block_on(write_back(files, disk, from_ref(file), false)).expect("committed"),
            _ => {
                block_on(sync(files, disk, file)).expect("durable");
                kept.clear();
            }
        }
    }
    (storage, session, kept)
}

#[test]
fn whatever_is_done_in_turns_leaves_no_zeros() {
    let (synced, by_engine) = (Cell::new(0), Cell::new(0));
    for seed in 0..60 {
        after_each_crash(
            || turns(seed, &synced, &by_engine),
            |_, next, crash| {
                let found = contents(next);
                assert!(!found.contains(&0), "seed {seed}, {crash}: of {} bytes", found.len());
            },
        );
    }
    assert!(synced.get() > 60 && by_engine.get() > 60, "{synced:?} {by_engine:?}");
}
