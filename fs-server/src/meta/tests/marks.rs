//! Operations that chattr marks forbid.

use super::super::{Operation, Outcome};
use super::{ROOT_USER, USER, World};
use cuttlefs_common::attr::{InodeFlags, SetAttr};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{NewNode, RenameMode, XattrMode};
use cuttlefs_common::status::Status;

const ROOT: InodeNo = InodeNo::ROOT;

fn mark(world: &World, ino: InodeNo, flags: InodeFlags) {
    let set = SetAttr { flags: Some(flags), ..SetAttr::default() };
    let attr = world.meta.set_attr(ROOT_USER, ino, &set, None).expect("marked");
    assert_eq!(attr.flags, flags);
}

fn rename<'a>(from: (InodeNo, &'a [u8]), to: (InodeNo, &'a [u8]), mode: RenameMode) -> Operation<'a> {
    Operation::Rename { parent: from.0, name: from.1, new_parent: to.0, new_name: to.1, mode }
}

#[test]
fn nothing_of_what_is_fixed_changes() {
    let world = World::new();
    let directory = world.directory(ROOT, "directory");
    let file = world.file(directory, "file");
    let other = world.file(directory, "other");
    let below = world.directory(directory, "below");
    let run = |operation: &Operation<'_>| -> Result<Outcome, Status> {
        world.meta.execute(ROOT_USER, operation, &|_| true)
    };
    let set =
        |name: &'static [u8]| Operation::SetXattr { ino: file, name, value: b"v", mode: XattrMode::Any };
    run(&set(b"user.before")).expect("set");
    let of_file = [
        Operation::Unlink { parent: directory, name: b"file" },
        Operation::Link { ino: file, parent: ROOT, name: b"again" },
        rename((directory, b"file"), (ROOT, b"moved"), RenameMode::Replace),
        rename((directory, b"other"), (directory, b"file"), RenameMode::Replace),
        rename((directory, b"other"), (directory, b"file"), RenameMode::Exchange),
        set(b"user.a"),
        Operation::RemoveXattr { ino: file, name: b"user.before" },
    ];
    for flags in [InodeFlags::IMMUTABLE, InodeFlags::APPEND_ONLY] {
        mark(&world, file, flags);
        for operation in &of_file {
            assert_eq!(run(operation).err(), Some(Status::NotPermitted), "{flags:?} {operation:?}");
        }
        mark(&world, file, InodeFlags::default());
    }
    let added = [
        Operation::Make { parent: directory, name: b"new", node: NewNode::File, mode: 0o600 },
        Operation::Create { parent: directory, name: b"newer", mode: 0o600, exclusive: true },
        Operation::CreateNameless { parent: directory, mode: 0o600 },
        Operation::Link { ino: other, parent: directory, name: b"again" },
        rename((ROOT, b"outside"), (directory, b"inside"), RenameMode::Replace),
    ];
    let removed = [
        Operation::Unlink { parent: directory, name: b"other" },
        Operation::Rmdir { parent: directory, name: b"below" },
        rename((directory, b"other"), (ROOT, b"moved"), RenameMode::Replace),
        rename((directory, b"other"), (directory, b"file"), RenameMode::Replace),
        rename((ROOT, b"outside"), (directory, b"file"), RenameMode::Replace),
    ];
    world.file(ROOT, "outside");
    mark(&world, directory, InodeFlags::IMMUTABLE);
    for operation in added.iter().chain(&removed) {
        assert_eq!(run(operation).err(), Some(Status::NotPermitted), "{operation:?}");
    }
    mark(&world, directory, InodeFlags::APPEND_ONLY);
    for operation in &removed {
        assert_eq!(run(operation).err(), Some(Status::NotPermitted), "{operation:?}");
    }
    for operation in &added {
        run(operation).expect("what is only added to is added to");
    }
    mark(&world, directory, InodeFlags::default());
    run(&removed[1]).expect("marks go again");
    assert_eq!(world.meta.attr(below).map(|attr| attr.nlink), Ok(0));
    world.meta.reap(below).expect("freed");
    world.assert_sound();
}

#[test]
fn marks_forbid_attributes() {
    let world = World::new();
    let file = world.file(ROOT, "file");
    let now = Some(cuttlefs_common::attr::SetTime::Now);
    let then = Some(cuttlefs_common::attr::SetTime::At(cuttlefs_common::attr::Timestamp::default()));
    let none = SetAttr::default();
    for (set, immutable, append_only) in [
        (SetAttr { mode: Some(0o600), ..none }, true, true),
        (SetAttr { uid: Some(1), ..none }, true, true),
        (SetAttr { size: Some(0), ..none }, true, true),
        (SetAttr { mtime: then, ..none }, true, true),
        (SetAttr { atime: now, mtime: now, ..none }, true, false),
        (SetAttr { flags: Some(InodeFlags::default()), ..none }, false, false),
    ] {
        mark(&world, file, InodeFlags::IMMUTABLE);
        assert_eq!(world.attr(file).forbids(&set), immutable, "{set:?}");
        mark(&world, file, InodeFlags::APPEND_ONLY);
        assert_eq!(world.attr(file).forbids(&set), append_only, "{set:?}");
        mark(&world, file, InodeFlags::NO_DUMP.with(InodeFlags::NO_ATIME, true));
        assert!(!world.attr(file).forbids(&set), "{set:?}");
    }
    // Flags that no caller may set stay as they are.
    let all = SetAttr { flags: Some(InodeFlags(u32::MAX)), ..none };
    assert_eq!(world.meta.set_attr(USER, file, &all, None).expect("set").flags, InodeFlags::SETTABLE);
}
