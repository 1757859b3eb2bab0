//! The number of records that a start reads does not grow with the number of files.

use super::super::{
    DataCommit, Direction, DiskOptions, DiskStore, Plane, RangeUpdate, Store, StoreError, Visitor,
};
use super::around::Around;
use super::{World, extent, format};
use cuttlefs_common::ids::InodeNo;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Extents of each file.
const EXTENTS: u64 = 20;

/// A store that counts the records that it returns.
struct Counting {
    inner: DiskStore,
    given: AtomicU64,
}

impl Counting {
    fn open(path: &Path) -> Arc<Self> {
        let inner = DiskStore::open(path, DiskOptions::default()).expect("a store");
        Arc::new(Self { inner, given: AtomicU64::new(0) })
    }
}

impl Around for Counting {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    fn get_record(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StoreError> {
        self.given.fetch_add(1, Ordering::Relaxed);
        self.inner.get(key)
    }

    fn scan_records(
        &self,
        from: &[u8],
        to: &[u8],
        direction: Direction,
        visit: Visitor<'_>,
    ) -> Result<(), StoreError> {
        self.inner.scan(from, to, direction, &mut |key, value| {
            self.given.fetch_add(1, Ordering::Relaxed);
            visit(key, value)
        })
    }
}

/// Starts a server of a file system with so many files. Returns the number of records that it reads, and of pool pages that it finds in use.
fn read_by_a_start(files: u64) -> (u64, u64) {
    let directory = tempfile::tempdir().expect("a directory");
    {
        let store = Counting::open(directory.path());
        format(&*store);
        let world = World::on(store.clone());
        for number in 0..files {
            let ino = world.file(InodeNo::ROOT, &format!("file {number}"));
            let first = number * 2 * EXTENTS;
            let extents = (0..EXTENTS).map(|at| extent(at * 2, first + at * 2, 1)).collect();
            let all = RangeUpdate { first: 0.into(), end: (2 * EXTENTS).into(), extents };
            let commit = DataCommit::of_ranges(ino, vec![all], 2 * EXTENTS * 4096);
            world.meta.commit_data(&[commit]).expect("commit");
        }
        world.meta.flush().expect("flush");
        store.settle().expect("a clean stop");
    }
    let store = Counting::open(directory.path());
    let world = World::on(store.clone());
    let mut used = 0;
    let contradictions = store.pages(&mut |part, bits| {
        let count: u32 = bits.iter().map(|word| word.count_ones()).sum();
        used += if part.plane() == Plane::Named { u64::from(count) } else { 0 };
    });
    assert_eq!(contradictions.expect("the map"), 0);
    let given = store.given.load(Ordering::Relaxed);
    assert_eq!(world.meta.inode_count(), files + 1);
    (given, used)
}

/// Once, a start took longer the more inodes and extents there were.
#[test]
fn a_start_reads_no_more_where_there_is_more() {
    let (few, some_pages) = read_by_a_start(10);
    let (many, more_pages) = read_by_a_start(600);
    assert_eq!((some_pages, more_pages), (10 * EXTENTS, 600 * EXTENTS));
    assert_eq!(few, many, "records that are read at a start");
}
