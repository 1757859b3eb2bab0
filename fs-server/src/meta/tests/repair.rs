//! Damage of each kind is found and repaired, and the store is clean then, also if the repair was interrupted after any of its batches.

use super::around::Around;
use super::*;
use crate::meta::key::{self, tag};
use crate::meta::record::{self, BucketRecord, BytesRecord, CounterRecord, EntryRecord, ExtentRecord};
use crate::meta::{Batch, DataCommit, ProblemKind, RangeUpdate, StoreError, Survey, repair};
use cuttlefs_common::attr::{FileKind, Timestamp};
use cuttlefs_common::ids::FilePage;
use cuttlefs_common::rpc::XattrMode;
use std::sync::atomic::AtomicUsize;

const POOL_PAGES: u64 = 1000;
const NOW: Timestamp = Timestamp { secs: 1_700_000_000, nanos: 0 };

/// A store, and the inode numbers of the files in it.
struct Tree {
    store: Arc<MemoryStore>,
    file: InodeNo,
    other: InodeNo,
    inner: InodeNo,
    outer: InodeNo,
    link: InodeNo,
}

/// Makes `/outer/inner/file`, `/other` and `/link -> target`. Both files have pages, and `/other` has an attribute in pieces.
fn tree() -> Tree {
    let store = Arc::new(MemoryStore::new());
    format(&*store);
    let world = World::on(store.clone());
    let outer = world.directory(InodeNo::ROOT, "outer");
    let inner = world.directory(outer, "inner");
    let file = world.file(inner, "file");
    let other = world.file(InodeNo::ROOT, "other");
    let link = world.make(InodeNo::ROOT, "link", NewNode::Symlink(b"target")).expect("symlink").ino;
    let value = vec![7; 10_000];
    let set = Operation::SetXattr { ino: other, name: b"user.a", value: &value, mode: XattrMode::Any };
    world.run(&set).expect("attribute");
    for (ino, pool) in [(file, 100), (other, 200)] {
        let range = RangeUpdate {
            first: FilePage(0),
            end: FilePage(20),
            extents: vec![extent(0, pool, 8), extent(8, pool + 50, 12)],
        };
        let commit = DataCommit::of_ranges(ino, vec![range], 20 * 4096);
        world.meta.commit_data(&[commit]).expect("committed");
    }
    world.assert_sound();
    assert_eq!(problems(&*store), []);
    Tree { store, file, other, inner, outer, link }
}

fn problems(store: &dyn Store) -> Vec<ProblemKind> {
    let survey = Survey::of(store, HASH_KEY, POOL_PAGES).expect("readable");
    survey.problems.into_iter().map(|problem| problem.kind).collect()
}

fn put(store: &dyn Store, key: &[u8], value: Vec<u8>) {
    let mut batch = Batch::default();
    batch.put(key, value);
    store.commit(batch).expect("committed");
}

fn remove(store: &dyn Store, key: &[u8]) {
    let mut batch = Batch::default();
    batch.remove(key);
    store.commit(batch).expect("committed");
}

fn change(store: &dyn Store, ino: InodeNo, change: impl FnOnce(&mut crate::meta::InodeRecord)) {
    let key = key::inode(ino);
    let mut inode = record::parse_inode(&store.get(&key).expect("get").expect("there")).expect("parses");
    change(&mut inode);
    put(store, &key, record::encode(&inode));
}

fn enter(store: &dyn Store, parent: InodeNo, bucket_of: &[u8], name: &[u8], ino: InodeNo, kind: FileKind) {
    let bucket = BucketRecord { entries: vec![EntryRecord { slot: 0, ino, kind, name }] };
    put(store, &key::bucket(parent, HASH_KEY.hash(bucket_of)), record::encode(&bucket));
}

fn claim(store: &dyn Store, ino: InodeNo, file_page: u64, pool_page: u64, len_pages: u64) {
    let extent = ExtentRecord { pool_page: PoolPage(pool_page), len_pages, state: ExtentState::Written };
    put(store, &key::extent(ino, FilePage(file_page)), record::encode(&extent));
}

/// A store whose commits fail after the first `left`.
struct Failing<'a> {
    store: &'a MemoryStore,
    left: AtomicUsize,
}

impl Around for Failing<'_> {
    fn inner(&self) -> &dyn Store {
        self.store
    }

    fn commit_batch(&self, batch: Batch) -> Result<(), StoreError> {
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 {
            return Err(StoreError::Poisoned);
        }
        self.left.store(left - 1, Ordering::Relaxed);
        self.store.commit(batch)
    }
}

/// The name of a case, the problem that must be found first, a function that damages the store, and one that checks it after the repair.
type Case = (&'static str, ProblemKind, fn(&Tree), fn(&Tree, &World));

fn found_by_number(world: &World, ino: InodeNo) -> bool {
    let lost = world.meta.lookup(InodeNo::ROOT, b"lost+found").expect("lost+found").ino;
    world.meta.lookup(lost, format!("#{ino}").as_bytes()).is_ok_and(|attr| attr.ino == ino)
}

/// Gives an image to a page of `/other`.
fn put_image(tree: &Tree, page: u64) {
    let image = record::encode(&BytesRecord { bytes: b"an image" });
    put(&*tree.store, &key::image(tree.other, FilePage(page)), image);
}

fn cases() -> Vec<Case> {
    use ProblemKind as Kind;
    fn nothing(_: &Tree, _: &World) {}
    vec![
        (
            "an inode record that does not parse",
            Kind::BadRecord,
            |tree| put(&*tree.store, &key::inode(tree.inner), b"\x01\xff".to_vec()),
            |tree, world| assert!(found_by_number(world, tree.file)),
        ),
        (
            "a bucket that does not parse",
            Kind::BadRecord,
            |tree| put(&*tree.store, &key::bucket(tree.inner, HASH_KEY.hash(b"file")), b"\x01".to_vec()),
            |tree, world| assert!(found_by_number(world, tree.file)),
        ),
        (
            "an extent that does not parse",
            Kind::BadRecord,
            |tree| put(&*tree.store, &key::extent(tree.file, FilePage(0)), vec![1, 0, 0, 0]),
            |tree, world| assert_eq!(world.attr(tree.file).allocated_bytes, 12 * 4096),
        ),
        (
            "a slot that does not parse",
            Kind::BadRecord,
            |tree| put(&*tree.store, &[tag::CLIENT; 19], vec![9]),
            nothing,
        ),
        ("a key of no record", Kind::BadRecord, |tree| put(&*tree.store, b"Dxy", vec![1]), nothing),
        (
            "no root",
            Kind::NoRoot,
            |tree| remove(&*tree.store, &key::inode(InodeNo::ROOT)),
            |_, world| assert_eq!(world.names(InodeNo::ROOT), ["link", "other", "outer"]),
        ),
        (
            "numbers that were given out",
            Kind::NextIno,
            |tree| put(&*tree.store, key::NEXT_INO, record::encode(&CounterRecord(3))),
            |tree, world| assert!(world.file(InodeNo::ROOT, "new") > tree.link),
        ),
        (
            "an entry of no inode",
            Kind::Dangling,
            |tree| enter(&*tree.store, InodeNo::ROOT, b"ghost", b"ghost", InodeNo(999), FileKind::File),
            |_, world| assert_eq!(world.names(InodeNo::ROOT), ["link", "other", "outer"]),
        ),
        (
            "an entry in another's bucket",
            Kind::WrongBucket,
            |tree| enter(&*tree.store, tree.inner, b"here", b"there", tree.file, FileKind::File),
            |tree, world| assert_eq!(world.names(tree.inner), ["file"]),
        ),
        (
            "an entry of another type",
            Kind::WrongKind,
            |tree| enter(&*tree.store, tree.inner, b"file", b"file", tree.file, FileKind::Fifo),
            |tree, world| assert_eq!(world.attr(tree.file).nlink, 1),
        ),
        (
            "a directory with two names",
            Kind::SecondParent,
            |tree| enter(&*tree.store, InodeNo::ROOT, b"again", b"again", tree.inner, FileKind::Directory),
            |tree, world| {
                assert_eq!(world.names(InodeNo::ROOT), ["link", "other", "outer"]);
                assert_eq!(world.names(tree.outer), ["inner"]);
            },
        ),
        (
            "directories in each other",
            Kind::SecondParent,
            |tree| {
                enter(&*tree.store, tree.inner, b"ring", b"ring", tree.outer, FileKind::Directory);
                remove(&*tree.store, &key::bucket(InodeNo::ROOT, HASH_KEY.hash(b"outer")));
                enter(&*tree.store, tree.inner, b"more", b"more", tree.outer, FileKind::Directory);
            },
            |tree, world| assert!(found_by_number(world, tree.outer)),
        ),
        (
            "an entry that is gone",
            Kind::Unreachable,
            |tree| remove(&*tree.store, &key::bucket(InodeNo::ROOT, HASH_KEY.hash(b"outer"))),
            |tree, world| {
                assert!(found_by_number(world, tree.outer));
                assert_eq!(world.names(tree.outer), ["inner"]);
            },
        ),
        (
            "an orphan that nobody would free",
            Kind::Unreachable,
            |tree| {
                remove(&*tree.store, &key::bucket(InodeNo::ROOT, HASH_KEY.hash(b"other")));
                change(&*tree.store, tree.other, |inode| inode.nlink = 0);
            },
            |tree, world| assert_eq!(world.meta.orphans(), [tree.other]),
        ),
        (
            "an orphan with a name",
            Kind::NamedOrphan,
            |tree| put(&*tree.store, &key::orphan(tree.file), record::encode(&BytesRecord { bytes: b"" })),
            |_, world| assert!(world.meta.orphans().is_empty()),
        ),
        (
            "records of nobody",
            Kind::NoInode,
            |tree| {
                claim(&*tree.store, InodeNo(99), 0, 300, 4);
                put(&*tree.store, &key::orphan(InodeNo(98)), record::encode(&BytesRecord { bytes: b"" }));
                put(&*tree.store, &key::symlink(InodeNo(97)), record::encode(&BytesRecord { bytes: b"x" }));
            },
            nothing,
        ),
        (
            "extents that overlap in their file",
            Kind::FileOverlap,
            |tree| claim(&*tree.store, tree.file, 6, 400, 2),
            |tree, world| assert_eq!(world.attr(tree.file).allocated_bytes, 20 * 4096),
        ),
        (
            "a page of two files",
            Kind::PoolOverlap,
            |tree| claim(&*tree.store, tree.other, 0, 104, 8),
            |tree, world| {
                // The older file keeps the four pages, and the other gets a hole there.
                let extents = world.meta.extents(tree.other).expect("extents");
                assert_eq!(extents[0], extent(4, 108, 4));
                assert_eq!(world.attr(tree.file).allocated_bytes, 20 * 4096);
            },
        ),
        (
            "a page of two files, with images",
            Kind::PoolOverlap,
            |tree| {
                claim(&*tree.store, tree.other, 0, 104, 8);
                [0, 5].into_iter().for_each(|page| put_image(tree, page));
            },
            |tree, world| {
                let images = world.meta.images(None, 9).expect("images");
                let pages: Vec<_> = images.iter().map(|image| (image.ino, image.page.0)).collect();
                assert_eq!(pages, [(tree.other, 5)], "that of the page which the file lost is gone");
            },
        ),
        (
            "an image of a page without bytes",
            Kind::StrayImage,
            |tree| put_image(tree, 5000),
            |_, world| assert_eq!(world.meta.images(None, 9).expect("images"), []),
        ),
        (
            "a page twice in one file",
            Kind::PoolOverlap,
            |tree| claim(&*tree.store, tree.file, 8, 102, 12),
            |tree, world| assert_eq!(world.meta.extents(tree.file).expect("extents")[1], extent(14, 108, 6)),
        ),
        (
            "pages past the pool",
            Kind::PastPool,
            |tree| claim(&*tree.store, tree.file, 8, POOL_PAGES - 5, 12),
            |tree, world| {
                assert_eq!(world.meta.extents(tree.file).expect("extents")[1], extent(8, POOL_PAGES - 5, 5));
            },
        ),
        (
            "pages past the end",
            Kind::PastEnd,
            |tree| change(&*tree.store, tree.file, |inode| inode.size = 9 * 4096 + 1),
            |tree, world| assert_eq!(world.attr(tree.file).allocated_bytes, 10 * 4096),
        ),
        (
            "extents of a directory",
            Kind::StrayExtent,
            |tree| claim(&*tree.store, tree.inner, 0, 500, 2),
            nothing,
        ),
        (
            "counts",
            Kind::LinkCount,
            |tree| {
                change(&*tree.store, tree.file, |inode| inode.nlink = 7);
                change(&*tree.store, tree.outer, |inode| inode.nlink = 2);
                change(&*tree.store, tree.other, |inode| (inode.allocated_pages, inode.xattrs) = (1, 9));
            },
            |tree, world| assert_eq!((world.attr(tree.file).nlink, world.attr(tree.outer).nlink), (1, 3)),
        ),
        (
            "another parent",
            Kind::WrongParent,
            |tree| change(&*tree.store, tree.inner, |inode| inode.parent = InodeNo::ROOT),
            nothing,
        ),
        (
            "a symlink without target",
            Kind::NoTarget,
            |tree| remove(&*tree.store, &key::symlink(tree.link)),
            |_, world| assert_eq!(world.names(InodeNo::ROOT), ["other", "outer"]),
        ),
        (
            "a target of a file",
            Kind::StrayTarget,
            |tree| put(&*tree.store, &key::symlink(tree.file), record::encode(&BytesRecord { bytes: b"x" })),
            nothing,
        ),
        (
            "an attribute that lost a piece",
            Kind::BadXattr,
            |tree| remove(&*tree.store, &key::xattr(tree.other, b"user.a", 1)),
            |tree, world| assert_eq!(world.meta.xattr(tree.other, b"user.a"), Err(Status::NoAttribute)),
        ),
    ]
}

#[test]
fn damage_of_each_kind_is_found_repaired_and_clean_then() {
    for (name, kind, damage, holds) in cases() {
        let tree = tree();
        damage(&tree);
        let found = problems(&*tree.store);
        assert_eq!(found.first(), Some(&kind), "{name}: {found:?}");
        let (repaired, left) = repair(&*tree.store, HASH_KEY, POOL_PAGES, NOW).expect("repairs");
        assert_eq!(left.problems, [], "{name}");
        assert!(!repaired.is_empty(), "{name}");
        let (again, _) = repair(&*tree.store, HASH_KEY, POOL_PAGES, NOW).expect("repairs");
        assert_eq!(again, [], "{name}: nothing is left to do");
        let world = World::on(tree.store.clone());
        world.assert_sound();
        holds(&tree, &world);
    }
}

#[test]
fn a_repair_that_is_killed_anywhere_goes_on_from_there() {
    for (name, _, damage, holds) in cases() {
        for kept in 0.. {
            let tree = tree();
            damage(&tree);
            let failing = Failing { store: &tree.store, left: AtomicUsize::new(kept) };
            let done = repair(&failing, HASH_KEY, POOL_PAGES, NOW).is_ok();
            let (_, left) = repair(&*tree.store, HASH_KEY, POOL_PAGES, NOW).expect("repairs");
            assert_eq!(left.problems, [], "{name}, cut after {kept}");
            let world = World::on(tree.store.clone());
            world.assert_sound();
            holds(&tree, &world);
            if done {
                break;
            }
        }
    }
}
