//! Recovery at a start: the table "Recovery, whole" of docs/log.md, row by row. Each case makes the state of its row on a disk, and opens it. Rows
//! about the pool's pages are tested in `files::tests` and `pool::sums::tests`; here is the metadata.

use super::super::disk_store::made::{self, DIRECT, LIFE, TAILS, record, tail};
use super::super::{
    Batch, DataCommit, DiskStore, Images, Operation, PageImage, Plane, RangeUpdate, Store, StoreError,
};
use super::crash::{copy_files, open, options};
use super::{USER, World, cut, extent, format};
use crate::meta::{Answer, Caller, RequestId};
use cuttlefs_common::ids::{ClientId, FilePage, InodeNo, PoolPage, SlotIndex};
use std::path::{Path, PathBuf};

/// The rows of the table, each with its test.
const TABLE: &[(&str, fn())] = &[
    ("a header of another version", a_header_of_another_version),
    ("no header in either file", no_header_in_either_file),
    ("a header rotten in one", a_header_rotten_in_one),
    ("a record of another life, or with a number that the checkpoint has", an_old_record),
    ("the next number", the_next_number),
    ("the same record in `tail-*` and `direct-*`", the_same_record_in_tail_and_direct),
    ("records in `direct-*` of a life that no `tail-*` has", records_in_direct_of_a_life_that_no_tail_has),
    (
        "the next number is missing, `persistent` of all found is below it",
        the_next_number_is_missing_and_was_not_durable,
    ),
    ("the same, `persistent` or `meta/flushed` is not below it", the_next_number_is_missing_and_was_durable),
    ("all of these records in one of `tail-*`, no whole one behind a gap", all_in_one_tail),
    ("the same, in one of `tail-*` and then in the other", all_in_one_tail_and_then_in_the_other),
    ("anything else", anything_else),
    ("a checkpoint with map and tally", a_checkpoint_with_map_and_tally),
    ("images", images),
    ("cuts in steps", cut::the_next_server_finishes_a_cut_that_was_begun),
    ("orphans", orphans),
    ("requests that were done", requests_that_were_done),
    ("zones with a mark", zones_with_a_mark),
];

#[test]
fn the_table_in_the_documents_is_this_one() {
    let document = include_str!("../../../../docs/log.md");
    let (_, behind) = document.split_once("## Recovery, whole").expect("the section");
    let section = behind.split("\n## ").next().expect("a part");
    let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next()).skip(1);
    let rows: Vec<_> = rows.filter(|found| !found.starts_with("---")).collect();
    assert_eq!(rows, TABLE.iter().map(|(found, _)| *found).collect::<Vec<_>>());
}

/// A store on disk whose checkpoint has the batches 1 and 2, without the file that says which batches were durable.
struct Made {
    directory: tempfile::TempDir,
}

fn batch(number: u64) -> Batch {
    let mut batch = Batch::default();
    batch.put([b'Z', number as u8], vec![number as u8; 40]);
    batch
}

/// A record of the log with a whole batch, in the life of the test's log.
fn whole(number: u64) -> Vec<u8> {
    record(LIFE, 0, number, &batch(number))
}

/// The numbers of the batches that the store has, in order.
fn numbers(store: &DiskStore) -> Vec<u8> {
    let mut found = Vec::new();
    let visit: crate::meta::Visitor<'_> = &mut |key, value| {
        assert_eq!(value, [key[1]; 40]);
        found.push(key[1]);
        true
    };
    store.scan(b"Z", b"[", crate::meta::Direction::Forward, visit).expect("scan");
    found
}

impl Made {
    fn new(files: &[(&str, Vec<u8>)]) -> Self {
        let made = Self { directory: tempfile::tempdir().expect("directory") };
        let store = open(made.at());
        (1..=2).for_each(|number| store.commit(batch(number)).expect("commits"));
        store.settle().expect("settles");
        drop(store);
        std::fs::remove_file(made.file("flushed")).expect("there");
        TAILS.iter().for_each(|name| made.write(name, &tail(LIFE, &[])));
        files.iter().for_each(|(name, bytes)| made.write(name, bytes));
        made
    }

    fn at(&self) -> &Path {
        self.directory.path()
    }

    fn file(&self, name: &str) -> PathBuf {
        self.at().join(name)
    }

    fn write(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.file(name), bytes).expect("write");
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.file(name)).expect("read")
    }

    /// Checks that a start finds exactly the batches up to `last`, and that later starts find these and the two batches that are committed behind
    /// them, and nothing else from the files.
    fn opens_with(&self, last: u8) {
        let mut expected: Vec<u8> = (1..=last).collect();
        let store = open(self.at());
        assert_eq!(numbers(&store), expected);
        for more in [200, 201] {
            store.commit(batch(more)).expect("commits");
            expected.push(more as u8);
        }
        let killed = tempfile::tempdir().expect("directory");
        copy_files(self.at(), killed.path());
        for _ in 0..2 {
            let store = open(killed.path());
            assert_eq!(numbers(&store), expected);
            store.settle().expect("settles");
        }
        drop(store);
        assert_eq!(numbers(&open(self.at())), expected);
    }

    fn refused(&self) -> String {
        let before = TAILS.map(|name| self.read(name));
        let refused: Result<DiskStore, StoreError> = DiskStore::open(self.at(), options());
        assert_eq!(TAILS.map(|name| self.read(name)), before, "it is left as it is");
        refused.expect_err("it does not start").to_string()
    }

    fn life(&self, file: usize) -> Option<u64> {
        made::life_in(self.at(), TAILS[file])
    }
}

#[test]
fn a_header_of_another_version() {
    for version in ["04", "06"] {
        let made = Made::new(&[(TAILS[1], made::tail_of_version(version, LIFE, &[whole(3)]))]);
        let why = made.refused();
        assert!(why.contains(&format!("of version {version}")), "{why}");
    }
}

#[test]
fn no_header_in_either_file() {
    for none in [vec![], vec![0; 24], [vec![0; 24], whole(3)].concat()] {
        let files =
            [(TAILS[0], none.clone()), (TAILS[1], none.clone()), (DIRECT[0], made::direct(&[whole(3)]))];
        Made::new(&files).opens_with(2);
    }
    let gone = Made::new(&[]);
    TAILS.iter().for_each(|name| std::fs::remove_file(gone.file(name)).expect("there"));
    gone.opens_with(2);
}

#[test]
fn a_header_rotten_in_one() {
    let (older, newer) = (tail(LIFE, &[whole(3)]), tail(LIFE, &[whole(4)]));
    for (file, bit) in (0..24 * 8).step_by(5).map(|bit| (bit % 2, bit)) {
        let mut files = [older.clone(), newer.clone()];
        files[file][bit / 8] ^= 1 << (bit % 8);
        let made = Made::new(&[(TAILS[0], files[0].clone()), (TAILS[1], files[1].clone())]);
        assert_eq!(numbers(&open(made.at())), [1, 2, 3, 4], "file {file}, bit {bit}");
        let lives = [made.life(0), made.life(1)];
        assert!(lives[0].is_some() && lives[0] == lives[1] && lives[0] != Some(LIFE), "another life begins");
    }
}

#[test]
fn an_old_record() {
    let of_another = record(LIFE ^ 6, 0, 3, &batch(99));
    Made::new(&[(TAILS[0], tail(LIFE, std::slice::from_ref(&of_another)))]).opens_with(2);
    // A record of a batch that is in the checkpoint is skipped, whatever its bytes are, both in front of new records and behind them.
    let had = record(LIFE, 0, 2, &batch(99));
    Made::new(&[(TAILS[0], tail(LIFE, &[had.clone(), whole(3), of_another, had]))]).opens_with(3);
}

#[test]
fn the_next_number() {
    Made::new(&[(TAILS[0], tail(LIFE, &[whole(3)]))]).opens_with(3);
    Made::new(&[(TAILS[1], tail(LIFE, &[whole(3), whole(4), whole(5)]))]).opens_with(5);
}

#[test]
fn the_same_record_in_tail_and_direct() {
    let direct = made::direct(&[whole(3), whole(4)]);
    let made = Made::new(&[(TAILS[0], tail(LIFE, &[whole(3), whole(4), whole(5)])), (DIRECT[1], direct)]);
    made.opens_with(5);
    assert_eq!(made.life(0), Some(LIFE), "nothing is missing in the log");
}

#[test]
fn records_in_direct_of_a_life_that_no_tail_has() {
    let other = |number| record(LIFE ^ 6, 0, number, &batch(number));
    let files = [(TAILS[0], tail(LIFE, &[whole(3)])), (DIRECT[0], made::direct(&[other(3), other(4)]))];
    Made::new(&files).opens_with(3);
}

#[test]
fn the_next_number_is_missing_and_was_not_durable() {
    let later = |number| record(LIFE, 3, number, &batch(number));
    for (name, bytes) in [
        (TAILS[0], tail(LIFE, &[whole(3), later(5)])),
        (TAILS[0], tail(LIFE, &[whole(3), later(6), later(7)])),
    ] {
        Made::new(&[(name, bytes)]).opens_with(3);
    }
    // The next server gives the missing numbers out again, so a record behind the gap would follow one of its batches if it were kept.
    Made::new(&[(TAILS[0], tail(LIFE, &[whole(3)])), (TAILS[1], tail(LIFE, &[later(5)]))]).opens_with(3);
    Made::new(&[(TAILS[0], tail(LIFE, &[whole(3)])), (DIRECT[0], made::direct(&[later(5)]))]).opens_with(3);
    Made::new(&[(DIRECT[0], made::direct(&[whole(4), whole(5)]))]).opens_with(2);
}

#[test]
fn the_next_number_is_missing_and_was_durable() {
    let says = |durable, number| record(LIFE, durable, number, &batch(number));
    for files in [
        [(TAILS[0], tail(LIFE, &[whole(3), says(4, 5)])), (TAILS[1], tail(LIFE, &[]))],
        [(TAILS[0], tail(LIFE, &[whole(4)])), (DIRECT[0], made::direct(&[says(3, 5)]))],
        [(TAILS[0], tail(LIFE, &[])), (TAILS[1], tail(LIFE, &[says(3, 4)]))],
    ] {
        let why = Made::new(&files).refused();
        assert!(why.contains("is damaged in meta/tail-*"), "{why}");
    }
    // The last durable batch rotted, and only the file `flushed` says so.
    let made = Made::new(&[]);
    let store = open(made.at());
    store.commit(batch(3)).expect("commits");
    store.flush().expect("flushes");
    drop(store);
    TAILS.iter().for_each(|name| made.write(name, &tail(LIFE, &[])));
    let why = made.refused();
    assert!(why.contains("batch 3 was durable and the last one found is 2"), "{why}");
}

#[test]
fn all_in_one_tail() {
    let log = tail(LIFE, &[whole(3), whole(4)]);
    // A kill cut the last record off. Behind it are zeros, or an old record that the checkpoint has.
    let fifth = whole(5);
    for cut in (0..fifth.len()).step_by(7) {
        for behind in [vec![], vec![0; 4096], whole(1)] {
            let bytes = [&log[..], &fifth[..cut], &behind].concat();
            let made = Made::new(&[(TAILS[0], bytes.clone())]);
            let store = open(made.at());
            assert_eq!(
                (numbers(&store), made.read(TAILS[0])),
                (vec![1, 2, 3, 4], bytes),
                "nothing is written"
            );
            assert_eq!(made.life(0), Some(LIFE), "and it goes on there");
            drop(store);
            made.opens_with(4);
        }
    }
}

#[test]
fn all_in_one_tail_and_then_in_the_other() {
    for [older, newer] in [[0, 1], [1, 0]] {
        let files = [(TAILS[older], vec![whole(3), whole(4)]), (TAILS[newer], vec![whole(5)])];
        let made = Made::new(&files.map(|(name, records)| (name, tail(LIFE, &records))));
        let store = open(made.at());
        assert_eq!(numbers(&store), [1, 2, 3, 4, 5]);
        assert_eq!([made.life(0), made.life(1)], [Some(LIFE); 2]);
        // The checkpoint that the start began has the batches of the older file only. Those of the newer file stay in the log, and the log goes on in
        // that file.
        store.commit(batch(6)).expect("commits");
        while store.figures().since_checkpoint > 1000 {
            std::thread::yield_now();
        }
        let newer = made.read(TAILS[newer]);
        let sixth = record(LIFE, 5, 6, &batch(6));
        assert!(newer.starts_with(&tail(LIFE, &[whole(5), sixth])), "{} bytes", newer.len());
        drop(store);
        made.opens_with(6);
    }
}

#[test]
fn anything_else() {
    // A durable batch is in a direct write only; or the log's records are in an order that no server writes.
    for files in [
        [(TAILS[0], tail(LIFE, &[whole(3)])), (DIRECT[0], made::direct(&[whole(4)]))],
        [(TAILS[0], tail(LIFE, &[whole(3), whole(5)])), (TAILS[1], tail(LIFE, &[whole(4)]))],
        [(TAILS[0], tail(LIFE, &[whole(3), whole(4)])), (TAILS[1], tail(LIFE, &[whole(6)]))],
    ] {
        let made = Made::new(&files);
        let store = open(made.at());
        let lives = [made.life(0), made.life(1)];
        assert!(lives[0].is_some() && lives[0] == lives[1] && lives[0] != Some(LIFE), "another life begins");
        assert_eq!([made.read(TAILS[0]).len(), made.read(TAILS[1]).len()], [24; 2], "in empty files");
        let last = numbers(&store).len() as u8;
        drop(store);
        made.opens_with(last);
    }
}

/// A file system after a kill: `run` changed it after a checkpoint.
fn killed(run: impl FnOnce(&World)) -> (tempfile::TempDir, World) {
    let directory = tempfile::tempdir().expect("directory");
    let (first, copy) = (directory.path().join("first"), directory.path().join("copy"));
    let store = open(&first);
    format(&*store);
    store.settle().expect("settles");
    let world = World::on(store);
    run(&world);
    copy_files(&first, &copy);
    (directory, World::on(open(&copy)))
}

/// Makes a file whose page 0 is page 40 of the pool.
fn with_a_page(world: &World, images: Images) -> InodeNo {
    let ino = world.file(InodeNo::ROOT, "file");
    let range = RangeUpdate { first: FilePage(0), end: FilePage(1), extents: vec![extent(0, 40, 1)] };
    let commit = DataCommit { images, ..DataCommit::of_ranges(ino, vec![range], 4096) };
    world.meta.commit_data(&[commit]).expect("commit");
    ino
}

fn named_pages(world: &World) -> Vec<u64> {
    let mut found = Vec::new();
    let contradictions = world.meta.pages(&mut |key, bits| {
        if key.plane() == Plane::Named {
            found.extend((0..64).filter(|page| bits[0] >> page & 1 == 1));
        }
    });
    assert_eq!(contradictions, Ok(0));
    found
}

#[test]
fn a_checkpoint_with_map_and_tally() {
    let (_directory, world) = killed(|world| {
        with_a_page(world, Images::Follow);
        world.store.settle().expect("settles");
    });
    assert_eq!((world.meta.inode_count(), named_pages(&world)), (2, vec![40]));
    // The log changes both the map and the tally.
    let (_directory, world) = killed(|world| {
        with_a_page(world, Images::Follow);
        world.store.settle().expect("settles");
        world.unlink(InodeNo::ROOT, "file").expect("unlink");
        world.directory(InodeNo::ROOT, "directory");
        world.directory(InodeNo::ROOT, "another");
    });
    assert_eq!((world.meta.inode_count(), named_pages(&world)), (3, vec![]));
    world.assert_sound();
}

#[test]
fn images() {
    let image = PageImage { page: FilePage(0), bytes: vec![7; 100] };
    let (_directory, world) = killed(|world| {
        with_a_page(world, Images::Put(vec![image]));
    });
    let found = world.meta.images(None, 9).expect("images");
    let [found] = &found[..] else { panic!("{found:?}") };
    assert_eq!((found.pool_page, &found.bytes), (Some(PoolPage(40)), &vec![7; 100]));
    world.meta.drop_images().expect("removed");
    assert_eq!(World::on(world.store.clone()).meta.images(None, 9), Ok(vec![]));
}

#[test]
fn orphans() {
    let mut ino = InodeNo(0);
    let (_directory, world) = killed(|world| {
        ino = with_a_page(world, Images::Follow);
        let unlink = Operation::Unlink { parent: InodeNo::ROOT, name: b"file" };
        world.run_open(&unlink, &|_| true).expect("unlink");
    });
    assert_eq!((world.meta.orphans(), named_pages(&world)), (vec![ino], vec![40]), "kept");
    world.meta.reap(ino).expect("freed");
    let next = World::on(world.store.clone());
    assert_eq!((next.meta.orphans(), named_pages(&next)), (vec![], vec![]));
}

#[test]
fn requests_that_were_done() {
    let request = |seq| RequestId { client: ClientId(7), slot: SlotIndex(3), seq };
    let mut done = None;
    let (_directory, world) = killed(|world| {
        let caller = Caller { request: Some(request(41)), ..USER };
        let create = Operation::Create { parent: InodeNo::ROOT, name: b"file", mode: 0o600, exclusive: true };
        let made = world.meta.execute(caller, &create, &|_| false).expect("made").attr.expect("told");
        done = Some(Answer::Attr(made));
    });
    assert_eq!((world.meta.answer_to(request(41)), world.meta.answer_to(request(42))), (Ok(done), Ok(None)));
}

#[test]
fn zones_with_a_mark() {
    let (_directory, world) = killed(|world| {
        world.meta.put_marks(&[3, 9], true).expect("marked");
        world.meta.put_marks(&[3], false).expect("done");
    });
    assert_eq!(world.meta.marks(), Ok(vec![9]));
}
