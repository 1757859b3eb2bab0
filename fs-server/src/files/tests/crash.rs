//! Power loss at any moment: all fsynced bytes are there afterwards, and never bytes of another file.

use super::harness::{Storage, stamp, stamped};
use super::harness::{allocate_range, defragment_all, write};
use super::records::inode;
use crate::files::free_pages::fill_free_pages;
use crate::files::write_back::write_back;
use crate::files::{Grantee, Word, WriteAt, change_word, grant_write, reap, sync, truncate, write_back_all};
use crate::pages::Source;
use crate::pool::simdisk::SimMode;
use cuttlefs_common::ids::{FileKey, PAGE_SIZE_U64};
use cuttlefs_common::rdma::{FileAtomic, FileTarget, FileValue, FileWrite, PeerKey, RegionOwner};
use cuttlefs_common::rpc::{Allocate, Rights};
use cuttlefs_common::status::Status;
use cuttlefs_common::world::{Random, SeededRandom};
use futures_lite::future::{block_on, poll_once};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::pin;

const POOL_PAGES: u64 = 48;
/// Few, so that pages are evicted, or enough for grants and the free page queue.
const FRAMES: [u64; 2] = [9, 300];
const OWNER: RegionOwner = RegionOwner(7);
const BOTH: Rights = Rights { read: true, write: true };
const FILES: u64 = 3;
const SPAN: u64 = 24 * PAGE_SIZE_U64;

#[derive(Clone, Debug)]
enum Op {
    Write {
        ino: u64,
        offset: u64,
        len: usize,
    },
    Truncate {
        ino: u64,
        size: u64,
    },
    Allocate {
        ino: u64,
        offset: u64,
        len: u64,
        how: Allocate,
    },
    /// An fsync as a client asks for it, or with every page written to its place on SSD.
    Fsync {
        ino: u64,
        in_place: bool,
    },
    SyncAll,
    Evict {
        frames: u32,
    },
    /// Unlinks and reaps the file, and makes one with a new inode number instead.
    Replace {
        ino: u64,
    },
    /// A write grant.
    Grant {
        ino: u64,
        offset: u64,
        len: u64,
    },
    /// A WRITE or an APPEND of the NIC engine, if it can do it.
    OneSided {
        ino: u64,
        offset: Option<u64>,
        len: usize,
    },
    /// An atomic by request, which puts stamps in the place of what is there.
    Atomic {
        ino: u64,
        offset: u64,
    },
    /// Fills the free page queue.
    Fill,
    /// Moves the file's pages to fewer runs.
    Defragment {
        ino: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let ino = || 0..FILES;
    let len = || prop_oneof![1u64..300, (1u64..8).prop_map(|pages| pages * PAGE_SIZE_U64), 1u64..30_000];
    let how = prop_oneof![
        Just(Allocate::Reserve { keep_size: false }),
        Just(Allocate::PunchHole),
        Just(Allocate::ZeroRange { keep_size: false }),
    ];
    prop_oneof![
        8 => (ino(), 0..SPAN, len()).prop_map(|(ino, offset, len)| Op::Write { ino, offset, len: len as usize }),
        2 => (ino(), 0..SPAN).prop_map(|(ino, size)| Op::Truncate { ino, size }),
        2 => (ino(), 0..SPAN, len(), how).prop_map(|(ino, offset, len, how)| Op::Allocate { ino, offset, len, how }),
        4 => (ino(), prop::bool::weighted(0.3)).prop_map(|(ino, in_place)| Op::Fsync { ino, in_place }),
        1 => Just(Op::SyncAll),
        3 => (1u32..7).prop_map(|frames| Op::Evict { frames }),
        1 => ino().prop_map(|ino| Op::Replace { ino }),
        3 => (ino(), 0..SPAN, len()).prop_map(|(ino, offset, len)| Op::Grant { ino, offset, len }),
        6 => (ino(), prop::option::of(0..SPAN), len())
            .prop_map(|(ino, offset, len)| Op::OneSided { ino, offset, len: len as usize }),
        4 => (ino(), 0..SPAN / 8).prop_map(|(ino, word)| Op::Atomic { ino, offset: word * 8 }),
        2 => Just(Op::Fill),
        4 => ino().prop_map(|ino| Op::Defragment { ino }),
    ]
}

/// The contents that a file may have after a crash.
#[derive(Clone, Debug, Default)]
struct Expect {
    ino: u64,
    /// The file's lengths since its last fsync, with the length at that fsync.
    sizes: BTreeSet<u64>,
    size: u64,
    /// Offsets of bytes that must be there: they were fsynced, and only writes touched them since.
    durable: BTreeSet<u64>,
    /// Offsets of bytes that are written now, synced or not.
    written: BTreeSet<u64>,
    /// The filekey that has grants.
    key: Option<FileKey>,
}

impl Expect {
    fn forget(&mut self, from: u64, to: u64) {
        for set in [&mut self.durable, &mut self.written] {
            let gone: Vec<u64> = set.range(from..to.max(from)).copied().collect();
            gone.iter().for_each(|at| {
                set.remove(at);
            });
        }
    }

    fn resize(&mut self, size: u64) {
        self.size = size;
        self.sizes.insert(size);
    }
}

struct World {
    storage: Storage,
    files: Vec<Expect>,
    next_ino: u64,
}

impl World {
    /// Does the whole operation if `steps` is `None`. Else gives up after so many disk steps, and returns `false` if it gave up.
    fn apply(&mut self, op: &Op, steps: Option<usize>) -> bool {
        let storage = &self.storage;
        let (files, disk) = (&*storage.files, &storage.disk);
        match *op {
            Op::Write { ino, offset, len } => {
                let expect = &mut self.files[ino as usize];
                let bytes = stamped(expect.ino, offset, len);
                let file = storage.file(expect.ino);
                let end = offset + len as u64;
                // A write that is given up may still have set this length before the crash.
                expect.sizes.insert(end.max(expect.size));
                let write = write(files, disk, &file, WriteAt::Offset(offset), Source::Bytes(&bytes));
                match drive(storage, write, steps) {
                    None => return false,
                    Some(Err(Status::NoSpace)) => {}
                    Some(result) => {
                        result.expect("writes");
                        expect.written.extend(offset..end);
                        expect.resize(end.max(expect.size));
                    }
                }
            }
            Op::Truncate { ino, size } => {
                let expect = &mut self.files[ino as usize];
                let file = storage.file(expect.ino);
                expect.sizes.insert(size);
                expect.forget(size, u64::MAX);
                let number = inode(expect.ino);
                let commit = |commit| {
                    storage.meta.commit_data(&[commit])?;
                    storage.meta.attr(number)
                };
                match drive(storage, truncate(files, disk, &file, size, commit), steps) {
                    None => return false,
                    Some(result) => {
                        result.expect("truncates");
                        expect.resize(size);
                    }
                }
            }
            Op::Allocate { ino, offset, len, how } => {
                let expect = &mut self.files[ino as usize];
                let file = storage.file(expect.ino);
                let end = offset + len;
                if how != Allocate::PunchHole {
                    expect.sizes.insert(end.max(expect.size));
                }
                if !matches!(how, Allocate::Reserve { .. }) {
                    expect.forget(offset, end);
                }
                match drive(storage, allocate_range(files, disk, &file, offset, len, how), steps) {
                    None => return false,
                    Some(Err(Status::NoSpace)) => {}
                    Some(result) => {
                        result.expect("allocates");
                        if how != Allocate::PunchHole {
                            expect.resize(end.max(expect.size));
                        }
                    }
                }
            }
            Op::Fsync { ino, in_place } => {
                let expect = &mut self.files[ino as usize];
                let file = storage.file(expect.ino);
                let synced = async {
                    match in_place {
                        true => write_back(files, disk, &[file], true).await,
                        false => sync(files, disk, &file).await,
                    }
                };
                match drive(storage, synced, steps) {
                    None => return false,
                    Some(result) => result.expect("durable"),
                }
                expect.durable = expect.written.clone();
                expect.sizes = [expect.size].into();
            }
            Op::SyncAll => {
                match drive(storage, write_back_all(files, disk), steps) {
                    None => return false,
                    Some(result) => result.expect("durable"),
                }
                for expect in &mut self.files {
                    expect.durable = expect.written.clone();
                    expect.sizes = [expect.size].into();
                }
            }
            Op::Evict { frames } => {
                if drive(storage, files.pages.evict(disk, frames), steps).is_none() {
                    return false;
                }
            }
            Op::Replace { ino } => {
                let old = std::mem::take(&mut self.files[ino as usize]);
                if let Some(key) = old.key {
                    files.close(OWNER, key).expect("closes");
                }
                let number = inode(old.ino);
                // The new file is made first, so that one of the two is there at any crash.
                self.files[ino as usize] =
                    Expect { ino: self.next_ino, sizes: [0].into(), ..Expect::default() };
                storage.meta.create(inode(self.next_ino));
                self.next_ino += 1;
                let commit = || storage.meta.remove(number).map(|_| false);
                match drive(storage, reap(files, number, commit), steps) {
                    None => return false,
                    Some(freed) => freed.expect("reaped"),
                };
            }
            Op::Grant { ino, offset, len } => {
                let expect = &mut self.files[ino as usize];
                let open = || files.open(OWNER, inode(expect.ino), BOTH).expect("opens").filekey;
                let filekey = *expect.key.get_or_insert_with(open);
                let pages = (offset + len).div_ceil(PAGE_SIZE_U64) - offset / PAGE_SIZE_U64;
                let Ok(pages) = files.grants.take(&PeerKey::User(0), true, pages) else { return true };
                let (file, grantee) = (storage.file(expect.ino), Grantee { owner: OWNER, filekey });
                match drive(storage, grant_write(files, disk, &file, grantee, (offset, len), pages), steps) {
                    None => return false,
                    Some(Err(Status::NoSpace | Status::Busy)) => {}
                    Some(granted) => drop(granted.expect("granted")),
                }
            }
            Op::OneSided { ino, offset, len } => {
                let expect = &mut self.files[ino as usize];
                let Some(key) = expect.key else { return true };
                let at = offset.unwrap_or(expect.size);
                let bytes = stamped(expect.ino, at, len);
                let is_done = match offset {
                    Some(at) => files.write_file(OWNER, key, at, &bytes) == Ok(FileWrite::Done),
                    None => match files.append_file(OWNER, key, &bytes) {
                        Ok(FileValue::Done(offset)) => {
                            offset == at || panic!("appended at {offset}, not {at}")
                        }
                        _ => false,
                    },
                };
                if is_done {
                    let end = at + len as u64;
                    expect.written.extend(at..end);
                    expect.resize(end.max(expect.size));
                }
            }
            Op::Atomic { ino, offset } => {
                let expect = &mut self.files[ino as usize];
                let (file, bytes) = (storage.file(expect.ino), offset..offset + 8);
                let stamped: [u8; 8] = stamped(expect.ino, offset, 8).try_into().expect("eight bytes");
                let there = bytes.clone().map(|at| match expect.written.contains(&at) {
                    true => stamp(expect.ino, at),
                    false => 0,
                });
                let there: Vec<u8> = there.collect();
                let old = u64::from_le_bytes(there.try_into().expect("eight bytes"));
                let operation = FileAtomic::CompareSwap { expect: old, swap: u64::from_le_bytes(stamped) };
                let may = |_, end| if end > file.size() { Err(Status::NoSuchOffset) } else { Ok(()) };
                let word = Word { offset, operation };
                let changed = change_word(files, disk, (&file, FileKey(1)), word, &may);
                match drive(storage, changed, steps) {
                    None => return false,
                    Some(Err(Status::NoSpace)) => {}
                    Some(Err(Status::NoSuchOffset)) => assert!(bytes.end > expect.size),
                    Some(changed) => {
                        assert_eq!(changed.expect("changed").old, old);
                        expect.written.extend(bytes);
                    }
                }
            }
            Op::Defragment { ino } => {
                let file = storage.file(self.files[ino as usize].ino);
                match drive(storage, defragment_all(files, disk, &file), steps) {
                    None => return false,
                    Some(Err(Status::NoSpace)) => {}
                    Some(moved) => _ = moved.expect("moved"),
                }
            }
            Op::Fill => {
                if drive(storage, fill_free_pages(files, disk), steps).is_none() {
                    return false;
                }
            }
        }
        true
    }

    fn crash(self, random: &SeededRandom) {
        let Self { storage, files, .. } = self;
        let keep = (random.next_u64() % storage.meta.crash_states() as u64) as usize;
        storage.disk.crash(random);
        storage.disk.set_mode(SimMode::AtOnce);
        let after = storage.restart(storage.meta.crash(keep));
        drop(storage);
        after.check();
        let known: BTreeMap<u64, &Expect> = files.iter().map(|expect| (expect.ino, expect)).collect();
        for ino in after.meta.files() {
            let file = after.file(ino);
            let content = after.read(&file, 0, file.size().max(1) as usize).expect("readable");
            for (at, byte) in content.iter().enumerate() {
                let own = stamp(ino, at as u64);
                assert!(*byte == 0 || *byte == own, "byte {at} of file {ino} is {byte}, not {own}");
            }
            let Some(expect) = known.get(&ino) else {
                continue;
            };
            assert!(
                expect.sizes.contains(&file.size()),
                "file {ino} has {} bytes, not one of {:?}",
                file.size(),
                expect.sizes
            );
            for at in expect.durable.iter().filter(|at| **at < file.size()) {
                assert_eq!(content[*at as usize], stamp(ino, *at), "fsynced byte {at} of file {ino}");
            }
            // The file grows by zeros after the crash, not by bytes that were there before.
            let size = file.size();
            let commit = |commit| {
                after.meta.commit_data(&[commit])?;
                after.meta.attr(file.ino())
            };
            block_on(truncate(&after.files, &after.disk, &file, size + 9000, commit)).expect("grows");
            let tail = after.read(&file, size, 9000).expect("readable");
            assert!(tail.iter().all(|byte| *byte == 0), "the tail of file {ino} came back");
        }
        block_on(write_back_all(&after.files, &after.disk)).expect("durable");
        after.check();
    }
}

/// Runs the future to its end, or until the disk has done so many steps.
fn drive<T>(storage: &Storage, future: impl Future<Output = T>, steps: Option<usize>) -> Option<T> {
    let mut future = pin!(future);
    let mut left = steps.unwrap_or(usize::MAX);
    loop {
        // A future may yield several times without a disk step in between, so it is polled often before the next one.
        for _ in 0..64 {
            if let Some(result) = block_on(poll_once(&mut future)) {
                return Some(result);
            }
        }
        if left == 0 {
            return None;
        }
        left -= 1;
        assert!(storage.disk.step() || steps.is_some(), "nothing to wait for");
    }
}

proptest! {
    #[test]
    fn a_crash_leaves_what_was_fsynced_and_nobody_elses_bytes(
        ops in prop::collection::vec(op(), 1..40),
        last in op(),
        steps in 0usize..12,
        seed in any::<u64>(),
        frames in prop::sample::select(&FRAMES[..]),
    ) {
        let storage = Storage::new(POOL_PAGES, frames);
        storage.disk.set_mode(SimMode::Deferred);
        let files = (1..=FILES).map(|ino| Expect { ino, sizes: [0].into(), ..Expect::default() }).collect();
        (1..=FILES).for_each(|ino| storage.meta.create(inode(ino)));
        let mut world = World { storage, files, next_ino: FILES + 1 };
        for op in &ops {
            world.apply(op, None);
        }
        world.apply(&last, Some(steps));
        world.crash(&SeededRandom::new(seed));
    }
}
