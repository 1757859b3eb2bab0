//! Listings of directories: cookies stay valid, and reads are bounded.

use super::super::draft::Draft;
use super::super::view::View;
use super::super::{HashKey, MemoryStore, Operation};
use super::{HASH_KEY, StopOnDrop, World};
use cuttlefs_common::attr::FileKind;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{NewNode, RenameMode};
use cuttlefs_common::status::Status;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

const ROOT: InodeNo = InodeNo::ROOT;

/// Lists a directory a few entries at a time, as a client does.
fn list(world: &World, at_a_time: usize, mut between: impl FnMut()) -> Vec<String> {
    let (mut names, mut cookie) = (Vec::new(), 0);
    loop {
        let mut taken = 0;
        let end = world.meta.read_dir(ROOT, cookie, true, &mut |entry| {
            if taken == at_a_time {
                return false;
            }
            taken += 1;
            assert!(entry.cookie > cookie && entry.cookie > 2 && entry.cookie < 1 << 63);
            assert_eq!(entry.attr.map(|attr| (attr.ino, attr.kind)), Some((entry.ino, entry.kind)));
            cookie = entry.cookie;
            names.push(String::from_utf8_lossy(entry.name).into_owned());
            true
        });
        if end.expect("read_dir") {
            return names;
        }
        between();
    }
}

#[test]
fn every_entry_is_listed_once() {
    let world = World::new();
    assert_eq!(list(&world, 1, || ()), [""; 0]);
    let expected: Vec<String> = (0..300).map(|index| format!("name{index:03}")).collect();
    for name in &expected {
        world.file(ROOT, name);
    }
    for at_a_time in [1, 7, 1000] {
        let mut names = list(&world, at_a_time, || ());
        names.sort();
        assert_eq!(names, expected);
    }
    assert_eq!(world.meta.read_dir(ROOT, 1 << 63, false, &mut |_| true), Err(Status::Invalid));
    assert_eq!(world.meta.read_dir(ROOT, i64::MAX as u64, false, &mut |_| true), Ok(true));
    assert_eq!(world.meta.read_dir(InodeNo(9999), 0, false, &mut |_| true), Err(Status::Stale));
}

#[test]
fn entries_that_stay_are_listed_once_whatever_comes_and_goes() {
    let world = World::new();
    let staying: BTreeSet<String> = (0..200).map(|index| format!("stays{index}")).collect();
    for name in &staying {
        world.file(ROOT, name);
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        scope.spawn(|| {
            let mut turn = 0;
            while !stop.load(Ordering::Relaxed) {
                turn += 1;
                let (name, other) = (format!("comes{}", turn % 40), format!("other{}", turn % 40));
                world.file(ROOT, &name);
                let rename = Operation::Rename {
                    parent: ROOT,
                    name: name.as_bytes(),
                    new_parent: ROOT,
                    new_name: other.as_bytes(),
                    mode: RenameMode::Replace,
                };
                world.run(&rename).expect("rename");
                world.unlink(ROOT, &other).expect("unlink");
            }
        });
        for at_a_time in [1, 3, 10, 50, 1000].repeat(4) {
            let listed: Vec<_> =
                list(&world, at_a_time, || ()).into_iter().filter(|name| name.starts_with("stays")).collect();
            assert_eq!(listed.len(), staying.len());
            assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), staying);
        }
    });
    world.assert_sound();
}

#[test]
fn replacing_and_exchanging_keep_the_cookie_of_a_name() {
    let world = World::new();
    for name in ["one", "two"] {
        world.file(ROOT, name);
    }
    let cookies = || {
        let mut cookies = Vec::new();
        let listed = world.meta.read_dir(ROOT, 0, false, &mut |entry| {
            cookies.push((entry.cookie, entry.name.to_vec()));
            true
        });
        assert_eq!(listed, Ok(true));
        cookies
    };
    let before = cookies();
    let rename =
        |mode| Operation::Rename { parent: ROOT, name: b"one", new_parent: ROOT, new_name: b"two", mode };
    world.run(&rename(RenameMode::Exchange)).expect("exchange");
    assert_eq!(cookies(), before);
    world.run(&rename(RenameMode::Replace)).expect("rename");
    let two: Vec<_> = before.into_iter().filter(|(_, name)| name == b"two").collect();
    assert_eq!(cookies(), two);
}

#[test]
fn a_bucket_fills_its_slots_and_then_says_no() {
    // Without the key nobody can make different names with the same hash. For the bucket the same name many times does as well.
    let store = MemoryStore::new();
    let view = View::of_store(&store, HASH_KEY);
    let mut draft = Draft::new(view);
    for index in 0..128 {
        draft.add_entry(ROOT, b"same", InodeNo(index), FileKind::File).expect("a free slot");
    }
    let full = draft.add_entry(ROOT, b"same", InodeNo(128), FileKind::File);
    assert!(matches!(full, Err(super::super::MetaError::Refused(Status::NoSpace))));
    draft.remove_entry(ROOT, b"same").expect("remove");
    draft.add_entry(ROOT, b"same", InodeNo(1), FileKind::File).expect("a free slot");
    let found = draft.find(ROOT, b"same").expect("find").expect("found");
    assert_eq!(found.cookie.get() & 127, 0);
}

#[test]
fn pools_hash_differently() {
    assert_ne!(HashKey([0; 16]).hash(b"name"), HashKey([1; 16]).hash(b"name"));
}

#[test]
fn a_name_is_always_one_of_its_inodes_while_it_is_replaced() {
    let world = World::new();
    world.file(ROOT, "name");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                world.make(ROOT, "new", NewNode::File).expect("make");
                let rename = Operation::Rename {
                    parent: ROOT,
                    name: b"new",
                    new_parent: ROOT,
                    new_name: b"name",
                    mode: RenameMode::Replace,
                };
                world.run(&rename).expect("rename");
            }
        });
        for _ in 0..20_000 {
            assert_eq!(world.meta.lookup(ROOT, b"name").map(|attr| attr.kind), Ok(FileKind::File));
        }
    });
    world.assert_sound();
}
