//! Root's client, which works beside the hostile peers as a mount does: it checks every operation against a model of its files.

use crate::asking::PATIENCE;
use crate::dice::Dice;
use crate::site::{READ_WRITE, ROOT, Site, read};
use cuttlefs_client::file::volume::{FsError, Volume};
use cuttlefs_common::attr::SetAttr;
use cuttlefs_common::ids::InodeNo;
use cuttlefs_common::rpc::RenameMode;
use cuttlefs_common::status::Status;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Longest file.
const LEN_MAX: usize = 160 << 10;
const NAMES: [&[u8]; 5] = [b"one", b"two", b"three", b"four", b"five"];

/// Works until `stop` is set, then checks every file once more and removes it. Counts its operations in `done`.
pub fn work(site: &Site, seed: u64, stop: &AtomicBool, done: &AtomicU64) {
    let dice = Dice::new(seed);
    let directory = site.root().lookup(&ROOT, InodeNo::ROOT, b"honest").expect("lookup").ino;
    let mut files: BTreeMap<&[u8], Vec<u8>> = BTreeMap::new();
    while !stop.load(Ordering::Relaxed) {
        step(site, &dice, directory, &mut files);
        done.fetch_add(1, Ordering::Relaxed);
    }
    for (name, bytes) in &files {
        check(site, directory, name, bytes);
        site.root().unlink(&ROOT, directory, name).expect("unlink");
    }
    done.fetch_add(1, Ordering::Relaxed);
}

/// Panics if `done` does not move for `PATIENCE`.
pub fn watch(stop: &AtomicBool, done: &AtomicU64) {
    let mut last = done.load(Ordering::Relaxed);
    let mut waited = Duration::ZERO;
    while !stop.load(Ordering::Relaxed) {
        const LOOK: Duration = Duration::from_millis(5);
        std::thread::sleep(LOOK);
        let now = done.load(Ordering::Relaxed);
        waited = if now == last { waited + LOOK } else { Duration::ZERO };
        last = now;
        assert!(
            waited < PATIENCE,
            "an operation of a client that keeps the rules takes more than {PATIENCE:?}"
        );
    }
}

fn check(site: &Site, directory: InodeNo, name: &[u8], expected: &[u8]) {
    let root = site.root();
    let ino = root.lookup(&ROOT, directory, name).expect("a file that was made").ino;
    let handle = root.open(&ROOT, ino, READ_WRITE).expect("open").handle;
    let bytes = read(root, handle, LEN_MAX + 1).expect("read");
    assert!(bytes == expected, "{} bytes, {} were written, or others", bytes.len(), expected.len());
    assert_eq!(root.get_attr(&ROOT, ino).expect("attributes").size, expected.len() as u64);
    root.release(handle);
}

fn step(site: &Site, dice: &Dice, directory: InodeNo, files: &mut BTreeMap<&'static [u8], Vec<u8>>) {
    let root = site.root();
    let name = dice.pick(&NAMES);
    let find = |name: &[u8]| root.lookup(&ROOT, directory, name);
    match dice.below(10) {
        0..4 => {
            let open = match root.create(&ROOT, directory, name, 0o600, false, READ_WRITE) {
                Ok((_, open)) => open,
                Err(FsError::Server(Status::NoSpace)) => return,
                Err(error) => panic!("{error}"),
            };
            let file = files.entry(name).or_default();
            let offset = dice.below(file.len().min(LEN_MAX / 2) + 5000);
            let bytes = dice.bytes(1 + dice.below(if dice.chance(70) { 6000 } else { LEN_MAX / 2 - 5000 }));
            match root.write(&ROOT, open.handle, offset as u64, &bytes) {
                Ok(len) => {
                    assert_eq!(len as usize, bytes.len());
                    file.resize(file.len().max(offset + bytes.len()), 0);
                    file[offset..offset + bytes.len()].copy_from_slice(&bytes);
                }
                // Hostile peers may fill the disk: then a write fails and does nothing.
                Err(FsError::Server(Status::NoSpace)) => {}
                Err(error) => panic!("{error}"),
            }
            root.release(open.handle);
        }
        4..6 => match files.get(name) {
            Some(bytes) => check(site, directory, name, bytes),
            None => assert_eq!(find(name), Err(FsError::Server(Status::NotFound))),
        },
        6 => {
            let Some(bytes) = files.get_mut(name) else { return };
            bytes.resize(dice.below(bytes.len() + 1), 0);
            let set = SetAttr { size: Some(bytes.len() as u64), ..SetAttr::default() };
            root.set_attr(&ROOT, find(name).expect("it is there").ino, set).expect("truncate");
        }
        7 => {
            let other = dice.pick(&NAMES);
            let renamed = root.rename(&ROOT, directory, name, directory, other, RenameMode::Replace);
            match files.contains_key(name) {
                true => {
                    renamed.expect("rename");
                    let bytes = files.remove(name).expect("it is there");
                    files.insert(other, bytes);
                }
                false => assert_eq!(renamed, Err(FsError::Server(Status::NotFound))),
            }
        }
        8 => {
            let unlinked = root.unlink(&ROOT, directory, name);
            assert_eq!(unlinked.is_ok(), files.remove(name).is_some());
        }
        _ => site.read_secrets(),
    }
}
