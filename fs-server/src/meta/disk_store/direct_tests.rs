//! Syncs by direct writes, and recovery from the log, from the direct writes or from both.

use super::*;
use std::os::unix::fs::FileExt;

fn options() -> DiskOptions {
    DiskOptions { cache_bytes: 1 << 20, reserve_bytes: 0, direct_bytes: 64 << 10, ..DiskOptions::default() }
}

fn opened(path: &Path) -> DiskStore {
    let store = DiskStore::open(path, options()).expect("open");
    store.prepare_sync();
    store
}

fn put(store: &DiskStore, number: u8) {
    let mut batch = Batch::default();
    batch.put([b'Z', number], vec![number; 700]);
    store.commit(batch).expect("commits");
}

fn begin(store: &DiskStore) -> (DirectSync, crate::pool::BlockWrite) {
    match store.begin_sync().expect("begins") {
        SyncStep::Write(sync, write) => (sync, write),
        other => panic!("{other:?}"),
    }
}

/// Syncs as a worker does, by a direct write.
fn sync(store: &DiskStore) {
    let (sync, write) = begin(store);
    write.file.write_all_at(write.buffer.as_slice(), write.offset).expect("writes");
    assert!(store.end_sync(sync, Ok(())).expect("ends"));
}

fn numbers(store: &DiskStore) -> Vec<u8> {
    let mut found = Vec::new();
    let visit: Visitor<'_> = &mut |key, value| {
        assert_eq!(value, vec![key[1]; 700]);
        found.push(key[1]);
        true
    };
    store.scan(b"Z", b"[", Direction::Forward, visit).expect("scan");
    found
}

/// Copies the store's files as they are, lets `change` change their bytes, and opens the copy. Returns the numbers of its batches.
fn copied(at: &Path, change: &dyn Fn(&str, &mut [u8])) -> Result<Vec<u8>, StoreError> {
    let image = tempfile::tempdir().expect("directory");
    for entry in std::fs::read_dir(at).expect("there") {
        let (name, path) = entry.map(|entry| (entry.file_name(), entry.path())).expect("an entry");
        let mut bytes = std::fs::read(path).expect("read");
        change(&name.to_string_lossy(), &mut bytes);
        std::fs::write(image.path().join(name), bytes).expect("write");
    }
    DiskStore::open(image.path(), options()).map(|store| numbers(&store))
}

/// Removes all records from a file of the log, as if the page cache had not written any of them.
fn without_log(name: &str, bytes: &mut [u8]) {
    if name.starts_with("tail-") {
        bytes[24..].fill(0);
    }
}

#[test]
fn a_batch_is_found_by_either_of_its_records() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path().join("meta");
    let store = opened(&at);
    (1..=3).for_each(|number| put(&store, number));
    assert!(!store.is_durable());
    sync(&store);
    assert!(store.is_durable());
    assert!(matches!(store.begin_sync(), Ok(SyncStep::Nothing)));
    put(&store, 4);
    let all = |_: &str, _: &mut [u8]| {};
    let without_direct = |name: &str, bytes: &mut [u8]| {
        if name.starts_with("direct-") {
            bytes.fill(0);
        }
    };
    assert_eq!(copied(&at, &all).expect("opens"), [1, 2, 3, 4], "killed");
    assert_eq!(copied(&at, &without_log).expect("opens"), [1, 2, 3], "what was synced is there");
    assert_eq!(copied(&at, &without_direct).expect("opens"), [1, 2, 3, 4]);
    // The record of batch 3 is gone from both files. The batch was durable, so batch 2 must not be taken for the end.
    let in_neither = |name: &str, bytes: &mut [u8]| {
        without_log(name, bytes);
        without_direct(name, bytes);
    };
    let refused = copied(&at, &in_neither).expect_err("what was durable is gone");
    assert!(refused.to_string().contains("batch 3 was durable"), "{refused}");
}

#[test]
fn a_sync_that_is_torn_anywhere_loses_nothing_that_was_answered() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path().join("meta");
    let store = opened(&at);
    (1..=2).for_each(|number| put(&store, number));
    sync(&store);
    let before = [0, 1].map(|file| std::fs::read(at.join(direct::FILES[file])).expect("read"));
    (3..=9).for_each(|number| put(&store, number));
    let (begun, write) = begin(&store);
    write.file.write_all_at(write.buffer.as_slice(), write.offset).expect("writes");
    let sectors = write.offset as usize / 512..(write.offset as usize + write.buffer.len()) / 512;
    for cut in sectors.clone() {
        for is_front in [true, false] {
            let torn = |name: &str, bytes: &mut [u8]| {
                without_log(name, bytes);
                if name == direct::FILES[0] {
                    let lost = if is_front { sectors.start..cut } else { cut..sectors.end };
                    let lost = lost.start * 512..lost.end * 512;
                    bytes[lost.clone()].copy_from_slice(&before[0][lost]);
                }
            };
            let found = copied(&at, &torn).expect("opens");
            assert!(found.starts_with(&[1, 2]), "{found:?}, cut at {cut}");
            assert!(found.iter().copied().eq(1..=found.len() as u8), "{found:?} has a gap");
        }
    }
    // The sync is dropped. The next one makes its batches durable as well.
    drop((begun, write));
    put(&store, 10);
    sync(&store);
    assert_eq!(copied(&at, &without_log).expect("opens"), (1..=10).collect::<Vec<_>>());
}

#[test]
fn records_of_a_life_that_is_over_are_none() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path().join("meta");
    let store = opened(&at);
    (1..=2).for_each(|number| put(&store, number));
    sync(&store);
    (3..=5).for_each(|number| put(&store, number));
    // The direct write begins with batch 4, as if the record of batch 3 were lost.
    let (_, write) = begin(&store);
    let bytes = write.buffer.as_slice().to_vec();
    let fourth = (8..).find(|at| bytes[*at..*at + 8] == bytes[..8]).expect("another record of this life");
    let place = write.offset;
    drop((write, store));
    for file in ["tail-0", "tail-1"] {
        let tail = std::fs::read(at.join(file)).expect("read");
        let mut lost = tail.clone();
        lost[24..].fill(0);
        std::fs::write(at.join(file), lost).expect("write");
    }
    let file = File::options().write(true).open(at.join(direct::FILES[0])).expect("open");
    file.write_all_at(&bytes[fourth..], place).expect("write");
    // The next store gives the numbers 3 and 4 to other batches, before it makes any file ready for direct writes.
    let store = DiskStore::open(&at, options()).expect("open");
    assert_eq!(numbers(&store), [1, 2]);
    (6..=7).for_each(|number| put(&store, number));
    assert_eq!(copied(&at, &|_, _| {}).expect("opens"), [1, 2, 6, 7]);
}

#[test]
fn what_a_direct_write_cannot_take_is_for_who_can_block() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path().join("meta");
    let store = DiskStore::open(&at, options()).expect("open");
    put(&store, 1);
    assert!(matches!(store.begin_sync(), Ok(SyncStep::Block)), "nothing is ready");
    store.prepare_sync();
    assert!(matches!(store.begin_sync(), Ok(SyncStep::Block)), "the first was not kept");
    store.flush().expect("flush");
    put(&store, 2);
    let (sync, _) = begin(&store);
    // The file has holes and the disk is full.
    assert!(!store.end_sync(sync, Err(io::ErrorKind::StorageFull.into())).expect("no failure"));
    assert!(!store.is_durable());
    assert!(matches!(store.begin_sync(), Ok(SyncStep::Block)));
    store.flush().expect("flush");
    assert!(store.is_durable());
}

#[test]
fn what_is_committed_while_a_write_is_under_way_is_not_durable_with_it() {
    let directory = tempfile::tempdir().expect("directory");
    let at = directory.path().join("meta");
    let store = opened(&at);
    put(&store, 1);
    let (begun, write) = begin(&store);
    put(&store, 2);
    write.file.write_all_at(write.buffer.as_slice(), write.offset).expect("writes");
    assert!(store.end_sync(begun, Ok(())).expect("ends"));
    assert!(!store.is_durable());
    assert_eq!(copied(&at, &without_log).expect("opens"), [1]);
    sync(&store);
    assert_eq!(copied(&at, &without_log).expect("opens"), [1, 2]);
}

#[test]
fn a_direct_write_that_fails_is_final() {
    let directory = tempfile::tempdir().expect("directory");
    let store = opened(&directory.path().join("meta"));
    put(&store, 1);
    let (sync, _) = begin(&store);
    assert!(store.end_sync(sync, Err(io::Error::from_raw_os_error(5))).is_err());
    assert!(matches!(store.flush(), Err(StoreError::Poisoned)));
    assert!(matches!(store.begin_sync(), Err(StoreError::Poisoned)));
    assert!(!store.is_durable());
}
