//! A small file system is filled with names, emptied and filled again: new names get the room of deleted ones.
//!
//! It is a tmpfs that the test mounts, so these tests need root; for other users they do nothing.

use super::super::{DiskOptions, DiskStore, Operation};
use super::{World, format};
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::{NewNode, XattrMode};
use cuttlefs_common::status::Status;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

const ROOT: InodeNo = InodeNo::ROOT;
/// How often in a row a name is refused before the test takes the file system for full. It waits `REFUSED_WAIT` after each refusal: the room of
/// deleted names is free after the next checkpoint, which is made within a second.
const REFUSALS_MAX: usize = 30;
const REFUSED_WAIT: Duration = Duration::from_millis(100);

/// A mounted file system of the size that `new` was told; unmounted when dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn new(size: &str) -> Option<Self> {
        let directory = tempfile::tempdir().expect("directory");
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        let options = format!("size={size},mode=0700");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "none"]).arg(directory.path());
        assert!(mount.status().expect("mount runs").success(), "it is mounted");
        Some(Self(directory))
    }

    fn open(&self) -> Arc<DiskStore> {
        Arc::new(DiskStore::open(&self.0.path().join("meta"), DiskOptions::default()).expect("open"))
    }

    fn space(&self) -> String {
        let read = |path: &Path| std::fs::metadata(path).map_or(0, |found| found.len() >> 10);
        let found = rustix::fs::statvfs(self.0.path()).expect("statvfs");
        format!(
            "{} KiB free, records {} KiB",
            (found.f_bavail * found.f_frsize) >> 10,
            read(&self.0.path().join("meta/records"))
        )
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Makes names until the file system is full.
fn fill(world: &World, round: usize, value: &[u8], names: &mut Vec<String>) {
    let mut refusals = 0;
    for number in 0.. {
        let name = format!("{round} {number} {}", "n".repeat(200));
        match world.make(ROOT, &name, NewNode::File) {
            Ok(attr) => {
                refusals = 0;
                names.push(name);
                let set = Operation::SetXattr { ino: attr.ino, name: b"user.x", value, mode: XattrMode::Any };
                assert!(matches!(world.run(&set), Ok(_) | Err(Status::NoSpace)));
            }
            Err(Status::NoSpace) => {
                refusals += 1;
                if refusals == REFUSALS_MAX {
                    return;
                }
                std::thread::sleep(REFUSED_WAIT);
            }
            Err(other) => panic!("{other:?}"),
        }
    }
}

/// Fills the file system, removes all names but one in `one_stays_of` (all if that is 0), and does so four times.
fn refill(size: &str, value: &[u8], one_stays_of: usize, restarts: bool) {
    let Some(small) = Small::new(size) else { return };
    let store = small.open();
    format(&*store);
    let mut world = World::on(store);
    let mut names = Vec::new();
    let mut first = 0;
    for round in 0..4 {
        fill(&world, round, value, &mut names);
        println!("round {round}: {} names, {}", names.len(), small.space());
        if round == 0 {
            first = names.len();
            assert!(first > 1000, "{first} names");
        }
        assert!(names.len() >= first * 8 / 10, "{} names in round {round}, {first} at first", names.len());
        let mut number = 0;
        names.retain(|name| {
            number += 1;
            let stays = one_stays_of != 0 && number % one_stays_of == 0;
            if !stays {
                world.unlink(ROOT, name).expect("a full file system takes removals");
            }
            stays
        });
        world.meta.flush().expect("flush");
        if restarts {
            drop(world);
            world = World::on(small.open());
        }
        world.assert_sound();
    }
}

#[test]
fn names_come_back_when_all_are_removed() {
    refill("48m", &[b'v'; 3000], 0, false);
}

#[test]
fn names_come_back_when_most_are_removed() {
    refill("48m", &[b'v'; 3000], 10, false);
}

#[test]
fn small_names_come_back_when_most_are_removed() {
    refill("12m", &[b'v'; 10], 10, false);
}

#[test]
fn names_come_back_over_restarts() {
    refill("48m", &[b'v'; 3000], 10, true);
}
