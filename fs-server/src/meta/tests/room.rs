//! A store without room: operations that add records are refused, those that remove records are not.

use super::super::{Batch, DataCommit, MemoryStore, Operation, RangeUpdate, Store, StoreError};
use super::around::Around;
use super::{World, extent, format};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{NewNode, RenameMode, XattrMode};
use cuttlefs_common::status::Status;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const ROOT: InodeNo = InodeNo::ROOT;

/// A store that says it has no room (`is_short`), or fails every commit (`is_full`).
#[derive(Default)]
struct Short {
    inner: MemoryStore,
    is_short: AtomicBool,
    is_full: AtomicBool,
}

impl Around for Short {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }

    fn commit_batch(&self, batch: Batch) -> Result<(), StoreError> {
        if self.is_full.load(Ordering::Relaxed) { Err(StoreError::Full) } else { self.inner.commit(batch) }
    }

    fn room(&self) -> u64 {
        if self.is_short.load(Ordering::Relaxed) { 0 } else { 10 << 10 }
    }
}

#[test]
fn without_room_only_what_adds_is_refused() {
    let store = Arc::new(Short::default());
    format(&*store);
    let world = World::on(store.clone());
    let (one, two) = (world.file(ROOT, "one"), world.file(ROOT, "two"));
    let set = |ino| {
        let set = Operation::SetXattr { ino, name: b"user.a", value: b"value", mode: XattrMode::Any };
        world.run(&set).map(drop)
    };
    let create = |name: &'static [u8], exclusive| {
        world.run(&Operation::Create { parent: ROOT, name, mode: 0o600, exclusive }).map(drop)
    };
    set(one).expect("there is room");
    assert_eq!(world.meta.room_inodes(), 10);
    store.is_short.store(true, Ordering::Relaxed);
    assert_eq!(world.meta.room_inodes(), 0);
    assert_eq!(world.make(ROOT, "three", NewNode::File).err(), Some(Status::NoSpace));
    assert_eq!(
        world.make(ROOT, "one", NewNode::File).err(),
        Some(Status::Exists),
        "what is wrong besides comes first"
    );
    assert_eq!(create(b"three", false), Err(Status::NoSpace));
    assert_eq!(create(b"one", false), Ok(()), "it is there");
    assert_eq!(set(two), Err(Status::NoSpace));
    let link = Operation::Link { ino: one, parent: ROOT, name: b"link" };
    assert_eq!(world.run(&link).map(drop), Err(Status::NoSpace));
    // Still possible: data that was accepted before, and all operations that remove something.
    let update = RangeUpdate { first: 0.into(), end: 2.into(), extents: vec![extent(0, 5, 2)] };
    world.meta.commit_data(&[DataCommit::of_ranges(two, vec![update], 8192)]).expect("write-back goes on");
    world.run(&Operation::RemoveXattr { ino: one, name: b"user.a" }).expect("an attribute goes");
    let rename = Operation::Rename {
        parent: ROOT,
        name: b"one",
        new_parent: ROOT,
        new_name: b"moved",
        mode: RenameMode::Replace,
    };
    world.run(&rename).expect("a name moves");
    world.unlink(ROOT, "moved").expect("a file goes");
    world.meta.flush().expect("it is synced");
    store.is_short.store(false, Ordering::Relaxed);
    world.file(ROOT, "three");
    // The log has no room for a single batch: the operation is not done, and nothing is damaged.
    store.is_full.store(true, Ordering::Relaxed);
    assert_eq!(world.unlink(ROOT, "three").err(), Some(Status::NoSpace));
    store.is_full.store(false, Ordering::Relaxed);
    world.unlink(ROOT, "three").expect("it is there still");
    world.assert_sound();
}
