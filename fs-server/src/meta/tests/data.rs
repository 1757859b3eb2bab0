//! Live data and data commits.

use super::super::store::{Batch, StoreError};
use super::super::{DataCommit, MemoryStore, Meta, NoteData, Operation, RangeUpdate, Store};
use super::around::Around;
use super::{USER, World, extent};
use cuttlefs_common::attr::{SetAttr, SetTime, Timestamp};
use cuttlefs_common::ids::{FilePage, InodeNo};
use cuttlefs_common::region::{Extent, ExtentState};
use cuttlefs_common::rpc::NewNode;
use cuttlefs_common::status::Status;
use cuttlefs_common::world::ManualClock;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

const ROOT: InodeNo = InodeNo::ROOT;

fn commit(ino: InodeNo, first: u64, end: u64, extents: Vec<Extent>, size: u64) -> DataCommit {
    DataCommit::of_ranges(
        ino,
        vec![RangeUpdate { first: FilePage(first), end: FilePage(end), extents }],
        size,
    )
}

fn size(size: u64) -> SetAttr {
    SetAttr { size: Some(size), ..SetAttr::default() }
}

#[test]
fn notes_are_seen_and_not_stored() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    let before = world.attr(file);
    world.tick();
    let note = NoteData { size: Some(10_000), allocated_pages: Some(3), modified: true };
    let noted = world.meta.note_data(file, note).expect("note");
    assert_eq!((noted.size, noted.allocated_bytes), (10_000, 12_288));
    assert!(noted.mtime > before.mtime && noted.ctime == noted.mtime && noted.change > before.change);
    assert_eq!(world.attr(file), noted);
    assert_eq!(world.meta.lookup(ROOT, b"file"), Ok(noted));
    assert_eq!(World::on(world.store.clone()).attr(file).size, 0);
    assert_eq!(world.meta.note_data(ROOT, note), Err(Status::Invalid));
    assert_eq!(world.meta.note_data(InodeNo(99), note), Err(Status::Stale));
}

#[test]
fn other_operations_store_the_durable_size_and_keep_the_live_one() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    let note = NoteData { size: Some(10_000), allocated_pages: Some(3), modified: true };
    let noted = world.meta.note_data(file, note).expect("note");
    world.tick();
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    let changed = world.meta.set_attr(USER, file, &set, None).expect("chmod");
    assert_eq!((changed.size, changed.allocated_bytes, changed.mode), (10_000, 12_288, 0o600));
    assert!(changed.mtime == noted.mtime && changed.ctime > noted.ctime && changed.change > noted.change);
    let link = Operation::Link { ino: file, parent: ROOT, name: b"link" };
    let linked = world.run(&link).expect("link").attr.expect("attr");
    assert_eq!((linked.size, linked.nlink), (10_000, 2));
    let stored = World::on(world.store.clone()).attr(file);
    assert_eq!((stored.size, stored.allocated_bytes, stored.mode, stored.nlink), (0, 0, 0o600, 2));
    world.assert_sound();
}

#[test]
fn a_commit_stores_what_it_covers_and_ends_liveness_when_nothing_is_left() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    let note = NoteData { size: Some(10_000), allocated_pages: Some(3), modified: true };
    let noted = world.meta.note_data(file, note).expect("note");
    world.tick();
    world.meta.commit_data(&[commit(file, 0, 2, vec![extent(0, 50, 2)], 8192)]).expect("commit");
    assert_eq!(world.attr(file), noted);
    assert_eq!(world.meta.live_count(), 1);
    let stored = World::on(world.store.clone()).attr(file);
    assert_eq!((stored.size, stored.allocated_bytes), (8192, 8192));
    assert_eq!((stored.mtime, stored.change), (noted.mtime, noted.change));
    world.meta.commit_data(&[commit(file, 2, 3, vec![extent(2, 52, 1)], 10_000)]).expect("commit");
    assert_eq!(world.meta.live_count(), 0);
    assert_eq!(world.attr(file), noted);
    // The two extents are contiguous in the file and in the pool, so they become one record.
    assert_eq!(world.meta.extents(file), Ok(vec![extent(0, 50, 3)]));
    world.assert_sound();
}

#[test]
fn ranges_cut_split_and_join() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    let set = |first, end, extents| {
        world.meta.commit_data(&[commit(file, first, end, extents, 1 << 20)]).map(|()| {
            world.assert_sound();
            world.meta.extents(file).expect("extents")
        })
    };
    assert_eq!(set(0, 10, vec![extent(0, 100, 10)]), Ok(vec![extent(0, 100, 10)]));
    // A hole in the middle splits the extent.
    assert_eq!(set(4, 6, vec![]), Ok(vec![extent(0, 100, 4), extent(6, 106, 4)]));
    // The same pages in the hole make the extent whole again.
    assert_eq!(set(4, 6, vec![extent(4, 104, 2)]), Ok(vec![extent(0, 100, 10)]));
    let unwritten = Extent { state: ExtentState::Unwritten, ..extent(4, 104, 2) };
    assert_eq!(set(4, 6, vec![unwritten]), Ok(vec![extent(0, 100, 4), unwritten, extent(6, 106, 4)]));
    assert_eq!(
        set(3, 7, vec![extent(3, 200, 4)]),
        Ok(vec![extent(0, 100, 3), extent(3, 200, 4), extent(7, 107, 3)])
    );
    assert_eq!(set(0, u64::MAX, vec![]), Ok(vec![]));
    assert_eq!(world.attr(file).allocated_bytes, 0);
    assert_eq!(set(5, 5, vec![]), Ok(vec![]));
    for (first, end, extents) in [
        (6, 5, vec![]),
        (0, 1, vec![extent(0, 1, 2)]),
        (1, 2, vec![extent(0, 1, 1)]),
        (0, 9, vec![extent(0, 1, 0)]),
        (0, 9, vec![extent(4, 1, 2), extent(5, 9, 1)]),
        (0, 9, vec![extent(4, u64::MAX, 2)]),
        (0, u64::MAX, vec![extent(u64::MAX, 1, 2)]),
    ] {
        assert_eq!(set(first, end, extents), Err(Status::Invalid));
    }
    assert_eq!(world.meta.extents(file), Ok(vec![]));
}

#[test]
fn one_batch_for_many_files_and_ranges_and_the_gone_are_skipped() {
    let world = World::new();
    let (one, two, gone) = (world.file(ROOT, "one"), world.file(ROOT, "two"), world.file(ROOT, "gone"));
    world.unlink(ROOT, "gone").expect("unlink");
    let ranges = vec![
        RangeUpdate { first: FilePage(0), end: FilePage(2), extents: vec![extent(0, 10, 2)] },
        RangeUpdate { first: FilePage(2), end: FilePage(4), extents: vec![extent(2, 12, 2)] },
        RangeUpdate { first: FilePage(1), end: FilePage(2), extents: vec![] },
    ];
    let many = DataCommit::of_ranges(one, ranges, 16_384);
    let commits =
        [many, commit(gone, 0, 1, vec![extent(0, 90, 1)], 1), commit(two, 0, 1, vec![extent(0, 20, 1)], 5)];
    world.meta.commit_data(&commits).expect("commit");
    assert_eq!(world.meta.extents(one), Ok(vec![extent(0, 10, 1), extent(2, 12, 2)]));
    assert_eq!(world.meta.extents(two), Ok(vec![extent(0, 20, 1)]));
    let mut all = Vec::new();
    let visit = &mut |ino, extent| {
        all.push((ino, extent));
        true
    };
    world.meta.all_extents(visit).expect("all");
    assert_eq!(all, [(one, extent(0, 10, 1)), (one, extent(2, 12, 2)), (two, extent(0, 20, 1))]);
    assert_eq!(world.meta.commit_data(&[commit(ROOT, 0, 0, vec![], 0)]), Err(Status::Invalid));
    world.assert_sound();
}

#[test]
fn truncation_by_the_region_and_without_it() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    world.meta.commit_data(&[commit(file, 0, 10, vec![extent(0, 100, 10)], 40_960)]).expect("commit");
    // Three more pages are only in memory.
    let note = NoteData { size: Some(53_248), allocated_pages: Some(13), modified: true };
    world.meta.note_data(file, note).expect("note");
    let cut = commit(file, 5, u64::MAX, vec![], 20_000);
    let attr = world.meta.set_attr(USER, file, &size(20_000), Some(cut.clone())).expect("truncate");
    assert_eq!((attr.size, attr.allocated_bytes), (20_000, 8 * 4096));
    let note = NoteData { allocated_pages: Some(5), ..NoteData::default() };
    world.meta.note_data(file, note).expect("note");
    world.meta.commit_data(&[commit(file, 0, 0, vec![], 20_000)]).expect("commit");
    assert_eq!(world.meta.live_count(), 0);
    assert_eq!(world.meta.extents(file), Ok(vec![extent(0, 100, 5)]));
    assert_eq!(world.meta.set_attr(USER, file, &size(1), Some(cut.clone())), Err(Status::Invalid));
    assert_eq!(world.meta.set_attr(USER, file, &SetAttr::default(), Some(cut)), Err(Status::Invalid));
    let outcome =
        world.run(&Operation::SetAttr { ino: file, set: size(4097), commit: None }).expect("truncate");
    assert_eq!(outcome.freed, [extent(2, 102, 3)]);
    assert_eq!(world.attr(file).allocated_bytes, 8192);
    world.meta.set_attr(USER, file, &size(1 << 40), None).expect("extend");
    assert_eq!((world.attr(file).size, world.attr(file).allocated_bytes), (1 << 40, 8192));
    world.assert_sound();
}

#[test]
fn small_files_go_with_their_name_and_large_ones_in_turns() {
    let world = World::new();
    let fill = |name, count: u64, pool: u64| {
        let file = world.file(ROOT, name);
        let extents = (0..count).map(|index| extent(index * 2, pool + index * 2, 1)).collect();
        world.meta.commit_data(&[commit(file, 0, count * 2, extents, count * 8192)]).expect("commit");
        file
    };
    let small = fill("small", 64, 0);
    let gone = world.unlink(ROOT, "small").expect("unlink");
    assert_eq!((gone.reaped, gone.orphaned, gone.freed.len()), (Some(small), None, 64));
    let large = fill("large", 3000, 10_000);
    let kept = world.unlink(ROOT, "large").expect("unlink");
    assert_eq!((kept.reaped, kept.orphaned, kept.freed.len()), (None, Some(large), 0));
    world.assert_sound();
    let first = world.run(&Operation::ReapOrphan { ino: large, below: FilePage(u64::MAX) }).expect("reap");
    assert!(first.more && first.freed.len() == 1024);
    world.assert_sound();
    // The next server goes on with the reap.
    let world = World::on(world.store.clone());
    assert_eq!(world.meta.orphans(), [large]);
    // A step scans only below the page where the step before ended: above it are removed records, which a scan would pass one by one.
    let (freed, next) = world.meta.reap_step(large, FilePage(2 * 1200)).expect("reap");
    assert_eq!(freed.iter().map(|extent| extent.file_page.0).max(), Some(2 * 1199));
    assert_eq!((freed.len(), next), (1024, Some(FilePage(2 * 176))));
    let freed = world.meta.reap(large).expect("reap");
    assert_eq!(freed.len(), 3000 - 2 * 1024);
    assert_eq!((world.meta.orphans(), world.meta.inode_count()), (vec![], 1));
    world.assert_sound();
}

#[test]
fn notes_race_with_other_operations_and_none_is_lost() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    const TURNS: u64 = 2000;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 1..=TURNS {
                let note = NoteData { size: Some(turn), allocated_pages: Some(1), modified: true };
                let noted = world.meta.note_data(file, note).expect("note");
                assert_eq!(noted.size, turn);
            }
        });
        scope.spawn(|| {
            for turn in 0..TURNS {
                let set = SetAttr { mode: Some((turn % 512) as u16), ..SetAttr::default() };
                let changed = world.meta.set_attr(USER, file, &set, None).expect("chmod");
                assert_eq!(changed.mode, (turn % 512) as u16);
            }
        });
        scope.spawn(|| {
            for _ in 0..TURNS {
                world.meta.commit_data(&[commit(file, 0, 1, vec![extent(0, 9, 1)], 1)]).expect("commit");
            }
        });
        let mut change = 0;
        for _ in 0..TURNS {
            let attr = world.attr(file);
            assert!(attr.change >= change, "the counter went back");
            change = attr.change;
        }
    });
    let attr = world.attr(file);
    assert_eq!((attr.size, attr.mode), (TURNS, ((TURNS - 1) % 512) as u16));
    world.meta.commit_data(&[commit(file, 0, 0, vec![], TURNS)]).expect("commit");
    assert_eq!(world.meta.live_count(), 0);
    assert_eq!(world.attr(file), attr);
    world.assert_sound();
}

/// What another thread does in the midst of a commit, before or after the batch is in the store.
type Interruption = Box<dyn FnOnce() + Send>;

struct Interrupted {
    inner: MemoryStore,
    interruption: Mutex<Option<(bool, Interruption)>>,
}

impl Interrupted {
    fn interrupt(&self, stored: bool) {
        let mut interruption = self.interruption.lock();
        if interruption.as_ref().is_some_and(|(when, _)| *when == stored)
            && let Some((_, happen)) = interruption.take()
        {
            drop(interruption);
            happen();
        }
    }
}

impl Around for Interrupted {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    fn commit_batch(&self, batch: Batch) -> Result<(), StoreError> {
        self.interrupt(false);
        self.inner.commit(batch)?;
        self.interrupt(true);
        Ok(())
    }
}

#[test]
fn a_note_in_the_midst_of_a_batch_comes_after_it() {
    let modified = NoteData { modified: true, ..NoteData::default() };
    for (live, stored, is_held) in (0..8).map(|case| (case & 1 > 0, case & 2 > 0, case & 4 > 0)) {
        let store = Arc::new(Interrupted { inner: MemoryStore::new(), interruption: Mutex::default() });
        super::format(&*store);
        let clock = Arc::new(ManualClock::default());
        let meta = Arc::new(Meta::open(store.clone(), clock.clone()).expect("open"));
        let make = Operation::Make { parent: ROOT, name: b"file", node: NewNode::File, mode: 0o644 };
        let file = meta.execute(USER, &make, &|_| false).expect("make").attr.expect("attr").ino;
        if live {
            meta.note_data(file, modified).expect("note");
        }
        let held = is_held.then(|| meta.hold_live(file).expect("held"));
        let (give, take) = std::sync::mpsc::channel();
        let (noting, ticking) = (meta.clone(), clock.clone());
        let note = Box::new(move || {
            ticking.advance(Duration::from_millis(1));
            give.send(noting.note_data(file, modified).expect("note")).expect("somebody takes it");
        });
        *store.interruption.lock() = Some((stored, note));
        let future = Timestamp { secs: 4_000_000_000, nanos: 0 };
        let set = SetAttr { mtime: Some(SetTime::At(future)), ..SetAttr::default() };
        meta.set_attr(USER, file, &set, None).expect("times");
        let noted = take.recv().expect("noted");
        // The note is newer than the stored record, and the record has the times that set_attr set.
        let in_store = World::on(store.clone()).attr(file);
        assert_eq!(in_store.mtime, future);
        assert!(in_store.change < noted.change, "live {live}, stored {stored}: {in_store:?}, {noted:?}");
        let attr = meta.attr(file).expect("attr");
        assert_eq!((attr.mtime, attr.ctime), (noted.mtime, noted.ctime), "live {live}, stored {stored}");
        // The next operation is newer than the note.
        meta.set_attr(USER, file, &set, None).expect("times");
        assert!(World::on(store.clone()).attr(file).change > noted.change);
        assert_eq!(meta.attr(file).expect("attr").mtime, future);
        drop(held);
        assert_eq!(meta.live_count(), 0, "live {live}, stored {stored}, held {is_held}");
    }
}

#[test]
fn an_inode_that_is_held_stays_live() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    let modified = NoteData { modified: true, ..NoteData::default() };
    assert!(!world.meta.notes_at_once(file));
    let (held, again) =
        (world.meta.hold_live(file).expect("held"), world.meta.hold_live(file).expect("held"));
    for _ in 0..2 {
        assert!(world.meta.notes_at_once(file));
        let noted = world.meta.note_data(file, modified).expect("note");
        world.tick();
        world.meta.commit_data(&[DataCommit::of_ranges(file, vec![], 0)]).expect("commit");
        assert!(world.meta.notes_at_once(file), "as soon as all of it is durable, too");
        assert_eq!(world.attr(file), noted);
        let set = SetAttr { mode: Some(0o611), ..SetAttr::default() };
        let set = world.meta.set_attr(USER, file, &set, None).expect("mode");
        assert_eq!((set.mode, set.change), (0o611, noted.change + 1));
        assert_eq!(World::on(world.store.clone()).attr(file), world.attr(file));
    }
    drop(held);
    let noted = world.meta.note_data(file, modified).expect("note");
    drop(again);
    assert_eq!(world.attr(file), noted, "what is not durable stays");
    world.meta.commit_data(&[DataCommit::of_ranges(file, vec![], 0)]).expect("commit");
    assert_eq!(world.meta.live_count(), 0);
    drop(world.meta.hold_live(file).expect("held"));
    assert_eq!(world.meta.live_count(), 0);
    let held = world.meta.hold_live(file).expect("held");
    world.run(&Operation::Unlink { parent: ROOT, name: b"file" }).expect("unlinked");
    assert!(!world.meta.notes_at_once(file), "it is gone");
    drop(held);
    assert_eq!(world.meta.hold_live(file).err(), Some(Status::Stale));
    world.assert_sound();
}
