//! Access control lists beside mode bits, their inheritance, and the bits that a write takes from a file.

use super::super::{Batch, Caller, Operation, ProblemKind, check, repair};
use super::{HASH_KEY, ROOT_USER, USER, World};
use crate::acl::tests::value;
use crate::meta::{key, record};
use cuttlefs_common::attr::{
    ACCESS_ACL_XATTR as ACCESS, CAPABILITY_XATTR, DEFAULT_ACL_XATTR as DEFAULT, InodeFlags, SetAttr,
    Timestamp,
};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{NewNode, XattrMode};
use cuttlefs_common::status::Status;

const ROOT: InodeNo = InodeNo::ROOT;
const NO: u32 = u32::MAX;
/// The list `u::rwx,u:7:rwx,g::r,m::rwx,o::r`.
const LIST: [(u16, u16, u32); 5] = [(1, 7, NO), (2, 7, 7), (4, 4, NO), (0x10, 7, NO), (0x20, 4, NO)];

fn set(world: &World, caller: Caller, ino: InodeNo, name: &[u8], value: &[u8]) -> Result<u16, Status> {
    let set = Operation::SetXattr { ino, name, value, mode: XattrMode::Any };
    world.meta.execute(caller, &set, &|_| true).map(|outcome| outcome.attr.expect("attributes").mode)
}

fn chmod(world: &World, ino: InodeNo, mode: u16) -> u16 {
    let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
    world.meta.set_attr(ROOT_USER, ino, &set, None).expect("chmod").mode
}

fn make(world: &World, umask: u16, parent: InodeNo, name: &str, node: NewNode<'_>, mode: u16) -> InodeNo {
    let make = Operation::Make { parent, name: name.as_bytes(), node, mode };
    let made = world.meta.execute(Caller { umask, ..USER }, &make, &|_| true).expect("make");
    made.attr.expect("attributes").ino
}

#[test]
fn a_list_and_the_mode_say_the_same() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    assert_eq!(set(&world, USER, file, ACCESS, &value(&LIST)), Ok(0o774));
    assert!(world.attr(file).flags.has(InodeFlags::ACCESS_ACL));
    assert_eq!(world.meta.xattr(file, ACCESS), Ok(value(&LIST)));
    assert_eq!(world.meta.xattr_names(file), Ok(b"system.posix_acl_access\0".to_vec()));
    // chmod changes the list, too: the mode's group bits become the list's mask.
    assert_eq!(chmod(&world, file, 0o2650), 0o2650);
    let masked = [(1, 6, NO), (2, 7, 7), (4, 4, NO), (0x10, 5, NO), (0x20, 0, NO)];
    assert_eq!(world.meta.xattr(file, ACCESS), Ok(value(&masked)));
    // If the caller who sets a list is not in the file's group, the set-group-id bit goes.
    assert_eq!(set(&world, USER, file, ACCESS, &value(&LIST)), Ok(0o2774));
    let stranger = Caller { drops_privileges: true, ..USER };
    assert_eq!(set(&world, stranger, file, ACCESS, &value(&LIST)), Ok(0o774));
    // A list with nothing but what the mode says is not stored.
    let minimal = [(1, 6, NO), (4, 4, NO), (0x20, 0, NO)];
    assert_eq!(set(&world, USER, file, ACCESS, &value(&minimal)), Ok(0o640));
    assert_eq!(world.meta.xattr(file, ACCESS), Err(Status::NoAttribute));
    assert_eq!(world.attr(file).flags, InodeFlags::default());
    assert_eq!(chmod(&world, file, 0o600), 0o600);
    // Setting an empty list removes the list, and so does removing the attribute. The mode stays.
    set(&world, USER, file, ACCESS, &value(&LIST)).expect("set");
    assert_eq!(set(&world, USER, file, ACCESS, &value(&[])), Ok(0o774));
    assert_eq!(world.meta.xattr(file, ACCESS), Err(Status::NoAttribute));
    set(&world, USER, file, ACCESS, &value(&LIST)).expect("set");
    world.run(&Operation::RemoveXattr { ino: file, name: ACCESS }).expect("remove");
    assert_eq!((world.attr(file).mode, world.attr(file).flags), (0o774, InodeFlags::default()));
    world.assert_sound();
}

#[test]
fn lists_that_cannot_be() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    let link = world.make(ROOT, "link", NewNode::Symlink(b"to")).expect("symlink").ino;
    let unsorted = [(4, 4, NO), (1, 7, NO), (0x20, 4, NO)];
    assert_eq!(set(&world, USER, file, ACCESS, &value(&unsorted)), Err(Status::Invalid));
    assert_eq!(set(&world, USER, file, ACCESS, b"\x02\0\0\0x"), Err(Status::Invalid));
    assert_eq!(set(&world, USER, file, DEFAULT, &value(&LIST)), Err(Status::Denied));
    assert_eq!(set(&world, USER, link, ACCESS, &value(&LIST)), Err(Status::Unsupported));
    assert_eq!(world.attr(file).flags, InodeFlags::default());
    world.assert_sound();
}

#[test]
fn what_is_made_inherits() {
    let world = World::new();
    let directory = world.directory(ROOT, "directory");
    set(&world, USER, directory, DEFAULT, &value(&LIST)).expect("set");
    assert_eq!(world.attr(directory).mode & 0o777, 0o755, "a default list is not the directory's own");
    // The umask is ignored in a directory with a default list.
    let file = make(&world, 0o077, directory, "file", NewNode::File, 0o666);
    let inherited = [(1, 6, NO), (2, 7, 7), (4, 4, NO), (0x10, 6, NO), (0x20, 4, NO)];
    assert_eq!(world.attr(file).mode, 0o664);
    assert_eq!(world.meta.xattr(file, ACCESS), Ok(value(&inherited)));
    assert_eq!(world.meta.xattr(file, DEFAULT), Err(Status::NoAttribute));
    let below = make(&world, 0o077, directory, "below", NewNode::Directory, 0o777);
    assert_eq!(world.meta.xattr(below, DEFAULT), Ok(value(&LIST)));
    assert_eq!((world.attr(below).mode, world.meta.xattr(below, ACCESS)), (0o774, Ok(value(&LIST))));
    let link = make(&world, 0o077, directory, "link", NewNode::Symlink(b"to"), 0o777);
    assert_eq!((world.attr(link).mode, world.attr(link).flags), (0o777, InodeFlags::default()));
    // A default list that a mode can express gives the file a mode and no access list.
    set(&world, USER, directory, DEFAULT, &value(&[(1, 7, NO), (4, 5, NO), (0x20, 0, NO)])).expect("set");
    let plain = make(&world, 0o777, directory, "plain", NewNode::File, 0o666);
    assert_eq!((world.attr(plain).mode, world.attr(plain).flags), (0o640, InodeFlags::default()));
    // Without a default list the umask counts again.
    world.run(&Operation::RemoveXattr { ino: directory, name: DEFAULT }).expect("remove");
    let masked = make(&world, 0o077, directory, "masked", NewNode::File, 0o666);
    assert_eq!(world.attr(masked).mode, 0o600);
    world.assert_sound();
}

#[test]
fn a_writer_takes_privileges() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    let writer = Caller { drops_privileges: true, ..USER };
    let drop_privileges = |caller| {
        let outcome = world.meta.execute(caller, &Operation::DropPrivileges { ino: file }, &|_| true);
        outcome.expect("done").attr.expect("attributes")
    };
    chmod(&world, file, 0o6755);
    set(&world, ROOT_USER, file, CAPABILITY_XATTR, b"caps").expect("set");
    assert!(world.attr(file).has_privileges() && world.attr(file).flags.has(InodeFlags::CAPABILITY));
    let change = world.attr(file).change;
    let attr = drop_privileges(writer);
    assert_eq!((attr.mode, attr.flags), (0o755, InodeFlags::default()));
    assert!(attr.change > change);
    assert_eq!(world.meta.xattr(file, CAPABILITY_XATTR), Err(Status::NoAttribute));
    assert_eq!(drop_privileges(writer).change, attr.change, "nothing to take, nothing written");
    // If the file's group may not execute it, the set-group-id bit stays for callers in that group.
    chmod(&world, file, 0o6644);
    assert_eq!(drop_privileges(writer).mode, 0o2644);
    assert_eq!(drop_privileges(Caller { gid: 5, ..writer }).mode, 0o644);
    // A change of length takes the privileges in the same batch, if its caller may not keep them.
    let cut = SetAttr { size: Some(0), ..SetAttr::default() };
    chmod(&world, file, 0o6755);
    assert_eq!(world.meta.set_attr(USER, file, &cut, None).expect("cut").mode, 0o6755);
    assert_eq!(world.meta.set_attr(writer, file, &cut, None).expect("cut").mode, 0o755);
    world.assert_sound();
}

#[test]
fn marks_that_lie_are_found_and_repaired() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    set(&world, USER, file, ACCESS, &value(&LIST)).expect("set");
    let store = &*world.store;
    let lie = |flags| {
        let value = store.get(&key::inode(file)).expect("readable").expect("there");
        let record = record::parse_inode(&value).expect("a record");
        let mut batch = Batch::default();
        batch.put(key::inode(file), record::encode(&record::InodeRecord { flags, ..record }));
        store.commit(batch).expect("commit");
    };
    for flags in [InodeFlags::default(), InodeFlags::ACCESS_ACL.with(InodeFlags::CAPABILITY, true)] {
        lie(flags);
        let problems = check(store, HASH_KEY).expect("survey");
        assert_eq!(problems.iter().map(|problem| problem.kind).collect::<Vec<_>>(), [ProblemKind::Marks]);
        let now = Timestamp::default();
        repair(store, HASH_KEY, u64::MAX, now).expect("repair");
        assert!(check(store, HASH_KEY).expect("survey").is_empty());
    }
    assert!(world.attr(file).flags.has(InodeFlags::ACCESS_ACL));
}
