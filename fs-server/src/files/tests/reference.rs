//! Random operations on a tiny pool against a model, which knows bytes, sizes, holes, space and ENOSPC exactly.

use super::harness::Storage;
use super::harness::{allocate_range, defragment_all, write};
use super::records::inode;
use crate::files::write_back::write_back;
use crate::files::{
    Word, WordChanged, WriteAt, change_word, copy_range, reap, seek, sync, truncate, write_back_all,
};
use crate::pages::Source;
use cuttlefs_common::ids::{FileKey, FilePage, PAGE_SIZE, PAGE_SIZE_U64};
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::rdma::{FileAtomic, FileRead, FileTarget, RegionOwner};
use cuttlefs_common::rpc::{Allocate, Rights, SeekFor};
use cuttlefs_common::status::Status;
use cuttlefs_reference::Contents;
use futures_lite::future::block_on;
use proptest::prelude::*;
use std::collections::BTreeMap;

const POOL_PAGES: u64 = 64;
const FRAMES: u64 = 8;
const FILES: u64 = 3;
/// No operation reaches past this offset: a bit more than the pool, so that space runs out.
const SPAN: u64 = 40 * PAGE_SIZE_U64;
const OWNER: RegionOwner = RegionOwner(7);

#[derive(Clone, Debug)]
enum Op {
    Write { ino: u64, offset: u64, len: usize, append: bool, from_memory: bool },
    Read { ino: u64, offset: u64, len: usize },
    Truncate { ino: u64, size: u64 },
    Allocate { ino: u64, offset: u64, len: u64, how: Allocate },
    Copy { from: u64, from_offset: u64, to: u64, to_offset: u64, len: u64 },
    Seek { ino: u64, offset: u64 },
    Fsync { ino: u64, in_place: bool },
    SyncAll,
    Evict { frames: u32 },
    Replace { ino: u64 },
    Defragment { ino: u64 },
    Add { ino: u64, offset: u64, add: u64 },
    Swap { ino: u64, offset: u64, hits: bool, swap: u64 },
    Restart,
}

/// Offsets, often at page boundaries.
fn place() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => 0..SPAN,
        2 => (0..SPAN / PAGE_SIZE_U64).prop_map(|page| page * PAGE_SIZE_U64),
        1 => (1..SPAN / PAGE_SIZE_U64, 0u64..3).prop_map(|(page, by)| page * PAGE_SIZE_U64 + by - 1),
    ]
}

fn length() -> impl Strategy<Value = u64> {
    prop_oneof![1u64..200, (1u64..12).prop_map(|pages| pages * PAGE_SIZE_U64), 1u64..60_000]
}

fn how() -> impl Strategy<Value = Allocate> {
    prop_oneof![
        any::<bool>().prop_map(|keep_size| Allocate::Reserve { keep_size }),
        Just(Allocate::PunchHole),
        any::<bool>().prop_map(|keep_size| Allocate::ZeroRange { keep_size }),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let ino = || 1..=FILES;
    prop_oneof![
        8 => (ino(), place(), length(), prop::bool::weighted(0.2), any::<bool>()).prop_map(
            |(ino, offset, len, append, from_memory)| Op::Write { ino, offset, len: len as usize, append, from_memory }
        ),
        4 => (ino(), place(), length()).prop_map(|(ino, offset, len)| Op::Read { ino, offset, len: len as usize }),
        3 => (ino(), place()).prop_map(|(ino, size)| Op::Truncate { ino, size }),
        4 => (ino(), place(), length(), how()).prop_map(|(ino, offset, len, how)| Op::Allocate { ino, offset, len, how }),
        1 => (ino(), place(), ino(), place(), length()).prop_map(
            |(from, from_offset, to, to_offset, len)| Op::Copy { from, from_offset, to, to_offset, len }
        ),
        1 => (ino(), place()).prop_map(|(ino, offset)| Op::Seek { ino, offset }),
        3 => (ino(), any::<bool>()).prop_map(|(ino, in_place)| Op::Fsync { ino, in_place }),
        1 => Just(Op::SyncAll),
        3 => (1u32..6).prop_map(|frames| Op::Evict { frames }),
        1 => ino().prop_map(|ino| Op::Replace { ino }),
        3 => ino().prop_map(|ino| Op::Defragment { ino }),
        4 => (ino(), place(), any::<u64>()).prop_map(|(ino, offset, add)| Op::Add { ino, offset: offset & !7, add }),
        4 => (ino(), place(), any::<bool>(), 0u64..3).prop_map(
            |(ino, offset, hits, swap)| Op::Swap { ino, offset: offset & !7, hits, swap }
        ),
        1 => Just(Op::Restart),
    ]
}

struct World {
    storage: Storage,
    model: BTreeMap<u64, Contents>,
    shared: SharedMemory,
    count: u64,
}

impl World {
    fn free(&self) -> u64 {
        POOL_PAGES - self.model.values().map(|model| model.pages.len() as u64).sum::<u64>()
    }

    fn apply(&mut self, op: &Op) {
        self.count += 1;
        let storage = &self.storage;
        let (files, disk) = (&*storage.files, &storage.disk);
        let free = self.free();
        match *op {
            Op::Write { ino, offset, len, append, from_memory } => {
                let bytes: Vec<u8> = (0..len as u64)
                    .map(|index| (self.count.wrapping_mul(31) + index / 97 + index) as u8)
                    .collect();
                self.shared.write(100, &bytes);
                let source = if from_memory {
                    Source::Memory { memory: &self.shared, offset: 100, len }
                } else {
                    Source::Bytes(&bytes)
                };
                let model = self.model.get_mut(&ino).expect("model");
                let place = if append { model.bytes.len() as u64 } else { offset };
                let at = if append { WriteAt::End } else { WriteAt::Offset(offset) };
                let result = block_on(write(files, disk, &storage.file(ino), at, source));
                if model.missing(place, place + len as u64) > free {
                    assert_eq!(result, Err(Status::NoSpace));
                } else {
                    let written = result.expect("there is room");
                    assert_eq!((written.offset, written.len as usize), (place, len));
                    model.write(place, &bytes);
                }
            }
            Op::Read { ino, offset, len } => {
                let model = &self.model[&ino];
                let got = storage.read(&storage.file(ino), offset, len).expect("reads");
                assert!(got == model.read(offset, len as u64), "file {ino} [{offset}, {offset} + {len})");
            }
            Op::Truncate { ino, size } => {
                let commit = |commit| {
                    storage.meta.commit_data(&[commit])?;
                    storage.meta.attr(inode(ino))
                };
                block_on(truncate(files, disk, &storage.file(ino), size, commit)).expect("truncates");
                let model = self.model.get_mut(&ino).expect("model");
                model.truncate(size);
            }
            Op::Allocate { ino, offset, len, how } => {
                let result = block_on(allocate_range(files, disk, &storage.file(ino), offset, len, how));
                let model = self.model.get_mut(&ino).expect("model");
                if how != Allocate::PunchHole && model.missing(offset, offset + len) > free {
                    assert_eq!(result, Err(Status::NoSpace));
                } else {
                    result.expect("there is room");
                    model.allocate(offset, len, how);
                }
            }
            Op::Copy { from, from_offset, to, to_offset, len } => {
                let source = self.model[&from].bytes.clone();
                let len = len.min((source.len() as u64).saturating_sub(from_offset));
                let overlaps = from == to && from_offset < to_offset + len && to_offset < from_offset + len;
                let (from_file, to_file) = (storage.file(from), storage.file(to));
                let result = block_on(copy_range(
                    files,
                    disk,
                    (&from_file, from_offset),
                    (&to_file, to_offset),
                    len,
                    None,
                ))
                .map(|copied| copied.len);
                let model = self.model.get_mut(&to).expect("model");
                if overlaps {
                    assert_eq!(result, Err(Status::Invalid));
                } else if len > 0 && model.missing(to_offset, to_offset + len) > free {
                    assert_eq!(result, Err(Status::NoSpace));
                } else {
                    assert_eq!(result, Ok(len));
                    if len > 0 {
                        model.write(to_offset, &source[from_offset as usize..(from_offset + len) as usize]);
                    }
                }
            }
            Op::Seek { ino, offset } => {
                let file = storage.file(ino);
                let model = &self.model[&ino];
                assert_eq!(block_on(seek(&file, offset, SeekFor::Data)), model.seek(offset, SeekFor::Data));
                assert_eq!(block_on(seek(&file, offset, SeekFor::Hole)), model.seek(offset, SeekFor::Hole));
            }
            Op::Fsync { ino, in_place: true } => {
                block_on(write_back(files, disk, &[storage.file(ino)], true)).expect("durable");
                assert!(storage.file(ino).is_clean());
            }
            Op::Fsync { ino, in_place: false } => {
                block_on(sync(files, disk, &storage.file(ino))).expect("durable");
            }
            Op::SyncAll => {
                block_on(write_back_all(files, disk)).expect("durable");
                assert_eq!(files.pages.figures().dirty_frames, 0);
                assert_eq!(files.space().figures().quarantined, 0);
                assert_eq!(files.figures().active.regions, 0, "clean and closed files go");
            }
            Op::Evict { frames } => {
                let before = files.pages.figures().free_frames;
                let room = files.pages.figures().frames - before;
                let freed = block_on(files.pages.evict(disk, frames));
                assert_eq!(freed, frames.min(room));
                assert_eq!(files.pages.figures().free_frames, before + freed);
            }
            Op::Replace { ino } => {
                let pages = self.model[&ino].pages.len() as u64;
                let freed =
                    block_on(reap(files, inode(ino), || storage.meta.remove(inode(ino)).map(|_| false)));
                assert_eq!(freed, Ok(pages));
                storage.meta.create(inode(ino));
                self.model.insert(ino, Contents::default());
            }
            Op::Defragment { ino } => {
                let file = storage.file(ino);
                let before = (storage.meta.attr(inode(ino)), storage.breaks(&file));
                match block_on(defragment_all(files, disk, &file)) {
                    // A step wants as many free pages as the stretch has.
                    Err(Status::NoSpace) => assert!(free < self.model[&ino].pages.len() as u64),
                    moved => {
                        moved.expect("moved");
                        assert!(storage.breaks(&file) <= before.1);
                    }
                }
                assert_eq!(storage.meta.attr(inode(ino)), before.0, "times and counters stay");
            }
            Op::Add { ino, offset, add } => self.atomic(ino, offset, FileAtomic::FetchAdd { add }),
            Op::Swap { ino, offset, hits, swap } => {
                let there = self.word(ino, offset);
                let expect = if hits { there } else { !there };
                self.atomic(ino, offset, FileAtomic::CompareSwap { expect, swap });
            }
            Op::Restart => {
                block_on(write_back_all(files, disk)).expect("durable");
                let meta = storage.meta.crash(0);
                self.storage = storage.restart(meta);
            }
        }
    }

    /// What is at an aligned place, with zeros behind the end.
    fn word(&self, ino: u64, offset: u64) -> u64 {
        let mut word = [0; 8];
        let bytes = self.model[&ino].read(offset, 8);
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    }

    /// An atomic by request.
    fn atomic(&mut self, ino: u64, offset: u64, operation: FileAtomic) {
        let (old, free) = (self.word(ino, offset), self.free());
        let file = self.storage.file(ino);
        let may = |_, end| if end > file.size() { Err(Status::NoSuchOffset) } else { Ok(()) };
        let before = self.storage.meta.attr(inode(ino)).expect("live");
        let word = Word { offset, operation };
        let (files, disk) = (&*self.storage.files, &self.storage.disk);
        let done = block_on(change_word(files, disk, (&file, FileKey(1)), word, &may));
        let after = self.storage.meta.attr(inode(ino)).expect("live");
        let (new, model) = (operation.apply(old), self.model.get_mut(&ino).expect("model"));
        if offset + 8 > model.bytes.len() as u64 {
            assert_eq!(done, Err(Status::NoSuchOffset));
        } else if new != old && model.missing(offset, offset + 8) > free {
            assert_eq!(done, Err(Status::NoSpace));
        } else {
            let changed = new != old;
            assert_eq!(done, Ok(WordChanged { old, change: changed.then_some(after.change) }));
            if changed {
                model.write(offset, &new.to_le_bytes());
                assert!(after.change > before.change);
                return;
            }
        }
        assert_eq!(after, before, "nothing was changed");
    }

    /// Compares every file's size, space and bytes in memory with the model, as the NIC engine reads them.
    fn check(&self) {
        self.storage.check();
        for (ino, model) in &self.model {
            let file = self.storage.file(*ino);
            assert_eq!(file.size(), model.bytes.len() as u64);
            assert_eq!(file.allocated_pages(), model.pages.len() as u64);
            self.check_target(*ino, model);
        }
    }

    fn check_target(&self, ino: u64, model: &Contents) {
        let files = &self.storage.files;
        let rights = Rights { read: true, write: false };
        let opened = files.open(OWNER, inode(ino), rights).expect("opens");
        let len = model.bytes.len() + 100;
        let mut out = vec![0xEE; len];
        let read = files.read_file(OWNER, opened.filekey, 0, &mut out).expect("readable");
        let FileRead::Done(got) = read else { panic!("frames do not fault") };
        assert_eq!(got, model.bytes.len());
        let mut bitmap = vec![0xEE; model.bytes.len().div_ceil(PAGE_SIZE * 8) + 1];
        files.read_bitmap(OWNER, opened.filekey, 0, &mut bitmap).expect("readable");
        for (page, (out, bytes)) in
            out[..got].chunks(PAGE_SIZE).zip(model.bytes.chunks(PAGE_SIZE)).enumerate()
        {
            let there = bitmap[page / 8] >> (page % 8) & 1 == 1;
            let resident = match opened.file.state().table.get(FilePage(page as u64)) {
                Some((pool, piece)) if piece.has_bytes() => files.pages.residency.load(pool).is_resident(),
                _ => true,
            };
            assert_eq!(there, resident);
            if resident {
                assert!(out == bytes, "file {ino} page {page}");
            } else {
                assert!(files.pages.magic().covers(0, out));
            }
        }
        let past = model.bytes.len().div_ceil(PAGE_SIZE);
        assert!((past..bitmap.len() * 8).all(|page| bitmap[page / 8] >> (page % 8) & 1 == 0));
        let slot = opened.slot.expect("slots are enough");
        let view = files.file_table().load(slot);
        assert_eq!(view.size, model.bytes.len() as u64);
        assert_eq!(view.generation, files.layout(&opened.file, FilePage(0), 1).generation);
        drop(opened.file);
        assert!(files.close(OWNER, opened.filekey).expect("closes")[0].last);
    }
}

fn run(ops: &[Op]) {
    let mut world = World {
        storage: Storage::new(POOL_PAGES, FRAMES),
        model: (1..=FILES).map(|ino| (ino, Contents::default())).collect(),
        shared: SharedMemory::new("source", 1 << 20).expect("memory"),
        count: 0,
    };
    (1..=FILES).for_each(|ino| world.storage.meta.create(inode(ino)));
    for op in ops {
        world.apply(op);
        world.check();
    }
    // At the end every byte is compared, also after a restart that read all of it from SSD.
    for restart in [false, true] {
        if restart {
            world.apply(&Op::Restart);
            world.check();
        }
        for ino in 1..=FILES {
            let len = world.model[&ino].bytes.len();
            world.apply(&Op::Read { ino, offset: 0, len: len.max(1) });
        }
    }
}

proptest! {
    #[test]
    fn files_are_what_was_written(ops in prop::collection::vec(op(), 1..50)) {
        run(&ops);
    }
}
