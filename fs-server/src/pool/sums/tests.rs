//! Verified pages, accepted pages, and crashes, on a simulated disk.

use super::*;
use crate::bits;
use crate::pool::aligned_buf::AlignedBuf;
use crate::pool::disk::{Disk, IoBuffer, IoDone, IoKind, IoRequest};
use crate::pool::simdisk::{SECTOR_BYTES, SimDisk, SimFault, SimMode};
use cuttlefs_common::ids::PAGE_SIZE_U64;
use cuttlefs_common::memory::SharedMemory;
use cuttlefs_common::world::{Random, SeededRandom};
use futures_lite::future::{block_on, poll_once};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

/// Three zones, the last one short.
const PAGES: u64 = 2 * ZONE_PAGES + 40;

/// A disk and a store of marks.
struct Medium {
    disk: SimDisk,
    marks: Arc<MemoryMarks>,
}

impl std::ops::Deref for Medium {
    type Target = SimDisk;

    fn deref(&self) -> &SimDisk {
        &self.disk
    }
}

impl Medium {
    fn crash(&self, random: &SeededRandom) {
        self.disk.crash(random);
        self.marks.crash(random);
    }
}

/// A formatted medium.
fn medium(seed: u64) -> Medium {
    let layout = SumLayout::new([PAGES]);
    let frames = Arc::new(SharedMemory::new("frames", PAGE_SIZE).expect("memfd"));
    let disk = SimDisk::seeded(layout.all_pages(), frames, seed);
    disk.format(&layout);
    Medium { disk, marks: Arc::default() }
}

fn start(medium: &Medium, written: impl IntoIterator<Item = u64>) -> SummedDisk {
    let frames = Arc::new(SharedMemory::new("frames", PAGE_SIZE).expect("memfd"));
    let written = bits::of(PAGES, written.into_iter().map(|page| page..page + 1));
    // The cache has room for one block of sums, so that blocks are read from the disk again and again.
    let (layout, marks) = (SumLayout::new([PAGES]), medium.marks.clone());
    let sums = PageSums::new(layout, PAGE_SIZE, written, marks.marked(), marks);
    SummedDisk::new(Rc::new(medium.disk.clone()), frames, Arc::new(sums))
}

fn stamp(page: u64, version: u8) -> [u8; PAGE_SIZE] {
    std::array::from_fn(|at| version ^ (page as u8).wrapping_mul(31) ^ (at / 5) as u8)
}

fn write(page: u64, version: u8) -> IoRequest {
    let mut buffer = AlignedBuf::unfilled(PAGE_SIZE);
    buffer.as_mut_slice().copy_from_slice(&stamp(page, version));
    IoRequest { kind: IoKind::Write, offset: page * PAGE_SIZE_U64, buffer: IoBuffer::Owned(buffer) }
}

fn read(disk: &SummedDisk, page: u64, count: usize) -> IoDone {
    let buffer = IoBuffer::Owned(AlignedBuf::unfilled(count * PAGE_SIZE));
    let request = IoRequest { kind: IoKind::Read, offset: page * PAGE_SIZE_U64, buffer };
    block_on(disk.submit(vec![request])).pop().expect("one result")
}

fn bytes(done: &IoDone) -> &[u8] {
    let IoBuffer::Owned(buffer) = &done.buffer else { panic!("another buffer") };
    buffer.as_slice()
}

fn put(disk: &SummedDisk, page: u64, version: u8) {
    block_on(disk.submit(vec![write(page, version)]))
        .into_iter()
        .for_each(|done| done.result.expect("written"));
}

fn flip(disk: &Medium, page: u64, bit: usize) {
    let mut bytes: [u8; PAGE_SIZE] = disk.peek(page).try_into().expect("a page");
    bytes[bit / 8] ^= 1 << (bit % 8);
    disk.poke(page, &bytes);
}

#[test]
fn golden_sums() {
    // The expected sum was computed bit by bit, by another program.
    assert_eq!(page_sum(PoolPage(0x0102), &[7; PAGE_SIZE]), 0xED48_F797);
    let disk = medium(0);
    let summed = start(&disk, []);
    put(&summed, 3, 9);
    block_on(summed.sync()).expect("synced");
    let sum = page_sum(PoolPage(3), &stamp(3, 9)).to_le_bytes();
    assert_eq!(disk.peek(PAGES)[12..16], sum);
    assert!(disk.peek(PAGES)[16..].iter().all(|byte| *byte == 0));
}

#[test]
fn rot_is_an_error_of_its_page_alone() {
    let disk = medium(0);
    let summed = start(&disk, []);
    (0..10).for_each(|page| put(&summed, page, 1));
    block_on(summed.finish()).expect("a clean end");
    for seed in 0..50 {
        let random = SeededRandom::new(seed);
        let (page, bit) = (random.next_u64() % 10, (random.next_u64() % (PAGE_SIZE as u64 * 8)) as usize);
        let before = disk.peek(page);
        flip(&disk, page, bit);
        let summed = start(&disk, 0..10);
        let error = read(&summed, 0, 10).result.expect_err("it rotted");
        assert!(error.is_rot(), "{error}");
        (0..10).for_each(|other| assert_eq!(error.concerns(PoolPage(other)), other == page, "seed {seed}"));
        assert!(read(&summed, page, 1).result.is_err());
        let verdicts = block_on(summed.examine(0..10)).expect("looked");
        let rotten: Vec<u64> = (0..10).filter(|page| verdicts[*page as usize] == Verdict::Rotten).collect();
        assert_eq!(rotten, [page], "seed {seed}");
        assert_eq!(summed.sums().figures().verified, 9);
        disk.poke(page, &before.try_into().expect("a page"));
        // The page's sum is flipped instead of its bytes: nobody can tell which of the two is right.
        flip(&disk, PAGES, page as usize * 32 + bit % 32);
        let summed = start(&disk, 0..10);
        assert!(read(&summed, page, 1).result.expect_err("its sum rotted").is_rot());
        assert!(read(&summed, (page + 1) % 10, 1).result.is_ok());
        flip(&disk, PAGES, page as usize * 32 + bit % 32);
    }
    // Two pages have the bytes of another page.
    disk.poke(4, &stamp(5, 1));
    disk.poke(7, &disk.peek(6).try_into().expect("a page"));
    let summed = start(&disk, 0..10);
    assert!(read(&summed, 7, 1).result.is_err() && read(&summed, 4, 1).result.is_err());
    // A page that was never written, and a block of sums that reads as zeros.
    assert!(read(&summed, 11, 1).result.is_err());
    disk.poke(PAGES, &[0; PAGE_SIZE]);
    assert!(read(&start(&disk, 0..10), 1, 1).result.is_err());
}

/// A server is killed between setting a mark and flushing it. The next server reads the mark, but a power loss may still take it.
#[test]
fn a_mark_that_a_killed_server_did_not_flush_is_flushed_before_it_is_relied_upon() {
    for seed in 0..40 {
        let disk = medium(seed);
        let summed = start(&disk, []);
        put(&summed, 1, 1);
        block_on(summed.sync()).expect("synced");
        disk.marks.be_late(true);
        {
            let mut overwriting = pin!(summed.submit(vec![write(1, 2)]));
            assert!(block_on(poll_once(&mut overwriting)).is_none(), "a mark comes first");
        }
        disk.marks.be_late(false);
        assert_eq!((disk.marks.marked(), disk.marks.flushes()), (BTreeSet::from([0]), 0));
        let next = start(&disk, [1]);
        put(&next, 1, 3);
        disk.crash(&SeededRandom::new(seed));
        let done = read(&start(&disk, [1]), 1, 1);
        assert!(done.result.is_ok(), "seed {seed}: {:?}", done.result);
    }
}

#[test]
fn a_mark_costs_one_flush_and_a_hot_zone_none() {
    let disk = medium(0);
    let summed = start(&disk, []);
    (0..4).for_each(|page| put(&summed, page, 1));
    assert_eq!(disk.counters().syncs, 0, "pages that nothing names need no mark");
    block_on(summed.sync()).expect("synced");
    (0..4).for_each(|page| put(&summed, page, 2));
    assert_eq!((disk.marks.flushes(), summed.sums().figures().mark_waits), (1, 1));
    for _ in 0..3 {
        put(&summed, 1, 3);
        block_on(summed.sweep()).expect("swept");
        assert_eq!(summed.sums().figures().marked_zones, 1, "it is hot");
    }
    assert_eq!((disk.marks.flushes(), disk.counters().syncs), (1, 1));
    for _ in 0..2 {
        block_on(summed.sweep()).expect("swept");
    }
    assert_eq!((summed.sums().figures().marked_zones, disk.counters().syncs), (0, 2));
    assert!(disk.marks.marked().is_empty());
    put(&summed, 1, 4);
    assert_eq!(disk.marks.flushes(), 2);
    summed.sums().note_allocated(300..302);
    put(&summed, 300, 1);
    assert_eq!((disk.marks.flushes(), disk.counters().syncs), (2, 2));
    // A batch that writes to several zones marks all of them with one flush.
    block_on(summed.sync()).expect("synced");
    for _ in 0..3 {
        block_on(summed.sweep()).expect("swept");
    }
    block_on(summed.submit(vec![write(1, 5), write(300, 5)]))
        .into_iter()
        .for_each(|done| done.result.expect("written"));
    assert_eq!((disk.marks.flushes(), disk.marks.marked()), (3, BTreeSet::from([0, 1])));
}

#[test]
fn a_failed_write_leaves_a_page_without_a_sum() {
    let disk = medium(0);
    let summed = start(&disk, []);
    put(&summed, 1, 1);
    block_on(summed.sync()).expect("synced");
    disk.inject(SimFault { pages: 1..2, kind: Some(IoKind::Write), errno: libc::EIO, times: 1 });
    assert!(block_on(summed.submit(vec![write(1, 2)]))[0].result.is_err());
    assert_eq!(bytes(&read(&summed, 1, 1)), stamp(1, 1), "its bytes are served");
    assert_eq!(summed.sums().figures().unverified, 1);
    block_on(summed.finish()).expect("a clean end");
    let next = start(&disk, [1]);
    assert_eq!(block_on(next.examine(1..2)).expect("looked"), [Verdict::NoSum]);
    assert_eq!(block_on(next.settle(1..2)).expect("settled"), 1);
    assert_eq!(block_on(next.examine(1..2)).expect("looked"), [Verdict::Good]);
    // If a mark cannot be written, the page write that needs it fails; if a sum cannot be written, the sync fails.
    disk.marks.fail(true);
    assert!(block_on(next.submit(vec![write(1, 3)]))[0].result.is_err());
    assert_eq!(bytes(&read(&next, 1, 1)), stamp(1, 1), "it was not begun");
    assert_eq!(next.sums().figures().marked_zones, 0);
    disk.marks.fail(false);
    disk.inject(SimFault { pages: PAGES..PAGES + 9, kind: Some(IoKind::Write), errno: libc::EIO, times: 99 });
    put(&next, 1, 3);
    assert!(block_on(next.sync()).is_err());
}

#[test]
fn an_abandoned_write_leaves_its_zone_marked() {
    let disk = medium(0);
    let summed = start(&disk, []);
    put(&summed, 1, 1);
    block_on(summed.sync()).expect("synced");
    put(&summed, 2, 1);
    put(&summed, 1, 2);
    disk.set_mode(SimMode::Deferred);
    {
        let mut abandoned = summed.submit(vec![write(1, 3)]);
        assert!(block_on(poll_once(&mut abandoned)).is_none());
    }
    while disk.step() {}
    disk.set_mode(SimMode::AtOnce);
    assert_eq!(bytes(&read(&summed, 1, 1)), stamp(1, 3));
    block_on(summed.finish()).expect("an end");
    assert_eq!(summed.sums().figures().marked_zones, 1);
}

/// A device reports only once that it lost something. After a sync that got this error, all other syncs must fail as well.
#[test]
fn a_sync_that_fails_is_everybodys_and_for_good() {
    let disk = medium(0);
    let (summed, other) = {
        let summed = start(&disk, []);
        let frames = Arc::new(SharedMemory::new("frames", PAGE_SIZE).expect("memfd"));
        let other = SummedDisk::new(Rc::new(disk.disk.clone()), frames, summed.sums().clone());
        (summed, other)
    };
    put(&summed, 2, 7);
    disk.fail_next_sync(libc::EIO);
    assert!(block_on(summed.sync()).is_err());
    let error = block_on(other.sync()).expect_err("page 2 is lost");
    assert!(error.to_string().contains("before"), "{error}");
    assert!(block_on(summed.sync()).is_err() && block_on(summed.finish()).is_err());
}

/// Many writers overwrite pages of one zone and each syncs. Then nothing is written for a while, and then another zone is. The same as the regression
/// in `marks_tests`, with a whole `SummedDisk`.
#[test]
fn several_writers_of_one_zone_then_idle_then_another_zone() {
    for seed in 0..60 {
        let disk = medium(seed);
        let summed = start(&disk, []);
        let pages: Vec<u64> = (0..12).chain([ZONE_PAGES]).collect();
        pages.iter().for_each(|page| put(&summed, *page, 1));
        block_on(summed.sync()).expect("synced");
        disk.set_mode(SimMode::Deferred);
        let mut version = 1;
        for _ in 0..3 {
            version += 1;
            let writers = (0..12).map(|page| {
                let summed = summed.clone();
                let write = async move {
                    summed
                        .submit(vec![write(page, version)])
                        .await
                        .remove(0)
                        .result
                        .map_err(|error| error.to_string())?;
                    summed.sync().await.map_err(|error| error.to_string())
                };
                Box::pin(write)
            });
            let mut writers: Vec<_> = writers.collect();
            let random = SeededRandom::new(seed + version as u64);
            while !writers.is_empty() {
                let index = (random.next_u64() % writers.len() as u64) as usize;
                if let Some(result) = block_on(poll_once(&mut writers[index])) {
                    result.expect("written and synced");
                    drop(writers.swap_remove(index));
                }
                if random.next_u64().is_multiple_of(2) {
                    disk.step();
                }
            }
            for _ in 0..3 {
                drive(&disk, summed.sweep(), usize::MAX - 1).expect("ends").expect("swept");
            }
            assert_eq!(summed.sums().figures().marked_zones, 0, "seed {seed}");
            let elsewhere =
                drive(&disk, summed.submit(vec![write(ZONE_PAGES, version)]), 1000).expect("ends");
            assert!(elsewhere[0].result.is_ok());
            drive(&disk, summed.sync(), 1000).expect("ends").expect("synced");
        }
        disk.crash(&SeededRandom::new(seed));
        disk.set_mode(SimMode::AtOnce);
        let next = start(&disk, pages.iter().copied());
        for page in &pages {
            assert_eq!(bytes(&read(&next, *page, 1)), stamp(*page, version), "seed {seed} page {page}");
        }
    }
}

/// Runs the future to its end, or until the disk has done so many steps.
fn drive<T>(disk: &Medium, future: impl Future<Output = T>, steps: usize) -> Option<T> {
    let mut future = pin!(future);
    for _ in 0..=steps {
        if let Some(result) = block_on(poll_once(&mut future)) {
            return Some(result);
        }
        disk.step();
    }
    None
}

/// The versions that a page may hold: the one that was synced last, and all that were written since.
#[derive(Clone, Debug, Default)]
struct Expect {
    versions: Vec<u8>,
    /// An extent of a durable batch has the page.
    is_named: bool,
    /// The page was written in this life of the server and not synced since.
    is_new: bool,
}

impl Expect {
    fn allows(&self, page: u64, found: &[u8]) -> bool {
        (0..PAGE_SIZE).step_by(SECTOR_BYTES).all(|at| {
            let sector = at..at + SECTOR_BYTES;
            self.versions.iter().any(|version| stamp(page, *version)[sector.clone()] == found[sector.clone()])
        })
    }
}

#[test]
fn after_a_crash_nothing_is_rot_and_what_was_synced_is_there() {
    let (mut accepted, mut settled, mut marked) = (0, 0, 0);
    for seed in 0..400 {
        let random = SeededRandom::new(seed);
        let disk = medium(seed);
        let mut pages: BTreeMap<u64, Expect> = BTreeMap::new();
        let below = |bound: u64| random.next_u64() % bound;
        let any_page = || [0, 2 * ZONE_PAGES, 250][below(3) as usize] + below(12);
        // Several lives of a server, each ended by a crash. Each starts with what the life before left.
        for life in 0..3 {
            let named: Vec<u64> =
                pages.iter().filter(|(_, page)| page.is_named).map(|(page, _)| *page).collect();
            let summed = start(&disk, named.iter().copied());
            for page in &named {
                let done = read(&summed, *page, 1);
                let context = format!("seed {seed} life {life} page {page}");
                assert!(done.result.is_ok(), "{context}: {:?}", done.result);
                assert!(pages[page].allows(*page, bytes(&done)), "{context}");
                // A second read returns the same bytes. They may be torn between versions.
                assert_eq!(bytes(&read(&summed, *page, 1)), bytes(&done), "{context}");
            }
            accepted += summed.sums().figures().accepted;
            marked += summed.sums().figures().marked_zones;
            if below(2) == 0 {
                while let Some(zone) = summed.next_recovering() {
                    settled += block_on(summed.settle(zone.clone())).expect("settled");
                    summed.recovered(&zone);
                }
                for page in &named {
                    let verdict = block_on(summed.examine(*page..page + 1)).expect("looked")[0];
                    assert_eq!(verdict, Verdict::Good, "seed {seed} life {life} page {page}");
                }
            }
            pages.retain(|_, page| page.is_named);
            disk.set_mode(SimMode::Deferred);
            let ops = 1 + below(40);
            for op in 0..ops {
                // The last operation is cut off after a few disk steps.
                let steps = if op + 1 == ops { below(8) as usize } else { usize::MAX };
                match below(10) {
                    0..6 => {
                        let version = 10 + (life * 80 + op) as u8;
                        let chosen: BTreeSet<u64> = (0..=below(3)).map(|_| any_page()).collect();
                        for page in &chosen {
                            if !pages.contains_key(page) {
                                summed.sums().note_allocated(*page..page + 1);
                            }
                            let page = pages.entry(*page).or_default();
                            page.versions.push(version);
                            page.is_new = true;
                        }
                        let batch = chosen.iter().map(|page| write(*page, version)).collect();
                        drive(&disk, summed.submit(batch), steps);
                    }
                    6..8 => {
                        if drive(&disk, summed.sync(), steps).is_some() {
                            for page in pages.values_mut().filter(|page| page.is_new) {
                                let newest = *page.versions.last().expect("written");
                                page.versions = vec![newest];
                                (page.is_named, page.is_new) = (true, false);
                            }
                        }
                    }
                    8 => drop(drive(&disk, summed.sweep(), steps)),
                    _ => {
                        let page = any_page();
                        if pages.contains_key(&page)
                            && let Some(done) = drive(&disk, block_on_read(&summed, page), steps)
                        {
                            done.expect("readable while the server runs");
                        }
                    }
                }
            }
            drop(summed);
            // A kill loses no write that reached the device; a power loss loses some of them.
            if below(4) > 0 {
                disk.crash(&random);
            } else {
                while disk.step() {}
            }
            disk.set_mode(SimMode::AtOnce);
            pages.values_mut().for_each(|page| page.is_new = false);
        }
        // The last server recovers all zones and stops cleanly: from now on any flipped bit is rot.
        let named: Vec<u64> = pages.iter().filter(|(_, page)| page.is_named).map(|(page, _)| *page).collect();
        let summed = start(&disk, named.iter().copied());
        while let Some(zone) = summed.next_recovering() {
            block_on(summed.settle(zone.clone())).expect("settled");
            summed.recovered(&zone);
        }
        block_on(summed.finish()).expect("a clean end");
        if let Some(page) = named.first() {
            flip(&disk, *page, below(PAGE_SIZE as u64 * 8) as usize);
            let summed = start(&disk, named.iter().copied());
            for page in &named {
                assert_eq!(
                    read(&summed, *page, 1).result.is_err(),
                    page == &named[0],
                    "seed {seed} page {page}"
                );
            }
        }
    }
    println!(
        "seeds 0 to 399: {marked} zones were marked, {accepted} reads accepted, {settled} pages settled"
    );
    assert!(accepted > 100 && settled > 100 && marked > 100, "{accepted} {settled} {marked}");
}

async fn block_on_read(disk: &SummedDisk, page: u64) -> Result<(), String> {
    let buffer = IoBuffer::Owned(AlignedBuf::unfilled(PAGE_SIZE));
    let request = IoRequest { kind: IoKind::Read, offset: page * PAGE_SIZE_U64, buffer };
    let done = disk.submit(vec![request]).await.pop().expect("one result");
    done.result.map_err(|error| error.to_string())
}
