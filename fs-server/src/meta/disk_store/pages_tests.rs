//! The map of pages agrees with the extents after any changes, whichever of them are in a checkpoint, and wherever the store died.

use super::*;
use crate::bits;
use crate::meta::page_map::{NO_PAGES, PART_PAGES, PageMap, PartBits, PartKey};
use crate::meta::problem::ProblemKind;
use crate::meta::record::{self, ExtentRecord};
use crate::meta::survey::Survey;
use crate::meta::{Format, HashKey, Meta, key, repair};
use cuttlefs_common::attr::Timestamp;
use cuttlefs_common::ids::{FilePage, InodeNo, PoolPage};
use cuttlefs_common::region::ExtentState;
use cuttlefs_common::world::SystemClock;
use proptest::prelude::*;
use std::collections::BTreeMap;

const POOL_PAGES: u64 = 2 * PART_PAGES + 100;
const HASH_KEY: HashKey = HashKey([3; 16]);

fn opened(path: &Path) -> DiskStore {
    let options = DiskOptions {
        cache_bytes: 1 << 20,
        reserve_bytes: 0,
        checkpoint_bytes: 6 << 10,
        ..DiskOptions::default()
    };
    DiskStore::open(path, options).expect("open")
}

fn kept(store: &dyn Store) -> (BTreeMap<PartKey, PartBits>, u64) {
    let mut parts = BTreeMap::new();
    let contradictions = store.pages(&mut |key, bits| parts.extend([(key, *bits)])).expect("reads");
    parts.retain(|_, bits| *bits != NO_PAGES);
    (parts, contradictions)
}

/// Makes the map anew from all extents.
fn counted(store: &dyn Store) -> BTreeMap<PartKey, PartBits> {
    let (mut map, all) = (PageMap::default(), key::all(key::tag::EXTENT));
    let add: Visitor<'_> = &mut |key, value| {
        map.add(key, value);
        true
    };
    store.scan(&all.from, &all.to, Direction::Forward, add).expect("scan");
    assert_eq!(map.contradictions, 0);
    let mut parts = BTreeMap::new();
    map.visit(&mut |key, bits| parts.extend([(key, *bits)]));
    parts
}

fn assert_agrees(store: &dyn Store) {
    let (parts, contradictions) = kept(store);
    assert_eq!(contradictions, 0);
    assert!(parts == counted(store), "the map is not that of the extents");
}

#[derive(Clone, Debug)]
enum Step {
    /// Adds an extent at a file page, with free pool pages: the first run of them behind `from`.
    Put { ino: u64, page: u64, from: u64, len: u64, unwritten: bool },
    /// Removes an extent.
    Remove { which: usize },
    /// Moves an extent to another file and page, in one batch.
    Move { which: usize, ino: u64, page: u64 },
    /// The same in two batches.
    MoveLater { which: usize, ino: u64, page: u64 },
    /// The extent's pages have bytes from now on.
    Write { which: usize },
    /// Kills the server: the next one has the files as they are.
    Kill,
    /// Stops the server.
    Stop,
}

fn step() -> impl Strategy<Value = Step> {
    let at = || (0u64..20, 0u64..40);
    prop_oneof![
        8 => (at(), 0..POOL_PAGES, prop_oneof![1u64..4, 1u64..PART_PAGES + 50], any::<bool>())
            .prop_map(|((ino, page), from, len, unwritten)| Step::Put { ino, page, from, len, unwritten }),
        3 => any::<usize>().prop_map(|which| Step::Remove { which }),
        3 => (any::<usize>(), at()).prop_map(|(which, (ino, page))| Step::Move { which, ino, page }),
        3 => (any::<usize>(), at()).prop_map(|(which, (ino, page))| Step::MoveLater { which, ino, page }),
        3 => any::<usize>().prop_map(|which| Step::Write { which }),
        1 => Just(Step::Kill),
        1 => Just(Step::Stop),
    ]
}

/// Copies the files as a kill leaves them. Waits for the end of a checkpoint first, because the files cannot be copied at one moment in the midst of
/// one; `meta::tests::power` tests that case.
fn copy_killed(store: &DiskStore, from: &Path, to: &Path) {
    let mut last = store.shared.last.lock();
    while store.shared.layers().frozen.is_some() {
        store.shared.turned.wait_for(&mut last, IDLE_WAIT);
    }
    std::fs::create_dir(to).expect("makes a directory");
    for file in std::fs::read_dir(from).expect("lists").map(|file| file.expect("lists")) {
        std::fs::copy(file.path(), to.join(file.file_name())).expect("copies");
    }
}

/// The extents that should be there, by inode and page. They may overlap in their files, which does not matter to the map.
type Extents = BTreeMap<(u64, u64), ExtentRecord>;

fn put(batch: &mut Batch, extents: &mut Extents, at: (u64, u64), extent: ExtentRecord) {
    extents.insert(at, extent);
    batch.put(key::extent(InodeNo(at.0), FilePage(at.1)), record::encode(&extent));
}

fn take(batch: &mut Batch, extents: &mut Extents, which: usize) -> Option<ExtentRecord> {
    let at = *extents.keys().nth(which % extents.len().max(1))?;
    batch.remove(key::extent(InodeNo(at.0), FilePage(at.1)));
    extents.remove(&at)
}

fn run(steps: Vec<Step>) {
    let directory = tempfile::tempdir().expect("directory");
    let mut path = directory.path().join("meta");
    let mut store = opened(&path);
    let mut extents = Extents::new();
    for (number, step) in steps.into_iter().enumerate() {
        let mut batch = Batch::default();
        // A record that fills the overlay, so that checkpoints are made all the time.
        batch.put(*b"Zfill", vec![number as u8; 700]);
        match step {
            Step::Put { ino, page, from, len, unwritten } => {
                let used =
                    extents.values().map(|extent| extent.pool_page.0..extent.pool_page.0 + extent.len_pages);
                let used = bits::of(POOL_PAGES, used);
                let run = bits::next_run(&used, from..POOL_PAGES.min(from + len), false);
                let (Some(run), false) = (run, extents.contains_key(&(ino, page))) else { continue };
                let state = if unwritten { ExtentState::Unwritten } else { ExtentState::Written };
                let extent =
                    ExtentRecord { pool_page: PoolPage(run.start), len_pages: run.end - run.start, state };
                put(&mut batch, &mut extents, (ino, page), extent);
            }
            Step::Remove { which } => drop(take(&mut batch, &mut extents, which)),
            Step::Move { which, ino, page } | Step::MoveLater { which, ino, page }
                if !extents.contains_key(&(ino, page)) =>
            {
                let Some(extent) = take(&mut batch, &mut extents, which) else { continue };
                if matches!(step, Step::MoveLater { .. }) {
                    store.commit(std::mem::take(&mut batch)).expect("commits");
                }
                put(&mut batch, &mut extents, (ino, page), extent);
            }
            Step::Move { .. } | Step::MoveLater { .. } => continue,
            Step::Write { which } => {
                let Some((at, extent)) = extents.iter().nth(which % extents.len().max(1)) else { continue };
                let (at, extent) = (*at, ExtentRecord { state: ExtentState::Written, ..*extent });
                put(&mut batch, &mut extents, at, extent);
            }
            Step::Kill => {
                let copy = directory.path().join(format!("killed{number}"));
                copy_killed(&store, &path, &copy);
                (store, path) = (opened(&copy), copy);
            }
            Step::Stop => {
                drop(store);
                store = opened(&path);
            }
        }
        store.commit(batch).expect("commits");
        assert_agrees(&store);
    }
    let found: Extents = {
        let (mut found, all) = (Extents::new(), key::all(key::tag::EXTENT));
        let add: Visitor<'_> = &mut |key, value| {
            let (ino, page) = key::parse_paged(key).expect("its key");
            found.insert((ino.0, page.0), ExtentRecord::parse(page, value).expect("its value"));
            true
        };
        store.scan(&all.from, &all.to, Direction::Forward, add).expect("scan");
        found
    };
    assert_eq!(found, extents, "the model is the store");
    let before = kept(&store);
    store.recount().expect("recounts");
    assert!(kept(&store) == before, "made anew it is the same");
    drop(store);
    assert!(kept(&opened(&path)) == before);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn the_map_is_that_of_the_extents(steps in proptest::collection::vec(step(), 1..150)) {
        run(steps);
    }
}

/// A store with a file that has the pool pages 100 to 109.
fn with_a_file(path: &Path) -> DiskStore {
    let store = opened(path);
    let format = Format { uuid: [1; 16], hash_key: HASH_KEY, root: Default::default(), root_mode: 0o755 };
    Meta::format(&store, &SystemClock::new(), &format).expect("formats");
    let mut batch = Batch::default();
    let extent = ExtentRecord { pool_page: PoolPage(100), len_pages: 10, state: ExtentState::Written };
    let ino = InodeNo(9);
    let file = record::InodeRecord {
        kind: cuttlefs_common::attr::FileKind::File,
        nlink: 0,
        size: 40960,
        allocated_pages: 10,
        parent: InodeNo(0),
        ..record::parse_inode(&store.get(&key::inode(InodeNo::ROOT)).expect("reads").expect("there"))
            .expect("parses")
    };
    batch.put(key::inode(ino), record::encode(&file));
    batch.put(key::orphan(ino), record::encode(&record::BytesRecord { bytes: b"" }));
    batch.put(key::extent(ino, FilePage(0)), record::encode(&extent));
    batch.put(key::NEXT_INO, record::encode(&record::CounterRecord(10)));
    store.commit(batch).expect("commits");
    store.settle().expect("a checkpoint has it");
    drop(store);
    opened(path)
}

fn problems(store: &DiskStore) -> Vec<(ProblemKind, String)> {
    let survey = Survey::of(store, HASH_KEY, POOL_PAGES).expect("reads");
    survey.problems.iter().map(|problem| (problem.kind, problem.to_string())).collect()
}

fn assert_repairs(store: &DiskStore) {
    let (repaired, left) = repair(store, HASH_KEY, POOL_PAGES, Timestamp::default()).expect("repairs");
    assert!(repaired.iter().any(|problem| problem.kind == ProblemKind::PageMap), "{repaired:?}");
    assert_eq!(left.problems, []);
    assert_agrees(store);
}

#[test]
fn wrong_bits_are_found_and_mended() {
    type Plant = (u64, u64, bool, &'static str);
    let plants: [Plant; 4] = [
        (0, 105, false, "1 pages, the first is 105"),
        (0, 110, true, "1 pages, the first is 110"),
        (1, 103, true, "1 pages, the first is 103"),
        (2, 7, true, "1 pages, the first is 8199"),
    ];
    for (part, page, value, told) in plants {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("meta");
        let store = with_a_file(&path);
        assert_eq!(problems(&store), []);
        store.shared.checkpoint().plant(PartKey(part), |bits| bits::fill(bits, page..page + 1, value));
        drop(store);
        let store = opened(&path);
        let found = problems(&store);
        assert!(matches!(&found[..], [(ProblemKind::PageMap, what)] if what.contains(told)), "{found:?}");
        assert_repairs(&store);
        drop(store);
        assert_eq!(problems(&opened(&path)), [], "for good");
    }
}

#[test]
fn a_store_without_the_map_gets_one() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("meta");
    let store = with_a_file(&path);
    let before = kept(&store);
    assert!(!before.0.is_empty());
    store.shared.checkpoint().forget_pages();
    drop(store);
    let store = opened(&path);
    assert!(kept(&store) == before);
    assert_eq!(problems(&store), []);
}

#[test]
fn a_change_of_wrong_bits_is_told_at_the_next_start_and_mended() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("meta");
    let store = with_a_file(&path);
    store.shared.checkpoint().plant(PartKey(0), |bits| bits::fill(bits, 104..106, false));
    drop(store);
    let store = opened(&path);
    let mut batch = Batch::default();
    let extent = ExtentRecord { pool_page: PoolPage(100), len_pages: 10, state: ExtentState::Unwritten };
    batch.put(key::extent(InodeNo(9), FilePage(0)), record::encode(&extent));
    store.commit(batch).expect("commits");
    // The change itself made the bits right again. But other files may have got the pages while the bits were wrong, so the contradictions are still
    // told.
    assert_eq!(kept(&store).1, 2);
    drop(store);
    let store = opened(&path);
    assert_eq!(kept(&store).1, 2);
    assert_repairs(&store);
}

#[test]
fn a_page_that_two_extents_name_is_told_and_mended() {
    let directory = tempfile::tempdir().expect("directory");
    let path = directory.path().join("meta");
    let store = with_a_file(&path);
    let mut batch = Batch::default();
    let extent = ExtentRecord { pool_page: PoolPage(108), len_pages: 4, state: ExtentState::Written };
    batch.put(key::extent(InodeNo(9), FilePage(20)), record::encode(&extent));
    store.commit(batch).expect("commits");
    assert_eq!(kept(&store).1, 2, "told while it is in no checkpoint");
    store.settle().expect("a checkpoint has it");
    drop(store);
    let store = opened(&path);
    assert_eq!(kept(&store).1, 2);
    assert!(problems(&store).iter().any(|(kind, _)| *kind == ProblemKind::PoolOverlap));
    assert_repairs(&store);
    drop(store);
    assert_eq!(problems(&opened(&path)), []);
}
