//! POSIX rules, one by one, as pjdfstest and xfstests check them.

use super::super::{Caller, DiskOptions, DiskStore, LINK_MAX, Operation};
use super::{ROOT_USER, StopOnDrop, USER, World, format};
use cuttlefs_common::attr::{FileKind, SetAttr, SetTime, Timestamp};
use cuttlefs_common::ids::{FilePage, InodeNo};
use cuttlefs_common::rpc::{NewNode, RenameMode, XattrMode};
use cuttlefs_common::status::Status;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const ROOT: InodeNo = InodeNo::ROOT;

fn rename(
    world: &World,
    (parent, name): (InodeNo, &str),
    (new_parent, new_name): (InodeNo, &str),
    mode: RenameMode,
) -> Result<(), Status> {
    let rename =
        Operation::Rename { parent, name: name.as_bytes(), new_parent, new_name: new_name.as_bytes(), mode };
    world.run(&rename).map(|_| ())
}

#[test]
fn make_sets_owner_times_and_parent() {
    let world = World::new();
    let before = world.attr(ROOT);
    let made = world.make(ROOT, "file", NewNode::File).expect("make");
    assert_eq!((made.uid, made.gid, made.nlink, made.size, made.mode), (1000, 100, 1, 0, 0o755));
    assert!(made.atime == made.mtime && made.mtime == made.ctime && made.ctime == made.btime);
    let after = world.attr(ROOT);
    assert_eq!((after.mtime, after.ctime, after.atime), (made.ctime, made.ctime, before.atime));
    assert_eq!(after.nlink, 2);
    assert!(after.change > before.change);
    assert_eq!(world.make(ROOT, "file", NewNode::File).err(), Some(Status::Exists));
    let device = NewNode::Special { kind: FileKind::CharDevice, rdev: 77 };
    assert_eq!(world.make(ROOT, "device", device).expect("device").rdev, 77);
    let fifo = NewNode::Special { kind: FileKind::Fifo, rdev: 77 };
    assert_eq!(world.make(ROOT, "fifo", fifo).expect("fifo").rdev, 0);
    let wrong = NewNode::Special { kind: FileKind::File, rdev: 0 };
    assert_eq!(world.make(ROOT, "wrong", wrong).err(), Some(Status::Invalid));
    world.assert_sound();
}

#[test]
fn directories_inherit_the_group_and_its_bit() {
    let world = World::new();
    let shared = world.directory(ROOT, "shared");
    let set = SetAttr { mode: Some(0o2775), gid: Some(55), ..SetAttr::default() };
    world.meta.set_attr(ROOT_USER, shared, &set, None).expect("set");
    let file = world.make(shared, "file", NewNode::File).expect("file");
    assert_eq!((file.gid, file.mode), (55, 0o755));
    let below = world.make(shared, "below", NewNode::Directory).expect("directory");
    assert_eq!((below.gid, below.mode), (55, 0o2755));
    let plain = world.make(ROOT, "plain", NewNode::Directory).expect("directory");
    assert_eq!((plain.gid, plain.mode), (100, 0o755));
}

#[test]
fn symlinks_keep_their_target() {
    let world = World::new();
    let link = world.make(ROOT, "link", NewNode::Symlink(b"../to")).expect("symlink");
    assert_eq!((link.kind, link.size, link.mode), (FileKind::Symlink, 5, 0o777));
    assert_eq!(world.meta.read_link(link.ino), Ok(b"../to".to_vec()));
    assert_eq!(world.meta.read_link(ROOT), Err(Status::Invalid));
    let longest = vec![b'x'; 4095];
    let longest = world.make(ROOT, "longest", NewNode::Symlink(&longest)).expect("symlink");
    assert_eq!(world.meta.read_link(longest.ino).map(|target| target.len()), Ok(4095));
    let too_long = vec![b'x'; 4096];
    let too_long = world.make(ROOT, "long", NewNode::Symlink(&too_long));
    assert_eq!(too_long.err(), Some(Status::NameTooLong));
    assert_eq!(world.make(ROOT, "empty", NewNode::Symlink(b"")).err(), Some(Status::Invalid));
    world.unlink(ROOT, "link").expect("unlink");
    assert_eq!(world.meta.read_link(link.ino), Err(Status::Stale));
    world.assert_sound();
}

#[test]
fn create_opens_what_exists() {
    let world = World::new();
    let create =
        |name: &'static [u8], exclusive| Operation::Create { parent: ROOT, name, mode: 0o600, exclusive };
    let made = world.run(&create(b"file", true)).expect("create");
    assert!(made.created);
    let found = world.run(&create(b"file", false)).expect("create");
    assert!(!found.created);
    assert_eq!(found.attr, made.attr);
    assert_eq!(world.run(&create(b"file", true)).err(), Some(Status::Exists));
    world.directory(ROOT, "directory");
    assert_eq!(world.run(&create(b"directory", false)).err(), Some(Status::IsDirectory));
}

#[test]
fn names_are_checked_everywhere() {
    let world = World::new();
    let directory = world.directory(ROOT, "d");
    let file = world.file(ROOT, "f");
    let long = "x".repeat(256);
    for (name, status) in [
        ("", Status::NotFound),
        (".", Status::Invalid),
        ("..", Status::Invalid),
        ("a/b", Status::Invalid),
        ("a\0", Status::Invalid),
        (long.as_str(), Status::NameTooLong),
    ] {
        assert_eq!(world.make(ROOT, name, NewNode::File).err(), Some(status), "{name:?}");
        assert_eq!(world.unlink(ROOT, name).err(), Some(status), "{name:?}");
        let bytes = name.as_bytes();
        assert_eq!(world.run(&Operation::Rmdir { parent: ROOT, name: bytes }).err(), Some(status));
        assert_eq!(world.run(&Operation::Link { ino: file, parent: ROOT, name: bytes }).err(), Some(status));
        assert_eq!(rename(&world, (ROOT, "f"), (directory, name), RenameMode::Replace), Err(status));
        assert_eq!(rename(&world, (ROOT, name), (directory, "f"), RenameMode::Replace), Err(status));
    }
    assert_eq!(world.make(file, "below", NewNode::File).err(), Some(Status::NotDirectory));
    assert_eq!(world.make(InodeNo(u64::MAX), "n", NewNode::File).err(), Some(Status::Stale));
    assert_eq!(world.meta.lookup(file, b"x"), Err(Status::NotDirectory));
    assert_eq!(world.meta.lookup(ROOT, b"x"), Err(Status::NotFound));
    assert_eq!(world.meta.lookup(ROOT, long.as_bytes()), Err(Status::NameTooLong));
    assert_eq!(world.meta.lookup(InodeNo(u64::MAX), b"x"), Err(Status::Stale));
    assert_eq!(world.meta.lookup(directory, b"..").map(|attr| attr.ino), Ok(ROOT));
    assert_eq!(world.meta.lookup(ROOT, b"..").map(|attr| attr.ino), Ok(ROOT));
    assert_eq!(world.meta.lookup(directory, b".").map(|attr| attr.ino), Ok(directory));
    assert_eq!(world.meta.lookup(file, b"."), Err(Status::NotDirectory));
}

#[test]
fn links_are_counted_and_bounded() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    let before = world.attr(file);
    let link = |name: &str| {
        world
            .run(&Operation::Link { ino: file, parent: ROOT, name: name.as_bytes() })
            .map(|outcome| outcome.attr)
    };
    let attr = link("again").expect("link").expect("attr");
    assert_eq!(attr.nlink, 2);
    assert!(attr.ctime > before.ctime && attr.mtime == before.mtime);
    assert_eq!(world.attr(ROOT).mtime, attr.ctime);
    assert_eq!(link("again").err(), Some(Status::Exists));
    let directory = world.directory(ROOT, "directory");
    let to_directory = Operation::Link { ino: directory, parent: ROOT, name: b"no" };
    assert_eq!(world.run(&to_directory).err(), Some(Status::NotPermitted));
    for index in 2..LINK_MAX {
        link(&format!("link{index}")).expect("link");
    }
    assert_eq!(link("one more").err(), Some(Status::TooManyLinks));
    world.unlink(ROOT, "again").expect("unlink");
    assert_eq!(link("one more").map(|attr| attr.map(|attr| attr.nlink)), Ok(Some(LINK_MAX)));
    world.assert_sound();
}

#[test]
fn unlink_and_rmdir_tell_types_apart() {
    let world = World::new();
    let directory = world.directory(ROOT, "directory");
    world.file(directory, "file");
    assert_eq!(world.attr(ROOT).nlink, 3);
    let rmdir = |parent, name: &'static str| world.run(&Operation::Rmdir { parent, name: name.as_bytes() });
    assert_eq!(world.unlink(ROOT, "directory").err(), Some(Status::IsDirectory));
    assert_eq!(rmdir(directory, "file").err(), Some(Status::NotDirectory));
    assert_eq!(rmdir(ROOT, "directory").err(), Some(Status::NotEmpty));
    assert_eq!(rmdir(ROOT, "nothing").err(), Some(Status::NotFound));
    world.unlink(directory, "file").expect("unlink");
    assert_eq!(rmdir(ROOT, "directory").expect("rmdir").reaped, Some(directory));
    assert_eq!(world.attr(ROOT).nlink, 2);
    world.assert_sound();
}

#[test]
fn a_removed_directory_takes_no_names() {
    let world = World::new();
    let directory = world.directory(ROOT, "directory");
    let kept = world.run_open(&Operation::Rmdir { parent: ROOT, name: b"directory" }, &|_| true);
    assert_eq!(kept.expect("rmdir").orphaned, Some(directory));
    assert_eq!(world.attr(directory).nlink, 0);
    assert_eq!(world.make(directory, "file", NewNode::File).err(), Some(Status::NotFound));
    let file = world.file(ROOT, "file");
    let link = Operation::Link { ino: file, parent: directory, name: b"link" };
    assert_eq!(world.run(&link).err(), Some(Status::NotFound));
    let moved = rename(&world, (ROOT, "file"), (directory, "file"), RenameMode::Replace);
    assert_eq!(moved, Err(Status::NotFound));
    world.assert_sound();
    world.meta.reap(directory).expect("reap");
    assert_eq!(world.meta.attr(directory), Err(Status::Stale));
    world.assert_sound();
}

#[test]
fn an_unlinked_open_file_stays_until_reaped_and_gets_no_new_name_when_it_is_closed() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    let unlink = Operation::Unlink { parent: ROOT, name: b"file" };
    let outcome = world.run_open(&unlink, &|ino| ino == file).expect("unlink");
    assert_eq!((outcome.orphaned, outcome.reaped), (Some(file), None));
    assert_eq!(world.meta.orphans(), [file]);
    assert_eq!(world.attr(file).nlink, 0);
    let link = Operation::Link { ino: file, parent: ROOT, name: b"back" };
    assert_eq!(world.run(&link).err(), Some(Status::NotFound));
    let reap = Operation::ReapOrphan { ino: file, below: FilePage(u64::MAX) };
    assert_eq!(world.run_open(&reap, &|_| true).err(), Some(Status::Busy));
    assert_eq!(world.meta.reap(file), Ok(vec![]));
    assert_eq!(world.meta.orphans(), []);
    assert_eq!(world.meta.reap(file), Ok(vec![]));
    assert_eq!(world.meta.inode_count(), 1);
    let named = world.file(ROOT, "named");
    assert_eq!(world.meta.reap(named), Err(Status::Invalid));
    world.assert_sound();
}

#[test]
fn a_file_made_without_a_name_is_an_orphan_until_it_gets_one() {
    let world = World::new();
    let directory = world.directory(ROOT, "d");
    let set = SetAttr { mode: Some(0o2775), gid: Some(7), ..SetAttr::default() };
    world.meta.set_attr(ROOT_USER, directory, &set, None).expect("chmod");
    let before = world.attr(directory);
    let make = || world.run(&Operation::CreateNameless { parent: directory, mode: 0o640 }).expect("make");
    let made = make();
    let attr = made.attr.expect("attr");
    assert_eq!((attr.kind, attr.nlink, attr.mode, attr.uid, attr.gid), (FileKind::File, 0, 0o640, 1000, 7));
    assert_eq!((made.created, made.orphaned), (true, Some(attr.ino)));
    assert_eq!((world.attr(directory), world.names(directory)), (before, vec![]), "no entry was made");
    assert_eq!(world.meta.orphans(), [attr.ino]);
    world.assert_sound();
    // The file without a name is there at the next start, which finds it as an orphan.
    let next = World::on(world.store.clone());
    assert_eq!((next.meta.orphans(), next.meta.inode_count()), (vec![attr.ino], 3));

    let link = |name| Operation::Link { ino: attr.ino, parent: directory, name };
    assert_eq!(world.run(&link(b"f")).err(), Some(Status::NotFound), "nobody has it open");
    let linked = world.run_open(&link(b"f"), &|ino| ino == attr.ino).expect("link");
    assert_eq!((linked.named, linked.attr.map(|attr| attr.nlink)), (Some(attr.ino), Some(1)));
    assert_eq!(world.meta.orphans(), []);
    assert_eq!(world.meta.lookup(directory, b"f").map(|found| found.ino), Ok(attr.ino));
    assert_eq!(world.meta.reap(attr.ino), Err(Status::Invalid), "it has a name");
    assert_eq!(world.run(&link(b"g")).map(|outcome| outcome.named), Ok(None), "the second");
    world.assert_sound();
    assert_eq!(World::on(world.store.clone()).meta.orphans(), []);

    let never = make().attr.expect("attr").ino;
    world.meta.reap(never).expect("reap");
    assert_eq!((world.meta.attr(never), world.meta.inode_count()), (Err(Status::Stale), 3));
    let at = |parent| world.run(&Operation::CreateNameless { parent, mode: 0o600 }).err();
    assert_eq!(at(attr.ino), Some(Status::NotDirectory));
    assert_eq!(at(InodeNo(u64::MAX)), Some(Status::Stale));
    let removed = world.directory(ROOT, "removed");
    let rmdir = Operation::Rmdir { parent: ROOT, name: b"removed" };
    world.run_open(&rmdir, &|_| true).expect("rmdir");
    assert_eq!(at(removed), Some(Status::NotFound));
    world.assert_sound();
}

#[test]
fn rename_replaces_by_type() {
    let world = World::new();
    let (a, b) = (world.directory(ROOT, "a"), world.directory(ROOT, "b"));
    let file = world.file(a, "file");
    world.file(b, "other");
    let go = |from, to| rename(&world, from, to, RenameMode::Replace);
    assert_eq!(go((a, "file"), (ROOT, "b")), Err(Status::IsDirectory));
    assert_eq!(go((ROOT, "a"), (b, "other")), Err(Status::NotDirectory));
    assert_eq!(go((ROOT, "a"), (ROOT, "b")), Err(Status::NotEmpty));
    assert_eq!(go((a, "none"), (b, "none")), Err(Status::NotFound));
    let keep = rename(&world, (a, "file"), (b, "other"), RenameMode::NoReplace);
    assert_eq!(keep, Err(Status::Exists));
    let before = world.attr(file);
    go((a, "file"), (b, "other")).expect("rename");
    let after = world.attr(file);
    assert!(after.ctime > before.ctime && after.mtime == before.mtime);
    assert_eq!((world.attr(a).mtime, world.attr(b).mtime), (after.ctime, after.ctime));
    assert_eq!((world.attr(a).ctime, world.attr(b).ctime), (after.ctime, after.ctime));
    assert_eq!(world.meta.lookup(b, b"other").map(|attr| attr.ino), Ok(file));
    // The target, an empty directory, is replaced, and the root has one subdirectory less.
    go((ROOT, "b"), (ROOT, "a")).expect("rename");
    assert_eq!(world.attr(ROOT).nlink, 3);
    assert_eq!(world.names(ROOT), ["a"]);
    world.assert_sound();
}

#[test]
fn rename_to_another_name_of_the_same_file_does_nothing() {
    let world = World::new();
    let file = world.file(ROOT, "one");
    world.run(&Operation::Link { ino: file, parent: ROOT, name: b"two" }).expect("link");
    let before = world.attr(file);
    for mode in [RenameMode::Replace, RenameMode::Exchange] {
        rename(&world, (ROOT, "one"), (ROOT, "two"), mode).expect("rename");
    }
    rename(&world, (ROOT, "one"), (ROOT, "one"), RenameMode::Replace).expect("rename");
    assert_eq!(world.attr(file), before);
    assert_eq!(world.names(ROOT), ["one", "two"]);
}

#[test]
fn directories_do_not_move_below_themselves() {
    let world = World::new();
    let a = world.directory(ROOT, "a");
    let b = world.directory(a, "b");
    let c = world.directory(b, "c");
    world.file(ROOT, "file");
    for below in [a, b, c] {
        for mode in [RenameMode::Replace, RenameMode::NoReplace] {
            assert_eq!(rename(&world, (ROOT, "a"), (below, "x"), mode), Err(Status::Invalid));
        }
    }
    assert_eq!(rename(&world, (b, "c"), (ROOT, "a"), RenameMode::Exchange), Err(Status::Invalid));
    assert_eq!(rename(&world, (ROOT, "a"), (b, "c"), RenameMode::Exchange), Err(Status::Invalid));
    assert_eq!(rename(&world, (b, "c"), (ROOT, "a"), RenameMode::Replace), Err(Status::NotEmpty));
    rename(&world, (b, "c"), (ROOT, "c"), RenameMode::Replace).expect("rename");
    assert_eq!((world.attr(ROOT).nlink, world.attr(b).nlink), (4, 2));
    assert_eq!(world.meta.parent(c), Ok(ROOT));
    rename(&world, (ROOT, "a"), (c, "a"), RenameMode::Replace).expect("rename");
    world.assert_sound();
}

#[test]
fn exchange_swaps_files_and_directories() {
    let world = World::new();
    let (a, b) = (world.directory(ROOT, "a"), world.directory(ROOT, "b"));
    let below = world.directory(a, "below");
    let file = world.file(b, "file");
    assert_eq!(rename(&world, (a, "below"), (b, "no"), RenameMode::Exchange), Err(Status::NotFound));
    rename(&world, (a, "below"), (b, "file"), RenameMode::Exchange).expect("exchange");
    assert_eq!(world.meta.lookup(a, b"below").map(|attr| (attr.ino, attr.kind)), Ok((file, FileKind::File)));
    assert_eq!(world.meta.lookup(b, b"file").map(|attr| attr.ino), Ok(below));
    assert_eq!((world.attr(a).nlink, world.attr(b).nlink), (2, 3));
    assert_eq!(world.meta.parent(below), Ok(b));
    world.assert_sound();
}

#[test]
fn set_attr_sets_what_it_is_told() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    let set = |caller, set: SetAttr| {
        world.tick();
        world.meta.set_attr(caller, file, &set, None)
    };
    let before = world.attr(file);
    assert_eq!(set(USER, SetAttr::default()), Ok(before));
    let at = Timestamp { secs: -5, nanos: 999_999_999 };
    let times = SetAttr { atime: Some(SetTime::At(at)), mtime: Some(SetTime::Now), ..SetAttr::default() };
    let after = set(USER, times).expect("times");
    assert_eq!((after.atime, after.mtime), (at, after.ctime));
    assert!(after.ctime > before.ctime && after.change > before.change);
    let bad = Timestamp { secs: 0, nanos: 1_000_000_000 };
    let bad = SetAttr { mtime: Some(SetTime::At(bad)), ..SetAttr::default() };
    assert_eq!(set(USER, bad), Err(Status::Invalid));
    let truncated = set(USER, SetAttr { size: Some(5000), ..SetAttr::default() }).expect("size");
    assert_eq!((truncated.size, truncated.mtime), (5000, truncated.ctime));
    assert_eq!(set(USER, SetAttr { size: Some(1 << 63), ..SetAttr::default() }), Err(Status::TooLarge));
    let directory = world.meta.set_attr(USER, ROOT, &SetAttr { size: Some(0), ..SetAttr::default() }, None);
    assert_eq!(directory, Err(Status::IsDirectory));
    let fifo = world.make(ROOT, "fifo", NewNode::Special { kind: FileKind::Fifo, rdev: 0 }).expect("fifo");
    let sized = world.meta.set_attr(USER, fifo.ino, &SetAttr { size: Some(0), ..SetAttr::default() }, None);
    assert_eq!(sized, Err(Status::Invalid));
}

#[test]
fn chown_drops_set_id_bits() {
    let world = World::new();
    // As on Linux, these apply to root as well. If the group may not execute the file, the set-group-id bit stays for callers in that group.
    let cases: [(Caller, u16, u16); 6] = [
        (USER, 0o6755, 0o755),
        (USER, 0o6745, 0o2745),
        (Caller { gid: 5, ..USER }, 0o6745, 0o745),
        (USER, 0o6644, 0o2644),
        (ROOT_USER, 0o6755, 0o755),
        (USER, 0o755, 0o755),
    ];
    for (index, (caller, before, after)) in cases.into_iter().enumerate() {
        let file = world.file(ROOT, &format!("file{index}"));
        let mode = SetAttr { mode: Some(before), ..SetAttr::default() };
        world.meta.set_attr(ROOT_USER, file, &mode, None).expect("chmod");
        let chown = SetAttr { gid: Some(7), ..SetAttr::default() };
        let attr = world.meta.set_attr(caller, file, &chown, None).expect("chown");
        assert_eq!((attr.mode, attr.gid), (after, 7), "case {index}");
        // The mode of the same request is set as given: the kernel has decided it.
        let both = SetAttr { uid: Some(9), mode: Some(0o6755), ..SetAttr::default() };
        assert_eq!(world.meta.set_attr(caller, file, &both, None).map(|attr| attr.mode), Ok(0o6755));
    }
}

#[test]
fn extended_attributes_of_any_size() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    let set = |name: &str, value: &[u8], mode| {
        world.run(&Operation::SetXattr { ino: file, name: name.as_bytes(), value, mode }).map(|_| ())
    };
    assert_eq!(world.meta.xattr(file, b"user.a"), Err(Status::NoAttribute));
    assert_eq!(set("user.a", b"1", XattrMode::Replace), Err(Status::NoAttribute));
    let before = world.attr(file);
    set("user.a", b"1", XattrMode::Create).expect("set");
    assert!(world.attr(file).ctime > before.ctime && world.attr(file).mtime == before.mtime);
    assert_eq!(set("user.a", b"2", XattrMode::Create), Err(Status::Exists));
    for len in [0, 1, 4095, 4096, 4097, 8192, 65_536, 100] {
        let value: Vec<u8> = (0..len).map(|index| index as u8).collect();
        set("user.a", &value, XattrMode::Any).expect("set");
        set("user.ab", b"neighbour", XattrMode::Any).expect("set");
        assert_eq!(world.meta.xattr(file, b"user.a"), Ok(value));
        assert_eq!(world.meta.xattr(file, b"user.ab"), Ok(b"neighbour".to_vec()));
        world.assert_sound();
    }
    assert_eq!(set("user.a", &vec![0; 65_537], XattrMode::Any), Err(Status::ValueTooLarge));
    assert_eq!(set("", b"", XattrMode::Any), Err(Status::Invalid));
    assert_eq!(world.meta.xattr_names(file), Ok(b"user.a\0user.ab\0".to_vec()));
    let remove = |name: &'static [u8]| world.run(&Operation::RemoveXattr { ino: file, name });
    remove(b"user.a").expect("remove");
    assert_eq!(remove(b"user.a").err(), Some(Status::NoAttribute));
    assert_eq!(world.meta.xattr_names(file), Ok(b"user.ab\0".to_vec()));
    for index in 1..super::super::XATTRS_PER_INODE_MAX {
        set(&format!("user.many{index}"), b"", XattrMode::Any).expect("set");
    }
    assert_eq!(set("user.more", b"", XattrMode::Any), Err(Status::NoSpace));
    // Or until their list of names takes 64 KiB, the bound of Linux.
    let long = world.file(ROOT, "long");
    let set = |index: usize| {
        let name = format!("user.{index:0250}");
        let set =
            Operation::SetXattr { ino: long, name: name.as_bytes(), value: &[7; 5000], mode: XattrMode::Any };
        world.run(&set).map(drop)
    };
    (0..256).for_each(|index| set(index).expect("set"));
    assert_eq!(world.meta.xattr_names(long).map(|names| names.len()), Ok(64 * 1024));
    assert_eq!(set(256), Err(Status::NoSpace));
    set(255).expect("one that is there is changed");
    world.unlink(ROOT, "file").expect("unlink");
    world.assert_sound();
}

#[test]
fn an_attribute_is_read_whole_while_it_is_replaced() {
    // On a disk, where a scan may see part of a batch; the lock of the store in memory prevents that.
    let directory = tempfile::tempdir().expect("directory");
    let store = DiskStore::open(&directory.path().join("meta"), DiskOptions::default());
    let store = Arc::new(store.expect("open"));
    format(&*store);
    let world = World::on(store);
    let file = world.file(ROOT, "file");
    let set = |byte: u8, len: usize| {
        let set =
            Operation::SetXattr { ino: file, name: b"user.a", value: &vec![byte; len], mode: XattrMode::Any };
        world.run(&set).expect("set");
    };
    set(0, 1);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        scope.spawn(|| {
            for turn in (0..=u8::MAX).cycle() {
                set(turn, if turn.is_multiple_of(2) { 60_000 } else { 20_000 });
                if stop.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        for _ in 0..6000 {
            let value = world.meta.xattr(file, b"user.a").expect("read");
            assert!(value.iter().all(|byte| *byte == value[0]));
        }
    });
    world.assert_sound();
}

#[test]
fn a_whiteout_takes_the_old_name() {
    let world = World::new();
    let directory = world.directory(ROOT, "a");
    let file = world.file(directory, "file");
    let before = world.meta.inode_count();
    rename(&world, (directory, "file"), (ROOT, "moved"), RenameMode::Whiteout).expect("rename");
    let left = world.meta.lookup(directory, b"file").expect("whiteout");
    assert_eq!((left.kind, left.rdev, left.mode, left.nlink), (FileKind::CharDevice, 0, 0, 1));
    assert_eq!(world.meta.lookup(ROOT, b"moved").expect("moved").ino, file);
    assert_eq!(world.meta.inode_count(), before + 1);
    // A rename over a name, and one over an earlier whiteout. Each whiteout uses an inode number.
    let other = world.file(directory, "other");
    assert!(other > left.ino);
    let keep = rename(&world, (directory, "other"), (directory, "file"), RenameMode::NoReplaceWhiteout);
    assert_eq!(keep, Err(Status::Exists));
    rename(&world, (directory, "other"), (directory, "file"), RenameMode::Whiteout).expect("rename");
    let second = world.meta.lookup(directory, b"other").expect("whiteout");
    assert!(second.kind == FileKind::CharDevice && second.ino > other);
    assert_eq!(world.file(directory, "next"), InodeNo(second.ino.0 + 1));
    // A rename onto itself does nothing, and makes no whiteout.
    rename(&world, (directory, "file"), (directory, "file"), RenameMode::Whiteout).expect("rename");
    assert_eq!(world.meta.lookup(directory, b"file").expect("file").ino, other);
}

#[test]
fn the_umask_is_taken_from_what_is_made() {
    let world = World::new();
    let caller = Caller { umask: 0o027, ..USER };
    let made = |name: &'static [u8], node, mode| {
        let make = Operation::Make { parent: ROOT, name, node, mode };
        world.meta.execute(caller, &make, &|_| true).expect("make").attr.expect("attributes").mode
    };
    assert_eq!(made(b"file", NewNode::File, 0o6666), 0o6640);
    assert_eq!(made(b"directory", NewNode::Directory, 0o1777), 0o1750);
    assert_eq!(made(b"link", NewNode::Symlink(b"to"), 0o777), 0o777);
}
